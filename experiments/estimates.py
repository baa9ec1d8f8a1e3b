"""Estimates with 95% intervals, over seeds or documents: what verdicts are decided on.

The unit of independence is the seed (or the document): whatever is measured within one is first reduced to one number,
then the interval is Student's t over those numbers.
"""

import dataclasses

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy import stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measured value, its 95% interval, and how many independent runs (seeds, documents, rounds) it rests on.

    The count is None where nothing is sampled: what is counted (FLOPs, bytes) is the same in every run.
    """

    value: float
    low: float
    high: float
    count: int | None

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def counted(value: float) -> Estimate:
    """A number that is counted, not sampled."""
    return Estimate(float(value), float(value), float(value), None)


def mean(values: ArrayLike) -> Estimate:
    """Mean over independent runs with Student's t interval; one run alone has an unbounded interval."""
    x = np.asarray(values, dtype=np.float64).ravel()
    if x.size == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    middle = float(x.mean())
    if x.size == 1:
        return Estimate(middle, -np.inf, np.inf, 1)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, x.size - 1) * x.std(ddof=1) / np.sqrt(x.size))
    return Estimate(middle, middle - half, middle + half, int(x.size))


def difference(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Mean of first − second, paired: the k-th entries of both come from the same seed."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"first and second must be paired; got shapes {a.shape} and {b.shape}")
    return mean(a - b)


def ratio(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Geometric mean of first / second, paired, with the interval taken on the logarithm."""
    logs = difference(np.log(np.asarray(first, np.float64)), np.log(np.asarray(second, np.float64)))
    value, low, high = (float(np.exp(x)) for x in (logs.value, logs.low, logs.high))
    return Estimate(value, low, high, logs.count)


def share(solved: ArrayLike) -> Estimate:
    """The share of independent runs that did it, with Wilson's interval: for outcomes that are yes or no."""
    x = np.asarray(solved, dtype=bool).ravel()
    if x.size == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    low, high = stats.binomtest(int(x.sum()), x.size).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(float(x.mean()), float(low), float(high), int(x.size))


def share_difference(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Share of first − share of second, with the interval that Newcombe (1998, method 10) makes of Wilson's two."""
    a, b = share(first), share(second)
    middle = a.value - b.value
    below = np.hypot(a.value - a.low, b.high - b.value)
    above = np.hypot(a.high - a.value, b.value - b.low)
    return Estimate(middle, float(middle - below), float(middle + above), min(a.count or 0, b.count or 0))


def slope(x: ArrayLike, y: ArrayLike) -> Estimate:
    """Least-squares slope of each row of `y` [runs, points] on `x` [points], then the mean over runs."""
    points, rows = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if rows.ndim != 2 or rows.shape[1] != points.size or points.size < 2:
        raise ValueError(f"y must be [runs, {points.size}] with at least two points, got {rows.shape}")
    centred = points - points.mean()
    return mean(rows @ centred / (centred @ centred))


def by_run(table: pd.DataFrame, over: str | None = None, *, run: str = "seed") -> np.ndarray:
    """`value` as [runs] or, with `over`, [runs, levels of that column]; runs and levels ascending."""
    if over is None:
        return np.asarray(table.groupby(run)["value"].mean(), dtype=np.float64)
    return np.asarray(table.pivot_table(index=run, columns=over, values="value"), dtype=np.float64)
