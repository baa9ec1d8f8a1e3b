"""What the measurements of `projections` look like: tables and the figure."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import estimates, figures
from experiments.arms import best_of
from experiments.estimates import Estimate
from experiments.progress import Table, cells
from experiments.projections.config import (
    LANGUAGE_ARMS,
    POSITIONS,
    RELATION,
    RELATION_ARMS,
    SPREADS,
    VARIANCES,
    ProjectionsConfig,
)
from experiments.projections.measured import begun, by_width, cost, half_width, predicted_half, simulated, trained
from experiments.projections.trained import OBSERVED, free_parameters, language_arm, relation_arm, text_task

SYMMETRY = {"cycle": "cycle test", "swap": "content swap", "ring": "swaps around a cycle"}
ONE_NORM, TIED = f"spread {SPREADS[0]}", "W_Q = W_K"


def tables(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[Table]:
    longest = config.lengths[-1]
    arms = [*(f"spread {s}" for s in SPREADS), *(f"variance {v}" for v in VARIANCES), "unscaled", "W_Q, W_K", TIED]
    own = {
        arm: [f"{x:.3f}" for x in by_width(measurements, arm, "weight", longest).mean(axis=0)]
        + [f"{by_width(measurements, arm, 'largest', longest).mean(axis=0)[-1]:.2f}"]
        for arm in arms
    }
    said = [
        (
            arm,
            kind,
            *(_mean(measurements, "symmetry", name, arm=arm, positions=kind) for name in (*SYMMETRY, "asymmetry")),
        )
        for arm in ("separate", "tied")
        for kind in POSITIONS
    ]
    found = [
        (
            name,
            *(_mean(measurements, "planted", f"{name}, {what}") for what in ("weight", "read", "weight, one vector")),
        )
        for name in ("easy", "easy, poor", "hard", "hard, rich")
    ]
    sums = [
        (name, *(_mean(measurements, "budget", name, arm=arm) for arm in ("match", "none")))
        for name in ("beside a sink", "dropout", "dropout spread", "sigmoid", "sigmoid spread", "softmax, keys")
    ]
    return [
        Table(
            f"Weight of a token on itself, n = {longest}, by width; last: share of rows where it is the largest",
            ("tokens", *map(str, config.widths), f"largest at {config.widths[-1]}"),
            tuple((arm, *values) for arm, values in own.items()),
        ),
        Table(
            "What scores can say, over their spread",
            ("W_Q, W_K", "positions", *SYMMETRY.values(), "A, antisymmetric"),
            cells(said),
        ),
        Table(
            "Found by the key, read by the value",
            ("token", "weight", "share of what is read", "weight, one vector"),
            cells(found),
        ),
        Table("Row sums and keys in use", ("measure", "with a match", "without"), cells(sums)),
        Table(
            "Trained, each arm at its best rate",
            ("task", "arm", "parameters", "rate", "inside", "loss", "− separate", "accuracy"),
            cells(_trained_rows(config, measurements)),
        ),
    ]


def _trained_rows(config: ProjectionsConfig, measurements: pd.DataFrame) -> list[tuple[object, ...]]:
    rows = []
    for part, labels in (
        ("relation", RELATION_ARMS),
        ("language", LANGUAGE_ARMS),
    ):
        of_part = measurements.query("part == @part")
        for arm in config.arms(part):
            separate = best_of(of_part, "separate").values
            best, accuracy = best_of(of_part, arm), best_of(of_part, arm, measure="accuracy").values
            gap = estimates.difference(best.values, separate)
            told = f"{gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"
            count, inside = _parameters(config, part, arm), "yes" if best.inside else "no"
            rows.append(
                (part, labels[arm], count, best.rate, inside, float(best.values.mean()), told, float(accuracy.mean()))
            )
    return rows


def _parameters(config: ProjectionsConfig, part: str, arm: str) -> int:
    if part == "relation":
        return free_parameters(relation_arm(arm))
    return free_parameters(language_arm(arm, config.layers, text_task().vocabulary_size))


def _mean(measurements: pd.DataFrame, part: str, measure: str, **where: str) -> float:
    return float(simulated(measurements, part, measure, **where).mean())


def figure(config: ProjectionsConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(2, 4, width=4.8)
    panels = (_own, _halves, _norms, _begun_and_trained, _said, _relation, _moved, _costs)
    for one, draw in zip(axes.flat, panels, strict=True):
        draw(one, config, measurements)
        if one.get_legend_handles_labels()[0]:
            one.legend(fontsize=8)
    return drawn


def _own(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    for index, n in enumerate(config.lengths):
        for arm, line, label in ((ONE_NORM, "-", f"n = {n}"), (TIED, ":", "_nolegend_")):
            weights = by_width(measurements, arm, "weight", n).mean(axis=0)
            figures.curve(axes, index, config.widths, weights, label, linestyle=line)
    figures.powers(axes, config.widths)
    axes.set(title="A token on itself (dotted: W_Q = W_K)", xlabel="width d, or d_k", ylabel="weight on the diagonal")


def _halves(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    n = np.geomspace(config.lengths[0], config.lengths[-1], 50)
    labels = {ONE_NORM: "scaled", "unscaled": "unscaled", TIED: "W_Q = W_K, scaled"}
    formulas = {ONE_NORM: "ln n + ½", "unscaled": "√(2 ln n)"}
    for index, (arm, label) in enumerate(labels.items()):
        found = {n: half_width(config, measurements, arm, n) for n in config.lengths}
        reached = {math.log(n): np.sqrt(x).mean() for n, x in found.items() if np.isfinite(x).all()}
        colour, marker = figures.COLOURS[index], figures.MARKERS[index]
        axes.plot(list(reached), list(reached.values()), marker, color=colour, label=label)
        if arm in formulas:
            predicted = [math.sqrt(predicted_half(arm, x)) for x in n]
            axes.plot(np.log(n), predicted, linewidth=1, color=colour, label=formulas[arm])
    axes.set(title="Where that passes 1/2", xlabel="ln n", ylabel="√d", xlim=(0, None), ylim=(0, None))


def _norms(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    longest, labels = (
        config.lengths[-1],
        {"weight": "weight on the diagonal", "largest": "rows where it is the largest"},
    )
    for index, (measure, label) in enumerate(labels.items()):
        values = [by_width(measurements, f"spread {s}", measure, longest)[:, -1].mean() for s in SPREADS]
        figures.curve(axes, index, SPREADS, values, label)
    axes.set(title=f"Norms that differ, n = {longest}, d = {config.widths[-1]}", ylim=(0, 1.05))
    axes.set(xlabel="standard deviation of ln of the norm")


def _begun_and_trained(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    arms = [arm for arm in OBSERVED if arm in config.arms("language")]
    before = [estimates.mean(begun(config, measurements, arm, "diagonal")) for arm in arms]
    after = [estimates.mean(trained(config, measurements, "language", arm, "diagonal")) for arm in arms]
    _bars(axes, [LANGUAGE_ARMS[arm] for arm in arms], {"before training": before, "after": after})
    axes.set(title="Language model: a token on itself", ylabel="weight on the diagonal", ylim=(0, 1))


def _said(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    groups = [(arm, kind) for arm in ("separate", "tied") for kind in POSITIONS]

    def found(measure: str) -> list[Estimate]:
        values = [simulated(measurements, "symmetry", measure, arm=arm, positions=kind) for arm, kind in groups]
        return [estimates.mean(x) for x in values]

    _bars(axes, [f"{arm},\n{kind}" for arm, kind in groups], {label: found(name) for name, label in SYMMETRY.items()})
    axes.set(title="What scores can say", ylabel="over unrelated scores")


def _relation(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    arms = config.arms("relation")
    for index, arm in enumerate(arms):
        accuracy = best_of(measurements.query("part == 'relation'"), arm, measure="accuracy").values
        where = index + np.linspace(-0.25, 0.25, len(accuracy))
        axes.scatter(where, accuracy, color=figures.COLOURS[index], s=18)
    lines = (
        ("--", RELATION.symmetric_limit, "symmetric, look-up: 2/3"),
        (":", RELATION.chance, "one of the other two"),
    )
    for style, height, label in lines:
        axes.axhline(height, color="black", linestyle=style, linewidth=1, label=label)
    axes.set_xticks(range(len(arms)), [RELATION_ARMS[arm].replace(", ", ",\n") for arm in arms], fontsize=8)
    axes.set(title="Directed relation, a dot a seed", ylabel="accuracy", ylim=(0, 1.05))


def _moved(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    names = {"query": "b_Q", "key": "b_K", "value": "b_V", "value, beyond b_V W_O": "b_V, beyond\nb_V W_O"}

    def found(kind: str) -> list[Estimate]:
        values = [simulated(measurements, "biases", "change", arm=name, positions=kind) for name in names]
        return [estimates.mean(x) for x in values]

    _bars(axes, list(names.values()), {"no positions": found("none"), "rotary": found("rotary")})
    axes.set(title="A bias alone", ylabel="relative change of a layer's output")


def _costs(axes: Axes, config: ProjectionsConfig, measurements: pd.DataFrame) -> None:
    arms = [arm for arm in config.arms("language") if arm != "separate"]
    names = [LANGUAGE_ARMS[arm].replace(", ", ",\n") for arm in arms]
    _bars(axes, names, {"at the best rate, 95%": [cost(config, measurements, arm) for arm in arms]})
    axes.axhspan(-0.02, 0.02, color="#dddddd", zorder=0, label="as good as: ±0.02")
    axes.set(title="Language model: the cost of a tie", ylabel="loss − that of separate, nats")


def _bars(axes: Axes, groups: Sequence[str], values: Mapping[str, Sequence[Estimate]]) -> None:
    """Bars side by side in every group, one of each label, with their intervals."""
    width = 0.8 / len(values)
    for index, (label, found) in enumerate(values.items()):
        where = np.arange(len(groups)) + (index - (len(values) - 1) / 2) * width
        errors = [[x.value - x.low for x in found], [x.high - x.value for x in found]]
        look = {"color": figures.COLOURS[index], "label": label, "capsize": 2}
        axes.bar(where, [x.value for x in found], width, yerr=errors, **look)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
