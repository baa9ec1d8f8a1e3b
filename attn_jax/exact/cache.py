"""Caches of keys and values, for decoding: what has been seen is stored, and new tokens attend to it.

A cache is a pytree of fixed shape, so one trace serves every step. Each item of the batch has a length of its own.

    full       slot s holds the token at position s
    rolling    a ring: slot s holds the last token at a position p with p mod C = s, for attention in a window

Attention of new tokens reads the cache and does not write it: one part over what is stored, one over the new keys,
merged by their log-sum-exps. So any cutting of a sequence (a prefill, chunks, single tokens) gives what one call
gives, for a ring as well.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_jax import biases, checks, masks
from attn_jax.exact.arguments import window_pair
from attn_jax.exact.attention import dot_product_attention
from attn_jax.exact.merge import merge_attention
from attn_jax.lazy import Lazy
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens of each item so far; made by `empty_cache`.

    Heads come before slots in memory: a decoding step then reads each head's keys in one stretch.

    Attributes:
        key: `[*B, K, C, H]`, C the capacity.
        value: `[*B, K, C, V]`.
        lengths: int32 `[*B]`, tokens seen so far: the position of the next one. At most C in a full cache.
        overflowed: boolean `[*B]`, whether a full cache was given tokens, under `jit`, that it had no slot for.
        window: None for a full cache; w for a ring, whose attention reaches w keys back, the query's own included.

    >>> from attn_jax import empty_cache
    >>> x = jnp.ones((1, 3, 1, 4))
    >>> cache = empty_cache(1, 5, num_kv_heads=1, head_width=4).append(x, x)
    >>> cache.lengths.tolist(), cache.positions.tolist()
    ([3], [[0, 1, 2, -1, -1]])
    >>> cache.append(x, x)
    Traceback (most recent call last):
    ValueError: cache must have room for the tokens it is given: its capacity is 5, and an item would have 6
    """

    key: Float[Array, "*b k c h"]
    value: Float[Array, "*b k c v"]
    lengths: Int[Array, "*b"]
    overflowed: Bool[Array, "*b"]
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """C, the number of slots of an item."""
        return self.key.shape[-2]

    @property
    def positions(self) -> Int[Array, "*b c"]:
        """Where the token of each slot sits, -1 for an empty slot."""
        slots = jnp.arange(self.capacity, dtype=self.lengths.dtype).reshape((1,) * self.lengths.ndim + (-1,))
        last = self.lengths[..., None] - 1
        return jnp.maximum(last - (last - slots) % self.capacity, -1)

    def check_room(self, length: int, counts: ArrayLike | None = None) -> None:
        """Raises if a full cache has no slot for `length` (or `counts`) more tokens; a traced length is not seen."""
        if self.window is not None or not checks.is_concrete(self.lengths):
            return
        counts = self._check_counts(counts, length)
        if not checks.is_concrete(counts):
            return
        with jax.ensure_compile_time_eval():
            longest = int((self.lengths + counts).max(initial=0))
        if longest > self.capacity:
            raise ValueError(
                f"cache must have room for the tokens it is given: its capacity is {self.capacity}, "
                f"and an item would have {longest}"
            )

    def append(
        self, key: Float[ArrayLike, "*b t k h"], value: Float[ArrayLike, "*b t k v"], counts: ArrayLike | None = None
    ) -> "KVCache":
        """The cache with T more tokens, each item's after its own; rounded to the dtype of the cache.

        A full cache that has no slot for them raises. Under `jit`, where lengths are not known, it stores those that
        it has slots for, leaves all that is stored as it is, and sets `overflowed`. A ring keeps the last C.

        Donate the cache (`jax.jit(..., donate_argnums=...)`), or the whole of it is copied.

        Args:
            key: `[*B, T, K, H]`, already rotated if keys are.
            value: `[*B, T, K, V]`.
            counts: int, broadcastable to `[*B]`: how many of the T tokens of each item to add, the first ones.

        Raises:
            ValueError, TypeError: on a wrong shape, dtype or value; on tokens for which there is no room.
        """
        key, value = self._check_new(key, value)
        length = key.shape[-3]
        self.check_room(length, counts)
        added = self._check_counts(counts, length)
        if length == 0:
            return self
        lengths, overflowed = self.lengths + added, self.overflowed
        if self.window is None:
            overflowed = overflowed | (lengths > self.capacity)
            lengths = jnp.minimum(lengths, self.capacity)
        # Each slot asks which of the new tokens it holds now: no write can be moved to where it does not belong.
        token, holds = self._tokens(length, lengths - self.lengths)

        def put(old: Array, new: Array) -> Array:
            new = jnp.swapaxes(new, -2, -3).astype(old.dtype)
            if length > 1:
                new = jnp.take_along_axis(new, token[..., None, :, None], axis=-2)
            return jnp.where(holds[..., None, :, None], new, old)

        return KVCache(put(self.key, key), put(self.value, value), lengths, overflowed, self.window)

    def _tokens(self, length: int, added: Int[Array, "*b"]) -> tuple[Int[Array, "*b c"], Bool[Array, "*b c"]]:
        """Which of `length` new tokens, the first `added` of which count, goes to each slot, and whether one does."""
        slots = jnp.arange(self.capacity, dtype=added.dtype).reshape((1,) * added.ndim + (-1,))
        ahead = slots - (self.lengths % self.capacity)[..., None]
        ahead = jnp.where(ahead < 0, ahead + self.capacity, ahead)  # the first that goes there
        added = added[..., None]
        holds = ahead < added
        if length > self.capacity:  # a ring keeps the last that goes there
            ahead = added - 1 - (added - 1 - ahead) % self.capacity
        return jnp.clip(ahead, 0, length - 1), holds

    def _check_new(self, key: ArrayLike, value: ArrayLike) -> tuple[Array, Array]:
        key, value = checks.floating_array("key", key), checks.floating_array("value", value)
        for name, x, stored, letter in (("key", key, self.key, "H"), ("value", value, self.value, "V")):
            *batch, num_kv_heads, _, width = stored.shape
            axes = f"[*B, T, K, {letter}] of the cache"
            checks.minimum_rank(name, x, 3, axes)
            checks.shape(name, x, (*batch, key.shape[-3], num_kv_heads, width), axes)
        return key, value

    def _check_counts(self, counts: ArrayLike | None, length: int) -> Int[Array, "*b"]:
        counts = checks.wide_integers("counts", length if counts is None else counts)
        checks.within("counts", counts, 0, length)
        batch = self.lengths.shape
        if counts.ndim:
            checks.rank("counts", counts, range(len(batch) + 1), "[] or broadcastable to [*B]")
            checks.broadcastable("counts", counts, batch[len(batch) - counts.ndim :], "[*B]")
        return jnp.broadcast_to(counts.reshape((1,) * (len(batch) - counts.ndim) + counts.shape), batch)


