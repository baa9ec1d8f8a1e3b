"""Linformer against its definition; exact where it must be; padding, shapes, dtypes, transforms and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax.lowrank import draw_projection, linformer_attention
from tests.lowrank import oracle, problems

RNG = np.random.default_rng(7)
SHARED, PER_HEAD = RNG.standard_normal((5, 16)) / 4, RNG.standard_normal((2, 5, 16)) / 4
attend = jax.jit(linformer_attention)


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "projections", [(SHARED,), (SHARED, PER_HEAD), (PER_HEAD, SHARED)], ids=("one", "two", "heads")
)
def test_definition(projections):
    """Grouped heads, V ≠ H, T ≠ S, fewer keys than columns, lengths, a scale per head."""
    inputs = problems.arrays(queries=7, keys=11)
    lengths = {"query_seq_lengths": np.array([7, 4]), "key_value_seq_lengths": np.array([11, 5])}
    scale = np.array([0.1, 0.5, 1.0, -0.3], np.float32)
    found = attend(*problems.device(*inputs, *projections), scale=scale, **lengths)
    lengths = {"query_lengths": [7, 4], "key_lengths": [11, 5]}
    close(found, oracle.linformer(*inputs, *projections, scale=scale, **lengths))


def test_a_permutation_is_exact_attention():
    inputs = problems.device(*problems.arrays(queries=7, keys=11))
    exact = attn_jax.dot_product_attention(*inputs)
    identity = jnp.eye(16)[:11]
    close(attend(*inputs, identity), exact)
    close(attend(*inputs, identity[np.random.default_rng(0).permutation(11)]), exact)


def test_another_full_rank_projection_is_not():
    """The softmax of rotated keys is another softmax: rank alone does not make it exact."""
    inputs = problems.device(*problems.arrays())
    rotation, _ = jnp.linalg.qr(jnp.asarray(np.random.default_rng(0).standard_normal((11, 11)), jnp.float32))
    assert jnp.abs(attend(*inputs, rotation) - attn_jax.dot_product_attention(*inputs)).max() > 0.1


def test_what_does_not_count_is_not_read():
    query, key, value = problems.device(*problems.arrays())
    lengths = {"query_seq_lengths": jnp.array([11, 4]), "key_value_seq_lengths": jnp.array([11, 0])}
    projection = jnp.asarray(SHARED, jnp.float32)

    def loss(query, key, value, projection):
        return jnp.sum(linformer_attention(query, key, value, projection, **lengths) ** 2)

    trained = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    clean = trained(query, key, value, projection)
    spoilt = (query.at[1, 4:].set(jnp.nan), key.at[1].set(jnp.nan), value.at[1].set(jnp.inf))
    found = trained(*spoilt, projection)
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    output = attend(*spoilt, projection, **lengths)
    np.testing.assert_array_equal(output[1], 0)  # no key: nothing is fetched
    assert float(jnp.abs(output[0]).min()) > 0


def test_an_item_does_not_depend_on_the_others():
    query, key, value = problems.device(*problems.arrays())
    projection = jnp.asarray(SHARED, jnp.float32)
    output = attend(query, key, value, projection)
    others = attend(*(x.at[1].set(1e3 * x[1]) for x in (query, key, value)), projection)
    np.testing.assert_array_equal(output[0], others[0])
    alone = attend(query[:1], key[:1], value[:1], projection)  # in a program of its own
    close(alone, output[:1], 1e-6)


def test_gradients(x64):
    inputs = problems.device(*problems.arrays(queries=5, keys=7), SHARED, PER_HEAD, dtype=jnp.float64)
    options = {"key_value_seq_lengths": jnp.array([7, 4])}
    problems.check_gradients(functools.partial(linformer_attention, **options), inputs)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    inputs = problems.device(*problems.arrays(queries=7, keys=11), dtype=dtype)
    found = attend(*inputs, jnp.asarray(SHARED, jnp.float32))
    assert found.dtype == dtype
    expected = oracle.linformer(*(np.asarray(x, np.float64) for x in inputs), SHARED.astype(np.float32))
    close(found, expected, 2 * float(jnp.finfo(dtype).eps))


def test_sums_are_not_in_half_precision():
    """4,096 equal keys and a projection that averages them: each partial sum would stall."""
    ones = jnp.ones((4096, 1, 8), jnp.bfloat16)
    projection = jnp.full((2, 4096), 1 / 4096, jnp.bfloat16)
    np.testing.assert_array_equal(attend(ones, ones, ones, projection), ones)


def test_lengths_and_values_do_not_retrace():
    traces = []

    @jax.jit
    def run(query, key, value, projection, lengths):
        traces.append(None)
        return linformer_attention(query, key, value, projection, key_value_seq_lengths=lengths)

    inputs = problems.device(*problems.arrays(), SHARED)
    for n in (0, 3, 11):
        run(*inputs, jnp.full(2, n))
    assert len(traces) == 1


def test_vmap_and_any_leading_axes():
    inputs = problems.device(*problems.arrays((2, 3)))
    projection = jnp.asarray(SHARED, jnp.float32)
    whole = attend(*inputs, projection)
    close(jax.vmap(attend, (0, 0, 0, None))(*inputs, projection), whole)
    close(attend(*(x[1, 2] for x in inputs), projection), whole[1, 2])


def test_memory_is_linear_in_the_length():
    def training_bytes(length):
        x = jax.ShapeDtypeStruct((length, 1, 16), jnp.float32)
        projection = jax.ShapeDtypeStruct((64, length), jnp.float32)
        grad = jax.grad(lambda *xs: linformer_attention(*xs).sum(), (0, 1, 2, 3))
        return jax.jit(grad).lower(x, x, x, projection).compile().memory_analysis().temp_size_in_bytes

    short, long = training_bytes(2048), training_bytes(8192)
    assert long < 4.5 * short
    assert long < 4 * 8192**2 / 8  # a square would be 268 MB


def test_a_drawn_projection_keeps_the_size_of_a_key():
    projection = draw_projection(jax.random.key(0), 200, 300)
    assert projection.shape == (200, 300)
    assert float(projection.var() * 300) == pytest.approx(1, abs=0.03)
    assert draw_projection(jax.random.key(0), 2, 3, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert not jnp.array_equal(projection, draw_projection(jax.random.key(1), 200, 300))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": True}, "is_causal must be False, got True: a projected row mixes all keys"),
        ({"is_causal": 1}, "is_causal must be True or False, got int 1"),
        ({"key_projection": np.ones((5, 10))}, r"key_projection must have a column for each of S = 11 keys, got shape \(5, 10\)"),
        ({"value_projection": np.ones((5, 10))}, r"value_projection must have a column for each of S = 11 keys"),
        ({"value_projection": np.ones((4, 16))}, r"value_projection must have the R = 5 rows of key_projection, got shape \(4, 16\)"),
        ({"key_projection": np.ones((4, 5, 16))}, r"key_projection must have one matrix per key/value head, K = 2, got shape \(4, 5, 16\)"),
        ({"key_projection": np.ones((0, 16))}, r"key_projection must have at least one row, got shape \(0, 16\)"),
        ({"key_projection": np.ones(16)}, r"key_projection must have rank 2 or 3, \[R, L\] or \[K, R, L\]; got shape \(16,\)"),
        ({"key_projection": np.ones((5, 16), int)}, "key_projection must have a floating dtype, got int"),
        ({"key_projection": None}, "key_projection must be an array, got NoneType None"),
        ({"value": None}, "value must be an array, got None"),
        ({"key_value_seq_lengths": 12}, r"key_value_seq_lengths must lie in 0..11, got values in 12..12"),
        ({"query": np.ones((2, 11, 3, 6), np.float32)}, "got 3 query heads and 2 key/value heads"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
    ],
)  # fmt: skip
def test_wrong_arguments(change, message):
    names = ("query", "key", "value", "key_projection")
    arguments = dict(zip(names, problems.device(*problems.arrays(), SHARED), strict=True)) | change
    with pytest.raises((ValueError, TypeError), match=message):
        linformer_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"length": 2.0}, "length must be an integer, got float 2.0"),
        ({"key": 0}, "key must be one key"),
    ],
)
def test_wrong_draws(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw_projection(**{"key": jax.random.key(0), "rank": 2, "length": 3, **change})
