"""How does a real model route, layer by layer and head by head?

Claims: D1, D6 (of up to three checkpoints).
Command: python -m experiments.diagnose --model=smollm2 --text_file=README.md --max_tokens=512
         python -m experiments.diagnose --capture=captured.npz
Time: smoke 20 s, quick 80 s, 180 s with Gemma 3, full about 10 min on two cores.

Every head of every layer on documents of real text, next to three controls: the same architecture at random weights,
the same tokens shuffled, and the same documents with another first token. Of decoders also the loss where attention
keeps to a window, with and without the first four tokens in sight.

First of all stand the findings of `attn_jax.diagnostics.diagnose`, the worst first, which are also written to
findings.json: of each checkpoint, or of arrays that were captured in a model of any framework (docs/capturing.md).
"""

from experiments import harness
from experiments.diagnose import figure, measured, results
from experiments.diagnose.config import DiagnoseConfig
from experiments.harness import Experiment, Result

EXPERIMENT = Experiment(
    name="diagnose",
    question="How does a real model route, layer by layer and head by head?",
    config=DiagnoseConfig,
    presets={
        "smoke": {"documents": 2, "max_tokens": 64},
        "quick": {},
        "full": {"documents": 16, "max_tokens": 512},
    },
    units=measured.units,
    judge=results.judge,
    figure=figure.draw,
    alt="For each checkpoint eight heat maps, layers downwards and heads across: normalised entropy with and without "
    "the first token, the mass on the first token, the largest weight, spread and maximum of the logits, distance, and "
    "score rank.",
    tables=results.tables,
    records=results.records,
    inputs=measured.inputs,
    documentation=__doc__ or "",
)


def run(config: DiagnoseConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
