"""Masks: who may attend to whom. True = may attend.

An attention pattern is a small lazy object that reads positions and is evaluated on any tile of (queries × keys).
Patterns combine by `&`, `|` and `~`:

    Causal() & LocalWindow(128, 0)                          sliding window
    LocalWindow(64, 64) | GlobalTokens(2)                   longformer(64, 2)
    ... | RandomBlocks(0, per_row=3, block=64)              bigbird(64, 2, per_row=3, block=64)
    Causal() & (LocalWindow(32, 0) | Strided(32))           sparse_transformer(32)
    Causal() & Segments(ids)                                documents(ids)

`count_tiles` says how much work a pattern leaves, `to_image` shows it. In the formulas q is the position of the query,
k that of the key.
"""

from attn_jax.masks.base import And, Array, Mask, Not, Or, as_mask
from attn_jax.masks.blocks import BlockDiagonal, RandomBlocks
from attn_jax.masks.data import Padding, Segments
from attn_jax.masks.patterns import bigbird, documents, longformer, sparse_transformer
from attn_jax.masks.pictures import TileCounts, count_tiles, materialize, to_image
from attn_jax.masks.positional import Causal, Dilated, GlobalTokens, LocalWindow, PrefixLM, SlidingWindow, Strided

__all__ = [
    "And",
    "Array",
    "BlockDiagonal",
    "Causal",
    "Dilated",
    "GlobalTokens",
    "LocalWindow",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "PrefixLM",
    "RandomBlocks",
    "Segments",
    "SlidingWindow",
    "Strided",
    "TileCounts",
    "as_mask",
    "bigbird",
    "count_tiles",
    "documents",
    "longformer",
    "materialize",
    "sparse_transformer",
    "to_image",
]
