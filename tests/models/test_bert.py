"""BERT: a tiny checkpoint that `transformers` wrote, its outputs, and what in a file does not fit."""

import jax
import numpy as np
import pytest

from attn_jax import models
from tests.models import safetensors_files as files


@pytest.fixture(scope="module")
def tiny():
    return models.load(files.TINY / "bert")


@pytest.fixture
def folder(tmp_path):
    return files.copied("bert", tmp_path / "bert")


def test_hidden_states(tiny):
    token_ids, expected = files.output("bert")
    np.testing.assert_allclose(tiny.model(token_ids), expected, atol=1e-5)


def test_a_row_in_a_padded_batch_is_the_row_alone(tiny):
    token_ids, expected = files.output("bert")
    batch = np.stack([token_ids, np.pad(token_ids[:11], (0, 29), constant_values=7)])
    hidden = tiny.model(batch, np.array([40, 11]))
    np.testing.assert_allclose(hidden[0], expected, atol=1e-5)
    np.testing.assert_allclose(hidden[1, :11], tiny.model(token_ids[:11]), atol=1e-5)
    assert np.abs(hidden[1, :11] - expected[:11]).max() > 0.1  # an encoder: what follows is seen


def test_no_head_for_another_task_is_dropped_in_silence(tiny):
    assert tiny.config.head is None
    assert not tiny.config.causal
    heads = {"bias", "transform.LayerNorm.bias", "transform.LayerNorm.weight", "transform.dense.bias"}
    assert set(tiny.unmapped) == {f"cls.predictions.{name}" for name in heads | {"transform.dense.weight"}}


def test_every_other_number_is_in_the_model(tiny):
    stored = [values for name, values in files.weights(tiny.source.parent).items() if name not in tiny.unmapped]
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tiny.model)]
    np.testing.assert_array_equal(
        np.sort(np.concatenate(leaves)), np.sort(np.concatenate([values.ravel() for values in stored]))
    )


def test_without_the_prefix_with_a_pooler_and_ids(tiny, folder):
    """As `BertModel` saves itself; the tables of ids are older files'."""
    kept = {name.removeprefix("bert."): v for name, v in files.weights(folder).items() if name.startswith("bert.")}
    extra = {"pooler.dense.weight": np.ones((16, 16), np.float32), "embeddings.position_ids": np.arange(48)[None]}
    loaded = models.load(files.rewrite(folder, kept | extra))
    assert loaded.unmapped == ("embeddings.position_ids", "pooler.dense.weight")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(tiny.model))


def test_the_names_of_the_first_release(tiny, folder):
    """bert-base-uncased still calls a norm's scale gamma and its bias beta."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, values in files.weights(folder).items():
        stem = ".".join(name.split(".")[-2:])
        renamed[name.replace(stem, old.get(stem, stem))] = values
    loaded = models.load(files.rewrite(folder, renamed))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(loaded.model), jax.tree.leaves(tiny.model))


def test_missing_tensors(folder):
    tensors = files.weights(folder)
    for name in tensors:
        if name.startswith("cls."):
            continue
        rest = {key: values for key, values in tensors.items() if key != name}
        files.error_of(models.load, files.rewrite(folder, rest), match=f"model.safetensors: tensor {name!r} is missing")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 3}, "tensor 'bert.encoder.layer.2.attention.self.query.weight' is missing"),
        ({"num_hidden_layers": 1}, "has no place in this model"),
        ({"num_hidden_layers": 10**12}, "tensor 'bert.encoder.layer.2.attention.self.query.weight' is missing"),
        ({"num_hidden_layers": 0}, "config.json: num_layers must be at least 1, got 0"),
        ({"num_hidden_layers": 1e12}, "config.json: 'num_hidden_layers' must be int, got 1000000000000.0"),
        ({"vocab_size": 10**12}, "word_embeddings.weight' must have shape (1000000000000, 16), got (48, 16)"),
        ({"hidden_size": 10**12}, "config.json: model_width must be at most"),
        ({"hidden_size": 32}, "word_embeddings.weight' must have shape (48, 32)"),
        ({"intermediate_size": 10**12}, "intermediate.dense.weight' must have shape (1000000000000, 16)"),
        ({"num_attention_heads": 10**12}, "config.json: model_width must be a multiple of num_heads"),
        ({"max_position_embeddings": 64}, "position_embeddings.weight' must have shape (64, 16), got (48, 16)"),
        ({"type_vocab_size": 3}, "token_type_embeddings.weight' must have shape (3, 16), got (2, 16)"),
        ({"layer_norm_eps": -1}, "config.json: norm_epsilon must be positive and finite"),
        ({"layer_norm_eps": "0"}, "config.json: 'layer_norm_eps' must be float, got '0'"),
        ({"hidden_act": "quick_gelu"}, "config.json: hidden_act must be one of 'silu'"),
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type' = 'relative_key' is not supported"),
        ({"is_decoder": True}, "'is_decoder' = True is not supported, only False"),
        ({"vocab_size": None}, "config.json: 'vocab_size' is missing"),
    ],
)
def test_settings_that_do_not_fit(folder, settings, reason):
    files.error_of(models.load, files.changed(folder, **settings), match=reason)
