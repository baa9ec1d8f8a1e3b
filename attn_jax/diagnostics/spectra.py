"""Singular values of the score matrix of each head, without ever forming it.

The scores `S = scale · Q Kᵀ` are `[T, S]` but of rank at most H. With `Q = U_q R_q` and `K = U_k R_k`, two thin QRs,
S has the singular values of `scale · R_q R_kᵀ`, which is H × H. This is exact for raw `q·k` only: a bias, a soft cap or
a mask is no product of thin factors.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured, unit_scale
from attn_jax.diagnostics.ranks import count_above, default_tolerance, effective_rank_of, stable_rank_of
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranks:
    """The three ranks of a spectrum; see `diagnostics.ranks`.

    Attributes:
        numerical: int32 `[*B, N]`, number of singular values above the tolerance.
        stable: `[*B, N]`, `Σσ² / σ₁²`.
        effective: `[*B, N]`, exponential of the entropy of `σ / Σσ`.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import logit_ranks
    >>> query, key = jnp.diag(jnp.array([2.0, 1.0]))[:, None], jnp.eye(2)[:, None]  # scores of diagonal 2, 1
    >>> ranks = logit_ranks(query, key, centred=False)
    >>> ranks.numerical.tolist(), ranks.stable.round(3).tolist(), bool(1.25 < ranks.effective[0] < 2)
    ([2], [1.25], True)
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
    query_mask: Bool[ArrayLike, "*b t n"] | None = None,
    key_mask: Bool[ArrayLike, "*b s n"] | None = None,
) -> Float[Array, "*b n r"]:
    """Singular values of `scale · q (k − mean k)ᵀ` for each head, descending, exact, in O((T + S) H²).

    The softmax ignores what is the same for a whole row, so the mean key does not route. Uncentred it dominates: the
    stable rank then reads about 1 in healthy models.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; query head n reads key head `n // (N // K)`.
        scale: a number; `1/sqrt(H)` by default.
        centred: whether to take the mean key away first.
        query_mask: boolean `[*B, T, N]`, the queries that count (not padding, say); None for all. What the others hold
            does not matter, not even NaN.
        key_mask: boolean `[*B, S, N]`, the keys that count for each query head, in the mean key too; None for all.

    Returns:
        `[*B, N, R]` with `R = min(T, S, H)`, float32 or better; the matrix's other singular values are 0. It has a
        gradient where query and centred key have full column rank.

    Raises:
        ValueError: if the shapes do not fit each other, or `scale` is not finite.
        TypeError: if `query` or `key` is not floating, or a mask not boolean.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import logit_spectrum
    >>> x = jnp.eye(2)[:, None]  # the scores are the identity
    >>> logit_spectrum(x, x, scale=1.0, centred=False).round(3).tolist()
    [[1.0, 1.0]]
    >>> logit_spectrum(x, x, scale=1.0).round(3).tolist()  # the mean key takes away what no softmax sees
    [[1.0, 0.0]]
    """
    factors = _factors(query, key, query_mask, key_mask)
    factor = 1 / math.sqrt(factors.query.shape[-1]) if scale is None else abs(checks.finite_number("scale", scale))
    sigma = _spectrum(factors, checks.boolean("centred", centred))
    return factor * jax.lax.collapse(sigma, -3, -1)


