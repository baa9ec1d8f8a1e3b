"""Whether scores can tell "i attends to j" from "j attends to i".

Any square matrix is a symmetric plus an antisymmetric part; they are orthogonal, so
`‖(M − Mᵀ)/2‖² / ‖M‖² = (1 − tr(M²)/‖M‖²) / 2`: 0 is symmetric, 1/2 is no relation, 1 is antisymmetric.
Tied projections with rotary positions read symmetric here though direction is expressible through positions.
"""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, measured, unit_scale
from attn_jax.typing import Array, ArrayLike, Float


def score_asymmetry(scores: Float[ArrayLike, "*b t t"]) -> Float[Array, "*b"]:
    """Share of the energy in the antisymmetric part, `‖(S − Sᵀ)/2‖_F² / ‖S‖_F²`.

    Args:
        scores: square `[..., T, T]`, floating: logits before any mask, whose `-inf` would drown everything.

    Returns:
        `[...]` between 0 and 1, float32 or better; 0 for scores of zeros. About 1/2 when S and Sᵀ are unrelated.

    Raises:
        ValueError: if `scores` is not square.
        TypeError: if it is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import score_asymmetry
    >>> symmetric, antisymmetric = jnp.array([[0.0, 1.0], [1.0, 0.0]]), jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    >>> score_asymmetry(jnp.stack([symmetric, antisymmetric, symmetric + antisymmetric])).tolist()
    [0.0, 1.0, 0.5]
    """
    s = unit_scale(_square("scores", scores), 2)
    antisymmetric = (s - jnp.swapaxes(s, -1, -2)) / 2
    return divide(jnp.sum(antisymmetric**2, axis=(-2, -1)), jnp.sum(s**2, axis=(-2, -1)))


def matrix_symmetry(matrix: Float[ArrayLike, "*b d d"]) -> Float[Array, "*b"]:
    """Cosine between a matrix and its transpose, `tr(W²) / ‖W‖_F²`.

    Args:
        matrix: square `[..., D, D]`, floating.

    Returns:
        `[...]`, float32 or better: 1 symmetric, −1 antisymmetric, about 0 (1/D) for independent entries, 0 for zeros.

    Raises:
        ValueError: if `matrix` is not square.
        TypeError: if it is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import matrix_symmetry
    >>> symmetric, antisymmetric = jnp.array([[0.0, 1.0], [1.0, 0.0]]), jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    >>> matrix_symmetry(jnp.stack([symmetric, antisymmetric, symmetric + antisymmetric])).tolist()
    [1.0, -1.0, 0.0]
    """
    w = unit_scale(_square("matrix", matrix), 2)
    return divide(jnp.sum(w * jnp.swapaxes(w, -1, -2), axis=(-2, -1)), jnp.sum(w**2, axis=(-2, -1)))


def weight_symmetry(
    query_weight: Float[ArrayLike, "d n h"], key_weight: Float[ArrayLike, "d k h"]
) -> Float[Array, " n"]:
    """`tr(W²) / ‖W‖_F²` of each head's `W = W_Q W_Kᵀ`, `[D, D]`, from H × H products alone.

        tr(W²) = tr((W_Kᵀ W_Q)²),   ‖W‖_F² = ⟨W_Qᵀ W_Q, W_Kᵀ W_K⟩

    Args:
        query_weight: W_Q, `[D, N, H]`, floating.
        key_weight: W_K, `[D, K, H]`; query head n goes with key head `n // (N // K)`.

    Returns:
        `[N]`, float32 or better: 1 for tied projections, about 0 at a usual initialisation.

    Raises:
        ValueError: if the shapes do not fit each other.
        TypeError: if a weight is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import weight_symmetry
    >>> query_weight, turned = jnp.eye(2)[:, None], jnp.array([[0.0, -1.0], [1.0, 0.0]])[:, None]
    >>> weight_symmetry(query_weight, query_weight).tolist(), weight_symmetry(query_weight, turned).tolist()
    ([1.0], [-1.0])
    """
    wq, wk = measured("query_weight", query_weight, 3, "[D, N, H]"), measured("key_weight", key_weight, 3, "[D, K, H]")
    checks.rank("query_weight", wq, 3, "[D, N, H]")
    checks.shape("key_weight", wk, (wq.shape[0], *wk.shape[1:-1], wq.shape[2]), "[D, K, H] with the query's D and H")
    if wq.shape[1] % wk.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got N = {wq.shape[1]} and K = {wk.shape[1]}")
    per_head = [unit_scale(jnp.moveaxis(w, 1, 0), 2) for w in (wq, wk)]
    q, k = per_head[0], jnp.repeat(per_head[1], wq.shape[1] // wk.shape[1], axis=0)  # [N, D, H]

    def gram(a: Array, b: Array) -> Array:
        return jnp.einsum("ndg,ndh->ngh", a, b, precision=jax.lax.Precision.HIGHEST)

    crossed = gram(k, q)
    trace = jnp.sum(crossed * jnp.swapaxes(crossed, -1, -2), axis=(-2, -1))
    return divide(trace, jnp.sum(gram(q, q) * gram(k, k), axis=(-2, -1)))


def _square(name: str, x: ArrayLike) -> Array:
    array = measured(name, x, 2, "[..., n, n]")
    if array.shape[-1] != array.shape[-2]:
        raise ValueError(f"{name} must be square, [..., n, n]; got shape {array.shape}")
    return array
