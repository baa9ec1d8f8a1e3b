"""Exact softmax attention: one semantics, several implementations."""

from attn_jax.exact.attention import Choice, attention_weights, choose_implementation, dot_product_attention

__all__ = ["Choice", "attention_weights", "choose_implementation", "dot_product_attention"]
