"""Language modelling: the next token of a text, in characters or in byte pairs learned from it."""

import os
import pathlib
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attn_jax import checks
from attn_jax.lazy import dynamic_box
from attn_jax.training.tasks.base import Batch, TaskBase
from attn_jax.typing import Array, Int


class LanguageModel(TaskBase, data=("training", "held_out")):
    """The next token: windows of T + 1 tokens, from anywhere in the training part. Made by `language_model`.

    Evaluation cuts the part held out in windows that do not overlap, and takes them in a fixed shuffled order, so that
    a few of them are still spread over all of it.

    Attributes:
        training, held_out: int32 `[tokens]`.
        vocabulary_size: of the tokenizer.
        length: T.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.training.tasks import LanguageModel
    >>> tokens = jnp.arange(20, dtype=jnp.int32)
    >>> task = LanguageModel(tokens, tokens, vocabulary_size=20, length=4)
    >>> batch = task.batch(jax.random.key(0), step=0, size=2)
    >>> bool((batch.targets == batch.inputs + 1).all())  # the next token
    True
    >>> sorted(task.evaluation(1, task.num_held_out).inputs[0, :, 0].tolist())  # windows that do not overlap
    [0, 4, 8, 12]
    """

    training: Int[Array, " n"]
    held_out: Int[Array, " m"]
    vocabulary_size: int
    length: int

    @property
    def chance(self) -> None:
        """Not known: some tokens are easy to guess."""

    @property
    def num_held_out(self) -> int:
        """Windows that are held out."""
        return (self.held_out.shape[0] - 1) // self.length

    def _train(self, key: Array) -> Batch:
        start = jax.random.randint(key, (), 0, self.training.shape[0] - self.length, jnp.int32)
        return self._window(self.training, start)

    def _evaluate(self, index: Int[Array, ""]) -> Batch:
        order = jax.random.permutation(jax.random.key(0, impl="threefry2x32"), self.num_held_out)
        return self._window(self.held_out, order[index] * self.length)

    def _window(self, tokens: Int[Array, " n"], start: Int[Array, ""]) -> Batch:
        window = dynamic_box(tokens, (start,), (self.length + 1,))
        return Batch(window[:-1], window[1:], jnp.ones(self.length, jnp.float32))


def language_model(
    text: str, *, length: int = 64, vocabulary_size: int | None = None, held_out: float = 0.1
) -> tuple[LanguageModel, Tokenizer]:
    """A text as a task, and the tokenizer that it is in.

    Args:
        text: as `read_text` gives it.
        length: T.
        vocabulary_size: tokens of the byte-pair encoding, which is learned from the training part alone; None for
            characters, all those of the text.
        held_out: the share of the text, its end, that evaluation has for itself, between 0 and 1. Passages that the
            text itself repeats are in both parts.

    Returns:
        `(task, tokenizer)`, the latter with `encode(text).ids` and `decode(ids)`.

    Raises:
        ValueError: a text whose parts do not hold a window of T + 1 tokens each, or a number out of range.
        TypeError: something that is no text or no number.

    >>> import jax
    >>> from attn_jax.training.tasks import language_model
    >>> task, tokenizer = language_model("abcde" * 20, length=4)
    >>> batch = task.batch(jax.random.key(0), step=0, size=1)
    >>> text, answers = (tokenizer.decode(ids[0].tolist()) for ids in (batch.inputs, batch.targets))
    >>> text[1:] == answers[:-1], task.vocabulary_size, task.num_held_out
    (True, 5, 2)
    """
    _check_text(text)
    length = checks.positive_int("length", length)
    share = checks.finite_number("held_out", held_out, positive=True)
    if share >= 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {share}")
    cut = round(len(text) * (1 - share))
    parts = {"training": text[:cut], "held-out": text[cut:]}
    if vocabulary_size is None:
        tokenizer = characters(text)
    else:
        tokenizer = byte_pairs(parts["training"], vocabulary_size=vocabulary_size)
    tokens = {name: np.array(tokenizer.encode(part).ids, np.int32) for name, part in parts.items()}
    for name, ids in tokens.items():
        if len(ids) <= length:
            raise ValueError(
                f"length must be less than the tokens of each part of the text, got {length} and {len(ids)} tokens in "
                f"the {name} part"
            )
    training, end = jnp.asarray(tokens["training"]), jnp.asarray(tokens["held-out"])
    return LanguageModel(training, end, tokenizer.get_vocab_size(), length), tokenizer


def read_text(path: str | os.PathLike[str] | None = None) -> str:
    """A text to learn: of a file, or English technical prose that comes with Python.

    The latter is `pydoc_data.topics`, each paragraph once: its topics repeat each other, and a repeated paragraph would
    be in training and evaluation. It differs a little between versions of Python.

    Args:
        path: of a file in UTF-8; None for the prose.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or not in UTF-8; the message names it.

    >>> from attn_jax.training.tasks import read_text
    >>> "while" in read_text(), len(read_text()) > 100_000
    (True, True)
    """
    if path is None:
        topics = "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
        return "\n\n".join(dict.fromkeys(paragraph.strip("\n") for paragraph in topics.split("\n\n")))
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must hold UTF-8 text, got {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise ValueError(f"{path}: must hold some text, and is empty")
    return text


def characters(text: str) -> Tokenizer:
    """A tokenizer of single characters: byte-pair encoding without pairs, on the characters of the text.

    Characters that the text does not have are left out by `encode`.

    Raises:
        ValueError, TypeError: no text, or an empty one.

    >>> from attn_jax.training.tasks import characters
    >>> tokenizer = characters("banana")
    >>> tokenizer.encode("nab").ids, tokenizer.decode([1, 0, 2])  # a, b, n
    ([2, 0, 1], 'ban')
    """
    _check_text(text)
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(sorted(set(text)))}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_pairs(text: str, *, vocabulary_size: int) -> Tokenizer:
    """A byte-pair encoding learned from a text: start from bytes, and merge the commonest pair until there are enough.

    Merges stay inside words (with the space before them), numbers and runs of punctuation. Any text can be encoded and
    comes back unchanged.

    Args:
        text: to count pairs in.
        vocabulary_size: tokens in all, at least the 256 bytes.

    Raises:
        ValueError: a vocabulary below 256 or larger than the text gives, or an empty text.
        TypeError: something that is no text or no integer.

    Reference: Sennrich et al. 2016, algorithm 1; Radford et al. 2019 (GPT-2) for bytes.

    >>> from attn_jax.training.tasks import byte_pairs
    >>> tokenizer = byte_pairs("low low low lower", vocabulary_size=258)  # two merges: l o, then lo w
    >>> tokenizer.encode("lows").tokens, tokenizer.decode(tokenizer.encode("wöl").ids)
    (['low', 's'], 'wöl')
    """
    _check_text(text)
    size = checks.positive_int("vocabulary_size", vocabulary_size, least=256)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    learned = tokenizer.get_vocab_size()
    if learned < size:
        raise ValueError(
            f"vocabulary_size must be at most {learned} for this text, which has no more pairs; got {size}"
        )
    return tokenizer


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    if not text.strip():
        raise ValueError("text must not be empty")
