"""How parameters begin, and in which dtype the modules compute."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.typing import DTypeLike

from attn_jax import checks

# Called as (key, shape, dtype), as in jax.nn.initializers.
Initializer = Callable[..., Any]

# Variance 1 / fan in: unit-variance inputs give unit-variance outputs (LeCun et al. 1998).
lecun = jax.nn.initializers.lecun_normal()


def weight(
    rngs: nnx.Rngs, kernel_init: Initializer, fan_in: tuple[int, ...], fan_out: tuple[int, ...], dtype: DTypeLike
) -> nnx.Param:
    """A weight `[*fan_in, *fan_out]`, drawn as a matrix `[fan in, fan out]`: any initializer reads its fans."""
    check_function("kernel_init", kernel_init)
    matrix = kernel_init(rngs.params(), (math.prod(fan_in), math.prod(fan_out)), dtype)
    return nnx.Param(jnp.reshape(matrix, fan_in + fan_out), fan_in=fan_in, fan_out=fan_out)


class OutputMajor(nnx.Param):
    """A weight that is read as `[*L, *fan in, *fan out]` and kept as `[*L, out, in]`, as files of weights have it.

    XLA on CPUs multiplies one row by a slice of a stack in this order where it lies; in the other order it copies
    the slice first, and decoding waits for memory. A leaf of the module as a pytree has the order in which it is kept.
    """

    def get_value(self, *, index: Any = ...) -> jax.Array:
        """The weight as it is read; `self[...]` is the same."""
        kept = self.get_raw_value()
        if not isinstance(kept, jax.Array):  # what a transformation put there, a shape for one
            return kept
        return jnp.swapaxes(kept, -1, -2).reshape(kept.shape[:-2] + self.fan_in + self.fan_out)[index]

    def set_value(self, value: jax.Array, *, index: Any = ...) -> None:
        """Sets the weight, or a part of it, from values as they are read."""
        value = self.get_value().at[index].set(value)
        stack = value.ndim - len(self.fan_in + self.fan_out)
        matrix = value.reshape(*value.shape[:stack], math.prod(self.fan_in), math.prod(self.fan_out))
        self.set_raw_value(jnp.swapaxes(matrix, -1, -2))


def constant(value: float, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
    """A parameter that begins at `value` everywhere."""
    return nnx.Param(jnp.full(shape, value, dtype))


def values(*parameters: nnx.Param | jax.Array | None, dtype: str | None) -> tuple[Any, ...]:
    """The arrays of `parameters` in one dtype, `dtype` or the one they promote to; None stays None."""
    arrays = tuple(p[...] if isinstance(p, nnx.Variable) else p for p in parameters)
    return promote_dtype(arrays, dtype=dtype)


def floating_name(name: str, dtype: Any) -> str:
    """The name of a real floating dtype: a string, so that it is hashable and goes into JSON."""
    try:
        canonical = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name} must be a floating dtype, got {dtype!r}") from error
    if dtype is None or not jnp.issubdtype(canonical, jnp.floating):
        raise TypeError(f"{name} must be a floating dtype, got {dtype!r}")
    return canonical.name


def check_function(name: str, function: Any) -> None:
    """Raises unless `function` can be called."""
    if not callable(function):
        raise TypeError(f"{name} must be callable, got {type(function).__name__}")


def check_width(name: str, x: jax.Array, width: int) -> None:
    """Raises unless `x` is `[..., width]`."""
    checks.minimum_rank(name, x, 1, "[..., D]")
    if x.shape[-1] != width:
        raise ValueError(f"{name} must have width {width} on its last axis, got shape {x.shape}")
