"""What the simulations share: independent seeds under one compile, and heads of every width at once.

Head n of a simulated query is zero beyond its width, so q·k sums over that width only: all widths share one key and one
matrix product, and the scale is one number a head.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics import attention_statistics
from attn_jax.typing import Array, ArrayLike, Float
from experiments.artifacts import Row


def each_seed(measure: Callable[[Array], Any], seed: int, seeds: int, *, stream: str) -> Any:
    """`measure(key)` for `seeds` independent keys, one after the other in one compiled loop; leaves are `[seeds, …]`.

    `stream` names the unit of work, so that units are independent of each other and of their order.
    """
    base = jax.random.fold_in(jax.random.key(seed), zlib.crc32(stream.encode()))
    measured = jax.jit(lambda keys: jax.lax.map(measure, keys))(jax.random.split(base, seeds))
    return jax.tree.map(np.asarray, measured)


def cut_to_widths(x: Float[Array, "t h"], widths: Sequence[int]) -> Float[Array, "t n h"]:
    """The same vectors as one head per width, zero beyond it."""
    inside = jnp.arange(x.shape[-1])[None, :] < jnp.asarray(widths)[:, None]
    return jnp.where(inside[None, :, :], x[:, None, :], 0.0)


def measure_rows(query: ArrayLike, key: ArrayLike, *names: str, **options: Any) -> dict[str, Float[Array, "t n"]]:
    """Some fields of `attention_statistics` by name; `total_variance` may be asked for like one, `[N]`."""
    asked = ("logit_mean", "logit_variance") if "total_variance" in names else ()
    statistics = tuple(name for name in names if name != "total_variance")
    found = attention_statistics(query, key, statistics=(*asked, *statistics), **options)
    fields = {field: x for field, x in vars(found).items() if x is not None}
    if asked:  # over all pairs: Var = E[variance in a row] + Var[mean of a row]
        fields["total_variance"] = fields["logit_variance"].mean(axis=0) + fields["logit_mean"].var(axis=0)
    return {name: fields[name] for name in names}


def rows_of(values: Any, axes: Mapping[str, Iterable[Any]], **fixed: Any) -> list[Row]:
    """A measured array `[seeds, *axes]` as tidy rows: `fixed`, one column per axis, `seed`, `value`."""
    array, names = np.asarray(values, dtype=np.float64), list(axes)
    levels = [list(level) for level in axes.values()]
    if array.shape[1:] != tuple(map(len, levels)):
        raise ValueError(f"values must be [seeds, {', '.join(names)}], got shape {array.shape}")
    rows = []
    for index in np.ndindex(array.shape[1:]):
        where = {name: level[i] for name, level, i in zip(names, levels, index, strict=True)}
        rows.extend({**fixed, **where, "seed": s, "value": float(array[s, *index])} for s in range(array.shape[0]))
    return rows
