"""Arms of a comparison, trained side by side: what one seed gives to an arm, it gives to all.

Every arm gets its own learning rate, the best of a grid that is extended while its best rate is at an edge: a rate that
suits one arm would decide for it. Runs of one seed see the same batches in the same order, and where shapes agree they
begin with the same parameters, so that differences between arms are paired by seed.

    rows = train_arm(Arm("tied", make_model), task, Budget(steps=400, rates=(1e-3, 3e-3, 1e-2)))
    best_of(measurements, "tied").values       # the loss held out at the arm's best rate, one a seed
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

from attn_jax.training import LoopConfig, OptimizerConfig, Trained, TrainState, init_states, token_loss, train
from attn_jax.training.state import MakeModel
from attn_jax.training.step import Loss
from attn_jax.training.tasks import Batch, Task
from attn_jax.typing import Array
from experiments.artifacts import Row

EXTENSIONS = 4  # how often a grid may grow beyond the edge that holds its best rate


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things compared.

    Attributes:
        name: of the arm in the measurements.
        make_model: called as `make_model(rngs=…)`.
        loss: called as `loss(model, batch, key=…)`; what else it measures is recorded, too.
    """

    name: str
    make_model: MakeModel
    loss: Loss = token_loss


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long, how often and how an arm is trained.

    Attributes:
        steps: of each run, a multiple of `evaluations`.
        rates: the grid of largest learning rates, ascending by one factor; one rate is not searched.
        seeds: independent runs.
        seed: moves all of them.
        batch_size: sequences of a step, and of each evaluation batch.
        evaluations: how many there are after the first, at equal distances.
        evaluation_batches: of each.
        optimizer: by which all arms are trained; the default warms up over a tenth and decays to nothing.
        stop_early: whether a rate is judged at the evaluation, one for all seeds, where its loss is lowest; else at the
            last. For training sets that a model learns by heart.
    """

    steps: int
    rates: tuple[float, ...]
    seeds: int = 5
    seed: int = 0
    batch_size: int = 8
    evaluations: int = 4
    evaluation_batches: int = 8
    optimizer: OptimizerConfig | None = None
    stop_early: bool = False

    def __post_init__(self) -> None:
        if self.steps % self.evaluations:
            raise ValueError(f"steps must be a multiple of evaluations = {self.evaluations}, got {self.steps}")
        factors = np.diff(np.log(self.rates))
        if not (factors > 0).all() or not np.allclose(factors, factors.mean() if factors.size else 0, rtol=0.2):
            raise ValueError(f"rates must ascend by one factor, got {self.rates}")

    @property
    def factor(self) -> float:
        """From one rate to the next."""
        return float((self.rates[-1] / self.rates[0]) ** (1 / (len(self.rates) - 1)))


def train_arm(
    arm: Arm,
    task: Task,
    budget: Budget,
    *,
    begun: TrainState | None = None,
    trained: dict[float, Trained] | None = None,
) -> list[Row]:
    """Trains an arm at every rate and beyond, and returns what evaluation measured.

    Args:
        arm: what is trained.
        task: on what.
        budget: how long, and at which rates.
        begun: all seeds before the first step, `[seeds]`; None: as `begin` makes them.
        trained: is filled with what each rate came to, for those who go on with the models.

    Returns:
        Rows of `arm`, `rate`, `seed`, `step`, `measure` and `value`; NaN once a run has diverged.
    """
    begun = begin(arm, budget) if begun is None else begun

    def run(rate: float) -> list[Row]:
        finished = train_from(begun, arm, task, budget, rate)
        if trained is not None:
            trained[rate] = finished
        return _rows(arm, budget, rate, finished)

    found = {rate: run(rate) for rate in budget.rates}
    for _ in range(EXTENSIONS if len(budget.rates) > 1 else 0):
        rows = pd.DataFrame([row for rows in found.values() for row in rows])
        best = best_of(rows, arm.name, stop_early=budget.stop_early)
        if best.inside or np.isnan(best.rate):
            break
        further = best.rate * budget.factor if best.rate == max(found) else best.rate / budget.factor
        found[further] = run(further)
    return [row for rate in sorted(found) for row in found[rate]]


def begin(arm: Arm, budget: Budget) -> TrainState:
    """All seeds of an arm before the first step, `[seeds]`; their learning rate is still to be set."""
    steps = budget.steps
    optimizer = budget.optimizer or OptimizerConfig(schedule="cosine", warmup_steps=steps // 10, total_steps=steps)
    seeds = range(budget.seed, budget.seed + budget.seeds)
    return init_states(arm.make_model, optimizer, learning_rates=[1.0], seeds=seeds)


def train_from(begun: TrainState, arm: Arm, task: Task, budget: Budget, rate: float) -> Trained:
    """All seeds at one rate, in one compiled call per evaluation; every rate shares the compile."""
    every = budget.steps // budget.evaluations
    loop = LoopConfig(
        steps=budget.steps,
        batch_size=budget.batch_size,
        steps_per_call=every,
        evaluate_every=every,
        evaluation_batches=budget.evaluation_batches,
        checkpoint_every=budget.steps,
    )
    state = dataclasses.replace(begun, learning_rate=jnp.full_like(begun.learning_rate, rate))
    return train(state, task, config=loop, loss=arm.loss)


def _rows(arm: Arm, budget: Budget, rate: float, trained: Trained) -> list[Row]:
    """What evaluation measured of every seed."""
    steps, every = budget.steps, budget.steps // budget.evaluations
    seeds = range(budget.seed, budget.seed + budget.seeds)
    failed = {found.run: found.step for found in trained.diverged}
    measured = {row["step"]: row for row in trained.rows if row["kind"] == "evaluation"}
    names = [name for name in measured[0] if name not in ("step", "kind")]
    rows = []
    for step in range(0, steps + 1, every):
        for run, seed in enumerate(seeds):
            # A run that diverged stands at its last finite state; what that scores is no result.
            alive = step in measured and failed.get(run, steps + 1) > step
            values = {name: measured[step][name][run] if alive else None for name in names}
            where = {"arm": arm.name, "rate": rate, "seed": seed, "step": step}
            rows += [
                {**where, "measure": name, "value": np.nan if value is None else value}
                for name, value in values.items()
            ]
    return rows


@dataclasses.dataclass(frozen=True)
class Best:
    """An arm at its best rate.

    Attributes:
        rate: of the lowest mean loss over seeds, held out; NaN if some seed diverged at every rate.
        inside: whether rates on both sides were worse; a grid of one rate has no edge.
        values: of the measure there, `[seeds]`.
        step: at which it is judged: the last, or where runs are stopped early that of the lowest loss.
    """

    rate: float
    inside: bool
    values: np.ndarray
    step: float = float("nan")


def best_of(measurements: pd.DataFrame, arm: str, *, measure: str = "loss", stop_early: bool = False) -> Best:
    """The best rate of an arm, chosen by its loss, and its values of a measure there."""
    trained = measurements.query("arm == @arm and step > 0")
    judged = trained if stop_early else trained.query("step == step.max()")
    losses = judged.query("measure == 'loss'")
    rates = sorted(set(losses["rate"]))
    places = sorted(set(zip(losses["rate"], losses["step"], strict=True)))
    means = {place: np.mean(_values(losses, *place)) for place in places}
    finite = {place: mean for place, mean in means.items() if np.isfinite(mean)}  # NaN where a run diverged
    if not finite:
        return Best(float("nan"), False, np.full(len(set(losses["seed"])), np.nan))
    rate, step = min(finite, key=lambda place: finite[place])
    inside = len(rates) == 1 or rates[0] < rate < rates[-1]
    return Best(rate, inside, _values(judged.query("measure == @measure"), rate, step), step)


def _values(rows: pd.DataFrame, rate: float, step: float) -> np.ndarray:
    """`[seeds]`, of one rate at one step."""
    there = rows.query("rate == @rate and step == @step")
    return there.sort_values(by="seed")["value"].to_numpy(np.float64)


@dataclasses.dataclass(frozen=True)
class Constrained:
    """A loss of a model whose parameters are first made to obey: tied, frozen, cut to blocks.

    Attributes:
        constrain: changes the model's parameters, nested by name, in place; a function of a module. Gradients flow
            through what it does, and stop where it says `jax.lax.stop_gradient`.
        loss: of the model that obeys.
    """

    constrain: Callable[[dict[str, Any]], None]
    loss: Loss = token_loss

    def __call__(self, model: nnx.Module, batch: Batch, *, key: Array | None, **options: Any) -> tuple[Array, Any]:
        """As every loss is called, with `observe=` too if there is a monitor."""
        graphdef, parameters = nnx.split(model)
        params = nnx.to_pure_dict(parameters)
        self.constrain(params)
        return self.loss(nnx.merge(graphdef, params), batch, key=key, **options)
