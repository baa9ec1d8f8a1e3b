"""Step one: models that differ in the width of their heads alone, and which of them is taken."""

import functools
from typing import NamedTuple

import numpy as np

from attn_jax.nn import Transformer
from attn_jax.training import take_run
from experiments import estimates
from experiments.arms import Arm, train_arm
from experiments.artifacts import Row
from experiments.tune.config import TuneConfig


class Trained(NamedTuple):
    """A head width after training.

    Attributes:
        rows: what evaluation measured.
        losses: held out, at the end and at the best rate, `[seeds]`; NaN where a run diverged.
        rate: the best one.
        model: of the first seed at that rate.
    """

    rows: list[Row]
    losses: np.ndarray
    rate: float
    model: Transformer


def measure(config: TuneConfig, head_width: int) -> list[Row]:
    """Trains a head width: rows of evaluation, and the losses it is chosen by."""
    trained = train(config, head_width)
    losses = [
        {"seed": config.seed + i, "rate": trained.rate, "measure": "final_loss", "value": float(loss)}
        for i, loss in enumerate(trained.losses)
    ]
    return [{"head_width": head_width, **row} for row in (*trained.rows, *losses)]


@functools.lru_cache(maxsize=8)
def train(config: TuneConfig, head_width: int) -> Trained:
    """All seeds at every rate; the same call gives the same bits."""
    finished = {}
    arm = Arm(f"width_{head_width}", functools.partial(Transformer, config.model(head_width)))
    rows = train_arm(arm, config.make_task(), config.budget, trained=finished)
    last = [row for row in rows if row["step"] == config.steps and row["measure"] == "loss"]
    losses = {rate: np.array([row["value"] for row in last if row["rate"] == rate]) for rate in finished}
    best = min(losses, key=lambda rate: np.nan_to_num(losses[rate].mean(), nan=np.inf))
    return Trained(rows, losses[best], best, take_run(finished[best].state, 0).model)


def choose(losses: dict[int, np.ndarray]) -> int:
    """The head width that is taken: the widest of those that cannot be told from the best.

    The best has the lowest mean loss. Another cannot be told from it if the interval of the paired difference holds 0;
    wide heads are few, and each head more costs n² logits (claim H1).

    Args:
        losses: of each head width, `[seeds]`, paired by seed.
    """
    alive = {width: x for width, x in losses.items() if np.isfinite(x).all()}
    if not alive:
        raise RuntimeError("some run of every head width diverged: lower the rates")
    best = min(alive, key=lambda width: alive[width].mean())
    alike = [width for width, x in alive.items() if estimates.difference(x, alive[best]).low <= 0]
    return max(alike)


def chosen_width(config: TuneConfig) -> int:
    """Of all candidates, trained if they are not yet."""
    return choose({width: train(config, width).losses for width in config.candidates})
