"""`generate`: prompts continued token by token, through caches of fixed shape."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.models import sampling
from attn_jax.models.chat import chat_prompt
from attn_jax.models.loading import LoadedModel
from attn_jax.nn import Transformer
from attn_jax.typing import Array

Prompt = str | Sequence[int]
_STEP = 64  # capacities are rounded up to a multiple of it: each compiles once
Advance = Callable[[Array], Array]


def generate(
    loaded: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Array | None = None,
    stop_tokens: Sequence[int | str] | None = None,
    chat: bool = False,
    on_token: Callable[[int, int], Any] | None = None,
    capacity: int | None = None,
    chunk: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continues each prompt, until a stop token or `max_new_tokens` tokens.

    Prompts of any lengths run as one batch, and each gets what it would get alone. One trace serves the prompts
    (padded to a power of two, or to chunks) and one every further token, whatever its place.

    Args:
        loaded: a decoder, such as `models.load("smollm2")`.
        prompts: a text, or a list of texts and lists of token ids.
        max_new_tokens: at least 1.
        temperature: 0 takes the likeliest token every time; a positive one draws from softmax(logits / temperature).
        top_k: draw among the k likeliest only.
        top_p: draw among the fewest that together have probability p only (after top_k).
        key: of `jax.random.key`, for a positive temperature. A prompt draws by the key and its own tokens, wherever it
            stands in the batch; one that is there several times draws anew each time.
        stop_tokens: ids or names of tokens that end a text; None: those of the checkpoint; (): none.
        chat: whether each prompt is what a user says, for the checkpoint's chat template (see `chat_prompt`).
        on_token: called as `on_token(index of the prompt, id)` for each new token, as soon as it is known.
        capacity: slots of the cache, at least the longest prompt and the new tokens but the last; None: enough.
        chunk: prompts are read so many tokens at a time; None: all at once.
        use_cache: False computes everything anew for each token: slow, and the same tokens.

    Returns:
        The new ids of each prompt, stop token excluded.

    Raises:
        ValueError, TypeError: on a prompt that is empty or longer than the cache, an unknown stop token, an option
            outside its range or without effect, an encoder.

    >>> from attn_jax import models
    >>> loaded = models.load("smollm2")
    >>> (ids,) = models.generate(loaded, "The capital of France is", max_new_tokens=2)
    >>> loaded.tokenizer.decode(ids)
    ' Paris.'
    """
    if not isinstance(loaded, LoadedModel):
        raise TypeError(f"loaded must be a LoadedModel, got {type(loaded).__name__}")
    config = loaded.config
    if config.head is None or not config.causal:
        raise ValueError(f"loaded must be a decoder; {loaded.source} is an encoder, which predicts no next token")
    max_new_tokens = checks.positive_int("max_new_tokens", max_new_tokens)
    stops = _stop_ids(loaded, stop_tokens)
    rows = _encode(loaded, prompts, chat=checks.boolean("chat", chat))
    choose = _chooser(rows, temperature, top_k, top_p, key)
    if on_token is not None and not callable(on_token):
        raise TypeError(f"on_token must be a function, got {on_token!r}")
    if not rows:
        return []
    capacity = _capacity(rows, max_new_tokens, capacity, config.max_length)
    chunk = None if chunk is None else checks.positive_int("chunk", chunk)
    if checks.boolean("use_cache", use_cache):
        logits, advance = _with_cache(loaded.model, rows, capacity, chunk)
    elif chunk is not None:
        raise ValueError(f"chunk has no effect without a cache, got {chunk}")
    else:
        logits, advance = _without_cache(loaded.model, rows, capacity)

    new: list[list[int]] = [[] for _ in rows]
    running = list(range(len(rows)))
    for step in range(max_new_tokens):
        tokens = choose(logits, step)
        if step + 1 < max_new_tokens:
            logits = advance(tokens)  # runs while the tokens are read
        ids = np.asarray(tokens).tolist()
        running = [row for row in running if ids[row] not in stops]
        for row in running:
            new[row].append(ids[row])
            if on_token is not None:
                on_token(row, ids[row])
        if not running:
            break
    return new


@functools.partial(jax.jit, donate_argnames="caches")
def _extend(model: Transformer, token_ids: Array, caches: Any, lengths: Array | None) -> tuple[Array, Any]:
    return model.extend(token_ids, caches, lengths, last=True)


