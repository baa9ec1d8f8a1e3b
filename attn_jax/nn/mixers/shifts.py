"""Depthwise convolution over time, and what it keeps of a sequence that goes on."""

import functools
import operator

import jax.numpy as jnp

from attn_jax.typing import Array, Float, Int


def convolve(
    x: Float[Array, "*b tk d"], weight: Float[Array, "k d"], bias: Float[Array, " d"] | None = None
) -> Float[Array, "*b t d"]:
    """`y[t, d] = Σ_j weight[j, d] x[t + j, d] + bias[d]`, j = 0..k-1, for every t that `x` has all k rows for.

    The sum is float32 or better, and so is the result. A sum of k shifted arrays: XLA on CPUs runs a convolution of
    as many groups as channels far slower.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    width, lead = weight.shape[0], (1,) * (x.ndim - 1)
    length = x.shape[-2] - width + 1
    terms = (x[..., j : j + length, :].astype(wide) * weight[j].astype(wide).reshape(*lead, -1) for j in range(width))
    total = functools.reduce(operator.add, terms)
    return total if bias is None else total + bias.astype(wide).reshape(*lead, -1)


def last_rows(x: Float[Array, "*b tk d"], count: int, lengths: Int[Array, "*b"] | None) -> Float[Array, "*b k d"]:
    """The last `count` rows that count, where `count` rows precede the first of `lengths` (None: of all)."""
    if lengths is None:
        return x[..., x.shape[-2] - count :, :]
    rows = lengths[..., None] + jnp.arange(count, dtype=lengths.dtype).reshape((1,) * lengths.ndim + (-1,))
    return jnp.take_along_axis(x, rows[..., None], axis=-2)
