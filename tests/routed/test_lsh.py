"""Hashed attention against its definition, token by token, and where it must be exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import dot_product_attention, masks
from attn_jax.routed import draw_rotations, hash_buckets, lsh_attention
from attn_jax.routed.groups import check_codes
from tests.routed import oracle

B, T, N, H, V = 2, 13, 2, 4, 3
attend = jax.jit(lsh_attention, static_argnames=("window", "is_causal"))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def rotations(buckets, rounds=1, *, heads=N, width=H, seed=0):
    return draw_rotations(jax.random.key(seed), heads, width, buckets, num_rounds=rounds)


@functools.cache
def problem(length=T):
    return normal(1, B, length, N, H), normal(2, B, length, N, V)


# --- the definition


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("buckets", "rounds", "window"), [(2, 1, None), (4, 3, 2), (4, 3, None), (2, 8, 3), (1, 2, 1)])
def test_every_token_finds_its_bucket_in_its_window_and_no_pair_counts_twice(buckets, rounds, window, is_causal):
    x, value = problem()
    drawn = rotations(buckets, rounds)
    expected = oracle.lsh(x, value, drawn, window=window, causal=is_causal)
    np.testing.assert_allclose(attend(x, value, drawn, window=window, is_causal=is_causal), expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_and_groups_that_do_not_divide_each_other(is_causal):
    x, value = problem(131)
    drawn = rotations(4, 2)
    expected = oracle.lsh(x, value, drawn, window=5, causal=is_causal)
    np.testing.assert_allclose(attend(x, value, drawn, window=5, is_causal=is_causal), expected, atol=1e-5)


def test_buckets_are_the_largest_coordinate_and_its_sign():
    x = problem()[0]
    drawn = rotations(6, 2)
    np.testing.assert_array_equal(hash_buckets(x, drawn), oracle.buckets(x, drawn))
    np.testing.assert_array_equal(hash_buckets(3 * x, drawn), hash_buckets(x, drawn))
    opposite = (np.asarray(hash_buckets(x, drawn)) + 3) % 6
    np.testing.assert_array_equal(hash_buckets(-x, drawn), opposite)
    assert (np.asarray(hash_buckets(x, rotations(1, 2))) == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_bucket_and_the_whole_window_are_dense_attention_without_the_diagonal(is_causal):
    x, value = problem()
    key = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    dense = dot_product_attention(x, key, value, mask=~masks.LocalWindow(0, 0), is_causal=is_causal)
    if is_causal:
        dense = dense.at[:, 0].set(value[:, 0])
    np.testing.assert_allclose(attend(x, value, rotations(1), window=T, is_causal=is_causal), dense, atol=1e-5)


def test_more_rounds_come_to_attention_over_all_others():
    x, value = problem()
    whole = oracle.lsh(x, value, rotations(1))
    errors = [np.abs(attend(x, value, rotations(2, rounds)) - whole).max() for rounds in (1, 3, 40)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-5


# --- itself only where there is nothing else


@pytest.mark.parametrize("rounds", [1, 2, 8])
@pytest.mark.parametrize("buckets", [1, 4])
def test_itself_only_where_nothing_else_is_visible(buckets, rounds):
    x, value = jnp.zeros((1, 3, 1, H)), jnp.eye(3)[None, :, None]  # all zeros fall in one bucket
    drawn = rotations(buckets, rounds, heads=1)
    half = [[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]
    np.testing.assert_allclose(attend(x, value, drawn)[0, :, 0], half, atol=1e-6)
    causal = attend(x, value, drawn, is_causal=True)[0, :, 0]
    np.testing.assert_allclose(causal, [[1, 0, 0], [1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)
    alone = attend(x[:, :1], value[:, :1], drawn, is_causal=True)
    np.testing.assert_array_equal(alone, value[:, :1])


def test_an_empty_window_beyond_itself_gives_the_own_value():
    x, value = problem()
    np.testing.assert_array_equal(attend(x, value, rotations(1), window=1), value)


@pytest.mark.parametrize("is_causal", [False, True])
def test_far_apart_tokens_do_not_meet_whatever_lies_between(is_causal):
    side = jnp.asarray([1, -1, 1, -1, -1, 1, 1], jnp.float32)
    x = side[None, :, None, None] * jnp.ones((1, 7, 1, H))
    weights = attend(x, jnp.eye(7)[None, :, None], rotations(2, 3, heads=1), is_causal=is_causal)[0, :, 0]
    together = side[:, None] == side[None, :]
    assert (np.asarray(weights)[~np.asarray(together)] == 0).all()
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=1e-6)
    if is_causal:
        assert (np.triu(weights, 1) == 0).all()  # from the first group to the last as well
        np.testing.assert_array_equal(np.flatnonzero(np.diag(weights)), [0, 1])  # the first of each side


def test_equal_rounds_change_nothing():
    x, value = problem()
    one = rotations(4)
    for is_causal in (False, True):
        once = attend(x, value, one, window=3, is_causal=is_causal)
        thrice = attend(x, value, jnp.repeat(one, 3, axis=0), window=3, is_causal=is_causal)
        np.testing.assert_allclose(thrice, once, atol=1e-6)


# --- who may not be seen


def test_the_future_is_not_read():
    x, value = problem()
    other_x, other_value = x.at[:, 7:].set(normal(8, B, T - 7, N, H)), value.at[:, 7:].set(1e3)
    drawn = rotations(4, 3)
    before, after = (attend(*pair, drawn, window=3, is_causal=True) for pair in ((x, value), (other_x, other_value)))
    np.testing.assert_allclose(after[:, :7], before[:, :7], atol=1e-6)
    one = rotations(1)  # whose order the future cannot change: the same sums, bit for bit
    before, after = (attend(*pair, one, is_causal=True) for pair in ((x, value), (other_x, other_value)))
    np.testing.assert_array_equal(after[:, :7], before[:, :7])
    assert np.abs(after[:, 7:] - before[:, 7:]).max() > 1


def test_no_gradient_comes_from_the_future():
    x, value = problem()
    drawn = rotations(4, 3)
    grads = jax.jit(jax.grad(lambda x, value: attend(x, value, drawn, is_causal=True)[:, :7].sum(), (0, 1)))(x, value)
    for gradient in grads:
        assert (np.asarray(gradient)[:, 7:] == 0).all()
        assert np.abs(gradient[:, :7]).max() > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_neither_sees_nor_is_seen(is_causal):
    x, value = problem()
    lengths = jnp.asarray([13, 6])
    drawn = rotations(4, 3)
    expected = oracle.lsh(x, value, drawn, window=3, causal=is_causal, lengths=[13, 6])
    broken = [array.at[1, 6:].set(jnp.nan) for array in (x, value)]

    def loss(x, value):
        output = attend(x, value, drawn, window=3, is_causal=is_causal, key_value_seq_lengths=lengths)
        return (output * normal(4, B, T, N, V)).sum(), output

    (_, output), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*broken)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert (np.asarray(output)[1, 6:] == 0).all()
    for gradient in grads:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[1, 6:] == 0).all()
    assert np.isfinite(attend(x, value, drawn, key_value_seq_lengths=jnp.asarray([0, 0]))).all()


def test_items_and_heads_do_not_meet():
    x, value = problem()
    drawn = rotations(4, 3)
    both = attend(x, value, drawn, window=3)
    other = attend(x.at[0].set(50.0), value.at[0].set(jnp.nan), drawn, window=3)
    np.testing.assert_array_equal(other[1], both[1])
    head = attend(x[:, :, 1:], value[:, :, 1:], drawn[:, 1:], window=3)
    np.testing.assert_allclose(head, both[:, :, 1:], atol=1e-6)


# --- gradients, transforms, dtypes


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_are_those_of_attention_over_what_was_found(is_causal):
    x, value = problem()
    drawn, weights = rotations(4, 3), normal(5, B, T, N, V)
    pairs = oracle.lsh_pairs(x, drawn, window=3, causal=is_causal)

    def total(x, value, drawn):
        return (attend(x, value, drawn, window=3, is_causal=is_causal) * weights).sum()

    d_x, d_value, d_rotations = jax.jit(jax.grad(total, (0, 1, 2)))(x, value, drawn)
    assert (np.asarray(d_rotations) == 0).all()

    def reference(x, value):
        return (oracle.lsh(x, value, drawn, pairs=pairs) * np.asarray(weights, np.float64)).sum()

    for seed in range(3):
        along = normal(20 + seed, *x.shape)
        expected = oracle.slope(lambda x: reference(x, value), x, along)
        assert float((d_x * along).sum()) == pytest.approx(expected, abs=1e-4)
        along = normal(30 + seed, *value.shape)
        expected = oracle.slope(lambda value: reference(x, value), value, along)
        assert float((d_value * along).sum()) == pytest.approx(expected, abs=1e-4)


def test_vectors_without_length_have_finite_gradients():
    gradient = jax.jit(jax.grad(lambda x: attend(x, problem()[1], rotations(4, 2)).sum()))(jnp.zeros((B, T, N, H)))
    assert np.isfinite(gradient).all()


def test_one_trace_for_equal_options_and_any_rotations():
    x, value = problem()
    traces = []

    @functools.partial(jax.jit, static_argnames=("window",))
    def counting(x, drawn, lengths, *, window):
        traces.append(window)
        return lsh_attention(x, value, drawn, window=window, key_value_seq_lengths=lengths)

    for seed in range(3):
        counting(x, rotations(4, 2, seed=seed), jnp.asarray([seed, 5]), window=3)
    assert traces == [3]


def test_mapped_over_rotations_and_tokens():
    x, value = problem()
    drawn = jnp.stack([rotations(4, 2, seed=seed) for seed in range(2)])
    mapped = jax.jit(jax.vmap(lambda x, drawn: attend(x, value[0], drawn, window=3)))(x, drawn)
    for i in range(2):
        np.testing.assert_allclose(mapped[i], attend(x[i], value[0], drawn[i], window=3), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_rounds_only_the_output(dtype):
    x, value = (array.astype(dtype) for array in problem())
    drawn = rotations(4, 2)
    output = attend(x, value, drawn, window=3)
    assert output.dtype == dtype
    expected = oracle.lsh(x.astype(jnp.float32), value.astype(jnp.float32), drawn, window=3)
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=4 * float(jnp.finfo(dtype).eps))


def test_float64_is_computed_in_float64(x64):
    x, value = (jnp.asarray(array, jnp.float64) for array in problem())
    drawn = rotations(4, 3)
    output = attend(x, value, drawn, window=3, is_causal=True)
    assert output.dtype == jnp.float64
    np.testing.assert_allclose(output, oracle.lsh(x, value, drawn, window=3, causal=True), atol=1e-12)


# --- bad input


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.0}, TypeError, "window must be an integer"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
        ({"query_key": jnp.zeros((T, H))}, ValueError, "query_key must have at least 3 axes"),
        ({"query_key": jnp.zeros((B, T, N, H), int)}, TypeError, "query_key must have a floating dtype"),
        ({"value": jnp.zeros((B, T + 1, N, V))}, ValueError, "value must have shape"),
        ({"value": jnp.zeros((B, T, 1, V))}, ValueError, "value must have shape"),
        ({"value": jnp.zeros((B, T, N, V), jnp.float16)}, TypeError, "value must have the dtype of query_key"),
        ({"rotations": jnp.zeros((2, N, H + 1, 2))}, ValueError, "rotations must have shape"),
        ({"rotations": jnp.zeros((0, N, H, 2))}, ValueError, "rotations must have shape"),
        ({"rotations": jnp.zeros((N, H, 2))}, ValueError, "rotations must have rank 4"),
        ({"key_value_seq_lengths": jnp.asarray([1, T + 1])}, ValueError, "key_value_seq_lengths must lie in 0..13"),
        ({"key_value_seq_lengths": jnp.asarray([1, 2, 3])}, ValueError, "key_value_seq_lengths must have shape"),
        ({"scale": jnp.ones(N)}, ValueError, r"scale must be one number here, got shape \(2,\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, says):
    x, value = problem()
    arguments = {"query_key": x, "value": value, "rotations": rotations(4), **change}
    with pytest.raises(error, match=says):
        lsh_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_buckets": 3}, "num_buckets must be 1 or even, got 3"),
        ({"num_buckets": 0}, "num_buckets must be at least 1"),
        ({"num_rounds": 0}, "num_rounds must be at least 1"),
    ],
)
def test_rotations_that_cannot_be(change, says):
    with pytest.raises(ValueError, match=says):
        draw_rotations(jax.random.key(0), **{"num_heads": 1, "head_width": 2, "num_buckets": 4, **change})


def test_groups_and_tokens_must_fit_one_integer():
    with pytest.raises(ValueError, match=r"num_buckets · T must be below 2\^31"):
        check_codes("num_buckets", 2**20, 2**11)
