"""The online softmax: what a row remembers of the keys it has seen, and how one more tile of keys changes it.

    m' = max(m, max s)    l' = l e^(m - m') + Σ e^(s - m')    o' = o e^(m - m') + Σ e^(s - m') v

The statistics of a row are kept the same way, each in the form that loses no digits: entropy from the mean of s - m,
tails as sums over all but the largest weight, the variance of logits around each tile's own mean.

Reference: Milakov & Gimelshein 2018, algorithm 3; Chan, Golub & LeVeque 1979, equation 2.1 for the variance.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from attn_jax.typing import Array, Bool, Float

# What each statistic needs to be remembered, besides the maximum and the total.
NEEDS = {
    "max_logit": (),
    "max_weight": (),
    "sink_share": (),
    "entropy": ("excess",),
    "max_abs_logit": ("max_abs",),
    "argmax_key": ("argmax",),
    "sum_p2": ("square",),
    "tail_p2": ("argmax", "tail2"),
    "tail_p3": ("argmax", "tail3"),
    "logit_mean": ("count", "mean"),
    "logit_variance": ("count", "mean", "spread"),
    "mean_distance": ("distance",),
    "first_key_mass": ("first",),
    "diagonal_mass": ("diagonal",),
    "visible_keys": ("count",),
}
Rows = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Entries:
    """One tile of logits, keys last, and what statistics read of it.

    Attributes:
        logits: `[..., t, s]`, `-inf` where not visible.
        visible: boolean, broadcastable to the logits; None: all are.
        query_positions, key_positions: int, broadcastable to the logits.
        first_key: the index of the tile's first key.
    """

    logits: Float[Array, "*rows s"]
    visible: Bool[Array, "..."] | None
    query_positions: Array
    key_positions: Array
    first_key: Array


def remembered(statistics: Sequence[str]) -> tuple[str, ...]:
    """What rows must remember for these statistics."""
    return tuple(dict.fromkeys(need for name in statistics for need in NEEDS[name]))


def start(shape: tuple[int, ...], dtype: jnp.dtype, memory: Sequence[str]) -> Rows:
    """Rows that have seen nothing."""
    rows = {"maximum": jnp.full(shape, -jnp.inf, dtype), "total": jnp.zeros(shape, dtype)}
    for name in memory:
        rows[name] = jnp.full(shape, -1, jnp.int32) if name == "argmax" else jnp.zeros(shape, _dtype(name, dtype))
    return rows


def update(rows: Rows, entries: Entries) -> tuple[Rows, Float[Array, "*rows s"], Float[Array, "*rows"]]:
    """The rows after one more tile; its numerators `e^(s - m')`; and the factor `e^(m - m')` of what was before."""
    logits = entries.logits
    largest = logits.max(axis=-1)
    maximum = jnp.maximum(rows["maximum"], largest)
    shift = jnp.where(jnp.isneginf(maximum), 0, maximum)
    numerators, factor = jnp.exp(logits - shift[..., None]), jnp.exp(rows["maximum"] - shift)
    new = {"maximum": maximum, "total": rows["total"] * factor + numerators.sum(axis=-1)}
    if len(rows) > 2:
        new |= _remember(rows, entries, numerators, factor, largest, shift)
    return new, numerators, factor


def _remember(rows: Rows, entries: Entries, numerators: Array, factor: Array, largest: Array, shift: Array) -> Rows:
    logits, visible = entries.logits, entries.visible
    new, numerators = {}, jax.lax.optimization_barrier(numerators)  # or each sum below would take e^x anew

    def over_visible(x: Array) -> Array:
        return x if visible is None else jnp.where(visible, x, 0)

    def expectation(name: str, x: Array) -> None:
        # Laid out for every head first: fused into the product it would be worked out entry by entry.
        x = jax.lax.optimization_barrier(jnp.broadcast_to(x, numerators.shape))
        new[name] = rows[name] * factor + _dot(numerators, x)

    if "excess" in rows:  # Σ e^(s - m) (s - m), which moves with m
        moved = jnp.where(rows["total"] > 0, rows["maximum"] - shift, 0) * rows["total"]
        excess = over_visible(logits - shift[..., None])
        new["excess"] = (rows["excess"] + moved) * factor + _dot(numerators, excess)
    if "square" in rows:
        new["square"] = rows["square"] * factor**2 + (numerators**2).sum(axis=-1)
    if "max_abs" in rows:
        least = (logits if visible is None else jnp.where(visible, logits, jnp.inf)).min(axis=-1)
        here = jnp.where(jnp.isneginf(largest), 0, jnp.maximum(jnp.abs(largest), jnp.abs(least)))
        new["max_abs"] = jnp.maximum(rows["max_abs"], here)
    if "argmax" in rows:
        new |= _tails(rows, entries, numerators, factor, largest, shift)
    if "count" in rows:
        new |= _moments(rows, entries, over_visible)
    if "distance" in rows:
        base = entries.key_positions[..., :1]  # floats near 0 are exact
        query, key = ((x - base).astype(logits.dtype) for x in (entries.query_positions, entries.key_positions))
        expectation("distance", jnp.abs(query - key))
    if "first" in rows:
        expectation("first", (entries.key_positions == 0).astype(logits.dtype))
    if "diagonal" in rows:
        expectation("diagonal", (entries.key_positions == entries.query_positions).astype(logits.dtype))
    return new


def _dot(x: Array, y: Array) -> Array:
    """Σ x y along the last axis. As a product: XLA's CPU library is 10 times slower at the sum of a product."""
    return jnp.einsum("...s,...s->...", x, y, precision="highest")


