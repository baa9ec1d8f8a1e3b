"""Masks: who may attend to whom. True = may attend.

An attention pattern is a small lazy object that reads positions and is evaluated on any tile of (queries × keys):

    Causal() & LocalWindow(128, 0)                          sliding window
    LocalWindow(64, 64) | GlobalTokens(2)                   Longformer (Beltagy et al. 2020)
    ... | RandomBlocks(0, per_row=3, block=64)              BigBird (Zaheer et al. 2020)
    Causal() & (LocalWindow(31, 0) | Strided(32))           strided Sparse Transformer (Child et al. 2019)
    Causal() & Segments(ids)                                packed documents

combined by `&`, `|` and `~`. In the formulas q is the position of the query, k that of the key.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.hashing import combine
from attn_jax.lazy import Lazy, Tile, whole
from attn_jax.typing import ArrayLike, Bool, Int

_FAR = 2**31 - 1  # farther than any two positions are apart


class Mask(Lazy):
    """A lazy mask."""

    def evaluate(self, tile: Tile) -> Bool[jax.Array, "*#b #n #t #s"]:
        """The mask on `tile`: boolean, of the square's rank, with 1 on axes along which it is constant."""
        raise NotImplementedError

    def __and__(self, other: "Mask | ArrayLike") -> "Mask":
        return And(self, as_mask("mask", other))

    def __or__(self, other: "Mask | ArrayLike") -> "Mask":
        return Or(self, as_mask("mask", other))

    def __invert__(self) -> "Mask":
        return Not(self)


class And(Mask):
    """Both masks allow it."""

    left: Mask
    right: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return self.left.evaluate(tile) & self.right.evaluate(tile)


class Or(Mask):
    """One of the masks allows it."""

    left: Mask
    right: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return self.left.evaluate(tile) | self.right.evaluate(tile)


class Not(Mask):
    """The mask does not allow it."""

    mask: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return ~self.mask.evaluate(tile)


class Causal(Mask):
    """No key from the future: `k <= q`."""

    def evaluate(self, tile: Tile) -> jax.Array:
        return tile.key_positions <= tile.query_positions


class LocalWindow(Mask):
    """Keys nearby, both ends included: `q - left <= k <= q + right`. None leaves a side open.

    `LocalWindow(w, w)` is `local_window_size=w`.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=0))

    def evaluate(self, tile: Tile) -> jax.Array:
        distance = tile.key_positions - tile.query_positions
        inside = jnp.ones_like(distance, bool)
        if self.left is not None:
            inside &= distance >= -min(self.left, _FAR)
        if self.right is not None:
            inside &= distance <= min(self.right, _FAR)
        return inside


class SlidingWindow(Mask):
    """The last `width` keys, the query's own included: `q - width < k <= q`."""

    width: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", checks.positive_int("width", self.width))

    def evaluate(self, tile: Tile) -> jax.Array:
        return LocalWindow(self.width - 1, 0).evaluate(tile)


class PrefixLM(Mask):
    """A prefix that all may see, causal after it: `k < n or k <= q` (Raffel et al. 2020, section 3.2.1).

    `n` is a number, or an int array `[*B]` for a prefix per item.
    """

    n: int | Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count_or_array("n", self.n))

    def evaluate(self, tile: Tile) -> jax.Array:
        n = tile.per_item("n", jnp.asarray(self.n))
        return (tile.key_positions < n) | (tile.key_positions <= tile.query_positions)


class GlobalTokens(Mask):
    """The first `n` positions see all and are seen by all: `k < n or q < n` (Beltagy et al. 2020, section 3.1)."""

    n: int | Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count_or_array("n", self.n))

    def evaluate(self, tile: Tile) -> jax.Array:
        n = tile.per_item("n", jnp.asarray(self.n))
        return (tile.key_positions < n) | (tile.query_positions < n)


class Strided(Mask):
    """Every `stride`-th key, counted from the query: `(q - k) mod stride = 0` (Child et al. 2019, section 4.2)."""

    stride: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", checks.positive_int("stride", self.stride))

    def evaluate(self, tile: Tile) -> jax.Array:
        return (tile.query_positions - tile.key_positions) % min(self.stride, _FAR) == 0


class Dilated(Mask):
    """A window with gaps: `k = q + o · dilation` for o in `-left..right` (Beltagy et al. 2020, section 3.1)."""

    left: int
    right: int
    dilation: int

    def __post_init__(self) -> None:
        for name, least in (("left", 0), ("right", 0), ("dilation", 1)):
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=least))

    def evaluate(self, tile: Tile) -> jax.Array:
        window = LocalWindow(self.left * self.dilation, self.right * self.dilation)
        return window.evaluate(tile) & Strided(self.dilation).evaluate(tile)


