"""Summaries of heads against NumPy averages of the oracle's rows."""

import numpy as np
import pytest

from attn_jax import biases
from attn_jax.diagnostics import logit_ranks, summarize_heads
from tests import oracles

rng = np.random.default_rng(0)
QUERY, KEY = 2 * rng.standard_normal((2, 9, 4, 8), np.float32), rng.standard_normal((2, 9, 2, 8), np.float32)
VALUE = rng.standard_normal((2, 9, 2, 3), np.float32)
HOLES = np.where(rng.random((9, 9)) < 0.2, -np.inf, 0).astype(np.float32)
KINDS = {
    "causal": {"is_causal": True},
    "two_way": {},
    "lengths": {"is_causal": True, "query_seq_lengths": np.array([5, 9]), "key_value_seq_lengths": np.array([5, 9])},
    "window_and_cap": {"local_window_size": (3, 0), "logits_soft_cap": 3.0},
    "bias_that_hides": {"is_causal": True, "bias": HOLES},
}


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
        "score_rank": np.asarray(logit_ranks(QUERY, KEY).effective),
        "non_finite": np.zeros((2, 4)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind):
    actual = summarize_heads(QUERY, KEY, **KINDS[kind])
    for name, value in expected(KINDS[kind]).items():
        np.testing.assert_allclose(getattr(actual, name), value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_mask_is_joined_with_the_missing_sink():
    causal = np.tri(9, dtype=bool)
    one, other = summarize_heads(QUERY, KEY, is_causal=True), summarize_heads(QUERY, KEY, mask=causal)
    np.testing.assert_allclose(one.normalized_entropy_no_sink, other.normalized_entropy_no_sink, rtol=1e-5)
    biased = summarize_heads(QUERY, KEY, bias=biases.Alibi(4), is_causal=True)
    assert (biased.distance_ratio < one.distance_ratio).all()


def test_rows_that_are_not_finite_are_counted_not_averaged():
    key = KEY.copy()
    key[0, 4, 1] = np.nan
    clean, broken = summarize_heads(QUERY, KEY, is_causal=True), summarize_heads(QUERY, key, is_causal=True)
    np.testing.assert_array_equal(broken.non_finite, [[0, 0, 5, 5], [0, 0, 0, 0]])
    assert np.isfinite(broken.normalized_entropy).all()
    first = oracles.statistics(oracles.attention(QUERY, KEY, VALUE, is_causal=True))["normalized_entropy"][0, 1:4, 2:]
    np.testing.assert_allclose(broken.normalized_entropy[0, 2:], first.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(broken.normalized_entropy[1], clean.normalized_entropy[1])


def test_a_head_without_a_choice_reads_nan():
    one = summarize_heads(QUERY[:, :1], KEY[:, :1])
    assert np.isnan(one.normalized_entropy).all()
    assert np.isnan(one.max_logit).all()
    np.testing.assert_array_equal(one.sink_mass, np.ones((2, 4)))
