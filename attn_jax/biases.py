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
from attn_jax.lazy import Lazy, Tile
from attn_jax.typing import ArrayLike, Float


class Bias(Lazy):
    """A lazy bias."""

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> Float[jax.Array, "*#b #n #t #s"]:
        """The bias on `tile` in `dtype`, of the square's rank, with 1 on axes along which it is constant."""
        raise NotImplementedError

    def __add__(self, other: "Bias | ArrayLike") -> "Bias":
        return Sum(self, as_bias("bias", other))


class Sum(Bias):
    """Both biases."""

    left: Bias
    right: Bias

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        left, right = self.left.evaluate(tile, dtype), self.right.evaluate(tile, dtype)
        total = left + right
        # Two finite minima are still an ordinary number, not a mask.
        overflowed = jnp.isneginf(total) & ~jnp.isneginf(left) & ~jnp.isneginf(right)
        return jnp.where(overflowed, jnp.finfo(dtype).min, total)


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
    """Nearer keys weigh more: `-slope[n] · |q - k|`, the slopes by `alibi_slopes(num_heads)` (Press et al. 2022)."""

    num_heads: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_heads", checks.positive_int("num_heads", self.num_heads))

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        slopes = tile.per_head("the slopes of Alibi", jnp.asarray(alibi_slopes(self.num_heads), dtype))
        return -slopes * jnp.abs(tile.query_positions - tile.key_positions).astype(dtype)


class RelativeBuckets(Bias):
    """A learned number per head and bucket of the distance `k - q` (Raffel et al. 2020, section 2.1, as in T5).

    Near distances have a bucket each, far ones share buckets that grow geometrically up to `max_distance`, beyond
    which all fall into the last. Bidirectional: half of the buckets are for keys after the query; otherwise those
    keys share bucket 0. T5 applies no scale to its logits.

    Attributes:
        table: `[buckets, N]`.
        bidirectional: whether keys after the query have buckets of their own.
        max_distance: where the last bucket begins.
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
        checks.shape("table", table, (table.shape[0], tile.square[-3]), "[buckets, N]")
        buckets = relative_buckets(
            tile.key_positions - tile.query_positions,
            table.shape[0],
            bidirectional=self.bidirectional,
            max_distance=self.max_distance,
        )
        # [*b, 1, t, s] picks rows of the table; the head axis goes where the 1 was.
        # In `dtype` before it is spread out: the gradient then sums in it too.
        return jnp.moveaxis(table.astype(dtype)[buckets.squeeze(-3)], -1, -3)


def relative_buckets(distance: jax.Array, num_buckets: int, *, bidirectional: bool, max_distance: int) -> jax.Array:
    """The bucket of each distance `k - q`: int, of the shape of `distance` (see `RelativeBuckets`)."""
    starts = jnp.asarray(_bucket_starts(num_buckets, bidirectional, max_distance), distance.dtype)
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
    """An array, `[T, S]` or of full rank and broadcastable to `[*B, N, T, S]`, as a bias."""

    values: Float[ArrayLike, "..."]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", checks.floating_array("bias", self.values))

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> jax.Array:
        return tile.full_rank("bias", jnp.asarray(self.values)).astype(dtype)


def as_bias(name: str, bias: Any) -> Bias:
    """`bias` itself if lazy, else wrapped in `Array`."""
    if isinstance(bias, Bias):
        return bias
    if isinstance(bias, Lazy):
        raise TypeError(f"{name} must be a bias, got the {type(bias).__module__}.{type(bias).__name__}")
    return Array(bias)
