"""The models of `path_length`: their gradients before and after training, and what they come to copy and hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

from attn_jax.nn import Transformer
from attn_jax.training import Trained, TrainState
from attn_jax.typing import Array, Float, Int
from experiments.arms import Arm, begin, best_of, train_arm
from experiments.artifacts import Row
from experiments.path_length.config import PathLengthConfig
from experiments.sampling import rows_of


def make_arm(config: PathLengthConfig, name: str) -> Arm:
    """How the models of an arm are made."""
    return Arm(name, functools.partial(Transformer, config.transformer(name)))


def train(config: PathLengthConfig, name: str) -> list[Row]:
    """The models of an arm on every task, and their gradients before and after they learned to copy farthest."""
    arm = make_arm(config, name)
    begun = begin(arm, config.budget)
    rows = _gradients(config, name, "before", begun, failed=[])
    for kind, distance in config.tasks:
        by_rate: dict[float, Trained] = {}
        found = train_arm(arm, config.task(kind, distance), config.budget, begun=begun, trained=by_rate)
        rows += [{"part": "training", "task": kind, "distance": distance, **row} for row in found]
        if (kind, distance) == ("copy", config.far):
            best = best_of(pd.DataFrame(found), name).rate
            trained = by_rate[best if np.isfinite(best) else config.rates[0]]
            rows += _gradients(config, name, "after", trained.state, failed=[run.run for run in trained.diverged])
    return rows


def _gradients(config: PathLengthConfig, arm: str, when: str, state: TrainState, *, failed: list[int]) -> list[Row]:
    batch = jax.jit(lambda: config.task("copy", config.far).evaluation(1, config.sequences))()
    known = np.array(gradients(state, batch.inputs[0]), np.float64)[:, ::-1]
    known[failed] = np.nan
    return rows_of(known, {"distance": range(config.length)}, part="gradient", arm=arm, when=when)


@jax.jit
def gradients(state: TrainState, token_ids: Int[Array, "b t"]) -> Float[Array, "r t"]:
    """`‖∂ logits of the last token / ∂ x_t‖` of every run, with x what enters the first layer, mean over sequences."""
    length = token_ids.shape[-1]

    def run(params: Any) -> Array:
        def last(x: Float[Array, "t d"]) -> Array:
            # Token i of a table with a row for each token is that row.
            model = nnx.merge(state.graphdef, {**params, "embedding": x})
            return model(jnp.arange(length))[-1]

        jacobians = jax.lax.map(jax.jacrev(last), params["embedding"][token_ids])
        return jnp.sqrt(jnp.sum(jnp.square(jacobians), axis=(1, 3))).mean(axis=0)

    return jax.lax.map(run, state.params)
