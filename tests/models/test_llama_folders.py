"""The Llama family in safetensors: tiny checkpoints that `transformers` wrote, heads tied and not, what does not fit."""

import json

import jax
import numpy as np
import pytest

from attn_jax import models, positions
from attn_jax.models.checkpoint import Settings
from attn_jax.models.hub_config import rotary_from_json
from tests.models import llama_files
from tests.models import safetensors_files as files

ROTARY = ("plain", "linear", "dynamic", "yarn", "yarn_mscale", "llama3")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    return files.rotary("plain", tmp_path / "llama")[0]


@pytest.mark.parametrize("name", ROTARY)
def test_logits_with_each_scaling(tmp_path, name):
    """At 40 tokens of a model trained at 16, where the scalings differ by whole logits."""
    folder, token_ids, expected = files.rotary(name, tmp_path / name)
    np.testing.assert_allclose(models.load(folder).model(token_ids), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_biased", "llama_bfloat16"])
def test_logits(name):
    """In three shards with biases and an untied head; in bfloat16 with biases of the attention alone."""
    token_ids, expected = files.output(name)
    loaded = models.load(files.TINY / name)
    np.testing.assert_allclose(loaded.model(token_ids), expected, atol=1e-5)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded.model))
    assert (loaded.config.head, loaded.config.use_bias) == {
        "llama_biased": ("untied", True),
        "llama_bfloat16": ("tied", "attention"),
    }[name]


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "yarn_attention_factor", "yarn_mscale", "llama3"])
def test_frequencies_of_published_sizes(name):
    """Those of `transformers`, which computes them in float32, to 1e-6 of each."""
    with np.load(files.TINY / "rotary.npz") as stored:
        settings = Settings(files.TINY / "config.json", json.loads(str(stored[name])))
        expected, magnitude = stored[f"{name}.frequencies"], float(stored[f"{name}.magnitude"])
    base, scaling = rotary_from_json(settings)
    frequencies, actual = positions.rotary_frequencies(128, base=base, scaling=scaling, length=100_000)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert actual == pytest.approx(magnitude, rel=1e-6)


def test_one_model_in_both_formats(tmp_path):
    """The same numbers as a GGUF file, its rows permuted, and as a folder: the same parameters."""
    stored = llama_files.write(tmp_path / "small.gguf")
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"}
    names |= {f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    tensors = {EMBEDDING: stored["token_embd.weight"], "model.norm.weight": stored["output_norm.weight"]}
    for name, values in stored.items():
        if not name.startswith("blk."):
            continue
        _, layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):  # C33: in each head of 8, neighbours become partners half a head apart
            values = values.reshape(-1, 8, llama_files.D)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)
        tensors[f"model.layers.{layer}.{names[kind]}.weight"] = values
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": llama_files.VOCABULARY,
                "num_hidden_layers": llama_files.LAYERS,
                "hidden_size": llama_files.D,
                "intermediate_size": llama_files.F,
                "num_attention_heads": llama_files.N,
                "num_key_value_heads": llama_files.K,
                "rms_norm_eps": float(np.float32(llama_files.EPSILON)),
                "rope_theta": llama_files.BASE,
            }
        )
    )
    one, other = models.load(tmp_path / "small.gguf"), models.load(files.rewrite(folder, tensors))
    assert one.config == other.config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(one.model), jax.tree.leaves(other.model))