def empty_cache(
    batch: int | tuple[int, ...],
    capacity: int,
    num_kv_heads: int,
    head_width: int,
    *,
    value_width: int | None = None,
    dtype: DTypeLike = jnp.float32,
    window: int | None = None,
) -> KVCache:
    """A cache without tokens.

    Args:
        batch: B, or the batch axes (a stack over layers is one more of them).
        capacity: C, the slots of each item.
        num_kv_heads: K.
        head_width: H.
        value_width: V; None: H.
        dtype: of keys and values.
        window: None for a full cache; w for a ring of C >= w slots, whose attention reaches w keys back, the query's
            own included: `masks.SlidingWindow(w)`, or `local_window_size=(w - 1, 0)`.

    Raises:
        ValueError, TypeError: on a size that is not a positive integer, or a window beyond the capacity.

    >>> x, ring = jnp.ones((1, 3, 1, 4)), empty_cache(1, 2, num_kv_heads=1, head_width=4, window=2)
    >>> ring.positions.tolist(), ring.append(x, x).positions.tolist()  # -1 is an empty slot
    ([[-1, -1]], [[2, 1]])
    """
    sizes = {"capacity": capacity, "num_kv_heads": num_kv_heads, "head_width": head_width}
    capacity, num_kv_heads, head_width = (checks.positive_int(name, x) for name, x in sizes.items())
    value_width = head_width if value_width is None else checks.positive_int("value_width", value_width)
    batch = tuple(checks.positive_int("batch", x) for x in (batch if isinstance(batch, (tuple, list)) else (batch,)))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    if window is not None and checks.positive_int("window", window) > capacity:
        raise ValueError(f"window must be at most the capacity {capacity}, got {window}")
    return KVCache(
        key=jnp.zeros((*batch, num_kv_heads, capacity, head_width), dtype),
        value=jnp.zeros((*batch, num_kv_heads, capacity, value_width), dtype),
        lengths=jnp.zeros(batch, jnp.int32),
        overflowed=jnp.zeros(batch, bool),
        window=window,
    )


