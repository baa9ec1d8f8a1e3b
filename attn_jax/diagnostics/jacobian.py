"""How much the softmax still lets a gradient through: the Jacobian `diag(p) − p pᵀ` of each row.

Both numbers are written in the largest weight `a` and sums over the others, which stay exact when `a` is nearly 1. The
textbook `Σp² − 2Σp³ + (Σp²)²` cancels there: in float32 it is 142% off, or negative, at `a = 1 − 1e-4`.
Rows are renormalised first, as for the entropy. A row of zeros gives 0.
"""

import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured, renormalize, root
from attn_jax.typing import Array, ArrayLike, Float


def softmax_jacobian_trace(weights: Float[ArrayLike, "*b s"]) -> Float[Array, "*b"]:
    """Trace of the softmax Jacobian, `1 − Σp² = Σ p(1 − p)`: 0 when one-hot, `1 − 1/n` when uniform over n.

    Args:
        weights: floating `[..., S]`, after the softmax.

    Returns:
        `[...]`, float32 or better. It falls monotonically with sharpness.

    Raises:
        ValueError: if `weights` has no axis, or no key.
        TypeError: if it is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import softmax_jacobian_trace
    >>> softmax_jacobian_trace(jnp.array([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).tolist()  # 1 - 1/4, and 0
    [0.75, 0.0]
    """
    largest, others = _split(weights)
    return largest * jnp.sum(others, axis=-1) + jnp.sum(others * (1 - others), axis=-1)


def softmax_jacobian_norm(weights: Float[ArrayLike, "*b s"]) -> Float[Array, "*b"]:
    """Frobenius norm of the softmax Jacobian, by `jacobian_norm_from_tails`.

    It is small both when the row is uniform (`sqrt(n − 1) / n`) and when it is one-hot (0): read it with the entropy.
    The spectral norm is at most `2 max p(1 − p)`.

    Args:
        weights: floating `[..., S]`, after the softmax.

    Returns:
        `[...]`, float32 or better, between 0 and 1/2 (two equal keys).

    Raises:
        ValueError: if `weights` has no axis, or no key.
        TypeError: if it is not floating.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import softmax_jacobian_norm
    >>> weights = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], np.float32)
    >>> jacobians = [np.diag(p) - np.outer(p, p) for p in weights]
    >>> norm = softmax_jacobian_norm(weights)
    >>> bool(np.allclose(norm, np.linalg.norm(jacobians, axis=(-2, -1)))), float(norm[1])  # one-hot: no gradient
    (True, 0.0)
    """
    largest, others = _split(weights)
    tail_1, tail_2, tail_3 = (jnp.sum(others**r, axis=-1) for r in (1, 2, 3))
    return jacobian_norm_from_tails(largest, tail_1, tail_2, tail_3)


def jacobian_norm_from_tails(
    max_weight: Float[ArrayLike, "*b"],
    tail_1: Float[ArrayLike, "*b"],
    tail_2: Float[ArrayLike, "*b"],
    tail_3: Float[ArrayLike, "*b"],
) -> Float[Array, "*b"]:
    """Frobenius norm of the softmax Jacobian from what one pass over the keys leaves.

        F² = (a T_1)² + 2 a² T_2 + (T_2 − 2 T_3 + T_2²)

    with `a = p_max` and `T_r` the sum of `p^r` over the other keys, so `T_1 = 1 − a`. No term can cancel: the others
    are at most 1/2 each, so that `p² − 2p³ ≥ 0`.

    Args:
        max_weight: a, floating `[...]`.
        tail_1: T_1, of the same shape; as a sum where there is one, since `1 − a` is rounded when `a` is near 1.
        tail_2: T_2, of the same shape.
        tail_3: T_3, of the same shape.

    Returns:
        `[...]`, float32 or better.

    Raises:
        ValueError: if the shapes differ.
        TypeError: if an array is not floating.
    """
    a = measured("max_weight", max_weight, 0, "[...]")
    tails = []
    for name, tail in (("tail_1", tail_1), ("tail_2", tail_2), ("tail_3", tail_3)):
        tails.append(measured(name, tail, 0, "[...]"))
        checks.shape(name, tails[-1], a.shape, "of max_weight")
    t_1, t_2, t_3 = tails
    rest = jnp.maximum(t_2 - 2 * t_3, 0.0) + t_2**2  # 0 for two equal keys, where rounding may turn it negative
    return root((a * t_1) ** 2 + 2 * a**2 * t_2 + rest)


def _split(weights: ArrayLike) -> tuple[Array, Array]:
    """The largest weight of each row, and the row with that one entry set to 0."""
    p = renormalize(measured("weights", weights, 1, "[..., S]"))
    keys = jnp.arange(p.shape[-1]).reshape((1,) * (p.ndim - 1) + (-1,))
    at_largest = keys == jnp.argmax(p, axis=-1, keepdims=True)
    return jnp.sum(jnp.where(at_largest, p, 0.0), axis=-1), jnp.where(at_largest, 0.0, p)
