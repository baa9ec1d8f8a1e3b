"""Clusters of heads, by average linkage written out in plain loops."""

import numpy as np
import pytest

from attn_jax.diagnostics import head_clusters


def clusters64(distance, threshold):
    """Merges the two nearest clusters again and again; labels in the order of first appearance."""
    groups = [[i] for i in range(len(distance))]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        mean = {(a, b): np.mean([distance[i, j] for i in groups[a] for j in groups[b]]) for a, b in pairs}
        a, b = min(pairs, key=lambda pair: mean[pair])
        if mean[a, b] > threshold:
            break
        groups[b] += groups.pop(a)
    labels = np.empty(len(distance), int)
    for label, group in enumerate(sorted(groups, key=min)):
        labels[group] = label
    return labels


def distances(points):
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


@pytest.mark.parametrize("seed", range(5))
def test_average_linkage(seed):
    distance = distances(np.random.default_rng(seed).normal(size=(12, 3)))
    counts = set()
    for threshold in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 10.0):
        found = head_clusters(distance, threshold=threshold)
        np.testing.assert_array_equal(found, clusters64(distance, threshold))
        counts.add(found.max() + 1)
    assert {1, 12} < counts  # and numbers between


def test_two_groups_and_a_head_alone():
    points = np.array([[5.0], [0.0], [5.1], [0.1], [0.2], [20.0]])
    found = head_clusters(distances(points), threshold=1.0)
    np.testing.assert_array_equal(found, [0, 1, 0, 1, 1, 2])


def test_the_mean_distance_decides_and_not_the_nearest():
    # Single linkage would take all three, complete linkage none after the first merge.
    distance = distances(np.array([[0.0], [1.0], [2.2]]))
    np.testing.assert_array_equal(head_clusters(distance, threshold=1.69), [0, 0, 1])
    np.testing.assert_array_equal(head_clusters(distance, threshold=1.71), [0, 0, 0])


def test_a_distance_at_the_threshold_merges():
    distance = np.array([[0.0, 0.25], [0.25, 0.0]])
    np.testing.assert_array_equal(head_clusters(distance, threshold=0.25), [0, 0])
    np.testing.assert_array_equal(head_clusters(distance, threshold=0.2499), [0, 1])


def test_one_head_and_none():
    np.testing.assert_array_equal(head_clusters(np.zeros((1, 1)), threshold=0.1), [0])
    assert head_clusters(np.zeros((0, 0)), threshold=0.1).shape == (0,)


def test_rounding_is_no_error():
    distance = distances(np.random.default_rng(0).normal(size=(6, 2)))
    noise = 1 + 1e-6 * np.random.default_rng(1).uniform(-1, 1, (6, 6))
    found = head_clusters((distance * noise).astype(np.float32), threshold=1.0)
    np.testing.assert_array_equal(found, clusters64(distance, 1.0))


def changed(i, j, value):
    distance = np.ones((3, 3)) - np.eye(3)
    distance[i, j] = value
    return distance


@pytest.mark.parametrize(
    ("distance", "threshold", "error", "message"),
    [
        (np.ones((2, 3)), 0.1, ValueError, r"distance must have shape \[N, N\] = \(2, 2\), got \(2, 3\)"),
        (np.ones(3), 0.1, ValueError, r"distance must have rank 2, \[N, N\]"),
        (np.zeros((2, 2), int), 0.1, TypeError, "distance must have a floating dtype"),
        (changed(0, 2, np.nan), 0.1, ValueError, "distance must be finite, got nan between heads 0 and 2"),
        (changed(0, 2, -1.0), 0.1, ValueError, "distance must be at least 0, got -1 between heads 0 and 2"),
        (changed(0, 2, 2.0), 0.1, ValueError, "distance must be symmetric, got 2 between heads 0 and 2"),
        (changed(1, 1, 1.0), 0.1, ValueError, "distance must be 0 on the diagonal, got 1 between heads 1 and 1"),
        (np.zeros((2, 2)), -0.1, ValueError, "threshold must be at least 0, got -0.1"),
        (np.zeros((2, 2)), np.nan, ValueError, "threshold must be finite"),
    ],
)
def test_errors(distance, threshold, error, message):
    with pytest.raises(error, match=message):
        head_clusters(distance, threshold=threshold)
