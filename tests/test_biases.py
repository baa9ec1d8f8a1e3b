"""Lazy biases against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import attention_weights, biases, dot_product_attention, masks
from attn_jax.lazy import whole
from tests import oracles

TABLE = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
ARRAY = np.random.default_rng(1).standard_normal((1, 3, 5, 1)).astype(np.float32)
SQUARE = (2, 3, 5, 7)
SIBLINGS = {
    "alibi": (biases.Alibi(3), oracles.alibi(3)),
    "relative_buckets": (
        biases.RelativeBuckets(TABLE, max_distance=6),
        oracles.relative_buckets(TABLE, bidirectional=True, max_distance=6),
    ),
    "relative_buckets_one_way": (
        biases.RelativeBuckets(TABLE, bidirectional=False, max_distance=9),
        oracles.relative_buckets(TABLE, bidirectional=False, max_distance=9),
    ),
    "array": (biases.Array(ARRAY), lambda q, k: ARRAY),
    "sum": (biases.Alibi(3) + ARRAY, lambda q, k: oracles.alibi(3)(q, k) + ARRAY),
}


@pytest.mark.parametrize("offset", [0, 11])
@pytest.mark.parametrize("name", SIBLINGS)
def test_definition(name, offset):
    bias, oracle = SIBLINGS[name]
    queries, keys = np.arange(5) + offset, np.arange(7)
    actual = bias.evaluate(whole(SQUARE, jnp.asarray(queries), jnp.asarray(keys)), jnp.float32)
    assert actual.dtype == jnp.float32
    at_query = np.broadcast_to(queries, (2, 5))[:, None, :, None]
    at_key = np.broadcast_to(keys, (2, 7))[:, None, None, :]
    expected = np.broadcast_to(oracle(at_query, at_key), SQUARE)
    np.testing.assert_allclose(np.broadcast_to(actual, SQUARE), expected, rtol=1e-6)


@pytest.mark.parametrize("name", SIBLINGS)
def test_tile_is_part_of_the_whole(name):
    bias, _ = SIBLINGS[name]
    positions, rows = (jnp.arange(5), jnp.arange(7)), np.array([3, 0])
    full = np.broadcast_to(bias.evaluate(whole(SQUARE, *positions), jnp.float32), SQUARE)
    part = bias.evaluate(whole(SQUARE, *positions, query_indices=jnp.asarray(rows)), jnp.float32)
    np.testing.assert_array_equal(np.broadcast_to(part, (2, 3, 2, 7)), full[:, :, rows])


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [0.0625, 0.00390625, 0.25]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_of_any_head_count(num_heads, slopes):
    np.testing.assert_allclose(biases.alibi_slopes(num_heads), slopes, rtol=1e-15)


def test_alibi_lets_nearer_keys_weigh_more():
    zeros = jnp.zeros((4, 2, 1))
    weights = attention_weights(zeros, zeros, biases.Alibi(2), is_causal=True)
    assert (np.diff(weights[:, 3]) > 0).all()
    shifted = attention_weights(
        zeros, zeros, biases.Alibi(2) + jnp.arange(4.0)[:, None] * jnp.ones((1, 4)), is_causal=True
    )
    np.testing.assert_allclose(weights, shifted, atol=1e-7)  # a constant per row changes nothing


@pytest.mark.parametrize(
    ("buckets", "most", "two_way"), [(32, 128, True), (32, 128, False), (8, 20, True), (2, 5, False)]
)
def test_relative_buckets_have_exact_edges(buckets, most, two_way):
    distance = np.arange(-300, 301)
    actual = biases.relative_buckets(jnp.asarray(distance), buckets, bidirectional=two_way, max_distance=most)
    zero = np.zeros_like(distance)
    expected = oracles.relative_bucket(zero, distance, buckets=buckets, bidirectional=two_way, max_distance=most)
    np.testing.assert_array_equal(actual, expected)


def test_learned_table_has_gradients():
    def total(table):
        bias = biases.RelativeBuckets(table, max_distance=6)
        return (bias.evaluate(whole(SQUARE, jnp.arange(5), jnp.arange(7)), jnp.float32) ** 2).sum()

    gradient = jax.grad(total)(jnp.asarray(TABLE))
    counts = np.zeros(8)
    q, k = np.arange(5)[:, None], np.arange(7)[None, :]
    np.add.at(counts, oracles.relative_bucket(q, k, buckets=8, bidirectional=True, max_distance=6), 1)
    np.testing.assert_allclose(gradient, 2 * TABLE * counts[:, None], rtol=1e-5)


def test_two_finite_minima_are_still_no_mask():
    least = np.full((1, 4), np.finfo(np.float32).min, np.float32)
    x, value = np.zeros((4, 1, 2), np.float32), np.arange(4, dtype=np.float32)[:, None, None]
    query = x[:1]
    for bias in (biases.Array(least), biases.Array(least) + least, biases.Array(least) + least + least):
        np.testing.assert_allclose(dot_product_attention(query, x, value, bias), [[[1.5]]])
    hidden = np.array([[-np.inf, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(dot_product_attention(query, x, value, biases.Array(least) + hidden), [[[2.0]]])


def test_equal_biases_share_a_trace():
    traces = []

    @jax.jit
    def evaluate(bias):
        traces.append(bias)
        return bias.evaluate(whole((3, 2, 2), jnp.arange(2), jnp.arange(2)), jnp.float32)

    for _ in range(2):
        evaluate(biases.Alibi(3) + biases.RelativeBuckets(TABLE))
    evaluate(biases.Alibi(3) + biases.RelativeBuckets(2 * TABLE))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: biases.Alibi(0), "num_heads must be at least 1"),
        (lambda: biases.RelativeBuckets(np.zeros(4, np.float32)), r"table must have rank 2, \[buckets, N\]"),
        (lambda: biases.RelativeBuckets(np.zeros((2, 3), np.float32)), "table must have at least 4 rows"),
        (lambda: biases.RelativeBuckets(TABLE, max_distance=2), "max_distance must exceed the 2 distances"),
        (lambda: biases.Array(np.zeros((2, 2), int)), "bias must have a floating dtype, got int"),
        (lambda: biases.Alibi(2) + masks.Causal(), "bias must be a bias, got the attn_jax.masks.Causal"),
        (lambda: attention_weights(*[jnp.zeros((4, 2, 1))] * 2, biases.Alibi(3)), r"the slopes of Alibi must have shape \[N\]"),
        (
            lambda: attention_weights(*[jnp.zeros((4, 2, 1))] * 2, biases.RelativeBuckets(TABLE)),
            r"table must have shape \[buckets, N\] = \(8, 2\), got \(8, 3\)",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
