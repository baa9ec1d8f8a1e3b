"""Tokenizers from a file's vocabulary: equal to those of `transformers` on texts that are easy to cut wrongly."""

import json

import pytest
from gguf import TokenType

from attn_jax.models.gguf_file import read_gguf
from attn_jax.models.tokenizer import merges_from_scores, tokenizer_from_gguf
from tests.models import gemma_files, llama_files

NAMES, KINDS, MERGES = llama_files.tokens()


def small(tmp_path, **fields):
    path = tmp_path / "small.gguf"
    llama_files.write(path, fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    return tokenizer_from_gguf(read_gguf(path))


def small_sentencepiece(tmp_path, **fields):
    path = tmp_path / "small.gguf"
    gemma_files.write(path, fields={f"tokenizer.ggml.{key}": value for key, value in fields.items()})
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
        ({"model": "bert"}, "tokenizer.ggml.model must be 'gpt2' or 'llama', got 'bert'"),
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


@pytest.fixture(scope="module")
def gemma3_tokenizer(gemma3_file):
    return tokenizer_from_gguf(gemma3_file)


def test_golden_cases_of_sentencepiece(gemma3_tokenizer, gemma3_golden):
    cases = json.loads(str(gemma3_golden["tokenizer_cases"]))
    assert len(cases) > 25
    for text, ids in cases:
        assert gemma3_tokenizer.encode(text).ids == ids, text


def test_golden_text_of_sentencepiece_there_and_back(gemma3_tokenizer, gemma3_golden):
    text, ids = str(gemma3_golden["text"]), gemma3_golden["token_ids"].tolist()
    assert gemma3_tokenizer.encode(text).ids == ids
    assert gemma3_tokenizer.encode(text, add_special_tokens=False).ids == ids[1:]
    assert gemma3_tokenizer.decode(ids) == text
    assert gemma3_tokenizer.get_vocab_size() == 262144


def test_the_best_score_is_merged_first(tmp_path):
    """By the scores `th` comes before `he`, and the other way round; where it stands in the list does not matter."""
    names, _, scores = gemma_files.tokens()
    names = [{"the": "ab", "▁the": "▁ab"}.get(name, name) for name in names]
    assert pieces(small_sentencepiece(tmp_path, tokens=names), "the the") == ["<bos>", "th", "e", "▁th", "e"]
    scores[names.index("he")], scores[names.index("▁h")] = 2.0, 1.0
    tokenizer = small_sentencepiece(tmp_path, tokens=names, scores=scores)
    assert pieces(tokenizer, "the he") == ["<bos>", "t", "he", "▁", "he"]


def test_a_token_is_made_by_whichever_merge_is_left(tmp_path):
    """`the` of `th` and `e`, or, where `he` comes first, of `t` and `he`."""
    names, _, scores = gemma_files.tokens()
    assert pieces(small_sentencepiece(tmp_path), "the then") == ["<bos>", "the", "▁the", "n"]
    scores[names.index("he")] = 2.0
    assert pieces(small_sentencepiece(tmp_path, scores=scores), "the then") == ["<bos>", "the", "▁the", "n"]


def test_merges_of_scores():
    """Best score first; of a token's several, the longest left part first, as in `transformers`; of text only."""
    normal = {"a": -3.0, "aaa": 0.0, "aa": -1.0, "<0xC": -4.0, "3>": -5.0, "b": -6.0, "ab": -2.0}
    names = [*normal, "<0xC3>", "b<0xC", "▁", "▁▁"]
    kinds = [
        *[TokenType.NORMAL] * len(normal),
        TokenType.BYTE,
        TokenType.CONTROL,
        TokenType.NORMAL,
        TokenType.USER_DEFINED,
    ]
    scores = [*normal.values(), 0.0, 0.0, 0.0, -1000.0]
    expected = [("▁", "▁"), ("aa", "a"), ("a", "aa"), ("a", "a"), ("a", "b")]
    assert merges_from_scores(names, kinds, scores) == expected


def test_runs_of_spaces_come_first(tmp_path):
    """Their scores are the worst of all, but a user defined them; the file spells them with spaces."""
    tokenizer = small_sentencepiece(tmp_path)
    assert pieces(tokenizer, "a  the   b") == ["<bos>", "a", "▁▁", "the", "▁▁▁", "b"]
    assert tokenizer.decode(tokenizer.encode("a  the   b").ids) == "a  the   b"
    assert tokenizer.get_vocab_size() == gemma_files.VOCABULARY


def test_marked_tokens_and_bytes_of_sentencepiece(tmp_path):
    tokenizer = small_sentencepiece(tmp_path)
    assert pieces(tokenizer, "é\n\n\na<eos>") == ["<bos>", "<0xC3>", "<0xA9>", "\n\n", "<0x0A>", "a", "<eos>"]
    assert tokenizer.decode(tokenizer.encode("é\n\n\na<eos>").ids) == "é\n\n\na"
    assert pieces(tokenizer, "ö") == ["<bos>", "<unk>"]  # whose bytes are not all there


@pytest.mark.parametrize(
    ("fields", "begins"), [({"add_bos_token": None}, True), ({"add_bos_token": False, "bos_token_id": None}, False)]
)
def test_whether_a_text_begins_with_a_token(tmp_path, fields, begins):
    assert pieces(small_sentencepiece(tmp_path, **fields), "a") == ["<bos>"] * begins + ["a"]


def test_a_token_whose_name_is_a_template(tmp_path):
    names = ["$A" if name == "<bos>" else name for name in gemma_files.tokens()[0]]
    assert small_sentencepiece(tmp_path, tokens=names).encode("a").ids == [2, names.index("a")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"add_space_prefix": None}, "tokenizer.ggml.add_space_prefix must be False, got True"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token must be False, got True"),
        ({"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores must be 64 finite floats"),
        ({"scores": [1] * 64}, "tokenizer.ggml.scores must be 64 finite floats"),
        ({"scores": [float("nan")] * 64}, "tokenizer.ggml.scores must be 64 finite floats"),
        ({"unknown_token_id": None}, "'tokenizer.ggml.unknown_token_id' is missing"),
        ({"unknown_token_id": 64}, "tokenizer.ggml.unknown_token_id must be below 64, got 64"),
        ({"bos_token_id": None}, "'tokenizer.ggml.bos_token_id' is missing"),
        ({"bos_token_id": 99}, "tokenizer.ggml.bos_token_id must be below 64, got 99"),
        ({"tokens": ["▁▁" if n == "▁" else n for n in gemma_files.tokens()[0]]}, "1 repeated tokens"),
    ],
)
def test_sentencepiece_lists_that_contradict_each_other(tmp_path, fields, reason):
    with pytest.raises(ValueError, match=rf"small\.gguf: .*{reason}"):
        small_sentencepiece(tmp_path, **fields)
