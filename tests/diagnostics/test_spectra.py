"""The spectrum of the scores by thin QRs against the singular values of the whole square in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics.spectra import logit_ranks, logit_spectrum


def reference_spectrum(query, key, scale, centred=True):
    """Float64 singular values `[*B, N, min(T, S)]` of the dense scores."""
    q, k = np.asarray(query, np.float64), np.asarray(key, np.float64)
    if centred:
        k = k - k.mean(-3, keepdims=True)
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    return np.linalg.svd(scale * np.einsum("...tnh,...snh->...nts", q, k), compute_uv=False)


def random_pair(shape_q, shape_k, seed=0, mean=0.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape_q).astype(np.float32), (rng.normal(size=shape_k) + mean).astype(np.float32)


@pytest.mark.parametrize(
    ("shape_q", "shape_k"),
    [((2, 17, 4, 8), (2, 23, 2, 8)), ((17, 3, 8), (23, 3, 8)), ((2, 2, 5, 2, 8), (2, 2, 3, 1, 8))],
)
@pytest.mark.parametrize("centred", [True, False])
def test_against_the_whole_square(shape_q, shape_k, centred):
    query, key = random_pair(shape_q, shape_k, mean=3.0)
    expected = reference_spectrum(query, key, 8**-0.5, centred)
    result = logit_spectrum(query, key, centred=centred)
    smallest = min(shape_q[-3], shape_k[-3], 8)
    assert result.shape == (*shape_q[:-3], shape_q[-2], smallest)
    np.testing.assert_allclose(result, expected[..., :smallest], atol=3e-6 * expected.max())
    assert expected[..., smallest:].max(initial=0) < 1e-10
    np.testing.assert_allclose(logit_spectrum(query, key, scale=-2.0, centred=centred), result * 2 * 8**0.5, rtol=1e-5)


def test_float64_and_half_precision(x64):
    query, key = random_pair((9, 2, 4), (9, 2, 4))
    double = logit_spectrum(query.astype(np.float64), key.astype(np.float64))
    assert double.dtype == jnp.float64
    np.testing.assert_allclose(double, reference_spectrum(query, key, 0.5)[..., :4], rtol=1e-12)
    half = jnp.asarray(query, jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    stored = [np.asarray(x.astype(jnp.float32)) for x in half]
    assert logit_spectrum(*half).dtype == jnp.float32
    np.testing.assert_allclose(logit_spectrum(*half), reference_spectrum(*stored, 0.5)[..., :4], atol=3e-5)


def test_the_mean_key_dominates_unless_centred():
    query, key = random_pair((64, 2, 16), (64, 2, 16))
    key = key + 30 * np.random.default_rng(1).normal(size=16).astype(np.float32)
    assert (logit_ranks(query, key).stable > 4).all()
    assert (logit_ranks(query, key, centred=False).stable < 1.1).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ranks_count_the_directions_of_each_head(dtype):
    query, key = random_pair((50, 4, 8), (40, 2, 8))
    key[:, 1, 3:] = 0  # heads 2 and 3 read three directions
    ranks = logit_ranks(jnp.asarray(query, dtype), jnp.asarray(key, dtype))
    np.testing.assert_array_equal(ranks.numerical, [8, 8, 3, 3])
    sigma = reference_spectrum(query, key, 1.0)
    q = np.maximum(sigma / sigma.sum(-1, keepdims=True), 1e-300)
    np.testing.assert_allclose(ranks.effective, np.exp(-(q * np.log(q)).sum(-1)), rtol=0.02)
    np.testing.assert_allclose(ranks.stable, (sigma**2).sum(-1) / sigma[..., 0] ** 2, rtol=0.02)


def test_equal_keys_have_no_scores():
    query, key = random_pair((31, 2, 8), (1, 2, 8))
    ranks = logit_ranks(query, key.repeat(31, axis=0))
    for values in (ranks.numerical, ranks.stable, ranks.effective):
        np.testing.assert_array_equal(values, [0, 0])
    np.testing.assert_allclose(logit_spectrum(query, key.repeat(31, axis=0)), 0, atol=1e-5)


def test_gradient(x64):
    query, key = (x.astype(np.float64) for x in random_pair((7, 2, 4), (6, 1, 4)))

    def dense(q):
        k = (key - key.mean(0)).repeat(2, axis=1)
        scores = jnp.einsum("tnh,snh->nts", q, k)
        return (jnp.linalg.svd(scores, compute_uv=False)[:, :4] ** 2).sum()

    gradient = jax.grad(lambda q: (logit_spectrum(q, key, scale=1.0) ** 2).sum())(query)
    np.testing.assert_allclose(gradient, jax.grad(dense)(jnp.asarray(query)), atol=1e-10)


def test_same_under_jit_and_vmap():
    query, key = random_pair((2, 9, 4, 8), (2, 9, 2, 8))
    for f in (logit_spectrum, logit_ranks):
        reference = jax.tree.leaves(f(query, key))
        for other in (jax.jit(f)(query, key), jax.vmap(f)(query, key)):
            for a, b in zip(jax.tree.leaves(other), reference, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape_q", "shape_k", "message"),
    [
        ((3, 2, 4), (3, 2, 5), "key must have shape"),
        ((2, 3, 2, 4), (3, 3, 2, 4), "key must have shape"),
        ((3, 3, 4), (3, 2, 4), "query heads must be a multiple of key heads, got N = 3 and K = 2"),
        ((3, 4), (3, 4), "query must have at least 3 axes"),
    ],
)
def test_shape_errors(shape_q, shape_k, message):
    with pytest.raises(ValueError, match=message):
        logit_spectrum(jnp.ones(shape_q), jnp.ones(shape_k))


def test_other_errors():
    x = jnp.ones((3, 2, 4))
    with pytest.raises(TypeError, match="key must have a floating dtype, got int32"):
        logit_spectrum(x, x.astype(int))
    with pytest.raises(ValueError, match="scale must be finite"):
        logit_spectrum(x, x, scale=float("inf"))
    with pytest.raises(TypeError, match="centred must be True or False"):
        logit_spectrum(x, x, centred=1)
