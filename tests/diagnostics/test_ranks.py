"""Ranks: the reference values at n = 128, low precision, and matrices of zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics.ranks import effective_rank, numerical_rank, rank_one_residual, stable_rank

N = 128
UNIFORM_CAUSAL = np.tril(np.ones((N, N))) / np.arange(1, N + 1)[:, None]
ONE_KEY = np.eye(N)[:1].repeat(N, axis=0)
PATTERNS = np.stack([np.eye(N), np.full((N, N), 1 / N), UNIFORM_CAUSAL, ONE_KEY, 0.9 * ONE_KEY + 0.1 * np.eye(N)])


def rank_two(rng, n=256):
    return rng.normal(size=(n, 2)) @ rng.normal(size=(2, n))


def reference_ranks(matrix):
    sigma = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    q = sigma / sigma.sum()
    q = q[q > 0]
    return (sigma**2).sum() / sigma[0] ** 2, np.exp(-(q * np.log(q)).sum())


def test_reference_values():
    patterns = jnp.asarray(PATTERNS, jnp.float32)
    np.testing.assert_array_equal(numerical_rank(patterns), [128, 1, 128, 1, 128])
    np.testing.assert_allclose(stable_rank(patterns), [128, 1, 2.0, 1, 1.01], rtol=0.025)
    np.testing.assert_allclose(effective_rank(patterns), [128, 1, 32, 1, 28.9], rtol=0.01)
    stable, effective = np.transpose([reference_ranks(m) for m in PATTERNS])
    np.testing.assert_allclose(stable_rank(patterns), stable, rtol=1e-5)
    np.testing.assert_allclose(effective_rank(patterns), effective, rtol=2e-4)


def test_reference_values_in_float64(x64):
    np.testing.assert_array_equal(numerical_rank(jnp.asarray(PATTERNS)), [128, 1, 128, 1, 128])
    stable, effective = np.transpose([reference_ranks(m) for m in PATTERNS])
    assert stable_rank(jnp.asarray(PATTERNS)).dtype == jnp.float64
    np.testing.assert_allclose(stable_rank(jnp.asarray(PATTERNS)), stable, rtol=1e-12)
    np.testing.assert_allclose(effective_rank(jnp.asarray(PATTERNS)), effective, rtol=1e-10)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_numerical_rank_in_low_precision(dtype):
    blocks = np.kron(np.eye(2), np.ones((128, 128)))
    batch = np.stack([blocks, rank_two(np.random.default_rng(0)), np.zeros((256, 256))])
    np.testing.assert_array_equal(numerical_rank(jnp.asarray(batch, dtype)), [2, 2, 0])


def test_numerical_rank_where_naive_tolerances_fail():
    rounded = jnp.asarray(rank_two(np.random.default_rng(0)), jnp.bfloat16)
    sigma = np.linalg.svd(np.asarray(rounded.astype(jnp.float32)), compute_uv=False)
    assert (sigma > 256 * np.finfo(np.float32).eps * sigma[0]).sum() > 100
    assert (sigma > 256 * float(jnp.finfo(jnp.bfloat16).eps) * sigma[0]).sum() == 0
    assert numerical_rank(rounded) == 2


def test_uniform_causal_weights_have_full_rank():
    n = 256
    weights = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    assert numerical_rank(weights.astype(np.float32)) == n


def test_zero_matrices_and_their_gradients():
    zero = jnp.zeros((2, 3, 4))
    np.testing.assert_array_equal(numerical_rank(zero), [0, 0])
    for f in (stable_rank, effective_rank, rank_one_residual):
        np.testing.assert_array_equal(f(zero), [0, 0])
        gradient = jax.jit(jax.grad(lambda m, f=f: f(m).sum()))
        for matrix in (zero, zero + 1, zero.at[0].set(jnp.eye(3, 4))):  # equal and vanishing singular values
            assert np.isfinite(gradient(matrix)).all()


def test_not_finite_is_marked():
    matrices = jnp.stack([jnp.eye(3), jnp.eye(3).at[0, 1].set(jnp.nan)])
    np.testing.assert_array_equal(numerical_rank(matrices), [3, -1])
    assert np.isnan(stable_rank(matrices)[1])
    assert np.isnan(effective_rank(matrices)[1])


def test_tolerance():
    matrix = jnp.diag(jnp.array([3.0, 2.0, 1.0]))
    assert numerical_rank(matrix, tolerance=1.5) == 2
    assert numerical_rank(matrix, tolerance=1) == 2  # above, not at
    batch = jnp.stack([matrix, matrix])
    np.testing.assert_array_equal(numerical_rank(batch, tolerance=jnp.array([0.5, 2.5])), [3, 1])
    np.testing.assert_array_equal(jax.jit(lambda m, t: numerical_rank(m, tolerance=t))(batch, 1.5), [2, 2])


def test_scale_does_not_matter():
    matrix = np.random.default_rng(1).normal(size=(5, 9)).astype(np.float32)
    for f in (numerical_rank, stable_rank, effective_rank, rank_one_residual):
        reference = f(matrix)
        for factor in (1e-30, 1e30):
            np.testing.assert_allclose(f(matrix * np.float32(factor)), reference, rtol=1e-5)


def test_same_under_jit_and_vmap():
    batch = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 6, 4)), jnp.float32)
    for f in (numerical_rank, stable_rank, effective_rank, rank_one_residual):
        assert f(batch).shape == (2, 3)
        np.testing.assert_allclose(jax.jit(f)(batch), f(batch), rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(jax.vmap(f))(batch), f(batch), rtol=1e-6)


def residual64(x, norm):
    x = np.asarray(x, np.float64)
    r = x - x.mean(0)
    if norm == "frobenius":
        return np.linalg.norm(r) / np.linalg.norm(x)
    sizes = [np.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf)) for m in (r, x)]
    return sizes[0] / sizes[1]


@pytest.mark.parametrize("norm", ["frobenius", "l1_linf"])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-5])
def test_rank_one_residual(norm, spread):
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(1, 8)) + spread * rng.normal(size=(20, 8))).astype(np.float32)
    np.testing.assert_allclose(rank_one_residual(x, norm=norm), residual64(x, norm), rtol=1e-5)
    half = jnp.asarray(x, jnp.bfloat16)
    stored = np.asarray(half.astype(jnp.float32))
    np.testing.assert_allclose(rank_one_residual(half, norm=norm), residual64(stored, norm), rtol=1e-5, atol=1e-9)


def test_equal_tokens_have_no_residual():
    x = np.random.default_rng(4).normal(size=(1, 8)).astype(np.float32).repeat(37, axis=0)
    assert rank_one_residual(x) == 0
    assert rank_one_residual(x, norm="l1_linf") == 0
    massive = jnp.asarray(x).at[0, 3].set(1000.0)
    assert rank_one_residual(massive) > 0.5
    assert rank_one_residual(massive[1:]) == 0


@pytest.mark.parametrize("f", [numerical_rank, stable_rank, effective_rank, rank_one_residual])
def test_errors(f):
    with pytest.raises(TypeError, match="must have a floating dtype, got int32"):
        f(jnp.ones((3, 3), int))
    with pytest.raises(ValueError, match="must have at least 2 axes"):
        f(jnp.ones(3))
    with pytest.raises(ValueError, match="must not be empty along its last 2 axes"):
        f(jnp.ones((2, 0, 3)))


@pytest.mark.parametrize(
    ("tolerance", "error"),
    [(-1.0, ValueError), (float("nan"), ValueError), (jnp.ones(3), ValueError), (True, TypeError), ("a", TypeError)],
)
def test_tolerance_errors(tolerance, error):
    with pytest.raises(error, match="tolerance"):
        numerical_rank(jnp.ones((2, 3, 3)), tolerance=tolerance)


def test_norm_error():
    with pytest.raises(ValueError, match="norm must be one of 'frobenius', 'l1_linf'; got 'l2'"):
        rank_one_residual(jnp.ones((2, 2)), norm="l2")
