"""What attention costs, counted: FLOPs and bytes over the tiles that a mask touches, a compiled program's memory.

XLA's cost analysis counts the body of a loop once, so the tile loop is counted here; of programs without loops XLA's
count is right. Products alone are counted, two FLOPs a multiply-add: what else is done to a logit costs little next to
the width of a head. Per tile of t queries and s keys:

    forward    q·k, p·v                                            2 products, reads k and v
    backward   q·k again, do·v, pᵀ·do, dsᵀ·q, ds·k                  5 products, reads k and v, adds to dk and dv

What a tile makes for itself and hands to nobody stays in the cache: that is the model of bytes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from attn_jax import masks
from attn_jax.exact.tiles import Blockwise, choose_blocks
from attn_jax.lazy import Square
from experiments.estimates import Estimate

PRODUCTS = {"forward": 2, "backward": 5}  # of the tile loop
DENSE_PRODUCTS = {"forward": 2, "backward": 4}  # it keeps the weights


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of the products, and bytes that leave or enter the cache."""

    flops: int
    bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def tile_of(mask: masks.Mask | None, length: int, *, heads: int, kv_heads: int) -> tuple[int, int]:
    """The tile that `implementation="blockwise"` chooses for this mask, this length and these heads."""
    square = Square((1, heads, length, length))
    blocks = choose_blocks(square, kv_heads, Blockwise(), mask)
    return blocks.queries, blocks.keys


def touched_share(mask: masks.Mask | None, length: int, tile: tuple[int, int]) -> float:
    """Tiles that the mask touches, over all tiles."""
    visited, total = _tiles(mask, length, tile)
    return visited / total


def tile_loop(
    direction: str,
    mask: masks.Mask | None,
    length: int,
    tile: tuple[int, int],
    *,
    heads: int,
    kv_heads: int,
    width: int,
    itemsize: int = 4,
) -> Work:
    """The work of the tile loop on n queries and n keys, in one direction ("forward" or "backward")."""
    visited, _ = _tiles(mask, length, tile)
    queries, keys = tile
    rows = -(-length // queries) * queries * heads
    per_row = {"forward": 2 * width + 1, "backward": 4 * width + 1}  # q, o; q, o, do, dq; and the log-sum-exp
    per_key = {"forward": 2 * width, "backward": 6 * width}  # k, v; k, v, and dk, dv read and written
    moved = rows * per_row[direction] + visited * keys * kv_heads * per_key[direction]
    return Work(PRODUCTS[direction] * 2 * width * heads * visited * queries * keys, moved * itemsize)


def dense_flops(direction: str, length: int, *, heads: int, width: int) -> int:
    """FLOPs of the products of the whole square, in one direction."""
    return DENSE_PRODUCTS[direction] * 2 * width * heads * length**2


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Memory that the compiled program takes besides its arguments and its results; nothing is run."""
    return int(_compiled(function, arguments).memory_analysis().temp_size_in_bytes)


def xla_cost(function: Callable[..., Any], *arguments: Any) -> Work:
    """XLA's own count for the compiled program: right where it has no loop. All operations, not products alone."""
    cost = _compiled(function, arguments).cost_analysis()
    return Work(int(cost["flops"]), int(cost["bytes accessed"]))


def counted_exponent(x: ArrayLike, y: ArrayLike) -> Estimate:
    """The exponent e of y ∝ x^e, least squares on logarithms; its range over neighbouring points is the interval.

    For counted numbers, which are the same in every run: there is nothing to sample.
    """
    logs_x, logs_y = (np.log(np.asarray(values, dtype=np.float64)) for values in (x, y))
    if logs_x.ndim != 1 or logs_x.shape != logs_y.shape or logs_x.size < 2:
        raise ValueError(f"x and y must be [points], at least two, got shapes {logs_x.shape} and {logs_y.shape}")
    local = np.diff(logs_y) / np.diff(logs_x)
    centred = logs_x - logs_x.mean()
    return Estimate(float(logs_y @ centred / (centred @ centred)), float(local.min()), float(local.max()), None)


def _compiled(function: Any, arguments: Sequence[Any]) -> Any:
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*arguments).compile()


def _tiles(mask: masks.Mask | None, length: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles are visited, and how many there are."""
    if mask is None:
        total = -(-length // tile[0]) * -(-length // tile[1])
        return total, total
    counts = masks.count_tiles(mask, length, tile=tile)
    return counts.mixed + counts.full, counts.empty + counts.mixed + counts.full
