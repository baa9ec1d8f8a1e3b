"""Argument checks: one clear line that names the argument, what was expected and what came.

A caller's mistake raises `ValueError` (a wrong value or shape) or `TypeError` (a wrong type or dtype), never
`assert`. Values of traced arrays cannot be seen, so checks of values skip tracers; checks of shapes and dtypes do not.
"""

import contextlib
import math
import numbers
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from attn_jax.typing import Array, ArrayLike


def is_concrete(x: Any) -> bool:
    """Whether the value of `x` can be read now, that is, `x` is not being traced."""
    return not isinstance(x, Tracer)


def as_array(name: str, x: Any) -> Array:
    """`x` as a JAX array, or a TypeError that says what came."""
    if x is None or isinstance(x, (str, bytes, dict)):
        raise TypeError(f"{name} must be an array, got {_kind(x)}")
    try:
        # Inside `jit` a NumPy array would become a tracer, whose values no check can see.
        now = isinstance(x, (np.ndarray, np.generic, int, float))
        with jax.ensure_compile_time_eval() if now else contextlib.nullcontext():
            return jnp.asarray(x)
    except OverflowError as error:
        raise ValueError(f"{name} holds an integer that does not fit: {error}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array, got {_kind(x)}") from error


def floating_array(name: str, x: Any) -> Array:
    """`x` as a JAX array of real floating dtype."""
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating dtype, got {array.dtype}")
    if array.dtype.itemsize < 2:
        raise TypeError(f"{name} must have a floating dtype of 16 bits or more, got {array.dtype}")
    return array


def integer_array(name: str, x: Any) -> Array:
    """`x` as a JAX array of integer dtype (a boolean is not an integer here)."""
    array = as_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must have an integer dtype, got {array.dtype}")
    # without x64 a 64-bit NumPy array is cut to 32 bits, silently
    limits = jnp.iinfo(array.dtype)
    if isinstance(x, np.ndarray) and x.size and not limits.min <= x.min() <= x.max() <= limits.max:
        raise ValueError(f"{name} must fit {array.dtype}, got values from {x.min()} to {x.max()}")
    return array


def wide_integers(name: str, x: Any) -> Array:
    """`x` as signed integers of at least 32 bits: narrow or unsigned ones wrap around in sums and differences."""
    array = integer_array(name, x)
    wide = jax.dtypes.canonicalize_dtype(jnp.promote_types(array.dtype, jnp.int32))
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger) and array.dtype.itemsize >= wide.itemsize:
        if not is_concrete(array):
            raise TypeError(f"{name} must have a signed integer dtype, got {array.dtype}")
        within(name, array, 0, int(jnp.iinfo(wide).max))
    with jax.ensure_compile_time_eval() if is_concrete(array) else contextlib.nullcontext():
        return array.astype(wide)


def rank(name: str, x: ArrayLike, ranks: int | Collection[int], axes: str) -> None:
    """Raises unless `x` has one of `ranks` axes; `axes` spells the expected shape in legend letters."""
    allowed = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if np.ndim(x) not in allowed:
        expected = " or ".join(str(r) for r in allowed)
        raise ValueError(f"{name} must have rank {expected}, {axes}; got shape {np.shape(x)}")


def minimum_rank(name: str, x: ArrayLike, least: int, axes: str) -> None:
    """Raises unless `x` has at least `least` axes."""
    if np.ndim(x) < least:
        raise ValueError(f"{name} must have at least {least} axes, {axes}; got shape {np.shape(x)}")


def shape(name: str, x: ArrayLike, expected: Sequence[int], axes: str) -> None:
    """Raises unless the shape of `x` is exactly `expected`."""
    if tuple(np.shape(x)) != tuple(expected):
        raise ValueError(f"{name} must have shape {axes} = {tuple(expected)}, got {np.shape(x)}")


def broadcastable(name: str, x: ArrayLike, target: Sequence[int], axes: str) -> None:
    """Raises unless `x` has the rank of `target` and each axis is 1 or the target's."""
    actual = np.shape(x)
    fits = len(actual) == len(target) and all(a in (1, t) for a, t in zip(actual, target, strict=True))
    if not fits:
        raise ValueError(f"{name} must broadcast to {axes} = {tuple(target)}, got shape {actual}")


def positive_int(name: str, x: Any, *, least: int = 1) -> int:
    """`x` as a Python int that is at least `least`."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {_kind(x)}")
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {int(x)}")
    return int(x)


def grouped_heads(num_heads: int, num_kv_heads: int) -> int:
    """The query heads per key/value head, `G = N // K`, or a ValueError that names both."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"the number of query heads must be a positive multiple of the number of key/value heads, "
            f"got {num_heads} query heads and {num_kv_heads} key/value heads"
        )
    return num_heads // num_kv_heads


def finite_number(name: str, x: Any, *, positive: bool = False, least: float = -math.inf) -> float:
    """`x` as a finite Python float, positive or at least `least` if asked."""
    number = _number(name, x)
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{name} must be {'positive and ' if positive else ''}finite, got {number}")
    if number < least:
        raise ValueError(f"{name} must be at least {least:g}, got {number}")
    return number


def rate(name: str, x: Any) -> float:
    """`x` as a dropout rate in [0, 1)."""
    number = _number(name, x)
    if not 0.0 <= number < 1.0:  # NaN fails too
        raise ValueError(f"{name} must lie in [0, 1), got {number}")
    return number


def _number(name: str, x: Any) -> float:
    if isinstance(x, (np.ndarray, jax.Array)):
        is_number = x.ndim == 0 and (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer))
    else:
        is_number = isinstance(x, numbers.Real) and not isinstance(x, bool)
    if not is_number:
        raise TypeError(f"{name} must be one number, got {_kind(x)}")
    if not is_concrete(x):
        raise TypeError(f"{name} must be a concrete number, got a traced value")
    try:
        return float(x)
    except OverflowError:  # an int beyond float64, on either side
        return math.inf


def boolean(name: str, x: Any) -> bool:
    """`x` as a Python bool; a number is refused rather than read as a truth value."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {_kind(x)}")
    return bool(x)


def within(name: str, x: ArrayLike, least: int, most: int | None = None) -> None:
    """Raises if a value of the integer array `x` lies outside `least..most`; values of a tracer cannot be seen."""
    if not is_concrete(x) or np.size(x) == 0:
        return
    values = np.asarray(x)  # on the host: inside `jit` even a concrete array's minimum would be traced
    smallest, largest = int(values.min()), int(values.max())
    if smallest < least or (most is not None and largest > most):
        expected = f"be at least {least}" if most is None else f"lie in {least}..{most}"
        raise ValueError(f"{name} must {expected}, got values in {smallest}..{largest}")


def one_of(name: str, x: Any, choices: Collection[Any]) -> None:
    """Raises unless `x` is one of `choices`, all of which the message names."""
    if not any(x is c or (type(x) is type(c) and x == c) for c in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {x!r}")


def prng_key(name: str, x: Any) -> Array:
    """`x` as a single PRNG key: `jax.random.key(seed)` or the older uint32 pair."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.shape == ():
        return x
    if isinstance(x, (jax.Array, np.ndarray)) and x.dtype == np.uint32 and x.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(x), impl="threefry2x32")
    came = f"{x.dtype} of shape {np.shape(x)}" if hasattr(x, "dtype") else _kind(x)
    raise TypeError(f"{name} must be one key, as made by jax.random.key(seed); got {came}")


def _kind(x: Any) -> str:
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{type(x).__name__} of dtype {x.dtype} and shape {tuple(x.shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
