"""The figure of `positions`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import estimates, figures
from experiments.claims.positions import EVALUATED, LEAK, MARGIN, SAME
from experiments.positions.config import KINDS, SCORE_ARMS, PositionsConfig
from experiments.positions.measured import Measured, kind_of

ALT = (
    "Eight panels. The error of rotary scores against the position: flat with phases in fixed point, growing with a "
    "float32 table, and as large as the scores with a bfloat16 one. What a shift of all positions changes: queries and "
    "keys, and values only where positions are added. The share of the position's variance that a probe tells from "
    "values. The loss past the trained length above that of the last L tokens, by positions: one point each, then "
    "against the tokens read, for rotary ones with each scaling and for the others. The accuracy of recall against how "
    "far back a pair stands, for the same two groups."
)
FLOOR = 1e-8  # of what a logarithmic axis shows


def figure(config: PositionsConfig, measurements: pd.DataFrame) -> Figure:
    found = Measured(config, measurements)
    drawn, axes = figures.panels(2, 4)
    rotary, others = ([arm for arm in EVALUATED if (kind_of(arm) == "rotary") is which] for which in (True, False))
    first, second = axes
    _scores(found, first[0])
    _shift(found, first[1])
    _probe(found, first[2])
    _harm(found, [arm for arm in (*rotary, *others) if found.read(arm)], first[3])
    for one, other, arms, what in (
        (second[0], second[2], rotary, "rotary, scaled at evaluation"),
        (second[1], second[3], others, "other positions"),
    ):
        _excess(found, arms, one, what)
        _found(found, arms, other, what)
    for one in axes.flat:
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize=7, loc="upper left" if one in first else "best", ncols=2 if one is first[0] else 1)
    return drawn


def _scores(found: Measured, axes: Axes) -> None:
    at = found.config.score_positions
    for index, (arm, label) in enumerate(SCORE_ARMS.items()):
        figures.curve(axes, index, at, np.maximum(found.scores(arm).mean(axis=0), FLOOR), label)
    axes.axhline(SAME, color="black", linewidth=1, linestyle="--", label="1%")
    axes.set(title="Rotary scores, by position", xlabel="position of the key", xscale="log", yscale="log")
    axes.set(ylabel="error / standard deviation of a score", ylim=(FLOOR, 1e4))


def _shift(found: Measured, axes: Axes) -> None:
    bars = {
        "q, layer 1": ("query", 0),
        "k, layer 1": ("key", 0),
        "v, layer 1": ("value", 0),
        "v, layer 2": ("value", 1),
    }
    kinds = found.config.shifted
    for index, (label, (of, layer)) in enumerate(bars.items()):
        values = np.array([found.shift(kind, of, layer).mean() for kind in kinds])
        x = np.arange(len(kinds)) + 0.2 * (index - 1.5)
        axes.bar(x, np.maximum(values, FLOOR), width=0.18, color=figures.COLOURS[index], label=label)
        axes.plot(x[values == 0], np.full((values == 0).sum(), 2 * FLOOR), "x", color=figures.COLOURS[index])
    axes.set_xticks(range(len(kinds)), [EVALUATED[kind] for kind in kinds], rotation=20)
    axes.set(title="All positions shifted by L, untrained", ylabel="relative change (cross: exactly 0)", yscale="log")
    axes.set_ylim(FLOOR, 1e3)


def _probe(found: Measured, axes: Axes) -> None:
    kinds = [kind for kind in KINDS if kind in found.config.kinds]
    last = found.config.layers - 1
    bars = [("first layer, untrained", 0, "before", "values"), ("first layer, trained", 0, "after", "values")]
    bars += [("last layer, untrained", last, "before", "values"), ("last layer, trained", last, "after", "values")]
    bars += [("the same and squares", last, "after", "squares")]
    for index, (label, layer, when, measure) in enumerate(bars):
        told = [estimates.mean(found.probe(kind, layer, when, measure)) for kind in kinds]
        errors = [[e.value - e.low for e in told], [e.high - e.value for e in told]]
        x = np.arange(len(kinds)) + 0.17 * (index - 2)
        look = {"width": 0.15, "yerr": errors, "capsize": 2, "color": figures.COLOURS[index]}
        axes.bar(x, [e.value for e in told], label=label, **look)
    axes.axhline(LEAK, color="black", linewidth=1, linestyle="--", label="a tenth")
    axes.set_xticks(range(len(kinds)), [EVALUATED[kind] for kind in kinds], rotation=20)
    axes.set(title="The position, told by values", ylabel="share of its variance", ylim=(-0.1, 1.3))


def _harm(found: Measured, arms: list[str], axes: Axes) -> None:
    harm = [found.harm(arm) for arm in arms]
    errors = [[e.value - e.low for e in harm], [e.high - e.value for e in harm]]
    axes.errorbar([e.value for e in harm], range(len(arms)), xerr=errors, fmt="o", color="black", capsize=2)
    axes.axvspan(-MARGIN, MARGIN, color="#dddddd", zorder=0, label="± 0.02 nats")
    axes.set_yticks(range(len(arms)), [EVALUATED[arm] for arm in arms])
    axes.invert_yaxis()
    axes.set(title=f"Past L, to {found.config.extension} L", xlabel="loss above that of the last L tokens, nats")


def _excess(found: Measured, arms: list[str], axes: Axes, what: str) -> None:
    """Means over half an L each: neighbouring places are as noisy as they are few."""
    config = found.config
    past = np.array([place for place in config.places if place >= config.length])
    halves = past // (config.length // 2)
    at = [past[halves == half].mean() + 1 for half in sorted(set(halves))]
    for index, arm in enumerate(arm for arm in arms if found.read(arm)):
        excess = found.excess(arm).mean(axis=0)
        values = [excess[halves == half].mean() for half in sorted(set(halves))]
        figures.curve(axes, index, np.array(at) / config.length, values, EVALUATED[arm])
    axes.axhspan(-MARGIN, MARGIN, color="#dddddd", zorder=0, label="± 0.02 nats")
    axes.set(title=f"Loss past L: {what}", xlabel="tokens read / L", ylabel="loss above that of the last L tokens")


def _found(found: Measured, arms: list[str], axes: Axes, what: str) -> None:
    config = found.config
    back = (np.arange(2 * config.extension) + 0.5) / 2
    for index, arm in enumerate(arm for arm in arms if found.looked_up(arm)):
        figures.curve(axes, index, back, found.found(arm), EVALUATED[arm])
    axes.axvline(1, color="#999999", linewidth=1, linestyle=":", label="trained length")
    axes.axhline(0.25, color="black", linewidth=1, linestyle="--", label="a guess")
    axes.set(title=f"Recall: {what}", xlabel="how far back / L", ylabel="accuracy", ylim=(0, 1.05))
