"""Gemma 3: a tiny model in both formats against `transformers`, and the real one where its package is installed."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from attn_jax import models
from attn_jax.models import gemma
from attn_jax.models.gguf_file import GGUFFile, Parts
from attn_jax.models.loading import open_checkpoint
from attn_jax.nn import LayerOptions
from attn_jax.positions import Linear
from tests.models import gemma_files

LOCAL = LayerOptions(local_window_size=(3, 0), rotary_base=1e4)
GLOBAL = LayerOptions(rotary_base=1e6, rotary_scaling=Linear(8.0))


def error_of(path):
    """The one line that loading the file ends in."""
    with pytest.raises(ValueError, match=path.name) as caught:
        models.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def config_of(tmp_path, fields):
    path = tmp_path / "tiny.gguf"
    gemma_files.write(path, fields=fields)
    return open_checkpoint(path).config


@pytest.mark.parametrize("name", ["config", "older", "unscaled", "layer_types"])
def test_logits_of_a_folder(tmp_path, name):
    """C35, at 96 positions: either spelling of the settings, without scaling, and with the layers' types given."""
    token_ids, expected = gemma_files.golden(name)
    loaded = models.load(gemma_files.folder(tmp_path, name))
    np.testing.assert_allclose(loaded.model(token_ids), expected, atol=1e-5)


def test_logits_of_a_gguf_file(tmp_path):
    """C34: the file holds 1 + w, the folder w; all parameters and logits are the same numbers."""
    path = tmp_path / "tiny.gguf"
    gemma_files.write(path)
    read, other = models.load(path), models.load(gemma_files.folder(tmp_path / "folder"))
    leaves, others = (jax.tree.leaves_with_path(loaded.model) for loaded in (read, other))
    assert len(leaves) == len(others) == 15
    for (name, values), (_, expected) in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(values, expected, err_msg=jax.tree_util.keystr(name))
    token_ids, expected = gemma_files.golden("config")
    logits = np.asarray(read.model(token_ids))
    np.testing.assert_array_equal(logits, other.model(token_ids))
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_one_is_added_once_to_every_norm(tmp_path):
    """C34: w = 0 multiplies by 1, w = 1/2 and -1/2 by 3/2 and 1/2."""
    tensors = gemma_files.stored()
    for name in tensors:
        if "norm" in name:
            tensors[name] = np.resize(np.array([0, 0.5, -0.5], np.float32), tensors[name].shape)
    save_file(tensors, gemma_files.folder(tmp_path) / "model.safetensors")
    model = models.load(tmp_path).model
    layers = model.layers
    norms = [layers.attention_norm, layers.attention_output_norm, layers.mlp_norm, layers.mlp_output_norm]
    scales = [norm.scale for norm in (*norms, model.final_norm)]
    for scale in (*scales, layers.attention.query_norm_weight, layers.attention.key_norm_weight):
        values = np.asarray(scale[...])
        np.testing.assert_array_equal(values, np.resize([1, 1.5, 0.5], values.shape[-1:]) + np.zeros_like(values))


def test_settings_of_the_layers(tmp_path):
    """C35: layers 5 and 11 see all keys, by the scaled base; a window of 4 is the query's own key and 3 before it."""
    config = config_of(tmp_path, {})
    assert config.layer_pattern == (*[LOCAL] * 5, GLOBAL)
    assert (config.num_layers, config.scale_rule, config.norm_position, config.qk_norm) == (12, 0.25, "both", "rms")
    assert (config.activation, config.scale_embedding, config.head) == ("gelu_tanh", True, "tied")
    assert config.logits_soft_cap is None
    folder = open_checkpoint(gemma_files.folder(tmp_path / "folder", "layer_types")).config
    kinds = [folder.layer_pattern[layer % len(folder.layer_pattern)] for layer in range(12)]
    assert kinds == [GLOBAL if layer in (0, 4, 5, 9) else LOCAL for layer in range(12)]


def test_what_a_gguf_file_leaves_out_is_the_architectures(tmp_path):
    """C35: without a base it is 1e6, never 1e4; without a scale it is that of the head's width."""
    optional = [
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "attention.scale",
        "attention.value_length",
    ]
    config = config_of(tmp_path, dict.fromkeys(f"gemma3.{name}" for name in optional))
    assert config.layer_pattern[5] == LayerOptions(rotary_base=1e6)
    assert config.layer_pattern[:5] == (LOCAL,) * 5
    assert config.scale_rule == pytest.approx(8**-0.5)
    assert config.value_width == 8


