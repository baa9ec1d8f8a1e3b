"""How many pairs can a mechanism look up, untrained and trained, and does a hybrid bring look-up back?

Claims: L1a, L1b, L1c.
Command: python -m experiments.associative_recall --preset=quick --out=results/associative_recall
Time: smoke 15 s, quick 113 s, full about 20 min on two cores.

Random keys and values stored by each mechanism without any training, and one of the keys asked for: how many pairs it
holds, by head width. One trained layer that looks up pairs, each of them one token. With `full`, two layers on
multi-query recall, where a pair is two tokens: alone and as hybrids with softmax; the share of runs that solve it.
"""

import functools

from experiments import harness
from experiments.associative_recall import capacity, results, trained
from experiments.associative_recall.config import ALONE, PARTS, STORES, RecallConfig
from experiments.harness import Experiment, Result, Unit


def units(config: RecallConfig) -> list[Unit]:
    made = {
        "capacity": [
            Unit(f"capacity_{store}", functools.partial(capacity.capacity, config, store)) for store in config.stores
        ],
        "one_layer": [
            Unit(f"one_layer_{arm}_{pairs}", functools.partial(trained.one_layer, config, arm, pairs))
            for pairs in config.pairs
            for arm in config.arms
        ],
        "multi_query": [
            Unit(f"multi_query_{arm}", functools.partial(trained.multi_query, config, arm)) for arm in config.query_arms
        ],
    }
    return [unit for part in PARTS if part in config.parts for unit in made[part]]


EXPERIMENT = Experiment(
    name="associative_recall",
    question="How many pairs can a mechanism look up, untrained and trained, and does a hybrid bring look-up back?",
    config=RecallConfig,
    presets={
        "smoke": {
            "stores": ("softmax", "elu", "identity"),
            "widths": (4, 8),
            "most_pairs": 64,
            "queries": 16,
            "features": 16,
            "simulations": 4,
            "arms": ("softmax", "linear"),
            "pairs": (4,),
            "window": 2,
            "model_width": 8,
            "steps": 2,
            "seeds": 2,
            "batch_size": 2,
        },
        "quick": {},
        "full": {
            "parts": PARTS,
            "stores": STORES,
            "arms": ALONE,
            "pairs": (8, 16),
            "seeds": 20,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt=results.ALT,
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: RecallConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
