"""How fast is a training step, against whom, and what does it cost to watch attention in it?

Claims: none; the figures of the README rest on it.
Command: python -m experiments.benchmarks.training --preset=quick --out=results/benchmarks.training
Time: smoke 40 s, quick 5 min, full 12 min on two cores with PyTorch.

Forward, backward and update by AdamW of a small decoder at a long sequence: our step; `transformers`' Llama in PyTorch,
if both are installed (`pip install torch transformers`); the same model of ours on stock `flax.nnx.MultiHeadAttention`,
and on our attention with the positions that this leaves room for, added to the embeddings (`sinusoidal`); and our step
with an `AttentionMonitor`, a few rows in every step, or every measure of all rows in every tenth.

All begin with the same parameters and are checked to have the same losses, then run in turn; times are medians of
rounds, ratios are of medians with a bootstrap interval.
"""

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attn_jax.nn import TransformerConfig
from experiments import figures, harness
from experiments.artifacts import Row
from experiments.benchmarks import sides
from experiments.benchmarks.race import PATTERN, PRODUCT, TORCH_PRODUCT, Entrant, product_flops, race
from experiments.benchmarks.sides import Contestant
from experiments.benchmarks.timing import LEAST_ROUNDS, ratio
from experiments.benchmarks.training_sides import CHECKED_STEPS, SIDES, Problem, count_parameters
from experiments.config import Config, option
from experiments.estimates import Estimate
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells

