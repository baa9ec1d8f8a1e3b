"""Counts against what the sizes say by hand, the readers on made-up rows, and the smoke run. No time is judged."""

import dataclasses
import itertools

import jax
import numpy as np
import pandas as pd
import pytest

from attn_jax.nn import LayerOptions, TransformerConfig
from experiments import kv_cache
from experiments.kv_cache import EXPERIMENT, KVCacheConfig, published
from experiments.kv_cache import results as kv_results
from experiments.kv_cache.published import MODELS

CONFIG = EXPERIMENT.preset("smoke")
TINY = TransformerConfig(100, 6, 24, 4, num_kv_heads=2, mlp_width=40)
RINGS = TransformerConfig(
    100, 6, 24, 4, num_kv_heads=2, mlp_width=40,
    layer_pattern=(LayerOptions(local_window_size=(15, 0)),) * 2 + (LayerOptions(),),
)  # fmt: skip


@pytest.fixture(scope="module")
def result():
    return kv_cache.run(CONFIG)


@pytest.mark.parametrize(
    ("name", "parameters", "rows"),
    [
        ("GPT-2 124M", 124_439_808, 1024 * 768),
        ("SmolLM2 135M", 134_515_008, 0),
        ("Gemma 3 270M", 268_098_176, 0),
        ("Llama 2 7B", 6_738_415_616, 32000 * 4096),
        ("Llama 3 8B", 8_030_261_248, 128256 * 4096),
    ],
)
def test_published_models_have_their_published_parameters(name, parameters, rows):
    """What is read is all of them but the tables of which a step takes a row."""
    assert published.weights_read(MODELS[name].config) == parameters - rows


def test_a_token_takes_a_key_and_a_value_of_every_layer():
    assert published.cache_read(TINY, 50) == 50 * 6 * 2 * (6 + 6)
    # Four of the six layers stop at 16.
    assert published.cache_read(RINGS, 10) == 10 * 6 * 24
    assert published.cache_read(RINGS, 50) == (50 * 2 + 16 * 4) * 24


@pytest.mark.parametrize(("batch", "ratio"), [(1, 1.0), (2, 1.0), (1, 0.25), (64, 0.25)])
@pytest.mark.parametrize("config", [TINY, RINGS])
def test_at_the_crossing_the_cache_reaches_the_weights(config, batch, ratio):
    found = int(published.crossing(config, batch=batch, weight_over_cache=ratio))
    weights = published.weights_read(config) * ratio
    assert batch * published.cache_read(config, found) >= weights
    assert found == 1 or batch * published.cache_read(config, found - 1) < weights


def test_rings_alone_never_cross():
    config = TransformerConfig(100, 6, 24, 4, mlp_width=40, local_window_size=(15, 0))
    assert published.crossing(config, batch=1, weight_over_cache=1.0) == np.inf


def made_up(seconds, config=CONFIG) -> pd.DataFrame:
    rows = [
        {"kind": kind, "n": n, "round": number, "seconds": seconds(kind, n) * (1 + number % 3)}
        for kind, n, number in itertools.product(config.kinds, config.contexts, range(config.rounds))
    ]
    return pd.DataFrame(rows)


def test_the_timed_crossing_is_where_a_step_takes_twice_what_it_takes_without_a_cache():
    table = made_up(lambda kind, n: 1e-3 * (1 + n / 80) if kind == "all heads" else 1e-3)
    assert kv_results.crossing_timed(CONFIG, table, "all heads", 100.0).value == pytest.approx(0.8)
    assert kv_results.crossing_timed(CONFIG, table, "ring", 100.0).value == np.inf


def test_the_timed_crossing_stays_where_times_grow_faster_later():
    """A cache that outgrows the processor's is read more slowly: that says nothing about a step without a cache."""
    config = dataclasses.replace(CONFIG, contexts=(32, 128, 512))
    for late in (1, 20):
        table = made_up(lambda kind, n, late=late: 1e-3 * (1 + n / 80) * (late if n > 128 else 1), config)
        assert kv_results.crossing_timed(config, table, "all heads", 100.0).value == pytest.approx(0.8)


def test_a_step_can_be_repeated():
    """Every call reads the same cache: lengths are put back."""
    model = kv_cache.Transformer(CONFIG.model("ring"), rngs=kv_cache.nnx.Rngs(0))
    caches = kv_cache._filled(model, 2, 32)
    for _ in range(2):
        _, caches = kv_cache._decode(model, caches, np.zeros((2, 1), np.int32))
    (cache,) = caches
    assert cache.capacity == CONFIG.window
    assert (cache.lengths == 31).all()
    assert not cache.overflowed.any()


@pytest.mark.parametrize("kind", kv_cache.MIXERS)
def test_a_state_has_one_size_whatever_the_context(kind):
    model = kv_cache.Transformer(CONFIG.model(kind), rngs=kv_cache.nnx.Rngs(0))
    (short,), (long,) = (kv_cache._filled(model, 2, context) for context in (32, 4096))
    assert jax.tree.map(np.shape, short) == jax.tree.map(np.shape, long)
    _, (after,) = kv_cache._decode(model, (long,), np.zeros((2, 1), np.int32))
    assert (after.lengths == 4095).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_the_smoke_run_counts_and_says_that_its_rounds_are_too_few(result):
    (outcome,) = result.claims
    assert (outcome.claim.id, outcome.verdict) == ("C3", "inconclusive")
    found = {
        name: outcome.evidence[name].value for name in ("alone_least", "alone_most", "served_least", "served_most")
    }
    assert found["alone_least"] == pytest.approx(134_515_008 / (30 * 2 * 3 * 64) / 8192, rel=1e-3)
    assert found["alone_most"] == pytest.approx((8_030_261_248 - 128256 * 4096) / (32 * 2 * 8 * 128) / 8192, rel=1e-3)
    assert found["served_most"] == pytest.approx(found["alone_most"] / 64, rel=1e-2)
    assert found["served_least"] < 0.05


def test_all_is_shown(result):
    assert len(result.figure().axes) == 2
    assert [len(table.rows) for table in result.tables] == [len(MODELS), len(CONFIG.kinds)]
    assert set(result.measurements["round"].dropna()) == set(range(CONFIG.rounds))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"contexts": (64,)}, "contexts must hold two lengths"),
        ({"window": 2048}, "window must be below the longest context 2048"),
        ({"kinds": ("all heads", "GRU")}, "kinds must hold all heads, grouped heads"),
        ({"group": 3}, "group must divide heads = 8"),
    ],
)
def test_flags_that_settle_nothing_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        KVCacheConfig(**fields)
