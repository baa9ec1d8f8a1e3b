"""Biases: terms added to the scaled logits, before the soft cap.

Like masks they are lazy, read positions, and are evaluated on any tile; their tables are leaves, with gradients.
They add up by `+`. A bias of `-inf` means masked; a finite minimum is an ordinary number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.lazy import Bounds, Grid, Lazy, Tile, dynamic_box, put_box
from attn_jax.typing import ArrayLike, Float


class Bias(Lazy):
    """A lazy bias.

    One of your own reads positions:

    >>> import attn_jax
    >>> class Distance(attn_jax.biases.Bias):
    ...     def evaluate(self, tile, dtype):
    ...         return -abs(tile.query_positions - tile.key_positions).astype(dtype)
    >>> x = jnp.zeros((3, 1, 4))
    >>> weights = attn_jax.attention_weights(x, x, bias=Distance())[0, 0]
    >>> jnp.log(weights / weights[0]).round(4).tolist()
    [0.0, -1.0, -2.0]
    """

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> Float[jax.Array, "*#b #n #t #s"]:
        """The bias on `tile` in `dtype`, of the square's rank, with 1 on axes along which it is constant."""
        raise NotImplementedError(f"{type(self).__name__} must define evaluate(tile, dtype)")

    def bounds(self, grid: Grid) -> Bounds:
        """Per tile of `grid`: whether it may hold more than `-inf`, and whether it holds no `-inf`.

        Boolean, of the shape and kind of `Mask.bounds`.
        """
        return grid.constant(True), grid.constant(False)

    def zeros(self, dtype: DTypeLike) -> list[jax.Array]:
        """For each floating leaf zeros in `dtype`, in which its gradient is accumulated."""
        leaves = [leaf for leaf in jax.tree.leaves(self) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
        return [jnp.zeros(jnp.shape(leaf), dtype) for leaf in leaves]

    def accumulate(
        self, gradients: list[jax.Array], tile: Tile, d_bias: Float[jax.Array, "*b n t s"]
    ) -> list[jax.Array]:
        """`gradients`, one for each floating leaf, plus what flows back to it from `d_bias`, the gradient on `tile`."""
        leaves, structure = jax.tree.flatten(self)
        floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

        def evaluate(chosen: list[jax.Array]) -> jax.Array:
            every = list(leaves)
            for i, leaf in zip(floating, chosen, strict=True):
                every[i] = leaf
            return jax.tree.unflatten(structure, every).evaluate(tile, d_bias.dtype)

        # At least in the dtype of the sum: a gradient rounded for each tile would be rounded many times.
        chosen = [jnp.asarray(leaves[i], jnp.promote_types(jnp.result_type(leaves[i]), d_bias.dtype)) for i in floating]
        value, pull = jax.vjp(evaluate, chosen)
        (pulled,) = pull(_sum_to(d_bias, value.shape))
        return [total + x.astype(total.dtype) for total, x in zip(gradients, pulled, strict=True)]

    def __add__(self, other: "Bias | ArrayLike") -> "Bias":
        return Sum(self, as_bias("bias", other))


class Sum(Bias):
    """Both biases: `left + right`. Finite numbers whose sum overflows stay finite: only `-inf` means masked.

    >>> import attn_jax
    >>> total = attn_jax.biases.Alibi(1) + jnp.array([[0.0, 0.0, -jnp.inf]] * 3)
    >>> type(total).__name__
    'Sum'
    >>> x = jnp.zeros((3, 1, 4))
    >>> weights = attn_jax.attention_weights(x, x, bias=total)[0, 2]
    >>> (256 * jnp.log(weights / weights[1])).round(2).tolist()  # slope 1/256; the last key is masked
    [-1.0, 0.0, -inf]
    """

    left: Bias
    right: Bias

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        total, overflowed = self._add(tile, dtype)
        return jnp.where(overflowed, jnp.finfo(dtype).min, total)

    def bounds(self, grid: Grid) -> Bounds:
        (some, every), (also, all_of_them) = self.left.bounds(grid), self.right.bounds(grid)
        return some & also, every & all_of_them

    def accumulate(self, gradients: list[jax.Array], tile: Tile, d_bias: jax.Array) -> list[jax.Array]:
        _, overflowed = self._add(tile, d_bias.dtype)
        d_bias = jnp.where(overflowed, 0, d_bias)
        count = len(self.left.zeros(d_bias.dtype))
        left = self.left.accumulate(gradients[:count], tile, d_bias)
        return left + self.right.accumulate(gradients[count:], tile, d_bias)

    def _add(self, tile: Tile, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """The sum, and where it is too low for `dtype`: two finite minima are still an ordinary number, not a mask."""
        left, right = self.left.evaluate(tile, dtype), self.right.evaluate(tile, dtype)
        total = left + right
        return total, jnp.isneginf(total) & ~jnp.isneginf(left) & ~jnp.isneginf(right)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slope of each head, float64 `[N]`: `2^(-8(n+1)/N)` where N is a power of two.

    Otherwise the slopes of the power of two below, then every other slope of the one above.

    Reference: Press et al. 2022, section 3, and its code for other head counts.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    num_heads = checks.positive_int("num_heads", num_heads)
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * below + 1, 2) / below)
    return np.concatenate([slopes, between[: num_heads - below]])


