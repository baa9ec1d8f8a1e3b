"""The MLP and the norms against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import MLP
from attn_jax.nn.norms import make_norm
from tests.nn import reference

X = np.random.default_rng(0).standard_normal((2, 5, 12))


@pytest.mark.parametrize(
    ("kind", "activation", "use_bias"),
    [("gated", "silu", False), ("gated", "gelu_tanh", True), ("plain", "gelu", True), ("plain", "relu", False)],
)
def test_mlp_equals_the_reference(kind, activation, use_bias, x64):
    options = {"kind": kind, "activation": activation, "use_bias": use_bias, "param_dtype": "float64"}
    mlp = reference.randomized(lambda: MLP(12, 7, rngs=nnx.Rngs(0), **options), 1)
    expected = reference.mlp(reference.parameters(mlp), X, activation)
    np.testing.assert_allclose(mlp(jnp.asarray(X)), expected, rtol=0, atol=1e-12)


def test_mlp_sums_in_float32():
    """1 + 300 / 256 + ... : a bfloat16 running sum of 4096 ones would stop at 256."""
    mlp = MLP(4096, 1, kind="plain", activation="relu", dtype="bfloat16", rngs=nnx.Rngs(0))
    mlp.up_weight[...] = jnp.ones((4096, 1))
    mlp.down_weight[...] = jnp.ones((1, 4096))
    output = mlp(jnp.ones((1, 4096)))
    assert output.dtype == jnp.bfloat16
    assert (output == 4096).all()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_equals_the_reference(kind, x64):
    module = reference.randomized(lambda: make_norm(kind, 12, epsilon=1e-3, param_dtype="float64", rngs=nnx.Rngs(0)), 1)
    expected = reference.norm(kind, reference.parameters(module), X, 1e-3)
    np.testing.assert_allclose(module(jnp.asarray(X)), expected, rtol=0, atol=1e-12)


def test_layer_norm_keeps_its_digits_far_from_zero():
    """The variance is of centred values: mean square minus squared mean would lose all of it here."""
    x = 3000.0 + X
    module = make_norm("layer", 12, rngs=nnx.Rngs(0))
    expected = reference.norm("layer", {"scale": 1.0, "bias": 0.0}, x, 1e-6)
    np.testing.assert_allclose(module(jnp.asarray(x, jnp.float32)), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda r: MLP(12, 0, rngs=r), "inner_width must be at least 1, got 0"),
        (lambda r: MLP(12, 7, kind="glu", rngs=r), "kind must be one of 'gated', 'plain'; got 'glu'"),
        (lambda r: MLP(12, 7, activation="swish", rngs=r), "activation must be one of 'silu'"),
        (lambda r: MLP(12, 7, use_bias=1, rngs=r), "use_bias must be True or False"),
        (lambda r: MLP(12, 7, kernel_init="x", rngs=r), "kernel_init must be callable, got str"),
        (
            lambda r: MLP(12, 7, rngs=r)(jnp.zeros((2, 11))),
            r"x must have width 12 on its last axis, got shape \(2, 11\)",
        ),
        (lambda r: make_norm("batch", 12, rngs=r), "kind must be one of 'rms', 'layer'; got 'batch'"),
        (lambda r: make_norm("rms", 12, epsilon=-1.0, rngs=r), "epsilon must be positive and finite, got -1.0"),
    ],
)
def test_wrong_arguments(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(nnx.Rngs(0))
