"""Where a run broke: the first thing in the order of computation that is not finite."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from attn_jax.nn import Transformer
from attn_jax.training.divergence import locate
from attn_jax.training.objectives import token_loss
from tests.training import toy

HUGE = 3e38
CONFIG = dataclasses.replace(toy.TRANSFORMER, head="untied", scale_embedding=True, dropout_rate=0.0)


@functools.cache
def healthy():
    return toy.begin(functools.partial(Transformer, CONFIG))


def with_parameter(state, path, value, layer=None):
    """The state with one parameter, or one layer of it, filled with a value."""

    def fill(tree, names):
        if not names:
            return jnp.full_like(tree, value) if layer is None else tree.at[layer].set(value)
        return {**tree, names[0]: fill(tree[names[0]], names[1:])}

    return dataclasses.replace(state, params=fill(state.params, path.split(".")))


def where(state, loss=token_loss):
    return locate(state, toy.TASK, loss=loss, batch_size=3)


@pytest.mark.parametrize(
    ("path", "layer", "value", "expected"),
    [
        ("embedding", None, HUGE, "the embeddings"),
        ("layers.attention.query_weight", 1, HUGE, "layer 1, queries"),
        ("layers.attention.key_weight", 0, HUGE, "layer 0, keys"),
        ("layers.attention.value_weight", 1, HUGE, "layer 1, values"),
        ("layers.attention.output_weight", 0, HUGE, "layer 0, output"),
        ("layers.mlp.down_weight", 1, HUGE, "layer 1, output"),
        ("head_weight", None, HUGE, "the model's output"),
        ("layers.mlp.up_weight", 1, jnp.nan, "layers.mlp.up_weight, layer 1"),
        ("head_weight", None, jnp.inf, "head_weight"),
    ],
)
def test_the_first_link_that_is_not_finite_is_named(path, layer, value, expected):
    assert where(with_parameter(healthy(), path, value, layer)) == expected


def test_a_loss_that_breaks_by_itself():
    assert where(healthy(), lambda model, batch, *, key: (model.embedding[0, 0] / 0, {})) == "the loss"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_gradient_that_breaks_is_named_with_its_layer(layer):
    def loss(model, batch, *, key):
        entry = model.layers.attention.query_weight[layer, 0, 0, 0]
        return token_loss(model, batch, key=key)[0] + jnp.sqrt(entry - entry), {}

    assert where(healthy(), loss) == f"the gradient of layers.attention.query_weight, layer {layer}"


def test_parts_that_are_finite_but_too_large_together():
    expected = "the norm of the gradient or the update, every part of which is finite"
    assert where(healthy(), lambda model, batch, *, key: (model.embedding[0, 0] * 1e30, {})) == expected


def test_any_other_model_by_its_parameters():
    state = with_parameter(toy.begin(toy.make_bigrams), "table", jnp.nan)
    assert where(state) == "table"
    state = toy.begin(toy.make_bigrams)

    def root(model, batch, *, key):
        return jnp.sqrt(model.table[0, 0] * 0), {}

    assert where(state, root) == "the gradient of table"
