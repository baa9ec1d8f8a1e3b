"""What do a window, hashing and clustering keep of real attention, and does routing learn?

Claims: L3.
Command: python -m experiments.sparse_patterns --model=smollm2 --preset=quick --out=results/sparse_patterns
Time: smoke 60 s, quick 94 s, full 15 min on two cores.

Of every head of a checkpoint, the mass and the output that sparse patterns keep, against the pairs and tiles that they
take, beside the same architecture at random weights; and one layer of routed attention on a look-up task, by what its
centroids learn from.
"""

from collections.abc import Mapping

from experiments import artifacts, harness, texts
from experiments.harness import Experiment, Result, Unit
from experiments.sparse_patterns import heads, results, trained
from experiments.sparse_patterns.config import ARMS, SparseConfig


def inputs(config: SparseConfig) -> Mapping[str, str]:
    name, text = texts.read(config.text_file)
    source = heads.decoder(config.model).source
    return {source.name: artifacts.file_digest(source), name: texts.digest(text)}


def units(config: SparseConfig) -> list[Unit]:
    return [
        *(
            Unit(f"{arm}_{i}", lambda arm=arm, i=i: heads.measure(config, arm, i))
            for arm in ARMS
            for i in range(len(heads.documents(config)[1]))
        ),
        *(
            Unit(f"lookup_{learn}", lambda learn=learn: trained.train(config, learn))
            for learn in (trained.DENSE, *config.learn)
        ),
    ]


EXPERIMENT = Experiment(
    name="sparse_patterns",
    question="What do a window, hashing and clustering keep of real attention, and does routing learn?",
    config=SparseConfig,
    presets={
        "smoke": {
            "documents": 2,
            "fitted": 1,
            "max_tokens": 64,
            "windows": (8, 24),
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
            "evaluation_batches": 1,
        },
        "quick": {},
        "full": {
            "documents": 16,
            "fitted": 4,
            "max_tokens": 512,
            "windows": (16, 32, 48, 96, 192),
            "window": 48,
            "rates": (3e-3, 1e-2, 3e-2),
            "steps": 1000,
            "seeds": 10,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: SparseConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
