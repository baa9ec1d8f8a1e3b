"""What `block_equivalence` makes of its rows: ratios of errors, tables and the figure."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import estimates, figures
from experiments.estimates import Estimate
from experiments.progress import Table, cells

FORMS = ("tiled", "dense")
STAGES = ("forward", "training")
RESULTS = ("output", "d_query", "d_key", "d_value")


def error_ratio(measurements: pd.DataFrame, mask: str, dtype: str, result: str) -> Estimate:
    """The error of tiled over that of dense, paired by seed."""
    tiled, dense = (errors(measurements, mask, dtype, form, result) for form in FORMS)
    return estimates.ratio(tiled, dense)


def errors(measurements: pd.DataFrame, mask: str, dtype: str, form: str, result: str) -> np.ndarray:
    """Errors `[seeds]`."""
    chosen = "measure == 'error' and mask == @mask and dtype == @dtype and form == @form and arm == @result"
    return estimates.by_run(measurements.query(chosen))


def counted(measurements: pd.DataFrame, form: str, measure: str, stage: str, mask: str) -> float:
    """Counted FLOPs or bytes."""
    chosen = "form == @form and measure == @measure and stage == @stage and mask == @mask"
    return float(measurements.query(chosen)["value"].to_numpy()[0])


def memories(measurements: pd.DataFrame, form: str, stage: str) -> np.ndarray:
    """Bytes, by ascending length."""
    chosen = measurements.query("form == @form and measure == 'temporary_bytes' and stage == @stage")
    return chosen.sort_values("n")["value"].to_numpy(dtype=np.float64)


def figure(config: Any, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 3)
    error, memory, work = axes[0]
    lengths, patterns = sorted(config.memory_lengths), _patterns(measurements)
    arms = list(itertools.product(config.masks, config.dtypes))
    for index, form in enumerate(FORMS):
        means = [np.mean([errors(measurements, *arm, form, result) for result in RESULTS]) for arm in arms]
        figures.curve(error, index, range(len(arms)), means, form, linestyle="none", alpha=0.8)
        for stage, style in zip(STAGES, ("-", "--"), strict=True):
            found = memories(measurements, form, stage) / 1e6
            figures.curve(memory, index, lengths, found, f"{form}, {stage}", linestyle=style)
    for index, (measure, stage) in enumerate(itertools.product(("flops", "bytes"), STAGES)):
        tiled, dense = (np.array([counted(measurements, f, measure, stage, mask) for mask in patterns]) for f in FORMS)
        figures.curve(work, index, patterns, tiled / dense, f"{measure}, {stage}", linestyle="none")
    error.set(title="Error against float64, mean of output and gradients", ylabel="‖x − x₆₄‖ / ‖x₆₄‖", yscale="log")
    error.set_xticks(range(len(arms)), [f"{mask}\n{dtype}" for mask, dtype in arms], rotation=60, fontsize=7)
    memory.set(title="Compiled temporary memory, one head", xlabel="n", ylabel="MB", yscale="log")
    figures.powers(memory, lengths)
    work.axhline(1, color="black", linewidth=1)
    work.set(title=f"Tiled over dense, n = {config.counted_length}", ylabel="ratio", yscale="log")
    for one in axes[0]:
        one.legend(fontsize=8)
    return drawn


def tables(config: Any, measurements: pd.DataFrame) -> list[Table]:
    ratios = [
        (*arm, *(str(error_ratio(measurements, *arm, result)) for result in RESULTS))
        for arm in itertools.product(config.masks, config.dtypes)
    ]
    work = [
        (
            mask,
            stage,
            *(counted(measurements, form, x, stage, mask) / 1e9 for x in ("flops", "bytes") for form in FORMS),
        )
        for mask, stage in itertools.product(_patterns(measurements), STAGES)
    ]
    memory = [
        (form, stage, *memories(measurements, form, stage) / 1e6) for form, stage in itertools.product(FORMS, STAGES)
    ]
    names = ("mask", "stage", "GFLOP tiled", "GFLOP dense", "GB tiled", "GB dense")
    lengths = map(str, sorted(config.memory_lengths))
    return [
        Table("Error against float64, tiled over dense", ("mask", "dtype", *RESULTS), cells(ratios)),
        Table(f"Products and bytes moved, n = {config.counted_length}", names, cells(work)),
        Table("Compiled temporary memory in MB, one head", ("form", "stage", *lengths), cells(memory)),
    ]


def _patterns(measurements: pd.DataFrame) -> list[str]:
    """The masks whose work was counted."""
    return [str(mask) for mask in measurements.query("measure == 'flops'")["mask"].unique()]
