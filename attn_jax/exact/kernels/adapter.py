"""From a problem in normal form to the kernel: what it takes, and how it is handed over."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import masks
from attn_jax.exact.arguments import Problem
from attn_jax.exact.kernels import pallas
from attn_jax.exact.kernels.visits import Visits
from attn_jax.exact.steps import Differentiable, Fixed, Static
from attn_jax.exact.tiles import Blocks, make_plan
from attn_jax.lazy import Square, Tile
from attn_jax.typing import Array

_PRECISION = {
    None: None,
    "default": "default",
    "highest": "highest",
    jax.lax.Precision.DEFAULT: "default",
    jax.lax.Precision.HIGHEST: "highest",
}

_LOOKED_AT = 64  # tiles a side, to see whether a mask's are known when the program is traced


def refuse(problem: Problem) -> str | None:
    """Why the kernel cannot do a problem, or None."""
    foreign = problem.given & {
        "bias", "query_seq_lengths", "key_value_seq_lengths", "query_positions", "key_positions", "dropout_rate",
    }  # fmt: skip
    if foreign:
        return f"it does not take {', '.join(sorted(foreign))}"
    if problem.value is None:
        return "it needs values"
    if problem.query.dtype == jnp.float64:
        return "its sums are float32"
    if not isinstance(problem.scale, float):
        return "it takes a number as scale"
    if problem.square.rows is not None:
        return "it takes no chosen rows"
    if problem.square.first_query is None:
        return "it takes a number as query_offset"
    if not any(problem.precision is name or problem.precision == name for name in _PRECISION):
        return f"its precision is None, 'default' or 'highest', got {problem.precision!r}"
    if 0 in (*problem.query.shape, *problem.key.shape, *problem.value.shape):
        return "it does not take arrays without entries"
    mask = problem.mask
    if mask is not None:
        if jax.tree.leaves(mask):
            return "it takes masks of numbers, not of arrays"
        shape = jax.eval_shape(lambda: mask.evaluate(problem.tile)).shape
        if any(length != 1 for length in shape[:-2]):
            return "it takes masks that are one for all items and heads"
        few = max(16, *(length // _LOOKED_AT for length in problem.square.shape[-2:]))  # not the square of a long one
        if not all(isinstance(x, np.ndarray) for x in _plan(mask, problem.square, (few, few))):
            return "it takes masks whose tiles are known when the program is traced"
    return None


def forward(static: Static, differentiable: Differentiable, fixed: Fixed) -> tuple[Array, Array, dict[str, Array]]:
    """Output `[*B, T, K, G, V]` without the sink's share, log-sum-exp and statistics `[*B, T, K, G]`."""
    mask = fixed.mask
    assert differentiable.value is not None
    assert static.scale is not None
    query = jnp.moveaxis(differentiable.query, -4, -2)
    key, value = (jnp.swapaxes(x, -2, -3) for x in (differentiable.key, differentiable.value))
    *lead, groups, length, width = query.shape

    def visible(queries: Array, keys: Array) -> Array:
        assert mask is not None
        return mask.evaluate(_Part((1, queries.shape[0], keys.shape[1]), fixed.square, queries, keys))[0]

    output, logsumexp, measured = pallas.flash_attention(
        query.reshape(-1, groups * length, width),
        key.reshape(-1, *key.shape[-2:]),
        value.reshape(-1, *value.shape[-2:]),
        query_length=length,
        plan=lambda queries, keys: _plan(mask, fixed.square, (queries, keys)),
        visible=None if mask is None else visible,
        scale=static.scale,
        soft_cap=static.logits_soft_cap,
        statistics=static.statistics,
        precision=_PRECISION[static.precision],
    )

    def rows_first(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*lead, groups, length, *x.shape[2:]), len(lead) + 1, len(lead) - 1)

    return rows_first(output), rows_first(logsumexp), {name: rows_first(x) for name, x in measured.items()}


class _Part(Tile):
    """A tile of indices that the kernel has made, of one item and head."""

    def __init__(self, sizes: tuple[int, ...], square: Square, queries: Array, keys: Array) -> None:
        super().__init__(Square((1, *square.shape[-2:]), square.first_query), (0, 0, 0), sizes)
        assert square.first_query is not None
        # In the place of the cached properties: a kernel cannot index arrays by where it is.
        self.__dict__["query_positions"] = queries[None] + np.int32(square.first_query)
        self.__dict__["key_positions"] = keys[None]


def _plan(mask: masks.Mask | None, square: Square, tile: tuple[int, int]) -> Visits:
    """The visits of one head, in NumPy."""
    queries, keys = square.shape[-2:]
    blocks = Blocks(1, 1, min(tile[0], queries), min(tile[1], keys))
    plan = make_plan(Square((1, queries, keys), square.first_query), blocks, 1, mask, None)
    return Visits(*(x[0] for x in plan.lists))  # pyright: ignore[reportArgumentType] - static, `refuse` has seen to it
