"""Attention that attends to everything alike."""

from typing import Any

import jax.numpy as jnp

import attn_jax
from attn_jax.typing import Array


def uniform_attention(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """The mean of the values that a query may see: equal logits are equal weights."""
    return attn_jax.dot_product_attention(jnp.zeros_like(query), key, value, **options)
