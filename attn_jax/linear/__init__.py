"""Attention as a recurrence: linear attention, retention and state spaces on one engine, in three forms that agree."""

from attn_jax.linear.attention import linear_attention
from attn_jax.linear.feature_maps import FeatureMap, RandomFeatures, draw_features
from attn_jax.linear.recurrence import LinearState, linear_recurrence
from attn_jax.linear.retention import retention
from attn_jax.linear.state_space import state_space

__all__ = [
    "FeatureMap",
    "LinearState",
    "RandomFeatures",
    "draw_features",
    "linear_attention",
    "linear_recurrence",
    "retention",
    "state_space",
]
