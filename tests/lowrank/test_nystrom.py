"""Nyström attention against its definition; exact with all landmarks; each matrix inverted by itself; padding, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax.lowrank import nystrom_attention
from attn_jax.lowrank.nystrom import pseudo_invert
from tests.lowrank import oracle, problems

attend = jax.jit(nystrom_attention, static_argnames=("landmarks", "pseudo_inverse", "iterations"))


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def stochastic(*shape, seed=0, sharpness=1.0):
    """Matrices whose rows sum to 1, near the identity."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.standard_normal(shape) + 4 * np.eye(shape[-1])
    numerators = np.exp(logits)
    return numerators / numerators.sum(-1, keepdims=True)


@pytest.mark.parametrize("landmarks", [1, 4, 11])
def test_definition(x64, landmarks):
    """Grouped heads, V ≠ H, T ≠ S, lengths that landmarks do not divide and that are below them, a scale per head."""
    inputs = problems.arrays((4,), queries=13, keys=11)
    queries, keys = np.array([13, 7, 3, 9]), np.array([11, 6, 2, 0])
    scale = np.array([0.2, 0.5, 0.8, -0.4])
    found = attend(
        *problems.device(*inputs, dtype=jnp.float64), landmarks=landmarks, scale=scale, query_seq_lengths=queries,
        key_value_seq_lengths=keys, pseudo_inverse="exact",
    )  # fmt: skip
    lengths = {"query_lengths": queries, "key_lengths": keys, "scale": scale}
    close(found, oracle.nystrom(*inputs, landmarks=landmarks, **lengths), 1e-8)


def test_definition_with_the_iteration():
    inputs = problems.arrays(queries=13, keys=11)
    found = attend(*problems.device(*inputs), landmarks=4)
    close(found, oracle.nystrom(*inputs, landmarks=4, invert=oracle.iterate))
    found = attend(*problems.device(*inputs), landmarks=4, iterations=2)
    close(found, oracle.nystrom(*inputs, landmarks=4, invert=functools.partial(oracle.iterate, iterations=2)))


@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_all_landmarks_are_exact_attention(method):
    """T = S = 5, D = 4, scores that make a well-conditioned square; and keys that are fewer than the landmarks."""
    rng = np.random.default_rng(0)
    key = np.eye(5, 4) * 4 + 0.1 * rng.standard_normal((2, 5, 1, 4)).reshape(2, 1, 5, 4)
    key = np.moveaxis(key, 1, 2)
    inputs = problems.device(key, key, rng.standard_normal((2, 5, 1, 3)))
    exact = attn_jax.dot_product_attention(*inputs)
    close(attend(*inputs, landmarks=5, pseudo_inverse=method), exact)
    for count in (1, 3, 5):
        lengths = {"query_seq_lengths": jnp.full(2, count), "key_value_seq_lengths": jnp.full(2, count)}
        exact = attn_jax.dot_product_attention(*inputs, **lengths)
        close(attend(*inputs, landmarks=5, pseudo_inverse=method, **lengths), exact)


def test_all_landmarks_are_exact_attention_whatever_the_scores(x64):
    """S S⁺ S = S."""
    inputs = problems.device(*problems.arrays(queries=16, keys=16, key_heads=4, sd=0.7), dtype=jnp.float64)
    found = attend(*inputs, landmarks=16, pseudo_inverse="exact")
    close(found, attn_jax.dot_product_attention(*inputs), 1e-9)


def test_few_queries_are_their_own_landmarks(x64):
    """One query, as in decoding: its row of the square is all there is to know of it, and S S⁺ R = R."""
    inputs = problems.device(*problems.arrays(queries=1), dtype=jnp.float64)
    found = attend(*inputs, landmarks=11, pseudo_inverse="exact")
    close(found, attn_jax.dot_product_attention(*inputs), 1e-9)


def test_a_mean_of_ones_is_one():
    """v = 1: rows of an inverted landmark square sum to 1, as those of the three factors do."""
    query, key, _ = problems.device(*problems.arrays(queries=12, keys=12, sd=2.0))
    ones = jnp.ones_like(key[..., :1])
    close(attend(query, key, ones, landmarks=3, pseudo_inverse="exact"), 1, 1e-4)


