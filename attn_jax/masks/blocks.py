"""Masks of blocks: block i of size `block` holds the positions from `i · block` on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.hashing import combine
from attn_jax.lazy import Bounds, Grid, Square, Tile
from attn_jax.masks.base import Mask
from attn_jax.masks.counts import LAST, block_of


class BlockDiagonal(Mask):
    """Queries and keys of one block: `q div block = k div block`.

    Attributes:
        block: how many tokens a block has.

    Raises:
        ValueError, TypeError: a number below 1 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.BlockDiagonal(2), 4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    """

    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checks.positive_int("block", self.block))

    def evaluate(self, tile: Tile) -> jax.Array:
        return block_of(tile.query_positions, self.block) == block_of(tile.key_positions, self.block)

    def bounds(self, grid: Grid) -> Bounds:
        first_query, last_query = (block_of(position, self.block) for position in grid.query_range)
        first_key, last_key = (block_of(position, self.block) for position in grid.key_range)
        one = (first_query == last_query) & (first_key == last_key)
        return (first_query <= last_key) & (first_key <= last_query), one & (first_query == first_key)


class RandomBlocks(Mask):
    """Each block of queries sees `per_row` blocks of keys drawn by `seed` (Zaheer et al. 2020, section 2).

    The `ceil(length / block)` blocks of keys are cut into `per_row` equal strata and one block is drawn from each, so
    the draws are distinct, and every tiling and every shard finds the same ones.

    Attributes:
        seed: which blocks are drawn.
        per_row: how many blocks of keys; all of them where there are no more.
        block: how many tokens a block has.
        length: of the sequence; None for the number of keys, which says it only where keys sit at 0..S-1.

    Raises:
        ValueError, TypeError: a number below its least (1; 0 for `seed`) or no integer; in use, no length where
            `key_positions` are given.

    >>> from attn_jax import masks
    >>> visible = masks.materialize(masks.RandomBlocks(seed=0, per_row=2, block=2), 8)
    >>> visible.sum(axis=1).tolist()  # two blocks of two keys
    [4, 4, 4, 4, 4, 4, 4, 4]
    >>> bool((visible[0::2] == visible[1::2]).all())  # both queries of a block see the same ones
    True
    """

    seed: int
    per_row: int
    block: int
    length: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("per_row", 1), ("block", 1)):
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=least))
        if self.length is not None:
            length = checks.positive_int("length", self.length)
            if length > LAST:
                raise ValueError(f"length must be at most {LAST}, got {length}")
            object.__setattr__(self, "length", length)

    def evaluate(self, tile: Tile) -> jax.Array:
        query_block, key_block = (block_of(x, self.block) for x in (tile.query_positions, tile.key_positions))
        drawn = self._drawn(tile.square, query_block)
        if drawn is None:
            return jnp.ones((1,) * len(tile.sizes), bool)
        visible = jnp.zeros_like(query_block + key_block, bool)
        for block in drawn:
            visible |= key_block == block
        return visible

    def bounds(self, grid: Grid) -> Bounds:
        first, last = (block_of(position, self.block) for position in grid.query_range)
        first_key, last_key = (block_of(position, self.block) for position in grid.key_range)
        if self._drawn(grid.square, first) is None:
            return grid.constant(True), grid.constant(True)
        if grid.queries_follow:
            steps, unknown = (grid.tile[0] - 1) // self.block + 2, grid.constant(False)
        else:  # which blocks lie between the first and the last is not known
            steps, unknown = 1, first < last
        some, every = unknown, ~unknown
        for step in range(steps):  # each block of queries that a tile may touch
            touched = first + step <= last
            drawn = self._drawn(grid.square, first + step) or ()
            seen = sum(((first_key <= block) & (block <= last_key)).astype(np.int32) for block in drawn)
            some, every = some | (touched & (seen > 0)), every & (~touched | (seen == last_key - first_key + 1))
        return some, every

    def _drawn(self, square: Square, query_block: Any) -> list[Any] | None:
        """The blocks of keys that each block of queries sees, one array for each stratum; None for all of them."""
        if self.length is None and not square.keys_in_place:
            raise ValueError("length of RandomBlocks must be given where key_positions are, got None")
        blocks = -(-(self.length or square.extent[-1]) // self.block)
        if self.per_row >= blocks:
            return None
        # A NumPy constant would be one of a kernel's captured arrays, which kernels refuse.
        library, ones = jnp if isinstance(query_block, jax.Array) else np, (1,) * query_block.ndim
        drawn = []
        for stratum in range(self.per_row):
            first, end = stratum * blocks // self.per_row, (stratum + 1) * blocks // self.per_row
            bits = combine(library.full(ones, self.seed % 2**32, np.uint32), query_block, library.full(ones, stratum))
            drawn.append(first + (bits % np.uint32(end - first)).astype(query_block.dtype))
        return drawn
