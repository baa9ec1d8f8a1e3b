"""Embeddings of sentences: those of `transformers`, whatever the batch, and what is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

from attn_jax import models
from tests.models import safetensors_files as files


@pytest.fixture(scope="module")
def minilm():
    return models.load("minilm")


@pytest.fixture(scope="module")
def golden():
    """What `transformers` computes from the same file: see tests/golden/make_minilm.py."""
    with np.load(files.TINY.parent / "minilm.npz") as stored:
        return {**stored, "sentences": json.loads(str(stored["sentences"]))}


def test_golden(minilm, golden):
    embeddings = models.embed(minilm, golden["sentences"])
    assert embeddings.shape == (16, 384)
    assert embeddings.dtype == jnp.float32
    np.testing.assert_allclose(embeddings, golden["embeddings"], atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(embeddings, axis=-1), 1, atol=1e-6)


def test_tokens(minilm, golden):
    """The checkpoint cuts at 256; its tokenizer.json would cut at 128 and pad: `tokenizer` does neither."""
    assert minilm.max_tokens == 256
    lengths = [len(minilm.tokenizer.encode(sentence).ids) for sentence in golden["sentences"]]
    np.testing.assert_array_equal(np.minimum(lengths, 256), golden["lengths"])
    assert max(lengths) == 683


def test_neither_order_nor_padding_changes_an_embedding(minilm, golden):
    """Each sentence alone, and in batches of three in another order."""
    some = golden["sentences"][:6]
    shuffled = models.embed(minilm, some[::-1], batch_size=3)[::-1]
    np.testing.assert_allclose(shuffled, golden["embeddings"][:6], atol=1e-5)
    np.testing.assert_allclose(models.embed(minilm, some[:1]), golden["embeddings"][:1], atol=1e-5)


def test_what_the_file_leaves_aside(minilm):
    assert minilm.unmapped == ("embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight")
    assert minilm.pooling == "mean"
    assert minilm.source.name == "model.safetensors"


def test_no_sentences(minilm):
    assert models.embed(minilm, []).shape == (0, 384)


@pytest.mark.parametrize(
    ("sentences", "kind", "message"),
    [
        ("one sentence", TypeError, "sentences must be a list of strings, got str"),
        (None, TypeError, "sentences must be a list of strings, got NoneType"),
        (["a", 3], TypeError, r"sentences\[1\] must be a string, got int"),
        (["a", ""], ValueError, r"sentences\[1\] has no token: ''"),
        (["a", " \n"], ValueError, r"sentences\[1\] has no token"),
    ],
)
def test_sentences_that_are_none(minilm, sentences, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        models.embed(minilm, sentences)


def test_other_arguments(minilm):
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        models.embed(minilm, ["a"], batch_size=0)
    with pytest.raises(TypeError, match="loaded must be a LoadedModel, got Transformer"):
        models.embed(minilm.model, ["a"])


def test_decoder():
    loaded = models.load(files.TINY / "gpt2")
    with pytest.raises(ValueError, match=r"loaded must be an encoder, .*/model\.safetensors is a decoder"):
        models.embed(loaded, ["a"])


def test_no_tokenizer():
    with pytest.raises(ValueError, match=r"loaded has no tokenizer: .*bert/model\.safetensors"):
        models.embed(models.load(files.TINY / "bert"), ["a"])


WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, **{f"w{i}": i for i in range(4, 48)}}


@pytest.fixture
def words(tmp_path):
    """The tiny encoder with a tokenizer of words."""
    folder = files.copied("bert", tmp_path / "words")
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(length=40)
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write(path, **settings):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_pooling_against_numpy(words, kind):
    """The hidden states of a sentence alone, cut with its last special token kept, then pooled by hand."""
    write(words / "sentence_bert_config.json", max_seq_length=8)
    if kind == "cls":
        write(words / "1_Pooling" / "config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    loaded = models.load(words)
    assert (loaded.max_tokens, loaded.pooling) == (8, kind)
    sentences = ["w4", "w9 w8 w7 w6 w5 w4 w9 w8 w7", "w11 nonsense w12"]
    rows = [[1, 4, 2], [1, 9, 8, 7, 6, 5, 4, 2], [1, 11, 3, 12, 2]]
    hidden = [np.asarray(loaded.model(np.array(row)), np.float64) for row in rows]
    pooled = np.stack([states[0] if kind == "cls" else states.mean(0) for states in hidden])
    expected = pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)
    np.testing.assert_allclose(models.embed(loaded, sentences), expected, atol=2e-6)


def test_limits_in_turn(words):
    """What sentence-transformers says, or else the tokenizer, and never more than the model has positions."""
    assert models.load(words).max_tokens == 48
    write(words / "tokenizer_config.json", model_max_length=20)
    assert models.load(words).max_tokens == 20
    write(words / "sentence_bert_config.json", max_seq_length=30)
    assert models.load(words).max_tokens == 30
    write(words / "sentence_bert_config.json", max_seq_length=1000)
    assert models.load(words).max_tokens == 48
    write(words / "sentence_bert_config.json", max_seq_length=2)
    files.error_of(models.load, words, match="'max_seq_length' must be at least 3, got 2")


def test_the_longest_sentence_that_the_model_has_positions_for(words):
    embeddings = models.embed(models.load(words), ["w5 " * 100])
    assert np.isfinite(embeddings).all()


def test_pooling_that_is_not_covered(words):
    two = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    for modes in ({"pooling_mode_max_tokens": True}, two, {"pooling_mode": "lasttoken"}, {"pooling_mode": ["mean"]}):
        write(words / "1_Pooling" / "config.json", **modes)
        files.error_of(models.load, words, match="1_Pooling/config.json: pooling [")
    write(words / "1_Pooling" / "config.json", pooling_mode="cls")
    assert models.load(words).pooling == "cls"


def test_a_tokenizer_that_does_not_fit(words):
    path = words / "tokenizer.json"
    sound = path.read_text()
    path.write_text("{}")
    files.error_of(models.load, words, match="tokenizer.json: not a readable tokenizer")
    broken = json.loads(sound)
    broken["post_processor"]["special_tokens"].pop("[SEP]")  # the library panics, but only when it encodes
    path.write_text(json.dumps(broken))
    files.error_of(models.load, words, match="tokenizer.json: not a readable tokenizer: no entry found for key")
    Tokenizer(WordLevel({"a": 0, "b": 48}, unk_token="a")).save(str(path))
    files.error_of(models.load, words, match="has token 48, but the model's vocabulary_size is 48")
