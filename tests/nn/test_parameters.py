"""Weights that are kept output-major: read, set and differentiated as those of the usual order."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.nn.parameters import OutputMajor

CONFIG = TransformerConfig(17, 3, 12, 6, num_kv_heads=2, head_width=4, mlp_width=10, head="untied")
IDS = np.arange(5)
WEIGHTS = {
    "head_weight", "query_weight", "key_weight", "value_weight", "output_weight", "gate_weight", "up_weight",
    "down_weight",
}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    """One model, and the same with every weight of a product kept output-major."""
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    flat, changed = [], set()
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        if "fan_in" in metadata:
            fan_in, fan_out = metadata["fan_in"], metadata["fan_out"]
            weight = np.asarray(variable[...])
            stack = weight.shape[: weight.ndim - len(fan_in + fan_out)]
            kept = weight.reshape(*stack, math.prod(fan_in), math.prod(fan_out)).swapaxes(-1, -2)
            variable = OutputMajor(jnp.asarray(kept), fan_in=fan_in, fan_out=fan_out)
            changed.add(path[-1])
        flat.append((path, variable))
    assert changed == WEIGHTS
    return model, nnx.merge(graph, nnx.from_flat_state(flat))


def test_reads_and_computes_the_same(pair):
    model, kept = pair
    weight, other = model.layers.attention.output_weight, kept.layers.attention.output_weight
    assert other.get_raw_value().shape == (3, 12, 24)
    for index in (..., 0, (1, 2), (..., -1), (slice(1, 3), slice(None), 0)):
        chex.assert_trees_all_equal(other[index], weight[index])
    chex.assert_trees_all_close(kept(IDS), model(IDS), rtol=1e-5, atol=1e-5)


def test_gradients_are_the_same(pair):
    def loss(model):
        return (model(IDS) ** 2).sum()

    usual, kept = (nnx.to_flat_state(nnx.state(nnx.jit(nnx.grad(loss))(model))) for model in pair)
    for (path, gradient), (_, other) in zip(usual, kept, strict=True):
        if path[-1] in WEIGHTS:
            assert isinstance(other, OutputMajor)
        np.testing.assert_allclose(other[...], gradient[...], rtol=1e-4, atol=1e-4, err_msg=str(path))


def test_is_set_as_it_is_read(pair):
    weight = OutputMajor(jnp.zeros((3, 24, 12)), fan_in=(12,), fan_out=(6, 4))
    values = np.random.default_rng(0).standard_normal((3, 12, 6, 4)).astype(np.float32)
    weight[...] = values
    chex.assert_trees_all_equal(weight[...], values)
    weight[1, :, 2] = np.ones((12, 4), np.float32)
    values[1, :, 2] = 1
    chex.assert_trees_all_equal(weight[...], values)
    assert weight.get_raw_value().shape == (3, 24, 12)


def test_shows_itself_whatever_it_holds(pair):
    _, kept = pair
    assert "OutputMajor" in repr(nnx.eval_shape(lambda: kept).layers.attention.query_weight)
    assert "OutputMajor" in repr(jax.tree.map(jnp.shape, kept).layers.attention.query_weight)
