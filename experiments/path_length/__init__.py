"""How far does a mixer reach: by its gradients, and by what it learns to copy and to hold?

Claims: C4.
Command: python -m experiments.path_length --preset=quick --out=results/path_length
Time: smoke 20 s, quick 70 s, full about 11 min on two cores.

The gradient of the last output with respect to each token before it, of untrained models and of those that learned to
copy; and which runs learn to copy every symbol at a distance, or to hold one marked symbol over it: attention, a GRU
and a convolution. Distances, length and steps were chosen after trials with other seeds, so that a GRU learns to copy
at the near distance in the time there is.
"""

from experiments import harness
from experiments.harness import Experiment, Result, Unit
from experiments.path_length import results, trained
from experiments.path_length.config import PathLengthConfig


def units(config: PathLengthConfig) -> list[Unit]:
    return [Unit(arm, lambda arm=arm: trained.train(config, arm)) for arm in config.arms]


EXPERIMENT = Experiment(
    name="path_length",
    question="How far does a mixer reach: by its gradients, and by what it learns to copy and to hold?",
    config=PathLengthConfig,
    presets={
        "smoke": {
            "arms": ("convolution",),
            "distances": (1, 5),
            "num_symbols": 2,
            "length": 7,
            "width": 3,
            "model_width": 8,
            "rates": (1e-2,),
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
            "sequences": 2,
        },
        "quick": {},
        "full": {
            "distances": (3, 10, 36),
            "length": 40,
            "rates": (3e-3, 1e-2, 3e-2),
            "steps": 500,
            "seeds": 12,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: PathLengthConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
