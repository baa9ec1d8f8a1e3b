"""Losses against NumPy float64 and optax, and at the numbers where a careless formula fails."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attn_jax.training.losses import accuracy, bits_per_token, cross_entropy, token_losses


def reference(logits, targets, z_loss=0.0):
    """Float64 loss of each position, and its gradient."""
    s = np.asarray(logits, np.float64)
    shift = s.max(-1, keepdims=True)
    lse = np.log(np.exp(s - shift).sum(-1)) + shift[..., 0]
    p = np.exp(s - lse[..., None])
    one_hot = np.arange(s.shape[-1]) == np.asarray(targets)[..., None]
    losses = lse - np.where(one_hot, s, 0.0).sum(-1) + z_loss * lse**2
    return losses, p - one_hot + 2 * z_loss * lse[..., None] * p


def problem(seed=0, sd=3.0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 5, 7)) * sd
    return logits, rng.integers(0, 7, (2, 5)), rng.integers(0, 2, (2, 5)) * rng.uniform(0.1, 2, (2, 5))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_value_and_gradient_against_float64(x64, z_loss):
    logits, targets, weights = problem()
    losses, gradient = reference(logits, targets, z_loss)

    def loss(s):
        return cross_entropy(s, targets, weights, z_loss=z_loss)[0]

    value, computed = jax.value_and_grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, (weights * losses).sum() / weights.sum(), rtol=1e-13)
    np.testing.assert_allclose(computed, gradient * (weights / weights.sum())[..., None], atol=1e-14)
    np.testing.assert_allclose(token_losses(logits, targets, z_loss=z_loss), losses, rtol=1e-13)
    single = token_losses(jnp.asarray(logits, jnp.float32), targets, z_loss=z_loss)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, losses, rtol=2e-6)


def test_against_optax():
    logits, targets, weights = problem(1)
    logits, weights = jnp.asarray(logits, jnp.float32), jnp.asarray(weights, jnp.float32)
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    np.testing.assert_allclose(token_losses(logits, targets), theirs, rtol=1e-5, atol=1e-6)
    mean, count = cross_entropy(logits, targets, weights)
    np.testing.assert_allclose(mean, (theirs * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(count, weights.sum(), rtol=1e-6)
    mean, count = cross_entropy(logits, targets)
    np.testing.assert_allclose(mean, theirs.mean(), rtol=1e-5)
    assert count == 10


def test_what_a_weight_of_zero_hides():
    """NaN, infinities and ids that are none, in values and gradients; booleans and integers weigh as numbers."""
    logits, targets, _ = problem(2)
    keep = np.array([[True, True, False, False, False], [True, False, True, False, True]])
    spoiled = np.where(keep[..., None], logits, [np.nan, np.inf, -np.inf, 0, 1, 2, 3])
    ids = np.where(keep, targets, [-100, 7, -1, 99, 2**31 - 1])
    losses, gradient = reference(logits, targets)
    for weights in (keep, keep.astype(np.int32), keep.astype(np.float32)):
        result, slope = jax.jit(jax.value_and_grad(lambda s, w: cross_entropy(s, ids, w, z_loss=0.0)[0]))(
            jnp.asarray(spoiled, jnp.float32), weights
        )
        np.testing.assert_allclose(result, losses[keep].mean(), rtol=1e-6)
        np.testing.assert_allclose(slope, gradient * keep[..., None] / keep.sum(), atol=1e-7)
        np.testing.assert_allclose(accuracy(spoiled, ids, weights)[0], (logits.argmax(-1) == targets)[keep].mean())
        np.testing.assert_array_equal(token_losses(spoiled, ids, weights)[~keep], 0)


def test_no_weight_at_all():
    logits, targets, _ = problem(3)
    nothing = jnp.zeros(targets.shape)
    (mean, count), gradient = jax.value_and_grad(
        lambda s: cross_entropy(s, targets, nothing, z_loss=0.1), has_aux=True
    )(jnp.asarray(logits, jnp.float32))
    assert mean == 0
    assert count == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))
    assert accuracy(logits, targets, nothing) == (0, 0)


def test_means_combine_by_their_counts():
    logits, targets, weights = problem(4)
    for measure in (cross_entropy, accuracy):
        parts = [measure(logits[i], targets[i], weights[i]) for i in range(2)]
        total = sum(mean * count for mean, count in parts) / sum(count for _, count in parts)
        np.testing.assert_allclose(total, measure(logits, targets, weights)[0], rtol=1e-6)


def test_large_logits_keep_their_digits():
    """lse − s_y would lose them: at 1e6 a float32 has none left for 0.69."""
    for offset in (0.0, 1e6, -1e6, 1e30):
        logits = jnp.full((2,), offset, jnp.float32)
        np.testing.assert_allclose(token_losses(logits, 0), np.log(2), rtol=1e-6)
    extreme = jnp.array([3e38, -3e38, 0.0], jnp.float32)
    value, gradient = jax.value_and_grad(lambda s: token_losses(s, 0))(extreme)
    np.testing.assert_array_equal(value, 0)
    np.testing.assert_array_equal(gradient, [0, 0, 0])


def test_a_class_that_cannot_be():
    logits = jnp.array([0.0, -jnp.inf, 1.0])
    value, gradient = jax.value_and_grad(lambda s: token_losses(s, 0, z_loss=1e-2))(logits)
    p = np.array([1, 0, np.e]) / (1 + np.e)
    lse = np.log(1 + np.e)
    np.testing.assert_allclose(value, lse + 1e-2 * lse**2, rtol=1e-6)
    np.testing.assert_allclose(gradient, p - [1, 0, 0] + 2e-2 * lse * p, atol=1e-6)
    assert token_losses(logits, 1) == jnp.inf


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    logits, targets, _ = problem(5)
    rounded = jnp.asarray(logits, dtype)
    stored = np.asarray(rounded.astype(jnp.float32))
    computed = token_losses(rounded, targets)
    assert computed.dtype == jnp.float32
    np.testing.assert_allclose(computed, reference(stored, targets)[0], rtol=2e-6)
    many = jnp.zeros((4096, 2), dtype)  # a sum in half precision would stop at 256 or 2048
    mean, count = cross_entropy(many, jnp.zeros(4096, int), jnp.ones(4096, dtype))
    np.testing.assert_allclose(mean, np.log(2), rtol=1e-6)
    assert count == 4096
    assert jax.grad(lambda s: cross_entropy(s, targets)[0])(rounded).dtype == dtype


def test_accuracy():
    logits = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [jnp.nan, 1.0, 0.0], [0.0, 0.0, 5.0]])
    targets = jnp.array([1, 2, 0, 0, 2])
    np.testing.assert_allclose(accuracy(logits, targets)[0], 3 / 5)
    mean, count = accuracy(logits, targets, jnp.array([1.0, 3.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(mean, 1 / 4)
    assert count == 4


def test_bits():
    np.testing.assert_allclose(bits_per_token(cross_entropy(jnp.zeros((3, 8)), jnp.arange(3))[0]), 3, rtol=1e-6)
    assert bits_per_token(jnp.bfloat16(1)).dtype == jnp.float32


def test_traced_ids_outside_give_nan_and_not_another_class():
    losses = jax.jit(token_losses)(jnp.zeros((4, 3)), jnp.array([-1, 3, 2, -3]))
    np.testing.assert_allclose(losses, [np.nan, np.nan, np.log(3), np.nan], rtol=1e-6)


def test_same_under_jit_and_vmap():
    logits, targets, weights = problem(6)
    for measure in (cross_entropy, accuracy):
        direct = measure(logits, targets, weights)
        np.testing.assert_allclose(jax.jit(measure)(logits, targets, weights), direct, rtol=1e-6)
        mapped = jax.vmap(measure)(logits, targets, weights)
        np.testing.assert_allclose(mapped[0][1], measure(logits[1], targets[1], weights[1])[0], rtol=1e-6)


@pytest.mark.parametrize("measure", [cross_entropy, accuracy, token_losses])
@pytest.mark.parametrize(
    ("logits", "targets", "weights", "error", "message"),
    [
        (np.zeros((2, 3), int), [0, 0], None, TypeError, "logits must have a floating dtype, got int"),
        (np.zeros(()), 0, None, ValueError, r"logits must have at least 1 axes, \[\*B, C\]"),
        (np.zeros((2, 0)), [0, 0], None, ValueError, r"logits must have at least one class"),
        (np.zeros((2, 3)), [0.0, 0.0], None, TypeError, "targets must have an integer dtype, got float"),
        (np.zeros((2, 3)), [0, 0, 0], None, ValueError, r"targets must have shape \[\*B\] = \(2,\), got \(3,\)"),
        (np.zeros((2, 3)), [0, 3], None, ValueError, r"targets must lie in 0..2, got values in 0..3"),
        (np.zeros((2, 3)), [0, -1], None, ValueError, r"targets must lie in 0..2, got values in -1..0"),
        (np.zeros((2, 3)), [0, 0], [1.0], ValueError, r"weights must have shape \[\*B\] = \(2,\), got \(1,\)"),
        (np.zeros((2, 3)), [0, 0], [1.0, -1.0], ValueError, "weights must be finite and at least 0, got values in -1"),
        (np.zeros((2, 3)), [0, 0], [1.0, np.nan], ValueError, "weights must be finite and at least 0"),
        (np.zeros((2, 3)), [0, 0], [1j, 1], TypeError, "weights must be real, got complex"),
        (np.zeros((2, 3)), [0, 0], "all", TypeError, "weights must be an array, got str 'all'"),
    ],
)
def test_errors(measure, logits, targets, weights, error, message):
    as_given = weights if weights is None or isinstance(weights, str) else np.array(weights)
    with pytest.raises(error, match=message):
        measure(logits, np.array(targets), as_given)


def test_errors_of_options():
    with pytest.raises(ValueError, match="z_loss must be at least 0, got -1"):
        cross_entropy(jnp.zeros((1, 2)), jnp.zeros(1, int), z_loss=-1.0)
    with pytest.raises(TypeError, match="nats must have a floating dtype"):
        bits_per_token(jnp.arange(2))
