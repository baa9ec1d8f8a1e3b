"""Patterns that have a name of their own, each a composition of masks.

Sliding, dilated, block-diagonal and prefix attention are masks by themselves: `SlidingWindow`, `Dilated`,
`BlockDiagonal`, `PrefixLM`.
"""

from attn_jax import checks
from attn_jax.masks.base import Mask
from attn_jax.masks.blocks import RandomBlocks
from attn_jax.masks.counts import count_or_array
from attn_jax.masks.data import Segments
from attn_jax.masks.positional import Causal, GlobalTokens, LocalWindow, Strided
from attn_jax.typing import ArrayLike, Int


def longformer(window: int, global_tokens: int | Int[ArrayLike, "*b"]) -> Mask:
    """A window around each query, and a few tokens that see all and are seen by all.

    `|q - k| <= window or k < n or q < n`, n = `global_tokens`. `Causal() & longformer(...)` is its decoder.

    Args:
        window: how many keys on either side; the paper's w is `2 · window`.
        global_tokens: how many; a number, or an int array `[*B]`.

    Raises:
        ValueError, TypeError: a number below 0 or no integer.

    Reference: Beltagy et al. 2020, section 3.1.

    >>> from attn_jax import masks
    >>> print(masks.materialize(masks.longformer(1, global_tokens=1), 5).astype(int))
    [[1 1 1 1 1]
     [1 1 1 0 0]
     [1 1 1 1 0]
     [1 0 1 1 1]
     [1 0 0 1 1]]
    """
    return _window(window) | _global_tokens(global_tokens)


def bigbird(
    window: int,
    global_tokens: int | Int[ArrayLike, "*b"],
    *,
    per_row: int,
    block: int,
    seed: int = 0,
    length: int | None = None,
) -> Mask:
    """A window, global tokens, and random blocks that make any two tokens close in the graph of attention.

    `|q - k| <= window or k < n or q < n or k div block in drawn(q div block)`, n = `global_tokens`.

    Args:
        window, global_tokens: as in `longformer`; the paper's windows and global tokens are multiples of `block`.
        per_row: how many random blocks of keys each block of queries sees.
        block: how many tokens a block has.
        seed: which blocks are drawn.
        length: of the sequence, as in `RandomBlocks`; None for the number of keys.

    Raises:
        ValueError, TypeError: a number below its least (0; 1 for `per_row`, `block` and `length`) or no integer.

    Reference: Zaheer et al. 2020, section 2 and appendix D.

    >>> from attn_jax import masks
    >>> masks.count_tiles(masks.bigbird(64, 64, per_row=3, block=64), 8192, tile=(64, 64))  # visits 1,007 of 16,384
    TileCounts(empty=15377, mixed=245, full=762)
    """
    return longformer(window, global_tokens) | RandomBlocks(seed, per_row, block, length)


def sparse_transformer(stride: int) -> Mask:
    """Causal: the last `stride` keys, and every `stride`-th one before, so that two layers reach everything.

    `k <= q and (q - k <= stride or (q - k) mod stride = 0)`

    Args:
        stride: how many keys the window reaches back, and the distance between those before it.

    Raises:
        ValueError, TypeError: a stride below 1 or no integer.

    Reference: Child et al. 2019, section 4.3, strided attention, its two heads merged (equation 7).

    >>> from attn_jax import masks
    >>> print(masks.materialize(masks.sparse_transformer(2), 5).astype(int))
    [[1 0 0 0 0]
     [1 1 0 0 0]
     [1 1 1 0 0]
     [0 1 1 1 0]
     [1 0 1 1 1]]
    """
    return Causal() & (Strided(stride) | LocalWindow(stride, 0))


def documents(query_ids: Int[ArrayLike, "*#b t"], key_ids: Int[ArrayLike, "*#b s"] | None = None) -> Mask:
    """Causal inside each of the documents that are packed in one row: `k <= q and query_ids[q] = key_ids[k]`.

    Args:
        query_ids: the document of each query, int `[T]` or `[*B, T]`.
        key_ids: that of each key, int `[S]` or `[*B, S]`; None for the query's.

    Raises:
        TypeError: ids that are no integers.

    >>> import jax.numpy as jnp
    >>> from attn_jax import masks
    >>> masks.materialize(masks.documents(jnp.array([7, 7, 8, 8])), 4).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    return Causal() & Segments(query_ids, key_ids)


def _window(window: int) -> Mask:
    window = checks.positive_int("window", window, least=0)
    return LocalWindow(window, window)


def _global_tokens(n: int | Int[ArrayLike, "*b"]) -> Mask:
    return GlobalTokens(count_or_array("global_tokens", n))
