"""What does splitting attention into heads do?

Claims: H1, H3a, H3b, H4, H6, H7.
Command: python -m experiments.heads --preset=quick --out=results/heads
Time: smoke 10 s, quick 110 s, full about 17 min on two cores.

What many heads cost at one width, counted and timed; which patterns q and k of width d_k can be fitted to; which
dimensions of X a head depends on; the loss of small language models over a grid of h × d_k; how alike their heads look,
beside unrelated patterns of the same entropy and beside heads of another model; and their loss without a W_O.
"""

import functools

from attn_jax.training import TrainState
from attn_jax.training.tasks import LanguageModel, language_model, read_text
from experiments import harness
from experiments.artifacts import Row
from experiments.harness import Experiment, Result, Unit
from experiments.heads import figure, results, simulated, tables, trained
from experiments.heads.config import HeadsConfig
from experiments.texts import digest


def units(config: HeadsConfig) -> list[Unit]:
    @functools.cache
    def task() -> LanguageModel:  # made when the first unit needs it
        return language_model(read_text(), length=config.length)[0]

    @functools.cache
    def base() -> TrainState:
        name = trained.split_name(*config.base)
        return trained.begin_pairs(config, trained.make_arm(config, name, task().vocabulary_size))

    def train(name: str) -> list[Row]:
        return trained.train(config, task(), name, base)

    lengths = sorted(config.fit_lengths)
    return [
        Unit("cost", lambda: simulated.cost(config)),
        *(Unit(f"fit_n{length}", lambda length=length: simulated.fits(config, length)) for length in lengths),
        Unit("seen", lambda: simulated.seen(config)),
        *(Unit(name, lambda name=name: train(name)) for name in trained.names(config)),
    ]


EXPERIMENT = Experiment(
    name="heads",
    question="What does splitting attention into heads do?",
    config=HeadsConfig,
    presets={
        "smoke": {
            "cost_width": 64,
            "cost_heads": (1, 8),
            "cost_length": 64,
            "rounds": 7,
            "fit_lengths": (32,),
            "fit_dims": (2, 4),
            "fit_steps": 100,
            "hot": 2,
            "seen_width": 32,
            "seen_heads": 4,
            "splits": (4,),
            "grid_dims": (8,),
            "length": 8,
            "rates": (1e-2, 2e-2),
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
            "sequences": 2,
        },
        "quick": {},
        "full": {
            "fit_lengths": (64, 128, 256),
            "fit_dims": (2, 4, 8, 16, 32, 64, 128),
            "splits": (1, 2, 4, 8, 16),
            "grid_heads": (1, 4, 16),
            "grid_dims": (2, 8, 32),
            "steps": 400,
            "seeds": 10,
            "evaluation_batches": 64,
            "sequences": 8,
        },
    },
    units=units,
    judge=results.judge,
    figure=figure.figure,
    alt=figure.ALT,
    tables=tables.tables,
    inputs=lambda config: {"text": digest(read_text())},
    documentation=__doc__ or "",
)


def run(config: HeadsConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
