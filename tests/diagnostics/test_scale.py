"""The fitted scale against outputs made in NumPy float64 with a known one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics.scale import effective_scale, name_scale

T, N, K, H, V = 24, 4, 2, 16, 5
CAUSAL = np.tril(np.ones((T, T), bool))


def inputs(seed=0, sd=1.0, batch=(2,)):
    rng = np.random.default_rng(seed)
    shapes = ((*batch, T, N, H), (*batch, T, K, H), (*batch, T, K, V))
    q, k, v = (rng.normal(size=shape) for shape in shapes)
    return sd * q, sd * k, v


def attention64(q, k, v, scale, mask=None, bias=0.0):
    """Dense attention with a scale per head `[N]`."""
    k, v = (np.repeat(x, N // K, axis=-2) for x in (k, v))
    logits = np.einsum("...tnh,...snh->...nts", q, k) * np.asarray(scale)[:, None, None] + bias
    logits = np.where(True if mask is None else mask, logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("...nts,...snv->...tnv", p / p.sum(-1, keepdims=True), v)


def single(*arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


fit = jax.jit(lambda q, k, v, o: effective_scale(q, k, v, o, is_causal=True, return_misfit=True))


@pytest.mark.parametrize("sd", [0.3, 1.0, 4.0])
def test_recovers_every_named_scale_per_head(sd):
    q, k, v = inputs(sd=sd)
    for scales in ([1.0, H**-0.5, 1 / H, 0.5 / H], [128**-0.5, 0.5 * H**-0.5, float(H) ** -2, 3.3]):
        output = attention64(q, k, v, scales, CAUSAL)
        c, misfit = fit(*single(q, k, v, output))
        assert c.dtype == jnp.float32
        saturated = sd == 4 and max(scales) >= 1  # one-hot rows say little about c
        np.testing.assert_allclose(c, scales, rtol=1e-3 if saturated else 1e-5, atol=2e-7)
        np.testing.assert_allclose(misfit, 0, atol=2e-6)


def test_half_precision_output():
    q, k, v = inputs()
    q, k, v, output = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, attention64(q, k, v, [0.25] * N, CAUSAL)))
    q, k, v, output = (x.astype(jnp.float32) for x in (q, k, v, output))
    c, misfit = fit(q, k, v, output)
    np.testing.assert_allclose(c, 0.25, rtol=0.02)
    assert (misfit < 0.01).all()
    whole = effective_scale(*(x.astype(jnp.bfloat16) for x in (q, k, v, output)), is_causal=True)
    np.testing.assert_allclose(whole, c, rtol=1e-3)


def test_float64(x64):
    q, k, v = inputs(batch=())
    c = effective_scale(q, k, v, attention64(q, k, v, [0.25, 1.0, 0.01, 0.1]))
    assert c.dtype == jnp.float64
    np.testing.assert_allclose(c, [0.25, 1.0, 0.01, 0.1], rtol=1e-5)


def test_options_and_masks_are_those_of_attention():
    q, k, v = inputs(batch=())
    window = CAUSAL & ~np.tril(CAUSAL, -4)
    output = attention64(q, k, v, [0.25] * N, window)
    for options in ({"mask": jnp.asarray(window)}, {"is_causal": True, "local_window_size": (3, 0)}):
        np.testing.assert_allclose(effective_scale(*single(q, k, v, output), **options), 0.25, rtol=2e-4)
    bias = np.random.default_rng(1).normal(size=(N, T, T))
    output = attention64(q, k, v, [0.25] * N, bias=bias)
    np.testing.assert_allclose(effective_scale(*single(q, k, v, output, bias)), 0.25, rtol=2e-4)


def test_a_wrong_function_shows_in_the_misfit():
    q, k, v = inputs()
    output = np.random.default_rng(2).normal(size=(2, T, N, V))
    assert (fit(*single(q, k, v, output))[1] > 0.5).all()


def test_not_identifiable_is_nan():
    q, k, v = inputs()
    constant = np.ones_like(v)
    output = attention64(q, k, constant, [0.25] * N, CAUSAL)
    assert np.isnan(fit(*single(q, k, constant, output))[0]).all()
    assert np.isnan(effective_scale(*single(q, 0 * k, v, attention64(q, 0 * k, v, [0.25] * N)))).all()
    output = attention64(q, k, v, [0.25] * N, CAUSAL)
    output[0, 0, 1, 0] = np.nan
    np.testing.assert_array_equal(np.isnan(fit(*single(q, k, v, output))[0]), [False, True, False, False])


def test_uniform_weights_end_at_the_low_end():
    q, k, v = inputs()
    assert (fit(*single(q, k, v, attention64(q, k, v, [0.0] * N, CAUSAL)))[0] < 1e-4).all()


def test_vmap_over_layers():
    q, k, v = inputs()
    output = attention64(q, k, v, [0.25, 1.0, 0.01, 0.1])
    stacked = single(q, k, v, output)
    c = jax.vmap(effective_scale)(*stacked)
    assert c.shape == (2, N)
    np.testing.assert_allclose(c, [[0.25, 1.0, 0.01, 0.1]] * 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("c", "rule", "ratio"),
    [
        (0.125, "inverse_sqrt", 1),
        (1.0, "none", 1),
        (1.1 / 64, "inverse", 1.1),
        (1000**-0.5, "inverse_sqrt_model", 1),
        (0.0625, "half_inverse_sqrt", 1),
        (1 / 128, "half_inverse", 1),
        (64**-2, "inverse_square", 1),
    ],
)
def test_names(c, rule, ratio):
    named = name_scale(c, 64, 1000)
    assert named.rule == rule
    np.testing.assert_allclose(named.ratio, ratio, rtol=1e-12)
    np.testing.assert_allclose(named.factor * named.ratio, c, rtol=1e-12)
    assert named.also == ()


def test_names_that_agree():
    assert name_scale(1 / 64, 64, 4096).rule == "inverse"
    assert name_scale(1 / 64, 64, 4096).also == ("inverse_sqrt_model",)
    assert name_scale(np.float32(0.5), 4).also == ()
    assert name_scale(jnp.float32(1.0), 1).rule == "inverse_sqrt"
    assert name_scale(1000**-0.5, 64).rule == "half_inverse_sqrt"  # 1/√D is no candidate without D


def test_errors():
    q, k, v = single(*inputs())
    output = jnp.zeros((2, T, N, V))
    with pytest.raises(ValueError, match="output must have shape"):
        effective_scale(q, k, v, output[..., :-1])
    with pytest.raises(TypeError, match="output must have a floating dtype"):
        effective_scale(q, k, v, output.astype(int))
    with pytest.raises(ValueError, match="scale is not an option here"):
        effective_scale(q, k, v, output, scale=1.0)
    with pytest.raises(ValueError, match="value"):
        effective_scale(q, k, v[:, :-1], output)
    for c in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="c must be positive and finite"):
            name_scale(c, 64)
    with pytest.raises(TypeError, match="head_width must be an integer"):
        name_scale(0.1, 64.0)
    with pytest.raises(ValueError, match="model_width must be at least 1"):
        name_scale(0.1, 64, 0)
