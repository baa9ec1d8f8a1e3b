"""What the projections of a layer say about its heads: which are one, which write nothing, whether W_O mixes them.

Head n matches by `W_Q W_Kᵀ` and fetches by `W_V W_O`, both `[D, D]`. Their norms and inner products need no such
matrix: `⟨A Bᵀ, C Eᵀ⟩ = Σ (AᵀC) ∘ (BᵀE)`, H × H products. Float64 NumPy throughout.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ALIKE = 1e-5  # relative difference of what is one


def equal_projections(weights: Mapping[str, Array]) -> list[tuple[str, str]]:
    """The pairs of "query", "key" and "value" whose weights are equal."""
    found = []
    for one, other in (("query", "key"), ("key", "value"), ("query", "value")):
        if one in weights and other in weights and weights[one].shape == weights[other].shape:
            size = np.abs(weights[one]).max(initial=0)
            if size > 0 and np.abs(weights[one] - weights[other]).max() < ALIKE * size:
                found.append((one, other))
    return found


def mixing(out: Array) -> str:
    """Whether W_O `[N, V, D]` mixes heads: "full", "identity" (up to a factor), or "blocks" that keep them apart."""
    heads, width, model_width = out.shape
    matrix = out.reshape(-1, model_width)
    size = np.abs(matrix).max(initial=0)
    if matrix.shape[0] != matrix.shape[1] or size == 0:
        return "full"
    if np.abs(matrix - np.eye(len(matrix)) * matrix[0, 0]).max() < ALIKE * size:
        return "identity"
    if heads == 1:
        return "full"
    blocks = np.moveaxis(matrix.reshape(heads, width, heads, width), 2, 1)
    return "blocks" if np.abs(blocks[~np.eye(heads, dtype=bool)]).max() < ALIKE * size else "full"


def grouped(weight: Array, heads: int) -> Array:
    """Key/value weights `[D, K, H]`, one for each of N query heads."""
    return np.repeat(weight, heads // weight.shape[1], axis=1)


def fetch_norms(value: Array, out: Array) -> Array:
    """`‖W_V W_O‖_F` of each head, `[N]`, of `[D, K, V]` and `[N, V, D]`."""
    return np.sqrt(np.maximum(np.diagonal(_inner(*_fetching(value, out))), 0))


def alike(query: Array, key: Array, value: Array, out: Array) -> tuple[Array, Array]:
    """Cosines between heads of how they match and of what they fetch, `[N, N]` each; 0 where either is 0."""
    heads = query.shape[1]
    q, k = (np.moveaxis(x, 1, 0) for x in (query, grouped(key, heads)))
    return _cosines(_inner(q, k)), _cosines(_inner(*_fetching(value, out)))


def _fetching(value: Array, out: Array) -> tuple[Array, Array]:
    """W_V and W_Oᵀ of each head, `[N, D, V]`."""
    return np.moveaxis(grouped(value, out.shape[0]), 1, 0), np.swapaxes(out, 1, 2)


def _inner(left: Array, right: Array) -> Array:
    """`⟨A_n B_nᵀ, A_m B_mᵀ⟩`, `[N, N]`, of `[N, D, H]` each."""
    grams = [np.einsum("ndg,mdh->nmgh", x, x, optimize=True) for x in (left, right)]
    return np.einsum("nmgh,nmgh->nm", *grams)


def _cosines(inner: Array) -> Array:
    size = np.sqrt(np.maximum(np.diagonal(inner), 0))
    both = size[:, None] * size
    return np.where(both > 0, inner / np.where(both > 0, both, 1), 0)
