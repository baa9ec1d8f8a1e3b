"""What `complexity` makes of its rows: exponents, the crossing of a layer, verdicts, tables and the figure."""

from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, counting, estimates, figures
from experiments.benchmarks import timing
from experiments.estimates import Estimate
from experiments.mechanisms import MECHANISMS
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

STAGES = ("forward", "training")
MEMORIES = (*STAGES, "kept")


def judge(config: Any, measurements: pd.DataFrame) -> list[Outcome]:
    lengths = {key: time_exponent(measurements, "n", *key) for key in _arms(config)}
    excess = [_less(estimate, MECHANISMS[name].exponent) for (name, _), estimate in lengths.items()]
    widths = [time_exponent(measurements, "d", *key) for key in _arms(config)]
    width, device = 6 * config.model_width, jax.devices()[0].device_kind
    short = [n for n in config.layer_lengths if n <= width]
    time = claims.judge(
        "C1",
        {
            "excess_least": min(excess, key=_value),
            "excess_most": max(excess, key=_value),
            "layer_exponent": timing.exponent(short, readings(measurements, "layer", "blockwise")[:, : len(short)]),
            "crossing_timed": crossing_timed(config, measurements, "blockwise"),
            "crossing_counted": estimates.counted(crossing_counted(config, measurements)),
            "width_least": min(widths, key=_value),
            "width_most": max(widths, key=_value),
        },
        device=device,
        mechanisms=", ".join(config.mechanisms),
        lengths=_listed(config.lengths),
        heads=config.heads,
        width=config.head_dim,
        model_width=config.model_width,
        rounds=config.rounds,
    )
    memory = claims.judge(
        "C1b",
        {
            **{f"scores_{vary}": memory_exponent(measurements, "dense", "training", vary) for vary in "dnh"},
            **{f"activations_{vary}": memory_exponent(measurements, "blockwise", "kept", vary) for vary in "ndh"},
            "tiled_n": memory_exponent(measurements, "blockwise", "training", "n"),
        },
        device=device,
        lengths=_listed(config.memory_lengths),
        widths=_listed(config.widths),
        heads=_listed(config.memory_heads),
        length=config.length,
        width=config.head_dim,
        head=config.heads,
    )
    return [time, memory]


def readings(measurements: pd.DataFrame, vary: str, mechanism: str, stage: str = "forward") -> np.ndarray:
    """Seconds `[rounds, sizes]` while one size varies, sizes ascending."""
    chosen = "vary == @vary and mechanism == @mechanism and stage == @stage and seconds == seconds"
    column = "n" if vary == "layer" else vary
    table = measurements.query(chosen).pivot_table(index="round", columns=column, values="seconds")
    return table.to_numpy(dtype=np.float64)


def time_exponent(measurements: pd.DataFrame, vary: str, mechanism: str, stage: str) -> Estimate:
    """The exponent of time in a size."""
    chosen = "vary == @vary and mechanism == @mechanism and stage == @stage and seconds == seconds"
    sizes = np.unique(measurements.query(chosen)[vary])
    return timing.exponent(sizes, readings(measurements, vary, mechanism, stage))


def memory_exponent(measurements: pd.DataFrame, mechanism: str, stage: str, vary: str) -> Estimate:
    """The exponent of bytes in a size."""
    chosen = "vary == @vary and mechanism == @mechanism and stage == @stage and measure == 'bytes'"
    table = measurements.query(chosen).sort_values(vary)
    return counting.counted_exponent(table[vary], table["value"])


def crossing_timed(config: Any, measurements: pd.DataFrame, mechanism: str) -> Estimate:
    """The n, over 6D, at which attention takes as long as the rest of a layer: half of its time."""
    layer, bare = (readings(measurements, "layer", name) for name in (mechanism, "bare"))
    shares, sizes = np.asarray(config.layer_lengths) / (6 * config.model_width), layer.shape[1]

    def crossing(medians: np.ndarray) -> np.ndarray:
        return np.apply_along_axis(_where_equal, -1, medians[..., :sizes] / medians[..., sizes:] - 1, shares)

    return timing.of_medians(np.concatenate([layer, bare], axis=1), crossing)