def test_a_factor_alone_is_a_linear_scaling(tmp_path):
    assert config_of(tmp_path, {"gemma3.rope.scaling.type": None}).layer_pattern == (*[LOCAL] * 5, GLOBAL)
    unscaled = config_of(tmp_path, {"gemma3.rope.scaling.type": "none"}).layer_pattern
    assert unscaled == (*[LOCAL] * 5, LayerOptions(rotary_base=1e6))


def test_what_a_folder_leaves_out_is_the_architectures(tmp_path):
    absent = dict.fromkeys(["rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"])
    config = open_checkpoint(gemma_files.folder(tmp_path, "older", **absent)).config
    assert config.layer_pattern == (*[LOCAL] * 5, LayerOptions(rotary_base=1e6))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("older", {"rope_local_base_freq": 500.0, "rope_scaling": None}),
        ("config", {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    ],
)
def test_each_kind_of_layer_has_its_base(tmp_path, name, settings):
    config = open_checkpoint(gemma_files.folder(tmp_path, name, **settings)).config
    local = LayerOptions(local_window_size=(3, 0), rotary_base=500.0)
    assert config.layer_pattern == (*[local] * 5, LayerOptions(rotary_base=1e6))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"rope.freq_base_swa": 500.0}, (*[LayerOptions(local_window_size=(3, 0), rotary_base=500.0)] * 5, GLOBAL)),
        ({"attention.sliding_window_pattern": 2}, (LOCAL, GLOBAL)),
        ({"attention.sliding_window_pattern": 1}, (GLOBAL,)),
        ({"attention.sliding_window_pattern": 99}, (LOCAL,)),
        ({"attention.sliding_window_pattern": 8}, (*[LOCAL] * 7, GLOBAL)),  # whose second period is not whole
    ],
)
def test_layer_patterns(tmp_path, fields, pattern):
    assert config_of(tmp_path, {f"gemma3.{key}": value for key, value in fields.items()}).layer_pattern == pattern


def test_soft_cap_of_the_attention_logits(tmp_path):
    assert config_of(tmp_path, {"gemma3.attn_logit_softcapping": 50.0}).logits_soft_cap == 50
    folder = gemma_files.folder(tmp_path / "folder", attn_logit_softcapping=50.0)
    assert open_checkpoint(folder).config.logits_soft_cap == 50


def test_scale_of_the_one_model_that_is_different():
    """The 27B file has 62 layers, model width 5376, 32 heads of width 128, and no number that says 168."""
    names = ["block_count", "embedding_length", "attention.head_count", "attention.key_length"]
    fields = dict(zip((f"gemma3.{name}" for name in names), (62, 5376, 32, 128), strict=True))
    path = gemma_files.TINY / "none.gguf"
    values = gemma_files.metadata() | fields
    del values["gemma3.attention.scale"]
    file = GGUFFile(path, values, {}, Parts((), ()))
    assert gemma.config_from_gguf(file).scale_rule == pytest.approx(168**-0.5)