# The pseudo-inverse.


def test_each_matrix_is_inverted_by_itself():
    """One with a dominant column would slow down the other, if both began from the larger norm."""
    easy = stochastic(4, 4)
    column = np.full((4, 4), 0.02) + np.eye(4) * 0.01
    column[:, 0] += 1 - column.sum(1)
    stacked = pseudo_invert(jnp.asarray(np.stack([easy, column]), jnp.float32))
    for i, matrix in enumerate((easy, column)):
        np.testing.assert_array_equal(pseudo_invert(jnp.asarray(matrix, jnp.float32)), stacked[i])
        close(stacked[i], oracle.iterate(matrix), 1e-4)
    # A batch of anything else, in one program: the same bits.
    run = jax.jit(pseudo_invert)
    batch = jnp.asarray(stochastic(2, 3, 13, 13), jnp.float32)
    np.testing.assert_array_equal(run(batch)[0], run(batch.at[1].set(1e3))[0])


def test_the_iteration_inverts_what_is_well_conditioned(x64):
    matrices = stochastic(5, 8, 8, sharpness=0.5)
    assert (np.linalg.cond(matrices) < 10).all()
    close(pseudo_invert(jnp.asarray(matrices)), np.linalg.inv(matrices), 1e-6)
    harder = stochastic(5, 8, 8, sharpness=1.5, seed=3)
    assert 10 < np.linalg.cond(harder).max() < 1e2
    close(pseudo_invert(jnp.asarray(harder), iterations=10), np.linalg.inv(harder), 1e-6)


def test_what_the_iteration_does_to_each_singular_value(x64):
    """The stated tolerance: each singular value by itself, whatever the condition."""
    rng = np.random.default_rng(0)
    matrices = np.stack([stochastic(6, 6, sharpness=4), rng.standard_normal((6, 6)), np.ones((6, 6)) / 6])
    found = pseudo_invert(jnp.asarray(matrices))
    for matrix, inverse in zip(matrices, found, strict=True):
        left, sigma, right = np.linalg.svd(matrix)
        x = sigma**2 / (np.abs(matrix).sum(0).max() * np.abs(matrix).sum(1).max())
        start = x
        for _ in range(6):
            x = x * (13 - x * (15 - x * (7 - x))) / 4
        kept = np.where(sigma > 1e-12, x / np.maximum(sigma, 1e-12), 0)
        close(inverse, (right.T * kept) @ left.T, 1e-8)
        assert (np.abs(1 - x[start >= 0.01]) < 2e-5).all()


@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_padded_and_oblong_matrices(x64, method):
    """Rows and columns of zeros stay so; a matrix of zeros has the inverse 0."""
    matrix = np.zeros((3, 6, 5))
    matrix[0, :4, :4] = stochastic(4, 4)
    matrix[1] = stochastic(6, 6)[:, :5]
    found = pseudo_invert(jnp.asarray(matrix), method=method, iterations=12)
    close(found, np.linalg.pinv(matrix), 1e-6)
    np.testing.assert_array_equal(found[2], 0)


def test_an_inverse_of_halves_is_computed_in_singles():
    assert pseudo_invert(jnp.eye(3, dtype=jnp.bfloat16)).dtype == jnp.float32


# What any attention function owes.


@jax.jit
def trained(query, key, value, query_lengths, key_lengths):
    """The output, and the gradients of its sum of squares."""

    def loss(*inputs):
        lengths = {"query_seq_lengths": query_lengths, "key_value_seq_lengths": key_lengths}
        output = nystrom_attention(*inputs, landmarks=4, **lengths)
        return jnp.sum(output**2), output

    return jax.grad(loss, (0, 1, 2), has_aux=True)(query, key, value)


def test_what_does_not_count_is_not_read():
    query, key, value = problems.device(*problems.arrays())
    lengths = jnp.array([11, 4]), jnp.array([11, 6])
    spoilt = (query.at[1, 4:].set(jnp.nan), key.at[1, 6:].set(jnp.nan), value.at[1, 6:].set(jnp.inf))
    clean, found = (trained(*inputs, *lengths) for inputs in ((query, key, value), spoilt))
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    np.testing.assert_array_equal(found[1][1, 4:], 0)


