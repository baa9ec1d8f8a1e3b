"""Why are query, key and value three projections?

Claims: P1, P2, P3, P4, P5, P6, P7.
Command: python -m experiments.projections --preset=quick --out=results/projections
Time: smoke 25 s, quick 112 s, full about 11 min on two cores.

How much tokens attend to themselves without projections and with W_Q = W_K; what symmetric scores cannot say; what
moves when keys or values are swapped; what a row of weights sums to; what each bias can change. Then small models,
trained with projections tied and not: a language model at equal parameters, and a directed relation.
"""

from experiments import harness
from experiments.harness import Experiment, Result, Unit
from experiments.projections import figure, results, retrieval, simulated, trained
from experiments.projections.config import TRAINED, ProjectionsConfig


def units(config: ProjectionsConfig) -> list[Unit]:
    return [
        Unit("diagonal", lambda: simulated.diagonal(config)),
        Unit("symmetry", lambda: simulated.symmetry(config)),
        Unit("biases", lambda: simulated.biases(config)),
        Unit("planted", lambda: retrieval.planted(config)),
        Unit("determined", lambda: retrieval.determined(config)),
        Unit("budget", lambda: retrieval.budget(config)),
        *(
            Unit(f"relation_{arm}", lambda arm=arm: trained.train_relation(config, arm))
            for arm in config.arms("relation")
        ),
        *(
            Unit(f"language_{arm}", lambda arm=arm: trained.train_language(config, arm))
            for arm in config.arms("language")
        ),
    ]


EXPERIMENT = Experiment(
    name="projections",
    question="Why are query, key and value three projections?",
    config=ProjectionsConfig,
    presets={
        "smoke": {
            "widths": (4, 16, 64, 256),
            "lengths": (16, 128),
            "trained": ("language_separate",),
            "steps": 4,
            "rates": (0.01,),
        },
        "quick": {},
        "full": {
            "seeds": 64,
            "trained": TRAINED,
            "layers": 2,
            "steps": 1000,
            "runs": 10,
            "relation_steps": 2000,
            "relation_runs": 20,
        },
    },
    units=units,
    judge=results.judge,
    figure=figure.figure,
    alt="Eight panels. The weight of a token on itself against the width, for several numbers of tokens. The width "
    "where it passes one half against ln n, on the predicted line, without projections and with W_Q = W_K. It falls "
    "as norms spread. In the language model it is high before training when tied. What the cycle test, the content "
    "swap and swaps around a cycle leave of tied and separate scores. Accuracy on the relation task, by seed. How "
    "much each bias changes a layer. The loss of each arm of the language model over separate projections.",
    tables=figure.tables,
    documentation=__doc__ or "",
)


def run(config: ProjectionsConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
