"""Singular values of the score matrix of each head, without ever forming it.

The scores `S = scale · Q Kᵀ` are `[T, S]` but of rank at most H. With `Q = U_q R_q` and `K = U_k R_k`, two thin QRs,
S has the singular values of `scale · R_q R_kᵀ`, which is H × H. This is exact for raw `q·k` only: a bias, a soft cap or
a mask is no product of thin factors.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured
from attn_jax.diagnostics.ranks import count_above, default_tolerance, effective_rank_of, stable_rank_of
from attn_jax.typing import Array, ArrayLike, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranks:
    """The three ranks of a spectrum; see `diagnostics.ranks`.

    Attributes:
        numerical: int32 `[*B, N]`, number of singular values above the tolerance.
        stable: `[*B, N]`, `Σσ² / σ₁²`.
        effective: `[*B, N]`, exponential of the entropy of `σ / Σσ`.
    """

    numerical: Int[Array, "*b n"]
    stable: Float[Array, "*b n"]
    effective: Float[Array, "*b n"]


def logit_spectrum(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    *,
    scale: float | None = None,
    centred: bool = True,
) -> Float[Array, "*b n r"]:
    """Singular values of `scale · q (k − mean k)ᵀ` for each head, descending, exact, in O((T + S) H²).

    The softmax ignores what is the same for a whole row, so the mean key does not route. Uncentred it dominates: the
    stable rank then reads about 1 in healthy models.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; query head n reads key head `n // (N // K)`.
        scale: a number; `1/sqrt(H)` by default.
        centred: whether to take the mean key away first.

    Returns:
        `[*B, N, R]` with `R = min(T, S, H)`, float32 or better; the matrix's other singular values are 0. It has a
        gradient where query and centred key have full column rank.

    Raises:
        ValueError: if the shapes do not fit each other, or `scale` is not finite.
        TypeError: if `query` or `key` is not floating.
    """
    q, k = _query_and_key(query, key)
    width = q.shape[-1]
    factor = 1 / math.sqrt(width) if scale is None else abs(checks.finite_number("scale", scale))
    if checks.boolean("centred", centred):
        for _ in range(2):  # the second takes away what rounding left of a mean far from 0
            k = k - jnp.mean(k, axis=-3, keepdims=True)
    q, k = jnp.moveaxis(q, -2, -3), jnp.moveaxis(k, -2, -3)  # [*B, N, T, H], [*B, K, S, H]
    grouped = q.reshape(*k.shape[:-2], q.shape[-3] // k.shape[-3], *q.shape[-2:])  # [*B, K, G, T, H]
    sigma = _product_singular_values(grouped, k[..., None, :, :])
    return factor * sigma.reshape(*q.shape[:-2], sigma.shape[-1])


def logit_ranks(
    query: Float[ArrayLike, "*b t n h"], key: Float[ArrayLike, "*b s k h"], *, centred: bool = True
) -> Ranks:
    """The numerical, stable and effective rank of each head's scores; no scale changes them.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        centred: whether to take the mean key away first, as the softmax does.

    Returns:
        `Ranks` of `[*B, N]`. The numerical rank counts above `σ₁ · max(max(T, S) · ε, ε_stored)`: the rule of
        `numerical_rank` for the T × S scores, with the coarser of the two stored dtypes.

    Raises:
        ValueError: if the shapes do not fit each other.
        TypeError: if `query` or `key` is not floating.
    """
    sigma = logit_spectrum(query, key, scale=1.0, centred=centred)
    q, k = _query_and_key(query, key)
    # Keys that are all alike leave rounding of the mean key, not scores.
    norms = [jnp.sqrt(jnp.sum(x**2, axis=(-3, -1))) for x in (q, k)]  # [*B, N], [*B, K]
    rounding = float(jnp.finfo(q.dtype).eps) * norms[0] * jnp.repeat(norms[1], q.shape[-2] // k.shape[-2], axis=-1)
    sigma = jnp.where(sigma <= rounding[..., None], 0.0, sigma)
    coarser = max((jnp.asarray(query).dtype, jnp.asarray(key).dtype), key=lambda dtype: float(jnp.finfo(dtype).eps))
    threshold = default_tolerance(sigma, q.shape[-3], k.shape[-3], coarser)
    return Ranks(count_above(sigma, threshold), stable_rank_of(sigma), effective_rank_of(sigma))


def _query_and_key(query: ArrayLike, key: ArrayLike) -> tuple[Array, Array]:
    q, k = measured("query", query, 3, "[*B, T, N, H]"), measured("key", key, 3, "[*B, S, K, H]")
    checks.shape("key", k, (*q.shape[:-3], *k.shape[-3:-1], q.shape[-1]), "[*B, S, K, H] with the query's *B and H")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"query heads must be a multiple of key heads, got N = {q.shape[-2]} and K = {k.shape[-2]}")
    dtype = jnp.promote_types(q.dtype, k.dtype)
    return q.astype(dtype), k.astype(dtype)


def _product_singular_values(left: Float[Array, "*b t h"], right: Float[Array, "*c s h"]) -> Float[Array, "*b r"]:
    """Singular values of `left @ rightᵀ`, batched (axes of size 1 broadcast)."""
    # One QR call for both factors, rows of zeros making them equally long: two calls that run at the same time can
    # wait for each other's threads in XLA's CPU pool (jaxlib 0.10), for ever on two cores.
    width, length = left.shape[-1], max(left.shape[-2], right.shape[-2])
    factors = [jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, length - x.shape[-2]), (0, 0)]) for x in (left, right)]
    triangles = jnp.linalg.qr(jnp.concatenate([x.reshape(-1, length, width) for x in factors]), mode="r")
    of_left, of_right = jnp.split(triangles, [math.prod(left.shape[:-2])])
    of_left = of_left.reshape(*left.shape[:-2], *of_left.shape[-2:])
    of_right = of_right.reshape(*right.shape[:-2], *of_right.shape[-2:])
    core = jnp.matmul(of_left, jnp.swapaxes(of_right, -1, -2), precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.svd(core, compute_uv=False)[..., : min(left.shape[-2], right.shape[-2], width)]
