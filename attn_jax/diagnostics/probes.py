"""Linear probes: whether something can be read off representations by a plane, and not by chance."""

import dataclasses

import numpy as np

from attn_jax import checks
from attn_jax.typing import ArrayLike, Float, Int


@dataclasses.dataclass(frozen=True)
class Probe:
    """What `linear_probe` found.

    Attributes:
        accuracy: `[folds]`, on the items of each fold, by a probe that was fitted to the others.
        control: `[folds]`, the same with the labels shuffled among all items before anything is fitted.
        majority: share of the most frequent label: the accuracy of looking at nothing.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import linear_probe
    >>> labels = np.arange(60) % 3
    >>> found = linear_probe(np.eye(3)[labels], labels)  # features that hold the label
    >>> found.accuracy.tolist(), round(found.majority, 3), bool(found.control.mean() < 0.6)
    ([1.0, 1.0, 1.0, 1.0, 1.0], 0.333, True)
    """

    accuracy: Float[np.ndarray, " folds"]
    control: Float[np.ndarray, " folds"]
    majority: float


def linear_probe(
    features: Float[ArrayLike, "n d"],
    labels: Int[ArrayLike, " n"],
    *,
    groups: Int[ArrayLike, " n"] | None = None,
    folds: int = 5,
    penalty: float = 1e-2,
    seed: int = 0,
) -> Probe:
    """The accuracy, held out, of the best plane between classes: ridge regression on one-hot labels, in closed form.

        W = (ZᵀZ / n + λ I)⁻¹ Zᵀ(Y − Ȳ) / n,    class = argmax z W + Ȳ

    with Z the features, standardised by the mean and spread of those that are fitted to. Runs on the host, in float64.
    What the control reaches above `majority` is what a probe of so many features makes up; items that are not
    independent (tokens of one document) belong to one group, or the probe reads the group.

    Args:
        features: `[n, D]`, floating and finite.
        labels: int `[n]`, the class of each item.
        groups: int `[n]`; a group is not divided between folds. None: each item is its own.
        folds: parts of the items, each held out once.
        penalty: λ, positive, in units of the features' variance.
        seed: of the folds and of the shuffled labels.

    Returns:
        `Probe`.

    Raises:
        ValueError: if shapes do not go together, a feature is not finite, there is one label only, or fewer groups than
            folds.
        TypeError: if `features` is not floating, or `labels` or `groups` no integers.

    Reference: Alain and Bengio 2016 (probes); Hewitt and Liang 2019 (controls).

    >>> import numpy as np
    >>> from attn_jax.diagnostics import linear_probe
    >>> x = np.random.default_rng(0).standard_normal((200, 2))
    >>> side, parity = (x[:, 0] > x[:, 1]).astype(int), (x[:, 0] * x[:, 1] > 0).astype(int)
    >>> [bool(linear_probe(x, labels).accuracy.mean() > 0.9) for labels in (side, parity)]  # no plane separates parity
    [True, False]
    """
    x = np.asarray(checks.floating_array("features", features), np.float64)
    checks.rank("features", x, 2, "[n, D]")
    if not np.isfinite(x).all():
        raise ValueError(f"features must be finite, got {np.count_nonzero(~np.isfinite(x))} that are not")
    y, units = _integers("labels", labels, len(x)), np.arange(len(x))
    if groups is not None:
        units = _integers("groups", groups, len(x))
    classes, y = np.unique(y, return_inverse=True)
    names, units = np.unique(units, return_inverse=True)
    folds = checks.positive_int("folds", folds, least=2)
    if len(classes) < 2:
        raise ValueError(f"labels must hold at least two classes, got {len(classes)}")
    if len(names) < folds:
        raise ValueError(f"there must be at least folds = {folds} groups, got {len(names)}")
    penalty = checks.finite_number("penalty", penalty, positive=True)
    rng = np.random.default_rng(checks.positive_int("seed", seed, least=0))
    fold = (rng.permutation(len(names)) % folds)[units]
    accuracy, control = (
        np.array([_held_out(x, labels, fold == k, len(classes), penalty) for k in range(folds)])
        for labels in (y, rng.permutation(y))
    )
    return Probe(accuracy, control, float(np.bincount(y).max() / len(y)))


def _held_out(x: np.ndarray, y: np.ndarray, out: np.ndarray, classes: int, penalty: float) -> float:
    """Accuracy on the items `out` of a probe fitted to the others."""
    mean, spread = x[~out].mean(axis=0), x[~out].std(axis=0)
    z = (x - mean) / np.where(spread > 0, spread, 1)
    one_hot = np.eye(classes)[y]
    share = one_hot[~out].mean(axis=0)
    count, width = z[~out].shape
    covariance = z[~out].T @ z[~out] / count + penalty * np.eye(width)
    weights = np.linalg.solve(covariance, z[~out].T @ (one_hot[~out] - share) / count)
    return float(np.mean(np.argmax(z[out] @ weights + share, axis=1) == y[out]))


def _integers(name: str, x: ArrayLike, count: int) -> np.ndarray:
    array = np.asarray(checks.integer_array(name, x))
    checks.shape(name, array, (count,), "[n]")
    return array