def _with_cache(model: Transformer, rows: list[list[int]], capacity: int, chunk: int | None) -> tuple[Array, Advance]:
    """The logits after the prompts, and what gives those after one more token each."""
    lengths = np.array([len(row) for row in rows])
    chunk = 1 << (int(lengths.max()) - 1).bit_length() if chunk is None else chunk
    token_ids = _padded(rows, -(-int(lengths.max()) // chunk) * chunk)
    caches, logits = model.empty_cache(len(rows), capacity), None
    for start in range(0, token_ids.shape[1], chunk):
        counts = np.clip(lengths - start, 0, chunk).astype(np.int32)
        last, caches = _extend(model, token_ids[:, start : start + chunk], caches, counts)
        logits = last if logits is None else jnp.where((counts > 0)[:, None], last, logits)

    def advance(tokens: Array) -> Array:
        nonlocal caches
        logits, caches = _extend(model, tokens[:, None], caches, None)
        return logits

    assert logits is not None
    return logits, advance


@jax.jit
def _last_logits(model: Transformer, token_ids: Array, lengths: Array) -> Array:
    logits = model(token_ids, lengths)
    return jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]


def _without_cache(model: Transformer, rows: list[list[int]], capacity: int) -> tuple[Array, Advance]:
    """As `_with_cache`."""
    rows = [list(row) for row in rows]

    def evaluate() -> Array:
        return _last_logits(model, _padded(rows, capacity), np.array([len(row) for row in rows], np.int32))

    def advance(tokens: Array) -> Array:
        for row, token in zip(rows, np.asarray(tokens).tolist(), strict=True):
            row.append(token)
        return evaluate()

    return evaluate(), advance


def _padded(rows: list[list[int]], length: int) -> np.ndarray:
    token_ids = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = row
    return token_ids


def _chooser(
    rows: list[list[int]], temperature: float, top_k: int | None, top_p: float | None, key: Array | None
) -> Callable[[Array, int], Array]:
    """The function that takes the logits of a step to a token for each row."""
    temperature = checks.finite_number("temperature", temperature, least=0.0)
    top_k = None if top_k is None else checks.positive_int("top_k", top_k)
    if top_p is not None:
        sampling.check_top_p(top_p)
    if temperature == 0:
        for name, x in (("top_k", top_k), ("top_p", top_p)):
            if x is not None:
                raise ValueError(f"{name} has no effect at temperature 0, got {x}")
        return lambda logits, step: _likeliest(logits)
    if key is None:
        raise ValueError(f"key must be a key of jax.random.key where temperature > 0, got None at {temperature}")
    key = checks.prng_key("key", key)
    top_p = None if top_p == 1 else top_p  # all of them, without a sum that may round to 1 before its end
    if not rows:
        return lambda logits, step: logits
    # By what the prompt says and how often it was there before, not by its place: alone or in a batch, one draw.
    texts = [tuple(row) for row in rows]
    salts = [(zlib.crc32(np.array(text, np.int64).tobytes()), texts[:i].count(text)) for i, text in enumerate(texts)]
    fold = jax.vmap(jax.random.fold_in, (None, 0)), jax.vmap(jax.random.fold_in)
    keys = fold[1](fold[0](key, np.array([salt for salt, _ in salts], np.uint32)), np.array([n for _, n in salts]))
    return lambda logits, step: _draw(logits, keys, step, temperature, top_p, top_k=top_k)


@jax.jit
def _likeliest(logits: Array) -> Array:
    return logits.argmax(axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="top_k")
def _draw(
    logits: Array, keys: Array, step: int, temperature: float, top_p: float | None, *, top_k: int | None
) -> Array:
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return sampling.sample(logits, keys, temperature=temperature, top_k=top_k, top_p=top_p)


def _encode(loaded: LoadedModel, prompts: Prompt | Sequence[Prompt], *, chat: bool) -> list[list[int]]:
    """The token ids of each prompt."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts must be a text or a list of prompts, got {type(prompts).__name__}")
    rows = []
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        if isinstance(prompt, str):
            if loaded.tokenizer is None:
                raise ValueError(f"{name} must be token ids: no tokenizer came with {loaded.source}")
            text = chat_prompt(loaded, [{"role": "user", "content": prompt}]) if chat and prompt else prompt
            ids = loaded.tokenizer.encode(text).ids if text else []
        elif chat or isinstance(prompt, (bytes, int)) or not isinstance(prompt, (Sequence, np.ndarray)):
            expected = "a text where chat=True" if chat else "a text or a list of token ids"
            raise TypeError(f"{name} must be {expected}, got {type(prompt).__name__}")
        else:
            if len(prompt) and not np.issubdtype(np.asarray(prompt).dtype, np.integer):
                raise TypeError(f"{name} must hold integers, got {prompt!r}")
            ids = [int(one) for one in prompt]
            checks.within(name, np.asarray(ids), 0, loaded.config.vocabulary_size - 1)
        if not ids:
            raise ValueError(f"{name} must hold at least one token, got {prompt!r}")
        rows.append(ids)
    return rows


def _stop_ids(loaded: LoadedModel, stop_tokens: Sequence[int | str] | None) -> frozenset[int]:
    if stop_tokens is None:
        return frozenset(loaded.stop_tokens)
    if isinstance(stop_tokens, (str, bytes)) or not isinstance(stop_tokens, Sequence):
        raise TypeError(f"stop_tokens must be a list of ids and names, got {stop_tokens!r}")
    ids = set()
    for stop in stop_tokens:
        if isinstance(stop, str):
            found = None if loaded.tokenizer is None else loaded.tokenizer.token_to_id(stop)
            if found is None:
                raise ValueError(f"stop_tokens must be tokens of the vocabulary, got {stop!r}")
            ids.add(found)
        else:
            ids.add(checks.positive_int("stop_tokens", stop, least=0))
            checks.within("stop_tokens", np.asarray(stop), 0, loaded.config.vocabulary_size - 1)
    return frozenset(ids)


def _capacity(rows: list[list[int]], new: int, capacity: int | None, most: int | None) -> int:
    """The slots that the longest prompt and its new tokens need, rounded up, or as many as are asked for."""
    longest = max(map(len, rows))
    needed = longest + new - 1  # the last token is not read
    limit = most if capacity is None else checks.positive_int("capacity", capacity)
    if limit is not None and needed > limit:
        name = "the model's max_length" if capacity is None else "capacity"
        raise ValueError(
            f"prompts must fit the cache: the longest has {longest} tokens, with {new} new ones it takes {needed} "
            f"slots, and {name} is {limit}"
        )
    rounded = -(-needed // _STEP) * _STEP
    return capacity if capacity is not None else rounded if most is None else min(rounded, most)