class Alibi(Bias):
    """Nearer keys weigh more: `-slope[n] · |q - k|`, the slopes by `alibi_slopes(num_heads)` (Press et al. 2022).

    Attributes:
        num_heads: N.

    Raises:
        ValueError, TypeError: a number below 1 or no integer; in use, one that is not that of the query's heads.

    >>> import attn_jax
    >>> x = jnp.zeros((3, 1, 4))
    >>> weights = attn_jax.attention_weights(x, x, bias=attn_jax.biases.Alibi(1))[0, 2]
    >>> (256 * jnp.log(weights / weights[2])).round(2).tolist()  # slope 1/256
    [-2.0, -1.0, 0.0]
    """

    num_heads: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads", checks.positive_int("num_heads", self.num_heads))

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        slopes = jnp.asarray(alibi_slopes(self.num_heads), dtype)
        checks.shape("the slopes of Alibi", slopes, tile.square.extent[-3:-2], "[N]")
        slopes = slopes[tile.indices(-3)].reshape(-1, 1, 1)
        slopes = slopes.reshape((1,) * (len(tile.sizes) - 3) + slopes.shape)
        return -slopes * jnp.abs(tile.query_positions - tile.key_positions).astype(dtype)

    def bounds(self, grid: Grid) -> Bounds:
        return grid.constant(True), grid.constant(True)


class RelativeBuckets(Bias):
    """A learned number per head and bucket of the distance `k - q` (Raffel et al. 2020, section 2.1, as in T5).

    Near distances have a bucket each, far ones share buckets that grow geometrically up to `max_distance`, beyond
    which all fall into the last. Bidirectional: half of the buckets are for keys after the query; otherwise those
    keys share bucket 0. T5 applies no scale to its logits.

    Attributes:
        table: `[buckets, N]`.
        bidirectional: whether keys after the query have buckets of their own.
        max_distance: where the last bucket begins.

    Raises:
        ValueError, TypeError: a table that is not floating or of another shape, or too few buckets for `max_distance`.

    >>> import attn_jax
    >>> table = jnp.log(jnp.array([1.0, 2.0, 4.0, 8.0]))[:, None]  # four buckets, one head
    >>> bias = attn_jax.biases.RelativeBuckets(table, bidirectional=False, max_distance=4)
    >>> x = jnp.zeros((3, 1, 4))
    >>> (7 * attn_jax.attention_weights(x, x, bias=bias)[0, 2]).round(3).tolist()  # distances 2, 1, 0
    [4.0, 2.0, 1.0]
    """

    table: Float[ArrayLike, "buckets n"]
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        table = checks.floating_array("table", self.table)
        checks.rank("table", table, 2, "[buckets, N]")
        checks.boolean("bidirectional", self.bidirectional)
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "max_distance", checks.positive_int("max_distance", self.max_distance))
        _bucket_starts(table.shape[0], self.bidirectional, self.max_distance)

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        table = jnp.asarray(self.table)
        checks.shape("table", table, (table.shape[0], tile.square.shape[-3]), "[buckets, N]")
        buckets = relative_buckets(
            tile.key_positions - tile.query_positions,
            table.shape[0],
            bidirectional=self.bidirectional,
            max_distance=self.max_distance,
        )
        # [*b, 1, t, s] picks rows of the table; the head axis goes where the 1 was.
        # In `dtype` before it is spread out: the gradient then sums in it too.
        table = dynamic_box(table, (0, tile.starts[-3]), (table.shape[0], tile.sizes[-3]))
        return jnp.moveaxis(_cast(table, dtype)[buckets.squeeze(-3)], -1, -3)

    def bounds(self, grid: Grid) -> Bounds:
        finite = ~jnp.isneginf(jnp.asarray(self.table))
        some, every = (grid.square.per_head("table", holds) for holds in (finite.any(axis=0), finite.all(axis=0)))
        return some, every


