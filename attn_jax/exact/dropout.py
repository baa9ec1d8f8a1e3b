"""Dropout of attention weights that does not depend on how the square is tiled."""

import jax
import jax.numpy as jnp

from attn_jax.exact.arguments import Dropout
from attn_jax.hashing import combine
from attn_jax.lazy import Tile
from attn_jax.typing import Array, Bool


def keep_mask(dropout: Dropout, tile: Tile) -> Bool[Array, "*b n t s"]:
    """Which weights of the tile are kept.

    The bit of an entry is a hash of the key and of its indices (batch item, head, query, key). Under `vmap` the
    mapped axis has no index: map the key as well.
    """
    *batch, num_heads, _, _ = tile.square.extent
    first, second = _words(dropout.key)
    rank = len(tile.sizes)
    matrices = jnp.zeros((1,) * rank, jnp.int32)
    for axis, length in enumerate((*batch, num_heads)):
        matrices = matrices * length + _along(tile.indices(axis), axis, rank)
    row_bits = combine(first, matrices, _along(tile.query_indices, rank - 2, rank))
    column_bits = combine(second, _along(tile.key_indices, rank - 1, rank))
    # A bit costs one hash: the words of its row and of its column, stirred together.
    bits = combine(row_bits, column_bits)
    return bits >= jnp.uint32(min(round(dropout.rate * 2**32), 2**32 - 1))


def _along(x: Array, axis: int, rank: int) -> Array:
    return x.reshape((1,) * axis + (-1,) + (1,) * (rank - 1 - axis))


def apply_dropout(dropout: Dropout, weights: Array, tile: Tile) -> Array:
    """Weights `p / (1 - rate)` where kept, else 0."""
    return jnp.where(keep_mask(dropout, tile), weights / (1.0 - dropout.rate), 0.0)


def _words(key: Array) -> tuple[Array, Array]:
    words = jax.random.key_data(key).astype(jnp.uint32)
    # Keys of other generators have four words: fold them into two.
    folded = words.reshape(-1, 2)
    first, second = folded[0, 0], folded[0, 1]
    for pair in folded[1:]:
        first, second = combine(first, pair[0]), combine(second, pair[1])
    return first, second
