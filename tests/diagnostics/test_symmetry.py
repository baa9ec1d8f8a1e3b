"""Symmetry of scores and of query–key weights, by definition in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics.symmetry import matrix_symmetry, score_asymmetry, weight_symmetry


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def asymmetry64(s):
    t = np.swapaxes(s, -1, -2)
    return (((s - t) / 2) ** 2).sum((-2, -1)) / (s**2).sum((-2, -1))


def symmetry64(w):
    return np.trace(w @ w, axis1=-2, axis2=-1) / (w**2).sum((-2, -1))


def test_against_the_definition():
    m = random(2, 3, 9, 9)
    np.testing.assert_allclose(score_asymmetry(m.astype(np.float32)), asymmetry64(m), rtol=1e-5)
    np.testing.assert_allclose(matrix_symmetry(m.astype(np.float32)), symmetry64(m), atol=1e-6)
    half = jnp.asarray(m, jnp.bfloat16)
    assert score_asymmetry(half).dtype == jnp.float32
    stored = np.asarray(half.astype(jnp.float32), np.float64)
    np.testing.assert_allclose(score_asymmetry(half), asymmetry64(stored), rtol=1e-5)
    np.testing.assert_allclose(score_asymmetry(half), (1 - matrix_symmetry(half)) / 2, atol=1e-6)


def test_limits():
    m = random(6, 6).astype(np.float32)
    cases = np.stack([m + m.T, m - m.T, np.zeros((6, 6), np.float32), np.float32(1e-30) * (m + m.T)])
    np.testing.assert_allclose(score_asymmetry(cases), [0, 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(matrix_symmetry(cases), [1, -1, 0, 1], atol=1e-6)
    for f in (score_asymmetry, matrix_symmetry):
        assert np.isfinite(jax.grad(lambda x, f=f: f(x).sum())(jnp.asarray(cases))).all()


def test_small_asymmetry_keeps_its_digits():
    m = random(6, 6)
    nearly = (m + m.T + 1e-4 * (m - m.T)).astype(np.float32)
    np.testing.assert_allclose(score_asymmetry(nearly), asymmetry64(nearly.astype(np.float64)), rtol=1e-5)


def test_tied_weights_with_a_head_apart_and_grouped_keys():
    wq, wk = random(12, 4, 3), random(12, 2, 3, seed=1)
    wq[:, 2] = wk[:, 1]  # head 2 reads key head 1: tied
    dense = np.stack([wq[:, n] @ wk[:, n // 2].T for n in range(4)])
    result = weight_symmetry(wq.astype(np.float32), wk.astype(np.float32))
    np.testing.assert_allclose(result, symmetry64(dense), atol=1e-6)
    np.testing.assert_allclose(result[2], 1, atol=1e-6)
    np.testing.assert_allclose(weight_symmetry(1e-20 * wq, 1e18 * wk), symmetry64(dense), atol=1e-6)
    np.testing.assert_array_equal(weight_symmetry(np.zeros((12, 4, 3), np.float32), wk), np.zeros(4))


def test_float64(x64):
    wq, wk = random(12, 2, 3), random(12, 2, 3, seed=1)
    dense = np.stack([wq[:, n] @ wk[:, n].T for n in range(2)])
    np.testing.assert_allclose(weight_symmetry(wq, wk), symmetry64(dense), rtol=1e-12)
    np.testing.assert_allclose(score_asymmetry(dense), asymmetry64(dense), rtol=1e-12)


def test_same_under_jit_and_vmap():
    m = jnp.asarray(random(2, 9, 9), jnp.float32)
    for f in (score_asymmetry, matrix_symmetry):
        np.testing.assert_allclose(jax.jit(f)(m), f(m), atol=1e-6)
        np.testing.assert_allclose(jax.vmap(f)(m), f(m), atol=1e-6)
    w = jnp.asarray(random(2, 5, 2, 3), jnp.float32)
    separate = np.stack([weight_symmetry(x, x[::-1]) for x in w])
    np.testing.assert_allclose(jax.jit(jax.vmap(weight_symmetry))(w, w[:, ::-1]), separate, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: score_asymmetry(jnp.ones((2, 3))), ValueError, r"scores must be square, .* got shape \(2, 3\)"),
        (lambda: matrix_symmetry(jnp.ones((2, 3))), ValueError, "matrix must be square"),
        (lambda: score_asymmetry(jnp.ones(3)), ValueError, "scores must have at least 2 axes"),
        (lambda: score_asymmetry(jnp.ones((3, 3), int)), TypeError, "scores must have a floating dtype"),
        (lambda: weight_symmetry(jnp.ones((4, 2, 3)), jnp.ones((5, 2, 3))), ValueError, "key_weight must have shape"),
        (lambda: weight_symmetry(jnp.ones((4, 3, 3)), jnp.ones((4, 2, 3))), ValueError, "N = 3 and K = 2"),
        (lambda: weight_symmetry(jnp.ones((2, 4, 3, 3)), jnp.ones((4, 3, 3))), ValueError, "query_weight must have"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_gradient_is_that_of_the_formula(x64):
    m = jnp.asarray(7 * random(5, 5))
    energy, transposed = jnp.sum(m**2), jnp.sum(m * m.T)
    expected = 2 * m.T / energy - 2 * m * transposed / energy**2
    np.testing.assert_allclose(jax.grad(matrix_symmetry)(m), expected, atol=1e-14)
    np.testing.assert_allclose(jax.grad(score_asymmetry)(m), -expected / 2, atol=1e-14)
