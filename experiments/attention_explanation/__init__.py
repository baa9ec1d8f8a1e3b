"""Are attention weights explanations: would other weights give the same answer?

Claims: D3, D3b.
Command: python -m experiments.attention_explanation --preset=quick --out=results/attention_explanation
Time: smoke 30 s, quick 100 s, full about 12 min on two cores.

Small models learn to say which keyword stands in a sequence, and to look up a pair, by one layer and by two; others try
the same with uniform attention. Then the row of weights that an answer is read by is pushed as far as the answer
allows, permuted, and compared with gradients and with leaving tokens out.

Jain and Wallace 2019 did so with classifiers of text: over recurrent encoders they found weak agreement and other
weights that do as well, over an encoder of single words more agreement. Wiegreffe and Pinter 2019 first asked whether
uniform weights do as well, and found that they do on several of the data sets.
"""

from experiments import harness
from experiments.attention_explanation import results, trained
from experiments.attention_explanation.config import ExplanationConfig
from experiments.harness import Experiment, Result, Unit


def units(config: ExplanationConfig) -> list[Unit]:
    return [
        unit
        for arm in config.arms
        for unit in (
            Unit(arm, lambda arm=arm: trained.train(config, arm)),
            Unit(f"{arm}_uniform", lambda arm=arm: trained.train_uniform(config, arm)),
        )
    ]


EXPERIMENT = Experiment(
    name="attention_explanation",
    question="Are attention weights explanations: would other weights give the same answer?",
    config=ExplanationConfig,
    presets={
        "smoke": {
            "arms": ("keyword",),
            "classes": 2,
            "pairs": 2,
            "keys": 2,
            "length": 6,
            "model_width": 8,
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
            "examples": 2,
            "climbs": 2,
            "starts": 2,
            "permutations": 2,
        },
        "quick": {},
        "full": {
            "rates": (3e-3, 1e-2, 3e-2),
            "steps": 1000,
            "seeds": 10,
            "evaluation_batches": 16,
            "examples": 32,
            "climbs": 150,
            "starts": 8,
            "permutations": 100,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: ExplanationConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