class TestHead:
    """C36: what is in the file decides, and nothing is dropped in silence."""

    def load(self, folder, tied, tensors):
        return models.load(files.rewrite(files.changed(folder, tie_word_embeddings=tied), tensors))

    def leaves(self, loaded):
        model = loaded.model
        return np.asarray(model.embedding[...]), None if model.head_weight is None else model.head_weight[...].T

    @pytest.mark.parametrize("tied", [True, False])
    def test_absent(self, folder, tied):
        loaded = self.load(folder, tied, files.weights(folder))
        assert loaded.config.head == "tied"
        assert self.leaves(loaded)[1] is None

    def test_present(self, folder):
        tensors = files.weights(folder)
        tensors[HEAD] = tensors[EMBEDDING] + 1
        embedding, head = self.leaves(self.load(folder, False, tensors))
        np.testing.assert_array_equal(embedding, tensors[EMBEDDING])
        np.testing.assert_array_equal(head, tensors[HEAD])

    def test_present_and_equal(self, folder):
        tensors = files.weights(folder)
        tensors[HEAD] = tensors[EMBEDDING]
        loaded = self.load(folder, True, tensors)
        assert (loaded.config.head, loaded.unmapped) == ("tied", (HEAD,))
        loaded = self.load(folder, False, tensors)
        assert (loaded.config.head, loaded.unmapped) == ("untied", ())
        np.testing.assert_array_equal(self.leaves(loaded)[1], tensors[EMBEDDING])

    def test_present_and_different_though_tied(self, folder):
        tensors = files.weights(folder)
        tensors[HEAD] = tensors[EMBEDDING].copy()
        tensors[HEAD][3, 5] += 1e-3
        with pytest.warns(UserWarning, match=rf"'{HEAD}' differs from '{EMBEDDING}', though .* both are used"):
            loaded = self.load(folder, True, tensors)
        np.testing.assert_array_equal(self.leaves(loaded)[1], tensors[HEAD])

    def test_the_head_alone(self, folder):
        tensors = files.weights(folder)
        tensors[HEAD] = tensors.pop(EMBEDDING)
        embedding, head = self.leaves(self.load(folder, True, tensors))
        np.testing.assert_array_equal(embedding, tensors[HEAD])
        assert head is None
        files.error_of(self.load, folder, False, tensors, match=f"tensor {EMBEDDING!r} is missing")

    def test_a_head_of_another_shape(self, folder):
        tensors = files.weights(folder)
        tensors[HEAD] = np.ones((50, 16), np.float32)
        for tied in (True, False):
            files.error_of(self.load, folder, tied, tensors, match=f"{HEAD!r} must have shape (48, 16), got (50, 16)")


def test_without_the_prefix_and_with_tables(folder):
    """As `LlamaModel` saves itself, with the frequencies that older files carry."""
    plain = models.load(folder)
    tensors = {name.removeprefix("model."): values for name, values in files.weights(folder).items()}
    table = {f"layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(2)}
    loaded = models.load(files.rewrite(folder, tensors | table))
    assert loaded.unmapped == tuple(table)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(plain.model))


