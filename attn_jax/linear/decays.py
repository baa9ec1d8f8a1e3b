"""Products of decays over stretches of a chunk, as exponentials of differences of running sums of logarithms.

A difference is taken from a later step to an earlier one, so it is never above 0 and nothing overflows. Running sums
of floats would lose what a difference of two near steps needs: behind a sum of −177 (256 steps of ln ½) lies an error
of 1e-5. So the sums are kept in two parts, of which the large one is in integers: exact, whatever came before.
"""

import math
from types import EllipsisType
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from attn_jax.typing import Array, Float


class Sums(NamedTuple):
    """Running sums of ln a, each step's own included: `unit · whole + rest`.

    Attributes:
        whole: int32 `[B, C, K]` or `[B, C, K, R]`.
        rest: what the integers leave, as floats; it carries the gradient.
        unit: a power of 2.
    """

    whole: Array
    rest: Array
    unit: float

    def at(self, *index: int | slice | EllipsisType | None) -> "Sums":
        """The sums at an index."""
        return Sums(self.whole[index], self.rest[index], self.unit)

    def since(self, earlier: "Sums") -> Array:
        """Sums after the step of `earlier`, up to this one's; the shapes broadcast."""
        return (self.whole - earlier.whole).astype(self.rest.dtype) * self.unit + (self.rest - earlier.rest)

    def total(self) -> Array:
        """Sums from the start."""
        return self.whole.astype(self.rest.dtype) * self.unit + self.rest


def sums(log_decay: Float[Array, "m c *r"]) -> Sums:
    """Running sums along the steps, of each head, and of each feature if they have decays of their own."""
    # below this, one step alone makes the exponential 0
    least = 2.0 ** math.ceil(math.log2(-math.log(float(jnp.finfo(log_decay.dtype).smallest_subnormal))))
    unit = 2.0 ** (math.ceil(math.log2(least * log_decay.shape[1])) - 30)
    log_decay = jnp.maximum(log_decay, -least)
    whole = jnp.round(lax.stop_gradient(log_decay) / unit)
    rest = log_decay - whole * unit
    return Sums(jnp.cumsum(whole.astype(jnp.int32), axis=1), jnp.cumsum(rest, axis=1), unit)


def lower(weights: Float[Array, "m gc c"]) -> Float[Array, "m gc c"]:
    """`weights` where the key is not behind the query, 0 elsewhere; rows are the steps, once for each query head."""
    return jnp.where(_causal(*weights.shape[-2:])[None], weights, 0)


def between(sums: Sums, rows: int) -> Float[Array, "m gc c"]:
    """What is left at step i of what was added at step j, from sums `[M, C]`; 0 where j is later."""
    exponents = sums.at(slice(None), slice(None), None).since(sums.at(slice(None), None))
    left = jnp.exp(jnp.where(_causal(*exponents.shape[-2:])[None], exponents, -jnp.inf))
    return jnp.tile(left, (1, rows // max(left.shape[-1], 1), 1))


def edges(sums: Sums) -> tuple[Array, Array, Array]:
    """Decay from the start to each step and from each step to the end, `[M, C, R or 1]`; of all, `[M, R or 1, 1]`."""
    if sums.rest.ndim == 2:
        sums = sums.at(..., None)
    last = sums.at(slice(None), slice(-1, None))
    return jnp.exp(sums.total()), jnp.exp(last.since(sums)), jnp.exp(last.total())[:, 0, :, None]


def featurewise_pairs(query: Array, key: Array, sums: Sums, precision: lax.PrecisionLike) -> Float[Array, "m gc c"]:
    """Σ_r q_ir k_jr Π a_r, with a decay per feature `[M, C, R]`, which does not factor out of the sum over features.

    Blocks double: the later half of a block sees its earlier half through the boundary between them, the decay from
    the key to it on the key's side, from it to the query on the query's, both at most 1.
    """
    heads, length, width = key.shape
    rows, size = query.shape[1], 2 ** math.ceil(math.log2(length))

    def pad(x: Array, mode: str = "constant") -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size - length), (0, 0)], mode=mode)

    query, key = pad(query.reshape(heads, rows // length, length, width)), pad(key)
    sums = Sums(pad(sums.whole, "edge"), pad(sums.rest, "edge"), sums.unit)
    weights = jnp.einsum("mgcr,mcr->mgc", query, key, precision=precision)[..., None, None]
    half = 1
    while half < size:

        def halves(x: Array, half: int = half) -> Array:
            """`[2, ..., blocks, half, R]`, the earlier and the later halves."""
            return jnp.moveaxis(x.reshape(*x.shape[:-2], size // (2 * half), 2, half, width), -3, 0)

        whole, rest = halves(sums.whole), halves(sums.rest)
        early, late = (Sums(whole[i], rest[i], sums.unit) for i in (0, 1))
        boundary = early.at(..., slice(-1, None), slice(None))
        late_query = halves(query)[1] * jnp.exp(late.since(boundary))[:, None]
        early_key = halves(key)[0] * jnp.exp(boundary.since(early))
        across = jnp.einsum("mgbir,mbjr->mgbij", late_query, early_key, precision=precision)
        early_pairs, late_pairs = weights[:, :, 0::2], weights[:, :, 1::2]
        above = jnp.concatenate([early_pairs, jnp.zeros_like(across)], axis=-1)
        weights = jnp.concatenate([above, jnp.concatenate([across, late_pairs], axis=-1)], axis=-2)
        half *= 2
    return weights[:, :, 0, :length, :length].reshape(heads, rows, length)


def _causal(rows: int, length: int) -> Array:
    """Whether the key of a column is not behind the query of a row; rows may run through the steps several times."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, length), axis) for axis in (0, 1))
    return column <= row % max(length, 1)
