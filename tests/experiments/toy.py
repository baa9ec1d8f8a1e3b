"""A small experiment that needs no JAX program: what the harness does is all there is to see."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments import estimates, figures, verdicts
from experiments.config import Config, option
from experiments.harness import Experiment, Unit
from experiments.progress import Table
from experiments.verdicts import Claim, Decision


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(Config):
    sizes: tuple[int, ...] = option((1, 2, 3), "sizes", least=1, most=1000)
    rates: tuple[float, ...] = option((0.5,), "rates", least=0)
    factor: float = option(1.0, "a factor", least=0, most=10)
    kind: str = option("plain", "a kind", choices=("plain", "odd"))
    loud: bool = option(False, "a switch")


CLAIM = Claim(
    id="T1",
    statement="Squares grow.",
    paper="Euclid",
    prediction="Confirmed.",
    rule="Confirmed if above 0.",
    scope="sizes {sizes}",
    evidence={"growth": "mean square"},
    decide=lambda e: Decision("confirmed" if verdicts.above(e["growth"], 0) else "inconclusive", "it grows"),
    least_count=2,
)


def make(measured: list[str] | None = None, *, interrupt: str | None = None, name: str = "toy") -> Experiment:
    """The experiment; names of measured units are noted in `measured`, and `interrupt` names one that is cut short."""
    noted = [] if measured is None else measured

    def unit(config: ToyConfig, size: int) -> Unit:
        def measure() -> list[dict]:
            if interrupt == f"size_{size}":
                raise KeyboardInterrupt
            noted.append(f"size_{size}")
            values = np.float32(config.factor) * np.float32(0.1) * size**2 + np.float32(0.01) * np.arange(
                3, dtype=np.float32
            )
            return [{"size": size, "seed": s, "label": 'ü, "q"', "value": v} for s, v in enumerate(values)]

        return Unit(f"size_{size}", measure)

    def units(config: ToyConfig) -> Sequence[Unit]:
        return [unit(config, size) for size in config.sizes]

    def judge(config: ToyConfig, table: pd.DataFrame) -> list[verdicts.Outcome]:
        return [verdicts.judge(CLAIM, {"growth": estimates.mean(estimates.by_run(table))}, sizes=config.sizes)]

    def figure(config: ToyConfig, table: pd.DataFrame):
        drawn, axes = figures.panels(1, 1)
        figures.curve(axes[0, 0], 0, table["size"], table["value"], "value")
        return drawn

    return Experiment(
        name=name,
        question="Do squares grow?",
        config=ToyConfig,
        presets={"smoke": {"sizes": (1, 2)}, "quick": {}, "full": {"sizes": (1, 2, 3, 4), "factor": 2.0}},
        units=units,
        judge=judge,
        figure=figure,
        alt="Values against sizes.",
        tables=lambda config, table: [Table("Sizes", ("size",), tuple((str(size),) for size in config.sizes))],
        documentation="Do squares grow?",
    )
