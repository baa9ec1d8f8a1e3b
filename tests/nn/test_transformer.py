"""The Transformer against a NumPy recomputation, and the promises of its stack, its compilation and its padding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.diagnostics.statistics import attention_statistics
from attn_jax.nn import LayerOptions, Transformer, TransformerBlock, TransformerConfig
from attn_jax.positions import DynamicNTK
from tests import oracles
from tests.nn import reference

SIZES = {"vocabulary_size": 17, "num_layers": 3, "model_width": 12, "num_heads": 6, "num_kv_heads": 2, "head_width": 4}
DECODER = TransformerConfig(**SIZES, mlp_width=10, rotary_base=100.0)
ENCODER = TransformerConfig(
    **SIZES,
    mlp_width=10,
    causal=False,
    head=None,
    norm="layer",
    norm_position="post",
    mlp="plain",
    activation="gelu",
    use_bias=True,
    positions="learned",
    max_length=8,
)
GEMMA = TransformerConfig(
    **(SIZES | {"num_layers": 8}),
    mlp_width=10,
    norm_position="both",
    activation="gelu_tanh",
    qk_norm="rms",
    scale_rule=0.3,
    scale_embedding=True,
    layer_pattern=(LayerOptions(local_window_size=(1, 0)),) * 2 + (LayerOptions(rotary_base=1e6),),
)
IDS = np.random.default_rng(0).integers(0, 17, (2, 5))
LENGTHS = np.array([5, 3])


@functools.cache
def model(config, seed=1):
    return reference.randomized(lambda: Transformer(config, rngs=nnx.Rngs(0)), seed)


def queries_and_keys(query, key, value, **_):
    return query, key


CONFIGS = {
    "decoder, llama family": DECODER,
    "encoder, bert family": ENCODER,
    "encoder, types and a norm of the embeddings": dataclasses.replace(
        ENCODER, embedding_norm=True, num_token_types=2, num_layers=1
    ),
    "decoder, gemma family, two layers past the last whole period": GEMMA,
    "biases of the attention alone": dataclasses.replace(DECODER, use_bias="attention", num_layers=1),
    "biases of the MLP alone": dataclasses.replace(DECODER, use_bias="mlp", num_layers=1),
    "untied, sinusoidal, scaled embedding": dataclasses.replace(
        DECODER,
        head="untied",
        positions="sinusoidal",
        rotary_base=10000.0,
        scale_embedding=True,
        mlp="plain",
        activation="relu",
    ),
    "interleaved, normed, capped, windowed": dataclasses.replace(
        DECODER, rotary_interleaved=True, qk_norm="rms", logits_soft_cap=3.0, local_window_size=2, use_sinks=True
    ),
    "relative, tied projections": dataclasses.replace(
        DECODER,
        positions="relative",
        rotary_base=10000.0,
        num_kv_heads=6,
        tie_query_key=True,
        relative_buckets=4,
        relative_max_distance=3,
    ),
    "alibi": dataclasses.replace(DECODER, positions="alibi", rotary_base=10000.0, num_layers=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_reference(name, x64):
    config = dataclasses.replace(CONFIGS[name], param_dtype="float64")
    lengths = LENGTHS if config is not CONFIGS["alibi"] else None
    built = model(config)
    expected, _ = reference.transformer(reference.parameters(built), IDS, config, lengths=lengths)
    output = built(IDS, lengths)
    assert output.shape == (2, 5, 12 if config.head is None else 17)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(output[row, :length], expected[row, :length], rtol=0, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 5e-6), ("bfloat16", 5e-2)])
def test_compute_dtype(dtype, tolerance):
    built = model(dataclasses.replace(DECODER, dtype=dtype))
    expected, _ = reference.transformer(reference.parameters(built), IDS, DECODER)
    output = built(IDS)
    assert output.dtype == jnp.float32
    assert np.linalg.norm(output - expected) <= tolerance * np.linalg.norm(expected)


def test_token_types(x64):
    config = dataclasses.replace(ENCODER, embedding_norm=True, num_token_types=2, num_layers=1, param_dtype="float64")
    types = np.random.default_rng(2).integers(0, 2, IDS.shape)
    built = model(config)
    expected, _ = reference.transformer(reference.parameters(built), IDS, config, token_types=types)
    np.testing.assert_allclose(built(IDS, token_types=types), expected, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match=r"token_types must lie in 0\.\.1, got values in 1\.\.2"):
        built(IDS, token_types=types + 1)
    with pytest.raises(ValueError, match=r"token_types must have shape \[\*B, T\]"):
        built(IDS, token_types=types[:, :3])
    with pytest.raises(ValueError, match="token_types go with a config of num_token_types, got None there"):
        model(ENCODER)(IDS, token_types=types)


def test_layers_of_a_pattern_come_in_order():
    built = model(GEMMA)
    _, statistics, (query, _) = built(IDS, return_statistics=("visible_keys",), observe=queries_and_keys)
    visible = [layer.visible_keys[0, -1, 0].item() for layer in statistics]
    assert visible == [2, 2, 5, 2, 2, 5, 2, 2]
    assert query.shape == (8, 2, 5, 6, 4)
    _, observed = built(IDS, observe=lambda query, key, value, **options: query[0, 0, 0, 0])
    chex.assert_trees_all_close(observed, query[:, 0, 0, 0, 0])


def test_a_pattern_of_equal_layers_changes_nothing():
    alike = dataclasses.replace(DECODER, rotary_base=10000.0, layer_pattern=(LayerOptions(rotary_base=100.0),) * 2)
    chex.assert_trees_all_close(model(alike)(IDS), model(DECODER)(IDS), rtol=1e-6, atol=1e-6)


def test_gradients_of_a_pattern():
    """Those of 8 layers in a pattern of 3, against one loop over blocks."""
    built = model(GEMMA)
    graph, state = nnx.split(built)

    def loop(state):
        m = nnx.merge(graph, state)
        x = m.embed(IDS)
        for layer in range(GEMMA.num_layers):
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], m.layers)
            block.attention.config = GEMMA.layer_attention[layer % 3]
            x = block(x)
        return (m.head(m.final_norm(x)) ** 2).sum()

    whole = jax.jit(jax.grad(lambda state: (nnx.merge(graph, state)(IDS) ** 2).sum()))
    chex.assert_trees_all_close(whole(state), jax.jit(jax.grad(loop))(state), rtol=1e-4, atol=1e-4)


def test_scan_is_a_loop_over_blocks():
    built = model(DECODER)
    x = built.embed(jnp.where(np.arange(5) < LENGTHS[:, None], IDS, 0))
    run = jax.jit(lambda block, x: block(x, key_value_seq_lengths=LENGTHS, query_seq_lengths=LENGTHS))
    for layer in range(DECODER.num_layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], built.layers)
        assert isinstance(block, TransformerBlock)
        x = run(block, x)
    chex.assert_trees_all_close(built.head(built.final_norm(x)), built(IDS, LENGTHS), rtol=1e-5, atol=1e-5)


def test_layers_begin_unlike_each_other():
    weight = Transformer(DECODER, rngs=nnx.Rngs(0)).layers.attention.query_weight[...]
    assert weight.shape == (3, 12, 6, 4)
    assert not np.allclose(weight[0], weight[1])
    chex.assert_trees_all_equal(weight, Transformer(DECODER, rngs=nnx.Rngs(0)).layers.attention.query_weight[...])


def test_any_batch_axes():
    built = model(DECODER)
    expected = built(IDS)
    chex.assert_trees_all_close(built(IDS[0]), expected[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(built(IDS[:, None], LENGTHS[:, None])[0, 0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_a_padded_row_is_the_row_alone(config):
    built = model(config)
    padded = np.where(np.arange(5) < LENGTHS[:, None], IDS, -1)  # ids past the length are not even read
    output = built(padded, LENGTHS)
    assert jnp.isfinite(output).all()
    chex.assert_trees_all_close(output[1, :3], built(IDS[1, :3]), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(output[1, :3], built(IDS[1:, :3], np.array([3]))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_narrow_lengths_of_a_long_row(dtype):
    """300 tokens do not fit a byte; a length of 100 does."""
    built = model(dataclasses.replace(DECODER, num_layers=1))
    token_ids = np.arange(300) % 17
    expected = built(token_ids, np.array(100))
    chex.assert_trees_all_equal(built(token_ids, np.array(100, dtype)), expected)
    chex.assert_trees_all_equal(jax.jit(lambda m, n: m(token_ids, n))(built, np.array(100, dtype)), expected)


def test_dynamic_ntk_has_one_length_for_all():
    """Frequencies are static and lengths are not: padding must not pass for length."""
    built = model(dataclasses.replace(DECODER, rotary_scaling=DynamicNTK(2.0, 4)))
    assert not np.allclose(built(IDS), model(DECODER)(IDS), atol=1e-2)
    for call in (lambda m: m(IDS, LENGTHS), jax.jit(lambda m: m(IDS, LENGTHS))):
        with pytest.raises(ValueError, match="lengths must be None with a rotary_scaling of DynamicNTK") as raised:
            call(built)
        assert "\n" not in str(raised.value)


def test_positions_shift_and_mask():
    built = model(DECODER)
    chex.assert_trees_all_close(built(IDS, positions=np.arange(5) + 1000), built(IDS), rtol=1e-3, atol=1e-3)
    backwards = np.arange(5)[::-1]
    chex.assert_trees_all_close(built(IDS[:, ::-1], positions=backwards)[:, ::-1], built(IDS), rtol=1e-5, atol=1e-5)


def test_statistics_and_what_observe_captures():
    built = model(DECODER)
    names = ("entropy", "max_logit", "visible_keys")
    logits, statistics, (query, key) = built(IDS, LENGTHS, return_statistics=names, observe=queries_and_keys)
    chex.assert_trees_all_close(logits, built(IDS, LENGTHS), rtol=1e-5, atol=1e-5)
    assert query.shape == (3, 2, 5, 6, 4)
    assert len(statistics) == 3
    measure = jax.jit(functools.partial(attention_statistics, statistics=names, is_causal=True))
    passes = reference.transformer(reference.parameters(built), IDS, DECODER, lengths=LENGTHS)[1]
    for layer in range(3):
        expected = measure(query[layer], key[layer], query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS)
        chex.assert_trees_all_close(statistics[layer], expected, rtol=1e-5, atol=1e-6)
        oracle = oracles.statistics(passes[layer])
        for name in names:
            np.testing.assert_allclose(getattr(statistics[layer], name), oracle[name], rtol=1e-4, atol=1e-4)


def test_default_statistics_alone():
    logits, statistics = model(DECODER)(IDS, return_statistics=True)
    assert logits.shape == (2, 5, 17)
    assert statistics[0].normalized_entropy.shape == (2, 5, 6)
    assert statistics[0].mean_distance is None


def test_equal_configurations_share_a_trace():
    traces = []

    def count(query, key, value, **options):
        traces.append(query.shape)

    built = [Transformer(TransformerConfig(**SIZES), rngs=nnx.Rngs(seed)) for seed in range(3)]
    for one in built:
        one(IDS, observe=count)
        one(IDS + 0, observe=count)
    assert len(traces) == 1
    before = len(traces)
    jax.jit(lambda m, ids: m(ids, observe=count))(built[0], jnp.asarray(IDS))
    assert len(traces) == before


def test_dropout():
    built = model(dataclasses.replace(DECODER, dropout_rate=0.5))
    expected = model(DECODER)(IDS)
    chex.assert_trees_all_equal(built(IDS), expected)
    chex.assert_trees_all_equal(built(IDS, dropout_rng=jax.random.key(3)), expected)
    first = built(IDS, deterministic=False, dropout_rng=jax.random.key(0))
    chex.assert_trees_all_equal(first, built(IDS, deterministic=False, dropout_rng=jax.random.key(0)))
    assert not np.allclose(first, built(IDS, deterministic=False, dropout_rng=jax.random.key(1)))
    with pytest.raises(ValueError, match="dropout_rng must be a key where dropout is on"):
        built(IDS, deterministic=False)


def test_layers_drop_apart():
    """Three layers that each add a constant: the sums of their masks take four values, not two."""
    built = model(dataclasses.replace(DECODER, dropout_rate=0.5, head=None, use_bias=True))
    zero = jax.tree.map(jnp.zeros_like, built)
    zero.layers.mlp.down_bias[...] = jnp.ones_like(zero.layers.mlp.down_bias[...])
    zero.final_norm.scale[...] = jnp.ones_like(zero.final_norm.scale[...])
    hidden = zero(IDS[0], deterministic=False, dropout_rng=jax.random.key(0))
    steps = hidden / jnp.where(hidden > 0, hidden, jnp.inf).min(axis=-1, keepdims=True)
    assert set(np.unique(np.asarray(steps).round().astype(int)).tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)


def test_gradients_reach_every_parameter():
    built = model(dataclasses.replace(DECODER, dropout_rate=0.25))

    @jax.jit
    def loss(built, key):
        logits = built(IDS, LENGTHS, deterministic=False, dropout_rng=key)
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])

    gradient = jax.grad(loss)(built, jax.random.key(0))
    for path, g in reference.parameters(gradient).items():
        assert np.isfinite(g).all(), path
        assert np.abs(g).max() > 0, path


def test_seeds_can_be_mapped():
    """Many models at once: `vmap` over a leading axis of every parameter, built by `vmap` over keys."""
    models = [model(DECODER, seed) for seed in (1, 2)]
    graph, states = nnx.graphdef(models[0]), jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, models))
    build = jax.vmap(lambda key: nnx.state(Transformer(DECODER, rngs=nnx.Rngs(key))))
    abstract = jax.eval_shape(build, jax.random.split(jax.random.key(0), 2))
    assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, states)
    outputs = jax.jit(jax.vmap(lambda state: nnx.merge(graph, state)(IDS)))(states)
    for output, one in zip(outputs, models, strict=True):
        chex.assert_trees_all_close(output, one(IDS), rtol=1e-5, atol=1e-5)


def test_parameter_shapes_and_count():
    """SmolLM2-135M: 134,515,008 parameters. Nothing is drawn to find out."""
    config = TransformerConfig(
        vocabulary_size=49152, num_layers=30, model_width=576, num_heads=9, num_kv_heads=3, mlp_width=1536,
        norm_epsilon=1e-5, rotary_base=100000.0,
    )  # fmt: skip
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(abstract))}
    assert shapes == {
        "embedding": (49152, 576),
        "layers.attention_norm.scale": (30, 576),
        "layers.attention.query_weight": (30, 576, 9, 64),
        "layers.attention.key_weight": (30, 576, 3, 64),
        "layers.attention.value_weight": (30, 576, 3, 64),
        "layers.attention.output_weight": (30, 9, 64, 576),
        "layers.mlp_norm.scale": (30, 576),
        "layers.mlp.gate_weight": (30, 576, 1536),
        "layers.mlp.up_weight": (30, 576, 1536),
        "layers.mlp.down_weight": (30, 1536, 576),
        "final_norm.scale": (576,),
    }
    assert sum(map(np.prod, shapes.values())) == 134_515_008


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_parameter_count_does_not_depend_on_heads(heads):
    config = TransformerConfig(vocabulary_size=17, num_layers=2, model_width=32, num_heads=heads)
    abstract = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(abstract)))
    # embedding, final norm, and per layer 4 projections, 3 matrices of the MLP, 2 norms
    assert count == 17 * 32 + 32 + 2 * (4 * 32**2 + 3 * 32 * 128 + 2 * 32)


def test_precision_reaches_every_product():
    built = model(dataclasses.replace(DECODER, precision="highest"))
    program = str(jax.make_jaxpr(lambda m, ids: m(ids))(built, jnp.asarray(IDS)))
    # four projections, two products of attention, three of the MLP, and the head
    assert program.count("dot_general[") == program.count("Precision.HIGHEST, Precision.HIGHEST") == 10


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (DECODER, {"token_ids": IDS * 1.0}, "token_ids must have an integer dtype"),
        (DECODER, {"token_ids": 3}, "token_ids must have at least 1 axes"),
        (DECODER, {"token_ids": IDS[:, :0]}, "token_ids must hold at least one token"),
        (DECODER, {"token_ids": np.array([[0, 17]])}, r"token_ids must lie in 0\.\.16, got values in 0\.\.17"),
        (DECODER, {"token_ids": np.array([[0, -1]])}, r"token_ids must lie in 0\.\.16, got values in -1\.\.0"),
        (DECODER, {"lengths": np.array([5])}, r"lengths must have shape \[\*B\] = \(2,\), got \(1,\)"),
        (DECODER, {"lengths": np.array([5, 6])}, r"lengths must lie in 0\.\.5, got values in 5\.\.6"),
        (DECODER, {"lengths": np.array([5.0, 3.0])}, "lengths must have an integer dtype"),
        (DECODER, {"positions": np.arange(4)}, r"positions must have shape \[T\] or \[\*B, T\]"),
        (DECODER, {"positions": np.arange(5) - 1}, "positions must be at least 0, got values in -1"),
        (ENCODER, {"positions": np.arange(5) + 4}, r"positions must lie in 0\.\.7, got values in 4\.\.8"),
        (ENCODER, {"token_ids": np.zeros((2, 9), int)}, "token_ids must have T <= max_length = 8, got T = 9"),
        (DECODER, {"return_statistics": "entropy"}, "return_statistics must be True, False or names"),
        (DECODER, {"deterministic": 0}, "deterministic must be True or False"),
        (DECODER, {"observe": 3}, "observe must be callable, got int"),
        (DECODER, {"observe": np.ones((3, 3))}, "observe must be callable, got ndarray"),
    ],
)
def test_wrong_arguments(config, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        model(config)(**{"token_ids": IDS, **arguments})
    assert "\n" not in str(raised.value)


def test_an_id_outside_the_vocabulary_is_never_another_token():
    """Under jit its value cannot be checked, so its row shows NaN, and no other row does."""
    logits = jax.jit(lambda m, ids: m(ids))(model(DECODER), jnp.array([[3, 17], [-1, 2], [3, 2]]))
    assert jnp.isnan(logits[0, 1]).all()
    assert jnp.isnan(logits[1]).all()
    assert jnp.isfinite(logits[2]).all()


def test_initializer_must_be_one():
    for build in (Transformer, TransformerBlock):  # not from inside a trace, which would add lines
        with pytest.raises(TypeError, match=r"^kernel_init must be callable, got str$"):
            build(DECODER, kernel_init="x", rngs=nnx.Rngs(0))


def test_config_must_be_one():
    for build in (Transformer, TransformerBlock):
        with pytest.raises(TypeError, match="config must be a TransformerConfig, got"):
            build({"num_layers": 1}, rngs=nnx.Rngs(0))
