"""Flax NNX modules composed of the pure functions: the links of the chain with their parameters."""

from attn_jax.nn.attention import MultiHeadAttention
from attn_jax.nn.block import TransformerBlock
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.flax_adapter import as_attention_fn
from attn_jax.nn.mixers import MixerOptions
from attn_jax.nn.mlp import MLP
from attn_jax.nn.norms import LayerNorm, RMSNorm
from attn_jax.nn.options import LayerOptions
from attn_jax.nn.transformer import Transformer

__all__ = [
    "MLP",
    "LayerNorm",
    "LayerOptions",
    "MixerOptions",
    "MultiHeadAttention",
    "RMSNorm",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "as_attention_fn",
]
