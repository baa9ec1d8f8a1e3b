"""Known faults of attention libraries: heads, precision, caps, splits, memory, dropout, sinks.

Each test is one kind of fault, on every implementation that takes all arguments. With query 0 and the identity as
value, the output *is* the weights: who is seen can be read off.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import biases
from tests import oracles
from tests.exact.calls import LOW_PRECISION, draw, pattern, qkv

# Heads


@pytest.mark.parametrize(("N", "K", "fetched"), [(4, 2, [0, 0, 1, 1]), (4, 1, [0] * 4), (4, 4, [0, 1, 2, 3])])
def test_query_heads_share_a_key_head_in_groups(attend, N, K, fetched):
    value = np.broadcast_to(np.arange(K, dtype=np.float32)[:, None], (2, K, 1))
    output = attend(np.zeros((2, N, 4), np.float32), np.zeros((2, K, 4), np.float32), value)
    np.testing.assert_array_equal(output[:, :, 0], [fetched, fetched])


def test_groups_equal_repeated_heads(attend):
    query, key, value = qkv((2,), T=3, S=5, N=6, K=2, H=4, V=3)
    cotangent = draw(2, 3, 6, 3)

    def repeated(query, key, value):
        return attend(query, jnp.repeat(key, 3, axis=-2), jnp.repeat(value, 3, axis=-2), is_causal=True)

    grouped, pull = jax.vjp(lambda *x: attend(*x, is_causal=True), query, key, value)
    expected, pull_repeated = jax.vjp(repeated, query, key, value)
    np.testing.assert_allclose(grouped, expected, atol=1e-6)
    for one, other in zip(pull(cotangent), pull_repeated(cotangent), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("N", "K"), [(3, 2), (2, 4), (4, 0), (0, 2), (0, 0)])
def test_heads_that_do_not_divide_raise(attend, N, K):
    query, key, value = qkv(N=N, K=K)
    with pytest.raises(ValueError, match=rf"{N} query heads .*{K} key/value heads"):
        attend(query, key, value)


# Low precision


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_a_long_sum_does_not_stall(attend, dtype):
    length = 4096
    query, key, value = np.zeros((1, 1, 8), dtype), np.zeros((length, 1, 8), dtype), np.ones((length, 1, 8), dtype)
    assert (attend(query, key, value) == 1).all()
    assert (attn_jax.attention_weights(query, key) == 1 / length).all()
    _, logsumexp = attend(query, key, value, return_residual=True)
    np.testing.assert_allclose(logsumexp, np.log(length), rtol=1e-6)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_a_long_row_is_right_to_two_units_in_the_last_place(attend, dtype):
    query, key, value = qkv((), T=2, S=8192, H=8, V=8, dtype=dtype)
    output, expected = attend(query, key, value), oracles.attention(query, key, value).output
    error = np.abs(np.asarray(output, np.float64) - expected)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(expected))) - jnp.finfo(dtype).nmant)
    assert (error <= np.maximum(2 * spacing, 1e-6 * np.abs(expected).max(-1, keepdims=True))).all()


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_a_gradient_over_many_rows_does_not_stall(attend, dtype):
    """Keys, values, biases, learned tables and sinks that thousands of rows share."""
    rows = 4096
    query, key = np.zeros((rows, 1, 8), dtype), np.zeros((2, 1, 8), dtype)
    value = np.array([1, -1], dtype).reshape(2, 1, 1)

    def total(value, bias, table, sinks):
        learned = biases.Array(bias) + biases.RelativeBuckets(table, max_distance=8)
        return attend(query, key, value, bias=learned, sinks=sinks, query_offset=rows).astype(jnp.float32).sum()

    inputs = value, np.zeros((1, 1, 2), dtype), np.zeros((8, 1), dtype), np.full(1, -np.inf, dtype)
    d_value, d_bias, d_table, d_sinks = jax.grad(total, (0, 1, 2, 3))(*inputs)
    np.testing.assert_array_equal(np.asarray(d_value, np.float32).reshape(-1), [rows / 2, rows / 2])
    np.testing.assert_array_equal(np.asarray(d_bias, np.float32).reshape(-1), [rows / 2, -rows / 2])
    assert np.asarray(d_table, np.float32)[3] == 0  # the last bucket before the query: +1/2 and -1/2 of each row
    assert (d_sinks == 0).all()


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_a_learned_table_sums_its_gradient_in_float32(attend, dtype):
    rows = 4096
    query, key = np.zeros((rows, 1, 8), dtype), np.zeros((2, 1, 8), dtype)
    value = np.array([1, 0], dtype).reshape(2, 1, 1)  # the two keys lie in different buckets for one row only

    def total(table):
        bias = biases.RelativeBuckets(table, max_distance=4)
        return attend(query, key, value, bias=bias, query_positions=np.zeros(rows, np.int32)).astype(jnp.float32).sum()

    d_table = np.asarray(jax.grad(total)(np.zeros((8, 1), dtype)), np.float32)[:, 0]
    np.testing.assert_array_equal(d_table[[0, 5]], [rows / 4, -rows / 4])  # distances 0 and 1


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_output_keeps_the_dtype_of_the_query(attend, dtype):
    query, key, value = qkv(T=3, S=3, dtype=dtype)
    for options in ({"bias": np.ones((3, 3), np.float32)}, {"sinks": np.ones(1, np.float32)}, {"scale": np.float32(2)}):
        output, logsumexp = attend(query, key, value, **options, return_residual=True)
        assert (output.dtype, logsumexp.dtype) == (dtype, jnp.float32)


# Soft cap


def test_the_cap_comes_before_the_mask(attend):
    for cap in (0.01, 1.0, 50.0):
        np.testing.assert_allclose(
            pattern(attend, 4, 4, is_causal=True, logits_soft_cap=cap),
            np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None],
            rtol=1e-6,
        )


def test_the_cap_comes_after_scale_and_bias(attend):
    query, key, value = qkv(T=5, S=5, N=2, K=1, H=4)
    bias = 20 * draw(1, 2, 5, 5)
    for cap in (5.0, 50.0, 1e6):
        options = {"bias": bias, "scale": 3.0, "logits_soft_cap": cap, "is_causal": True}
        np.testing.assert_allclose(
            attend(query, key, value, **options), oracles.attention(query, key, value, **options).output, atol=1e-5
        )
    uncapped = attend(query, key, value, bias=bias, scale=3.0)
    np.testing.assert_allclose(
        attend(query, key, value, bias=bias, scale=3.0, logits_soft_cap=1e8), uncapped, atol=1e-4
    )


@pytest.mark.parametrize("cap", [0.0, -1.0, np.inf, np.nan])
def test_a_cap_that_is_no_cap_raises(attend, cap):
    with pytest.raises(ValueError, match="logits_soft_cap must be positive and finite"):
        attend(*qkv(), logits_soft_cap=cap)


# Lengths that fit no block, and splits


@pytest.mark.parametrize(("T", "S"), [(192, 192), (5, 7), (1, 1), (1, 300), (130, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_length_lets_padding_in(attend, T, S, is_causal):
    ones = np.ones((S, 1, 4), np.float32)
    output = attend(np.zeros((T, 1, 4), np.float32), np.zeros((S, 1, 4), np.float32), ones, is_causal=is_causal)
    # XLA may divide by multiplying with the reciprocal, which is off by one unit in the last place.
    np.testing.assert_array_max_ulp(np.asarray(output), np.ones((T, 1, 4), np.float32), maxulp=1)


@pytest.mark.parametrize("empty", ["queries", "keys", "batch"])
def test_axes_without_entries(attend, empty):
    query, key, value = qkv((0,) if empty == "batch" else (2,), T=0 if empty == "queries" else 3, N=2)
    if empty == "keys":
        key, value = key[:, :0], value[:, :0]
    output, logsumexp = attend(query, key, value, is_causal=True, return_residual=True)
    assert output.shape == (*query.shape[:-1], 2)
    assert (output == 0).all()
    assert (logsumexp == -np.inf).all()
    gradients = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))(query, key, value)
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("split", [1, 3, 4])
def test_every_split_of_the_sequence_gives_the_whole(attend, split):
    query, key, value = qkv((2,), T=7, S=7, N=2, K=1, H=4, V=3)
    bias, allowed = draw(2, 2, 7, 7), np.random.default_rng(0).random((2, 1, 7, 7)) < 0.7
    options = {"is_causal": True, "logits_soft_cap": 4.0}
    whole, whole_lse = attend(query, key, value, bias, allowed, **options, return_residual=True)
    starts = range(0, 7, split)
    by_rows = [
        attend(
            query[:, i : i + split], key, value, bias[:, :, i : i + split], allowed[:, :, i : i + split],
            query_offset=i, **options,
        )
        for i in starts
    ]  # fmt: skip
    np.testing.assert_allclose(np.concatenate(by_rows, 1), whole, atol=1e-5)

    # By keys: the log-sum-exps say how much each part weighs.
    parts = [
        attend(
            query, key[:, i : i + split], value[:, i : i + split], bias[..., i : i + split], allowed[..., i : i + split],
            key_positions=np.arange(i, min(i + split, 7)), return_residual=True, **options,
        )
        for i in starts
    ]  # fmt: skip
    lse = np.stack([part[1] for part in parts])
    total = np.logaddexp.reduce(lse, axis=0)
    np.testing.assert_allclose(total, whole_lse, atol=1e-5)
    share = np.exp(lse - np.where(np.isinf(total), 0, total))
    np.testing.assert_allclose(
        sum(s[..., None] * part[0] for s, part in zip(share, parts, strict=True)), whole, atol=1e-5
    )


# Memory


def test_masks_and_biases_add_no_squares_of_their_own():
    """The dense form holds a handful of `[B, N, T, S]` squares; nothing that broadcasts may become one more."""
    batch, heads, length, width = 2, 4, 512, 16
    x = jax.ShapeDtypeStruct((batch, length, heads, width), jnp.float32)
    square = 4 * batch * heads * length**2

    def squares(function, *arrays):
        return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes / square

    shapes = {
        "none": (),
        "mask": (jax.ShapeDtypeStruct((batch, 1, 1, length), bool),),
        "bias": (jax.ShapeDtypeStruct((1, 1, length, length), jnp.float32),),
    }
    for name, extra in shapes.items():

        def loss(q, k, v, *extra, name=name):
            options = {name: extra[0]} if extra else {"local_window_size": (64, 0)}
            return attn_jax.dot_product_attention(q, k, v, **options, implementation="dense").sum()

        assert squares(loss, x, x, x, *extra) < 2.5, name
        assert squares(jax.grad(loss, (0, 1, 2)), x, x, x, *extra) < 5.5, name


# Dropout


def test_dropout_that_is_off_needs_no_key_and_reads_none(attend):
    inputs = qkv(T=8, S=8)
    plain = attend(*inputs)
    for key in (None, jax.random.key(0), jax.random.key(1)):
        np.testing.assert_array_equal(attend(*inputs, dropout_rate=0.0, dropout_rng=key), plain)


def test_dropout_without_a_key_raises(attend):
    with pytest.raises(ValueError, match="dropout_rng must be a key"):
        attend(*qkv(), dropout_rate=0.5)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, np.nan, np.inf])
def test_a_dropout_rate_that_is_none_raises(attend, rate):
    with pytest.raises(ValueError, match=rf"dropout_rate must lie in \[0, 1\), got {rate}"):
        attend(*qkv(), dropout_rate=rate, dropout_rng=jax.random.key(0))


# Sinks


@pytest.mark.parametrize("depth", [-60.0, -20.0, -12.0, 0.0, 12.0, 60.0])
def test_a_sink_far_from_the_logits_keeps_an_exact_gradient(attend, depth):
    """Its share is tiny or all: `1 - share` of the other side would cancel."""
    query, key, value = qkv((2,), T=5, S=6, N=2, K=1, H=4, V=3)
    sinks, cotangent = np.array([depth, depth + 1], np.float32), draw(2, 5, 2, 3)
    output, pull = jax.vjp(lambda *x: attend(*x[:3], sinks=x[3]), query, key, value, sinks)
    expected = oracles.attention(query, key, value, sinks=sinks)
    np.testing.assert_allclose(output, expected.output, rtol=1e-4, atol=1e-5 * np.abs(expected.output).max())
    exact = oracles.gradients(expected, cotangent)
    for gradient, name in zip(pull(cotangent), ("query", "key", "value", "sinks"), strict=True):
        np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=1e-5 * np.abs(exact[name]).max(), err_msg=name)
