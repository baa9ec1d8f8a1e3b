"""Does similarity find heads that a model can do without?

Claims: H5 (of up to three checkpoints).
Command: python -m experiments.head_redundancy --preset=quick --out=results/head_redundancy
Time: smoke 15 s, quick 50 s, 105 s with Gemma 3, full about 10 min on two cores.

The most similar heads of each layer, by their patterns and by what they bring, are replaced by their means, all but one
of each cluster; beside as many heads of the same layers that put as much weight on the first token. Controls: the same
architecture at random weights, and shuffled tokens. And the loss as more and more heads go, by similarity, by
importance and by chance, beside the shares that Michel et al. 2019 could remove.
"""

from experiments import harness
from experiments.harness import Experiment, Result
from experiments.head_redundancy import measured, results
from experiments.head_redundancy.config import RedundancyConfig
from experiments.head_removal import inputs

EXPERIMENT = Experiment(
    name="head_redundancy",
    question="Does similarity find heads that a model can do without?",
    config=RedundancyConfig,
    presets={
        "smoke": {"model": ("minilm",), "documents": 2, "fitted": 1, "max_tokens": 24, "draws": 1, "shares": (0.2,)},
        "quick": {},
        "full": {
            "documents": 24,
            "fitted": 8,
            "max_tokens": 64,
            "draws": 6,
            "shares": (0.05, 0.1, 0.2, 0.3, 0.4),
        },
    },
    units=measured.units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: RedundancyConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
