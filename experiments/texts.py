"""Text to measure on: English technical prose that comes with Python, or the user's own file, cut into documents."""

import hashlib
import pathlib
import pydoc_data.topics

import numpy as np
from tokenizers import Tokenizer

from experiments.harness import InputError

DEFAULT_NAME = "pydoc_data.topics"


def read(text_file: str) -> tuple[str, str]:
    """A text and what to call it: of `text_file`, or, if that is empty, of `pydoc_data.topics`."""
    if not text_file:
        return DEFAULT_NAME, "\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
    try:
        text = pathlib.Path(text_file).read_text("utf-8")
    except OSError as error:
        raise InputError(f"--text_file={text_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"--text_file={text_file} must hold UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    if not text.strip():
        raise InputError(f"--text_file={text_file} must hold some text, and is empty")
    return pathlib.Path(text_file).name, text


def digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def documents(text: str, tokenizer: Tokenizer, *, count: int, length: int, special: bool = False) -> np.ndarray:
    """Up to `count` pieces of `length` tokens, evenly spread over the text: int `[documents, T]`.

    A text that is shorter than one piece is one document, as long as it is. With `special`, each piece stands between
    the tokens that the tokenizer puts around a text, which count.
    """
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
    if len(token_ids) < 2:
        raise InputError(f"the text must have at least two tokens to route between, got {len(token_ids)}")
    before, after = _around(tokenizer) if special else ([], [])
    length = min(length - len(before) - len(after), len(token_ids))
    pieces = len(token_ids) // length
    chosen = np.linspace(0, pieces - 1, min(count, pieces)).round().astype(int)
    cut = token_ids[: pieces * length].reshape(pieces, length)[chosen]
    sides = (np.broadcast_to(np.array(ids, np.int32), (len(cut), len(ids))) for ids in (before, after))
    return np.concatenate([next(sides), cut, next(sides)], axis=1)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]