def crossing_counted(config: Any, measurements: pd.DataFrame) -> float:
    """The same by FLOPs, of the dense form, whose program has no loop."""
    flops = measurements.query("measure == 'flops'").pivot_table(index="n", columns="mechanism", values="value")
    shares = np.asarray(config.layer_lengths) / (6 * config.model_width)
    return float(_where_equal((flops["dense"] / flops["bare"]).to_numpy() - 1, shares))


def _where_equal(ratio: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x where the ratio, made to rise with x, passes 1; 0 or infinity if that is outside of what was measured."""
    logs = np.log(np.maximum(np.maximum.accumulate(ratio), 1e-9))  # noise can make a layer faster than its rest
    return np.exp(np.interp(0, logs, np.log(x), left=-np.inf, right=np.inf))


def figure(config: Any, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 4)
    by_length, by_width, layer, memory = axes[0]
    for index, name in enumerate(config.mechanisms):
        for stage, style in zip(STAGES, ("-", "--"), strict=True):
            label = f"{name}, {stage}"
            for one, vary, sizes in ((by_length, "n", config.lengths), (by_width, "d", config.widths)):
                medians = np.median(readings(measurements, vary, name, stage), axis=0) * 1e3
                figures.curve(one, index, sorted(sizes), medians, label, linestyle=style)
            chosen = "vary == 'n' and mechanism == @name and stage == @stage and measure == 'bytes'"
            table = measurements.query(chosen).sort_values("n")
            figures.curve(memory, index, table["n"], table["value"] / 1e6, label, linestyle=style)
        bare, whole = (np.median(readings(measurements, "layer", x), axis=0) for x in ("bare", name))
        figures.curve(layer, index, config.layer_lengths, 1 - bare / whole, name)
    said = np.asarray(config.layer_lengths)
    counted = said / (said + 6 * config.model_width)
    layer.plot(said, counted, color="black", linewidth=1, linestyle="--", label="n / (n + 6D)")
    by_length.set(title=f"Time, {config.heads} heads of {config.head_dim}", xlabel="n", ylabel="ms", yscale="log")
    by_width.set(title=f"Time, n = {config.length}", xlabel="head width d", ylabel="ms", yscale="log")
    layer.set(title=f"Attention's share of a layer's time, D = {config.model_width}", xlabel="n", ylim=(0, 1))
    memory.set(title="Compiled temporary memory", xlabel="n", ylabel="MB", yscale="log")
    for one, sizes in zip(
        axes[0], (config.lengths, config.widths, config.layer_lengths, config.memory_lengths), strict=True
    ):
        figures.powers(one, sorted(sizes))
        one.legend(fontsize=7)
    return drawn


def tables(config: Any, measurements: pd.DataFrame) -> list[Table]:
    times = [(*key, *(str(time_exponent(measurements, vary, *key)) for vary in "nd")) for key in _arms(config)]
    crossings = [
        ("FLOPs, counted", str(estimates.counted(crossing_counted(config, measurements)))),
        *((f"time, {name}", str(crossing_timed(config, measurements, name))) for name in config.mechanisms),
    ]
    memory = [
        (name, stage, *(str(memory_exponent(measurements, name, stage, vary)) for vary in "ndh"))
        for name in config.mechanisms
        for stage in MEMORIES
    ]
    return [
        Table("Exponents of time", ("mechanism", "stage", "in n", "in d"), cells(times)),
        Table("n where attention is half of a layer, over 6D", ("of its", "n / 6D"), cells(crossings)),
        Table("Exponents of memory", ("mechanism", "of", "in n", "in d", "in h"), cells(memory)),
    ]


def _arms(config: Any) -> list[tuple[str, str]]:
    return [(name, stage) for name in config.mechanisms for stage in STAGES]


def _less(estimate: Estimate, said: float) -> Estimate:
    return Estimate(estimate.value - said, estimate.low - said, estimate.high - said, estimate.count)


def _value(estimate: Estimate) -> float:
    return estimate.value


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(sizes)))
