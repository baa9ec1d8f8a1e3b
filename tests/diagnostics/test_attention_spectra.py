"""Leading singular values of the weights, tile by tile, against the float64 singular values of the whole square."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import Blockwise, attention_weights, biases, diagnostics
from attn_jax.diagnostics.attention_spectra import _effective_rank_bounds
from tests import oracles

TILES = Blockwise(queries=16, keys=16)
rng = np.random.default_rng(0)


def attention_spectrum(*arrays, implementation=TILES, **options):
    return diagnostics.attention_spectrum(*arrays, implementation=implementation, **options)


def effective_rank(sigma):
    q = sigma / sigma.sum(-1, keepdims=True)
    return np.exp(-(q * np.log(np.where(q > 0, q, 1))).sum(-1))


def check(spectrum, weights, rtol=1e-4, atol=3e-6):
    """The triplets are those of the weights `[*B, N, T, S]`, and the ranks agree with all their singular values."""
    sigma = np.linalg.svd(weights, compute_uv=False)
    k = spectrum.values.shape[-1]
    largest = np.maximum(sigma[..., :1], 1e-30)
    np.testing.assert_allclose(spectrum.values / largest, sigma[..., :k] / largest, rtol=rtol, atol=atol)
    left, right = (np.swapaxes(np.asarray(x, np.float64), -2, -3) for x in (spectrum.left, spectrum.right))
    for columns in (left, right):
        gram = np.swapaxes(columns, -1, -2) @ columns
        np.testing.assert_allclose(gram, np.broadcast_to(np.eye(k), gram.shape), atol=max(10 * atol, 1e-12))
    values = np.asarray(spectrum.values, np.float64)
    np.testing.assert_allclose(weights @ right, left * values[..., None, :], atol=10 * atol * largest.max())
    residuals = np.linalg.norm(np.swapaxes(weights, -1, -2) @ left - right * values[..., None, :], axis=-2)
    np.testing.assert_allclose(spectrum.residuals, residuals, atol=10 * atol * largest.max())
    np.testing.assert_allclose(spectrum.stable_rank, (sigma**2).sum(-1) / largest[..., 0] ** 2, rtol=10 * rtol)
    truth = effective_rank(sigma)
    assert (spectrum.effective_rank_low <= truth * (1 + rtol)).all()
    assert (spectrum.effective_rank_high >= truth * (1 - rtol)).all()
    assert spectrum.converged.all()


QUERY, KEY = rng.standard_normal((2, 41, 4, 8), np.float32), rng.standard_normal((2, 37, 2, 8), np.float32)
MASK = rng.random((2, 1, 41, 37)) < 0.6
MASK[0, :, 5:9] = False  # queries that see nothing
MASK[1, :, :, 20:] = False  # keys that nobody sees
KEY[1, 20:] = np.nan
LENGTHS, SINKS = np.array([30, 41]), np.array([0.0, 2.0, -3.0, 30.0], np.float32)
EVERYTHING = {
    "bias": biases.Alibi(4), "mask": MASK, "query_seq_lengths": LENGTHS, "sinks": SINKS, "logits_soft_cap": 3.0,
    "scale": 1.5, "local_window_size": (25, 5), "query_offset": 2,
}  # fmt: skip


@functools.cache
def oracle_of_everything():
    return oracles.attention(QUERY, KEY, np.zeros_like(KEY), **(EVERYTHING | {"bias": oracles.alibi(4)})).weights


@pytest.mark.parametrize("implementation", ["dense", TILES])
def test_every_option(implementation):
    spectrum = attention_spectrum(
        QUERY, KEY, **EVERYTHING, k=4, oversampling=3, tolerance=1e-4, implementation=implementation
    )
    assert spectrum.left.shape == (2, 41, 4, 4)
    assert spectrum.right.shape == (2, 37, 4, 4)
    assert (spectrum.iterations > 0) == (implementation is TILES)
    check(spectrum, oracle_of_everything())


def test_nothing_to_see_and_nan():
    """The heads of one item stay themselves whatever the other item holds."""
    options = {"k": 4, "oversampling": 3, "tolerance": 1e-4}
    key = KEY.copy()
    key[0, 3] = np.nan
    spectrum = attention_spectrum(QUERY, key, **EVERYTHING, **options)
    assert np.isnan(spectrum.values[0]).all()
    assert not spectrum.converged[0].any()
    check(jax.tree.map(lambda x: x[1:] if x.ndim else x, spectrum), oracle_of_everything()[1:])
    closed = EVERYTHING | {"mask": MASK & (np.arange(2) == 1)[:, None, None, None]}
    spectrum = attention_spectrum(QUERY, KEY, **closed, **options)
    for field in (spectrum.values, spectrum.stable_rank, spectrum.effective_rank_low, spectrum.effective_rank_high):
        np.testing.assert_array_equal(field[0], 0)
    assert spectrum.converged.all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(spectrum))


def test_a_constant_to_gradients():
    def total(query):
        return attention_spectrum(query, KEY, **EVERYTHING, k=4, oversampling=3, tolerance=1e-4).values.sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.asarray(QUERY)), 0)


N = 128
UNIFORM_CAUSAL = np.tril(np.ones((N, N))) / np.arange(1, N + 1)[:, None]
ONE_KEY = np.eye(N)[:1].repeat(N, axis=0)
PATTERNS = np.stack([np.eye(N), np.full((N, N), 1 / N), UNIFORM_CAUSAL, ONE_KEY, 0.9 * ONE_KEY + 0.1 * np.eye(N)])


def spectrum_of(weights, **options):
    """The spectrum of any rows that sum to 1: softmax of their logarithm."""
    with np.errstate(divide="ignore"):
        bias = np.log(weights)[:, None].astype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)
    zeros = np.zeros((*weights.shape[:2], 1, 1), bias.dtype)
    return attention_spectrum(zeros, zeros, bias, **options)


def test_reference_values():
    spectrum = spectrum_of(PATTERNS, k=8, oversampling=4)
    check(spectrum, PATTERNS[:, None])
    np.testing.assert_allclose(spectrum.stable_rank[:, 0], [128, 1, 2.0, 1, 1.01], rtol=0.025)
    bounds = np.stack([spectrum.effective_rank_low[:, 0], spectrum.effective_rank_high[:, 0]], axis=-1)
    np.testing.assert_allclose(bounds[[0, 1, 3]], [[128, 128], [1, 1], [1, 1]], rtol=2e-3)
    # The others' tails: 120 values that fall off, and 127 of size 0.1, known as such.
    assert bounds[2, 0] < 32 < bounds[2, 1]
    np.testing.assert_allclose(bounds[4], 28.9, rtol=0.01)
    exact = spectrum_of(PATTERNS, k=8, implementation="dense")
    np.testing.assert_array_equal(exact.effective_rank_low, exact.effective_rank_high)
    np.testing.assert_allclose(exact.effective_rank_low[:, 0], [128, 1, 32, 1, 28.9], rtol=0.01)


def test_float64(x64):
    spectrum = spectrum_of(PATTERNS, k=8, oversampling=4, tolerance=1e-9)
    assert spectrum.values.dtype == jnp.float64
    check(spectrum, PATTERNS[:, None], rtol=1e-12, atol=1e-13)


def test_close_values_are_told_apart():
    """A narrow uniform window: the 32 values lie within 6%, and the search stops where it is told to."""
    zeros = np.zeros((600, 1, 1), np.float32)
    weights = oracles.attention(zeros, zeros, zeros, local_window_size=(3, 3)).weights
    sigma = np.linalg.svd(weights, compute_uv=False)[0]
    assert sigma[31] > 0.94 * sigma[1]
    spectrum = attention_spectrum(zeros, zeros, local_window_size=(3, 3), k=32, implementation="blockwise")
    check(spectrum, weights, rtol=1e-3)
    assert spectrum.iterations > 5
    short = attention_spectrum(zeros, zeros, local_window_size=(3, 3), k=32, iterations=3, implementation="blockwise")
    assert short.iterations == 3
    assert not short.converged.any()
    assert (short.values[0] < sigma[:32] * (1 + 1e-6)).all(), "what is found within a subspace is never too large"
    nearest = np.abs(np.asarray(short.values[0])[:, None] - sigma[None]).min(axis=-1)
    assert (nearest <= short.residuals[0] / np.sqrt(2) + 1e-6).all()
    coarse = attention_spectrum(zeros, zeros, local_window_size=(3, 3), tolerance=0.05, implementation="blockwise")
    assert 0 < coarse.iterations < spectrum.iterations
    assert coarse.converged.all()
    other = attention_spectrum(
        zeros, zeros, local_window_size=(3, 3), rng_key=jax.random.key(1), implementation="blockwise"
    )
    np.testing.assert_allclose(other.values, spectrum.values, rtol=1e-4)
    assert np.abs(other.residuals - spectrum.residuals).max() > 0, "another start"


def test_jit_and_vmap():
    @jax.jit
    @jax.vmap
    def measure(query, key, mask, lengths):
        options = EVERYTHING | {"mask": mask, "query_seq_lengths": lengths}
        return attention_spectrum(query, key, **options, k=4, oversampling=3, tolerance=1e-4)

    spectrum = measure(QUERY, KEY, MASK, LENGTHS)
    assert spectrum.iterations.shape == (2,)
    check(spectrum, oracle_of_everything())


def test_half_precision_is_measured_in_float32():
    query, key = (jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY))
    weights = np.asarray(attention_weights(query, key, **EVERYTHING), np.float64)
    for implementation in ("dense", TILES):
        spectrum = attention_spectrum(
            query, key, **EVERYTHING, k=4, oversampling=3, tolerance=1e-4, implementation=implementation
        )
        assert spectrum.values.dtype == jnp.float32
        check(spectrum, weights)


def test_what_is_known_of_the_tail_bounds_the_effective_rank():
    for _ in range(200):
        length, k = rng.integers(3, 60), rng.integers(1, 3)
        sigma = np.sort(rng.random(length) ** rng.choice([0.1, 1, 5, 20]))[::-1]
        low, high = bounds_of(sigma, k)
        assert low <= effective_rank(sigma) * (1 + 1e-5)
        assert high >= effective_rank(sigma) * (1 - 1e-5)


@pytest.mark.parametrize(("tail", "sharp"), [([0.5] * 9, "both"), ([0.2] * 9, "high"), ([0.5] * 4 + [0.0] * 5, "low")])
def test_the_bounds_are_attained(tail, sharp):
    sigma = np.array([1.0, 0.5, *tail])
    low, high = bounds_of(sigma, 2)
    truth = effective_rank(sigma)
    assert (abs(low - truth) < 1e-4) == (sharp != "high")
    assert (abs(high - truth) < 1e-4) == (sharp != "low")


def bounds_of(sigma, k):
    values = jnp.asarray(sigma[:k], jnp.float32)
    energy = jnp.float32((sigma**2).sum() / sigma[0] ** 2)
    return _effective_rank_bounds(values, jnp.zeros_like(values), energy, len(sigma) - k)


def test_memory_grows_with_the_length():
    x = jax.ShapeDtypeStruct((4096, 1, 8), jnp.float32)
    measure = jax.jit(lambda q, k: diagnostics.attention_spectrum(q, k, k=4, oversampling=4, is_causal=True))
    memory = measure.lower(x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096**2  # a quarter of the square


def test_no_head_no_spectrum():
    empty = np.zeros((0, 40, 2, 4), np.float32)
    spectrum = attention_spectrum(empty, empty, k=3, oversampling=2)
    assert spectrum.left.shape == (0, 40, 2, 3)
    assert spectrum.stable_rank.shape == spectrum.converged.shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 38}, ValueError, r"k must be at most min\(T, S\) = 37, got 38"),
        ({"k": 2.0}, TypeError, "k must be an integer"),
        ({"oversampling": 6}, ValueError, r"oversampling must be at most min\(T, S\) - k = 5, got 6"),
        ({"oversampling": -1}, ValueError, "oversampling must be at least 0, got -1"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be positive and finite, got 0.0"),
        ({"rng_key": 0}, TypeError, "rng_key must be one key, as made by"),
        ({"implementation": "xla"}, ValueError, "implementation must be one of 'dense', 'blockwise', None; got 'xla'"),
        ({"dropout_rate": 0.1}, TypeError, "attention_spectrum does not take dropout_rate"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks must have shape"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        attention_spectrum(QUERY, KEY, **options)
