"""What `linear_stability` makes of its rows: errors, growth, the verdict, the table and the figure."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.estimates import Estimate
from experiments.progress import Table, cells
from experiments.verdicts import Outcome


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is computed.

    Attributes:
        normalize: whether outputs are divided by the sum of the weights.
        fades: whether the memory has a decay.
    """

    normalize: bool
    fades: bool


ARMS = {"normalised": Arm(True, False), "unnormalised": Arm(False, False), "fading": Arm(False, True)}
DTYPES = ("float32", "bfloat16", "float16")
FORMS = ("chunkwise", "recurrent", "parallel")


def judge(config: Any, measurements: pd.DataFrame) -> list[Outcome]:
    half = [dtype for dtype in DTYPES if dtype != "float32"]

    def worst(dtypes: Iterable[str], arms: Iterable[str], ways: Iterable[str]) -> Estimate:
        found = [last(measurements, *each) for each in itertools.product(dtypes, arms, ways)]
        return max(found, key=lambda one: one.value)

    own = {
        f"{dtype}_{name}": last(measurements, dtype, name, "own sums")
        for dtype in half
        for name, arm in ARMS.items()
        if not arm.fades
    }
    outcome = claims.judge(
        "L4",
        {
            "kept": worst(DTYPES, ARMS, FORMS),
            **own,
            "fading": worst(half, ["fading"], ["own sums"]),
            "softmax": worst(DTYPES, ["normalised"], ["softmax"]),
            "growth_chunks": growth(measurements, "float32", "normalised", "chunkwise"),
            "growth_tokens": growth(measurements, "float32", "normalised", "recurrent"),
            "growth_softmax": growth(measurements, "float32", "normalised", "softmax"),
        },
        device=jax.devices()[0].device_kind,
        width=config.width,
        lengths=", ".join(map(str, sorted(config.lengths))),
        square=config.square_length,
        decay=f"{config.decay:.4g}",
        chunk=config.chunk_size,
        rows=config.rows,
        seeds=config.seeds,
    )
    return [outcome]


def errors(measurements: pd.DataFrame, dtype: str, arm: str, way: str) -> np.ndarray:
    """Errors `[seeds, lengths]`, of the lengths that a way is run at, ascending."""
    return estimates.by_run(measurements.query("dtype == @dtype and arm == @arm and way == @way"), "n")


def last(measurements: pd.DataFrame, dtype: str, arm: str, way: str) -> Estimate:
    """The error at the longest length."""
    return estimates.mean(errors(measurements, dtype, arm, way)[:, -1])


def growth(measurements: pd.DataFrame, dtype: str, arm: str, way: str) -> Estimate:
    """The exponent of the error in n."""
    lengths = sorted(measurements.query("dtype == @dtype and arm == @arm and way == @way")["n"].unique())
    return estimates.slope(np.log(lengths), np.log(errors(measurements, dtype, arm, way)))


def figure(config: Any, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, len(DTYPES))
    lengths = sorted(config.lengths)
    for one, dtype in zip(axes[0], DTYPES, strict=True):
        lines = [("softmax", "normalised"), *((way, "normalised") for way in FORMS)]
        if dtype != "float32":
            lines += [("own sums", arm) for arm in ARMS]
        for index, (way, arm) in enumerate(lines):
            found = errors(measurements, dtype, arm, way).mean(0)
            label = f"sums in {dtype}, {arm}" if way == "own sums" else way
            figures.curve(one, index, lengths[: len(found)], found, label, alpha=0.85)
        one.set(title=f"{dtype} inputs", xlabel="n", ylabel="‖x − x₆₄‖ / ‖x₆₄‖", yscale="log")
        figures.powers(one, lengths)
        one.legend(fontsize=7)
    return drawn


def tables(config: Any, measurements: pd.DataFrame) -> list[Table]:
    lengths, rows = sorted(config.lengths), []
    for dtype in DTYPES:
        ways = [(arm, way) for arm in ARMS for way in (*FORMS, *(() if dtype == "float32" else ("own sums",)))]
        for arm, way in (*ways, ("normalised", "softmax")):
            found = errors(measurements, dtype, arm, way).mean(0)
            blank = ("–",) * (len(lengths) - len(found))
            rows.append(
                (dtype, arm, way, *(f"{x:.1e}" for x in found), *blank, f"{_exponent(measurements, dtype, arm, way)}")
            )
    return [Table("Relative error against float64", ("dtype", "arm", "way", *map(str, lengths), "growth"), cells(rows))]


def _exponent(measurements: pd.DataFrame, dtype: str, arm: str, way: str) -> str:
    """The growth in short, where a way is run at two lengths."""
    return (
        f"n^{growth(measurements, dtype, arm, way).value:.2f}"
        if errors(measurements, dtype, arm, way).shape[1] > 1
        else "–"
    )
