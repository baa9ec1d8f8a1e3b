"""Functions that stand in for the attention of every layer, each with its layer's part of the interventions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attn_jax
from attn_jax.nn import MultiHeadAttention, Transformer, TransformerConfig
from tests.nn import reference

# Three layers of two kinds, so that a period and a layer past it are run.
CONFIG = TransformerConfig(
    vocabulary_size=17, num_layers=3, model_width=24, num_heads=6, num_kv_heads=2, mixer=("softmax", "window", "softmax")
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 17, (2, 5))
LENGTHS = np.array([5, 3])
GATES = np.random.default_rng(1).uniform(0.2, 1.5, (3, 6)).astype(np.float32)


@functools.cache
def built():
    return Transformer(CONFIG, rngs=nnx.Rngs(0))


def gate(own, query, key, value, **options):
    return attn_jax.dot_product_attention(query, key, value, **options) * own[None, None, :, None]


def plain(own, query, key, value, **options):
    assert own is None
    return attn_jax.dot_product_attention(query, key, value, **options)


def test_the_attention_itself_changes_nothing():
    chex.assert_trees_all_equal(built()(IDS, LENGTHS, intervene=plain), built()(IDS, LENGTHS))


def test_each_layer_gets_its_own_part():
    gated = nnx.clone(built())
    for kind, stack in enumerate(gated.layers):
        own = GATES[kind :: len(gated.layers)]
        stack.attention.output_weight[...] = stack.attention.output_weight[...] * own[:, :, None, None]
    logits = built()(IDS, LENGTHS, intervene=gate, interventions=GATES)
    chex.assert_trees_all_close(logits, gated(IDS, LENGTHS), rtol=1e-5, atol=1e-5)
    assert np.abs(logits - built()(IDS, LENGTHS)).max() > 1e-2


def test_interventions_are_data():
    traces = []

    def counted(own, *arrays, **options):
        traces.append(1)
        return gate(own, *arrays, **options)

    def total(gates):
        return jnp.sum(built()(IDS, LENGTHS, intervene=counted, interventions=gates) ** 2)

    total(GATES), total(2 * GATES)
    count = len(traces)
    total(3 * GATES)
    assert len(traces) == count
    step = 1e-3 * np.random.default_rng(2).standard_normal(GATES.shape).astype(np.float32)
    difference = (total(GATES + step) - total(GATES - step)) / 2
    np.testing.assert_allclose(np.vdot(jax.grad(total)(jnp.asarray(GATES)), step), difference, rtol=2e-2)


def test_observe_sees_what_it_replaces():
    logits, seen = built()(
        IDS, intervene=gate, interventions=GATES, observe=lambda query, key, value, **options: jnp.sum(query**2)
    )
    assert seen.shape == (3,)
    chex.assert_trees_all_equal(logits, built()(IDS, intervene=gate, interventions=GATES))
    _, before = built()(IDS, observe=lambda query, key, value, **options: jnp.sum(query**2))
    np.testing.assert_allclose(seen[0], before[0], rtol=1e-6)  # the first layer reads the embeddings
    assert abs(seen[1] - before[1]) > 1e-3  # the next one what the first has written


def test_dropout_is_handed_on():
    layer = MultiHeadAttention(12, 3, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x, key = jnp.ones((2, 4, 12)), jax.random.key(0)
    given = []

    def look(query, key, value, **options):
        given.append(options)
        return attn_jax.dot_product_attention(query, key, value, **options)

    output = layer(x, deterministic=False, dropout_rng=key, intervene=look)
    chex.assert_trees_all_equal(output, layer(x, deterministic=False, dropout_rng=key))
    assert given[0]["dropout_rate"] == 0.5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"intervene": 3}, "intervene must be callable, got int"),
        ({"interventions": GATES}, "interventions go with intervene"),
        ({"intervene": gate, "interventions": GATES[:2]}, r"leaves \[L, ...\] with L = 3, got \(2, 6\)"),
        ({"intervene": gate, "interventions": 1.0}, r"leaves \[L, ...\] with L = 3, got \(\)"),
        ({"intervene": plain, "return_statistics": True}, "intervene replaces: use observe"),
        ({"intervene": lambda own, query, key, value, **options: query[..., :1]}, r"what intervene returns must have"),
    ],
)
def test_bad_input(given, says):
    with pytest.raises((ValueError, TypeError), match=says):
        built()(IDS, **given)


def test_other_mixers_have_no_attention_to_replace():
    hybrid = Transformer(
        TransformerConfig(vocabulary_size=17, num_layers=2, model_width=24, num_heads=6, mixer=("softmax", "gru")),
        rngs=nnx.Rngs(0),
    )
    with pytest.raises(ValueError, match="intervene belongs to attention"):
        hybrid(IDS, intervene=plain)


def test_a_decoder_with_one_kind_agrees_with_the_reference():
    config = TransformerConfig(vocabulary_size=17, num_layers=2, model_width=24, num_heads=6)
    model = Transformer(config, rngs=nnx.Rngs(3))
    expected, _ = reference.transformer(reference.parameters(model), IDS, config, lengths=LENGTHS)
    logits = model(IDS, LENGTHS, intervene=plain)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4)
