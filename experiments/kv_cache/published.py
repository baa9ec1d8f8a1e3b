"""Sizes of published models, and what a step of decoding reads of each: weights and cache, counted from the arrays."""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx

from attn_jax.nn import LayerOptions, Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Published:
    """A model: its sizes and the context that it was trained for."""

    config: TransformerConfig
    context: int


MODELS = {
    "GPT-2 124M": Published(
        TransformerConfig(
            50257, 12, 768, 12, mlp="plain", norm="layer", use_bias=True, positions="learned", max_length=1024
        ),
        1024,
    ),
    "SmolLM2 135M": Published(TransformerConfig(49152, 30, 576, 9, num_kv_heads=3, mlp_width=1536), 8192),
    "Gemma 3 270M": Published(
        TransformerConfig(
            262144, 18, 640, 4, num_kv_heads=1, head_width=256, mlp_width=2048, norm_position="both", qk_norm="rms",
            layer_pattern=(LayerOptions(local_window_size=(511, 0)),) * 5 + (LayerOptions(rotary_base=1e6),),
        ),
        32768,
    ),
    "Llama 2 7B": Published(TransformerConfig(32000, 32, 4096, 32, mlp_width=11008, head="untied"), 4096),
    "Llama 3 8B": Published(
        TransformerConfig(128256, 32, 4096, 32, num_kv_heads=8, mlp_width=14336, head="untied", rotary_base=5e5), 8192
    ),
}  # fmt: skip


@functools.cache
def abstract(config: TransformerConfig) -> Transformer:
    """The model without its numbers."""
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def weights_read(config: TransformerConfig) -> int:
    """Parameters that one step reads: all but tables of which it reads a row."""
    model = abstract(config)
    rows = [model.position_embedding] + ([model.embedding] if config.head == "untied" else [])
    return _size(nnx.state(model)) - _size(rows)


def cache_read(config: TransformerConfig, context: int) -> int:
    """Numbers of the cache that one step reads for an item with `context` tokens: all its slots."""
    caches = jax.eval_shape(lambda: abstract(config).empty_cache(1, context))
    return sum(_size((cache.key, cache.value)) for cache in caches)


def crossing(config: TransformerConfig, *, batch: int, weight_over_cache: float) -> float:
    """n*: the context at which the cache of a batch takes the bytes of the weights; inf if rings end before.

    `weight_over_cache` is the bytes of a weight over those of a number in the cache.
    """
    config = dataclasses.replace(config, max_length=2**62) if config.max_length else config
    target, longest = weights_read(config) * weight_over_cache / batch, 1
    while cache_read(config, longest) < target:
        longest *= 2
        if longest > 2**40:
            return math.inf
    low = longest // 2  # between the two, the bytes grow in at most two straight pieces: halving finds n*
    while longest - low > 1:
        middle = (low + longest) // 2
        low, longest = (middle, longest) if cache_read(config, middle) < target else (low, middle)
    return float(longest)


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
