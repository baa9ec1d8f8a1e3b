"""Summaries of heads against NumPy averages of the oracle's rows."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import biases, masks
from attn_jax.diagnostics import summarize_heads
from tests import oracles

rng = np.random.default_rng(0)
QUERY, KEY = 2 * rng.standard_normal((2, 9, 4, 8), np.float32), rng.standard_normal((2, 9, 2, 8), np.float32)
VALUE = rng.standard_normal((2, 9, 2, 3), np.float32)
HOLES = np.where(rng.random((9, 9)) < 0.2, -np.inf, 0).astype(np.float32)


@functools.partial(jax.jit, static_argnames="chosen")
def _compiled(query, key, arrays, chosen):
    return summarize_heads(query, key, **arrays, **dict(chosen))


def summarize(query, key, **options):
    """`summarize_heads` as one program for each geometry: of its own it is a hundred small ones, which take seconds."""
    chosen = {name: x for name, x in options.items() if isinstance(x, (bool, int, float, tuple))}
    arrays = {name: x for name, x in options.items() if name not in chosen}
    return _compiled(query, key, arrays, tuple(chosen.items()))


KINDS = {
    "causal": {"is_causal": True},
    "two_way": {},
    "lengths": {"is_causal": True, "query_seq_lengths": np.array([5, 9]), "key_value_seq_lengths": np.array([5, 9])},
    "window_and_cap": {"local_window_size": (3, 0), "logits_soft_cap": 3.0},
    "bias_that_hides": {"is_causal": True, "bias": HOLES},
}


def score_rank(visible):
    """Effective rank `[B, N]` of the float64 scores of the queries that see something and the keys that are seen."""
    ranks = np.empty(visible.shape[:2])
    for b, n in np.ndindex(*ranks.shape):
        seen = visible[b, n]
        query = QUERY[b, seen.any(1), n].astype(np.float64)
        key = KEY[b, seen.any(0), n // 2].astype(np.float64)
        sigma = np.linalg.svd(query @ (key - key.mean(0)).T, compute_uv=False)
        share = sigma[sigma > 1e-9 * sigma[0]] / sigma.sum()
        ranks[b, n] = np.exp(-(share * np.log(share)).sum())
    return ranks


def expected(options):
    forward = oracles.attention(QUERY, KEY, VALUE, **options)
    rows = oracles.statistics(forward)
    off_sink = dict(options)
    hidden = np.ones((9, 9), bool)
    hidden[:, 0] = False
    rest = oracles.attention(QUERY, KEY, VALUE, mask=hidden, **off_sink)
    rest_rows = oracles.statistics(rest)
    several, several_rest = rows["visible_keys"] > 1, rest_rows["visible_keys"] > 1

    def mean(values, counted):
        return np.where(counted, values, 0).sum(1) / counted.sum(1)

    def uniform(forward):
        steps = np.abs(np.arange(9)[:, None] - np.arange(9))
        count = np.maximum(forward.visible.sum(-1), 1)
        return np.moveaxis((forward.visible * steps).sum(-1) / count, -1, -2)

    return {
        "normalized_entropy": mean(rows["normalized_entropy"], several),
        "normalized_entropy_no_sink": mean(rest_rows["normalized_entropy"], several_rest),
        "logit_sd": mean(np.sqrt(rows["logit_variance"]), several),
        "max_logit": np.where(several, rows["max_logit"], -np.inf).max(1),
        "max_weight": mean(rows["max_weight"], several),
        "saturated": mean(rows["max_weight"] > 0.95, several),
        "sink_mass": mean(rows["first_key_mass"], rows["visible_keys"] > 0),
        "distance_ratio": mean(rows["mean_distance"], several) / mean(uniform(forward), several),
        "distance_ratio_no_sink": mean(rest_rows["mean_distance"], several_rest) / mean(uniform(rest), several_rest),
        "score_rank": score_rank(forward.visible),
        "non_finite": np.zeros((2, 4)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind):
    actual = summarize(QUERY, KEY, **KINDS[kind])
    for name, value in expected(KINDS[kind]).items():
        np.testing.assert_allclose(getattr(actual, name), value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_mask_is_joined_with_the_missing_sink():
    causal = np.tri(9, dtype=bool)
    one, other = summarize(QUERY, KEY, is_causal=True), summarize(QUERY, KEY, mask=causal)
    np.testing.assert_allclose(one.normalized_entropy_no_sink, other.normalized_entropy_no_sink, rtol=1e-5)
    biased = summarize(QUERY, KEY, bias=biases.Alibi(4), is_causal=True)
    assert (biased.distance_ratio < one.distance_ratio).all()


def test_rows_that_are_not_finite_are_counted_not_averaged():
    key = KEY.copy()
    key[0, 4, 1] = np.nan
    clean, broken = summarize(QUERY, KEY, is_causal=True), summarize(QUERY, key, is_causal=True)
    np.testing.assert_array_equal(broken.non_finite, [[0, 0, 5, 5], [0, 0, 0, 0]])
    assert np.isfinite(broken.normalized_entropy).all()
    first = oracles.statistics(oracles.attention(QUERY, KEY, VALUE, is_causal=True))["normalized_entropy"][0, 1:4, 2:]
    np.testing.assert_allclose(broken.normalized_entropy[0, 2:], first.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(broken.normalized_entropy[1], clean.normalized_entropy[1])
    first = summarize(QUERY[:, :4], KEY[:, :4])
    np.testing.assert_allclose(broken.score_rank[0, 2:], first.score_rank[0, 2:], rtol=1e-5)
    np.testing.assert_allclose(broken.score_rank[:, :2], clean.score_rank[:, :2], rtol=1e-5)


@pytest.mark.parametrize("length", [16, 1024])
def test_a_row_of_nothing_but_nan_is_counted_at_every_length(length):
    query, key = (np.random.default_rng(i).standard_normal((length, 1, 8)).astype(np.float32) for i in range(2))
    query[5] = np.nan
    summary = summarize(query, key)
    assert summary.non_finite.tolist() == [1]
    assert np.isfinite(summary.normalized_entropy).all()
    assert np.isfinite(summary.max_weight).all()


def test_a_query_that_is_not_finite_is_left_out_of_its_head_alone():
    for bad, options in ((np.nan, {}), (np.inf, {}), (np.inf, {"logits_soft_cap": 3.0})):
        query = QUERY.copy()
        query[0, 8, 1, 0] = bad
        clean, broken = summarize(QUERY, KEY, **options), summarize(query, KEY, **options)
        without = summarize(QUERY[:, :8], KEY, **options)
        np.testing.assert_allclose(broken.score_rank[0, 1], without.score_rank[0, 1], rtol=1e-5)
        for others in ((0, [0, 2, 3]), (1,)):
            np.testing.assert_allclose(broken.score_rank[others], clean.score_rank[others], rtol=1e-5)


def test_a_key_that_is_not_finite_is_left_out_behind_a_cap():
    key = KEY.copy()
    key[0, 8, 1, 0] = np.inf
    broken = summarize(QUERY, key, logits_soft_cap=3.0)
    without = summarize(QUERY, KEY[:, :8], logits_soft_cap=3.0)
    np.testing.assert_allclose(broken.score_rank[0, 2:], without.score_rank[0, 2:], rtol=1e-5)


LENGTHS = np.array([4, 9])
THERE = np.arange(9) < LENGTHS[:, None]
SLOTS = np.where(THERE, np.arange(9), -1)
SQUARE = (THERE[:, :, None] & THERE[:, None, :])[:, None]
PADDED = {
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "positions": {"query_positions": SLOTS, "key_positions": SLOTS},
    "mask": {"mask": SQUARE},
    "bias": {"bias": np.where(SQUARE, 0, -np.inf).astype(np.float32)},
    "causal": {"is_causal": True, "query_seq_lengths": LENGTHS},
    "key_lengths": {"key_value_seq_lengths": LENGTHS},
}


@pytest.mark.parametrize("kind", PADDED)
@pytest.mark.parametrize("padding", [1, 100, np.nan])
def test_an_item_reads_the_same_without_its_padding(kind, padding):
    options = PADDED[kind]
    rows = 9 if kind == "key_lengths" else 4
    unlike = np.where(THERE, 1, padding).astype(np.float32)[..., None, None]
    query = QUERY if kind == "key_lengths" else QUERY * unlike
    padded = summarize(query, KEY * unlike, **options)
    cut = summarize(QUERY[:1, :rows], KEY[:1, :4], is_causal=kind == "causal")
    for field in dataclasses.fields(cut):
        actual, alone = getattr(padded, field.name)[:1], getattr(cut, field.name)
        np.testing.assert_allclose(actual, alone, rtol=1e-5, atol=1e-6, err_msg=field.name)


def test_each_head_reads_as_it_would_alone():
    hidden = np.ones((1, 4, 9, 9), bool)
    hidden[0, 0, :, 5:] = hidden[0, 1, 3:] = False  # two query heads of one key head
    together = summarize(QUERY, KEY, mask=hidden)
    for n in range(4):
        alone = summarize(QUERY[:, :, n : n + 1], KEY[:, :, n // 2 : n // 2 + 1], mask=hidden[:, n : n + 1])
        np.testing.assert_allclose(together.score_rank[:, n : n + 1], alone.score_rank, rtol=1e-5)


def test_one_factorisation_of_each_kind():
    # Two that run at the same time can wait for each other for ever in XLA's CPU pool.
    text = str(jax.make_jaxpr(lambda q, k: summarize_heads(q, k, query_seq_lengths=LENGTHS))(QUERY, KEY))
    assert (text.count(" geqrf") + text.count(" qr["), text.count(" svd[")) == (1, 1)


def test_no_square_is_formed():
    x = np.zeros((1024, 1, 8), np.float32)
    mask = masks.Causal() & masks.Segments(jnp.zeros(1024, int), jnp.zeros(1024, int))
    program = str(jax.make_jaxpr(lambda x: summarize_heads(x, x, mask=mask))(x))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"[a-z0-9]+\[([0-9,]+)\]", program)]
    assert max(sizes) < 1024 * 1024


def test_a_head_without_a_choice_reads_nan():
    one = summarize(QUERY[:, :1], KEY[:, :1])
    assert np.isnan(one.normalized_entropy).all()
    assert np.isnan(one.max_logit).all()
    np.testing.assert_array_equal(one.sink_mass, np.ones((2, 4)))


@pytest.mark.parametrize(("queries", "keys"), [(0, 9), (9, 0), (0, 0)])
def test_nothing_to_summarize_reads_nan(queries, keys):
    empty = summarize(QUERY[:, :queries], KEY[:, :keys], is_causal=True)
    for field in dataclasses.fields(empty):
        values = np.zeros((2, 4)) if field.name == "non_finite" else np.full((2, 4), np.nan)
        np.testing.assert_array_equal(getattr(empty, field.name), values, err_msg=field.name)


def test_no_item_no_summary():
    empty = summarize(QUERY[:0], KEY[:0])
    assert {getattr(empty, field.name).shape for field in dataclasses.fields(empty)} == {(0, 4)}


def test_an_empty_head_is_no_fault_under_debug_nans():
    with jax.debug_nans(True):
        for lengths in (np.array([0, 9]), np.array([1, 9])):
            summary = summarize_heads(QUERY, KEY, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
            np.testing.assert_array_equal(np.isnan(np.asarray(summary.normalized_entropy)), [[True] * 4, [False] * 4])
        summarize_heads(QUERY[:, :0], KEY)
        in_one_place = {"query_positions": np.zeros(9, int), "key_positions": np.zeros(9, int)}
        assert np.isnan(np.asarray(summarize_heads(QUERY, KEY, **in_one_place).distance_ratio)).all(), "no distance"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: summarize_heads(None, KEY), TypeError, "query must be an array, got NoneType None"),
        (lambda: summarize_heads("a", KEY), TypeError, "query must be an array, got str 'a'"),
        (lambda: summarize_heads(QUERY, None), TypeError, "key must be an array, got NoneType None"),
        (lambda: summarize_heads(QUERY, [[1], [2, 3]]), TypeError, "key must be an array"),
        (lambda: summarize_heads(QUERY.astype(int), KEY), TypeError, "query must have a floating dtype"),
        (lambda: summarize_heads(QUERY[0, 0], KEY), ValueError, "query must have at least 3 axes"),
        (lambda: summarize_heads(QUERY, jnp.bfloat16(KEY)), TypeError, "key must have the query's dtype"),
        (lambda: summarize_heads(QUERY, KEY, rows=np.array([0])), TypeError, "summarize_heads does not take rows"),
        (lambda: summarize_heads(QUERY, KEY, dropout_rate=0.5), TypeError, "summarize_heads does not take dropout_ra"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
