"""Tokenizers from a file's vocabulary: equal to those of `transformers` on texts that are easy to cut wrongly."""

import json

import pytest

from attn_jax.models.gguf_file import read_gguf
from attn_jax.models.tokenizer import tokenizer_from_gguf
from tests.models import llama_files

NAMES, KINDS, MERGES = llama_files.tokens()


def small(tmp_path, **fields):
    path = tmp_path / "small.gguf"
    llama_files.write(path, fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    return tokenizer_from_gguf(read_gguf(path))


def pieces(tokenizer, text):
    return tokenizer.encode(text).tokens


def test_golden_cases(smollm2, golden):
    cases = json.loads(str(golden["tokenizer_cases"]))
    assert len(cases) > 20
    for text, ids in cases:
        assert smollm2.tokenizer.encode(text).ids == ids, text


def test_golden_text_there_and_back(smollm2, golden):
    text, ids = str(golden["text"]), golden["token_ids"].tolist()
    assert smollm2.tokenizer.encode(text).ids == ids
    assert smollm2.tokenizer.decode(ids) == text


def test_every_row_of_the_embedding_has_a_token(smollm2):
    assert smollm2.tokenizer.get_vocab_size() == smollm2.config.vocabulary_size == 49152


def test_digits_stand_alone(tmp_path):
    """The run of spaces before a digit stays whole; before a word its last space goes with the word."""
    tokenizer = small(tmp_path, tokens=[*NAMES, "ĠĠ", "12"], token_type=[*KINDS, 1, 1], merges=[*MERGES, "Ġ Ġ", "1 2"])
    assert pieces(tokenizer, "  12") == ["ĠĠ", "1", "2"]
    assert pieces(tokenizer, "  to") == ["Ġ", "Ġt", "o"]


def test_marked_tokens_stay_whole(tmp_path):
    """A control token is left out of decoded text, a user's token is not."""
    tokenizer = small(tmp_path)
    assert pieces(tokenizer, "he<think>he<|end|>") == ["he", "<think>", "he", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("he<think>he<|end|>").ids) == "he<think>he"
    assert tokenizer.get_vocab_size() == len(NAMES)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model must be 'gpt2' .*, got 'llama'"),
        ({"model": None}, "'tokenizer.ggml.model' is missing"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre must be one of smollm; got 'llama-bpe'"),
        ({"add_bos_token": True}, "tokenizer.ggml.add_bos_token must be False, got True"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix must be False, got True"),
        ({"tokens": [*NAMES[:-1], "he"]}, "1 repeated tokens"),
        ({"tokens": [1, 2]}, "must be a list of strings"),
        ({"token_type": KINDS[:-1]}, f"token_type must have {len(NAMES)} items, got {len(NAMES) - 1}"),
        ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"merges": ["h e", "q z"]}, "merges has 'q z'"),
        ({"merges": ["he"]}, "merges has 'he'"),
    ],
)
def test_lists_that_contradict_each_other(tmp_path, fields, reason):
    with pytest.raises(ValueError, match=rf"small\.gguf: .*{reason}"):
        small(tmp_path, **fields)
