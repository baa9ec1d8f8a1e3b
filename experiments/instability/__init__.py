"""What tells first that training will diverge, and does QK-norm stop it?

Claims: D5.
Command: python -m experiments.instability --preset=quick --out=results/instability
Time: smoke 15 s, quick 96 s, full about 13 min on two cores.

A small language model of characters at learning rates up to where it fails, with QK-norm and without, every step
watched: the largest attention logit, the smallest entropy, the gradient, the loss and the output logits. Each signal
gets the line that as many stable runs pass; what counts is how many steps before the divergence it is passed.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import OptimizerConfig, init_states, losses, train_steps
from attn_jax.training.tasks import Batch, LanguageModel, language_model, read_text
from attn_jax.typing import Array
from experiments import harness
from experiments.artifacts import Row
from experiments.harness import Experiment, Result, Unit
from experiments.instability import results
from experiments.instability.config import ARMS, MEASURES, InstabilityConfig


def units(config: InstabilityConfig) -> list[Unit]:
    task = functools.cache(lambda: language_model(read_text(), length=config.length)[0])
    return [
        Unit(f"{arm}_rate{rate:g}", lambda arm=arm, rate=rate: _watched(config, task(), arm, rate))
        for arm in ARMS
        for rate in config.rates
    ]


def _watched(config: InstabilityConfig, task: LanguageModel, arm: str, rate: float) -> list[Row]:
    """All seeds of an arm at one rate; a row for each look, the mean of its steps."""
    model = TransformerConfig(
        vocabulary_size=task.vocabulary_size,
        num_layers=config.num_layers,
        model_width=config.model_width,
        num_heads=config.num_heads,
        qk_norm=ARMS[arm],
    )
    optimizer = OptimizerConfig(warmup_steps=config.steps // 4, clip_norm=None)
    seeds = range(config.seed, config.seed + config.seeds)
    state = init_states(functools.partial(Transformer, model), optimizer, learning_rates=[rate], seeds=seeds)
    _, metrics = train_steps(state, task, loss=watched_loss, batch_size=config.batch_size, count=config.steps)
    looks = {name: np.asarray(metrics[name]).reshape(config.seeds, -1, config.look).mean(axis=-1) for name in MEASURES}
    return [
        {"arm": arm, "rate": rate, "seed": seed, "step": (look + 1) * config.look}
        | {name: float(x[run, look]) for name, x in looks.items()}
        for run, seed in enumerate(seeds)
        for look in range(config.looks)
    ]


def watched_loss(model: nnx.Module, batch: Batch, *, key: Array | None) -> tuple[Array, dict[str, Any]]:
    """The mean cross-entropy, and what may tell of a divergence: rows that see one key have no entropy to lose."""
    logits, layers = model(
        batch.inputs,
        deterministic=key is None,
        dropout_rng=key,
        return_statistics=("max_abs_logit", "normalized_entropy"),
    )
    mean, _ = losses.cross_entropy(logits, batch.targets, batch.weights)
    largest = jnp.stack([layer.max_abs_logit.max() for layer in layers])
    entropy = jnp.stack([layer.normalized_entropy[..., 1:, :].mean() for layer in layers])
    return mean, {"logit": largest.max(), "entropy": entropy.min(), "output": jnp.abs(logits).max()}


EXPERIMENT = Experiment(
    name="instability",
    question="What tells first that training will diverge, and does QK-norm stop it?",
    config=InstabilityConfig,
    presets={
        "smoke": {"steps": 80, "learning_rates": (0.01, 1.0), "seeds": 3, "model_width": 8, "length": 8},
        "quick": {},
        "full": {"model_width": 48, "length": 48, "num_layers": 3, "steps": 800},
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt="Four panels. The share of runs that diverge against the learning rate, plain and with QK-norm. The loss less "
    "that at the lowest rate over steps. The five signals of the plain runs at the rate where divergence begins, in "
    "units of their alarm. How many steps before the divergence each signal alarms: the largest attention logit and "
    "the entropy first.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: InstabilityConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
