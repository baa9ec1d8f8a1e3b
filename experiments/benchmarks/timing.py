"""Time, compared fairly on a machine that others use too.

All sides of a comparison run in turn, round after round, so that whatever else the machine does falls on all of them;
the order changes from round to round, so that nobody always runs in what the same neighbour left behind. A side's time
is its median over the rounds; ratios are ratios of medians, with an interval from resampled rounds.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from experiments.estimates import CONFIDENCE, Estimate

LEAST_ROUNDS = 7
LEAST_SECONDS = 1e-2  # of a reading: short calls are repeated until a reading is far longer than the clock's grain
MOST_CALLS = 256  # in a reading
DRAWS = 2000  # of a bootstrap

Name = TypeVar("Name", bound=Hashable)
Statistic = Callable[[np.ndarray], np.ndarray]  # of medians `[..., sides]`, `[...]`


def interleave(
    sides: Mapping[Name, Callable[[], object]],
    *,
    rounds: int,
    least_seconds: float = LEAST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of a call of every side, one reading a round.

    A side is a function that returns when its work is done, and that has been called before (compiled, say). It is
    called once more before anything is timed, to learn how many calls make a reading.

    Args:
        sides: what to run, by name.
        rounds: how often.
        least_seconds: of a reading.
        clock: seconds, for tests.
    """
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"rounds must be at least {LEAST_ROUNDS}, got {rounds}")
    calls = {}
    for name, run in sides.items():
        once = _seconds(run, 1, clock)
        calls[name] = min(max(math.ceil(least_seconds / max(once, 1e-9)), 1), MOST_CALLS)
    names, readings, shuffle = list(sides), {name: [] for name in sides}, np.random.default_rng(0)
    for _ in range(rounds):
        for name in (names[i] for i in shuffle.permutation(len(names))):
            readings[name].append(_seconds(sides[name], calls[name], clock) / calls[name])
    return readings


def of_medians(seconds: ArrayLike, statistic: Statistic) -> Estimate:
    """`statistic` of the medians over rounds, with the percentile interval of a bootstrap over rounds.

    Args:
        seconds: `[rounds, sides]`; a round is drawn as a whole, since its readings share the machine's mood.
        statistic: medians `[..., sides]` to numbers `[...]`.
    """
    readings = np.asarray(seconds, dtype=np.float64)
    if readings.ndim != 2 or 0 in readings.shape:
        raise ValueError(f"seconds must be [rounds, sides], got shape {readings.shape}")
    rounds = readings.shape[0]
    drawn = np.random.default_rng(0).integers(rounds, size=(DRAWS, rounds))
    values = statistic(np.median(readings[drawn], axis=1))
    # One of the values, not between two of them: a statistic may be infinite.
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    return Estimate(float(statistic(np.median(readings, axis=0))), float(low), float(high), rounds)


def ratio(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Median of `first` over median of `second`, readings `[rounds]` of the same rounds."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"first and second must be [rounds] of the same rounds, got shapes {a.shape} and {b.shape}")
    return of_medians(np.stack([a, b], axis=1), lambda medians: medians[..., 0] / medians[..., 1])


def exponent(x: ArrayLike, seconds: ArrayLike) -> Estimate:
    """The exponent e of `seconds ∝ x^e`: least squares on the logarithms of the medians.

    Args:
        x: `[sides]`, the size of each side.
        seconds: `[rounds, sides]`.
    """
    logs = np.log(np.asarray(x, dtype=np.float64))
    if logs.ndim != 1 or np.shape(seconds)[1:] != logs.shape or logs.size < 2:
        raise ValueError(f"seconds must be [rounds, {logs.size}] of at least two sizes, got {np.shape(seconds)}")
    centred = logs - logs.mean()
    return of_medians(seconds, lambda medians: np.log(medians) @ centred / (centred @ centred))


def _seconds(run: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls):
        run()
    return clock() - started
