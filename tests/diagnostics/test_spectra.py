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


@pytest.mark.parametrize(("of_query", "of_key"), [(1e20, 1), (1e20, 1e20), (1e-30, 1e-15), (1e-30, 1e30)])
def test_no_scale_changes_the_ranks(of_query, of_key):
    query, key = random_pair((9, 2, 8), (9, 2, 8))
    expected = logit_ranks(query, key)
    actual = logit_ranks(np.float32(of_query) * query, np.float32(of_key) * key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def test_no_item_no_ranks():
    ranks = logit_ranks(np.zeros((0, 3, 4, 8), np.float32), np.zeros((0, 3, 2, 8), np.float32))
    assert ranks.numerical.shape == ranks.effective.shape == (0, 4)


def test_scores_that_are_not_finite_have_no_rank():
    query, key = random_pair((9, 2, 8), (9, 2, 8))
    query[3, 0, 1] = np.nan
    ranks = logit_ranks(query, key)
    np.testing.assert_array_equal(ranks.numerical, [-1, 8])
    np.testing.assert_array_equal(np.isnan(ranks.effective), [True, False])


def test_equal_keys_have_no_scores():
    query, key = random_pair((31, 2, 8), (1, 2, 8))
    ranks = logit_ranks(query, key.repeat(31, axis=0))
    for values in (ranks.numerical, ranks.stable, ranks.effective):
        np.testing.assert_array_equal(values, [0, 0])
    np.testing.assert_allclose(logit_spectrum(query, key.repeat(31, axis=0)), 0, atol=1e-5)


@pytest.mark.parametrize("unlike", [1.0, 1e4, np.nan])
@pytest.mark.parametrize("centred", [True, False])
def test_only_what_counts(unlike, centred):
    query, key = random_pair((2, 17, 4, 8), (2, 23, 2, 8), mean=3.0)
    rng = np.random.default_rng(1)
    queries, keys = rng.random((2, 17, 4)) < 0.7, rng.random((2, 23, 4)) < 0.7
    queries[0, :, 0] = keys[0, :, 2] = False
    queries[1, :, 3] = np.arange(17) < 5  # fewer than H
    query[~queries] *= unlike
    key[~keys.reshape(2, 23, 2, 2).any(-1)] *= unlike
    sigma = logit_spectrum(query, key, scale=1.0, centred=centred, query_mask=queries, key_mask=keys)
    ranks = logit_ranks(query, key, centred=centred, query_mask=queries, key_mask=keys)
    for b, n in np.ndindex(2, 4):
        q, k = query[b, queries[b, :, n], n][:, None], key[b, keys[b, :, n], n // 2][:, None]
        expected = np.zeros(8)
        if len(q) and len(k):
            cut = reference_spectrum(q, k, 1.0, centred)[0][:8]
            expected[: len(cut)] = cut
        np.testing.assert_allclose(sigma[b, n], expected, atol=3e-6 * expected.max())
        share = expected[expected > 1e-9] / max(expected.sum(), 1e-9)
        assert ranks.numerical[b, n] == len(share)
        np.testing.assert_allclose(ranks.stable[b, n], (share**2).sum() / max(share, default=1) ** 2, rtol=1e-5)
        effective = np.exp(-(share * np.log(share)).sum()) if len(share) else 0
        np.testing.assert_allclose(ranks.effective[b, n], effective, rtol=1e-5)


def test_the_tolerance_is_that_of_what_counts():
    # The second direction is 1e-4 of the first: above the rounding of 4 rows, below that of 2000.
    query = np.zeros((2000, 1, 2), np.float32)
    query[:2, 0] = [[1, 0], [0, 1e-4]]
    key = np.zeros((4, 1, 2), np.float32)
    key[:, 0] = [[1, 1], [-1, 1], [1, -1], [-1, -1]]
    counted = (np.arange(2000) < 4)[:, None]
    assert logit_ranks(query, key).numerical == 1
    assert logit_ranks(query, key, query_mask=counted).numerical == 2


def test_gradient_past_what_does_not_count(x64):
    query, key = (x.astype(np.float64) for x in random_pair((7, 1, 4), (9, 1, 4)))
    queries, keys = (np.arange(7) < 6)[:, None], (np.arange(9) > 2)[:, None]
    query[6] = key[0] = np.nan

    def energy(q, k, **masks):
        return (logit_spectrum(q, k, **masks) ** 2).sum()

    gradients = jax.grad(energy, (0, 1))(query, key, query_mask=queries, key_mask=keys)
    alone = jax.grad(energy, (0, 1))(query[:6], key[3:])
    np.testing.assert_allclose(gradients[0], np.concatenate([alone[0], np.zeros((1, 1, 4))]), atol=1e-12)
    np.testing.assert_allclose(gradients[1], np.concatenate([np.zeros((3, 1, 4)), alone[1]]), atol=1e-12)


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
    for measure in (logit_spectrum, logit_ranks):
        with pytest.raises(TypeError, match="query_mask must be boolean, got int32"):
            measure(x, x, query_mask=jnp.ones((3, 2), int))
        with pytest.raises(ValueError, match=r"key_mask must have shape \[\*B, S, N\] = \(3, 2\), got \(3, 1\)"):
            measure(x, x, key_mask=jnp.ones((3, 1), bool))
