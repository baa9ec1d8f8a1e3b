"""Which tiles of the square a mask touches, and in which order they are visited.

A step of the tile loop works on one tile of (queries × keys) for a few batch items and key/value heads at once. For
each tile of queries the plan lists the tiles of keys to visit: first those that the mask leaves full, which need no
mask arithmetic, then those that it cuts through. Those that it empties are not in the list. What is known before any
value is (causality, windows, an offset that is a number) makes the plan when the program is traced; what comes with
the data (lengths, segments, positions) makes it at run time, and bounds the loops there.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import biases, checks, masks
from attn_jax.lazy import Grid, Square
from attn_jax.typing import Array, Int

# Measured on CPU (`experiments/benchmarks/attention.py`). A step must be worth waking the other cores, and fit the
# caches: sizes of a tile, and logits of a step. Where a mask cuts tiles small ones touch less of what it hides, but
# their products do not fill the cores: a logit of a tile costs more by `SMALL` for each halving of the tile below
# `LARGE`, at most twice as much, and `MIXED` times as much where the mask is evaluated; a visit costs `VISIT` logits.
PLAIN, MASKED = ((2048, 1024),), ((512, 512), (256, 256), (128, 128), (64, 64))
PLAIN_ENTRIES, MASKED_ENTRIES = 2**21, 2**20
LARGE, SMALL, MIXED, VISIT = 2**18, 0.3, 1.15, 2**13
_MOST_TILES = 2**20  # more are not worth a look when the program is traced
_LOOK_AT = 2**20  # a mask of so many entries is looked at when the program is traced


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """`implementation="blockwise"` with tiles of a chosen size; None chooses from the shape.

    Attributes:
        queries, keys: the size of a tile; the axes need not be multiples of it.
        entries: about how many logits one step may hold: heads and batch items share a step while they fit.

    Raises:
        ValueError, TypeError: a size below 1 or no integer.

    >>> from attn_jax import Blockwise, dot_product_attention
    >>> x = jax.random.normal(jax.random.key(0), (12, 1, 4))
    >>> tiled = dot_product_attention(x, x, x, is_causal=True, implementation=Blockwise(queries=5, keys=4))
    >>> dense = dot_product_attention(x, x, x, is_causal=True, implementation="dense")
    >>> bool(jnp.allclose(tiled, dense, atol=1e-5))
    True
    """

    queries: int | None = None
    keys: int | None = None
    entries: int | None = None

    def __post_init__(self) -> None:
        for name in ("queries", "keys", "entries"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, checks.positive_int(name, getattr(self, name)))


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The sizes of one step: a tile of `queries` × `keys`, of `kv_heads` heads of `items` neighbours in the batch."""

    items: int
    kv_heads: int
    queries: int
    keys: int


def choose_blocks(square: Square, num_kv_heads: int, wanted: Blockwise, mask: masks.Mask | None = None) -> Blocks:
    """The sizes for a square and a mask, within what is wanted. `items` and `kv_heads` divide their axes.

    Where the mask is known when the program is traced, the sizes are those that cost least by what they touch.
    """
    sides = PLAIN if mask is None else MASKED
    choices = list(dict.fromkeys(_blocks(square, num_kv_heads, wanted, side, mask is not None) for side in sides))
    costs = [_cost(square, blocks, num_kv_heads, mask) for blocks in choices]
    if mask is None or None in costs:
        return choices[0]
    return choices[int(np.argmin(np.asarray(costs, float)))]


