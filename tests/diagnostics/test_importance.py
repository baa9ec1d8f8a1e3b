"""Importance of heads: signs, padding, duplicates, and the first-order promise that a gradient makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax.diagnostics import gate_gradients, head_importance

N, H = 3, 4
RNG = np.random.default_rng(0)
IDS, LENGTHS = RNG.integers(0, 11, (4, 8)), np.array([2, 8, 5, 3])
ONES = np.ones((1, N), np.float32)
EMBEDDING, OUT = (RNG.normal(size=shape).astype(np.float32) for shape in ((11, N, H), (N, H, 11)))


def logits(gates, token_ids, length, out=OUT):
    """One layer of attention between embeddings."""
    x = jnp.asarray(EMBEDDING, gates.dtype)[token_ids]
    heads = attn_jax.dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=length)
    return jnp.einsum("tnh,nhv,n->tv", heads, jnp.asarray(out, gates.dtype), gates[0])


def loss(gates, example):
    """Mean loss of the next token, over the tokens of one example that count."""
    token_ids, length = example
    scores = jax.nn.log_softmax(logits(gates, token_ids, length)[:-1])
    losses = -jnp.take_along_axis(scores, token_ids[1:, None], axis=1)[:, 0]
    counts = jnp.arange(len(losses)) < length - 1
    return jnp.sum(jnp.where(counts, losses, 0.0)) / jnp.sum(counts)


def last_only(gates, example):
    token_ids, length = example
    return jax.nn.log_softmax(logits(gates, token_ids, length)[length - 1])[0]


gradients = jax.jit(functools.partial(gate_gradients, loss))
importance = jax.jit(functools.partial(head_importance, loss))


@pytest.fixture(scope="module")
def found():
    return np.asarray(importance(ONES, (IDS, LENGTHS)))


def test_opposite_signs_do_not_cancel():
    signs = np.array([1.0, -1.0])
    found = head_importance(lambda gates, sign: sign * gates.sum(), np.ones((2, 3)), signs)
    np.testing.assert_array_equal(found, np.ones((2, 3)))
    np.testing.assert_array_equal(
        gate_gradients(lambda gates, sign: sign * gates.sum(), np.ones(1), signs), [[1.0], [-1.0]]
    )


def test_a_small_change_of_a_gate_moves_the_loss_as_it_says(x64):
    ones = np.ones((1, N))
    slopes = gradients(ones, (IDS, LENGTHS))
    assert slopes.shape == (4, 1, N)
    value = jax.jit(jax.vmap(loss, in_axes=(None, 0)))
    for head in range(N):
        change = 1e-4 * np.eye(N)[[head]]
        moved = (value(ones + change, (IDS, LENGTHS)) - value(ones - change, (IDS, LENGTHS))) / 2e-4
        np.testing.assert_allclose(slopes[:, 0, head], moved, rtol=1e-5, atol=1e-9)


def test_it_is_the_mean_of_absolute_values(found):
    slopes = np.asarray(gradients(ONES, (IDS, LENGTHS)), np.float64)
    np.testing.assert_allclose(found, np.abs(slopes).mean(axis=0), rtol=1e-5)
    assert (found > 1.01 * np.abs(slopes.mean(axis=0))).any()  # signs do differ here


def test_padding_duplicates_and_company_change_nothing(found):
    other = np.where(np.arange(8) < LENGTHS[:, None], IDS, RNG.integers(1, 11, IDS.shape))
    np.testing.assert_allclose(importance(ONES, (other, LENGTHS)), found, rtol=1e-6)
    twice = np.concatenate([IDS, IDS]), np.concatenate([LENGTHS, LENGTHS])
    np.testing.assert_allclose(importance(ONES, twice), found, rtol=1e-5)
    padded = np.concatenate([IDS, np.zeros((4, 3), int)], axis=1)
    np.testing.assert_allclose(importance(ONES, (padded, LENGTHS)), found, rtol=1e-4, atol=1e-7)


def test_a_loss_that_is_read_at_one_position_is_not_divided_by_all():
    one = jax.jit(functools.partial(head_importance, last_only))
    short, long = (one(ONES, (ids[None], np.array([3]))) for ids in (IDS[1][:3], IDS[1]))
    np.testing.assert_allclose(short, long, rtol=1e-4, atol=1e-7)  # whatever the array's length is
    assert (np.asarray(long) > 0).all()


def test_a_head_that_brings_nothing_has_none():
    silent = OUT * np.array([1, 0, 1], np.float32)[:, None, None]

    def of_silent(gates, token_ids):
        return jax.nn.logsumexp(logits(gates, token_ids, None, silent))

    found = np.asarray(head_importance(of_silent, ONES, IDS[:1]))
    np.testing.assert_array_equal(found > 0, [[True, False, True]])


def test_layers_may_be_normalised_and_zeros_stay():
    weights = np.array([[3.0, 4.0], [0.0, 0.0]])
    found = head_importance(lambda gates, x: x * (gates * weights).sum(), np.ones((2, 2)), np.ones(3), normalize=True)
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((lambda gates, x: gates, np.ones(2), np.ones(1)), ValueError, r"the result of loss must have rank 0"),
        ((lambda gates, x: gates.sum(), np.ones(2), np.ones(0)), ValueError, r"examples must have leaves \[E, ...\]"),
        ((lambda gates, x: gates.sum(), np.ones(2), (np.ones(1), np.ones(2))), ValueError, "of one E >= 1, got shapes"),
        ((lambda gates, x: gates.sum(), np.ones(2), 1.0), ValueError, r"examples must have leaves \[E, ...\]"),
        ((lambda gates, x: gates.sum(), np.ones(2), ()), ValueError, r"examples must have leaves \[E, ...\]"),
        ((lambda gates, x: gates.sum(), np.ones(2, int), np.ones(1)), TypeError, "gates must have a floating dtype"),
        ((3.0, np.ones(2), np.ones(1)), TypeError, "loss must be a function of gates and an example, got 3.0"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        head_importance(*arguments)
