"""Statistics of rows against their definitions, for every kind of row."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import Blockwise, biases, diagnostics, dot_product_attention, masks
from attn_jax.diagnostics import ALL, DEFAULT, attention_statistics, attention_with_statistics, sample_rows
from attn_jax.diagnostics.statistics import DIFFERENTIABLE
from tests import oracles

# Tiles that divide nothing, and steps of one head or two.
IMPLEMENTATIONS = {"dense": "dense", "tiles": Blockwise(queries=2, keys=3, entries=12)}


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request, monkeypatch):
    """Every test of this file holds for every implementation that has statistics."""
    for name in ("attention_statistics", "attention_with_statistics"):
        chosen = functools.partial(getattr(diagnostics, name), implementation=IMPLEMENTATIONS[request.param])
        monkeypatch.setattr(sys.modules[__name__], name, chosen)


rng = np.random.default_rng(0)
QUERY, KEY = rng.standard_normal((2, 5, 4, 8), np.float32), rng.standard_normal((2, 7, 2, 8), np.float32)
VALUE = rng.standard_normal((2, 7, 2, 3), np.float32)
ARRAY = rng.random((2, 1, 5, 7)) < 0.4
SINKS = rng.standard_normal(4).astype(np.float32)
KINDS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "offset_per_item": ({"is_causal": True, "query_offset": np.array([2, -3])}, {}),
    "rolled": ({"is_causal": True, "query_offset": 6, "key_positions": np.array([7, 8, -1, 3, 4, 5, 6])}, {}),
    "lengths": ({"query_seq_lengths": np.array([3, 5]), "key_value_seq_lengths": np.array([0, 7])}, {}),
    "mask_and_sinks": ({"mask": ARRAY, "sinks": SINKS}, {}),
    "empty_rows_and_sinks": (
        {"query_seq_lengths": np.array([3, 5]), "key_value_seq_lengths": np.array([0, 7]), "sinks": SINKS},
        {},
    ),
    "cap_and_scale": ({"logits_soft_cap": 1.5, "scale": 3.0, "local_window_size": (2, 1)}, {}),
    "bias": ({"bias": biases.Alibi(4), "sinks": SINKS}, {"bias": oracles.alibi(4)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field(kind):
    options, for_oracle = KINDS[kind]
    expected = oracles.statistics(oracles.attention(QUERY, KEY, VALUE, **(options | for_oracle)))
    actual = attention_statistics(QUERY, KEY, statistics=ALL, **options)
    for name in ALL:
        field = getattr(actual, name)
        assert field.shape == (2, 5, 4), name
        np.testing.assert_allclose(field, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_output_in_one_pass(kind):
    options, _ = KINDS[kind]
    output, actual = attention_with_statistics(QUERY, KEY, VALUE, statistics=ALL, **options)
    np.testing.assert_allclose(output, dot_product_attention(QUERY, KEY, VALUE, **options), atol=1e-6)
    expected = attention_statistics(QUERY, KEY, statistics=ALL, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, expected)


@pytest.mark.parametrize("kind", ["causal", "rolled", "lengths", "mask_and_sinks", "bias"])
def test_chosen_rows(kind):
    options, _ = KINDS[kind]
    rows = np.array([4, 1, 4])
    every = attention_statistics(QUERY, KEY, statistics=ALL, **options)
    expected = jax.tree.map(lambda x: x[:, rows], every)
    output, actual = attention_with_statistics(QUERY, KEY, VALUE, statistics=ALL, rows=rows, **options)
    assert output.shape == (2, 5, 4, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_traced_rows_that_are_not_there_are_marked():
    measured = jax.jit(lambda rows: attention_statistics(QUERY, KEY, is_causal=True, statistics=ALL, rows=rows))
    actual = measured(np.array([-1, 2, 100]))
    for name in ALL:
        field = np.asarray(getattr(actual, name))
        nothing = np.nan if field.dtype.kind == "f" else -1
        np.testing.assert_array_equal(field[:, [0, 2]], np.full((2, 2, 4), nothing), err_msg=name)
    every = attention_statistics(QUERY, KEY, is_causal=True, statistics=ALL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:, 1], b[:, 2], rtol=1e-5, atol=1e-6), actual, every)


def test_only_what_was_asked_for():
    statistics = attention_statistics(QUERY, KEY)
    assert tuple(name for name in ALL if getattr(statistics, name) is not None) == tuple(n for n in ALL if n in DEFAULT)
    assert len(jax.tree.leaves(attention_statistics(QUERY, KEY, statistics=()))) == 0


def test_float64(x64):
    expected = oracles.statistics(oracles.attention(QUERY, KEY, VALUE, sinks=SINKS, is_causal=True))
    actual = attention_statistics(
        QUERY.astype(np.float64), KEY.astype(np.float64), sinks=SINKS, is_causal=True, statistics=ALL
    )
    for name in ALL:
        np.testing.assert_allclose(getattr(actual, name), expected[name], rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_measured_in_float32(dtype):
    zeros = jnp.zeros((4096, 1, 8), dtype)
    statistics = attention_statistics(zeros, zeros, rows=np.array([0]), statistics=("entropy", "sum_p2", "logsumexp"))
    assert statistics.entropy.dtype == jnp.float32
    np.testing.assert_allclose(statistics.entropy, np.log(4096), atol=1e-5)
    np.testing.assert_allclose(statistics.logsumexp, np.log(4096), atol=1e-5)
    np.testing.assert_allclose(statistics.sum_p2, 1 / 4096, rtol=1e-5)


def test_large_logits_keep_their_digits():
    # Mean 10,000, standard deviation 1: unshifted, lse - E[s] is a difference of numbers whose spacing is 1e-3.
    logits = (1e4 + rng.standard_normal(512)).astype(np.float32)
    one = np.ones((1, 1, 1), np.float32)
    actual = attention_statistics(one, logits[:, None, None], scale=1.0, statistics=("entropy", "logit_variance"))
    x = logits.astype(np.float64)
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    np.testing.assert_allclose(actual.entropy[0, 0], -(p * np.log(p)).sum(), rtol=1e-6)
    np.testing.assert_allclose(actual.logit_variance[0, 0], x.var(), rtol=1e-3)  # the mean's own rounding


def test_one_sharp_row():
    query, key = np.full((1, 1, 1), 200.0, np.float32), np.arange(4, dtype=np.float32)[:, None, None]
    actual = attention_statistics(query, key, scale=1.0, statistics=ALL)
    assert (actual.entropy, actual.max_weight, actual.tail_p2, actual.argmax_key) == (0, 1, 0, 3)
    assert (actual.max_logit, actual.max_abs_logit) == (600, 600)
    negative = attention_statistics(-query, key, scale=1.0, statistics=ALL)
    assert (negative.max_logit, negative.max_abs_logit, negative.first_key_mass) == (0, 600, 1)


def test_visible_keys_decide_not_slots():
    # A cache of 4096 slots of which 4 are filled.
    zeros = np.zeros((1, 1, 8), np.float32)
    slots = np.where(np.arange(4096) < 4, np.arange(4096), -1)
    actual = attention_statistics(
        zeros, np.zeros((4096, 1, 8), np.float32), key_positions=slots, query_offset=3, is_causal=True
    )
    np.testing.assert_allclose(actual.entropy, np.log(4), rtol=1e-6)
    assert (actual.visible_keys, actual.normalized_entropy) == (4, 1)


@pytest.mark.parametrize("name", ALL)
def test_gradients_are_finite_and_right(name, x64):
    query, key = QUERY[0, :, :1].astype(np.float64), KEY[0, :, :1].astype(np.float64)
    mask = ARRAY[0, 0].copy()
    mask[2] = False

    def total(query):
        field = getattr(attention_statistics(query, key, mask=mask, statistics=(name,)), name)
        return jnp.where(jnp.isneginf(field), 0, field).sum().astype(float)

    gradient = jax.grad(total)(query)
    assert (gradient[2] == 0).all(), "a row that sees nothing has no gradient"
    if name not in DIFFERENTIABLE:
        assert (gradient == 0).all(), "to a gradient it is a constant"
        return
    step, direction = 1e-6, np.random.default_rng(1).standard_normal(query.shape)
    difference = (total(query + step * direction) - total(query - step * direction)) / (2 * step)
    np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-6)


def test_nan_is_reported_where_it_is():
    key = KEY.copy()
    key[0, 2] = np.nan
    actual = attention_statistics(QUERY, key, is_causal=True, statistics=ALL)
    assert np.isnan(actual.entropy[0, 2:]).all()
    assert np.isnan(actual.max_logit[0, 2:]).all()
    assert np.isfinite(actual.entropy[0, :2]).all()
    assert np.isfinite(actual.entropy[1]).all()


def test_jit_and_vmap():
    options = {"mask": masks.Causal(), "sinks": SINKS}
    expected = attention_statistics(QUERY, KEY, statistics=ALL, **options)
    mapped = jax.jit(jax.vmap(lambda q, k: attention_statistics(q, k, statistics=ALL, **options)))(QUERY, KEY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mapped, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics": ("entropie",)}, "statistics must be one of 'logsumexp', .*; got 'entropie'"),
        ({"statistics": "entropy"}, "statistics must be a sequence of names, got the string 'entropy'"),
        ({"statistics": None}, "statistics must be a sequence of names, got None"),
        ({"statistics": 3}, "statistics must be a sequence of names, got 3"),
        ({"statistics": iter(("entropy",))}, "statistics must be a sequence of names, got <"),
        ({"rows": np.array([5])}, "rows must lie in 0..4, got values in 5..5"),
        ({"rows": np.array([0.5])}, "rows must have an integer dtype"),
        ({"rows": np.array([[0]])}, r"rows must have rank 1, \[R\]"),
        ({"dropout_rate": 0.5}, "dropout_rate"),
        ({"implementation": "xla"}, "implementation='xla' has no statistics; 'dense', 'blockwise', 'pallas' have"),
        ({"implementation": "flash"}, "implementation must be one of 'dense', .*, None; got 'flash'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        attention_statistics(QUERY, KEY, **options)
    if "statistics" in options:
        with pytest.raises((TypeError, ValueError), match=message):
            attention_with_statistics(QUERY, KEY, VALUE, **options)


def test_entropy_and_logsumexp_flow_back_to_everything(x64):
    arrays = {"query": QUERY[0], "key": KEY[0], "bias": rng.standard_normal((1, 5, 7)), "scale": np.full(4, 0.4)}
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}

    def total(arrays, implementation):
        measured = diagnostics.attention_statistics(
            **arrays, is_causal=True, logits_soft_cap=2.0, statistics=DIFFERENTIABLE, implementation=implementation
        )
        return (measured.entropy**2 + measured.normalized_entropy + 0.3 * measured.logsumexp).sum()

    expected, actual = (jax.grad(total)(arrays, chosen) for chosen in ("dense", IMPLEMENTATIONS["tiles"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), actual, expected)


def test_sampled_rows_lie_one_in_each_stretch():
    rows = np.asarray(jax.vmap(lambda key: sample_rows(key, 23, 5))(jax.random.split(jax.random.key(0), 200)))
    ends = np.arange(6) * 23 // 5
    for i in range(5):
        assert set(rows[:, i]) == set(range(ends[i], ends[i + 1]))
    np.testing.assert_array_equal(sample_rows(jax.random.key(1), 4, 4), np.arange(4))
    with pytest.raises(ValueError, match="count must be at most the length 4, got 5"):
        sample_rows(jax.random.key(0), 4, 5)
    with pytest.raises(TypeError, match="key must be"):
        sample_rows(0, 4, 2)
