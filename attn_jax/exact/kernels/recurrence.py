"""The flash-attention recurrence on one tile of (queries × keys), in operations that every kernel language has.

A tile of queries meets tiles of keys one after another. Of each row it carries the softmax over the logits s met so
far, shifted by the largest of them, m, so that nothing overflows. With m' = max(m, max s), f = exp(m - m') and
e = exp(s - m'), one more tile turns

    maximum m  into  m'                            square  into  f² square + Σ e²
    total   l  into  f l + Σ e                     excess  into  f (excess + (m - m') l) + Σ e (s - m')
    sums    o  into  f o + Σ e value               count   into  count + visible keys

and at the end the output is o / l, the log-sum-exp m + ln l, the largest weight 1 / l, Σp² = square / l², and the
entropy ln l - excess / l. What is of a row is a column `[t, 1]`: kernels have no vectors of one axis.

Reference: Dao et al. 2022 (FlashAttention), algorithm 1; Dao 2023 (FlashAttention-2), section 3.1 (divide last).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax

from attn_jax.typing import Array, Bool, Float

# What each statistic needs to be carried, besides the maximum, the total and the sums.
NEEDS = {
    "logsumexp": (),
    "entropy": ("excess",),
    "max_logit": (),
    "max_weight": (),
    "sum_p2": ("square",),
    "visible_keys": ("count",),
}
State = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """What is known when a kernel is traced.

    Attributes:
        lengths: T and S.
        tile: how many queries and keys a tile has.
        visible: who may see whom, of indices `[t, 1]` and `[1, s]`; None: all see all.
        scale, soft_cap: of the logits.
        measured: the statistics, the log-sum-exp among them.
        precision: of the matrix products.
    """

    lengths: tuple[int, int]
    tile: tuple[int, int]
    visible: Callable[[Array, Array], Array] | None
    scale: float
    soft_cap: float | None
    measured: tuple[str, ...]
    precision: Literal["default", "highest"] | None


def start(static: Static, value_width: int) -> State:
    """The state of a tile of queries that has met no keys."""
    carried = {"total"}.union(*(NEEDS[name] for name in static.measured))
    column = static.tile[0], 1
    return {
        "maximum": jnp.full(column, -jnp.inf, jnp.float32),
        "sums": jnp.zeros((static.tile[0], value_width), jnp.float32),
    } | {name: jnp.zeros(column, jnp.float32) for name in sorted(carried)}


def visit(
    static: Static,
    state: State,
    query: Float[Array, "t h"],
    key: Float[Array, "s h"],
    value: Float[Array, "s v"],
    place: tuple[Array, Array],
    *,
    mixed: bool,
) -> State:
    """The state after tile `(i, j)` of the square. Only a mixed one costs mask arithmetic."""
    # Products take their inputs as they are and add up in float32.
    product = functools.partial(lax.dot_general, precision=static.precision, preferred_element_type=jnp.float32)
    logits = product(query, key, (((1,), (1,)), ((), ()))) * static.scale
    if static.soft_cap is not None:
        logits = static.soft_cap * jnp.tanh(logits / static.soft_cap)
    count = float(static.tile[1])
    if mixed:
        visible = _evaluate(static, place)
        logits = jnp.where(visible, logits, -jnp.inf)
        ones = visible.astype(jnp.float32)
        count = ones.sum(axis=1, keepdims=True)
        # A key that no query of the tile sees fetches nothing, even if it holds NaN.
        value = jnp.where(ones.max(axis=0, keepdims=True).T > 0, value, 0)

    maximum = jnp.maximum(state["maximum"], logits.max(axis=1, keepdims=True))
    # Before a row has seen a key its maximum is -inf; 0 serves as a shift, and keeps NaN out.
    shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    moved = jnp.where(state["maximum"] == -jnp.inf, 0.0, state["maximum"] - shift)
    factor, numerators = jnp.exp(moved), jnp.exp(logits - shift)
    new = {
        "maximum": maximum,
        "total": factor * state["total"] + numerators.sum(axis=1, keepdims=True),
        "sums": factor * state["sums"] + product(numerators.astype(value.dtype), value, (((1,), (0,)), ((), ()))),
    }
    if "excess" in state:
        terms = jnp.where(numerators > 0, numerators * (logits - shift), 0.0)
        new["excess"] = factor * (state["excess"] + moved * state["total"]) + terms.sum(axis=1, keepdims=True)
    if "square" in state:
        new["square"] = factor**2 * state["square"] + (numerators**2).sum(axis=1, keepdims=True)
    if "count" in state:
        new["count"] = state["count"] + count
    return new


def finish(static: Static, state: State) -> list[Array]:
    """Output `[t, v]`, then each statistic `[t, 1]`, of a tile of queries that has met all its keys."""
    empty = state["total"] == 0
    total = jnp.where(empty, 1.0, state["total"])
    statistics = {
        "logsumexp": lambda: state["maximum"] + jnp.log(total),
        "entropy": lambda: jnp.log(total) - state["excess"] / total,
        "max_logit": lambda: state["maximum"],
        "max_weight": lambda: jnp.where(empty, 0.0, 1.0 / total),
        "sum_p2": lambda: state["square"] / total**2,
        "visible_keys": lambda: state["count"],
    }
    return [state["sums"] / total, *(statistics[name]() for name in static.measured)]


def _evaluate(static: Static, place: tuple[Array, Array]) -> Bool[Array, "t s"]:
    """Who may see whom in a tile; past the end of an axis there is nobody."""
    (i, j), (t, s) = place, static.tile
    queries = i * t + lax.broadcasted_iota(jnp.int32, (t, 1), 0)
    keys = j * s + lax.broadcasted_iota(jnp.int32, (1, s), 1)
    inside = (queries < static.lengths[0]) & (keys < static.lengths[1])
    return inside if static.visible is None else inside & static.visible(queries, keys)
