"""What do positions leak, do rotary scores depend on the distance only, and what extends past the trained length?

Claims: X1, X2, X3.
Command: python -m experiments.positions --preset=quick --out=results/positions
Time: smoke 15 s, quick 111 s, full about 18 min on two cores.

How far a rotary score is off at far positions, by how its phases are computed; what a shift of all positions changes in
queries, keys and values; and small models by their positions, trained at length L: what their values tell of the
position, their loss past L beside that of the last L tokens alone, and whether they look up what stands further back.
"""

import functools

from attn_jax.training.tasks import Lookup, language_model, read_text
from experiments import harness
from experiments.harness import Experiment, Result, Unit
from experiments.positions import figure, results, simulated, trained
from experiments.positions.config import KINDS, PositionsConfig
from experiments.positions.trained import Models
from experiments.texts import digest


def units(config: PositionsConfig) -> list[Unit]:
    @functools.cache
    def models(part: str) -> Models:  # made when the first unit needs them
        if part == "language":
            return Models(config, part, language_model(read_text(), length=config.length)[0])
        return Models(config, part, Lookup(length=config.length))

    return [
        Unit("scores", lambda: simulated.scores(config)),
        *(
            Unit(f"language_{kind}", lambda kind=kind: trained.train_language(models("language"), kind))
            for kind in config.kinds
        ),
        *(
            Unit(f"lookup_{kind}", lambda kind=kind: trained.train_lookup(models("lookup"), kind))
            for kind in config.lookup_kinds
        ),
    ]


EXPERIMENT = Experiment(
    name="positions",
    question="What do positions leak, do rotary scores depend on the distance only, and what extends past the trained "
    "length?",
    config=PositionsConfig,
    presets={
        "smoke": {
            "pairs": 8,
            "kinds": ("rotary",),
            "lookup_kinds": ("rotary",),
            "scalings": ("ntk",),
            "model_width": 16,
            "num_heads": 2,
            "head_width": 8,
            "length": 8,
            "rates": (1e-2, 2e-2),
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
            "sequences": 2,
            "probed": 8,
            "lookup_steps": 2,
            "lookup_seeds": 2,
            "lookup_sequences": 8,
        },
        "quick": {},
        "full": {
            "kinds": KINDS,
            "lookup_kinds": KINDS,
            "layers": 4,
            "length": 64,
            "every": 8,
            "steps": 500,
            "seeds": 6,
            "probed": 256,
            "lookup_steps": 600,
            "lookup_seeds": 20,
        },
    },
    units=units,
    judge=results.judge,
    figure=figure.figure,
    alt=figure.ALT,
    tables=results.tables,
    inputs=lambda config: {"text": digest(read_text())},
    documentation=__doc__ or "",
)


def run(config: PositionsConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
