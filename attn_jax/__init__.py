"""The attention laboratory for JAX.

Attention is differentiable soft addressing: queries are matched to keys, the scores become routing weights, and the
weights fetch values. The links of that chain, each in a file of its own:

    positions -> projections -> heads -> scale -> mask -> softmax -> values -> output projection
"""

import importlib
from typing import TYPE_CHECKING, Any

from attn_jax import biases, diagnostics, linear, lowrank, masks, positions, routed, scaling
from attn_jax.exact import (
    Blockwise,
    Choice,
    KVCache,
    attention_weights,
    cached_attention,
    choose_implementation,
    dot_product_attention,
    empty_cache,
)
from attn_jax.linear import linear_attention, retention, state_space
from attn_jax.lowrank import linformer_attention, nystrom_attention
from attn_jax.projections import merge_heads, project_out, project_qkv, split_heads
from attn_jax.routed import lsh_attention, routing_attention

if TYPE_CHECKING:
    from attn_jax import models, nn, training

__version__ = "0.1.0"

__all__ = [
    "Blockwise",
    "Choice",
    "KVCache",
    "attention_weights",
    "biases",
    "cached_attention",
    "choose_implementation",
    "diagnostics",
    "dot_product_attention",
    "empty_cache",
    "linear",
    "linear_attention",
    "linformer_attention",
    "lowrank",
    "lsh_attention",
    "masks",
    "merge_heads",
    "models",
    "nn",
    "nystrom_attention",
    "positions",
    "project_out",
    "project_qkv",
    "retention",
    "routed",
    "routing_attention",
    "scaling",
    "split_heads",
    "state_space",
    "training",
]

_LAZY = ("models", "nn", "training")  # they import Flax, optax and the readers and writers of checkpoints


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"attn_jax.{name}")
    raise AttributeError(f"module 'attn_jax' has no attribute {name!r}")
