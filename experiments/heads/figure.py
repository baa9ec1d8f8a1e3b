"""The figure of `heads`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import estimates, figures
from experiments.claims.heads import FITS, PATTERNS
from experiments.claims.trained_heads import MARGIN, MIXINGS, SETTINGS
from experiments.heads.config import COMMON, HeadsConfig
from experiments.heads.measured import COUNTED, Measured
from experiments.heads.trained import split_name

ALT = (
    "Six panels. Against the number of heads at one width: parameters and products stay, all operations rise a little, "
    "memory and time a lot. The KL left after a fit against d_k: near 0 from d_k = 8 or less for a permutation and for "
    "k keys, slowly falling for Dirichlet rows. The dimensions and directions of X that a head sees. Loss above that "
    "of the base against d_k, at fixed h·d_k and at fixed h. Divergence of heads as a share of that of shuffled rows, "
    "against h, before and after training, in one model and in two. Loss above that of a trained W_O for no W_O, "
    "blocks and a random orthogonal one."
)


FLOOR = 1e-6  # of what is left of a KL


def figure(config: HeadsConfig, measurements: pd.DataFrame) -> Figure:
    found = Measured(config, measurements)
    drawn, axes = figures.panels(2, 3)
    for draw, one in zip((_cost, _fits, _seen, _grid, _patterns, _outputs), axes.flat, strict=True):
        draw(found, one)
        one.legend(fontsize=7)
    return drawn


def _cost(found: Measured, axes: Axes) -> None:
    heads = sorted(found.config.cost_heads)
    for index, name in enumerate(COUNTED):
        values = found.cost(name)
        figures.curve(axes, index, heads, values / values[0], name)
    seconds = np.median(found.seconds(), axis=0)
    figures.curve(axes, len(COUNTED), heads, seconds / seconds[0], "time")
    figures.powers(axes, heads)
    axes.set_yscale("log", base=2)
    title = f"One layer, D = {found.config.cost_width}, n = {found.config.cost_length}"
    axes.set(title=title, xlabel="heads h, d_k = D / h", ylabel="multiple of one head")


def _fits(found: Measured, axes: Axes) -> None:
    widths, length = sorted(found.config.fit_dims), max(found.config.fit_lengths)
    for index, (name, what) in enumerate(PATTERNS.items()):
        values = found.fit("left", name, length).mean(axis=0)
        figures.curve(axes, index, widths, np.maximum(values, FLOOR), what)
    for index, (name, width) in enumerate({"permutation": 2, "k_hot": 2 * found.config.hot}.items()):
        value = max(found.fit("by_hand", name, length).mean(), FLOOR)
        axes.plot(width, value, "*", markersize=12, color=figures.COLOURS[index], markeredgecolor="black")
    axes.axhline(FITS, color="black", linewidth=1, linestyle="--", label="5%")
    axes.axvline(length / 8, color="#999999", linewidth=1, linestyle=":", label="n/8")
    figures.powers(axes, widths)
    axes.set(title=f"Fits of q and k, n = {length} (stars: by hand)", xlabel="head width d_k", yscale="log")
    axes.set(ylabel="KL left, share of uniform's (≥ 1e-6)", ylim=(1e-9, 2))


def _seen(found: Measured, axes: Axes) -> None:
    config = found.config
    width = config.seen_width
    dense = [found.seen(name).mean() for name in ("seen_share", "query_rank", "joint_rank")]
    sliced = [found.seen("sliced_share").mean(), width // config.seen_heads / width, width // config.seen_heads / width]
    values = {"dense projections": [dense[0], dense[1] / width, dense[2] / width], "a slice of X": sliced}
    for index, (label, shares) in enumerate(values.items()):
        axes.bar(np.arange(3) + 0.4 * (index - 0.5), shares, width=0.38, color=figures.COLOURS[index], label=label)
    axes.set_xticks(range(3), ["dimensions\nit depends on", "directions\nof q", "directions of\nq, k, v together"])
    axes.set(
        title=f"What a head of {width // config.seen_heads} sees of X", ylabel=f"share of D = {width}", ylim=(0, 1.1)
    )


def _grid(found: Measured, axes: Axes) -> None:
    config = found.config
    lines = {
        "h·d_k = D": config.split_widths,
        **{f"h = {heads}": config.row(heads) for heads in sorted(config.grid_heads)},
    }
    base = found.best(split_name(*config.base)).values
    for index, (label, arms) in enumerate(lines.items()):
        above = [estimates.mean(found.best(split_name(*arm)).values - base) for arm in arms.values()]
        errors = [[e.value - e.low for e in above], [e.high - e.value for e in above]]
        shift = 2 ** (0.08 * (index - 1))
        look = {"color": figures.COLOURS[index], "marker": figures.MARKERS[index], "markersize": 4, "capsize": 2}
        axes.errorbar([w * shift for w in arms], [e.value for e in above], yerr=errors, label=label, **look)
    axes.axhspan(-MARGIN, MARGIN, color="#dddddd", zorder=0, label="± 0.02 nats")
    widths = sorted({width for _, width in config.arms})
    figures.powers(axes, widths)
    axes.axvspan(COMMON[0] / 1.15, max(widths) * 1.15, color="#e69f00", alpha=0.15, label="32 to 128")
    heads, width = config.base
    axes.set(title="Trained: loss against head width", xlabel="head width d_k")
    axes.set(ylabel=f"loss above h = {heads}, d_k = {width}, nats")


def _patterns(found: Measured, axes: Axes) -> None:
    heads = found.config.compared
    for index, (when, pair, label) in enumerate(
        (
            ("before", "within", "one model, untrained"),
            ("after", "within", "one model, trained"),
            ("after", "between", "two models, trained"),
        )
    ):
        values = [estimates.mean(found.difference(h, when, pair)) for h in heads]
        errors = [[e.value - e.low for e in values], [e.high - e.value for e in values]]
        look = {"color": figures.COLOURS[index], "marker": figures.MARKERS[index], "markersize": 4, "capsize": 2}
        shift = 2 ** (0.05 * (index - 1))
        axes.errorbar([h * shift for h in heads], [e.value for e in values], yerr=errors, label=label, **look)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", label="unrelated patterns")
    figures.powers(axes, heads)
    axes.set(title="How different heads look, at matched entropy", xlabel="heads h, d_k = D / h")
    axes.set(ylabel="divergence / that of shuffled rows", ylim=(0, None))


def _outputs(found: Measured, axes: Axes) -> None:
    for index, (setting, where) in enumerate(SETTINGS.items()):
        values = [estimates.mean(found.without(mixing, setting)) for mixing in MIXINGS]
        errors = [[e.value - e.low for e in values], [e.high - e.value for e in values]]
        x = np.arange(len(MIXINGS)) + 0.4 * (index - 0.5)
        axes.bar(
            x, [e.value for e in values], width=0.38, yerr=errors, capsize=2, color=figures.COLOURS[index], label=where
        )
    axes.axhspan(-MARGIN, MARGIN, color="#dddddd", zorder=0, label="± 0.02 nats")
    axes.set_xticks(range(len(MIXINGS)), ["none (identity)", "one block a head", "random, fixed"])
    axes.set(title="W_O taken away", ylabel="loss above that of a trained W_O, nats")
