"""Exact softmax attention: one semantics, several implementations."""

from attn_jax.exact.attention import Choice, attention_weights, choose_implementation, dot_product_attention
from attn_jax.exact.cache import KVCache, cached_attention, empty_cache
from attn_jax.exact.merge import merge_attention
from attn_jax.exact.tiles import Blockwise

__all__ = [
    "Blockwise",
    "Choice",
    "KVCache",
    "attention_weights",
    "cached_attention",
    "choose_implementation",
    "dot_product_attention",
    "empty_cache",
    "merge_attention",
]
