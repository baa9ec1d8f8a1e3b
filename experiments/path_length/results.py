"""What the measurements of `path_length` say: the verdict, the table and the figure."""

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import Best, best_of
from experiments.claims.inductive import ARMS, SOLVED
from experiments.estimates import Estimate
from experiments.path_length.config import PathLengthConfig
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

ALT = (
    "Three panels. The gradient of the last output against the distance, on a logarithmic axis: before training flat "
    "for attention, a falling line for the GRU, and for the convolution level up to its reach and nothing beyond; "
    "after training, with a peak where the models that learned to copy look. The accuracy of copying and of holding "
    "against the distance, a point a run."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements, by what is asked of them. Of models that were not trained everything is NaN."""

    config: PathLengthConfig
    rows: pd.DataFrame

    def gradient(self, arm: str, when: str = "before") -> np.ndarray:
        """`[seeds, T]`: by distance from the last token."""
        if arm not in self.config.arms:
            return np.full((self.config.seeds, self.config.length), np.nan)
        rows = self.rows.query("part == 'gradient' and arm == @arm and `when` == @when")
        return estimates.by_run(rows, "distance")

    def best(self, arm: str, task: str, distance: int) -> Best:
        """Accuracy of the runs at the arm's best rate for the task."""
        if arm not in self.config.arms:
            return Best(np.nan, False, np.full(self.config.seeds, np.nan))
        rows = self.rows.query("part == 'training' and task == @task and distance == @distance")
        return best_of(rows, arm, measure="accuracy")

    def solved(self, arm: str, task: str, distance: int) -> Estimate:
        """The share of runs that solve a task at the arm's best rate.

        Of fewer than ten runs, or of some that diverged, nothing is said; nor if the best rate is at an edge, unless at
        every rate no run solves the task, or all do: then the rate does not matter.
        """
        best = self.best(arm, task, distance)
        solves = self._final(arm, task, distance) > SOLVED
        matters = solves.any() and not solves.all()
        if len(best.values) < 10 or np.isnan(best.values).any() or (matters and not best.inside):
            return Estimate(np.nan, np.nan, np.nan, len(best.values))
        return estimates.share(best.values > SOLVED)

    def _final(self, arm: str, task: str, distance: int) -> np.ndarray:
        """Accuracy of all runs at all rates."""
        rows = self.rows.query("part == 'training' and arm == @arm and task == @task and distance == @distance")
        return rows.query("measure == 'accuracy' and step == step.max()")["value"].to_numpy(np.float64)


def judge(config: PathLengthConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = Measured(config, measurements)
    by_arm = {arm: found.gradient(arm) for arm in ARMS}
    relative = {arm: x / x[:, 1:2] for arm, x in by_arm.items()}
    evidence = {
        "kept_attention": estimates.mean(relative["attention"][:, config.far]),
        "kept_gru": estimates.mean(relative["gru"][:, config.far]),
        "beyond_convolution": estimates.mean(by_arm["convolution"][:, config.reach + 1 :].max(axis=1)),
        "reach_convolution": estimates.mean(relative["convolution"][:, config.reach]),
        **{f"far_{arm}": found.solved(arm, "copy", config.far) for arm in ARMS},
        **{f"near_{arm}": found.solved(arm, "copy", config.near) for arm in ARMS},
        **{f"held_{arm}": found.solved(arm, "hold", config.far) for arm in ARMS},
    }
    scope = {
        "near": config.near,
        "far": config.far,
        "symbols": config.num_symbols,
        "length": config.length,
        "layers": config.layers,
        "width": config.model_width,
        "heads": config.num_heads,
        "steps": config.steps,
        "batch": config.batch_size,
        "seeds": config.seeds,
        "rates": len(config.rates),
        "convolution": config.width,
        "positions": config.transformer("attention").positions,
    }
    return [claims.judge("C4", evidence, **scope)]


def tables(config: PathLengthConfig, measurements: pd.DataFrame) -> list[Table]:
    found, rows = Measured(config, measurements), []
    for arm in config.arms:
        for task, distance in config.tasks:
            best = found.best(arm, task, distance)
            rate = f"{best.rate:.3g}" + ("" if best.inside else " (edge)")
            solved = f"{np.mean(best.values > SOLVED):.0%}"
            rows.append((ARMS[arm], task, distance, rate, f"{best.values.mean():.2f}", solved))
    names = ("mixer", "task", "distance", "best rate", "accuracy", f"runs above {SOLVED}")
    return [Table("What was learned", names, cells(rows))]


def figure(config: PathLengthConfig, measurements: pd.DataFrame) -> Figure:
    found = Measured(config, measurements)
    drawn, axes = figures.panels(1, 3)
    for one, when in zip(axes[0], ("before", "after"), strict=False):
        _gradients(found, one, when)
    _learned(found, axes[0, 2])
    return drawn


def _gradients(found: Measured, axes: Axes, when: str) -> None:
    config = found.config
    for index, (arm, label) in enumerate(ARMS.items()):
        if arm in config.arms:
            middle = found.gradient(arm, when).mean(axis=0)
            figures.curve(axes, index, range(config.length), np.where(middle > 0, middle, np.nan), label)
    axes.axvline(config.reach, color="#999999", linewidth=1, linestyle=":", label="reach of the convolution")
    axes.axvline(config.far, color="black", linewidth=1, linestyle="--", label="the far distance")
    title = "before training" if when == "before" else "trained to copy at the far distance"
    axes.set(title=f"Gradients, {title}", xlabel="distance from the last token", yscale="log")
    axes.set_ylabel("norm of ∂ last logits / ∂ input (0 not shown)")
    if when == "before":  # the other panel has the same curves
        axes.legend(fontsize=7, loc="lower left")


def _learned(found: Measured, axes: Axes) -> None:
    """Every run a point; those of an arm and task side by side."""
    config, columns = found.config, found.config.tasks
    for index, (arm, label) in enumerate(ARMS.items()):
        if arm in config.arms:
            values = [found.best(arm, *column).values for column in columns]
            x = [i + 0.25 * (index - 1) + np.linspace(-0.08, 0.08, len(runs)) for i, runs in enumerate(values)]
            look = {"linestyle": "", "alpha": 0.8}
            figures.curve(axes, index, np.concatenate(x), np.concatenate(values), label, **look)
    axes.axhline(1 / config.num_symbols, color="black", linewidth=1, linestyle="--", label="a guess")
    axes.axhline(SOLVED, color="#999999", linewidth=1, linestyle=":", label="solved")
    axes.set_xticks(range(len(columns)), [f"{task} {distance}" for task, distance in columns])
    axes.set(title="What runs learn", xlabel="task and distance", ylabel="accuracy", ylim=(0, 1.05))
    axes.legend(fontsize=7, loc="center left")
