"""Rollout: known products, rows that sum to 1, the order of layers, and the baseline."""

import jax
import numpy as np
import pytest

from attn_jax.diagnostics import attention_rollout, uniform_rollout

roll = jax.jit(attention_rollout)
FIRST = np.array([[0.9, 0.1], [0.5, 0.5]])
SECOND = np.array([[0.2, 0.8], [0.7, 0.3]])


def rollout64(weights):
    """`[L, N, T, T]`, layer by layer."""
    length = weights.shape[-1]
    found = np.eye(length)
    for layer in np.float64(weights):
        mixed = layer.mean(axis=0) + np.eye(length)
        found = (mixed / mixed.sum(axis=1, keepdims=True)) @ found
    return found


def patterns(shape=(3, 2, 4, 5, 5), *, causal=False, seed=0):
    logits = np.random.default_rng(seed).normal(size=shape)
    p = np.exp(logits) * (np.tri(shape[-1]) if causal else 1)
    return (p / p.sum(axis=-1, keepdims=True)).astype(np.float32)


def test_later_layers_stand_on_the_left():
    weights = np.stack([FIRST, SECOND])[:, None].astype(np.float32)
    np.testing.assert_allclose(attention_rollout(weights), [[0.67, 0.33], [0.495, 0.505]], rtol=1e-6)
    np.testing.assert_allclose(attention_rollout(weights[::-1]), [[0.5875, 0.4125], [0.4125, 0.5875]], rtol=1e-6)


def test_rows_that_lost_small_weights_are_divided_by_their_own_sum():
    thinned = np.array([[0.8, 0.0], [0.5, 0.5]], np.float32)
    np.testing.assert_allclose(attention_rollout(thinned[None, None]), [[1.0, 0.0], [0.25, 0.75]], rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_over_heads_layers_and_batch(causal):
    weights = patterns(causal=causal)
    weights[0, 0, :, 3] *= 0.3  # beside a sink
    weights[1, 1, :, 4] = 0  # padding
    found = np.asarray(roll(weights))
    assert found.shape == (2, 5, 5)
    for b in range(2):
        np.testing.assert_allclose(found[b], rollout64(weights[:, b]), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.sum(axis=-1), np.ones((2, 5)), rtol=1e-6)
    if causal:
        np.testing.assert_array_equal(found, np.tril(found))


def test_the_batch_axis_stays_for_one_item():
    weights = patterns()
    np.testing.assert_allclose(roll(weights[:, :1]), roll(weights)[:1], rtol=1e-6)
    np.testing.assert_allclose(attention_rollout(weights[:, 0]), roll(weights)[0], rtol=1e-6)


def test_attention_to_itself_rolls_out_to_itself():
    np.testing.assert_array_equal(attention_rollout(np.tile(np.eye(3, dtype=np.float32), (4, 2, 1, 1))), np.eye(3))


def test_the_baseline_is_the_rollout_of_uniform_weights():
    visible = np.tri(6, dtype=bool)
    uniform = np.tile(visible / visible.sum(axis=1, keepdims=True), (5, 2, 1, 1))
    found = np.asarray(uniform_rollout(visible, 5))
    np.testing.assert_allclose(found, rollout64(uniform), rtol=1e-5)
    drained = [np.asarray(uniform_rollout(visible, layers))[-1, 0] for layers in (1, 4, 40)]
    assert drained[0] < 0.1 < drained[1] < drained[2]  # to the first token, whatever heads do
    assert drained[2] > 0.99
    padded = (
        visible & (np.arange(6) < np.array([[6], [2]])[:, None, :]) & (np.arange(6) < np.array([[6], [2]]))[:, :, None]
    )
    np.testing.assert_allclose(uniform_rollout(padded, 3)[1, 2:], np.eye(6)[2:])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: attention_rollout(np.ones((2, 3, 3))), ValueError, r"weights must have at least 4 axes, \[L, \*B, N"),
        (lambda: attention_rollout(np.ones((2, 1, 3, 4))), ValueError, r"weights must have shape \[L, \*B, N, T, T\]"),
        (lambda: attention_rollout(np.ones((2, 1, 3, 3), int)), TypeError, "weights must have a floating dtype"),
        (lambda: uniform_rollout(np.ones((3, 3)), 2), TypeError, "visible must be boolean"),
        (lambda: uniform_rollout(np.ones((3, 4), bool), 2), ValueError, r"\[L, \*B, N, T, T\]"),
        (lambda: uniform_rollout(np.ones((3, 3), bool), 0), ValueError, "num_layers must be at least 1, got 0"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
