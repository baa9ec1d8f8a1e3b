"""The tile loop: one step works on a tile of queries of a few heads and items, and visits tiles of keys.

What is done at a visit is the caller's (`blockwise.py`): the loop says which tiles there are, and cuts the arrays.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import biases, masks
from attn_jax.exact.arguments import Dropout
from attn_jax.exact.dropout import keep_mask
from attn_jax.exact.tiles import Blocks, Plan, chunk_counts, make_plan
from attn_jax.lazy import Square, Tile, dynamic_box, put_box
from attn_jax.typing import Array, Bool


@dataclasses.dataclass(frozen=True)
class Static:
    """What is known of a call when it is traced, besides shapes."""

    scale: float | None
    logits_soft_cap: float | None
    dropout_rate: float
    precision: jax.lax.PrecisionLike
    blocks: Blocks
    statistics: tuple[str, ...]
    kernel: bool
    value_only: bool = False  # backward: no gradient of what shapes the logits is asked for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Differentiable:
    """What gradients flow to: query `[*B, T, K, G, H]`, key `[*B, S, K, H]`, value `[*B, S, K, V]`, and the rest."""

    query: Array
    key: Array
    value: Array | None
    bias: biases.Bias | None
    scale: Array | None
    sinks: Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fixed:
    """What no gradient flows to."""

    mask: masks.Mask | None
    square: Square
    dropout_key: Array | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One chunk of items and heads, and one tile of its queries: where its arrays lie.

    Arrays in a step have the axes `[b, k, g, t]` (items, key/value heads, groups, queries) and `[b, k, s]`.
    """

    static: Static
    differentiable: Differentiable
    fixed: Fixed
    items: tuple[Array, ...]
    kv_head: Array
    row_tile: Array

    @property
    def square(self) -> Square:
        """The whole problem."""
        return self.fixed.square

    @property
    def groups(self) -> int:
        """G, the query heads of one key/value head."""
        return self.differentiable.query.shape[-2]

    @property
    def dtype(self) -> jnp.dtype:
        """That of logits and sums."""
        return jnp.promote_types(self.differentiable.query.dtype, jnp.float32)

    @property
    def row(self) -> Array:
        """Where the rows begin: the last tile ends where the rows end."""
        blocks = self.static.blocks
        return jnp.minimum(self.row_tile * blocks.queries, self.square.kept[-2] - blocks.queries)

    def fresh(self) -> Bool[Array, "1 1 1 t"]:
        """Which rows no step before this one has visited."""
        queries = self.static.blocks.queries
        return (jnp.arange(queries) + self.row >= self.row_tile * queries).reshape(1, 1, 1, -1)

    def key_start(self, index: Array) -> Array:
        """Where a tile of keys begins: the last one ends where the keys end."""
        return jnp.minimum(index * self.static.blocks.keys, self.square.shape[-1] - self.static.blocks.keys)

    def fresh_keys(self, index: Array) -> Bool[Array, "1 1 1 1 s"]:
        """Which keys of a tile are in no tile before it."""
        keys = self.static.blocks.keys
        return (jnp.arange(keys) + self.key_start(index) >= index * keys).reshape(1, 1, 1, 1, -1)

    def rows(self, x: Array) -> Array:
        """This step's rows of `x`, `[*B, T, K, G, ...]`, as `[b, k, g, t, ...]`."""
        return jnp.moveaxis(self._squeeze(dynamic_box(x, *self._box(x))), 1, 3)

    def keys(self, x: Array, index: Array) -> Array:
        """The keys of one tile of `x`, `[*B, S, K, ...]`, as `[b, k, s, ...]`."""
        return jnp.moveaxis(self._squeeze(dynamic_box(x, *self._box(x, index))), 1, 2)

    def put_rows(self, into: Array, x: Array, *, add: bool = False) -> Array:
        """`into` with this step's rows set to `x` `[b, k, g, t, ...]`, or with `x` added."""
        starts, sizes = self._box(into)
        x = jnp.moveaxis(x, 3, 1).reshape(sizes) + (dynamic_box(into, starts, sizes) if add else 0)
        return put_box(into, x.astype(into.dtype), starts)

    def add_keys(self, into: Array, x: Array, index: Array) -> Array:
        """`into` with `x` `[b, k, s, ...]` added to the keys of one tile."""
        starts, sizes = self._box(into, index)
        return put_box(into, dynamic_box(into, starts, sizes) + jnp.moveaxis(x, 2, 1).reshape(sizes), starts)

    def _box(self, x: Array, index: Array | None = None) -> tuple[tuple, tuple]:
        """Starts and sizes of this step's part of `x`: rows `[*B, T, K, G, ...]`, or one tile of `[*B, S, K, ...]`."""
        blocks, outer = self.static.blocks, len(self.square.batch)
        starts = [*self.items, self.row if index is None else self.key_start(index), self.kv_head]
        sizes = [1] * max(outer - 1, 0) + [blocks.items] * bool(outer)
        sizes += [blocks.queries if index is None else blocks.keys, blocks.kv_heads]
        rest = x.shape[len(sizes) :]
        return (*starts, *([0] * len(rest))), (*sizes, *rest)

    def tile(self, index: Array) -> Tile:
        """Where the step's rows meet one tile of keys."""
        blocks, outer = self.static.blocks, len(self.square.batch)
        head = self.kv_head * self.groups
        sizes = [1] * max(outer - 1, 0) + [blocks.items] * bool(outer) + [blocks.kv_heads * self.groups]
        starts = (*self.items, head, self.row, self.key_start(index))
        return Tile(self.square, starts, (*sizes, blocks.queries, blocks.keys))

    def grouped(self, x: Array) -> Array:
        """`x` of the square's rank, each axis full or 1, as `[b, k, g, t, s]` with 1 for the same axes."""
        *batch, heads, queries, keys = x.shape
        split = (1, 1) if heads == 1 and self.groups * self.static.blocks.kv_heads != 1 else (-1, self.groups)
        return x.reshape(batch[-1] if batch else 1, *split, queries, keys)

    def ungrouped(self, x: Array) -> Array:
        """`[b, k, g, t, s]` in the square's rank."""
        lead = (1,) * (len(self.square.batch) - 1) + (x.shape[0],) * bool(self.square.batch)
        return x.reshape(*lead, x.shape[1] * x.shape[2], *x.shape[3:])

    def bias_and_visible(self, index: Array, mixed: bool) -> tuple[Array | None, Array | None]:
        """Bias and visible entries where the rows meet a tile of keys, `[b, k, g, t, s]` or 1; None: there are none."""
        tile, bias, visible = self.tile(index), None, None
        if self.differentiable.bias is not None:
            bias = self.grouped(self.differentiable.bias.evaluate(tile, self.dtype))
        if mixed:
            visible = self.fresh_keys(index)
            if self.fixed.mask is not None:
                visible = visible & self.grouped(self.fixed.mask.evaluate(tile))
            if bias is not None:
                visible = visible & ~jnp.isneginf(bias)
        return bias, visible

    def kept(self, index: Array) -> Bool[Array, "b k g t s"] | None:
        """What dropout keeps there; None without dropout."""
        if self.fixed.dropout_key is None:
            return None
        return self.grouped(keep_mask(Dropout(self.static.dropout_rate, self.fixed.dropout_key), self.tile(index)))

    def scale(self) -> float | Array:
        """The scale of logits: a number, or `[1, k, g, 1, 1]`."""
        if self.differentiable.scale is None:
            assert self.static.scale is not None
            return self.static.scale
        return self._per_head(self.differentiable.scale.astype(self.dtype))[..., None]

    def shares(self, logsumexp: Array) -> tuple[Array, Array]:
        """What the keys and what the sink get of each row's softmax, `[b, k, g, t]`."""
        if self.differentiable.sinks is None:
            return jnp.ones_like(logsumexp), jnp.zeros_like(logsumexp)
        return sink_shares(self._per_head(self.differentiable.sinks), logsumexp)

    def add_heads(self, total: Array, x: Array) -> Array:
        """`total` `[N]` with `x` `[b, k, g, t]` summed and added to the heads of this step."""
        start = (self.kv_head * self.groups,)
        summed = x.sum(axis=(0, 3)).reshape(-1)
        return put_box(total, dynamic_box(total, start, summed.shape) + summed, start)

    def _per_head(self, x: Array) -> Array:
        """`x`, a scalar or `[N]`, as `[1, k, g, 1]`."""
        if x.ndim == 0:
            return x.reshape(1, 1, 1, 1)
        grouped = x.reshape(-1, self.groups)
        return dynamic_box(grouped, (self.kv_head, 0), (self.static.blocks.kv_heads, self.groups))[None, ..., None]

    def _squeeze(self, x: Array) -> Array:
        outer = len(self.square.batch)
        return x[None] if outer == 0 else x.reshape(x.shape[outer - 1 :])


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The tiles of keys that one step visits: `order[:full]` are full, the `mixed` after them are cut by the mask."""

    plan: Plan
    order: Array
    full: Array
    mixed: Array

    def visit_keys(self, visit: Callable[[Array, bool, Any], Any], carry: Any) -> Any:
        """`carry` after `visit(index, mixed, carry)` of each tile."""
        if self.plan.may_be_full:
            carry = jax.lax.fori_loop(0, self.full, lambda i, x: visit(self.order[i], False, x), carry)
        if self.plan.may_be_mixed:
            end = self.full + self.mixed
            carry = jax.lax.fori_loop(self.full, end, lambda i, x: visit(self.order[i], True, x), carry)
        return carry


def sweep_steps(
    static: Static,
    differentiable: Differentiable,
    fixed: Fixed,
    visit_rows: Callable[[Step, Sweep, Any], Any],
    carry: Any,
) -> Any:
    """`carry` after `visit_rows` of each step: every tile of queries of every chunk of items and heads."""
    square, blocks, num_kv_heads = fixed.square, static.blocks, differentiable.key.shape[-2]
    if 0 in (*square.kept, num_kv_heads):
        return carry
    # A mask or bias that is a constant of the program would be folded, tile by tile, for seconds of compilation.
    mask, bias = jax.lax.optimization_barrier((fixed.mask, differentiable.bias))
    fixed, differentiable = dataclasses.replace(fixed, mask=mask), dataclasses.replace(differentiable, bias=bias)
    plan = make_plan(square, blocks, num_kv_heads, mask, bias)
    shape = (*chunk_counts(square, blocks, num_kv_heads), plan.full.shape[-1])

    def one(turn: Array, carry: Any) -> Any:
        *chunk, row_tile = jnp.unravel_index(turn, shape)
        items, kv_head = tuple(chunk[:-1]), chunk[-1] * blocks.kv_heads
        if items:
            items = (*items[:-1], items[-1] * blocks.items)
        step = Step(static, differentiable, fixed, items, kv_head, row_tile)
        return visit_rows(step, Sweep(plan, *(_pick(x, (*chunk, row_tile)) for x in plan.lists)), carry)

    return jax.lax.fori_loop(0, math.prod(shape), one, carry)


def _pick(x: Array | np.ndarray, index: tuple[Array, ...]) -> Array:
    """`x[index]`, where an axis of length 1 serves every index."""
    return jnp.asarray(x)[tuple(0 if length == 1 else i for length, i in zip(x.shape, index, strict=False))]


def sink_shares(sinks: Array, logsumexp: Array) -> tuple[Array, Array]:
    """What the keys and what the sink get of the softmax of rows, where logits of sinks broadcast to the rows."""
    difference = sinks.astype(logsumexp.dtype) - logsumexp
    # A sigmoid, as exp(-softplus), which loses no digits far from 0.
    return jnp.exp(-jax.nn.softplus(difference)), jax.nn.sigmoid(difference)


def seen_keys(visible: Bool[Array, "b k g t s"]) -> Bool[Array, "b k s 1"]:
    """Keys that at least one query of their group sees in this tile: what the others hold must not reach a sum."""
    return visible.any(axis=(2, 3))[..., None]


def like(differentiable: Differentiable, gradients: dict[str, Any]) -> Differentiable:
    """The gradients of `blockwise.backward` in the structure, shapes and dtypes of what they belong to."""

    def cast_to(x: Any, gradient: Any) -> Any:
        if x is None:
            return None
        return (gradient if x.ndim or not gradient.ndim else gradient.sum()).astype(x.dtype)

    bias = None
    if differentiable.bias is not None:
        leaves, structure = jax.tree.flatten(differentiable.bias)
        floating = iter(gradients["bias"])
        bias = jax.tree.unflatten(
            structure,
            [
                next(floating).astype(jnp.result_type(leaf))
                if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
                else np.zeros(jnp.shape(leaf), jax.dtypes.float0)
                for leaf in leaves
            ],
        )
    return Differentiable(
        cast_to(differentiable.query, gradients["query"]),
        cast_to(differentiable.key, gradients["key"]),
        cast_to(differentiable.value, gradients["value"]),
        bias,
        cast_to(differentiable.scale, gradients["scale"]),
        cast_to(differentiable.sinks, gradients["sinks"]),
    )
