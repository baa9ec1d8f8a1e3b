"""Are attention matrices nearly of low rank, and are low-rank approximations therefore cheap and good?

Claims: L2.
Command: python -m experiments.low_rank --preset=quick --out=results/low_rank
Time: smoke 20 s, quick 94 s, full about 14 min on two cores.

Spectra of the weights of a real model, beside the same architecture at random weights: what the first singular values
hold of the sum of all, and what the best matrix of a rank misses of the output. Then Linformer, Nyström and Performer
on the same queries, keys and values, each as wide as the same FLOPs allow.
"""

import pandas as pd
from matplotlib.figure import Figure

from experiments import harness
from experiments.harness import Experiment, Result
from experiments.low_rank import results
from experiments.low_rank.config import LowRankConfig
from experiments.low_rank.measured import inputs, sizes, units
from experiments.progress import Table
from experiments.verdicts import Outcome


def judge(config: LowRankConfig, measurements: pd.DataFrame) -> list[Outcome]:
    return results.judge(config, measurements, sizes(config))


def tables(config: LowRankConfig, measurements: pd.DataFrame) -> list[Table]:
    return results.tables(config, measurements, sizes(config))


def figure(config: LowRankConfig, measurements: pd.DataFrame) -> Figure:
    return results.figure(config, measurements, sizes(config))


EXPERIMENT = Experiment(
    name="low_rank",
    question="Are attention matrices nearly of low rank, and are low-rank approximations therefore cheap and good?",
    config=LowRankConfig,
    presets={
        "smoke": {
            "documents": 2,  # too few for a verdict
            "max_tokens": 64,
            "layers": 2,
            "ranks": (8, 16),
            "fit_documents": 1,
            "fit_steps": 3,
            "draws": 2,
        },
        "quick": {},
        "full": {"documents": 16, "layers": 10, "fit_documents": 16, "fit_steps": 120, "draws": 8},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Three panels. The share of the sum that the first singular values hold against their number, for the model "
    "and for random weights, masked and not. The same at a quarter of them, by layer. The output error of Linformer, "
    "Nyström and Performer against their FLOPs.",
    tables=tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: LowRankConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