def test_every_tensor_is_needed(tmp_path):
    folder = files.copied("llama_bfloat16", tmp_path / "llama")
    tensors = files.weights(files.rotary("plain", tmp_path / "plain")[0])
    tensors |= {
        f"model.layers.{layer}.self_attn.{one}_proj.bias": np.ones(width, np.float32)
        for layer in range(2)
        for one, width in (("q", 32), ("k", 16), ("v", 16), ("o", 16))
    }
    assert models.load(files.rewrite(folder, tensors)).unmapped == ()
    for name in tensors:
        rest = {key: values for key, values in tensors.items() if key != name}
        files.error_of(models.load, files.rewrite(folder, rest), match=f"model.safetensors: tensor {name!r} is missing")
        files.error_of(models.load, files.rewrite(folder, rest | {f"{name}_": tensors[name]}), match="is missing")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 10**12}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 10**400}, "tensor 'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight', "),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be int, got True"),
        ({"num_attention_heads": 10**12}, "o_proj.weight' must have shape (16, 8000000000000), got (16, 32)"),
        ({"num_key_value_heads": 3}, "config.json: num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"num_key_value_heads": 4}, "k_proj.weight' must have shape (32, 16), got (16, 16)"),
        ({"head_dim": 10**12}, "config.json: head_width must be at most"),
        ({"head_dim": 4}, "o_proj.weight' must have shape (16, 16), got (16, 32)"),
        ({"head_dim": 7}, "config.json: head_width must be even"),
        ({"hidden_size": 10**12}, "config.json: model_width must be at most"),
        ({"intermediate_size": 10**12}, "gate_proj.weight' must have shape (1000000000000, 16)"),
        ({"vocab_size": 10**12}, "'model.embed_tokens.weight' must have shape (1000000000000, 16), got (48, 16)"),
        ({"attention_bias": True}, "tensor 'model.layers.0.self_attn.o_proj.bias' is missing"),
        ({"mlp_bias": True}, "tensor 'model.layers.0.mlp.gate_proj.bias' is missing"),
        ({"attention_bias": 1}, "'attention_bias' must be bool, got 1"),
        ({"hidden_act": "gelu_10"}, "hidden_act must be one of 'silu'"),
        ({"rms_norm_eps": 0}, "norm_epsilon must be positive"),
        ({"rms_norm_eps": float("nan")}, "norm_epsilon must be positive and finite"),
        ({"sliding_window": 128}, "'sliding_window' = 128 is not supported"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' = {'bits': 4} is not supported"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5 is not supported"),
        ({"rope_interleaved": True}, "'rope_interleaved' = True is not supported, only False"),
    ],
)
def test_settings_that_do_not_fit(folder, settings, reason):
    files.error_of(models.load, files.changed(folder, **settings), match=reason)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "config.json/rope_parameters: rope_type must be one of"),
        ({"rope_type": "linear"}, "config.json/rope_parameters: 'factor' is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "config.json/rope_parameters: factor must be at least 1"),
        ({"rope_type": "linear", "factor": "8"}, "config.json/rope_parameters: 'factor' must be float, got '8'"),
        ({"rope_type": "linear", "factor": float("inf")}, "config.json/rope_parameters: factor must be finite"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "'truncate' = False is not supported, only True"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}, "beta_slow must be less than"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "'high_freq_factor' is missing"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
            "= 8 is not supported, only 16",
        ),
        ({"rope_type": "default", "rope_theta": 1.0}, "rotary_base must be greater than 1"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "'partial_rotary_factor' = 0.5 is not supported"),
        ({"full_attention": {"rope_type": "default"}, "rope_type": 3}, "'rope_type' must be str, got 3"),
    ],
)
def test_rotary_settings_that_do_not_fit(folder, rope, reason):
    files.error_of(models.load, files.changed(folder, rope_parameters=rope), match=reason)


def rotary(**values):
    return rotary_from_json(Settings(files.TINY / "config.json", values))


def test_older_words_for_the_same_rotary_settings():
    """`rope_theta` beside `rope_scaling`, whose kind is called `type`; a missing length is the model's own."""
    assert rotary() == (10000.0, None)
    assert rotary(rope_theta=500000, rope_scaling=None) == (500000.0, None)
    assert rotary(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4}) == (5e5, positions.Linear(4.0))
    assert rotary(rope_parameters={"rope_theta": 7.0}) == (7.0, None)
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert rotary(rope_scaling=yarn, max_position_embeddings=64)[1] == positions.YaRN(2.0, 64)
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 16}
    assert rotary(rope_scaling=yarn, max_position_embeddings=64)[1] == positions.YaRN(4.0, 16)
    with pytest.raises(ValueError, match="'factor' is missing"):
        rotary(rope_scaling=yarn)
    with pytest.raises(ValueError, match=r"config\.json/rope_scaling: original_length must be at least 1, got 0"):
        rotary(rope_scaling=yarn | {"original_max_position_embeddings": 0, "factor": 2.0})
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {}}
    settings = Settings(files.TINY / "config.json", {"rope_parameters": nested})
    assert rotary_from_json(settings, "full_attention") == (1e6, positions.Linear(8.0))
    assert rotary_from_json(settings, "sliding_attention", default_base=1e4) == (1e4, None)