def relative_buckets(distance: jax.Array, num_buckets: int, *, bidirectional: bool, max_distance: int) -> jax.Array:
    """The bucket of each distance `k - q` (see `RelativeBuckets`).

    Args:
        distance: int, of any shape.
        num_buckets: rows of the table.
        bidirectional, max_distance: as in `RelativeBuckets`.

    Returns:
        Int, of the shape and dtype of `distance`, in `0..num_buckets - 1`.

    Raises:
        ValueError: too few buckets for `max_distance`.

    >>> distance = jnp.array([0, -1, -2, -8, -100, 1])
    >>> relative_buckets(distance, 8, bidirectional=True, max_distance=16).tolist()
    [0, 1, 2, 3, 3, 5]
    """
    starts = np.minimum(_bucket_starts(num_buckets, bidirectional, max_distance), 2**31 - 1)
    starts = jnp.asarray(starts, distance.dtype)
    magnitude = jnp.abs(distance) if bidirectional else jnp.maximum(-distance, 0)
    bucket = jnp.searchsorted(starts, magnitude, side="right").astype(distance.dtype) - 1
    return bucket + jnp.where(distance > 0, num_buckets // 2, 0).astype(distance.dtype) if bidirectional else bucket


def _bucket_starts(num_buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """The smallest distance of each bucket of one direction: exact integers, so no logarithm is rounded on device."""
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"table must have at least {4 if bidirectional else 2} rows (buckets) and max_distance must exceed the "
            f"{exact} distances with a bucket of their own; got {num_buckets} rows and max_distance {max_distance}"
        )
    steps = np.arange(count - exact) / (count - exact)
    geometric = exact * (max_distance / exact) ** steps
    return np.concatenate([np.arange(exact), np.ceil(geometric - 1e-9 * geometric)])


class Array(Bias):
    """An array as a bias.

    Attributes:
        values: floating, `[T, S]` or of full rank and broadcastable to `[*B, N, T, S]`.

    Raises:
        TypeError: an array that is not floating.
        ValueError: where it meets queries and keys, if its shape does not fit them.

    >>> import attn_jax
    >>> x, bias = jnp.zeros((3, 1, 4)), attn_jax.biases.Array(jnp.log(jnp.array([[1.0, 3.0, 0.0]] * 3)))
    >>> attn_jax.attention_weights(x, x, bias=bias)[0, 0].round(4).tolist()  # log 0 = -inf: masked
    [0.25, 0.75, 0.0]
    """

    values: Float[ArrayLike, "..."]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checks.floating_array("bias", self.values))

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        return _cast(tile.full_rank("bias", jnp.asarray(self.values)), dtype)

    def bounds(self, grid: Grid) -> Bounds:
        return grid.some_and_every(~jnp.isneginf(grid.square.full_rank("bias", jnp.asarray(self.values))))

    def accumulate(self, gradients: list[jax.Array], tile: Tile, d_bias: jax.Array) -> list[jax.Array]:
        if tile.square.rows is not None or not _holds(d_bias.dtype, jnp.result_type(self.values)):
            return super().accumulate(gradients, tile, d_bias)
        # In place: the transpose of a slice would be a whole array of zeros for each tile.
        total = tile.square.full_rank("bias", gradients[0])
        starts = tuple(0 if length == 1 else start for length, start in zip(total.shape, tile.starts, strict=True))
        sizes = tuple(1 if length == 1 else size for length, size in zip(total.shape, tile.sizes, strict=True))
        box = dynamic_box(total, starts, sizes) + _sum_to(d_bias, sizes)
        return [put_box(total, box, starts).reshape(gradients[0].shape)]


def _cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x` in `dtype`, where a finite number stays one: only `-inf` means masked."""
    cast = x.astype(dtype)
    if _holds(dtype, x.dtype):
        return cast
    return jnp.where(jnp.isneginf(cast) & ~jnp.isneginf(x), jnp.finfo(dtype).min, cast)


def _holds(dtype: DTypeLike, other: DTypeLike) -> bool:
    """Whether `dtype` has room for the numbers of `other`."""
    return float(jnp.finfo(dtype).min) <= float(jnp.finfo(other).min)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` summed over the axes along which `shape` has 1."""
    return x.sum(axis=[a for a, length in enumerate(shape) if length == 1 and x.shape[a] != 1], keepdims=True)


def as_bias(name: str, bias: Any) -> Bias:
    """`bias` itself if lazy, else wrapped in `Array`.

    Args:
        name: of the argument, for errors.
        bias: a `Bias`, or a floating array.

    Raises:
        TypeError: a mask, or an array that is not floating.

    >>> from attn_jax import biases, masks
    >>> type(biases.as_bias("bias", jnp.zeros((2, 2)))).__name__
    'Array'
    >>> biases.as_bias("bias", masks.Causal())
    Traceback (most recent call last):
    TypeError: bias must be a bias, got the attn_jax.masks.positional.Causal
    """
    if isinstance(bias, Bias):
        return bias
    if isinstance(bias, Lazy):
        raise TypeError(f"{name} must be a bias, got the {type(bias).__module__}.{type(bias).__name__}")
    return Array(bias)
