"""Models whose layers have different mixers: one word a layer."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import MixerOptions, Transformer, TransformerConfig
from attn_jax.nn.mixers import ATTENTION_WORDS, WORDS
from attn_jax.training.divergence import _by_layer
from attn_jax.training.monitor import AttentionMonitor

IDS = np.random.default_rng(0).integers(0, 17, (2, 9))
SIZES = {"vocabulary_size": 17, "model_width": 16, "num_heads": 2, "mlp_width": 16}
OPTIONS = MixerOptions(window=3, convolution_width=3)
FIVE = TransformerConfig(
    num_layers=5, mixer=("softmax", "gru", "softmax", "gru", "softmax"), **SIZES
)  # two periods and a rest
MIXED = TransformerConfig(num_layers=3, mixer=("window", "convolution", "gru"), mixer_options=OPTIONS, **SIZES)
CONFIGS = {
    "two periods and a rest": FIVE,
    "one period, a window": MIXED,
    "one word that is not attention": TransformerConfig(num_layers=2, mixer="gru", **SIZES),
}


@functools.cache
def model(config, seed=0):
    return Transformer(config, rngs=nnx.Rngs(seed))


def layer_by_layer(built, token_ids):
    """The model without its scan: blocks cut out and called one after another."""
    x = built.embed(jnp.asarray(token_ids))
    for index in range(built.config.num_layers):
        x = built.layer(index)(x)
    return built.head(built.final_norm(x))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_scan_is_the_layers_in_turn(name):
    built = model(CONFIGS[name])
    np.testing.assert_allclose(built(IDS), layer_by_layer(built, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_word_stands_where_it_was_said(name):
    config = CONFIGS[name]
    words = [config.mixer] * config.num_layers if isinstance(config.mixer, str) else config.mixer
    for index, word in enumerate(words):
        block = model(config).layer(index)
        if word in ("softmax", "window"):
            assert block.mixer is None
            assert block.attention.config.window == {"softmax": None, "window": (2, 0)}[word]
        else:
            assert block.attention is None
            assert type(block.mixer).__name__.lower() == word


def test_a_layer_of_its_own_parameters():
    """Layer 2 of five is the second of its stack: changing it changes what comes after it, and nothing before."""
    built = Transformer(FIVE, rngs=nnx.Rngs(0))
    before = [built.layer(i).mlp.up_weight[...] for i in range(5)]
    weight = built.layers[0].mlp.up_weight
    weight[...] = weight[...].at[1].set(0.0)
    changed = [bool((built.layer(i).mlp.up_weight[...] != before[i]).any()) for i in range(5)]
    assert changed == [False, False, True, False, False]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [(9,), (4, 1, 1, 3)], ids=str)
def test_any_cutting_gives_what_one_call_gives(name, cuts):
    built = model(CONFIGS[name])
    expected, caches, start = built(IDS), built.empty_cache(2, 9), 0
    for count in cuts:
        before = caches
        logits, caches = built.extend(IDS[:, start : start + count], caches)
        chex.assert_trees_all_equal_shapes_and_dtypes(caches, before)
        np.testing.assert_allclose(logits, expected[:, start : start + count], rtol=1e-4, atol=1e-5)
        start += count
    assert all((cache.lengths == 9).all() for cache in caches)


def test_items_of_different_lengths_go_on_as_if_alone():
    built = model(MIXED)
    caches = built.empty_cache(2, 9)
    first, caches = built.extend(np.where(np.arange(5) < [[5], [2]], IDS[:, :5], -1), caches, np.array([5, 2]))
    second, _ = built.extend(np.stack([IDS[0, 5:8], IDS[1, 2:5]]), caches, last=True)
    whole = built(IDS)
    np.testing.assert_allclose(first[0], whole[0, :5], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first[1, :2], whole[1, :2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second, [whole[0, 7], whole[1, 4]], rtol=1e-4, atol=1e-5)


def test_lengths_keep_padding_out():
    built = model(MIXED)
    padded = np.where(np.arange(9) < [[6], [9]], IDS, 3)
    np.testing.assert_allclose(built(padded, np.array([6, 9]))[0, :6], built(IDS[:1, :6])[0], rtol=1e-4, atol=1e-5)


def test_gradients_reach_every_stack():
    built = model(FIVE)
    graphdef, params = nnx.split(built)
    gradient = jax.grad(lambda params: nnx.merge(graphdef, params)(IDS).var())(params)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(gradient))


def test_compile_time_does_not_grow_with_depth():
    """The program of ten layers is that of four: the scan's body is one period."""

    def lines(count):
        config = TransformerConfig(num_layers=count, mixer=("softmax", "gru") * (count // 2), **SIZES)
        built = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        return len(jax.jit(lambda model: model(IDS)).lower(built).as_text().splitlines())

    assert lines(10) == lines(4)


def test_a_list_of_one_word_is_the_word():
    alike = TransformerConfig(num_layers=2, mixer=["gru", "gru"], **SIZES)
    assert alike == CONFIGS["one word that is not attention"]
    assert hash(alike) == hash(CONFIGS["one word that is not attention"])


def test_divergence_names_layers_of_every_kind():
    names = [name for name, _ in _by_layer(nnx.split(model(FIVE))[1]) if "up_weight" in name]
    assert [int(name.rsplit(" ", 1)[1]) for name in names] == [0, 1, 2, 3, 4]
    assert [name.split(".")[1] for name in names] == ["0", "1", "0", "1", "0"]


def make(**options):
    return TransformerConfig(**{"num_layers": 2, **SIZES, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixer": "attention"}, "mixer must be one of"),
        ({"mixer": ("softmax", "lstm")}, "mixer must be one of"),
        ({"mixer": ("softmax",)}, "one word|tuple of num_layers = 2 words"),
        ({"mixer": ("softmax", "gru", "gru")}, "tuple of num_layers = 2 words"),
        ({"mixer": 3}, "mixer must be a word or a tuple"),
        ({"mixer": "gru", "qk_norm": "rms"}, "qk_norm has no effect without a layer of softmax attention"),
        ({"mixer": "gru", "positions": "alibi"}, "positions has no effect"),
        ({"mixer": "gru", "use_sinks": True}, "use_sinks has no effect"),
        ({"mixer": "window", "local_window_size": 4}, "local_window_size acts in layers of mixer='softmax'"),
        ({"mixer": "gru", "head_width": 4}, "head_width has no effect without mixer"),
        ({"mixer": "state_space", "num_kv_heads": 1}, "num_kv_heads has no effect without mixer linear or"),
        ({"mixer_options": OPTIONS}, "mixer_options.(window|convolution_width) has no effect"),
        ({"mixer_options": 3}, "mixer_options must be MixerOptions"),
        ({"mixer_options": {"windows": 3}}, "windows"),
        ({"mixer": "gru", "causal": False, "head": None}, None),  # said when it is built: the mixer's own choice
    ],
)
def test_bad_configurations(options, words):
    if words is None:
        with pytest.raises(ValueError, match="is_causal must be True"):
            Transformer(make(**options), rngs=nnx.Rngs(0))
        return
    with pytest.raises((ValueError, TypeError), match=words):
        make(**options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m(IDS, positions=np.arange(9)), "positions belongs to attention.*mixer='gru'"),
        (lambda m: m(IDS, return_statistics=True), "return_statistics belongs to attention"),
        (lambda m: m(IDS, observe=lambda q, k, v, **o: q), "observe belongs to attention"),
        (lambda m: m.extend(IDS, m.empty_cache(2, 9)[::-1]), "caches must be a tuple of 2 KVCache or GRUState"),
        (lambda m: m.extend(IDS, m.empty_cache(3, 9)), "caches must have shape"),
        (lambda m: m.layer(5), "index"),
        (lambda m: m.layer(1)(m.embed(IDS), bias=np.ones((9, 9))), "bias belongs to attention"),
        (
            lambda m: m.layer(1)(m.embed(IDS), query_seq_lengths=np.array([1, 2])),
            "query_seq_lengths and key_value_seq_lengths must be the same",
        ),
        (lambda m: AttentionMonitor().check(m), "a monitor needs attention in every layer"),
    ],
)
def test_bad_calls(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call(model(FIVE))


@pytest.mark.parametrize("word", [word for word in WORDS if word not in ATTENTION_WORDS])
def test_caches_can_be_donated(word):
    """Every leaf is an array of its own: a step that reuses them as its result is not refused."""
    built = model(make(mixer=word, num_layers=1))
    step = jax.jit(lambda model, caches: model.extend(IDS[:, :1], caches)[1], donate_argnums=1)
    (cache,) = step(built, step(built, built.empty_cache(2, 9)))
    assert (cache.lengths == 2).all()
