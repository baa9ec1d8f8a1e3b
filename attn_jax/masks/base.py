"""What a mask is, how masks combine, and a boolean array as one."""

from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.lazy import Bounds, Grid, Lazy, Tile
from attn_jax.typing import ArrayLike, Bool


class Mask(Lazy):
    """A lazy mask.

    One of your own reads positions, and then runs tile by tile as the others do:

    >>> from attn_jax import masks
    >>> class SameParity(masks.Mask):
    ...     def evaluate(self, tile):
    ...         return tile.query_positions % 2 == tile.key_positions % 2
    >>> masks.materialize(masks.Causal() & SameParity(), 4).astype(int).tolist()
    [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    def evaluate(self, tile: Tile) -> Bool[jax.Array, "*#b #n #t #s"]:
        """The mask on `tile`: boolean, of the square's rank, with 1 on axes along which it is constant."""
        raise NotImplementedError(f"{type(self).__name__} must define evaluate(tile)")

    def bounds(self, grid: Grid) -> Bounds:
        """Per tile of `grid`, before any arithmetic: whether it may hold a True, and whether it holds nothing else.

        Boolean, `[*B or 1, N or 1, nq or 1, nk or 1]`; NumPy where it follows from static numbers. A mask that cannot
        tell says that it may, and that it does not.
        """
        return grid.constant(True), grid.constant(False)

    def __and__(self, other: "Mask | ArrayLike") -> "Mask":
        return And(self, as_mask("mask", other))

    def __or__(self, other: "Mask | ArrayLike") -> "Mask":
        return Or(self, as_mask("mask", other))

    def __invert__(self) -> "Mask":
        return Not(self)


class And(Mask):
    """Both masks allow it: `left & right`.

    >>> from attn_jax import masks
    >>> window = masks.Causal() & masks.LocalWindow(1, 1)
    >>> window == masks.And(masks.Causal(), masks.LocalWindow(1, 1))
    True
    >>> masks.materialize(window, 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """

    left: Mask
    right: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return self.left.evaluate(tile) & self.right.evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        (some, every), (also, all_of_them) = self.left.bounds(grid), self.right.bounds(grid)
        return some & also, every & all_of_them


class Or(Mask):
    """One of the masks allows it, or both: `left | right`.

    >>> from attn_jax import masks
    >>> either = masks.Causal() | masks.GlobalTokens(1)
    >>> either == masks.Or(masks.Causal(), masks.GlobalTokens(1))
    True
    >>> masks.materialize(either, 4).astype(int).tolist()
    [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """

    left: Mask
    right: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return self.left.evaluate(tile) | self.right.evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        (some, every), (also, all_of_them) = self.left.bounds(grid), self.right.bounds(grid)
        return some | also, every | all_of_them


class Not(Mask):
    """The mask does not allow it: `~mask`.

    >>> from attn_jax import masks
    >>> ~masks.Causal() == masks.Not(masks.Causal())
    True
    >>> masks.materialize(~masks.Causal(), 4).astype(int).tolist()
    [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    """

    mask: Mask

    def evaluate(self, tile: Tile) -> jax.Array:
        return ~self.mask.evaluate(tile)

    def bounds(self, grid: Grid) -> Bounds:
        some, every = self.mask.bounds(grid)
        return ~every, ~some


class Array(Mask):
    """A boolean array as a mask. It belongs to one square: it reads entries, not positions.

    Attributes:
        values: `[T, S]`, or of full rank and broadcastable to `[*B, N, T, S]`.

    Raises:
        TypeError: an array that is not boolean.
        ValueError: where it meets queries and keys, if its shape does not fit them.

    >>> from attn_jax import masks
    >>> drawn = jnp.array([[True, True], [False, True]])
    >>> masks.materialize(masks.Array(drawn) & masks.Causal(), 2).astype(int).tolist()
    [[1, 0], [0, 1]]
    >>> masks.Array(jnp.zeros((2, 2)))
    Traceback (most recent call last):
    TypeError: mask must be boolean, True = may attend; got dtype float32 (an additive mask is a bias)
    """

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

    def bounds(self, grid: Grid) -> Bounds:
        return grid.some_and_every(grid.square.full_rank("mask", jnp.asarray(self.values)))


def as_mask(name: str, mask: Any) -> Mask:
    """`mask` itself if lazy, else wrapped in `Array`.

    Args:
        name: of the argument, for errors.
        mask: a `Mask`, or a boolean array.

    Raises:
        TypeError: a bias, or an array that is not boolean.

    >>> from attn_jax import masks
    >>> masks.as_mask("mask", masks.Causal())
    Causal()
    >>> type(masks.as_mask("mask", jnp.ones((2, 2), bool))).__name__
    'Array'
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Lazy):
        raise TypeError(f"{name} must be a mask, got the {type(mask).__module__}.{type(mask).__name__}")
    return Array(mask)
