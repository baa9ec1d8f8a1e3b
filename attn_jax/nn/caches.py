"""What a transformer keeps of a sequence that goes on: a cache for each kind of layer, `[layers of the kind, *B, ...]`.

A kind with attention has a `KVCache`, with the keys already rotated; one with another mixer has that mixer's state.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.exact.cache import KVCache, empty_cache
from attn_jax.nn.block import TransformerBlock
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.layers import stacks_of
from attn_jax.nn.mixers import Mixer
from attn_jax.nn.parameters import floating_name

Layers = TransformerBlock | Sequence[TransformerBlock]


def empty_caches(
    config: TransformerConfig,
    layers: Layers,
    batch: int | tuple[int, ...],
    capacity: int,
    *,
    dtype: DTypeLike | None = None,
) -> tuple[Any, ...]:
    """As `Transformer.empty_cache`, of a configuration and its layers."""
    batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    capacity = checks.positive_int("capacity", capacity)
    if config.max_length is not None and capacity > config.max_length:
        raise ValueError(f"capacity must be at most max_length = {config.max_length}, got {capacity}")
    dtype = floating_name("dtype", dtype or config.dtype or config.param_dtype)
    caches = []
    for kind, attention in enumerate(config.layer_attention):
        count = _count(config, kind)
        if attention is None:
            caches.append(_mixer(layers, kind).empty_state((count, *batch), dtype=dtype))
            continue
        window = None if attention.window is None else attention.window[0] + 1
        window = None if window is None or window >= capacity else window
        caches.append(
            empty_cache(
                (count, *batch),
                window or capacity,
                attention.sizes.num_kv_heads,
                attention.sizes.head_width,
                value_width=attention.sizes.value_width,
                dtype=dtype,
                window=window,
            )
        )
    return tuple(caches)


def check_caches(
    config: TransformerConfig, layers: Layers, caches: Any, token_ids: jax.Array, lengths: jax.Array | None
) -> None:
    """Raises unless `caches` are those of `empty_caches` for this batch, with room for the tokens that count."""
    kinds = config.layer_attention
    types = [KVCache if own is not None else _mixer(layers, kind).state_type for kind, own in enumerate(kinds)]
    if not isinstance(caches, tuple) or [type(cache) for cache in caches] != types:
        names = " or ".join(dict.fromkeys(one.__name__ for one in types))
        raise TypeError(
            f"caches must be a tuple of {len(types)} {names}, as empty_cache makes it, got {type(caches).__name__}"
        )
    for kind, cache in enumerate(caches):
        checks.shape("caches", cache.lengths, (_count(config, kind), *token_ids.shape[:-1]), "[layers, *B]")
    for cache in caches:
        if isinstance(cache, KVCache):
            cache.check_room(token_ids.shape[-1], lengths)


def append(caches: tuple[Any, ...], new: tuple[Any, ...], lengths: jax.Array | None) -> tuple[Any, ...]:
    """The caches after tokens whose keys and values are `new`, or where `new` is the state of a mixer, that."""
    return tuple(
        cache.append(one[0], one[1], lengths) if isinstance(cache, KVCache) else one
        for cache, one in zip(caches, new, strict=True)
    )


def _count(config: TransformerConfig, kind: int) -> int:
    """How many layers there are of a kind."""
    return len(range(kind, config.num_layers, len(config.layer_attention)))


def _mixer(layers: Layers, kind: int) -> Mixer[Any]:
    """The mixers of the layers of a kind that has no attention, stacked."""
    stacks = stacks_of(layers)
    mixer = stacks[kind if len(stacks) > 1 else 0].mixer
    assert mixer is not None
    return mixer
