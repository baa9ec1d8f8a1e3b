"""How many directions a matrix uses: numerical, stable and effective rank, and the distance from rank one.

All three ranks read singular values σ (not σ²), computed in float32 or better. At n = 128 they tell apart

    identity 128 / 128 / 128          one-key rows and uniform two-way 1 / 1 / 1
    uniform causal 128 / 2.0 / 32     .9·1e₀ᵀ + .1·I  128 / 1.01 / 28.9

A causal pattern is algebraically of full rank whatever it attends to (triangular, with a positive diagonal), and rank
alone cannot tell a uniform pattern from a sink.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, measured, root, unit_scale
from attn_jax.typing import Array, ArrayLike, Float, Int


def numerical_rank(matrix: Float[ArrayLike, "*b m n"], *, tolerance: ArrayLike | None = None) -> Int[Array, "*b"]:
    """Number of singular values above a tolerance, `#{σ > tolerance}`.

    By default the tolerance is `σ₁ · max(max(m, n) · ε, ε_stored)`: NumPy's rule with the ε of the precision that
    computes (float32 or better), and never finer than the ε of the dtype that `matrix` arrived in, since storing it
    there has already perturbed it by about that much. (With max(m, n), the ε of bfloat16 would exceed σ₁ from n = 128.)
    So a matrix with σ of interest below 0.8% of σ₁ has to arrive in float32, and one with σ below `n · 1.2e-7 · σ₁` in
    float64: uniform causal weights, whose smallest σ is about `σ₁ / (3.5 n)`, from n = 2048.

    Args:
        matrix: floating `[..., m, n]`.
        tolerance: absolute, non-negative; a number, or one for each matrix, `[...]`.

    Returns:
        int32 `[...]`. A matrix of zeros has rank 0; one that is not finite reads −1.

    Raises:
        ValueError: if `matrix` has fewer than two axes or no entries, or `tolerance` does not fit.
        TypeError: if `matrix` is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import numerical_rank
    >>> matrices = jnp.stack([jnp.ones((3, 3)), jnp.diag(jnp.array([1.0, 0.1, 0.001]))])
    >>> numerical_rank(matrices).tolist(), numerical_rank(matrices, tolerance=0.01).tolist()
    ([1, 3], [1, 2])
    """
    sigma = _singular_values(matrix)
    if tolerance is None:
        rows, columns = jnp.shape(matrix)[-2:]
        threshold = default_tolerance(sigma, rows, columns, jnp.asarray(matrix).dtype)
    else:
        threshold = _given_tolerance(tolerance, sigma.shape[:-1], sigma.dtype)
    return count_above(sigma, threshold)


def stable_rank(matrix: Float[ArrayLike, "*b m n"]) -> Float[Array, "*b"]:
    """Energy in units of the largest direction's, `‖M‖_F² / σ₁² = Σ (σ/σ₁)²`.

    Args:
        matrix: floating `[..., m, n]`.

    Returns:
        `[...]`, float32 or better, at most the rank; 0 for a matrix of zeros.

    Raises:
        ValueError: if `matrix` has fewer than two axes or no entries.
        TypeError: if it is not floating.

    Reference:
        Rudelson and Vershynin 2007, "Sampling from large matrices".

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import stable_rank
    >>> float(stable_rank(jnp.diag(jnp.array([2.0, 1.0, 1.0]))).round(4))  # (4 + 1 + 1) / 4
    1.5
    """
    return stable_rank_of(_singular_values(matrix))


def effective_rank(matrix: Float[ArrayLike, "*b m n"]) -> Float[Array, "*b"]:
    """Exponential of the entropy of the spectrum, `exp(−Σ q ln q)` with `q = σ / Σσ` (σ, not σ²).

    Args:
        matrix: floating `[..., m, n]`.

    Returns:
        `[...]`, float32 or better, at most the rank; 0 for a matrix of zeros.

    Raises:
        ValueError: if `matrix` has fewer than two axes or no entries.
        TypeError: if it is not floating.

    Reference:
        Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality".

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import effective_rank
    >>> matrices = jnp.stack([jnp.eye(3), jnp.ones((3, 3)), jnp.diag(jnp.array([1.0, 1.0, 0.0]))])
    >>> effective_rank(matrices).round(2).tolist()
    [3.0, 1.0, 2.0]
    """
    return effective_rank_of(_singular_values(matrix))


def rank_one_residual(
    x: Float[ArrayLike, "*b t d"], *, norm: Literal["frobenius", "l1_linf"] = "frobenius"
) -> Float[Array, "*b"]:
    """How far the tokens are from being all the same, `‖X − 1x̄ᵀ‖ / ‖X‖` with x̄ the mean token.

    What float32 can store ends it near 1e-7: to see deeper collapse, propagate the mean and the residual apart. One
    massive token dominates both norms: read it without the first token too, `rank_one_residual(x[..., 1:, :])`.

    Args:
        x: one token per row, floating `[..., T, D]`.
        norm: "frobenius", or "l1_linf" for `sqrt(‖·‖₁ ‖·‖_∞)`, the largest column sum times the largest row sum.

    Returns:
        `[...]`, float32 or better; 0 for tokens of zeros.

    Raises:
        ValueError: if `x` has fewer than two axes or no entries, or `norm` is not one of the two.
        TypeError: if `x` is not floating.

    Reference:
        Dong, Cordonnier and Loukas 2021, "Attention is not all you need", equation 2 (composite norm).

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import rank_one_residual
    >>> tokens = jnp.array([[[3.0, 4.0], [3.0, 4.0]], [[3.0, 4.0], [-3.0, -4.0]]])
    >>> rank_one_residual(tokens).round(4).tolist()  # the same token twice; tokens whose mean is 0
    [0.0, 1.0]
    """
    checks.one_of("norm", norm, ("frobenius", "l1_linf"))
    tokens = unit_scale(measured("x", x, 2, "[..., T, D]"), 2)
    # Differences to the first token are exact when the tokens nearly agree; the mean of the tokens is not.
    differences = tokens - tokens[..., :1, :]
    residual = differences - jnp.mean(differences, axis=-2, keepdims=True)
    size = _frobenius if norm == "frobenius" else _l1_linf
    return divide(size(residual), size(tokens))


def default_tolerance(
    sigma: Float[Array, "*b r"], rows: int | Int[Array, "*#b"], columns: int | Int[Array, "*#b"], stored: jnp.dtype
) -> Float[Array, "*b"]:
    """The tolerance of `numerical_rank`, from the descending singular values, the shape and the dtype of the matrix."""
    computing = jnp.maximum(rows, columns).astype(sigma.dtype) * float(jnp.finfo(sigma.dtype).eps)
    return sigma[..., 0] * jnp.maximum(computing, float(jnp.finfo(stored).eps))


def count_above(sigma: Float[Array, "*b r"], threshold: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Number of singular values above the threshold of their matrix, −1 where they are not finite."""
    count = jnp.sum(sigma > threshold[..., None], axis=-1, dtype=jnp.int32)
    return jnp.where(jnp.all(jnp.isfinite(sigma), axis=-1), count, -1)