def logit_ranks(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    *,
    centred: bool = True,
    query_mask: Bool[ArrayLike, "*b t n"] | None = None,
    key_mask: Bool[ArrayLike, "*b s n"] | None = None,
) -> Ranks:
    """The numerical, stable and effective rank of each head's scores; no scale changes them.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        centred: whether to take the mean key away first, as the softmax does.
        query_mask, key_mask: boolean `[*B, T, N]` and `[*B, S, N]`, what counts, as for `logit_spectrum`.

    Returns:
        `Ranks` of `[*B, N]`. The numerical rank counts above `σ₁ · max(max(T, S) · ε, ε_stored)`: the rule of
        `numerical_rank` for the T × S scores (of the queries and keys that count), with the coarser of the two stored
        dtypes.

    Raises:
        ValueError: if the shapes do not fit each other.
        TypeError: if `query` or `key` is not floating, or a mask not boolean.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import logit_ranks
    >>> x = jnp.eye(2)[:, None]  # the scores are the identity
    >>> logit_ranks(x, x, centred=False).numerical.tolist(), logit_ranks(x, x).numerical.tolist()
    ([2], [1])
    """
    factors = _factors(query, key, query_mask, key_mask)
    factors = factors._replace(query=unit_scale(factors.query, 2), key=unit_scale(factors.key, 2))
    sigma = _spectrum(factors, checks.boolean("centred", centred))
    # Keys that are all alike leave rounding of the mean key, not scores.
    norms = [jnp.sqrt(jnp.sum(x**2, axis=(-2, -1))) for x in (factors.query, factors.key)]  # [*B, K, G or 1]
    rounding = float(jnp.finfo(sigma.dtype).eps) * norms[0] * norms[1]
    sigma = jnp.where(sigma <= rounding[..., None], 0.0, sigma)
    coarser = max((jnp.asarray(query).dtype, jnp.asarray(key).dtype), key=lambda dtype: float(jnp.finfo(dtype).eps))
    rows, columns = (counted.sum(axis=(-2, -1)) for counted in (factors.counted_queries, factors.counted_keys))
    threshold = default_tolerance(sigma, rows, columns, coarser)
    ranks = Ranks(count_above(sigma, threshold), stable_rank_of(sigma), effective_rank_of(sigma))
    return jax.tree.map(lambda x: jax.lax.collapse(x, -2), ranks)


class _Factors(NamedTuple):
    """Query `[*B, K, G, T, H]` and key `[*B, K, G or 1, S, H]`, 0 where they do not count, and which of them do."""

    query: Array
    key: Array
    counted_queries: Array  # of the query's shape, or 1 along any axis but T; the last is 1
    counted_keys: Array


def _factors(query: ArrayLike, key: ArrayLike, query_mask: ArrayLike | None, key_mask: ArrayLike | None) -> _Factors:
    q, k = measured("query", query, 3, "[*B, T, N, H]"), measured("key", key, 3, "[*B, S, K, H]")
    (*batch, rows, num_heads, width), (columns, num_kv_heads) = q.shape, k.shape[-3:-1]
    checks.shape("key", k, (*batch, columns, num_kv_heads, width), "[*B, S, K, H] with the query's *B and H")
    if num_heads % num_kv_heads:
        raise ValueError(f"query heads must be a multiple of key heads, got N = {num_heads} and K = {num_kv_heads}")

    def grouped(x: Array) -> Array:
        """`[*B, T, N, ...]` as `[*B, K, G, T, ...]`; a key head is a group of one."""
        x = jnp.moveaxis(x, len(batch) + 1, len(batch))
        return x.reshape(*batch, num_kv_heads, x.shape[len(batch)] // num_kv_heads, *x.shape[len(batch) + 1 :])

    def counted(name: str, mask: ArrayLike | None, length: int, axes: str) -> Array:
        if mask is None:
            return jnp.ones((1,) * (len(batch) + 2) + (length, 1), bool)
        array = checks.as_array(name, mask)
        if array.dtype != bool:
            raise TypeError(f"{name} must be boolean, got {array.dtype}")
        checks.shape(name, array, (*batch, length, num_heads), axes)
        return grouped(array[..., None])

    queries = counted("query_mask", query_mask, rows, "[*B, T, N]")
    keys = counted("key_mask", key_mask, columns, "[*B, S, N]")
    dtype = jnp.promote_types(q.dtype, k.dtype)
    q, k = grouped(q.astype(dtype)), grouped(k.astype(dtype))
    return _Factors(jnp.where(queries, q, 0), jnp.where(keys, k, 0), queries, keys)


def _spectrum(factors: _Factors, centred: bool) -> Float[Array, "*b k g r"]:
    """Singular values of `q kᵀ`, or of `q (k − mean k)ᵀ`."""
    key, counted = factors.key, factors.counted_keys
    if centred:
        number = jnp.maximum(counted.sum(axis=-2, keepdims=True), 1).astype(key.dtype)
        for _ in range(2):  # the second takes away what rounding left of a mean far from 0
            key = jnp.where(counted, key - key.sum(axis=-2, keepdims=True) / number, 0)
    return _product_singular_values(factors.query, key)


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
