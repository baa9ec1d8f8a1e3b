"""sparse_patterns: what is measured of a pattern, pair by pair, and what the look-up model trains and is judged by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.routed import draw_rotations
from experiments import sparse_patterns
from experiments.harness import InputError
from experiments.sparse_patterns import EXPERIMENT, heads, results, trained
from experiments.sparse_patterns.config import ARMS, SparseConfig
from tests.routed import oracle

LENGTH, N, K, H, TILE = 20, 4, 2, 8, 6
CONFIG = EXPERIMENT.preset(
    "smoke", windows=(3, 5), window=3, first=1, tile=TILE, buckets=4, rounds=2, clusters=3, learn=("straight_through",)
)


@functools.cache
def layer():
    """Arrays of one layer, and what is measured of it."""
    rng = np.random.default_rng(0)
    shapes = [(LENGTH, N, H), (LENGTH, K, H), (LENGTH, K, H)]
    held = heads.Captured(*(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes))
    means = [jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for shape in ((N, H), (K, H), (K, 3, H))]
    fit = heads.Fitted(*means)
    rotations = draw_rotations(jax.random.key(1), N, H, 4, num_rounds=2)
    measure = jax.jit(lambda *x: heads.of_layer(CONFIG, rotations, jax.random.key(2), *x))
    found = {name: np.asarray(value, np.float64) for name, value in measure(held, fit).items()}
    return jax.tree.map(lambda x: np.asarray(x, np.float64), (held, fit, rotations)), found


@functools.cache
def pairs():
    """`{pattern: [N, T, T]}`, read off the definitions, and the groups of hashing and clustering."""
    (held, fit, rotations), _ = layer()
    t, s = np.mgrid[:LENGTH, :LENGTH]
    causal = s <= t
    base = np.broadcast_to(causal & ((t - s < 3) | (s < 1) | (t < 1)), (N, LENGTH, LENGTH))
    query = held.query - fit.query_mean
    key = np.repeat(held.key - fit.key_mean, N // K, axis=1)
    hashed = [oracle.buckets(x[None], rotations)[0] for x in (query, key)]
    centroids = np.repeat(fit.centroids, N // K, axis=0)
    near = [oracle.affinities(x[None], centroids)[0].argmax(axis=-1)[..., None] for x in (query, key)]
    groups = {"hashing": hashed, "clustering": near}
    seen = {"window": np.broadcast_to(causal & (t - s < 3), base.shape), "window_global": base}
    for name, (of_queries, of_keys) in groups.items():
        together = of_queries[:, None] == of_keys[None]  # [T, T, N, rounds]
        seen[name] = base | (causal[None] & np.moveaxis(together.any(axis=-1), -1, 0))
    return seen, groups


@functools.cache
def weights():
    (held, _, _), _ = layer()
    key, value = (np.repeat(x, N // K, axis=1) for x in (held.key, held.value))
    logits = np.einsum("tnh,snh->nts", held.query, key) / np.sqrt(H)
    logits = np.where(np.tri(LENGTH, dtype=bool), logits, -np.inf)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True), value


@pytest.mark.parametrize("pattern", ["window", "window_global", "hashing", "clustering"])
def test_mass_pairs_and_error_of_a_pattern(pattern):
    (p, value), seen, half = weights(), pairs()[0][pattern], LENGTH // 2
    for n in range(N):
        mass, count, visible, wrong, size = 0.0, 0, 0, 0.0, 0.0
        for t in range(half, LENGTH):
            kept = np.flatnonzero(seen[n, t])
            mass += p[n, t, kept].sum() / (LENGTH - half)
            count, visible = count + len(kept), visible + t + 1
            sparse = p[n, t, kept] @ value[kept, n] / p[n, t, kept].sum()
            wrong += ((sparse - p[n, t] @ value[:, n]) ** 2).sum()
            size += ((p[n, t] @ value[:, n]) ** 2).sum()
        found = {measure: layer()[1][pattern, measure][n] for measure in ("mass", "pairs", "error")}
        assert found["mass"] == pytest.approx(mass, rel=1e-4)
        assert found["pairs"] == pytest.approx(count / visible, rel=1e-5)
        assert found["error"] == pytest.approx(np.sqrt(wrong / size), rel=1e-3)


def touched(found):
    """How many tiles hold a pair; the first begins at the first query."""
    rows, columns = (range(0, length, TILE) for length in found.shape)
    return sum(found[i : i + TILE, j : j + TILE].any() for i in rows for j in columns)


@pytest.mark.parametrize("pattern", ["window", "window_global", "hashing", "clustering"])
def test_tiles_are_those_of_each_round_in_its_own_order(pattern):
    (seen, groups), half = pairs(), LENGTH // 2
    causal = np.tri(LENGTH, dtype=bool)[half:]
    for n in range(N):
        expected = touched(seen["window_global" if pattern in groups else pattern][n, half:])
        for r in range(groups[pattern][0].shape[-1] if pattern in groups else 0):
            of_queries, of_keys = groups[pattern][0][half:, n, r], groups[pattern][1][:, n, r]
            met = (of_queries[:, None] == of_keys[None]) & causal
            rows, columns = (np.argsort(x, kind="stable") for x in (of_queries, of_keys))
            expected += touched(met[rows][:, columns])
        assert layer()[1][pattern, "tiles"][n] == pytest.approx(expected / touched(causal))


def test_chance_and_the_largest_take_as_many_pairs_as_hashing():
    found = layer()[1]
    for pattern in ("random", "best"):
        np.testing.assert_allclose(found[pattern, "pairs"], found["hashing", "pairs"])
    assert (found["best", "mass"] > found["hashing", "mass"]).all()
    assert (found["best", "mass"] > found["random", "mass"]).all()
    assert (found["random", "mass"] > found["window_global", "mass"]).all()
    p, seen = weights()[0], pairs()[0]
    for n in range(N):
        mass = 0.0
        for t in range(LENGTH // 2, LENGTH):
            base = seen["window_global"][n, t]
            extra = (seen["hashing"][n, t] & ~base).sum()
            mass += p[n, t, base].sum() + np.sort(p[n, t, : t + 1][~base[: t + 1]])[::-1][:extra].sum()
        assert found["best", "mass"][n] == pytest.approx(mass / (LENGTH - LENGTH // 2), rel=1e-4)


def test_what_is_found_is_a_share_of_what_is_outside():
    masses = {"window_global": (0.6, 0.8), "hashing": (0.8, 0.85)}
    rows = [
        {"part": "heads", "arm": "model", "pattern": pattern, "measure": "mass", "seed": document, "value": value}
        for pattern, of_documents in masses.items()
        for document, value in enumerate(of_documents)
    ]
    np.testing.assert_allclose(results.found(pd.DataFrame(rows), "hashing", "mass"), [0.5, 0.25])


def test_routing_learns_as_it_is_told_and_is_judged_by_hard_routing():
    model = trained.RoutedLookup(CONFIG, rngs=nnx.Rngs(0))
    batch = jax.tree.map(lambda x: x[0], CONFIG.task().evaluation(1, 4))
    key = jax.random.key(0)
    losses = {
        (learn, when): trained.lookup_loss(learn, model, batch, key=key if when == "training" else None)
        for learn in (trained.DENSE, "none", "auxiliary", "soft")
        for when in ("training", "evaluation")
    }
    hard = float(losses["none", "evaluation"][0])
    assert float(losses["none", "training"][0]) == hard
    assert float(losses["soft", "evaluation"][0]) == hard
    assert float(losses["soft", "training"][0]) != hard
    assert float(losses["auxiliary", "training"][0]) > hard
    assert float(losses["dense", "training"][0]) == float(losses["dense", "evaluation"][0]) != hard
    assert all(np.isfinite(found["accuracy"]) for _, found in losses.values())


def test_questions_that_meet_their_pair():
    model = trained.RoutedLookup(CONFIG, rngs=nnx.Rngs(0))
    batch = jax.tree.map(lambda x: x[0], CONFIG.task().evaluation(1, 4))
    _, (query, key, _) = model.project(batch.inputs)
    of_queries, of_keys = (oracle.affinities(x, model.centroids[...])[..., 0, :].argmax(axis=-1) for x in (query, key))
    keys, values = CONFIG.task().parts(batch.inputs)
    met, asked = 0, 0
    for b, t in np.argwhere(np.asarray(batch.weights) > 0):
        (pair,) = np.flatnonzero((np.asarray(keys)[b] == keys[b, t]) & (np.asarray(values)[b] > 0))
        met, asked = met + (of_queries[b, t] == of_keys[b, pair]), asked + 1
    assert float(model.met(batch)) == pytest.approx(met / asked)


def test_a_run_on_a_real_model():
    result = sparse_patterns.run(CONFIG)
    rows = result.measurements
    assert set(rows.query("part == 'heads'")["arm"]) == set(ARMS)
    assert set(rows.query("part == 'lookup'")["arm"]) == {"dense", "straight_through"}
    (outcome,) = result.claims
    assert (outcome.claim.id, outcome.verdict) == ("L3", "inconclusive")  # two seeds
    assert outcome.evidence["kept"].value > outcome.evidence["kept_random"].value + 0.1  # the first token is a sink
    assert np.isnan(outcome.evidence["short_soft"].value)  # not asked for
    kept, learned = result.tables
    assert [row[0] for row in kept.rows] == list(results.NAMES.values())
    assert len(learned.rows) == 2
    assert len(result.figure().axes) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"windows": (8, 4)}, "windows must ascend"),
        ({"window": 7}, "window must be one of windows"),
        ({"buckets": 3}, "buckets must be even, got 3"),
        ({"length": 8}, "length must be at least"),
    ],
)
def test_flags_that_do_not_go_together(change, says):
    with pytest.raises(ValueError, match=says):
        SparseConfig(**change)


def test_a_model_that_cannot_be_read():
    with pytest.raises(InputError, match="--model=minilm: must be a decoder"):
        sparse_patterns.run(SparseConfig(model="minilm"))
    with pytest.raises(InputError, match="--fitted=2"):
        heads.documents(SparseConfig(max_tokens=2048, documents=1, fitted=2, text_file="LICENSE"))
