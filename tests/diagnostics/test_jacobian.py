"""The softmax Jacobian against the matrix itself in float64, near one-hot above all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics import jacobian as measures
from attn_jax.diagnostics.jacobian import jacobian_norm_from_tails

# Compiled whole: op by op, every new shape would compile a dozen kernels.
softmax_jacobian_norm, softmax_jacobian_trace = map(
    jax.jit, (measures.softmax_jacobian_norm, measures.softmax_jacobian_trace)
)


def jacobian(p):
    p = np.asarray(p, np.float64)
    p = p / p.sum(-1, keepdims=True)
    return np.eye(p.shape[-1]) * p[..., None] - p[..., :, None] * p[..., None, :]


def near_one_hot(gap, n=50):
    return np.where(np.arange(n) == 7, 1 - gap, gap / (n - 1))


def rows():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 50)) * np.array([0, 0.1, 1, 5, 10, 20])[:, None]
    return np.exp(logits - logits.max(-1, keepdims=True))


def test_against_the_matrix():
    weights = rows().astype(np.float32)
    matrices = jacobian(weights)
    np.testing.assert_allclose(softmax_jacobian_norm(weights), np.linalg.norm(matrices, axis=(-2, -1)), rtol=2e-6)
    np.testing.assert_allclose(softmax_jacobian_trace(weights), np.trace(matrices, axis1=-2, axis2=-1), rtol=2e-6)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6, 1e-8])
def test_float32_keeps_its_digits_near_one_hot(gap):
    weights = near_one_hot(gap).astype(np.float32)
    truth = jacobian(near_one_hot(gap))
    np.testing.assert_allclose(softmax_jacobian_norm(weights), np.linalg.norm(truth), rtol=1e-5)
    np.testing.assert_allclose(softmax_jacobian_trace(weights), np.trace(truth), rtol=1e-5)


def test_the_textbook_form_would_fail():
    p = near_one_hot(1e-4).astype(np.float32)
    textbook = (p**2).sum() - 2 * (p**3).sum() + (p**2).sum() ** 2
    truth = np.linalg.norm(jacobian(near_one_hot(1e-4)))
    assert not abs(np.sqrt(np.maximum(textbook, 0)) / truth - 1) < 0.1


def test_limits():
    n = 16
    np.testing.assert_allclose(softmax_jacobian_norm(jnp.full(n, 1 / n)), np.sqrt(n - 1) / n, rtol=1e-6)
    np.testing.assert_allclose(softmax_jacobian_trace(jnp.full(n, 1 / n)), 1 - 1 / n, rtol=1e-6)
    for f in (softmax_jacobian_norm, softmax_jacobian_trace):
        np.testing.assert_allclose(f(jnp.array([0.5, 0.5, 0.0])), 0.5, rtol=1e-6)
        weights = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # one-hot; a row that sees nothing
        np.testing.assert_array_equal(f(weights), [0, 0])
        assert np.isfinite(jax.grad(lambda w, f=f: f(w).sum())(weights)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rows_are_renormalised(dtype):
    weights = jnp.asarray(rows() / rows().sum(-1, keepdims=True), dtype)
    stored = np.asarray(weights.astype(jnp.float32))
    result = softmax_jacobian_norm(weights)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, np.linalg.norm(jacobian(stored), axis=(-2, -1)), rtol=1e-5)


def test_from_tails_and_in_float64(x64):
    p = jnp.asarray(rows() / rows().sum(-1, keepdims=True))
    tails = [np.asarray([np.sum(np.delete(row, row.argmax()) ** r) for row in np.asarray(p)]) for r in (1, 2, 3)]
    truth = np.linalg.norm(jacobian(p), axis=(-2, -1))
    np.testing.assert_allclose(jacobian_norm_from_tails(p.max(-1), *tails), truth, rtol=1e-12)
    assert softmax_jacobian_norm(p).dtype == jnp.float64
    np.testing.assert_allclose(softmax_jacobian_norm(p), truth, rtol=1e-12)


def test_same_under_jit_and_vmap_with_the_right_gradient(x64):
    p = jnp.asarray(rows() / rows().sum(-1, keepdims=True))[2:4]
    for f in (softmax_jacobian_norm, softmax_jacobian_trace):
        with jax.disable_jit():
            eager = f(p)
        np.testing.assert_allclose(f(p), eager, rtol=1e-12)
        np.testing.assert_allclose(jax.vmap(f)(p), eager, rtol=1e-12)

    def textbook(s):
        q = jax.nn.softmax(s, axis=-1)
        return jnp.sqrt((q**2).sum(-1) - 2 * (q**3).sum(-1) + (q**2).sum(-1) ** 2).sum()

    gradient = jax.jit(jax.grad(lambda s: softmax_jacobian_norm(jax.nn.softmax(s, axis=-1)).sum()))(jnp.log(p))
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(textbook))(jnp.log(p)), atol=1e-12)


@pytest.mark.parametrize("f", [softmax_jacobian_norm, softmax_jacobian_trace])
def test_errors(f):
    with pytest.raises(TypeError, match="weights must have a floating dtype, got int32"):
        f(jnp.ones(3, int))
    with pytest.raises(ValueError, match="weights must have at least 1 axes"):
        f(jnp.float32(1))
    with pytest.raises(ValueError, match=r"tail_2 must have shape of max_weight = \(2,\), got \(3,\)"):
        jacobian_norm_from_tails(jnp.ones(2), jnp.ones(2), jnp.ones(3), jnp.ones(2))