class RandomBlocks(Mask):
    """Each block of queries sees `per_row` blocks of keys drawn by `seed` (Zaheer et al. 2020, section 2).

    The `ceil(length / block)` blocks of keys are cut into `per_row` equal strata and one block is drawn from each, so
    the draws are distinct, and every tiling and every shard finds the same ones. `length` is that of the sequence:
    None for the number of keys, which says it only where keys sit at 0..S-1.
    """

    seed: int
    per_row: int
    block: int
    length: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("per_row", 1), ("block", 1)):
            object.__setattr__(self, name, checks.positive_int(name, getattr(self, name), least=least))
        if self.length is not None:
            object.__setattr__(self, "length", checks.positive_int("length", self.length))

    def evaluate(self, tile: Tile) -> jax.Array:
        if self.length is None and not tile.keys_in_place:
            raise ValueError("length of RandomBlocks must be given where key_positions are, got None")
        blocks = -(-(self.length or tile.square[-1]) // self.block)
        if self.per_row >= blocks:
            return jnp.ones_like(tile.key_positions + tile.query_positions, bool)
        query_block, key_block = tile.query_positions // self.block, tile.key_positions // self.block
        seed = jnp.asarray(self.seed % 2**32, jnp.uint32)
        visible = jnp.zeros_like(query_block + key_block, bool)
        for stratum in range(self.per_row):
            first, end = stratum * blocks // self.per_row, (stratum + 1) * blocks // self.per_row
            bits = combine(seed, query_block, jnp.asarray(stratum))
            visible |= key_block == first + (bits % jnp.uint32(end - first)).astype(key_block.dtype)
        return visible


class Padding(Mask):
    """Keys of the first `lengths` positions: `k < lengths`, int `[*B]`."""

    lengths: Int[ArrayLike, "*b"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _counts("lengths", self.lengths))

    def evaluate(self, tile: Tile) -> jax.Array:
        return tile.key_positions < tile.per_item("lengths", jnp.asarray(self.lengths))


class Segments(Mask):
    """Queries and keys of one segment: equal ids. For packed documents.

    `query_ids` is int `[T]` or `[*B, T]`, `key_ids` int `[S]` or `[*B, S]` (None: the query's ids). Ids belong to
    entries, not to positions.
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


class Array(Mask):
    """A boolean array, `[T, S]` or of full rank and broadcastable to `[*B, N, T, S]`, as a mask."""

    values: Bool[ArrayLike, "..."]

    def __post_init__(self) -> None:
        values = checks.as_array("mask", self.values)
        if values.dtype != bool:
            raise TypeError(
                f"mask must be boolean, True = may attend; got dtype {values.dtype} (an additive mask is a bias)"
            )
        object.__setattr__(self, "values", values)

    def evaluate(self, tile: Tile) -> jax.Array:
        return tile.full_rank("mask", jnp.asarray(self.values))


def as_mask(name: str, mask: Any) -> Mask:
    """`mask` itself if lazy, else wrapped in `Array`."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Lazy):
        raise TypeError(f"{name} must be a mask, got the {type(mask).__module__}.{type(mask).__name__}")
    return Array(mask)


def materialize(mask: Mask, query_length: int, key_length: int | None = None) -> Bool[jax.Array, "t s"]:
    """The mask as an array, to look at. Keep it small: this is the square that lazy masks avoid.

    Args:
        mask: a mask that does not depend on the batch item or the head.
        query_length: T.
        key_length: S; None for T.

    Returns:
        Boolean `[T, S]`, for queries at `0..T-1` and keys at `0..S-1`.

    >>> materialize(SlidingWindow(2), 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    query_length = checks.positive_int("query_length", query_length, least=0)
    key_length = query_length if key_length is None else checks.positive_int("key_length", key_length, least=0)
    square = (1, query_length, key_length)
    values = as_mask("mask", mask).evaluate(whole(square, jnp.arange(query_length), jnp.arange(key_length)))
    return jnp.broadcast_to(values, square)[0]


def _count_or_array(name: str, x: Any) -> Any:
    """A number, at most what int32 holds, or an array of them."""
    if isinstance(x, numbers.Integral):
        return min(checks.positive_int(name, x, least=0), _FAR)
    return _counts(name, x)


def _counts(name: str, x: Any) -> jax.Array:
    counts = checks.wide_integers(name, x)
    checks.within(name, counts, 0)
    return counts