def test_items_without_keys_or_queries_give_zero_and_no_gradient():
    inputs, full, empty = problems.device(*problems.arrays()), jnp.array([11, 11]), jnp.array([11, 0])
    for lengths in ((empty, full), (full, empty), (empty, empty)):
        gradients, output = trained(*inputs, *lengths)
        np.testing.assert_array_equal(output[1], 0)
        for gradient in gradients:
            assert jnp.isfinite(gradient).all()
            np.testing.assert_array_equal(gradient[1], 0)


@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_an_item_does_not_depend_on_the_others(method):
    inputs = problems.device(*problems.arrays())
    output = attend(*inputs, landmarks=4, pseudo_inverse=method)
    others = attend(*(x.at[1].set(30 * x[1]) for x in inputs), landmarks=4, pseudo_inverse=method)
    np.testing.assert_array_equal(output[0], others[0])
    alone = attend(*(x[:1] for x in inputs), landmarks=4, pseudo_inverse=method)  # in a program of its own
    close(alone, output[:1])


@pytest.mark.parametrize("method", ["exact", "iterative"])
def test_gradients(x64, method):
    inputs = problems.device(*problems.arrays(queries=5, keys=7), dtype=jnp.float64)
    options = {"key_value_seq_lengths": jnp.array([7, 2]), "landmarks": 3, "pseudo_inverse": method}
    problems.check_gradients(functools.partial(nystrom_attention, **options), inputs)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    inputs = problems.device(*problems.arrays(queries=13, keys=11), dtype=dtype)
    found = attend(*inputs, landmarks=4)
    assert found.dtype == dtype
    expected = oracle.nystrom(*(np.asarray(x, np.float64) for x in inputs), landmarks=4, invert=oracle.iterate)
    close(found, expected, 2 * float(jnp.finfo(dtype).eps))


def test_lengths_do_not_retrace():
    traces = []

    @jax.jit
    def run(query, key, value, lengths):
        traces.append(None)
        return nystrom_attention(query, key, value, landmarks=4, key_value_seq_lengths=lengths)

    inputs = problems.device(*problems.arrays())
    for n in (0, 3, 11):
        run(*inputs, jnp.full(2, n))
    assert len(traces) == 1


def test_vmap_and_any_leading_axes():
    inputs = problems.device(*problems.arrays((2, 3)))
    run = functools.partial(attend, landmarks=4)
    whole = run(*inputs)
    close(jax.vmap(run)(*inputs), whole)
    close(run(*(x[1, 2] for x in inputs)), whole[1, 2])


def test_memory_is_linear_in_the_length():
    def training_bytes(length):
        x = jax.ShapeDtypeStruct((length, 1, 16), jnp.float32)
        grad = jax.grad(lambda *xs: nystrom_attention(*xs, landmarks=64).sum(), (0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = training_bytes(2048), training_bytes(8192)
    assert long < 4.5 * short
    assert long < 4 * 8192**2 / 8  # a square would be 268 MB


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"landmarks": 12}, "landmarks must be at most the number of keys S = 11, got 12"),
        ({"landmarks": 0}, "landmarks must be at least 1, got 0"),
        ({"landmarks": 2.0}, "landmarks must be an integer, got float 2.0"),
        ({"is_causal": True}, "is_causal must be False, got True: a landmark is a mean over tokens"),
        ({"pseudo_inverse": "newton"}, "pseudo_inverse must be one of 'iterative', 'exact'; got 'newton'"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"value": None}, "value must be an array, got None"),
        ({"query_seq_lengths": np.array([1, 12])}, "query_seq_lengths must lie in 0..11, got values in 1..12"),
        ({"key": np.ones((2, 11, 2, 5), np.float32)}, "query and key must have one head width H >= 1, got 6 and 5"),
        ({"query": np.ones((2, 11, 4, 6), int)}, "query must have a floating dtype, got int"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = dict(zip(("query", "key", "value"), problems.device(*problems.arrays()), strict=True))
    with pytest.raises((ValueError, TypeError), match=message):
        nystrom_attention(**{**arguments, "landmarks": 4, **change})
