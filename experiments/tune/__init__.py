"""Which head width, which scale, and is the routing of the model that results healthy?

Claims: none; it walks the tuning guide in five steps.
Command: python -m experiments.tune --width=256 --task=recall
Time: smoke 20 s, quick 210 s, full about 30 min on two cores.

One: head widths from 32 to 128 are trained beside each other at one model width. Two: the scale of the chosen model is
read off what its attention returns, and its layers are audited. Three: the entropy of every layer beside its limits.
Four: heads that look and answer alike, and what removing one costs. Five: a long sequence by tiles, against the dense
form: the same numbers, and what is saved. `report.html` beside the usual files has it all.
"""

from experiments import harness
from experiments.harness import Experiment, Result, Unit
from experiments.tune import chosen, results, widths
from experiments.tune.config import TuneConfig


def units(config: TuneConfig) -> list[Unit]:
    steps = {"scale": chosen.scale, "entropy": chosen.entropy, "redundancy": chosen.redundancy, "tiles": chosen.tiles}
    return [
        *(
            Unit(f"head_width_{width}", lambda width=width: widths.measure(config, width))
            for width in config.candidates
        ),
        *(Unit(name, lambda step=step: step(config)) for name, step in steps.items()),
    ]


EXPERIMENT = Experiment(
    name="tune",
    question="Which head width, which scale, and is the routing of the model that results healthy?",
    config=TuneConfig,
    presets={
        "smoke": {"width": 64, "steps": 40, "seeds": 2, "long": 256, "length": 32, "symbols": 8, "rates": (3e-3,)},
        "quick": {},
        "full": {"steps": 600, "seeds": 5, "rates": (5e-4, 1e-3, 2e-3), "long": 4096},
    },
    units=units,
    judge=lambda config, measurements: (),
    figure=results.figure,
    alt="Left: the held-out loss of each head width, a point a seed; the chosen one is ringed. Right: the normalised "
    "entropy of the chosen model's heads by layer, with and without the first token, and the limit below which a head "
    "counts as sharp.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: TuneConfig) -> Result:
    """Walks the five steps; writes nothing."""
    return harness.run(EXPERIMENT, config)
