"""How the measurements of `projections` are read: one number a seed."""

import math

import numpy as np
import pandas as pd

from experiments import estimates
from experiments.arms import best_of
from experiments.estimates import Estimate
from experiments.projections.config import SOLVED, ProjectionsConfig


def by_width(measurements: pd.DataFrame, arm: str, measure: str, length: int) -> np.ndarray:
    """`[seeds, widths]` of what is on the diagonal."""
    found = measurements.query("part == 'diagonal' and arm == @arm and measure == @measure and length == @length")
    return estimates.by_run(found, "width")


def half_width(config: ProjectionsConfig, measurements: pd.DataFrame, arm: str, length: int) -> np.ndarray:
    """`[seeds]`: the d at which the mean weight on the diagonal passes 1/2; NaN if the sweep does not reach it."""
    found, logs = [], np.log(config.widths)
    for weights in by_width(measurements, arm, "weight", length):
        after = int(np.argmax(weights >= 0.5))
        if after == 0:
            found.append(np.nan)
            continue
        low, high = weights[after - 1], weights[after]
        found.append(math.exp(logs[after - 1] + (0.5 - low) / (high - low) * (logs[after] - logs[after - 1])))
    return np.asarray(found)


def predicted_half(arm: str, length: float) -> float:
    """Where we predict that d: the own logit is as large as the logarithm of what all others sum to."""
    return 2 * math.log(length) if arm == "unscaled" else (math.log(length) + 0.5) ** 2


def condition(config: ProjectionsConfig, measurements: pd.DataFrame, arm: str) -> np.ndarray:
    """`[seeds]`: measured over predicted √d (unscaled: d), mean over the n whose half the sweep reaches."""
    power = 1.0 if arm == "unscaled" else 0.5
    ratios = [(half_width(config, measurements, arm, n) / predicted_half(arm, n)) ** power for n in config.lengths]
    reached = [x for x in ratios if np.isfinite(x).all()]
    return np.mean(reached, axis=0) if reached else np.full(config.seeds, np.nan)


def simulated(measurements: pd.DataFrame, part: str, measure: str, **where: str) -> np.ndarray:
    """`[seeds]`."""
    found = measurements
    for column, level in {"part": part, "measure": measure, **where}.items():
        found = found.query(f"{column} == {level!r}")
    return estimates.by_run(found)


def trained(
    config: ProjectionsConfig, measurements: pd.DataFrame, part: str, arm: str, measure: str = "loss"
) -> np.ndarray:
    """`[seeds]`: at the arm's best rate; NaN, which settles nothing, if that is at an edge or the arm was left out."""
    best = best_of(measurements.query("part == @part"), arm, measure=measure)
    runs = config.runs if part == "language" else config.relation_runs
    return best.values if best.inside else np.full(runs, np.nan)


def begun(config: ProjectionsConfig, measurements: pd.DataFrame, arm: str, measure: str) -> np.ndarray:
    """`[seeds]`: of the language model before the first step; NaN if the arm was left out."""
    found = measurements.query("part == 'language' and arm == @arm and step == 0 and measure == @measure")
    return estimates.by_run(found) if len(found) else np.full(config.runs, np.nan)


def cost(config: ProjectionsConfig, measurements: pd.DataFrame, arm: str) -> Estimate:
    """The loss of an arm of the language model over that of separate projections, paired."""
    return estimates.difference(*(trained(config, measurements, "language", name) for name in (arm, "separate")))


def solved(config: ProjectionsConfig, measurements: pd.DataFrame, arm: str) -> Estimate:
    """The share of runs that solve the relation task."""
    accuracy = trained(config, measurements, "relation", arm, "accuracy")
    if np.isnan(accuracy).all():
        return Estimate(np.nan, np.nan, np.nan, accuracy.size)
    return estimates.share(accuracy > SOLVED)
