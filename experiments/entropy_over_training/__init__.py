"""Does low attention entropy mean overfitting, or starved gradients?

Claims: D2b.
Command: python -m experiments.entropy_over_training --preset=quick --out=results/entropy_over_training
Time: smoke 15 s, quick 89 s, full about 14 min on two cores.

A small language model of characters learns texts of several sizes, from one it soon knows by heart to one it hardly
sees twice, and the largest once more at a rate at which entropy collapses. On the way: the entropy of each head, the
loss on what is trained on and on what is held out, and the gradient that reaches the queries and keys of each head
against that of its values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import OptimizerConfig, evaluate, init_states, losses, token_loss, train_steps
from attn_jax.training.tasks import Batch, LanguageModel, language_model, read_text
from attn_jax.typing import Array, Float
from experiments import harness
from experiments.artifacts import Row
from experiments.entropy_over_training import results
from experiments.entropy_over_training.config import BY_HEAD, EntropyConfig
from experiments.harness import Experiment, Result, Unit


def units(config: EntropyConfig) -> list[Unit]:
    rate = config.learning_rate
    by_size = [Unit(f"text{size}", lambda size=size: _trained(config, size, rate)) for size in config.sizes]
    return [*by_size, Unit("collapse", lambda: _trained(config, config.sizes[-1], config.collapse_rate))]


def texts(size: int, length: int) -> tuple[LanguageModel, LanguageModel]:
    """The task of the first `size` characters, and the same with what is trained on held out.

    The text is repeated to the length of the whole, so that the tasks of all sizes share one compiled program.
    """
    whole, _ = language_model(read_text(), length=length)
    if size > whole.training.shape[0]:
        raise ValueError(f"text_sizes must be at most {whole.training.shape[0]}, what the text has, got {size}")
    task = dataclasses.replace(whole, training=jnp.resize(whole.training[:size], whole.training.shape))
    return task, dataclasses.replace(task, held_out=jnp.resize(task.training[:size], whole.held_out.shape))


def _trained(config: EntropyConfig, size: int, rate: float) -> list[Row]:
    """All seeds on a text of one size; a row for each look, measure and head."""
    held_out, seen = texts(size, config.length)
    model = TransformerConfig(
        vocabulary_size=held_out.vocabulary_size,
        num_layers=config.num_layers,
        model_width=config.model_width,
        num_heads=config.num_heads,
    )
    optimizer = OptimizerConfig(schedule="cosine", warmup_steps=config.steps // 10, total_steps=config.steps)
    seeds = range(config.seed, config.seed + config.seeds)
    make, rows = functools.partial(Transformer, model), []
    state = init_states(make, optimizer, learning_rates=[rate], seeds=seeds)
    for step in config.looks:
        if step:
            every = config.looks[1]
            state, _ = train_steps(state, held_out, loss=token_loss, batch_size=config.batch_size, count=every)
        look = functools.partial(
            evaluate, state, loss=looked_at, batch_size=config.batch_size, count=config.evaluation_batches
        )
        found, other = look(seen), look(held_out)
        for run, seed in enumerate(seeds):
            where = {"size": size, "rate": rate, "seed": seed, "step": step}
            for measure, value in (("loss", found["loss"]), ("held_out", other["loss"])):
                rows.append({**where, "measure": measure, "head": -1, "value": float(value[run])})
            for measure in BY_HEAD:
                heads = np.asarray(found[measure][run]).ravel()
                rows += [{**where, "measure": measure, "head": i, "value": float(x)} for i, x in enumerate(heads)]
    return rows


def looked_at(model: nnx.Module, batch: Batch, *, key: Array | None) -> tuple[Array, dict[str, Any]]:
    """The mean cross-entropy; of each head `[L, N]`, the entropy and (‖∂W_Q‖ + ‖∂W_K‖) / ‖∂W_V‖."""
    graphdef, parameters = nnx.split(model)

    def objective(params: Any) -> tuple[Array, Any]:
        logits, layers = nnx.merge(graphdef, params)(batch.inputs, return_statistics=("normalized_entropy",))
        mean, _ = losses.cross_entropy(logits, batch.targets, batch.weights)
        # A row that sees one key has no entropy to lose.
        return mean, jnp.stack([layer.normalized_entropy[:, 1:].mean(axis=(0, 1)) for layer in layers])

    (mean, entropy), gradient = jax.value_and_grad(objective, has_aux=True)(nnx.to_pure_dict(parameters))
    at = gradient["layers"]["attention"]
    query, keys, value = (_norm_by_head(at[f"{name}_weight"]) for name in ("query", "key", "value"))
    return mean, {"entropy": entropy, "share": (query + keys) / value}


def _norm_by_head(gradient: Float[Array, "l d n h"]) -> Float[Array, "l n"]:
    return jnp.linalg.norm(gradient, axis=(1, 3))


EXPERIMENT = Experiment(
    name="entropy_over_training",
    question="Does low attention entropy mean overfitting, or starved gradients?",
    config=EntropyConfig,
    presets={
        "smoke": {
            "text_sizes": (200, 1000, 20_000),
            "steps": 60,
            "evaluations": 3,
            "evaluation_batches": 2,
            "model_width": 16,
            "num_heads": 2,
            "length": 16,
        },
        "quick": {},
        "full": {"model_width": 48, "length": 48, "steps": 2400, "seeds": 8},
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt="Four panels. Loss over training, on what is trained on and on what is held out, for texts of several sizes: "
    "the smaller, the further apart. The entropy of all falls, and the larger the text, the further. At the last step, "
    "the entropy against the gap: they rise together. The share of the gradient that reaches queries and keys of each "
    "head against its entropy.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: EntropyConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
