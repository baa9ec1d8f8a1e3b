"""What the measurements of `inductive_bias` say: the verdicts, the table and the figure."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import Best, best_of
from experiments.claims.inductive import ARMS, OTHERS
from experiments.inductive_bias.config import PARTS, InductiveBiasConfig
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

MEASURES = {"digits": "accuracy", "series": "loss"}
ALT = (
    "Two panels, a curve for attention, the GRU and the convolution each. The accuracy of naming held-out digits "
    "against the number of training images, with that of the nearest training image as a dashed line. The loss of the "
    "next value of held-out series against the number of training series."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements, by what is asked of them. Of models that were not trained everything is NaN."""

    config: InductiveBiasConfig
    rows: pd.DataFrame

    def best(self, part: str, arm: str, size: int) -> Best:
        """Accuracy on digits, or loss on series, of the runs at the arm's best rate and evaluation."""
        if arm not in self.config.arms:
            return Best(np.nan, False, np.full(self.config.seeds, np.nan))
        rows = self.rows.query("part == @part and size == @size and measure in ('accuracy', 'loss')")
        return best_of(rows, arm, measure=MEASURES[part], stop_early=True)

    def known(self, part: str, arm: str, size: int) -> np.ndarray:
        """`[seeds]`: the same, NaN if the best rate is at an edge."""
        best = self.best(part, arm, size)
        return best.values if best.inside else np.full(len(best.values), np.nan)

    def lead(self, part: str, other: str, size: int) -> np.ndarray:
        """`[seeds]`: by how much another arm is better than attention."""
        difference = self.known(part, other, size) - self.known(part, "attention", size)
        return difference if MEASURES[part] == "accuracy" else -difference

    def parameters(self, part: str, arm: str) -> int:
        """Of the models of an arm."""
        return int(self.rows.query("part == @part and arm == @arm and measure == 'parameters'")["value"].iloc[0])

    def nearest(self, size: int) -> float:
        """Accuracy of the nearest training image."""
        return float(self.rows.query("part == 'nearest' and size == @size")["value"].iloc[0])


def judge(config: InductiveBiasConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found, outcomes = Measured(config, measurements), []
    for claim, part in zip(("C5", "C5b"), PARTS, strict=True):
        fewest, *_, most = config.sizes(part)
        leads = {name: [found.lead(part, name, size) for size in (fewest, most)] for name in OTHERS}
        evidence = {f"little_{name}": estimates.mean(few) for name, (few, _) in leads.items()}
        evidence |= {f"much_{name}": estimates.mean(many) for name, (_, many) in leads.items()}
        if part == "digits":
            evidence |= {f"shrinks_{name}": estimates.difference(*pair) for name, pair in leads.items()}
        outcomes.append(claims.judge(claim, evidence, fewest=fewest, most=most, **_scope(config, part)))
    return outcomes


def _scope(config: InductiveBiasConfig, part: str) -> dict[str, Any]:
    return {
        "held_out": config.held_out,
        "length": config.series_length,
        "levels": config.levels,
        "layers": config.layers,
        "width": config.model_width,
        "heads": config.num_heads,
        "steps": config.budget(part).steps,
        "batch": config.batch_size,
        "seeds": config.seeds,
        "rates": len(config.rates),
        "evaluations": config.evaluations,
        "convolution": config.width,
    }


def tables(config: InductiveBiasConfig, measurements: pd.DataFrame) -> list[Table]:
    found, told = Measured(config, measurements), []
    for part in PARTS:
        rows = []
        for arm in config.arms:
            row = [ARMS[arm], f"{found.parameters(part, arm):,}"]
            for size in config.sizes(part):
                best = found.best(part, arm, size)
                edge = "" if best.inside else ", edge"
                row.append(
                    f"{estimates.mean(best.values).value:.3f} (rate {best.rate:.2g}{edge}, step {best.step:.0f})"
                )
            rows.append(tuple(row))
        if part == "digits":
            rows.append(("nearest image", "", *(f"{found.nearest(size):.3f}" for size in config.images)))
        names = ("mixer", "parameters", *(f"of {size}" for size in config.sizes(part)))
        title = "Accuracy of naming digits" if part == "digits" else "Loss of the next value of a series"
        told.append(Table(f"{title}, by the size of the training set", names, cells(rows)))
    return told


def figure(config: InductiveBiasConfig, measurements: pd.DataFrame) -> Figure:
    found = Measured(config, measurements)
    drawn, axes = figures.panels(1, 2)
    for one, part in zip(axes[0], PARTS, strict=True):
        _panel(found, part, one)
    return drawn


def _panel(found: Measured, part: str, axes: Axes) -> None:
    config, sizes = found.config, found.config.sizes(part)
    for index, (arm, label) in enumerate(ARMS.items()):
        if arm in config.arms:
            points = [estimates.mean(found.best(part, arm, size).values) for size in sizes]
            figures.curve(axes, index, sizes, [point.value for point in points], label)
            lows, highs = [point.low for point in points], [point.high for point in points]
            axes.fill_between(sizes, lows, highs, color=figures.COLOURS[index], alpha=0.15)
    if part == "digits":
        near = [found.nearest(size) for size in sizes]
        axes.plot(sizes, near, color="black", linewidth=1, linestyle="--", label="nearest image")
        axes.set(title="Digits", xlabel="training images", ylabel="accuracy", ylim=(0, 1.02))
    else:
        axes.set(title="Seasonal series", xlabel="training series", ylabel="loss of the next value, nats")
    figures.powers(axes, sizes, base=10)
    axes.legend(fontsize=8)
