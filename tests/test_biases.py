"""Lazy biases against their definitions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from attn_jax import attention_weights, biases, dot_product_attention, masks
from attn_jax.lazy import Grid, Square, Tile
from tests import oracles
from tests.squares import whole

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
    ("buckets", "most", "two_way"),
    [(32, 128, True), (32, 128, False), (8, 20, True), (2, 5, False), (8, 2**40, True)],
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


LEAST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng(2)
HOLES = np.where(RNG.random((2, 1, 5, 7)) < 0.5, -np.inf, 0).astype(np.float32)
COLUMNS = np.where(np.arange(7) < 3, -np.inf, 1).astype(np.float32).reshape(1, 1, 1, 7)
HOLED_TABLE = np.where(np.arange(8)[:, None] < np.array([0, 3, 8]), -np.inf, TABLE).astype(np.float32)


class Slope(biases.Bias):
    """Somebody's own bias: a learned slope, and nothing said of tiles."""

    slope: Array

    def evaluate(self, tile, dtype):
        distance = tile.key_positions - tile.query_positions
        return jnp.asarray(self.slope, dtype) * distance.astype(dtype)


ALL = SIBLINGS | {
    name: (bias, None)
    for name, bias in {
        "array of two axes": biases.Array(RNG.standard_normal((5, 7)).astype(np.float32)),
        "array of every axis": biases.Array(RNG.standard_normal(SQUARE).astype(np.float32)),
        "array of one": biases.Array(np.ones((1, 1, 1, 1), np.float32)),
        "array of columns": biases.Array(COLUMNS),
        "array of bfloat16": biases.Array(jnp.asarray(ARRAY, jnp.bfloat16)),
        "array with holes": biases.Array(HOLES),
        "table with holes": biases.RelativeBuckets(HOLED_TABLE, max_distance=6),
        "nested sum": biases.Alibi(3) + HOLES + (biases.RelativeBuckets(TABLE, max_distance=6) + ARRAY),
        "sum of minima": biases.Array(np.full((5, 7), LEAST, np.float32)) + np.where(HOLES == 0, LEAST, 1) + ARRAY,
        "own": Slope(np.float32(0.5)),
        "own in a sum": Slope(np.float32(0.5)) + COLUMNS,
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(("rows", "step"), [(None, (1, 1, 3, 4)), ([3, 0, 3], (2, 3, 3, 4))])
@pytest.mark.parametrize("name", ALL)
def test_gradients_accumulate_tile_by_tile(name, rows, step):
    bias, _ = ALL[name]
    square = Square(SQUARE, 2, rows=None if rows is None else jnp.array(rows))
    leaves, structure = jax.tree.flatten(bias)
    d_bias = jnp.asarray(np.random.default_rng(3).standard_normal(square.kept), jnp.float32)

    def evaluate(leaves):
        value = jax.tree.unflatten(structure, leaves).evaluate(square.whole(), jnp.float32)
        return jnp.broadcast_to(value, square.kept)

    _, pull = jax.vjp(evaluate, [jnp.asarray(leaf, jnp.float32) for leaf in leaves])
    (expected,) = pull(d_bias)

    @functools.partial(jax.jit, static_argnames="sizes")
    def accumulate(gradients, starts, sizes):
        part = jax.lax.dynamic_slice(d_bias, starts, sizes)
        return bias.accumulate(gradients, Tile(square, starts, sizes), part)

    gradients = bias.zeros(jnp.float32)
    assert [x.shape for x in gradients] == [np.shape(leaf) for leaf in leaves]
    for starts in itertools.product(*map(range, [0] * 4, square.kept, step)):
        sizes = tuple(min(size, length - start) for size, length, start in zip(step, square.kept, starts, strict=True))
        gradients = accumulate(gradients, starts, sizes)
    for actual, wanted in zip(gradients, expected, strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [None, [3, 0, 3]])
@pytest.mark.parametrize("name", ALL)
def test_bounds_are_never_wrong(name, rows):
    bias, _ = ALL[name]
    square = Square(SQUARE, 2, rows=None if rows is None else jnp.array(rows))
    kept = ~np.isneginf(np.broadcast_to(bias.evaluate(square.whole(), jnp.float32), square.kept))
    for tile in ((1, 1), (2, 3), (5, 7), (9, 9)):
        grid = Grid(square, tile)
        some, every = (np.broadcast_to(x, (2, 3, *grid.counts)) for x in bias.bounds(grid))
        for i, j in np.ndindex(*grid.counts):
            starts = (
                max(min(n * size, length - size), 0)
                for n, size, length in zip((i, j), tile, kept.shape[-2:], strict=True)
            )
            part = kept[(..., *(slice(start, start + size) for start, size in zip(starts, tile, strict=True)))]
            assert not (part.any((-2, -1)) & ~some[..., i, j]).any(), "called all -inf, but is not"
            assert not (every[..., i, j] & ~part.all((-2, -1))).any(), "called free of -inf, but is not"


def test_bounds_know_arrays_and_heads():
    grid = Grid(Square(SQUARE), (5, 1))
    some, every = biases.Array(COLUMNS).bounds(grid)
    assert some.ravel().tolist() == every.ravel().tolist() == [False] * 3 + [True] * 4
    some, every = biases.RelativeBuckets(HOLED_TABLE, max_distance=6).bounds(grid)
    assert (some.ravel().tolist(), every.ravel().tolist()) == ([True, True, False], [True, False, False])
    for bias in (biases.Alibi(3), biases.Alibi(3) + biases.Alibi(3)):
        assert all(isinstance(x, np.ndarray) and x.all() for x in bias.bounds(grid))
    some, every = Slope(np.float32(1)).bounds(grid)
    assert some.all()
    assert not every.any()


@pytest.mark.usefixtures("x64")
def test_a_finite_number_of_a_wider_type_is_no_mask():
    wide = np.where(np.isinf(HOLES), np.finfo(np.float64).min, -1e300)
    wide[0, 0, 0, 0] = -np.inf
    bias = biases.Array(wide)
    square = Square(SQUARE)
    values = bias.evaluate(square.whole(), jnp.float32)
    assert values.dtype == jnp.float32
    assert np.isneginf(values).sum() == 1
    some, every = bias.bounds(Grid(square, (5, 7)))
    assert some.ravel().tolist() == [True, True]
    assert every.ravel().tolist() == [False, True]
    d_bias = jnp.ones(SQUARE, jnp.float32)
    (gradient,) = bias.accumulate(bias.zeros(jnp.float32), square.whole(), d_bias)
    _, pull = jax.vjp(lambda x: biases.Array(x).evaluate(square.whole(), jnp.float32), jnp.asarray(wide))
    np.testing.assert_array_equal(gradient, pull(d_bias.sum(axis=1, keepdims=True))[0])


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
        (lambda: biases.Alibi(2) + masks.Causal(), "bias must be a bias, got the attn_jax.masks.positional.Causal"),
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
