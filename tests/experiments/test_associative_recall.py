"""What is stored untrained against NumPy, the reader of capacities on made-up curves, and the smoke run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.training.tasks import Lookup
from experiments import associative_recall
from experiments.associative_recall import EXPERIMENT, capacity, trained
from experiments.associative_recall.config import MIXERS, STORES, RecallConfig
from experiments.associative_recall.results import Measured

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return associative_recall.run(CONFIG)


def test_too_few_runs_settle_nothing(result):
    assert {x.claim.id: x.verdict for x in result.claims} == dict.fromkeys(("L1a", "L1b", "L1c"), "inconclusive")
    assert [len(table.rows) for table in result.tables] == [len(CONFIG.stores), len(CONFIG.arms)]
    assert len(result.figure().axes) == 3


def test_few_pairs_are_held_and_a_wider_head_holds_more(result):
    found = Measured(CONFIG, result.measurements)
    for store in CONFIG.stores:
        assert found.answered(store, 8)[:, 0].mean() > 0.5  # four pairs
        assert found.answered(store, 8).mean(axis=0)[0] > found.answered(store, 8).mean(axis=0)[-1]
    assert found.answered("softmax", 8).mean() > found.answered("softmax", 4).mean()
    assert found.answered("softmax", 8).mean() > found.answered("elu", 8).mean()


def weights(store, query, keys):
    """Of the definitions, per pair of query and key, up to what the normaliser makes of a row."""
    scores = query @ keys.T
    if store == "softmax":
        return np.exp(scores / np.sqrt(keys.shape[-1]))
    if store == "window":
        return np.exp(scores / np.sqrt(keys.shape[-1])) * (np.arange(len(keys)) >= len(keys) - CONFIG.window)
    if store == "retention":
        return scores * (1 - 2.0**-12) ** np.arange(len(keys))[::-1]
    features = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
        "exp": np.exp,
        "squared": np.square,
        "identity": lambda x: x,
    }[store]
    return features(query) @ features(keys).T


@pytest.mark.parametrize("store", [store for store in STORES if store != "random_features"])
def test_a_store_reads_what_its_definition_says(store):
    """Five pairs are stored; what stands behind them is not read, whatever it is."""
    rng = np.random.default_rng(0)
    query, keys, values = rng.standard_normal((3, 4)), rng.standard_normal((7, 4)), rng.standard_normal((7, 4))
    keys[5:], values[5:] = np.nan, np.nan
    given = (jnp.asarray(x, jnp.float32) for x in (query, keys, values))
    read = jax.jit(capacity.read(CONFIG, store))(jax.random.key(0), *given, jnp.asarray(5))
    kernel = weights(store, query, keys[:5])
    if store not in ("identity", "retention"):
        kernel = kernel / kernel.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(read, kernel @ values[:5], rtol=2e-5, atol=2e-6)


def test_random_features_estimate_the_softmax():
    rng = np.random.default_rng(0)
    query, keys, values = (jnp.asarray(0.5 * rng.standard_normal((n, 4)), jnp.float32) for n in (3, 8, 8))
    many = dataclasses.replace(CONFIG, features=8192)
    read = capacity.read(many, "random_features")(jax.random.key(0), query, keys, values, jnp.asarray(8))
    exact = capacity.read(many, "softmax")(jax.random.key(0), query, keys, values, jnp.asarray(8))
    np.testing.assert_allclose(read, exact, atol=0.02)


def test_a_capacity_is_read_off_its_curve():
    stored = (4, 8, 16)
    curves = np.array([[1.0, 1.0, 1.0], [1.0, 0.8, 1.0], [0.8, 0.0, 0.0], [0.95, 0.9, 0.0]])
    expected = [16, 4 * 2**0.5, 2 * 2**0.5, 8]  # what comes after a fall does not count
    np.testing.assert_allclose(capacity.held(curves, stored, 0.9), expected, rtol=1e-12)


def test_numbers_kept_grow_with_the_pairs_for_softmax_alone():
    kept = {store: [capacity.state_size(CONFIG, store, 8, pairs) for pairs in (16, 64)] for store in STORES}
    assert kept.pop("softmax") == [256, 1024]
    assert all(short == long for short, long in kept.values())
    assert (kept["elu"][0], kept["identity"][0], kept["random_features"][0]) == (72, 64, 16 * 9)


def test_keys_and_values_are_embedded_apart():
    task = Lookup(num_pairs=4, num_keys=8, num_values=8, length=8)
    sizes = trained._sizes(CONFIG, "softmax", 1, 17, num_token_types=9, num_heads=1)
    model = trained.PairTransformer(sizes, task, rngs=nnx.Rngs(0))
    tokens = task.evaluation(1, 2).inputs[0]
    keys, values = task.parts(tokens)
    plain = trained.Transformer(sizes, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(model(tokens), plain(keys, token_types=values))


@pytest.mark.parametrize("arm", MIXERS)
def test_every_arm_has_its_words(arm):
    sizes = trained._sizes(RecallConfig(), arm, 2, 17, num_heads=2)
    words = [sizes.mixer] * 2 if isinstance(sizes.mixer, str) else list(sizes.mixer)
    assert words == {"random_features": ["linear"] * 2}.get(arm, [*(MIXERS[arm][0] * 2)[:2]])
    assert (sizes.mixer_options.feature_map == "random") == (arm == "random_features")


def rows(accuracy, seeds=10):
    return pd.DataFrame(
        [
            {"part": "one_layer", "pairs": 16, "arm": "linear", "rate": 0.01, "seed": s, "step": 600, "measure": m,
             "value": v}
            for s in range(seeds)
            for m, v in (("loss", 1.0), ("accuracy", accuracy[s]))
        ]
    )  # fmt: skip


def test_a_run_that_diverged_settles_nothing():
    config = RecallConfig()
    found = Measured(config, rows([1.0] * 9 + [0.5])).solve("one_layer", "linear", 16)
    assert (found.value, found.count) == (0.9, 10)
    assert np.isnan(Measured(config, rows([1.0] * 9 + [np.nan])).solve("one_layer", "linear", 16).value)
    assert np.isnan(Measured(config, rows([1.0] * 10)).solve("one_layer", "softmax", 16).value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"most_pairs": 100}, "most_pairs must be a power of two, got 100"),
        ({"stores": ("elu",)}, "stores must hold softmax and elu"),
        ({"arms": ("softmax",)}, "arms must hold softmax and linear"),
        ({"query_arms": ("softmax", "linear")}, "query_arms must hold softmax, linear and linear_softmax"),
        ({"pairs": (16, 8)}, "pairs must ascend"),
        ({"query_length": 11}, "query_length must be at least 3"),
        ({"steps": 3}, "steps must be a multiple"),
    ],
)
def test_flags_that_settle_nothing_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        RecallConfig(**fields)
