"""Exact softmax attention: one semantics, several implementations."""

from attn_jax.exact.attention import Choice, attention_weights, choose_implementation, dot_product_attention
from attn_jax.exact.tiles import Blockwise

__all__ = ["Blockwise", "Choice", "attention_weights", "choose_implementation", "dot_product_attention"]
