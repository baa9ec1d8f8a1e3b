"""What attention costs, counted: FLOPs and bytes of each mechanism, and a compiled program's memory.

XLA's cost analysis counts the body of a loop once, so the tile loop is counted here; of programs without loops XLA's
count is right. Products alone are counted, two FLOPs a multiply-add: what else is done to a logit costs little next to
the width of a head. Forward, of one item with n queries and n keys, H = V, N query and K key/value heads:

    tile loop      each tile of t queries and s keys: q·k, p·v              reads k and v of the tile
      backward     q·k again, do·v, pᵀ·do, dsᵀ·q, ds·k: 5 products          reads k and v, adds to dk and dv
    Linformer      E K, F V; then tiles of n queries and R keys             reads k, v, E, F; R keys and values go on
    Nyström        R queries × n keys, R × R, its inverse, n × R            reads k and v twice, q twice
    linear         φ(q), φ(k); φ(k) vᵀ and φ(q) S; causal: pairs of a chunk, and S passed from chunk to chunk
    routed         affinities to the groups; then the pairs that meet, as if groups were even

Bytes are those that stages hand over: what a stage or a tile makes for itself and hands to nobody stays in the cache.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from attn_jax import masks
from attn_jax.exact.tiles import Blockwise, choose_blocks
from attn_jax.lazy import Square

PRODUCTS = {"forward": 2, "backward": 5}  # of the tile loop
DENSE_PRODUCTS = {"forward": 2, "backward": 4}  # it keeps the weights


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of the products, and bytes that leave or enter the cache.

    >>> from attn_jax.diagnostics import Work
    >>> Work(flops=200, bytes=64) + Work(flops=100, bytes=32)
    Work(flops=300, bytes=96)
    """

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


def linformer(
    length: int, rank: int, *, heads: int, kv_heads: int, width: int, matrices: int = 2, itemsize: int = 4
) -> Work:
    """The work of `linformer_attention` with R rows; `matrices`: how many `[R, S]` the projections are."""
    projected = 2 * rank * kv_heads * width  # keys and values, written and read
    moved = matrices * rank * length + 2 * length * kv_heads * width + 2 * projected
    moved += length * heads * (2 * width + 1)
    flops = 2 * rank * length * kv_heads * 2 * width + PRODUCTS["forward"] * 2 * width * heads * length * rank
    return Work(flops, moved * itemsize)


def nystrom(
    length: int, landmarks: int, *, heads: int, kv_heads: int, width: int, iterations: int = 6, itemsize: int = 4
) -> Work:
    """The work of `nystrom_attention` with R landmarks and the iterative pseudo-inverse: four products a step."""
    rows = landmarks * heads * width  # the landmarks of the queries, or what these fetch
    means = (length + landmarks) * (heads + kv_heads) * width
    fetched = 2 * rows + landmarks * heads + 2 * length * kv_heads * width
    between = rows + landmarks * kv_heads * width + 3 * landmarks**2 * heads  # weights; inverse written and read
    output = 2 * rows + landmarks * kv_heads * width + rows + length * heads * (2 * width + 1)
    flops = PRODUCTS["forward"] * 2 * width * heads * landmarks * length * 2
    flops += (2 * 2 * width * landmarks**2 + iterations * 4 * 2 * landmarks**3) * heads
    return Work(flops, (means + fetched + between + output) * itemsize)


def linear(
    length: int,
    features: int,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    chunk: int | None = None,
    drawn: bool = False,
    itemsize: int = 4,
) -> Work:
    """The work of normalised `linear_attention` with R features.

    `chunk`: of the causal form, None: not causal. `drawn`: random features, a product of their own.
    """
    values = width + 1  # the denominator is one more column
    rows = length * (heads + kv_heads)
    state = features * values * kv_heads
    flops = 2 * length * features * values * (heads + kv_heads) + (2 * rows * width * features if drawn else 0)
    moved = rows * (width + 2 * features) + length * (kv_heads * width + heads * width) + 2 * state
    if chunk is not None:
        chunks = -(-length // chunk)
        flops += 2 * chunks * chunk**2 * heads * (features + values)
        moved += 2 * (chunks - 1) * state
    return Work(flops, moved * itemsize)


def routed(
    length: int,
    groups: int,
    *,
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None = None,
    is_causal: bool = False,
    rounds: int = 1,
    hashed: bool = False,
    itemsize: int = 4,
) -> Work:
    """The work of `lsh_attention` (`hashed`, heads share one vector) or causal `routing_attention`, by pairs.

    Groups are taken as even; a tile that holds the pairs of several is not counted as more.
    """
    pairs = rounds * groups * met_pairs(-(-length // groups), window, is_causal=is_causal)
    affinities = 2 * length * width * (rounds * heads * (groups // 2) if hashed else (heads + kv_heads) * groups)
    sorted_rows = rounds * length * (2 * heads + 2 * (heads if hashed else kv_heads)) * width  # q, o, k, v
    return Work(affinities + 2 * 2 * width * heads * pairs, 3 * sorted_rows * itemsize)  # written and read once more


def met_pairs(size: int, window: int | None, *, is_causal: bool) -> int:
    """Pairs of ranks of a group of `size` that differ by less than `window`; only earlier keys and itself if causal."""
    window = size if window is None else min(window, size)
    one_side = window * size - window * (window - 1) // 2
    return one_side if is_causal else 2 * one_side - size


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Memory that the compiled program takes besides its arguments and its results; nothing is run."""
    return int(_compiled(function, arguments).memory_analysis().temp_size_in_bytes)


def xla_cost(function: Callable[..., Any], *arguments: Any) -> Work:
    """XLA's own count for the compiled program: right where it has no loop. All operations, not products alone."""
    cost = _compiled(function, arguments).cost_analysis()
    return Work(int(cost["flops"]), int(cost["bytes accessed"]))


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
