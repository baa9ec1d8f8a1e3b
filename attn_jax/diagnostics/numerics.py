"""What every measurement shares: checked, upcast inputs, and division and roots that are safe at zero."""

from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float


def measured(name: str, x: Any, least: int, axes: str) -> Array:
    """`x` in float32 or better; an error unless it is floating, with at least `least` axes, the last ones not empty."""
    array = checks.floating_array(name, x)
    checks.minimum_rank(name, array, least, axes)
    if 0 in array.shape[array.ndim - least :]:
        raise ValueError(f"{name} must not be empty along its last {least} axes, {axes}; got shape {array.shape}")
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def per_row(name: str, x: Any, rows: tuple[int, ...], *, most: int | None = None) -> Array:
    """Counts `x`, from 0 to `most`, of the trailing axes of `rows` or broadcastable to them, in the shape `rows`."""
    array = checks.integer_array(name, x)
    checks.within(name, array, 0, most)
    missing = len(rows) - array.ndim
    padded = array.reshape((1,) * missing + array.shape) if missing > 0 else array
    checks.broadcastable(name, padded, rows, "the rows of weights, [*B, N, T]")
    return jnp.broadcast_to(padded, rows)


def divide(numerator: Array, denominator: Array) -> Array:
    """The quotient, and 0 with zero gradient where the denominator is 0."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def root(x: Array) -> Array:
    """The square root, and 0 with zero gradient (in place of an infinite one) at 0."""
    zero = x == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, x)))


def unit_scale(x: Array, axes: int) -> Array:
    """`x` with its largest entry along the last `axes` axes brought near 1: for ratios that no common factor changes.

    Squares then neither overflow nor underflow. The factor is a power of two, so that nothing is rounded.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=tuple(range(-axes, 0)), keepdims=True)
    return jnp.ldexp(x, -jnp.frexp(largest)[1])


def visible_mask(visible: Any, weights: Array) -> Array:
    """Which keys a query may see, of the shape of the weights `[..., T, S]`; None: all of them.

    A mask of fewer axes, `[T, S]` say, is that of every head and batch item.
    """
    mask = jnp.ones((1,) * weights.ndim, bool) if visible is None else checks.as_array("visible", visible)
    if mask.dtype != bool:
        raise TypeError(f"visible must be boolean, got {mask.dtype}")
    mask = mask.reshape((1,) * (weights.ndim - mask.ndim) + mask.shape)
    checks.broadcastable("visible", mask, weights.shape, "the shape of weights")
    return jnp.broadcast_to(mask, weights.shape)


def renormalize(weights: Array) -> Array:
    """Weights whose rows sum to 1: `p / Σp`. A row of zeros stays a row of zeros."""
    return divide(weights, jnp.sum(weights, axis=-1, keepdims=True))


def without_key(weights: Float[ArrayLike, "*b s"], key: int = 0) -> Float[Array, "*b s"]:
    """Weights with one key left out and the others renormalised: `p_j / Σ_{m≠k} p_m`, and 0 at key k.

    The other weights are summed themselves, never taken as `1 − p_k`, which has no digits left when the key takes
    nearly all. So `entropy`, `mean_distance` and the rest read without a sink by `f(without_key(weights))`.

    Args:
        weights: floating `[..., S]`, after the softmax.
        key: index of the key to leave out; the first by default.

    Returns:
        `[..., S]`, float32 or better. A row that sees nothing else is all 0.

    Raises:
        ValueError: if `key` is not an index of a key.
        TypeError: if `weights` is not floating or `key` not an integer.
    """
    array = measured("weights", weights, 1, "[..., S]")
    others = jnp.arange(array.shape[-1]) != key_index(key, array.shape[-1])
    return renormalize(jnp.where(others.reshape((1,) * (array.ndim - 1) + (-1,)), array, 0.0))


def key_index(key: int, num_keys: int) -> int:
    """`key` as an index in `[0, S)`."""
    index = checks.positive_int("key", key, least=0)
    if index >= num_keys:
        raise ValueError(f"key must be an index below S = {num_keys}, got {index}")
    return index
