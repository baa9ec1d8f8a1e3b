"""Scale factors, temperature, QK-norm and the soft cap."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from attn_jax import positions, scaling

X = np.random.default_rng(0).standard_normal((2, 3, 4, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("inverse_sqrt", 1 / 8),
        ("none", 1.0),
        ("inverse", 1 / 64),
        ("inverse_sqrt_model", 1 / 16),
        ("half_inverse_sqrt", 1 / 16),
        ("half_inverse", 1 / 128),
        (0.3, 0.3),
        (-2, -2.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_scale_factor(rule, expected):
    factor = scaling.scale_factor(rule, 64, 256)
    assert type(factor) is float
    assert factor == expected


def rms_oracle(x, axes, weight=1.0, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + epsilon) * weight


class ScalingTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_temperature_divides_per_head(self):
        log_temperature = np.array([0.0, 0.5, -1.0, 2.0], np.float32)
        y = self.variant(scaling.temperature)(X, log_temperature)
        for n in range(4):
            np.testing.assert_allclose(y[:, :, n], X[:, :, n] / np.exp(log_temperature[n]), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_rms_norm_per_head(self):
        weight = np.linspace(0.5, 2.0, 8).astype(np.float32)
        norm = self.variant(scaling.rms_norm)
        np.testing.assert_allclose(norm(X), rms_oracle(X, -1), rtol=1e-5)
        np.testing.assert_allclose(norm(X, weight), rms_oracle(X, -1, weight), rtol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_rms_norm_over_all_heads_when_the_weight_spans_them(self):
        weight = np.linspace(0.5, 2.0, 32).astype(np.float32)
        y = self.variant(scaling.rms_norm)(X, weight)
        flat = rms_oracle(X.reshape(2, 3, 32), -1, weight)
        np.testing.assert_allclose(y.reshape(2, 3, 32), flat, rtol=1e-5)
        assert np.max(np.abs(y - rms_oracle(X, -1, weight.reshape(4, 8)))) > 0.1  # not the norm per head

    @chex.variants(with_jit=True, without_jit=True)
    def test_l2_norm_gives_cosines(self):
        y = self.variant(lambda x: scaling.l2_norm(x, epsilon=0.0))(X)
        np.testing.assert_allclose(np.linalg.norm(y, axis=-1), 1.0, rtol=1e-6)
        np.testing.assert_allclose(y, X / np.linalg.norm(X, axis=-1, keepdims=True), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(norm=["rms_norm", "l2_norm"], epsilon=[0.0, 1e-6], dtype=["float32", "bfloat16"])
    def test_a_zero_vector_is_finite_forward_and_backward(self, norm, epsilon, dtype):
        x = jnp.asarray(X).astype(dtype).at[0, 0, 0].set(0.0)

        def loss(x):
            y = getattr(scaling, norm)(x, epsilon=epsilon)
            return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(y[0, 0, 0].astype(jnp.float32)), y

        grad, y = self.variant(jax.grad(loss, has_aux=True))(x)
        np.testing.assert_array_equal(y[0, 0, 0], np.zeros(8))
        chex.assert_tree_all_finite((grad, y))
        assert y.dtype == grad.dtype == x.dtype

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(norm=["rms_norm", "l2_norm"], dtype=["float32", "bfloat16"])
    def test_size_is_taken_out_of_every_finite_vector(self, norm, dtype):
        unit = 1.0 if norm == "rms_norm" else 0.5

        def loss(x):
            y = getattr(scaling, norm)(x, epsilon=0.0)
            return y[0, 0, 0, 0].astype(jnp.float32), y

        gradient_of = self.variant(jax.grad(loss, has_aux=True))
        for size in (1e-37, 1e-30, 1e-20, 1e20, 1e36, 3e38):
            x = jnp.full((1, 1, 1, 4), size, dtype)
            gradient, y = gradient_of(x)
            np.testing.assert_allclose(y.astype(np.float32), unit, rtol=2e-7)
            slopes = unit * np.array([0.75, -0.25, -0.25, -0.25]) / np.float64(x[0, 0, 0, 0])  # unit (δ_0i - 1/4) / x
            np.testing.assert_allclose(np.float64(gradient[0, 0, 0]), slopes, rtol=1e-2, atol=2e-38)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(1e-12, 1e-6, 0.5, 1e20)
    def test_epsilon_keeps_its_meaning_at_every_size(self, epsilon):
        rms = self.variant(lambda x: scaling.rms_norm(x, epsilon=epsilon))
        l2 = self.variant(lambda x: scaling.l2_norm(x, epsilon=epsilon))
        for size in (1e-30, 1e-10, 1e-3, 1.0, 1e10, 1e30):
            x = (X * np.float32(size)).astype(np.float32)
            exact = x.astype(np.float64)
            np.testing.assert_allclose(rms(x), rms_oracle(exact, -1, epsilon=epsilon), rtol=2e-6, atol=1e-37)
            expected = exact / np.sqrt(np.sum(exact**2, axis=-1, keepdims=True) + epsilon)
            np.testing.assert_allclose(l2(x), expected, rtol=2e-6, atol=1e-37)

    @chex.variants(without_jit=True)  # XLA fuses the two programs differently
    def test_ordinary_vectors_are_normed_as_they_are_written(self):
        """To the last bit: taking out a power of two rounds nothing."""
        weight = np.linspace(0.5, 2.0, 32).astype(np.float32)

        def plain(x, weight):
            square = jnp.mean(jnp.square(x), axis=(-2, -1), keepdims=True)
            return x * jax.lax.rsqrt(square + 1e-6) * weight.reshape(1, 1, 4, 8)

        np.testing.assert_array_equal(self.variant(scaling.rms_norm)(X, weight), self.variant(plain)(X, weight))
        plain_l2 = self.variant(lambda x: x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6))
        np.testing.assert_array_equal(self.variant(scaling.l2_norm)(X), plain_l2(X))

    @chex.variants(with_jit=True, without_jit=True)
    def test_norm_before_rotation_is_not_rotation_before_norm(self):
        x, weight = np.array([[[1.0, 0, 0, 0]]], np.float32), np.array([1.0, 2, 3, 4], np.float32)

        def norm(x, weight):
            return scaling.rms_norm(x, weight, epsilon=0.0)

        def rotate(x):
            return positions.apply_rotary(x, jnp.array([1]))

        norm_first = self.variant(lambda x, w: rotate(norm(x, w)))
        rotation_first = self.variant(lambda x, w: norm(rotate(x), w))
        np.testing.assert_allclose(norm_first(x, weight)[0, 0], [1.0806, 0, 1.6829, 0], atol=5e-5)
        np.testing.assert_allclose(rotation_first(x, weight)[0, 0], [1.0806, 0, 5.0488, 0], atol=5e-5)
        # a weight that is equal inside each rotated pair commutes with the rotation
        for equal in (np.ones(4, np.float32), np.array([2.0, 3, 2, 3], np.float32)):
            np.testing.assert_allclose(norm_first(x, equal), rotation_first(x, equal), atol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    def test_soft_cap(self):
        logits = np.array([-np.inf, -1e4, -3.0, 0.0, 3.0, np.inf], np.float32)
        capped = self.variant(lambda x: scaling.soft_cap(x, 5.0))(logits)
        np.testing.assert_allclose(capped, 5.0 * np.tanh(logits.astype(np.float64) / 5.0), rtol=1e-6)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(None, 1e6, 1e30)
    def test_a_large_cap_or_none_changes_nothing(self, cap):
        np.testing.assert_allclose(self.variant(lambda x: scaling.soft_cap(x, cap))(X), X, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_is_computed_wide_and_rounded_once(dtype):
    x, log_temperature = jnp.asarray(X).astype(dtype), jnp.array([0.1, 0.2, 0.3, 0.4])
    exact = np.asarray(x, np.float64)
    pairs = [
        (scaling.rms_norm(x), rms_oracle(exact, -1)),
        (scaling.l2_norm(x), exact / np.sqrt(np.sum(exact**2, axis=-1, keepdims=True) + 1e-6)),
        (scaling.temperature(x, log_temperature), exact * np.exp(-np.array([0.1, 0.2, 0.3, 0.4]))[:, None]),
        (scaling.soft_cap(x, 1.7), 1.7 * np.tanh(exact / 1.7)),
    ]
    for actual, expected in pairs:
        assert actual.dtype == x.dtype
        half_ulp = 0.5 * float(jnp.finfo(dtype).eps) * np.abs(expected)
        assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= half_ulp + 1e-6)


def test_gradients(x64):
    x = jnp.asarray(X[0, :2], jnp.float64)
    weight = jnp.linspace(0.5, 2.0, 32)
    chex.assert_numerical_grads(lambda x: scaling.rms_norm(x, weight), (x,), order=1, atol=1e-6)
    chex.assert_numerical_grads(scaling.l2_norm, (x,), order=1, atol=1e-6)
    chex.assert_numerical_grads(lambda x: scaling.soft_cap(x, 2.0), (x,), order=1, atol=1e-6)


def test_float64_stays_float64(x64):
    x = X.astype(np.float64)
    np.testing.assert_allclose(scaling.rms_norm(x), rms_oracle(x, -1), rtol=1e-14)
    np.testing.assert_allclose(scaling.soft_cap(x, 2.0), 2 * np.tanh(x / 2), rtol=1e-14)


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        (ValueError, lambda: scaling.scale_factor("sqrt", 64), "rule must be one of 'inverse_sqrt', .*; got 'sqrt'"),
        (ValueError, lambda: scaling.scale_factor(math.inf, 64), "rule must be finite, got inf"),
        (TypeError, lambda: scaling.scale_factor(None, 64), "rule must be one number, got NoneType"),
        (ValueError, lambda: scaling.scale_factor("none", 0), "head_width must be at least 1, got 0"),
        (ValueError, lambda: scaling.scale_factor("inverse_sqrt_model", 64), "model_width must be given"),
        (TypeError, lambda: scaling.scale_factor("none", 64, 2.5), "model_width must be an integer"),
        (ValueError, lambda: scaling.temperature(X, np.zeros(8, np.float32)), r"\[N\] = \(4,\), got \(8,\)"),
        (ValueError, lambda: scaling.temperature(X[0, 0], np.zeros(3, np.float32)), "query must have at least 3 axes"),
        (ValueError, lambda: scaling.rms_norm(X, np.ones(7)), r"\[H\] = \(8,\) or \[N\*H\] = \(32,\) .* got \(7,\)"),
        (ValueError, lambda: scaling.rms_norm(X, np.ones((4, 8))), r"weight must have shape .* got \(4, 8\)"),
        (ValueError, lambda: scaling.rms_norm(X, epsilon=-1e-6), "epsilon must be at least 0, got -1e-06"),
        (TypeError, lambda: scaling.rms_norm(np.ones((2, 3), int)), "x must have a floating dtype, got int32"),
        (ValueError, lambda: scaling.l2_norm(X, epsilon=math.nan), "epsilon must be finite, got nan"),
        (ValueError, lambda: scaling.soft_cap(X, 0.0), "cap must be positive and finite, got 0.0"),
        (ValueError, lambda: scaling.soft_cap(X, -5.0), "cap must be positive and finite, got -5.0"),
        (ValueError, lambda: scaling.soft_cap(X, math.inf), "cap must be positive and finite, got inf"),
        (ValueError, lambda: scaling.soft_cap(X, 1e-39), "cap must be at least 1.17549e-38, got 1e-39"),
        (TypeError, lambda: scaling.soft_cap(X, "50"), "cap must be one number, got str '50'"),
    ],
)
def test_wrong_arguments_raise(error, call, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