def cached_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b t k h"],
    value: Float[ArrayLike, "*b t k v"],
    cache: KVCache,
    bias: biases.Bias | None = None,
    mask: masks.Mask | None = None,
    *,
    counts: ArrayLike | None = None,
    scale: float | ArrayLike | None = None,
    is_causal: bool = True,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
    attention_fn: Callable[..., Any] = dot_product_attention,
) -> Float[Array, "*b t n v"]:
    """Causal attention of T new tokens: to those that the cache holds, and to the new ones up to themselves.

    The cache is read, not written: `cache.append(key, value, counts)` comes after. New token i of an item sits at
    position `cache.lengths + i`; masks and biases that read positions go with any cutting of a sequence into calls.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, T, K, H]` of the new tokens.
        value: `[*B, T, K, V]`.
        cache: what came before them.
        bias, mask: lazy, and of positions; arrays and segments, which belong to one square, are refused.
        counts: int, broadcastable to `[*B]`: how many of the T tokens of each item count; the others give 0.
        is_causal: must be True: what is stored has not seen what follows.
        local_window_size: as in `dot_product_attention`. A ring has the window `(w - 1, 0)` also without it, and
            refuses one that reaches farther back.
        scale, logits_soft_cap, sinks, precision: as in `dot_product_attention`.
        dropout_rate: must be 0.
        attention_fn: what attends to each part: `dot_product_attention`, or a function that takes its arguments.

    Returns:
        `[*B, T, N, V]` in the query's dtype.

    Raises:
        ValueError, TypeError: as `dot_product_attention`, and where something above is refused.

    >>> x = jax.random.normal(jax.random.key(0), (1, 4, 1, 4))
    >>> cache, last = empty_cache(1, 8, num_kv_heads=1, head_width=4).append(x[:, :3], x[:, :3]), x[:, 3:]
    >>> decoded = jax.jit(cached_attention)(last, last, last, cache)
    >>> bool(jnp.allclose(decoded, dot_product_attention(x, x, x, is_causal=True)[:, 3:], atol=1e-5))
    True
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, as empty_cache makes it, got {type(cache).__name__}")
    key, value = cache._check_new(key, value)
    query = checks.floating_array("query", query)
    checks.minimum_rank("query", query, 3, "[*B, T, N, H]")
    checks.shape("query", query, (*key.shape[:-2], *query.shape[-2:]), "[*B, T, N, H] of the key")
    if not checks.boolean("is_causal", is_causal):
        raise ValueError("is_causal must be True with a cache: what is stored has not seen what follows")
    if checks.rate("dropout_rate", dropout_rate):
        raise ValueError(f"dropout_rate must be 0 with a cache, got {dropout_rate}")
    _check_positional("bias", bias)
    _check_positional("mask", mask)
    length = query.shape[-3]
    options = {
        "bias": bias,
        "mask": mask,
        "scale": scale,
        "local_window_size": _window(local_window_size, cache.window),
        "logits_soft_cap": logits_soft_cap,
        "precision": precision,
        "query_seq_lengths": None if counts is None else cache._check_counts(counts, length),
    }
    options = {name: option for name, option in options.items() if option is not None}
    attend = functools.partial(attention_fn, query, return_residual=True, **options)

    steps = jnp.arange(length, dtype=cache.lengths.dtype).reshape((1,) * cache.lengths.ndim + (-1,))
    positions = cache.lengths[..., None] + steps
    # Shifting both by what is stored changes nothing for causality and windows, and lets tiles be planned ahead.
    absolute = {} if bias is None and mask is None else {"query_positions": positions, "key_positions": positions}
    new = attend(key, value, is_causal=True, **absolute)
    slots = (jnp.swapaxes(x, -2, -3).astype(query.dtype) for x in (cache.key, cache.value))
    stored = attend(*slots, query_positions=positions, key_positions=cache.positions)
    output, _ = merge_attention(*zip(stored, new, strict=True), sinks=sinks)
    return output


def _check_positional(name: str, lazy: Any) -> None:
    """Raises unless all of a mask or bias is a function of positions."""
    if lazy is None:
        return
    if not isinstance(lazy, Lazy):
        raise TypeError(f"{name} must be lazy with a cache, since an array belongs to one square; got {type(lazy)}")
    if isinstance(lazy, (masks.Array, masks.Segments, biases.Array)):
        raise ValueError(f"{name} must read positions with a cache, got {type(lazy).__name__}, which reads entries")
    for field in dataclasses.fields(lazy):  # pyright: ignore[reportArgumentType]
        if isinstance(getattr(lazy, field.name), Lazy):
            _check_positional(name, getattr(lazy, field.name))


def _window(local_window_size: int | tuple[int, int] | None, width: int | None) -> tuple[int, int] | None:
    """The window of an attention call and that of a ring, as one."""
    window = window_pair(local_window_size)
    if width is None:
        return window
    if window is None:
        return width - 1, 0
    if window[0] >= width:
        raise ValueError(
            f"local_window_size must reach at most {width - 1} back with a window of {width}, got {window}"
        )
    return window
