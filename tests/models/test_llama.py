"""The Llama family's name map: small files against NumPy, and files whose tensors or metadata do not fit."""

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from attn_jax import models
from attn_jax.models.llama import unpermute
from tests.models import llama_files

TOKEN_IDS = np.array([5, 200, 0, 31, 31, 99, 1, 42, 259, 17])


def written(tmp_path, **options):
    path = tmp_path / "small.gguf"
    return path, llama_files.write(path, **options)


def error_of(path):
    """The one line that loading the file ends in."""
    with pytest.raises(ValueError, match=path.name) as caught:
        models.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_are_put_back_in_order():
    """C33: per head of 8, [0,2,4,6,1,3,5,7]; the key's rows by its own two heads, not by the query's four."""
    rows = np.arange(16)
    one = [0, 2, 4, 6, 1, 3, 5, 7]
    np.testing.assert_array_equal(unpermute(rows[:8], 1), one)
    np.testing.assert_array_equal(unpermute(rows, 2), one + [8 + row for row in one])
    np.testing.assert_array_equal(unpermute(np.array(one).argsort(), 1), np.arange(8))
    np.testing.assert_array_equal(unpermute(rows, 4)[:6], [0, 2, 1, 3, 4, 6])
    np.testing.assert_array_equal(unpermute(rows.reshape(8, 2), 1), rows.reshape(8, 2)[one])


@pytest.mark.parametrize("untied", [False, True])
def test_logits_of_a_small_file(tmp_path, untied):
    """C36: without `output.weight` the embedding is the head; with it, and different, the file's head wins."""
    kinds = {"blk.0.attn_q.weight": Kind.Q8_0, "blk.1.attn_k.weight": Kind.Q4_1, "token_embd.weight": Kind.Q8_0}
    path, held = written(tmp_path, weights=llama_files.tensors(untied=untied), kinds=kinds)
    loaded = models.load(path)
    assert loaded.config.head == ("untied" if untied else "tied")
    assert loaded.source == path
    expected = llama_files.logits(held, TOKEN_IDS)
    np.testing.assert_allclose(loaded.model(TOKEN_IDS), expected, atol=2e-5 * np.abs(expected).max())


def test_head_that_equals_the_embedding(tmp_path):
    """C36: present and equal: untied in structure, the same logits."""
    weights = llama_files.tensors()
    path, held = written(tmp_path, weights=weights | {"output.weight": weights["token_embd.weight"]})
    loaded = models.load(path)
    assert loaded.config.head == "untied"
    expected = llama_files.logits(held, TOKEN_IDS)
    np.testing.assert_allclose(loaded.model(TOKEN_IDS), expected, atol=2e-5 * np.abs(expected).max())


def test_every_stored_number_is_in_the_model(tmp_path):
    """Each parameter is a rearrangement of its tensors: as many numbers, the same sum of squares."""
    path, held = written(tmp_path)
    leaves = jax.tree.leaves(models.load(path).model)
    assert all(leaf.dtype == np.float32 for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == sum(values.size for values in held.values())
    stored = np.sort(np.concatenate([values.ravel() for values in held.values()]))
    np.testing.assert_array_equal(np.sort(np.concatenate([np.ravel(leaf) for leaf in leaves])), stored)


def test_loads_float32_under_x64(tmp_path, x64):
    path, held = written(tmp_path)
    loaded = models.load(path)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded.model))
    expected = llama_files.logits(held, TOKEN_IDS)
    np.testing.assert_allclose(loaded.model(TOKEN_IDS), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", list(llama_files.shapes()))
def test_missing_tensor(tmp_path, name):
    weights = llama_files.tensors()
    del weights[name]
    assert f"tensor {name!r} is missing" in error_of(written(tmp_path, weights=weights)[0])


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.ffn_down.weight", "output_norm.weight"]
)
def test_misshapen_tensor(tmp_path, name):
    weights = llama_files.tensors()
    weights[name] = weights[name][..., :-1].copy()
    error = error_of(written(tmp_path, weights=weights)[0])
    assert f"tensor {name!r} must have shape {llama_files.shapes()[name]}, got {weights[name].shape}" in error


