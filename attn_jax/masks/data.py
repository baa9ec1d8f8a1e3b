"""Masks that come with the data, in arrays: lengths and segments."""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.lazy import Bounds, Grid, Tile
from attn_jax.masks.base import Mask
from attn_jax.masks.counts import counts
from attn_jax.typing import ArrayLike, Int


class Padding(Mask):
    """Keys of the first `lengths` positions: `k < lengths`.

    Attributes:
        lengths: int `[*B]`, not negative.

    Raises:
        ValueError, TypeError: a length below 0 or no integer.

    >>> import attn_jax
    >>> x = jnp.zeros((2, 3, 1, 4))  # two items of three tokens
    >>> attn_jax.attention_weights(x, x, mask=attn_jax.masks.Padding(jnp.array([1, 2])))[:, 0, 0].tolist()
    [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """

    lengths: Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", counts("lengths", self.lengths))

    def evaluate(self, tile: Tile) -> jax.Array:
        return tile.key_positions < tile.per_item("lengths", jnp.asarray(self.lengths))

    def bounds(self, grid: Grid) -> Bounds:
        (first_key, last_key), lengths = grid.key_range, grid.square.per_item("lengths", jnp.asarray(self.lengths))
        return first_key < lengths, last_key < lengths


class Segments(Mask):
    """Queries and keys of one segment: equal ids. For packed documents.

    Ids belong to entries, not to positions.

    Attributes:
        query_ids: int `[T]` or `[*B, T]`.
        key_ids: int `[S]` or `[*B, S]`; None for the query's ids.

    Raises:
        TypeError: ids that are no integers.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.Segments(jnp.array([7, 7, 8])), 3).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    query_ids: Int[ArrayLike, "*#b t"]
    key_ids: Int[ArrayLike, "*#b s"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_ids", checks.wide_integers("query_ids", self.query_ids))
        if self.key_ids is not None:
            object.__setattr__(self, "key_ids", checks.wide_integers("key_ids", self.key_ids))

    def evaluate(self, tile: Tile) -> jax.Array:
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        queries = tile.per_query("query_ids", jnp.asarray(self.query_ids))
        return queries == tile.per_key("key_ids", jnp.asarray(key_ids))

    def bounds(self, grid: Grid) -> Bounds:
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        square = grid.square
        queries = square.keep_rows(square.per_query("query_ids", jnp.asarray(self.query_ids)))
        keys = square.per_key("key_ids", jnp.asarray(key_ids))
        (least, most), (first, last) = ((grid.reduce(x, "min"), grid.reduce(x, "max")) for x in (queries, keys))
        return (least <= last) & (first <= most), (least == most) & (first == last) & (least == first)
