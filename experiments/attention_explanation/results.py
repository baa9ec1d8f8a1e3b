"""What the measurements of `attention_explanation` say: verdicts, table and figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import best_of
from experiments.attention_explanation.config import ExplanationConfig
from experiments.claims.explanation import ACCOUNTS, ARMS, HALF, POOR
from experiments.estimates import Estimate
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

CHANGED = ("layer", "head", "kept", "largest", "flattened", "permuted")


def of_arm(measurements: pd.DataFrame, arm: str, measure: str) -> np.ndarray:
    """`[seeds]`, of the models that have learned."""
    return estimates.by_run(measurements.query("part == 'changed' and arm == @arm and measure == @measure"))


def short_of_learned(measurements: pd.DataFrame, arm: str) -> Estimate:
    """Accuracy of learned − of uniform attention, paired by seed; NaN if a best rate is at an edge."""
    rows = measurements.query("part == 'training'")
    learned, uniform = (best_of(rows, name, measure="accuracy") for name in (arm, f"{arm}_uniform"))
    if not learned.inside or not uniform.inside:
        return estimates.mean(np.full(len(learned.values), np.nan))
    return estimates.difference(learned.values, uniform.values)


def judge(config: ExplanationConfig, measurements: pd.DataFrame) -> list[Outcome]:
    unknown = estimates.mean(np.full(config.seeds, np.nan))
    evidence: dict[str, Estimate] = {}
    for arm in ARMS:
        known = arm in config.arms
        evidence[f"uniform_{arm}"] = short_of_learned(measurements, arm) if known else unknown
        for name in (*CHANGED, *ACCOUNTS):
            evidence[f"{name}_{arm}"] = estimates.mean(of_arm(measurements, arm, name)) if known else unknown
    scope = {
        "width": config.model_width,
        "heads": config.num_heads,
        "steps": config.steps,
        "classes": config.classes,
        "pairs": config.pairs,
        "keys": config.keys,
        "length": config.length,
        "examples": config.examples,
        "epsilon": config.epsilon,
        "seeds": config.seeds,
    }
    return [
        claims.judge(claim, {name: evidence[name] for name in claims.CLAIMS[claim].evidence}, **scope)
        for claim in ("D3", "D3b")
    ]


def tables(config: ExplanationConfig, measurements: pd.DataFrame) -> list[Table]:
    training = measurements.query("part == 'training'")
    rows, agreements = [], []
    for arm in config.arms:
        learned, uniform = (best_of(training, name, measure="accuracy") for name in (arm, f"{arm}_uniform"))
        means = [of_arm(measurements, arm, name).mean() for name in CHANGED]
        rows.append((ARMS[arm], *(f"{x:.2f}" for x in (learned.values.mean(), uniform.values.mean(), *means))))
        for name, what in ACCOUNTS.items():
            null = of_arm(measurements, arm, f"{name}_null").mean()
            agreements.append((ARMS[arm], what, str(estimates.mean(of_arm(measurements, arm, name))), f"{null:.2f}"))
    return [
        Table(
            f"Other weights, ε = {config.epsilon:g}",
            (
                "task", "accuracy", "with uniform attention", "JS of the layer / ln 2", "of one head",
                "largest weight then", "and before", "row made uniform: TV", "row permuted: TV",
            ),
            cells(rows),
        ),
        Table(
            "Kendall's τ of weights with other accounts",
            ("task", "account", "τ", "chance reaches"),
            cells(agreements),
        ),
    ]  # fmt: skip


ALT = (
    "Three panels, by task. The accuracy of models that learn their weights and of models with uniform ones. The "
    "largest divergence of the weights that leaves the answer where it is, for the layer and for one head, as a share "
    "of ln 2. Kendall's τ of the weights with gradients, integrated gradients and leaving tokens out, beside chance."
)


def figure(config: ExplanationConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 3)
    training = measurements.query("part == 'training'")
    accuracy = {
        label: [best_of(training, f"{arm}{end}", measure="accuracy").values for arm in config.arms]
        for label, end in (("learned weights", ""), ("uniform weights", "_uniform"))
    }
    of_changed = {
        label: [of_arm(measurements, arm, name) for arm in config.arms]
        for label, name in (("layer", "layer"), ("one head", "head"))
    }
    of_accounts = {what: [of_arm(measurements, arm, name) for arm in config.arms] for name, what in ACCOUNTS.items()}
    for one, lines, title, line in (
        (axes[0, 0], accuracy, "Accuracy", None),
        (axes[0, 1], of_changed, "Divergence within ε, share of ln 2", HALF),
        (axes[0, 2], of_accounts, "τ of the weights with", POOR),
    ):
        _points(one, config, lines, title, line)
    return drawn


def _points(
    axes: Axes, config: ExplanationConfig, lines: dict[str, list[np.ndarray]], title: str, line: float | None
) -> None:
    """A point a seed, the lines side by side in each task."""
    for index, (label, values) in enumerate(lines.items()):
        x = np.concatenate([np.full(len(v), i + 0.2 * (index - (len(lines) - 1) / 2)) for i, v in enumerate(values)])
        figures.curve(axes, index, x, np.concatenate(values), label, linestyle="", alpha=0.7)
    if line is not None:
        axes.axhline(line, color="#888888", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(config.arms)), [arm.replace("_", "\n") for arm in config.arms])
    axes.set(title=title, ylim=(min(0, axes.get_ylim()[0]), 1.05))
    axes.legend(fontsize=7)
