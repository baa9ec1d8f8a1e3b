"""GPT-2: a tiny checkpoint that `transformers` wrote, against its logits and against NumPy from the raw file."""

import math

import jax
import numpy as np
import pytest

from attn_jax import models
from tests.models import safetensors_files as files

D, N = 16, 4


@pytest.fixture(scope="module")
def tiny():
    return models.load(files.TINY / "gpt2")


@pytest.fixture
def folder(tmp_path):
    return files.copied("gpt2", tmp_path / "gpt2")


def logits(weights, token_ids):
    """The model's logits `[T, vocabulary]` in float64, read off the stored tensors: y = x W + b with W as it lies."""
    w = {name.removeprefix("transformer."): values.astype(np.float64) for name, values in weights.items()}

    def linear(name, x):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    steps = len(token_ids)
    x = w["wte.weight"][token_ids] + w["wpe.weight"][:steps]
    for layer in ("h.0", "h.1"):
        fused = linear(f"{layer}.attn.c_attn", norm(f"{layer}.ln_1", x))
        query, key, value = fused[:, :D], fused[:, D : 2 * D], fused[:, 2 * D :]
        heads = []
        for head in range(N):
            columns = slice(head * D // N, (head + 1) * D // N)
            scores = query[:, columns] @ key[:, columns].T / math.sqrt(D // N)
            p = np.exp(np.where(np.tri(steps, dtype=bool), scores, -np.inf))
            heads.append(p / p.sum(-1, keepdims=True) @ value[:, columns])
        x = x + linear(f"{layer}.attn.c_proj", np.concatenate(heads, -1))
        up = linear(f"{layer}.mlp.c_fc", norm(f"{layer}.ln_2", x))
        x = x + linear(f"{layer}.mlp.c_proj", up / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))
    return norm("ln_f", x) @ w.get("lm_head.weight", w["wte.weight"]).T


def test_logits(tiny):
    token_ids, expected = files.output("gpt2")
    actual = tiny.model(token_ids)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(actual, logits(files.weights(tiny.source.parent), token_ids), atol=1e-5)


def test_stored_columns(tiny):
    """C37: query, key and value are thirds of the output axis; head h has the columns h · H to (h + 1) · H."""
    stored = files.weights(tiny.source.parent)
    fused, offset = (stored[f"transformer.h.1.attn.c_attn.{name}"] for name in ("weight", "bias"))
    attention = tiny.model.layers.attention
    for third, name in enumerate(("query", "key", "value")):
        weight, bias = (getattr(attention, f"{name}_{kind}")[...][1] for kind in ("weight", "bias"))
        for head in range(N):
            columns = slice(third * D + head * 4, third * D + head * 4 + 4)
            np.testing.assert_array_equal(weight[:, head], fused[:, columns])
            np.testing.assert_array_equal(bias[head], offset[columns])
    square = stored["transformer.h.1.attn.c_proj.weight"]  # a wrong transpose would pass every check of shapes
    np.testing.assert_array_equal(attention.output_weight[...][1].reshape(D, D), square)


def test_a_row_in_a_padded_batch_is_the_row_alone(tiny):
    token_ids, expected = files.output("gpt2")
    batch = np.stack([token_ids, np.pad(token_ids[:9], (0, 31), constant_values=5)])
    batched = tiny.model(batch, np.array([40, 9]))
    np.testing.assert_allclose(batched[0], expected, atol=1e-5)
    np.testing.assert_allclose(batched[1, :9], expected[:9], atol=1e-5)


def test_every_number_is_in_the_model_once(tiny):
    stored = np.concatenate([values.ravel() for values in files.weights(tiny.source.parent).values()])
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tiny.model)]
    np.testing.assert_array_equal(np.sort(np.concatenate(leaves)), np.sort(stored))
    assert tiny.unmapped == ()
    assert tiny.stop_tokens == (3,)


def test_mask_buffers_are_reported(tiny, folder):
    buffers = {
        f"transformer.h.{i}.attn.{name}": values
        for i in range(2)
        for name, values in (("bias", np.tri(48, dtype=bool)[None, None]), ("masked_bias", np.float32([-1e4])))
    }
    loaded = models.load(files.rewrite(folder, files.weights(folder) | buffers))
    assert loaded.unmapped == tuple(sorted(buffers))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(tiny.model))


def test_without_the_prefix(tiny, folder):
    renamed = {name.removeprefix("transformer."): values for name, values in files.weights(folder).items()}
    loaded = models.load(files.rewrite(folder, renamed))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(tiny.model))


def test_a_head_of_its_own(folder):
    """C36: its name has no prefix, and a settings file that does not say means tied."""
    token_ids, _ = files.output("gpt2")
    tensors = files.weights(folder)
    untied = tensors | {"lm_head.weight": tensors["transformer.wte.weight"][::-1] * 2}
    loaded = models.load(files.rewrite(files.changed(folder, tie_word_embeddings=False), untied))
    np.testing.assert_allclose(loaded.model(token_ids), logits(untied, token_ids), atol=2e-5)
    files.changed(folder, tie_word_embeddings=None)
    with pytest.warns(UserWarning, match="'lm_head.weight' differs from 'transformer.wte.weight'"):
        assert models.load(folder).config.head == "untied"
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    loaded = models.load(files.rewrite(folder, tensors))
    np.testing.assert_array_equal(loaded.model.embedding[...], tensors["lm_head.weight"])
    assert loaded.config.head == "tied"


def test_a_bias_that_is_no_buffer_has_no_place(folder):
    extra = {"transformer.h.0.attn.c_attn.bias_mask": np.ones(3, np.float32), "h.0.attn.biases": np.ones(3, np.float32)}
    message = files.error_of(models.load, files.rewrite(folder, files.weights(folder) | extra))
    assert all(repr(name) in message for name in extra)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n_layer": 10**12}, "tensor 'transformer.h.2.attn.c_proj.weight' is missing"),
        ({"n_embd": 24}, "'transformer.wpe.weight' must have shape (48, 24), got (48, 16)"),
        ({"n_positions": 49}, "'transformer.wpe.weight' must have shape (49, 16), got (48, 16)"),
        ({"n_inner": 32}, "c_fc.weight' must have shape (16, 32), got (16, 64)"),
        ({"n_head": 3}, "config.json: model_width must be a multiple of num_heads"),
        ({"scale_attn_weights": False}, "'scale_attn_weights' = False is not supported, only True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx' = True is not supported"),
        ({"add_cross_attention": True}, "'add_cross_attention' = True is not supported"),
        ({"activation_function": "gelu_10"}, "activation_function must be one of"),
        ({"eos_token_id": 48}, None),
    ],
)
def test_settings_that_do_not_fit(folder, settings, reason):
    if reason is None:  # the generation's settings, which stand first, lack it
        (folder / "generation_config.json").unlink()
        reason = "config.json: 'eos_token_id' must be in 0..47, got [48]"
    files.error_of(models.load, files.changed(folder, **settings), match=reason)
