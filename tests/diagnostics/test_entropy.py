"""Entropy against NumPy float64, with the limits where a careless formula gives NaN or a bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics.entropy import (
    entropy,
    entropy_from_logits,
    entropy_lower_bound,
    entropy_without,
    normalized_entropy,
    participation,
)
from attn_jax.diagnostics.numerics import without_key

HALF = (jnp.bfloat16, jnp.float16)


def reference_entropy(p):
    """Float64 entropy of p / Σp per row, 0 for a row of zeros."""
    p = np.asarray(p, np.float64)
    total = p.sum(-1, keepdims=True)
    q = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    return -(q * np.log(q, out=np.zeros_like(q), where=q > 0)).sum(-1)


def softmax64(logits):
    logits = np.asarray(logits, np.float64)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal_uniform(n):
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def test_zero_probability_is_no_nan():
    weights = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(entropy(weights), [0, np.log(2), 0], atol=1e-7)
    assert np.isfinite(jax.grad(lambda w: entropy(w).sum())(weights)).all()


def test_gradient_at_a_masked_logit():
    logits = jnp.array([1.0, 0.0, -jnp.inf])
    expected = [-0.196612, 0.196612, 0.0]  # -p (ln p + H)
    for f in (lambda s: entropy(jax.nn.softmax(s)), entropy_from_logits):
        value, gradient = jax.value_and_grad(f)(logits)
        np.testing.assert_allclose(value, 0.582203, atol=1e-6)
        np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_no_bias_from_an_epsilon():
    for dtype in (jnp.float32, *HALF):
        np.testing.assert_allclose(entropy(jnp.full(4096, 1 / 4096, dtype)), 8.317766, atol=1e-5)


def test_logits_at_the_ends_of_their_dtype():
    extreme = jnp.array([65504.0, -65504.0], jnp.float16)
    assert entropy_from_logits(extreme) == 0
    assert entropy(jax.nn.softmax(extreme.astype(jnp.float32))) == 0
    huge = jnp.array([[3e38, -3e38, 3e38], [-jnp.inf, -jnp.inf, -jnp.inf], [1e4, 1e4 - 1, -1e30]])
    value, gradient = jax.vmap(jax.value_and_grad(entropy_from_logits))(huge)
    np.testing.assert_allclose(value, [np.log(2), 0, reference_entropy(softmax64([0.0, -1.0]))], atol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_rows_that_do_not_sum_to_one(dtype):
    exact = softmax64(np.random.default_rng(0).normal(size=(64, 200)))
    rounded = jnp.asarray(exact, dtype)
    stored = np.asarray(rounded.astype(jnp.float32), np.float64)
    assert np.abs(stored.sum(-1) - 1).max() > 1e-5
    result = entropy(rounded)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, reference_entropy(stored), atol=2e-6)  # of what is stored, exactly
    np.testing.assert_allclose(result, reference_entropy(exact), atol=2e-3)
    np.testing.assert_allclose(entropy(jnp.array([0.5, 0.5005])), np.log(2), atol=1e-6)


def test_against_float64_from_flat_to_sharp(x64):
    rng = np.random.default_rng(1)
    for sd in (0.0, 1.0, 10.0, 100.0):
        logits = rng.normal(size=(2, 3, 32)) * sd
        p = softmax64(logits)
        assert entropy(jnp.asarray(p)).dtype == jnp.float64
        np.testing.assert_allclose(entropy(jnp.asarray(p)), reference_entropy(p), atol=1e-13)
        np.testing.assert_allclose(entropy_from_logits(jnp.asarray(logits)), reference_entropy(p), atol=1e-12)
        single = jnp.asarray(logits, jnp.float32)
        truth = reference_entropy(softmax64(single))
        np.testing.assert_allclose(entropy_from_logits(single), truth, atol=2e-6)
        np.testing.assert_allclose(entropy(jnp.asarray(softmax64(single), jnp.float32)), truth, atol=2e-6)


def test_gradient_is_that_of_the_formula(x64):
    p = jnp.asarray(softmax64(np.random.default_rng(2).normal(size=(4, 9))))
    logits = jnp.log(p)
    expected = -p * (logits + reference_entropy(p)[:, None])
    np.testing.assert_allclose(jax.grad(lambda s: entropy_from_logits(s).sum())(logits), expected, atol=1e-12)
    through = jax.grad(lambda s: entropy(jax.nn.softmax(s, axis=-1)).sum())(logits)
    np.testing.assert_allclose(through, expected, atol=1e-12)


def test_normalised_by_the_visible_keys():
    weights = jnp.asarray(causal_uniform(4), jnp.float32)
    np.testing.assert_allclose(entropy(weights), [0, 0.6931, 1.0986, 1.3863], atol=1e-4)
    visible = jnp.arange(1, 5)
    np.testing.assert_allclose(normalized_entropy(weights, visible_keys=visible), [1, 1, 1, 1], atol=1e-6)
    batch = jnp.broadcast_to(weights, (2, 3, 4, 4))
    for counts in (visible, visible[None, None, :], jnp.broadcast_to(visible, (2, 1, 4))):
        np.testing.assert_allclose(normalized_entropy(batch, visible_keys=counts), np.ones((2, 3, 4)), atol=1e-6)


def test_unfilled_slots_padding_and_windows_do_not_count():
    slots = jnp.zeros(4096).at[:4].set(0.25)
    np.testing.assert_allclose(entropy(slots), 1.3863, atol=1e-4)
    np.testing.assert_allclose(normalized_entropy(slots, visible_keys=4), 1, atol=1e-6)
    window = jnp.array([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 0]])
    counts = jnp.array([1, 2, 2, 0])
    np.testing.assert_allclose(normalized_entropy(window, visible_keys=counts), [1, 1, 1, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (5, r"visible_keys must lie in 0..4, got values in 5..5"),
        (-3, r"visible_keys must lie in 0..4, got values in -3..-3"),
        (np.array([4, 4, -1]), r"visible_keys must lie in 0..4, got values in -1..4"),
        (2, "visible_keys must count every key with a weight above 0, got 2 for a row with 4"),
        (np.array([4, 3, 0]), "visible_keys must count every key with a weight above 0, got 0 for a row with 1"),
        (np.array([[4, 2, 1]]), "visible_keys must count every key with a weight above 0, got 2 for a row with 3"),
    ],
)
def test_a_count_that_cannot_be(counts, message):
    weights = jnp.array([[[0.25] * 4, [0.5, 0.25, 0, 0.25], [0, 1, 0, 0]]])
    with pytest.raises(ValueError, match=message):
        normalized_entropy(weights, visible_keys=counts)


def test_a_count_that_can_be():
    weights = jnp.array([[0.5, 0.5, 0, 0], [jnp.nan] * 4, [0.0] * 4])
    share = normalized_entropy(weights, visible_keys=np.array([3, 0, 4]))
    np.testing.assert_allclose(share, [np.log(2) / np.log(3), 0, 0], rtol=1e-6)
    assert normalized_entropy(weights[:0], visible_keys=np.zeros(0, int)).shape == (0,)
    traced = jax.jit(lambda w, n: normalized_entropy(w, visible_keys=n))(weights[:1], np.array([1]))
    np.testing.assert_array_equal(traced, [1])


@pytest.mark.parametrize("sink", [0.3, 0.999, 1 - 1e-6])
def test_without_the_sink_keeps_its_digits(sink):
    rest = softmax64(np.random.default_rng(3).normal(size=16))
    weights = np.concatenate([[sink], rest * (1 - sink)]).astype(np.float32)
    np.testing.assert_allclose(entropy_without(weights), reference_entropy(weights[1:]), atol=2e-6)
    np.testing.assert_allclose(entropy_without(weights[::-1].copy(), key=16), reference_entropy(weights[1:]), atol=2e-6)
    np.testing.assert_allclose(without_key(weights).sum(), 1, atol=1e-6)
    assert entropy_without(jnp.array([1.0, 0.0])) == 0
    assert np.isfinite(jax.grad(entropy_without)(jnp.array([1.0, 0.0]))).all()


def test_lower_bound_holds_and_is_reached():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(300, 20)) * np.geomspace(1e-3, 100, 300)[:, None]
    truth = reference_entropy(softmax64(logits))
    bound = entropy_lower_bound(logits.var(-1).astype(np.float32), jnp.full(300, 20))
    assert (truth >= bound - 1e-5).all()
    n, gap = 20, np.array([0.0, 0.5, 3.0, 30.0])
    one_above = np.zeros((4, n)) + gap[:, None] * (np.arange(n) == 7)[None]
    reached = entropy_lower_bound(one_above.var(-1).astype(np.float32), n)
    np.testing.assert_allclose(reached, reference_entropy(softmax64(one_above)), atol=2e-5)
    sigma = np.linalg.norm(one_above - one_above.mean(-1, keepdims=True), axis=-1)
    beta = sigma * np.sqrt(n / (n - 1))
    e = (n - 1) * np.exp(-beta)
    np.testing.assert_allclose(reached, np.log(1 + e) + beta * e / (1 + e), atol=2e-5)
    np.testing.assert_array_equal(entropy_lower_bound(jnp.array([0.0, 0.0]), jnp.array([0, 1])), [0, 0])
    assert np.isfinite(jax.grad(lambda v: entropy_lower_bound(v, 5))(0.0))


def test_participation():
    squares = jnp.array([1.0, 0.25, 0.0], jnp.bfloat16)
    np.testing.assert_allclose(participation(squares), [1, 4, 0])
    assert participation(squares).dtype == jnp.float32
    np.testing.assert_allclose(jax.grad(lambda s: participation(s).sum())(jnp.array([0.5, 0.0])), [-4, 0])


def test_same_under_jit_and_vmap():
    p = jnp.asarray(softmax64(np.random.default_rng(5).normal(size=(2, 3, 8))), jnp.float32)
    for f in (entropy, entropy_from_logits, entropy_without, lambda w: normalized_entropy(w, visible_keys=8)):
        np.testing.assert_allclose(jax.jit(f)(p), f(p), atol=1e-6)
        np.testing.assert_allclose(jax.vmap(jax.vmap(f))(p), f(p), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: entropy(jnp.arange(3)), TypeError, "weights must have a floating dtype, got int32"),
        (lambda: entropy(jnp.float32(1.0)), ValueError, r"weights must have at least 1 axes, \[..., S\]"),
        (lambda: entropy(jnp.zeros((2, 0))), ValueError, "weights must not be empty"),
        (lambda: entropy_from_logits(jnp.arange(3)), TypeError, "logits must have a floating dtype"),
        (lambda: normalized_entropy(jnp.ones((2, 3)), visible_keys=jnp.ones(3, int)), ValueError, "visible_keys"),
        (lambda: normalized_entropy(jnp.ones((2, 3)), visible_keys=jnp.ones(2)), TypeError, "visible_keys"),
        (lambda: entropy_without(jnp.ones(3), key=3), ValueError, "key must be an index below S = 3, got 3"),
        (lambda: entropy_without(jnp.ones(3), key=-1), ValueError, "key must be at least 0"),
        (lambda: entropy_lower_bound(jnp.ones(3), jnp.ones((1, 3), int)), ValueError, "visible_keys"),
        (lambda: entropy_lower_bound(jnp.ones(3), -1), ValueError, "visible_keys must be at least 0, got values in -1"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