LEAST_SECONDS = 0.2  # of a reading: right after another library's threads the first products are slow
TOLERANCE = 1e-3  # of the losses of the first steps: rounding grows with each


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """Flags of this benchmark."""

    sides: tuple[str, ...] = option(tuple(SIDES), "who trains", choices=tuple(SIDES))
    num_layers: int = option(6, "blocks", least=1)
    model_width: int = option(320, "D", least=2)
    num_heads: int = option(5, "heads", least=1)
    mlp_width: int = option(1088, "inside the MLP", least=1)
    vocabulary_size: int = option(4096, "tokens there are", least=2)
    length: int = option(1024, "tokens of a sequence", least=2)
    batch_size: int = option(1, "sequences of a step", least=1)
    steps_per_call: int = option(5, "steps of a reading, which our loop does in one call", least=CHECKED_STEPS)
    rows: int = option(64, "that the monitor samples of each head and sequence", least=1)
    rounds: int = option(LEAST_ROUNDS, "readings of each side", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows > self.length:
            raise ValueError(f"rows must be at most length = {self.length}, got {self.rows}")
        self.problem()

    def problem(self) -> Problem:
        """The decoder and its batch."""
        model = TransformerConfig(
            vocabulary_size=self.vocabulary_size,
            num_layers=self.num_layers,
            model_width=self.model_width,
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
        )
        return Problem(model, self.length, self.batch_size, self.steps_per_call, self.rows, self.seed)


def units(config: TrainingConfig) -> list[Unit]:
    return [Unit("step", lambda: measure(config))]


def measure(config: TrainingConfig) -> list[Row]:
    """Every side on the problem."""
    problem = config.problem()
    rows: list[Row] = [
        {"side": PATTERN, "measure": "flops", "value": problem.flops},
        {"side": PATTERN, "measure": "parameters", "value": count_parameters(problem.state)},
    ]
    built: dict[str, Contestant] = {}
    losses: dict[str, list[np.ndarray]] = {}  # of the bases
    entrants: dict[str, Entrant] = {}
    for name in config.sides:
        side = SIDES[name]
        if missing := [package for package in side.packages if not sides.installed(package)]:
            rows.append({"side": name, "note": f"absent: {' and '.join(missing)} not installed"})
            continue
        for needed in dict.fromkeys((side.base, name)):
            if needed not in built:
                built[needed] = SIDES[needed].build(problem)
                if SIDES[needed].base == needed:
                    losses[needed] = built[needed].result()
        entrants[name] = Entrant(built[name], None if side.base == name else losses[side.base])
    timed = {"rounds": config.rounds, "least_seconds": LEAST_SECONDS, "tolerance": TOLERANCE}
    return rows + race(entrants, torch="torch" in entrants, **timed)


def tables(config: TrainingConfig, measurements: pd.DataFrame) -> list[Table]:
    """A row a side: its time, that over its base's, and its share of the machine's own product."""
    seconds, values = _seconds(config, measurements), _values(measurements)
    peak = product_flops() / float(np.median(seconds[PRODUCT]))
    tokens, flops = config.batch_size * config.length, values[PATTERN, "flops"]
    rows = []
    for name in (name for name in config.sides if name in seconds):
        side, median = SIDES[name], float(np.median(seconds[name]))
        numbers = f"{median * 1e3:.3g}", f"{tokens / median:,.0f}", f"{flops / median / peak:.0%}"
        compared = "–", "–", "–"
        if side.base != name and side.base in seconds:
            compared = side.base, _spell(ratio(seconds[name], seconds[side.base])), side.sought
        memory, difference = (values.get((name, measure)) for measure in ("temporary_bytes", "difference"))
        checked = "–" if difference is None else f"{difference:.1g}"
        rows.append((name, *numbers, *compared, checked, "–" if memory is None else f"{memory / 1e6:.3g}"))
    columns = (
        "side", "ms a step", "tokens/s", "of the product's rate", "base", "time over the base's", "sought",
        "losses differ by", "temporary MB",
    )  # fmt: skip
    parameters = int(values[PATTERN, "parameters"])
    title = f"A step on {config.batch_size} × {config.length} tokens, {parameters:,} parameters on every side"
    found = [Table(title, columns, cells(rows)), _products(seconds)]
    if "note" in measurements:
        notes = measurements.query("note.notna()").to_dict("records")
        found.append(Table("Not timed", ("side", "why"), cells([(row["side"], row["note"]) for row in notes])))
    return found


def _products(seconds: dict[str, list[float]]) -> Table:
    """How fast, and how steady, the machine was."""
    rows = []
    for name in (name for name in (PRODUCT, TORCH_PRODUCT) if name in seconds):
        rates = [product_flops() / t / 1e9 for t in seconds[name]]
        rows.append((name, float(np.median(rates)), min(rates), max(rates)))
    return Table("GFLOP/s of the machine's own product", ("product", "median", "least", "most"), cells(rows))


def _seconds(config: TrainingConfig, measurements: pd.DataFrame) -> dict[str, list[float]]:
    """Seconds a step, `[rounds]` of each side."""
    found: dict[str, list[float]] = {}
    for row in measurements.query("seconds.notna()").to_dict("records"):
        name = str(row["side"])
        steps = config.steps_per_call * SIDES[name].calls if name in SIDES else 1
        found.setdefault(name, []).append(float(row["seconds"]) / steps)
    return found


def _values(measurements: pd.DataFrame) -> dict[tuple[str, str], float]:
    valued = measurements.query("value.notna()").to_dict("records")
    return {(str(row["side"]), str(row["measure"])): float(row["value"]) for row in valued}


def _spell(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def figure(config: TrainingConfig, measurements: pd.DataFrame) -> Figure:
    """A bar a side, the median, and a dot a round."""
    seconds = _seconds(config, measurements)
    timed = [name for name in config.sides if name in seconds]
    drawn, axes = figures.panels(1, 1, width=8.0, height=1.2 + 0.5 * max(len(timed), 1))
    one = axes[0, 0]
    for place, name in enumerate(timed):
        readings = 1e3 * np.array(seconds[name])
        one.barh(place, np.median(readings), color=figures.COLOURS[place % len(figures.COLOURS)], alpha=0.6)
        one.plot(readings, [place] * len(readings), "k.", markersize=4)
    one.set_yticks(range(len(timed)), timed)
    one.invert_yaxis()
    one.set(xlabel="milliseconds a step", xlim=(0, None))
    return drawn


EXPERIMENT = Experiment(
    name="benchmarks.training",
    question="How fast is a training step, against whom, and what does it cost to watch attention in it?",
    config=TrainingConfig,
    presets={
        "smoke": {
            "num_layers": 2,
            "model_width": 32,
            "num_heads": 2,
            "mlp_width": 64,
            "vocabulary_size": 64,
            "length": 128,
        },
        "quick": {},
        "full": {"rounds": 25},
    },
    units=units,
    judge=lambda config, measurements: (),
    figure=figure,
    alt="A bar for each side: the median time of a training step, with a dot for each round.",
    tables=tables,
    inputs=lambda config: sides.package_versions(package for name in config.sides for package in SIDES[name].packages),
    documentation=__doc__ or "",
)


def run(config: TrainingConfig) -> Result:
    """Measures; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
