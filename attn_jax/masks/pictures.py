"""Masks to look at: as arrays, as counts of tiles, as pictures."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.lazy import Grid, Square
from attn_jax.masks.base import Mask, as_mask
from attn_jax.typing import ArrayLike, Bool, UInt8

# By the kind of the tile an entry lies in: empty, mixed, full, or no tiles at all; then hidden, visible.
COLOURS = np.array(
    [
        [(255, 255, 255), (255, 255, 255)],
        [(252, 228, 190), (213, 94, 0)],
        [(0, 114, 178), (0, 114, 178)],
        [(242, 242, 242), (0, 114, 178)],
    ],
    np.uint8,
)  # fmt: skip


class TileCounts(NamedTuple):
    """How many tiles a mask leaves empty (never visited), mixed (masked entry by entry) and full (no mask needed).

    >>> from attn_jax import masks
    >>> counts = masks.count_tiles(masks.Causal(), 8, tile=(2, 2))
    >>> counts
    TileCounts(empty=6, mixed=4, full=6)
    >>> (counts.mixed + counts.full) / sum(counts)  # the share of the square that is worked on
    0.625
    """

    empty: int
    mixed: int
    full: int


def materialize(
    mask: Mask | Bool[ArrayLike, "t s"], query_length: int, key_length: int | None = None
) -> Bool[jax.Array, "t s"]:
    """The mask as an array, to look at. Keep it small: this is the square that lazy masks avoid.

    Args:
        mask: a mask that does not depend on the batch item or the head.
        query_length: T.
        key_length: S; None for T.

    Returns:
        Boolean `[T, S]`, for queries at `0..T-1` and keys at `0..S-1`.

    Raises:
        ValueError, TypeError: a length below 0, or a mask of other lengths.

    >>> from attn_jax.masks import SlidingWindow
    >>> materialize(SlidingWindow(2), 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    square = _square(query_length, key_length)
    return jnp.broadcast_to(as_mask("mask", mask).evaluate(square.whole()), square.shape)[0]


def count_tiles(
    mask: Mask | Bool[ArrayLike, "t s"],
    query_length: int,
    key_length: int | None = None,
    *,
    tile: tuple[int, int] = (512, 512),
) -> TileCounts:
    """How many tiles of the square the mask leaves empty, mixed and full, as far as it can tell before evaluation.

    A combination may call a tile mixed that is empty or full (two halves that together fill it, say), never the other
    way round. Nothing of the size of the square is computed.

    Args:
        mask: a mask that does not depend on the batch item or the head, and whose arrays are not traced.
        query_length: T.
        key_length: S; None for T.
        tile: (queries, keys) of a tile. The last tile of an axis ends where the axis ends and may overlap the one
            before it.

    Raises:
        ValueError, TypeError: a length below 0, a tile that is not two numbers from 1 on, a mask of other lengths, or
            one that is traced.

    >>> from attn_jax.masks import SlidingWindow
    >>> count_tiles(SlidingWindow(512), 65536)
    TileCounts(empty=16129, mixed=255, full=0)
    """
    kinds = _kinds(mask, _square(query_length, key_length), tile)
    return TileCounts(*(int((kinds == kind).sum()) for kind in range(3)))


def to_image(
    mask: Mask | Bool[ArrayLike, "t s"],
    query_length: int,
    key_length: int | None = None,
    *,
    tile: tuple[int, int] | None = None,
) -> UInt8[np.ndarray, "t s 3"]:
    """The mask as a picture, one pixel an entry: queries go down, keys go right.

    Visible entries are blue. With `tile` the colours tell the tiles apart: empty ones are white, full ones blue, and
    mixed ones orange, on a light orange ground.

    Args:
        mask, query_length, key_length, tile: as in `count_tiles`; None for `tile` shows no tiles.

    Returns:
        Red, green and blue, as `matplotlib.pyplot.imshow` takes them.

    Raises:
        ValueError, TypeError: as in `count_tiles`.

    >>> from attn_jax import masks
    >>> picture = masks.to_image(masks.Causal(), 4, tile=(2, 2))
    >>> picture[0, 3].tolist(), picture[3, 0].tolist()  # in an empty tile, in a full one
    ([255, 255, 255], [0, 114, 178])
    >>> picture[0, 0].tolist(), picture[0, 1].tolist()  # in a mixed one: visible, hidden
    ([213, 94, 0], [252, 228, 190])
    """
    square = _square(query_length, key_length)
    lazy = _concrete(mask)
    with jax.ensure_compile_time_eval():
        visible = np.asarray(materialize(lazy, query_length, key_length))
    if tile is None:
        return COLOURS[3, visible.astype(int)]
    kinds = _kinds(lazy, square, tile)
    rows, columns = (np.arange(length) // size for length, size in zip(square.shape[1:], tile, strict=True))
    return COLOURS[kinds[rows[:, None], columns], visible.astype(int)]


def _square(query_length: int, key_length: int | None) -> Square:
    query_length = checks.positive_int("query_length", query_length, least=0)
    key_length = query_length if key_length is None else checks.positive_int("key_length", key_length, least=0)
    return Square((1, query_length, key_length))


def _concrete(mask: Any) -> Mask:
    mask = as_mask("mask", mask)
    if not all(checks.is_concrete(leaf) for leaf in jax.tree.leaves(mask)):
        raise TypeError(f"mask must be known before anything is traced, got a traced {type(mask).__name__}")
    return mask


def _kinds(mask: Any, square: Square, tile: tuple[int, int]) -> np.ndarray:
    """Of each tile 0 for empty, 1 for mixed, 2 for full, `[nq, nk]`."""
    mask = _concrete(mask)
    if not isinstance(tile, (tuple, list)) or len(tile) != 2:
        raise ValueError(f"tile must be (queries, keys), got {tile!r}")
    queries, keys = (checks.positive_int("tile", size) for size in tile)
    grid = Grid(square, (queries, keys))
    jax.eval_shape(lambda: jnp.broadcast_to(mask.evaluate(square.whole()), square.shape))  # refuses other lengths
    with jax.ensure_compile_time_eval():
        kinds = sum(np.asarray(holds).astype(int) for holds in mask.bounds(grid))
    return np.broadcast_to(kinds, (1, *grid.counts))[0]
