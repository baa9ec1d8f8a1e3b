"""Who wins with little data, and who with much: attention, a convolution or a recurrence of equal size?

Claims: C5, C5b.
Command: python -m experiments.inductive_bias --preset=quick --out=results/inductive_bias
Time: smoke 15 s, quick 110 s, full about 12 min on two cores.

The accuracy of naming digits and the loss of the next value of seasonal series, against the size of the training set,
of models of equal parameters. The size of the models, the number of steps and the smallest sets were chosen after
trials with other seeds, in which larger models still learned at 150 steps, and none learned anything of 16 series.
"""

from experiments import harness
from experiments.harness import Experiment, Result, Unit
from experiments.inductive_bias import results, trained
from experiments.inductive_bias.config import PARTS, InductiveBiasConfig
from experiments.inductive_bias.trained import Data


def units(config: InductiveBiasConfig) -> list[Unit]:
    data = {part: Data(config, part) for part in PARTS}
    trainings = [(part, arm) for part in PARTS for arm in config.arms]
    return [
        Unit("nearest", lambda: trained.nearest(data["digits"])),
        *(Unit(f"{part}_{arm}", lambda part=part, arm=arm: trained.train(data[part], arm)) for part, arm in trainings),
    ]


EXPERIMENT = Experiment(
    name="inductive_bias",
    question="Who wins with little data, and who with much: attention, a convolution or a recurrence of equal size?",
    config=InductiveBiasConfig,
    presets={
        "smoke": {
            "arms": ("convolution",),
            "images": (5, 10),
            "series": (2, 4),
            "held_out": 2,
            "levels": 3,
            "series_length": 4,
            "layers": 1,
            "model_width": 8,
            "rates": (6e-3,),
            "steps": 2,
            "series_steps": 2,
            "evaluations": 1,
            "seeds": 2,
            "batch_size": 2,
        },
        "quick": {},
        "full": {
            "images": (50, 150, 500, 1437),
            "series": (64, 256, 1024, 4096),
            "steps": 1000,
            "series_steps": 600,
            "evaluations": 20,
            "seeds": 8,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: InductiveBiasConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
