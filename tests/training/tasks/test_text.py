"""Language modelling: text in, windows out, and the two tokenizers."""

import itertools

import jax
import numpy as np
import pytest

from attn_jax.training.tasks import LanguageModel, byte_pairs, characters, language_model, read_text

PROSE = read_text()
# what each place of a text may be in: no letter is in both parts
TWO_HALVES = "".join(chr(97 + i * i % 13) for i in range(400)) + "".join(chr(110 + i * i % 13) for i in range(400))


@pytest.fixture(scope="module")
def prose():
    return language_model(PROSE, length=128)


@pytest.fixture(scope="module")
def merged():
    return language_model(PROSE[:60000], length=16, vocabulary_size=400)


def text_of(tokenizer, ids):
    return tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("made", ["prose", "merged"])
def test_the_next_token_of_the_text(made, request):
    task, tokenizer = request.getfixturevalue(made)
    batches = task.batch(jax.random.key(0), 0, 20), jax.tree.map(lambda x: x[0], task.evaluation(1, 20))
    for batch, part in zip(batches, (task.training, task.held_out), strict=True):
        np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        assert (batch.weights == 1).all()
        for row in np.asarray(batch.inputs):
            assert row.tobytes() in np.asarray(part).tobytes()
        assert made == "merged" or text_of(tokenizer, batch.inputs[0]) in PROSE  # a token may end inside a character


@pytest.mark.parametrize("made", ["prose", "merged"])
def test_the_parts_are_the_text(made, request):
    task, tokenizer = request.getfixturevalue(made)
    whole = PROSE if made == "prose" else PROSE[:60000]
    training, held_out = text_of(tokenizer, task.training), text_of(tokenizer, task.held_out)
    assert training + held_out == whole
    assert len(training) == round(len(whole) * 0.9)
    assert task.vocabulary_size == tokenizer.get_vocab_size() > int(task.training.max())


def test_windows_of_one_part_never_reach_into_the_other():
    task, tokenizer = language_model(TWO_HALVES, length=20, held_out=0.5)
    batch = task.batch(jax.random.key(0), 0, 1000)
    assert max(text_of(tokenizer, batch.targets.ravel())) <= "m"
    windows = {text_of(tokenizer, row) for row in np.asarray(batch.inputs)}
    assert windows == {TWO_HALVES[i : i + 20] for i in range(380)}  # a target follows the last
    held_out = task.evaluation(1, task.num_held_out)
    assert min(text_of(tokenizer, held_out.inputs.ravel())) >= "n"


def test_evaluation_goes_over_the_held_out_part_once():
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))  # every character differs
    task, tokenizer = language_model(text, length=7, held_out=0.2)
    assert task.num_held_out == (60 - 1) // 7 == 8
    batch = task.evaluation(2, 4)
    inputs = sorted(text_of(tokenizer, row) for row in np.asarray(batch.inputs).reshape(8, 7))
    assert "".join(inputs) == text[240:296]
    targets = sorted(text_of(tokenizer, row) for row in np.asarray(batch.targets).reshape(8, 7))
    assert "".join(targets) == text[241:297]
    assert text_of(tokenizer, batch.inputs.ravel()) != "".join(inputs)  # spread, not the beginning first


def test_a_window_that_just_fits():
    task, _ = language_model("abcdef" + "ghi", length=2, held_out=1 / 3)
    assert task.num_held_out == 1
    assert task.evaluation(1, 1).targets[0, 0].tolist() == [7, 8]
    assert np.unique(task.batch(jax.random.key(0), 0, 100).targets).tolist() == [1, 2, 3, 4, 5]


def test_the_prose_repeats_no_paragraph(prose):
    paragraphs = PROSE.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) > 1000
    assert read_text() == PROSE
    task, tokenizer = prose
    training = text_of(tokenizer, task.training)
    windows = np.asarray(task.evaluation(1, task.num_held_out).inputs[0])
    assert len(windows) > 250
    assert not any(text_of(tokenizer, row) in training for row in windows)


def test_characters():
    tokenizer = characters("ba\n é ab")
    assert tokenizer.encode("ab é").ids == [2, 3, 1, 4]
    assert tokenizer.decode([3, 2, 0, 4]) == "ba\né"
    assert tokenizer.get_vocab_size() == 5