@pytest.mark.parametrize(
    "name", sorted({name.replace(".7.", ".{}.") for name in gemma_files.tensors() if ".7." in name})
)
def test_missing_tensor(tmp_path, name):
    weights = gemma_files.tensors()
    del weights[name.format(7)]
    gemma_files.write(tmp_path / "tiny.gguf", weights=weights)
    assert f"tensor {name.format(7)!r} is missing" in error_of(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("blk.3.post_ffw_norm.weight", np.ones(8), "'blk.3.post_ffw_norm.weight' must have shape (16,), got (8,)"),
        ("blk.0.attn_k_norm.weight", np.ones(16), "'blk.0.attn_k_norm.weight' must have shape (8,), got (16,)"),
        ("blk.0.attn_q.bias", np.ones(16), "tensor 'blk.0.attn_q.bias' has no place"),
        ("blk.12.attn_norm.weight", np.ones(16), "tensor 'blk.12.attn_norm.weight' has no place"),
    ],
)
def test_tensor_that_does_not_fit(tmp_path, name, values, reason):
    weights = gemma_files.tensors() | {name: values.astype(np.float32)}
    gemma_files.write(tmp_path / "tiny.gguf", weights=weights)
    assert reason in error_of(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_count": None}, "metadata 'gemma3.block_count' is missing"),
        ({"block_count": 13}, "tensor 'blk.12.attn_output.weight' is missing"),
        ({"block_count": 0}, "layers must be 1 to"),
        ({"block_count": 4_000_000_000}, "layers must be 1 to"),
        ({"attention.head_count": 0}, "num_heads must be at least 1, got 0"),
        ({"attention.key_length": None}, "'gemma3.attention.key_length' is missing"),
        ({"attention.key_length": 4_000_000_000}, "head_width must be at most"),
        ({"attention.sliding_window": None}, "'gemma3.attention.sliding_window' is missing"),
        ({"attention.sliding_window": 0}, "window must have at least 1 key, got 0"),
        ({"attention.sliding_window_pattern": 0}, "periods of 1 or more"),
        ({"attention.scale": float("nan")}, "scale_rule must be"),
        ({"rope.freq_base": -1.0}, "base must be"),
        ({"rope.freq_base": 1}, "'gemma3.rope.freq_base' must be float, got 1"),
        ({"rope.scaling.factor": None}, "'gemma3.rope.scaling.factor' is missing"),
        ({"rope.scaling.factor": 0.0}, "factor must be"),
        ({"rope.scaling.type": "yarn"}, "'gemma3.rope.scaling.type' = 'yarn' is not supported"),
        ({"rope.dimension_count": 4}, "'gemma3.rope.dimension_count' must be 8, got 4"),
        ({"vocab_size": 7}, "'gemma3.vocab_size' must be 64, got 7"),
        ({"final_logit_softcapping": 30.0}, "'gemma3.final_logit_softcapping' = 30.0 is not supported"),
        ({"attn_logit_softcapping": -1.0}, "logits_soft_cap must be"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path, fields, reason):
    gemma_files.write(tmp_path / "tiny.gguf", fields={f"gemma3.{key}": value for key, value in fields.items()})
    assert reason in error_of(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be positive"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 12 times"),
        ({"layer_types": ["linear_attention"] * 12}, "layer_types must be 12 times"),
        ({"layer_types": None, "_sliding_window_pattern": 0}, "periods of 1 or more"),
        ({"attention_bias": True}, "'attention_bias' = True is not supported"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' = True is not supported"),
        ({"final_logit_softcapping": 30.0}, "'final_logit_softcapping' = 30.0 is not supported"),
        ({"hidden_activation": "quick_gelu"}, "hidden_activation must be one of"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "'rope_parameters' must be by layer type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "must not both be there"),
        ({"model_type": "gemma3"}, "model_type must be one of"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, settings, reason):
    assert reason in error_of(gemma_files.folder(tmp_path, **settings))


@pytest.fixture(scope="module")
def gemma3():
    try:
        return models.load("gemma3")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def logits(gemma3, gemma3_golden):
    """Of the excerpt's 512 tokens and the 64 that follow."""
    token_ids = np.concatenate([gemma3_golden["token_ids"], gemma3_golden["continuation"]])
    return gemma3.model(token_ids)


def test_configuration_of_the_real_model(gemma3):
    config = gemma3.config
    assert (config.num_layers, config.model_width, config.mlp_width) == (18, 640, 2048)
    assert (config.num_heads, config.num_kv_heads, config.head_width) == (4, 1, 256)
    assert config.layer_pattern == (*[LayerOptions(local_window_size=(511, 0))] * 5, LayerOptions(rotary_base=1e6))
    assert (config.head, config.scale_rule, config.vocabulary_size) == ("tied", 1 / 16, 262144)
    assert sum(leaf.size for leaf in jax.tree.leaves(gemma3.model)) == 268_098_176
    assert (gemma3.stop_tokens, gemma3.chat_template, gemma3.unmapped) == ((1,), None, ())


def test_logits_of_the_real_model(logits, gemma3_golden):
    """Also where the window of 512 keys leaves some out."""
    found = np.asarray(logits[gemma3_golden["positions"]][:, gemma3_golden["entries"]])
    assert found.shape == (10, 4096)
    assert np.abs(found - gemma3_golden["logits"]).max() <= 2e-3


def test_most_likely_token_at_every_position(logits, gemma3_golden):
    """Over the whole vocabulary, and that the tokens that follow are the greedy ones."""
    clear = gemma3_golden["gap"] >= 4e-3
    assert clear.sum() >= 560
    np.testing.assert_array_equal(logits.argmax(-1)[clear], gemma3_golden["arg_max"][clear])
    np.testing.assert_array_equal(logits[511:-1].argmax(-1), gemma3_golden["continuation"])
    np.testing.assert_allclose(jax.nn.logsumexp(logits, axis=-1), gemma3_golden["log_sum_exp"], atol=2e-3)


def test_greedy_continuation_of_the_real_model(gemma3, gemma3_golden):
    """With a cache that is a ring in the layers with a window, filled in chunks; the ring is passed on the way."""
    prompt, expected = (gemma3_golden[name].tolist() for name in ("token_ids", "continuation"))
    assert models.generate(gemma3, [prompt], max_new_tokens=64, stop_tokens=(), chunk=100) == [expected]
