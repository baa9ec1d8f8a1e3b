"""What happens to an answer as the weights that it was read by are changed, in models that have learned.

The answer is that at the last token that is asked; what reads it in the last layer is one row of weights a head. Layers
below stay as they are. Only sequences that the model answers rightly are asked about.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax import attention_weights
from attn_jax.diagnostics import (
    adversarial_attention,
    gradient_attribution,
    integrated_gradients,
    permuted_attention,
    rank_agreement,
    total_variation,
)
from attn_jax.nn import Transformer
from attn_jax.training import Trained
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array, Bool, Float, Int
from experiments.artifacts import Row
from experiments.attention_explanation.config import ExplanationConfig

LN2 = float(np.log(2))
WAY = 100  # points of integrated gradients: without any weight a norm turns the stream quickly


def measure(config: ExplanationConfig, arm: str, trained: Trained) -> list[Row]:
    """Rows of every run; NaN for those that diverged."""
    batches = -(-config.examples // config.batch_size)
    batch = jax.tree.map(
        lambda x: x.reshape(-1, x.shape[-1])[: config.examples],
        config.task(arm).evaluation(batches, config.batch_size),
    )
    key = jax.random.key(config.seed)
    found = jax.tree.map(np.asarray, of_runs(config, trained.state.graphdef, trained.state.params, batch, key))
    failed = {run.run for run in trained.diverged}
    rows = []
    for run in range(config.seeds):
        values = by_run({name: x[run] for name, x in found.items()}, seed=config.seed + run)
        for name, value in values.items():
            value = np.nan if run in failed else value
            rows.append({"arm": arm, "seed": config.seed + run, "measure": name, "value": float(value)})
    return rows


def by_run(found: dict[str, np.ndarray], *, seed: int) -> dict[str, float]:
    """One number of each kind, of the sequences `[E, ...]` of a run that are answered rightly."""
    right = found["right"]
    values = {"answered": float(right.mean())}
    for name in ("layer", "head", "kept", "largest", "flattened", "permuted", "completeness"):
        values[name] = float(found[name][right].mean()) if right.any() else np.nan
    before = found["before"][right]
    for name in ("gradient", "integrated", "left_out"):
        agreement = (
            rank_agreement(found["weights"][right], found[name][right], before, seed=seed) if right.any() else None
        )
        values[name] = np.nan if agreement is None else agreement.mean
        values[f"{name}_null"] = np.nan if agreement is None else agreement.null_high
    return values


@functools.partial(jax.jit, static_argnums=(0, 1))
def of_runs(
    config: ExplanationConfig, graphdef: nnx.GraphDef[Transformer], params: Any, batch: Batch, key: Array
) -> dict[str, Array]:
    """Of every run and sequence, `[runs, E, ...]`."""

    def run(params: Any) -> dict[str, Array]:
        model = nnx.merge(graphdef, params)
        keys = jax.random.split(key, len(batch.inputs))
        return jax.vmap(lambda *one: of_sequence(config, model, *one))(*batch, keys)

    return jax.lax.map(run, params)


def of_sequence(
    config: ExplanationConfig,
    model: Transformer,
    inputs: Int[Array, " t"],
    targets: Int[Array, " t"],
    asked: Float[Array, " t"],
    key: Array,
) -> dict[str, Array]:
    """Everything about one sequence."""
    at = jnp.max(jnp.where(asked > 0, jnp.arange(len(inputs)), 0))  # the last question
    x = model.embed(inputs)
    *below, last = (model.layer(index) for index in range(model.config.num_layers))
    for block in below:
        x = block(x)
    p = last(x, observe=weights_of)[1][:, at]  # [N, T]
    visible = jnp.arange(len(inputs)) <= at

    def predict(row: Float[Array, "n t"]) -> Float[Array, " c"]:
        """The answer with a row of weights in the last layer."""
        read = last(x, intervene=lambda query, key, value, **options: with_row(at, row, value))[at][None]
        return jax.nn.softmax(model.head(read if model.final_norm is None else model.final_norm(read))[0])

    prediction = predict(p)

    def search(changing: Bool[Array, " n"], key: Array) -> tuple[Array, Array]:
        """The largest divergence of the rows of some heads, of which alone it is the mean, and the rows."""
        found = adversarial_attention(
            predict,
            p,
            key,
            epsilon=config.epsilon,
            visible=visible[None, :] & changing[:, None],
            steps=config.climbs,
            starts=config.starts,
        )
        return found.divergence / LN2, found.weights

    of_searches, of_permutations = jax.random.split(key)
    units = jnp.concatenate([jnp.ones((1, len(p)), bool), jnp.eye(len(p), dtype=bool)])  # all heads, and each alone
    divergences, rows = jax.vmap(search)(units, jax.random.split(of_searches, len(units)))
    changes = permuted_attention(predict, p, of_permutations, visible=visible, permutations=config.permutations)
    answer = targets[at]
    integrated = integrated_gradients(lambda row: predict(row)[answer], p, steps=WAY)
    return {
        "right": jnp.argmax(prediction) == answer,
        "before": jnp.arange(len(inputs)) < at,
        "weights": p.mean(axis=0),
        "layer": divergences[0],
        "head": divergences[1:].mean(),
        "kept": jnp.take_along_axis(rows[0], jnp.argmax(p, axis=-1)[:, None], axis=-1).mean(),
        "largest": p.max(axis=-1).mean(),
        "flattened": total_variation(predict(jnp.broadcast_to(visible / jnp.sum(visible), p.shape)), prediction),
        "permuted": jnp.median(changes),
        "completeness": jnp.abs(integrated.gap),
        "gradient": jnp.abs(gradient_attribution(lambda row: predict(row)[answer], p).sum(axis=0)),
        "integrated": jnp.abs(integrated.values.sum(axis=0)),
        "left_out": left_out(model, inputs, at, prediction),
    }


def weights_of(query: Array, key: Array, value: Array, **options: Any) -> Float[Array, "n t s"]:
    """What `Transformer`'s `observe` calls in every layer."""
    del value
    return attention_weights(query, key, **options)


def with_row(at: Int[Array, ""], row: Float[Array, "n t"], value: Float[Array, "t n v"]) -> Float[Array, "t n v"]:
    """What a layer's heads bring at token `at` by given weights; at the others, which the answer does not read, 0."""
    read = jnp.einsum("nt,tnv->nv", row, value)
    return jnp.zeros_like(value).at[at].set(read)


def left_out(
    model: Transformer, inputs: Int[Array, " t"], at: Int[Array, ""], prediction: Float[Array, " c"]
) -> Float[Array, " t"]:
    """The total variation of the answer as each token before the question is left out of the sequence."""
    length = len(inputs)

    def without(token: Array) -> Array:
        rest = jnp.arange(length - 1)
        rest = jnp.where(rest >= token, rest + 1, rest)
        return total_variation(jax.nn.softmax(model(inputs[rest])[at - 1]), prediction)

    return jax.vmap(without)(jnp.arange(length))