def test_transposed_tensor(tmp_path):
    weights = llama_files.tensors()
    weights["blk.1.ffn_up.weight"] = weights["blk.1.ffn_up.weight"].T.copy()
    assert "'blk.1.ffn_up.weight' must have shape (64, 32), got (32, 64)" in error_of(
        written(tmp_path, weights=weights)[0]
    )


def test_rotary_factors(tmp_path):
    """Factors of 1 change nothing and are reported; others would change the logits."""
    weights = llama_files.tensors()
    factors = np.ones(llama_files.H // 2, np.float32)
    loaded = models.load(written(tmp_path, weights=weights | {"rope_freqs.weight": factors})[0])
    assert loaded.unmapped == ("rope_freqs.weight",)
    factors[-1] = 8
    error = error_of(written(tmp_path, weights=weights | {"rope_freqs.weight": factors})[0])
    assert "tensor 'rope_freqs.weight', which scales the rotary frequencies, is not supported" in error


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_norm.weight", "rope_freqs.bias"])
def test_tensor_without_a_place(tmp_path, name):
    """A bias or a layer too many would change the logits: never dropped in silence."""
    weights = llama_files.tensors() | {name: np.ones(32, np.float32)}
    assert f"tensor {name!r} has no place" in error_of(written(tmp_path, weights=weights)[0])


def test_other_architecture(tmp_path):
    error = error_of(written(tmp_path, architecture="mamba")[0])
    assert "general.architecture must be one of 'gemma3', 'llama'; got 'mamba'" in error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"llama.block_count": None}, "metadata 'llama.block_count' is missing"),
        ({"llama.block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 1}, "'blk.1.attn_k.weight', "),
        ({"llama.block_count": 4_000_000_000}, "tensor 'blk.2.attn_norm.weight' is missing"),
        ({"llama.block_count": 0}, "num_layers must be at least 1, got 0"),
        ({"llama.attention.head_count": 0}, "positive"),
        ({"llama.attention.head_count": 2}, "'llama.rope.dimension_count' must be 16, got 8"),
        ({"llama.attention.head_count_kv": 4}, "tensor 'blk.0.attn_k.weight' must have shape (32, 32), got (16, 32)"),
        ({"llama.attention.head_count_kv": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"llama.attention.head_count_kv": 1.5}, "'llama.attention.head_count_kv' must be int, got 1.5"),
        ({"llama.rope.dimension_count": 4}, "'llama.rope.dimension_count' must be 8, got 4"),
        ({"llama.rope.freq_base": float("nan")}, "base must be"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "'llama.attention.layer_norm_rms_epsilon' is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "norm_epsilon must be positive and finite"),
        ({"llama.vocab_size": 7}, f"'llama.vocab_size' must be {llama_files.VOCABULARY}, got 7"),
        ({"llama.rope.scaling.type": "linear"}, "'llama.rope.scaling.type' = 'linear' is not supported"),
        ({"llama.attention.sliding_window": 64}, "'llama.attention.sliding_window' = 64 is not supported"),
        ({"llama.expert_count": 8}, "'llama.expert_count' = 8 is not supported"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path, fields, reason):
    assert reason in error_of(written(tmp_path, fields=fields)[0])


def test_metadata_that_change_nothing(tmp_path):
    """Absent optional values mean the architecture's defaults; neutral ones are accepted."""
    absent = dict.fromkeys(["llama.rope.freq_base", "llama.rope.dimension_count", "llama.vocab_size"])
    plain = models.load(written(tmp_path)[0]).config
    fields = absent | {"llama.rope.scaling.type": "none", "llama.expert_count": 0}
    assert models.load(written(tmp_path, fields=fields)[0]).config == plain


def test_flipped_bits(tmp_path):
    """Whole loads of files with flipped bits, in the header or anywhere: that one error, or a model."""
    path, _ = written(tmp_path)
    data, generator = path.read_bytes(), np.random.default_rng(1)
    header = data.index(b"output_norm.weight")
    refused = []
    for case in range(60):
        flipped = bytearray(data)
        for at, bit in generator.integers(0, (len(data) if case % 2 else header, 8), (2, 2)):
            flipped[at] ^= 1 << int(bit)
        path.write_bytes(flipped)
        try:
            models.load(path)
        except ValueError as error:
            refused.append(str(error))
    assert all(path.name in error and "\n" not in error for error in refused)
    assert 10 < len(refused) < 50  # both happen, so the series tests both