def stable_rank_of(sigma: Float[Array, "*b r"]) -> Float[Array, "*b"]:
    """`stable_rank` of the matrix with these descending singular values."""
    return jnp.sum(divide(sigma, sigma[..., :1]) ** 2, axis=-1)


def effective_rank_of(sigma: Float[Array, "*b r"]) -> Float[Array, "*b"]:
    """`effective_rank` of the matrix with these singular values."""
    total = jnp.sum(sigma, axis=-1)
    q = divide(sigma, total[..., None])
    zero = q == 0
    nats = -jnp.sum(jnp.where(zero, 0.0, q * jnp.log(jnp.where(zero, 1.0, q))), axis=-1)
    return jnp.where(total == 0, 0.0, jnp.exp(nats))


def _singular_values(matrix: ArrayLike) -> Array:
    # In XLA's CPU runtime (jaxlib 0.10) batched factorisations that run at the same time share a pool of one thread a
    # core, and can starve each other: stack the matrices of one compiled program into one call where there are many.
    return jnp.linalg.svd(measured("matrix", matrix, 2, "[..., m, n]"), compute_uv=False)


def _given_tolerance(tolerance: ArrayLike, batch: tuple[int, ...], dtype: jnp.dtype) -> Array:
    array = checks.as_array("tolerance", tolerance)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"tolerance must be real, got {array.dtype}")
    if array.ndim:
        checks.shape("tolerance", array, batch, "[...], one for each matrix")
    if checks.is_concrete(array) and not (np.asarray(array) >= 0).all():  # NaN fails too
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    return jnp.broadcast_to(array.astype(dtype), batch)


def _frobenius(x: Array) -> Array:
    return root(jnp.sum(x**2, axis=(-2, -1)))


def _l1_linf(x: Array) -> Array:
    columns, rows = (jnp.max(jnp.sum(jnp.abs(x), axis=axis), axis=-1) for axis in (-2, -1))
    return root(columns * rows)