def test_byte_pairs_by_hand():
    """Sennrich et al. 2016, algorithm 1, on words whose counts leave no tie."""
    text = " lower" * 2 + " lowest" * 4 + " new" * 3
    tokenizer = byte_pairs(text, vocabulary_size=256 + 5)
    words = {("Ġ", *"lower"): 2, ("Ġ", *"lowest"): 4, ("Ġ", *"new"): 3}
    learned = []
    for _ in range(5):
        counts = {}
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + count
        best = max(counts.values())
        ties = {pair for pair, count in counts.items() if count == best}
        token = tokenizer.id_to_token(256 + len(learned))
        pair = next(pair for pair in ties if "".join(pair) == token)  # a tie may go either way
        learned.append(token)
        words = {merge(word, pair): count for word, count in words.items()}
    encoded = tokenizer.encode(" lowest new").tokens
    assert encoded == [part for word in words if "".join(word) in ("Ġlowest", "Ġnew") for part in word]
    assert len(encoded) < len(" lowest new")


def merge(word, pair):
    out = list(word)
    for i in range(len(out) - 2, -1, -1):
        if tuple(out[i : i + 2]) == pair:
            out[i : i + 2] = ["".join(pair)]
    return tuple(out)


def test_byte_pairs_lose_nothing(merged):
    _, tokenizer = merged
    for text in ("naïve café – 数学 \U0001f600\r\n\t  x  ", PROSE[-3000:], "  lead", "a\x00b"):
        assert text_of(tokenizer, tokenizer.encode(text).ids) == text
    assert tokenizer.to_str() == byte_pairs(PROSE[:54000], vocabulary_size=400).to_str()  # of the training part alone
    assert byte_pairs("abc", vocabulary_size=256).encode("abc").tokens == ["a", "b", "c"]


def test_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("näh\r\nlich".encode())
    assert read_text(path) == read_text(str(path)) == "näh\r\nlich"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt: must hold some text, and is empty$"),
        (b" \n", r"text\.txt: must hold some text, and is empty$"),
        (b"abc\xff\xfe", r"text\.txt: must hold UTF-8 text, got invalid start byte at byte 3$"),
        ("naïve".encode("latin-1"), r"text\.txt: must hold UTF-8 text, got invalid continuation byte at byte 2$"),
        ("text".encode("utf-16"), r"text\.txt: must hold UTF-8 text, got invalid start byte at byte 0$"),
    ],
)
def test_a_file_that_is_no_text(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_text(tmp_path / "text.txt")
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text\.txt"):
        read_text(tmp_path / "text.txt")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: language_model(""), ValueError, "text must not be empty"),
        (lambda: language_model(b"bytes"), TypeError, "text must be a string, got bytes"),
        (lambda: language_model("a" * 100, length=0), ValueError, "length must be at least 1, got 0"),
        (
            lambda: language_model("a" * 100, length=10),
            ValueError,
            "length must be less than the tokens of each part of the text, got 10 and 10 tokens in the held-out part",
        ),
        (
            lambda: language_model("a" * 100, length=60, held_out=0.9),
            ValueError,
            "got 60 and 10 tokens in the training",
        ),
        (lambda: language_model("a" * 100, held_out=1.0), ValueError, "held_out must lie between 0 and 1, got 1.0"),
        (lambda: language_model("a" * 100, held_out=0), ValueError, "held_out must be positive and finite, got 0"),
        (lambda: language_model("a" * 100, held_out=1e-9), ValueError, "and 0 tokens in the held-out part"),
        (lambda: byte_pairs("abc", vocabulary_size=255), ValueError, "vocabulary_size must be at least 256, got 255"),
        (
            lambda: byte_pairs("abab", vocabulary_size=300),
            ValueError,
            "vocabulary_size must be at most 258 for this text, which has no more pairs; got 300",
        ),
        (lambda: byte_pairs("abc", vocabulary_size=300.0), TypeError, "vocabulary_size must be an integer"),
        (lambda: characters(""), ValueError, "text must not be empty"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_made_outside_of_the_builder():
    task = LanguageModel(np.arange(30, dtype=np.int32), np.arange(30, 50, dtype=np.int32), 50, 4)
    batch = task.batch(jax.random.key(0), 0, 10)
    np.testing.assert_array_equal(batch.targets, batch.inputs + 1)
