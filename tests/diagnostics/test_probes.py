"""Linear probes: what can be read, what cannot, and what a probe makes up."""

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from attn_jax.diagnostics import linear_probe


def data(n=300, width=12, classes=3, signal=1.0, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    return signal * np.eye(classes, width)[labels] + rng.normal(size=(n, width)), labels


def test_what_is_there_is_read_and_shuffled_labels_are_not():
    features, labels = data(signal=6.0)
    found = linear_probe(features, labels)
    assert found.accuracy.shape == found.control.shape == (5,)
    assert found.accuracy.mean() > 0.95
    assert abs(found.control.mean() - 1 / 3) < 0.1
    assert found.majority == np.bincount(labels).max() / len(labels)


def test_what_is_not_there_is_not_read():
    features, labels = data(signal=0.0)
    found = linear_probe(features, labels)
    assert abs(found.accuracy.mean() - 1 / 3) < 0.1  # held out: what it was fitted to it would get right more often
    wide = linear_probe(*data(n=60, width=100, signal=0.0))
    assert wide.accuracy.mean() < 0.55


def test_it_is_the_ridge_classifier_of_scikit_learn():
    features, labels = data(signal=2.0)
    scale = np.linspace(0.1, 30, 12)
    order = np.random.default_rng(0).permutation(len(labels)) % 3
    expected = []
    for k in range(3):
        fitted, out = features[order != k] * scale, features[order == k] * scale
        mean, spread = fitted.mean(axis=0), fitted.std(axis=0)
        # One-hot labels, for three classes: of −1 and 1 there, of 0 and 1 here; the planes are the same.
        ridge = RidgeClassifier(alpha=0.01 * len(fitted), solver="cholesky").fit(
            (fitted - mean) / spread, labels[order != k]
        )
        expected.append(ridge.score((out - mean) / spread, labels[order == k]))
    found = linear_probe(features * scale, labels, folds=3)
    np.testing.assert_allclose(found.accuracy, expected)
    np.testing.assert_allclose(linear_probe(7 * features + 3, labels, folds=3).accuracy, expected)


def test_groups_are_not_divided():
    """Documents that have a direction of their own, and one label each at random: nothing to read but the document."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 15)
    labels = rng.permutation(np.arange(20) % 2)[groups]
    features = 5 * rng.normal(size=(20, 30))[groups] + rng.normal(size=(300, 30))
    assert linear_probe(features, labels).accuracy.mean() > 0.95
    assert linear_probe(features, labels, groups=groups).accuracy.mean() < 0.75


def test_labels_may_be_any_integers_and_a_constant_feature_tells_nothing():
    features, labels = data(signal=3.0)
    constant = np.concatenate([features, np.full((300, 1), 7.0)], axis=1)
    np.testing.assert_allclose(
        linear_probe(constant, 10 * labels - 5).accuracy, linear_probe(features, labels).accuracy
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"features": np.ones(3)}, ValueError, r"features must have rank 2, \[n, D\]"),
        ({"features": np.full((4, 2), np.nan)}, ValueError, "features must be finite, got 8 that are not"),
        ({"features": np.ones((4, 2), int)}, TypeError, "features must have a floating dtype"),
        ({"labels": np.zeros(3, int)}, ValueError, r"labels must have shape \[n\] = \(4,\), got \(3,\)"),
        ({"labels": np.zeros(4)}, TypeError, "labels must have an integer dtype"),
        ({"labels": np.zeros(4, int)}, ValueError, "labels must hold at least two classes, got 1"),
        ({"groups": np.zeros(4, int)}, ValueError, "there must be at least folds = 2 groups, got 1"),
        ({"folds": 5}, ValueError, "there must be at least folds = 5 groups, got 4"),
        ({"folds": 1}, ValueError, "folds must be at least 2, got 1"),
        ({"penalty": 0.0}, ValueError, "penalty must be positive and finite, got 0.0"),
    ],
)
def test_errors(changes, error, message):
    given = {"features": np.ones((4, 2)), "labels": np.arange(4) % 2, "folds": 2, **changes}
    with pytest.raises(error, match=message):
        linear_probe(given.pop("features"), given.pop("labels"), **given)
