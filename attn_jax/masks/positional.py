"""Masks that depend on positions and on static numbers: known, tile by tile, before any value is."""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.lazy import Bounds, Grid, Tile
from attn_jax.masks.base import Mask
from attn_jax.masks.counts import LAST, before, count_or_array, per_item, shift
from attn_jax.typing import ArrayLike, Int


class Causal(Mask):
    """No key from the future: `k <= q`.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.Causal(), 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    def evaluate(self, tile: Tile) -> jax.Array:
        return tile.key_positions <= tile.query_positions

    def bounds(self, grid: Grid) -> Bounds:
        return LocalWindow(None, 0).bounds(grid)


class LocalWindow(Mask):
    """Keys nearby, both ends included: `q - left <= k <= q + right`.

    `LocalWindow(w, w)` is `local_window_size=w`.

    Attributes:
        left, right: how far; None leaves a side open.

    Raises:
        ValueError, TypeError: a number below 0 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.LocalWindow(1, 1), 4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=0))

    def evaluate(self, tile: Tile) -> jax.Array:
        inside = jnp.ones((1,) * len(tile.sizes), bool)
        if self.left is not None:
            inside &= tile.key_positions >= shift(tile.query_positions, -self.left)
        if self.right is not None:
            inside &= tile.key_positions <= shift(tile.query_positions, self.right)
        return inside

    def bounds(self, grid: Grid) -> Bounds:
        (first_query, last_query), (first_key, last_key) = grid.query_range, grid.key_range
        some = every = grid.constant(True)
        if self.left is not None:
            some = some & (last_key >= shift(first_query, -self.left))
            every = every & (first_key >= shift(last_query, -self.left))
        if self.right is not None:
            some = some & (first_key <= shift(last_query, self.right))
            every = every & (last_key <= shift(first_query, self.right))
        return some, every


class SlidingWindow(Mask):
    """The last `width` keys, the query's own included: `q - width < k <= q`.

    Attributes:
        width: how many keys.

    Raises:
        ValueError, TypeError: a number below 1 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.SlidingWindow(2), 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", checks.positive_int("width", self.width))

    def evaluate(self, tile: Tile) -> jax.Array:
        return LocalWindow(self.width - 1, 0).evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        return LocalWindow(self.width - 1, 0).bounds(grid)


class PrefixLM(Mask):
    """A prefix that all may see, causal after it: `k < n or k <= q` (Raffel et al. 2020, section 3.2.1).

    Attributes:
        n: the length of the prefix: a number, or an int array `[*B]` for one per item.

    Raises:
        ValueError, TypeError: a number below 0 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.PrefixLM(2), 4).astype(int).tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    n: int | Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", count_or_array("n", self.n))

    def evaluate(self, tile: Tile) -> jax.Array:
        return before(tile.key_positions, per_item(tile, "n", self.n)) | Causal().evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        (first_key, last_key), n = grid.key_range, per_item(grid.square, "n", self.n)
        some, every = Causal().bounds(grid)
        return before(first_key, n) | some, before(last_key, n) | every


class GlobalTokens(Mask):
    """The first `n` positions see all and are seen by all: `k < n or q < n` (Beltagy et al. 2020, section 3.1).

    Attributes:
        n: how many: a number, or an int array `[*B]` for one per item.

    Raises:
        ValueError, TypeError: a number below 0 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.GlobalTokens(1), 4).astype(int).tolist()
    [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    """

    n: int | Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", count_or_array("n", self.n))

    def evaluate(self, tile: Tile) -> jax.Array:
        n = per_item(tile, "n", self.n)
        return before(tile.key_positions, n) | before(tile.query_positions, n)

    def bounds(self, grid: Grid) -> Bounds:
        (first_query, last_query), (first_key, last_key) = grid.query_range, grid.key_range
        n = per_item(grid.square, "n", self.n)
        return before(first_key, n) | before(first_query, n), before(last_key, n) | before(last_query, n)


class Strided(Mask):
    """Every `stride`-th key, counted from the query: `(q - k) mod stride = 0` (Child et al. 2019, section 4.3).

    Attributes:
        stride: the distance from one to the next.

    Raises:
        ValueError, TypeError: a number below 1 or no integer.

    >>> from attn_jax import masks
    >>> masks.materialize(masks.Strided(2), 4).astype(int).tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    stride: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", checks.positive_int("stride", self.stride))

    def evaluate(self, tile: Tile) -> jax.Array:
        if self.stride > LAST:  # farther than filled positions are apart
            return tile.query_positions == tile.key_positions
        return tile.query_positions % self.stride == tile.key_positions % self.stride

    def bounds(self, grid: Grid) -> Bounds:
        if self.stride > LAST:
            return LocalWindow(0, 0).bounds(grid)
        (first_query, last_query), (first_key, last_key) = grid.query_range, grid.key_range
        # The largest q - k of a tile is this far above a multiple; below it lie as many others as the ranges are long.
        above = (last_query % self.stride - first_key % self.stride) % self.stride
        queries, keys = last_query - first_query, last_key - first_key
        wide = (queries < 0) | (keys < 0)  # longer than int32 holds
        some = wide | (keys >= above - queries)
        one = (queries == 0) & (keys == 0)
        return some, some & one if self.stride > 1 else some


class Dilated(Mask):
    """A window with gaps: `k = q + o · dilation` for o in `-left..right` (Beltagy et al. 2020, section 3.1).

    Attributes:
        left, right: how many keys on either side.
        dilation: the distance from one to the next.

    Raises:
        ValueError, TypeError: a number below its least (0; 1 for `dilation`) or no integer.

    >>> from attn_jax import masks
    >>> print(masks.materialize(masks.Dilated(1, 1, dilation=2), 5).astype(int))
    [[1 0 1 0 0]
     [0 1 0 1 0]
     [1 0 1 0 1]
     [0 1 0 1 0]
     [0 0 1 0 1]]
    """

    left: int
    right: int
    dilation: int

    def __post_init__(self) -> None:
        for name, least in (("left", 0), ("right", 0), ("dilation", 1)):
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=least))

    def evaluate(self, tile: Tile) -> jax.Array:
        return self._pieces().evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        return self._pieces().bounds(grid)

    def _pieces(self) -> Mask:
        return LocalWindow(self.left * self.dilation, self.right * self.dilation) & Strided(self.dilation)
