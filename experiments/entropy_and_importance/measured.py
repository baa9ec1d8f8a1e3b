"""What `entropy_and_importance` measures: of every head entropy and importance; what the ends of the entropies cost."""

import zlib

import numpy as np

from experiments.artifacts import Row
from experiments.checkpoints import load
from experiments.claims.removal import SINKS
from experiments.entropy_and_importance.config import ImportanceConfig
from experiments.harness import Unit
from experiments.head_removal import costs, heads_of, importance, label, lowest, names, pair_rows, rows_by_head


def units(config: ImportanceConfig) -> list[Unit]:
    """Of each checkpoint the ends of its entropies, heads removed one by one, and the control."""
    found = []
    for name in names(config):
        for what, measure in (("ends", ends), ("heads", one_by_one), ("random_weights", random_weights)):
            unit = Unit(f"{label(name)}_{what}", lambda name=name, measure=measure: measure(config, name))
            found.append(unit)
    return found


def ends(config: ImportanceConfig, name: str) -> list[Row]:
    """Of the model, with the first token's mass in the entropy and without."""
    return [row for sink, _ in SINKS for row in _ends(config, name, "model", sink)]


def random_weights(config: ImportanceConfig, name: str) -> list[Row]:
    """The control, with the first token, which is nothing special there."""
    return _ends(config, name, "random_weights", "")


def _ends(config: ImportanceConfig, name: str, arm: str, sink: str) -> list[Row]:
    entropy = getattr(heads_of(config, name, arm), f"normalized_entropy{sink}")
    at_end = {"sharp": lowest(entropy, config.share), "diffuse": lowest(-entropy, config.share)}
    between = ~(at_end["sharp"] | at_end["diffuse"])
    return [
        row
        for end, chosen in at_end.items()
        for row in pair_rows(config, name, arm, chosen, between, end=f"{end}{sink}")
    ]


def one_by_one(config: ImportanceConfig, name: str) -> list[Row]:
    """Entropies and importance of every head; the cost of removing some, drawn from all, one at a time."""
    heads = heads_of(config, name, "model")
    at = {"checkpoint": name, "arm": "model"}
    rows = []
    for measure in ("normalized_entropy", "normalized_entropy_no_sink", "sink_mass"):
        rows += rows_by_head(getattr(heads, measure), part="heads", measure=measure, **at)
    by = "gradient" if load(name).config.head else "removal"
    rows += rows_by_head(importance(config, name), ("document",), part="heads", measure="importance", by=by, **at)

    shape, rng = heads.sink_mass.shape, np.random.default_rng([config.seed, zlib.crc32(name.encode())])
    drawn = rng.permutation(heads.sink_mass.size)[: config.singles]
    alone = np.arange(heads.sink_mass.size).reshape(shape) == drawn[:, None, None]
    for (i, document), value in np.ndenumerate(costs(config, name, "model", list(alone))):
        layer, head = np.unravel_index(drawn[i], shape)
        where = {"document": document, "layer": int(layer), "head": int(head)}
        rows.append({**at, "part": "heads", "measure": "cost", **where, "value": float(value)})
    return rows
