"""What `head_redundancy` measures: how alike heads are, and what it costs to remove those that are most alike."""

import zlib

import numpy as np

from attn_jax.diagnostics.clusters import head_clusters
from attn_jax.typing import Bool, Float, Int
from experiments.artifacts import Row
from experiments.claims.removal import REDUNDANT, SINK_CALIPER
from experiments.harness import Unit
from experiments.head_redundancy.config import ORDERS, RedundancyConfig
from experiments.head_removal import (
    ARMS,
    Heads,
    costs,
    heads_of,
    importance,
    label,
    lowest,
    names,
    pair_rows,
    rows_by_head,
)

BISECTIONS = 30


def units(config: RedundancyConfig) -> list[Unit]:
    """Of each checkpoint the arms, and what goes as more and more heads do."""
    found = []
    for name in names(config):
        for arm in ARMS:
            found.append(Unit(f"{label(name)}_{arm}", lambda name=name, arm=arm: measure(config, name, arm)))
            if arm == "model":
                found.append(Unit(f"{label(name)}_more", lambda name=name: more_and_more(config, name)))
    return found


def measure(config: RedundancyConfig, name: str, arm: str) -> list[Row]:
    """Of an arm: how alike heads are, and the cost of the most similar ones beside matched ones."""
    heads = heads_of(config, name, arm)
    apart = distance(heads)
    labels = tightest(apart, config.share)
    at = {"checkpoint": name, "arm": arm}
    by_line = surplus(apart, clusters(apart, 1.0)).mean()
    rows: list[Row] = [{**at, "part": "redundant", "value": float(by_line)}]
    away = apart + np.where(np.eye(apart.shape[-1], dtype=bool), np.inf, 0)
    nearest = away.argmin(axis=-1)[..., None]
    for measure in ("divergence", "cka"):
        values = np.take_along_axis(getattr(heads, measure), nearest, axis=-1)[..., 0]
        rows += rows_by_head(values, part="nearest", measure=measure, **at)
    alike = np.abs(heads.sink_mass[:, :, None] - heads.sink_mass[:, None, :]) <= SINK_CALIPER
    return rows + pair_rows(config, name, arm, surplus(apart, labels), alone(labels), alike)


def more_and_more(config: RedundancyConfig, name: str) -> list[Row]:
    """The cost as the share of heads that are removed grows, in each order."""
    apart = distance(heads_of(config, name, "model"))
    matters = importance(config, name, fitted=True).mean(axis=0)
    size = np.linalg.norm(matters, axis=-1, keepdims=True)  # of a layer: as Michel et al. compare layers
    by_chance = np.random.default_rng([config.seed, zlib.crc32(name.encode())]).random(matters.shape)
    asked = [(order, share) for order in ORDERS for share in config.shares]
    sets = []
    for order, share in asked:
        if order == "similar":
            sets.append(surplus(apart, tightest(apart, share)))
        else:
            sets.append(lowest(by_chance if order == "chance" else matters / np.where(size == 0, 1, size), share))
    found = costs(config, name, "model", sets)
    return [
        {"part": "more", "checkpoint": name, "arm": "model", "order": asked[i][0], "share": asked[i][1],
         "document": document, "heads": int(sets[i].sum()), "value": float(value)}
        for (i, document), value in np.ndenumerate(found)
    ]  # fmt: skip


def distance(heads: Heads) -> Float[np.ndarray, "l n n"]:
    """How far apart two heads of a layer are: below 1 they are a redundant pair, alike in pattern and in output.

    max(√(JS / 0.05), √((1 − CKA) / 0.05)); heads that cannot be compared are as far apart as can be.
    """
    divergence = np.nan_to_num(np.asarray(heads.divergence, np.float64), nan=1.0)
    cka = np.clip(np.nan_to_num(np.asarray(heads.cka, np.float64), nan=0.0), 0, 1)
    found = np.sqrt(np.maximum(divergence / REDUNDANT["divergence"], (1 - cka) / (1 - REDUNDANT["cka"])))
    found = (found + np.swapaxes(found, -1, -2)) / 2  # the rounding of float32
    return np.where(np.eye(found.shape[-1], dtype=bool), 0, found)


def clusters(apart: Float[np.ndarray, "l n n"], threshold: float) -> Int[np.ndarray, "l n"]:
    """Labels of each layer's heads."""
    return np.stack([head_clusters(layer, threshold=threshold) for layer in apart])


def tightest(apart: Float[np.ndarray, "l n n"], share: float) -> Int[np.ndarray, "l n"]:
    """The tightest clusters that leave at most this share of the heads over, when each keeps one."""
    low, high = 0.0, float(apart.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if surplus(apart, clusters(apart, middle)).mean() <= share:
            low = middle
        else:
            high = middle
    return clusters(apart, low)


def surplus(apart: Float[np.ndarray, "l n n"], labels: Int[np.ndarray, "l n"]) -> Bool[np.ndarray, "l n"]:
    """All heads but the most central one of each cluster."""
    left = np.ones(labels.shape, bool)
    for layer, found in enumerate(labels):
        for one in np.unique(found):
            members = np.flatnonzero(found == one)
            central = apart[layer][np.ix_(members, members)].sum(axis=-1).argmin()
            left[layer, members[central]] = False
    return left


def alone(labels: Int[np.ndarray, "l n"]) -> Bool[np.ndarray, "l n"]:
    """Heads that share their cluster with none."""
    return (labels[:, :, None] == labels[:, None, :]).sum(axis=-1) == 1