def _tails(rows: Rows, entries: Entries, numerators: Array, factor: Array, largest: Array, shift: Array) -> Rows:
    """The largest entry so far, and the sums of powers of all others: the smaller of two largest joins them."""
    logits, length = entries.logits, entries.logits.shape[-1]
    # The first of the largest, by a minimum of columns: XLA's arg-max visits one entry at a time.
    columns = jnp.arange(length, dtype=logits.dtype).reshape((1,) * (logits.ndim - 1) + (-1,))
    local = jnp.where(logits == largest[..., None], columns, length - 1).min(axis=-1)
    others = jax.lax.optimization_barrier(jnp.where(columns == local[..., None], 0, numerators))
    found = entries.first_key + local.astype(jnp.int32)
    before = jnp.isneginf(rows["maximum"])
    # The first of equals wins, in whatever order the tiles come.
    earlier = (largest == rows["maximum"]) & (found < rows["argmax"])
    wins = ~jnp.isneginf(largest) & (before | (largest > rows["maximum"]) | earlier)
    new = {"argmax": jnp.where(wins, found, rows["argmax"])}
    own = jnp.exp(largest - shift)
    loser = jnp.where(wins, jnp.where(before, 0, factor), own)
    for name, power in (("tail2", 2), ("tail3", 3)):
        if name in rows:
            new[name] = rows[name] * factor**power + _dot(others, others ** (power - 1)) + loser**power
    return new


def _moments(rows: Rows, entries: Entries, over_visible: Callable[[Array], Array]) -> Rows:
    """Number, mean and squared deviations of the logits, merged with those of the tile."""
    logits, visible = entries.logits, entries.visible
    length = logits.shape[-1]
    here = length if visible is None else jnp.broadcast_to(visible, logits.shape).sum(axis=-1, dtype=jnp.int32)
    new = {"count": rows["count"] + here}
    if "mean" in rows:
        dtype = logits.dtype
        size = jnp.maximum(jnp.asarray(here), 1).astype(dtype)
        mean = over_visible(logits).sum(axis=-1) / size
        part = jnp.asarray(here).astype(dtype) / jnp.maximum(new["count"], 1).astype(dtype)
        distance = jnp.where(rows["count"] > 0, mean - rows["mean"], mean)
        new["mean"] = jnp.where(rows["count"] > 0, rows["mean"], 0) + distance * part
        if "spread" in rows:
            deviations = (over_visible(logits - mean[..., None]) ** 2).sum(axis=-1)
            new["spread"] = rows["spread"] + deviations + distance**2 * part * rows["count"].astype(dtype)
    return new


def finish(rows: Rows, statistics: Sequence[str], sink_share: Float[Array, "*rows"]) -> dict[str, Array]:
    """The statistics of rows that have seen all their keys."""
    maximum, empty = rows["maximum"], rows["total"] == 0
    total = jnp.where(empty, 1, rows["total"])

    measures = {
        "entropy": lambda: jnp.where(empty, 0, jnp.log(total) - rows["excess"] / total),
        "max_logit": lambda: maximum,
        "max_abs_logit": lambda: rows["max_abs"],
        "max_weight": lambda: jnp.where(empty, 0, 1 / total),
        "argmax_key": lambda: rows["argmax"],
        "sum_p2": lambda: rows["square"] / total**2,
        "tail_p2": lambda: rows["tail2"] / total**2,
        "tail_p3": lambda: rows["tail3"] / total**3,
        "logit_mean": lambda: rows["mean"],
        "logit_variance": lambda: rows["spread"] / jnp.maximum(rows["count"], 1).astype(total.dtype),
        "mean_distance": lambda: rows["distance"] / total,
        "first_key_mass": lambda: rows["first"] / total,
        "diagonal_mass": lambda: rows["diagonal"] / total,
        "sink_share": lambda: sink_share,
        "visible_keys": lambda: rows["count"],
    }
    return {name: measures[name]() for name in statistics}


def logsumexp(rows: Rows) -> Float[Array, "*rows"]:
    """ln Σ e^s, `-inf` where nothing was seen."""
    empty = rows["total"] == 0
    return jnp.where(empty, -jnp.inf, rows["maximum"] + jnp.log(jnp.where(empty, 1, rows["total"])))


def _dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.int32) if name == "count" else dtype