def _blocks(square: Square, num_kv_heads: int, wanted: Blockwise, side: tuple[int, int], masked: bool) -> Blocks:
    *batch, num_heads, query_length, key_length = square.kept
    groups = num_heads // max(num_kv_heads, 1)
    entries = wanted.entries or (MASKED_ENTRIES if masked else PLAIN_ENTRIES)
    fitting = max(entries // (max(groups, 1) * side[1]), 128)  # queries of all groups of a head that fit a step
    queries = min(wanted.queries or min(side[0], fitting), query_length)
    rows = max(groups * queries, 1)
    # Few queries (a step of decoding) take more keys at once.
    keys = min(wanted.keys or min(max(side[1], side[0] * side[1] // rows), 4096), key_length)
    products = max(entries // max(rows * keys, 1), 1)
    kv_heads = _divisor(num_kv_heads, products)
    items = _divisor(batch[-1], products // kv_heads) if batch and kv_heads == num_kv_heads else 1
    return Blocks(items, kv_heads, queries, keys)


def _cost(square: Square, blocks: Blocks, num_kv_heads: int, mask: masks.Mask | None) -> float | None:
    """What all visits cost, in logits; None where the tiles that they touch are not known yet."""
    grid = Grid(square, (blocks.queries, blocks.keys))
    if math.prod(grid.counts) > _MOST_TILES:
        return math.inf
    some, every = (grid.constant(True),) * 2 if mask is None else mask.bounds(grid)
    if not (isinstance(some, np.ndarray) and isinstance(every, np.ndarray)):
        return None
    mixed = some & ~every
    shape = np.broadcast_shapes(mixed.shape, (1,) * (mixed.ndim - 2) + grid.counts)
    visits, cut = (float(np.broadcast_to(x, shape).sum()) for x in (some, mixed))
    groups = square.shape[-3] // max(num_kv_heads, 1)
    product = max(groups * blocks.queries * blocks.keys, 1)  # the logits of one key/value head
    halvings = max(math.log2(LARGE / product), 0.0)
    logits = blocks.items * blocks.kv_heads * product * min(1 + SMALL * halvings, 2.0)
    steps = math.prod(chunk_counts(square, blocks, num_kv_heads))
    return steps * (visits * (VISIT + logits) + cut * (MIXED - 1) * logits)


def _divisor(length: int, most: int) -> int:
    """The largest divisor of `length` that does not exceed `most`."""
    return next((d for d in range(min(length, max(most, 1)), 0, -1) if length % d == 0), 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles of keys that each tile of queries visits.

    Attributes:
        order: int `[*C or 1, nq, nk]`: the tiles of keys, full ones first, then mixed ones; *C are the chunks of
            items and heads that share a step, one axis for each of the square's `*B` and N.
        full, mixed: int `[*C or 1, nq]`: how many there are of each.
        may_be_full, may_be_mixed: whether any is, as far as is known when the program is traced.
        all_seen: whether it is known that every query sees a key and every key is seen, so that nothing that nobody
            may read needs to be kept from the sums.
    """

    order: Int[Array, "*c q k"] | np.ndarray
    full: Int[Array, "*c q"] | np.ndarray
    mixed: Int[Array, "*c q"] | np.ndarray
    may_be_full: bool
    may_be_mixed: bool
    all_seen: bool

    @property
    def lists(self) -> tuple[Array | np.ndarray, ...]:
        """`order`, `full` and `mixed`."""
        return self.order, self.full, self.mixed


def make_plan(
    square: Square, blocks: Blocks, num_kv_heads: int, mask: masks.Mask | None, bias: biases.Bias | None
) -> Plan:
    """The plan of a square for a mask and a bias that may hold `-inf`."""
    grid = Grid(square, (blocks.queries, blocks.keys))
    count_queries, count_keys = grid.counts
    some, every = grid.constant(True), grid.constant(True)
    for lazy in (mask, bias):
        if lazy is not None:
            touched, filled = lazy.bounds(grid)
            some, every = some & touched, every & filled
    if blocks.keys and square.shape[-1] % blocks.keys:
        # The last tile begins in the one before: its first keys were seen there, and are hidden.
        inside = np.arange(count_keys) < count_keys - 1
        every = every & inside.reshape((1,) * (every.ndim - 1) + (-1,))
    groups = square.shape[-3] // max(num_kv_heads, 1)
    shares = (1,) * len(square.batch[:-1]) + (blocks.items,) * bool(square.batch) + (blocks.kv_heads * groups,)
    some, every = _per_chunk(some, shares, "any"), _per_chunk(every, shares, "all")
    library = np
    if isinstance(some, jax.Array) or isinstance(every, jax.Array):
        library, (some, every) = jnp, _one_for_all_lanes(jnp.asarray(some), jnp.asarray(every))
    lead = np.broadcast_shapes(some.shape[:-2], every.shape[:-2])
    some, every = (library.broadcast_to(x, (*lead, count_queries, count_keys)) for x in (some, every))
    kind = library.where(some & every, 0, library.where(some, 1, 2))
    static = library is np
    order = np.argsort(kind, axis=-1, kind="stable") if static else jnp.argsort(kind, axis=-1)  # jnp's is stable
    return Plan(
        order.astype(np.int32),
        (kind == 0).sum(axis=-1).astype(np.int32),
        (kind == 1).sum(axis=-1).astype(np.int32),
        bool((kind == 0).any()) if static else True,
        bool((kind == 1).any()) if static else True,
        bias is None and (mask is None or _all_seen(square, mask)),
    )


@jax.custom_batching.custom_vmap
def _one_for_all_lanes(some: Array, every: Array) -> tuple[Array, Array]:
    """The bounds as they are; under `vmap` those of all lanes together.

    A loop whose bounds differ between lanes would copy all that it carries at each turn, to undo it where it is done.
    """
    return some, every


@_one_for_all_lanes.def_vmap
def _over_lanes(size: int, batched: list[bool], some: Array, every: Array) -> tuple[tuple[Array, Array], tuple]:
    some, every = some.any(axis=0) if batched[0] else some, every.all(axis=0) if batched[1] else every
    return _one_for_all_lanes(some, every), (False, False)


def _all_seen(square: Square, mask: masks.Mask) -> bool:
    queries, keys = square.shape[-2:]
    if square.first_query is None or square.rows is not None or queries * keys > _LOOK_AT or jax.tree.leaves(mask):
        return False
    with jax.ensure_compile_time_eval():
        visible = mask.evaluate(Square((1, queries, keys), square.first_query).whole())
        visible = np.broadcast_to(np.asarray(visible), (1, queries, keys))
    return bool(visible.any(axis=-1).all() and visible.any(axis=-2).all())


def _per_chunk(x: Array | np.ndarray, shares: tuple[int, ...], how: str) -> Array | np.ndarray:
    """`x` reduced over the items and heads that share a step."""
    for axis, share in enumerate(shares):
        if x.shape[axis] != 1:
            x = getattr(x.reshape(*x.shape[:axis], -1, share, *x.shape[axis + 1 :]), how)(axis=axis + 1)
    return x


def chunk_counts(square: Square, blocks: Blocks, num_kv_heads: int) -> tuple[int, ...]:
    """How many chunks of items and heads there are, per axis of `*B` and for the heads."""
    *outer, last = (1, *square.batch)
    items = (*outer[1:], last // blocks.items) if square.batch else ()
    return (*items, num_kv_heads // max(blocks.kv_heads, 1))
