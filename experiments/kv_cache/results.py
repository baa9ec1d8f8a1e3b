"""What `kv_cache` makes of its rows: where cache and weights are equal, the verdict, tables and the figure."""

from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.benchmarks import timing
from experiments.estimates import Estimate
from experiments.kv_cache.published import MODELS
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

SERVED = 64  # the batch that the claim reads, beside 1


def judge(config: Any, measurements: pd.DataFrame, counted: float) -> list[Outcome]:
    alone, served = (over_context(measurements, batch, "bfloat16") for batch in (1, SERVED))
    longest = max(config.contexts)
    times = {kind: readings(measurements, kind) for kind in measurements["kind"].dropna().unique()}
    last = {kind: found[:, -1] for kind, found in times.items()}
    outcome = claims.judge(
        "C3",
        {
            "alone_least": estimates.counted(min(alone)),
            "alone_most": estimates.counted(max(alone)),
            "served_least": estimates.counted(min(served)),
            "served_most": estimates.counted(max(served)),
            "quantized_least": estimates.counted(min(over_context(measurements, 1, "4-bit weights"))),
            "crossing_timed": crossing_timed(config, measurements, "all heads", counted),
            "gqa": timing.ratio(last["grouped heads"], last["all heads"]),
            "mqa": timing.ratio(last["one head"], last["all heads"]),
            "rolling": timing.ratio(last["ring"], last["all heads"]),
            "recurrent": timing.ratio(last["state space"], last["all heads"]),
        },
        models=", ".join(f"{name} ({x.context})" for name, x in MODELS.items()),
        device=jax.devices()[0].device_kind,
        layers=config.layers,
        width=config.heads * config.head_width,
        batch=config.batch,
        heads=config.heads,
        head_width=config.head_width,
        window=config.window,
        contexts=f"to {longest}",
        rounds=config.rounds,
    )
    return [outcome]


def counted_value(measurements: pd.DataFrame, model: str, measure: str) -> float:
    """A count of one model."""
    return float(measurements.query("model == @model and measure == @measure")["value"].to_numpy()[0])


def over_context(measurements: pd.DataFrame, batch: int, dtype: str) -> list[float]:
    """n* over the trained context, for each model."""
    chosen = "measure == 'crossing' and batch == @batch and dtype == @dtype"
    found = dict(measurements.query(chosen)[["model", "value"]].itertuples(index=False))
    return [found[name] / published.context for name, published in MODELS.items()]


def readings(measurements: pd.DataFrame, kind: str) -> np.ndarray:
    """Seconds `[rounds, contexts]` of a kind, contexts ascending."""
    table = measurements.query("kind == @kind").pivot_table(index="round", columns="n", values="seconds")
    return table.to_numpy(dtype=np.float64)


def crossing_timed(config: Any, measurements: pd.DataFrame, kind: str, counted: float) -> Estimate:
    """The context at which a step takes twice what it takes without a cache, over `counted`; infinite if beyond all.

    Without a cache: where the line through the two shortest contexts begins. A line through all of them would begin
    below 0 where a cache outgrows the processor's, from where on a step grows faster than its bytes.
    """
    contexts = np.array(sorted(config.contexts), dtype=np.float64)

    def crossing(medians: np.ndarray) -> np.ndarray:
        slope = np.maximum(np.diff(medians[..., :2])[..., 0], 0) / (contexts[1] - contexts[0])
        twice = 2 * (medians[..., 0] - slope * contexts[0])
        rising = np.maximum.accumulate(medians, axis=-1) / twice[..., None]
        found = np.apply_along_axis(lambda ratios: np.interp(1, ratios, contexts, right=np.inf), -1, rising)
        return found / counted

    return timing.of_medians(readings(measurements, kind), crossing)


def figure(config: Any, measurements: pd.DataFrame, counted: float) -> Figure:
    drawn, axes = figures.panels(1, 2, width=6.0)
    by_bytes, by_time = axes[0]
    for index, (name, published) in enumerate(MODELS.items()):
        weights, at_context, slope = (
            counted_value(measurements, name, what) for what in ("weights", "cache at the context", "cache per token")
        )
        contexts = published.context * 2.0 ** np.arange(-6, 5)
        cache = at_context + slope * (contexts - published.context)
        figures.curve(by_bytes, index, contexts / published.context, cache / weights, name)
    by_bytes.axhline(1, color="black", linewidth=1, linestyle="--", label="weights")
    by_bytes.set(
        title="Bytes of the cache over those of the weights, batch 1, one dtype",
        xlabel="context over the trained one",
        xscale="log",
        yscale="log",
    )
    for index, kind in enumerate(measurements["kind"].dropna().unique()):
        medians = np.median(readings(measurements, kind), axis=0) * 1e3
        figures.curve(by_time, index, sorted(config.contexts), medians, kind)
    by_time.axvline(counted, color="black", linewidth=1, linestyle="--", label="n*, all heads")
    by_time.set(
        title=f"Time of a step, batch {config.batch}, {config.layers} layers",
        xlabel="context",
        ylabel="ms",
        ylim=(0, None),
    )
    for one in axes[0]:
        one.legend(fontsize=7)
    return drawn


def tables(config: Any, measurements: pd.DataFrame) -> list[Table]:
    crossings = measurements.query("measure == 'crossing' and dtype != 'float32'")  # as bfloat16, with equal bytes
    counts, columns = [], []
    for name, published in MODELS.items():
        mine = crossings.query("model == @name")
        columns = [f"{dtype}, batch {int(batch)}" for dtype, batch in zip(mine["dtype"], mine["batch"], strict=True)]
        counts.append((name, f"{published.context:,}", *(f"{value:,.0f}" for value in mine["value"])))
    times = []
    for kind in measurements["kind"].dropna().unique():
        medians = np.median(readings(measurements, kind), axis=0) * 1e3
        times.append((kind, *(f"{median:.2f}" for median in medians)))
    return [
        Table("n*: where cache and weights take equal bytes", ("model", "trained for", *columns), cells(counts)),
        Table("ms a step, by context", ("kind", *map(str, sorted(config.contexts))), cells(times)),
    ]
