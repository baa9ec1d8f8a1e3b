"""What the measurements of `entropy_over_training` say: verdict, tables and the figure."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from experiments import claims, estimates, figures
from experiments.entropy_over_training.config import BY_HEAD, EntropyConfig
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

LEAST = 1e-6  # entropy that the figure shows


def judge(config: EntropyConfig, measurements: pd.DataFrame) -> list[Outcome]:
    entropy, gap, share = (quantity(config, measurements, name) for name in ("entropy", "gap", "share"))
    sharpness, fed = (heads_at_the_end(config, measurements, name) for name in BY_HEAD)
    collapsed, left = (heads_at_the_end(config, measurements, name, config.collapse_rate)[0] for name in BY_HEAD)
    kept = left / np.median(fed[-1], axis=1, keepdims=True)
    trained = slice(1, None)  # before the first step nothing is overfitted yet
    change = entropy[..., -1] - entropy[..., 0]
    starved_heads = rank_correlation(sharpness, fed)
    starved_time = rank_correlation(entropy[..., trained], share[..., trained])
    outcome = claims.judge(
        "D2b",
        {
            "gap_sizes": estimates.mean(rank_correlation(entropy[..., -1].T, gap[..., -1].T)),
            "gap_time": estimates.mean(rank_correlation(entropy[0, :, trained], gap[0, :, trained])),
            "starved_heads": estimates.mean(starved_heads.mean(axis=0)),
            "starved_time": estimates.mean(starved_time.mean(axis=0)),
            "small_change": estimates.mean(change[0]),
            "small_gap": estimates.mean(gap[0, :, -1]),
            "control_change": estimates.mean(change[-1]),
            "control_gap": estimates.mean(gap[-1, :, -1]),
            "collapsed_entropy": estimates.mean(collapsed.mean(axis=1)),
            "collapsed_share": estimates.mean(np.median(kept, axis=1)),
            "collapsed_heads": estimates.mean((kept < 0.1).mean(axis=1)),
        },
        layers=config.num_layers,
        width=config.model_width,
        heads=config.num_heads,
        length=config.length,
        sizes=", ".join(f"{size:,}" for size in config.sizes),
        text="pydoc_data.topics",
        steps=config.steps,
        batch=config.batch_size,
        rate=f"{config.learning_rate:g}",
        seeds=config.seeds,
    )
    return [outcome]


def quantity(config: EntropyConfig, measurements: pd.DataFrame, name: str, rate: float | None = None) -> np.ndarray:
    """`[sizes, seeds, looks]`: the loss, the gap, or the mean over heads of the entropy or of the share's logarithm.

    At the usual rate, or at the collapse's, where there is one size.
    """
    if name == "gap":
        return quantity(config, measurements, "held_out", rate) - quantity(config, measurements, "loss", rate)
    rate = config.learning_rate if rate is None else rate
    table = measurements.query("measure == @name and rate == @rate").sort_values(["size", "seed", "step", "head"])
    sizes, heads = len(set(table["size"])), len(set(table["head"]))
    values = table["value"].to_numpy(np.float64).reshape(sizes, config.seeds, len(config.looks), heads)
    return (np.log(values) if name == "share" else values).mean(axis=-1)


def heads_at_the_end(
    config: EntropyConfig, measurements: pd.DataFrame, name: str, rate: float | None = None
) -> np.ndarray:
    """`[sizes, seeds, heads]`, heads of all layers; `rate` as in `quantity`."""
    rate = config.learning_rate if rate is None else rate
    table = measurements.query("measure == @name and rate == @rate and step == @config.steps")
    values = table.sort_values(["size", "seed", "head"])["value"].to_numpy(np.float64)
    return values.reshape(len(set(table["size"])), config.seeds, -1)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's along the last axis; 0 where one of them does not change."""
    ranks = [stats.rankdata(x, axis=-1) for x in (first, second)]
    a, b = (x - x.mean(axis=-1, keepdims=True) for x in ranks)
    size = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    return (a * b).sum(axis=-1) / np.where(size == 0, 1.0, size)


def figure(config: EntropyConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(2, 2)
    learning, falling, gaps, gradients = axes.flat
    found = {name: quantity(config, measurements, name) for name in ("loss", "held_out", "gap", "entropy")}
    entropy, share = (heads_at_the_end(config, measurements, name) for name in BY_HEAD)
    points = {"linestyle": "none", "alpha": 0.7}
    for index, size in enumerate(config.sizes):
        label = f"{size:,} characters"
        figures.curve(learning, index, config.looks, found["loss"][index].mean(axis=0), label)
        figures.curve(learning, index, config.looks, found["held_out"][index].mean(axis=0), "_nolegend_", linestyle=":")
        figures.curve(falling, index, config.looks, found["entropy"][index].mean(axis=0), label)
        figures.curve(gaps, index, found["gap"][index, :, -1], found["entropy"][index, :, -1], label, **points)
        figures.curve(gradients, index, entropy[index].ravel(), share[index].ravel(), label, **points)
    index, label = len(config.sizes), f"{config.sizes[-1]:,}, 10 × the rate"
    collapsed = quantity(config, measurements, "entropy", config.collapse_rate)[0]
    figures.curve(falling, index, config.looks, collapsed.mean(axis=0), label)
    sharp, fed = (heads_at_the_end(config, measurements, name, config.collapse_rate).ravel() for name in BY_HEAD)
    figures.curve(gradients, index, np.maximum(sharp, LEAST), fed, label, **points)
    learning.set(title="Loss (dotted: held out)", xlabel="step", ylabel="nats a character")
    falling.set(title="Entropy, mean over heads", xlabel="step", ylabel="normalised entropy")
    gaps.set(title="At the last step, one point a seed", xlabel="held-out − training loss, nats")
    gaps.set(ylabel="normalised entropy")
    gradients.set(title="At the last step, one point a head", xlabel="normalised entropy", yscale="log")
    gradients.set(xscale="log", xlim=(LEAST / 2, 1.5), ylabel="(‖∂W_Q‖ + ‖∂W_K‖) / ‖∂W_V‖")
    learning.set_ylim(0, 1.35 * learning.get_ylim()[1])
    learning.legend(fontsize=8, loc="upper right", ncols=2)
    for one in (falling, gaps, gradients):
        one.legend(fontsize=8)
    return drawn


def tables(config: EntropyConfig, measurements: pd.DataFrame) -> list[Table]:
    rows = []
    for rate, sizes in ((config.learning_rate, config.sizes), (config.collapse_rate, config.sizes[-1:])):
        names = ("loss", "held_out", "gap", "entropy")
        found = {name: quantity(config, measurements, name, rate).mean(axis=1) for name in names}
        share = np.median(heads_at_the_end(config, measurements, "share", rate), axis=(1, 2))
        for index, size in enumerate(sizes):
            end = [float(x[index, -1]) for x in found.values()]
            rows.append((f"{size:,}", f"{rate:g}", *end, float(found["entropy"][index, 0]), float(share[index])))
    columns = ("characters", "rate", "loss", "held out", "gap", "entropy", "at the start", "gradient share")
    return [Table("At the last step, mean over seeds (share: median over heads and seeds)", columns, cells(rows))]
