"""Embeddings of sentences: what an encoder says of each token, pooled into one unit vector."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from attn_jax import checks
from attn_jax.models.loading import LoadedModel
from attn_jax.nn import padding
from attn_jax.typing import Float, Int

_STEP = 16  # lengths are rounded up to a multiple of it: each shape compiles once


def embed(loaded: LoadedModel, sentences: Sequence[str], *, batch_size: int = 32) -> Float[jax.Array, "b d"]:
    """Embeds sentences by an encoder: tokens' hidden states, averaged, as unit vectors.

        e = mean over the tokens of h_t;   e / |e|

    A sentence is cut to `loaded.max_tokens`, its special tokens included. Sentences of one batch are padded to one
    length, which changes no embedding: padding is neither attended to nor averaged. A checkpoint whose settings say so
    has the first token's hidden state in place of the mean.

    Args:
        loaded: an encoder with its tokenizer, such as `models.load("minilm")`.
        sentences: B texts, none of them empty.
        batch_size: how many sentences run at once.

    Returns:
        `[B, D]` float32, in the order of the sentences.

    Raises:
        TypeError: `sentences` is no sequence of strings.
        ValueError: a sentence has no token; the model is a decoder, or has no tokenizer.

    Reference: Reimers and Gurevych 2019, section 3.

    >>> from attn_jax import models
    >>> minilm = models.load("minilm")
    >>> a, b, c = models.embed(minilm, ["A cat sits outside.", "A kitten is in the yard.", "Prices rose again."])
    >>> bool(a @ b > a @ c)
    True
    """
    if not isinstance(loaded, LoadedModel):
        raise TypeError(f"loaded must be a LoadedModel, got {type(loaded).__name__}")
    if loaded.pooling is None:
        raise ValueError(f"loaded must be an encoder, whose hidden states are pooled; {loaded.source} is a decoder")
    if loaded.tokenizer is None:
        raise ValueError(f"loaded has no tokenizer: there is no tokenizer.json beside {loaded.source}")
    batch_size = checks.positive_int("batch_size", batch_size)
    if isinstance(sentences, (str, bytes)) or not isinstance(sentences, Sequence):
        raise TypeError(f"sentences must be a list of strings, got {type(sentences).__name__}")
    for index, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentences[{index}] must be a string, got {type(sentence).__name__}")
    rows = _encode(loaded.tokenizer, sentences, loaded.max_tokens)

    embeddings = np.empty((len(rows), loaded.config.model_width), np.float32)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # neighbours are about as long: little padding
    for start in range(0, len(rows), batch_size):
        batch = order[start : start + batch_size]
        token_ids, lengths = _padded([rows[index] for index in batch], batch_size, loaded.config.max_length)
        hidden = loaded.model(token_ids, lengths)
        embeddings[batch] = _pool(hidden, lengths, kind=loaded.pooling)[: len(batch)]
    return jnp.asarray(embeddings)


def _encode(tokenizer: Tokenizer, sentences: Sequence[str], most: int | None) -> list[list[int]]:
    """The token ids of each sentence, special tokens included, cut to `most`."""
    if most is not None:
        tokenizer = Tokenizer.from_str(tokenizer.to_str())  # the caller's own goes on cutting nothing
        tokenizer.enable_truncation(most)
    encodings = tokenizer.encode_batch(list(sentences))
    for index, encoding in enumerate(encodings):
        if all(encoding.special_tokens_mask):
            raise ValueError(f"sentences[{index}] has no token: {sentences[index]!r}")
    return [encoding.ids for encoding in encodings]


def _padded(rows: Sequence[Sequence[int]], batch_size: int, most: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows as one array `[batch_size or fewer, T]` and their lengths; both sizes are rounded up."""
    count = min(batch_size, 1 << (len(rows) - 1).bit_length())
    longest = max(map(len, rows))
    length = min(longest + -longest % _STEP, most or longest + _STEP)
    token_ids, lengths = np.zeros((count, length), np.int32), np.ones(count, np.int32)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = row
        lengths[index] = len(row)
    return token_ids, lengths


@functools.partial(jax.jit, static_argnames="kind")
def _pool(hidden: Float[jax.Array, "b t d"], lengths: Int[jax.Array, "b"], *, kind: str) -> Float[jax.Array, "b d"]:
    """One unit vector of each row's first `lengths` hidden states."""
    hidden = hidden.astype(jnp.float32)
    if kind == "cls":
        pooled = hidden[:, 0]
    else:
        counted = padding.counts(lengths, hidden.shape[1])[..., None]
        pooled = jnp.where(counted, hidden, 0).sum(1) / lengths[:, None]
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
