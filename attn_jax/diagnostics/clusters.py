"""Groups of heads that look alike: average linkage on the distances between them."""

import numpy as np

from attn_jax import checks
from attn_jax.typing import ArrayLike, Float, Int


def head_clusters(distance: Float[ArrayLike, "n n"], *, threshold: float) -> Int[np.ndarray, " n"]:
    """Which heads belong together: clusters are merged while the mean distance between them is at most `threshold`.

    Of the Jensen–Shannon divergence the square root is a metric, so heads with like patterns are

        head_clusters(np.sqrt(head_similarity(weights)), threshold=0.2)

    and heads with like outputs those of the distance `1 − linear_cka`. Runs on the host, in float64.

    Args:
        distance: `[N, N]`, floating, symmetric, at least 0, and 0 on the diagonal.
        threshold: the largest mean distance of two clusters that are merged, in the units of `distance`; at least 0.

    Returns:
        int `[N]`, the cluster of each head, numbered from 0 in the order in which they first appear.

    Raises:
        ValueError: if `distance` is not a square matrix of finite distances (a pair of heads that `head_similarity`
            could not compare is NaN), or `threshold` is negative.
        TypeError: if `distance` is not floating.

    Reference: Sokal and Michener 1958 (average linkage).

    >>> import numpy as np
    >>> from attn_jax.diagnostics import head_clusters
    >>> distance = np.array([[0.0, 0.9, 0.1], [0.9, 0.0, 0.8], [0.1, 0.8, 0.0]])
    >>> head_clusters(distance, threshold=0.2).tolist(), head_clusters(distance, threshold=0.9).tolist()
    ([0, 1, 0], [0, 0, 0])
    """
    from scipy.cluster import hierarchy  # half a second to import, and only this function needs it
    from scipy.spatial.distance import squareform

    threshold = checks.finite_number("threshold", threshold, least=0.0)
    matrix = np.asarray(checks.floating_array("distance", distance), np.float64)
    checks.rank("distance", matrix, 2, "[N, N]")
    checks.shape("distance", matrix, (len(matrix),) * 2, "[N, N]")
    _check_distances(matrix)
    if len(matrix) < 2:
        return np.zeros(len(matrix), int)
    linkage = hierarchy.average(squareform((matrix + matrix.T) / 2, checks=False))
    clusters = hierarchy.fcluster(linkage, threshold, criterion="distance")
    _, first, labels = np.unique(clusters, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[labels]


def _check_distances(matrix: Float[np.ndarray, "n n"]) -> None:
    """Raises unless these are distances, up to the rounding of float32."""
    wrong = {
        "finite": ~np.isfinite(matrix),
        "at least 0": matrix < 0,
        "symmetric": ~np.isclose(matrix, matrix.T, rtol=1e-4, atol=1e-6),
        "0 on the diagonal": np.eye(len(matrix), dtype=bool) & (np.abs(matrix) > 1e-6),
    }
    for what, at in wrong.items():
        if at.any():
            i, j = np.argwhere(at)[0]
            raise ValueError(f"distance must be {what}, got {matrix[i, j]:g} between heads {i} and {j}")
