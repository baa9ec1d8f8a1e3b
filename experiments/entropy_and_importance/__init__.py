"""Are the sharpest and the most diffuse heads of a model those that it can do without?

Claims: D2a (of up to three checkpoints).
Command: python -m experiments.entropy_and_importance --preset=quick --out=results/entropy_and_importance
Time: smoke 15 s, quick 50 s, 110 s with Gemma 3, full about 16 min on two cores.

The heads at both ends of a checkpoint's entropies are replaced by their means, beside as many heads of the same layers
from between; with the first token's mass in the entropy, and without; and at random weights. Of every head the
entropy and, by its gradient, the importance, which removing heads one by one confirms. What entropy tells while a model
is trained (the gap to held-out data, the gradient of q and k) is asked by `experiments.entropy_over_training`.
"""

from experiments import harness
from experiments.entropy_and_importance import measured, results
from experiments.entropy_and_importance.config import ImportanceConfig
from experiments.harness import Experiment, Result
from experiments.head_removal import inputs

EXPERIMENT = Experiment(
    name="entropy_and_importance",
    question="Are the sharpest and the most diffuse heads of a model those that it can do without?",
    config=ImportanceConfig,
    presets={
        "smoke": {"model": ("minilm",), "documents": 2, "fitted": 1, "max_tokens": 24, "draws": 1, "singles": 3},
        "quick": {},
        "full": {"documents": 24, "fitted": 8, "max_tokens": 64, "draws": 4, "singles": 48},
    },
    units=measured.units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: ImportanceConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
