"""Softmax attention tile by tile: exact, in memory that grows with T + S, forward and backward.

One loop over tiles of (queries × keys) serves every pattern and both directions. Forward, each tile of queries runs
the online softmax over the tiles of keys that its mask touches. Backward, the same tiles are visited once more and
the weights are computed again from the log-sum-exp:

    p = e^(s - lse)    dv = pᵀ do    ds = p (do·v - do·o)    dq = ds k    dk = dsᵀ q

Backward keeps keys first, so that each of its five products contracts what lies together in memory.

Reference: Rabe & Staats 2021; Dao et al. 2022, algorithms 1 and 4.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from attn_jax.exact import online
from attn_jax.exact.arguments import Problem
from attn_jax.exact.kernels import adapter
from attn_jax.exact.steps import (
    Differentiable,
    Fixed,
    Static,
    Step,
    Sweep,
    like,
    seen_keys,
    sink_shares,
    sweep_steps,
)
from attn_jax.exact.tiles import Blocks, Blockwise, choose_blocks
from attn_jax.typing import Array

_CHOOSE = Blockwise()
OUTPUT, LOGSUMEXP = "attention_output", "attention_logsumexp"  # names for rematerialisation policies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """Output `[*B, T, K, G, V]` (None without values), log-sum-exp and statistics `[*B, T, K, G]`."""

    output: Array | None
    logsumexp: Array
    statistics: dict[str, Array]


def attention(problem: Problem, wanted: Blockwise = _CHOOSE, *, kernel: bool = False) -> tuple[Array, Array]:
    """The output and the log-sum-exp of a problem."""
    results = attend(problem, (), wanted, kernel=kernel)
    assert results.output is not None
    return results.output, results.logsumexp


def attend(
    problem: Problem, statistics: tuple[str, ...], wanted: Blockwise = _CHOOSE, *, kernel: bool = False
) -> Results:
    """Output `[*B, T, N, V]`, log-sum-exp and statistics `[*B, T, N]` of a problem, in one pass over its tiles.

    With `kernel`, forward is that of `attn_jax.exact.kernels`; backward is this loop's either way.
    """
    blocks = choose_blocks(problem.square, problem.num_kv_heads, wanted, problem.mask)
    results = _run(*call_of(problem, blocks, statistics, kernel=kernel))
    output = None if results.output is None else per_head(results.output).astype(problem.query.dtype)
    measured = {name: per_head(x, 0) for name, x in results.statistics.items()}
    return Results(output, per_head(results.logsumexp, 0), measured)


def call_of(
    problem: Problem, blocks: Blocks, statistics: tuple[str, ...] = (), *, kernel: bool = False
) -> tuple[Static, Differentiable, Fixed]:
    """A problem as the tile loop takes it: an axis for the query heads of each key/value head."""
    dropout = problem.dropout
    number = problem.scale if isinstance(problem.scale, float) else None
    static = Static(
        number,
        problem.logits_soft_cap,
        0.0 if dropout is None else dropout.rate,
        problem.precision,
        blocks,
        statistics,
        kernel,
    )
    *lead, num_heads, width = problem.query.shape
    query = problem.query.reshape(*lead, problem.num_kv_heads, num_heads // problem.num_kv_heads, width)
    scale = jnp.asarray(problem.scale) if number is None else None
    differentiable = Differentiable(query, problem.key, problem.value, problem.bias, scale, problem.sinks)
    return static, differentiable, Fixed(problem.mask, problem.square, None if dropout is None else dropout.key)


def per_head(x: Array, after: int = 1) -> Array:
    """`[*B, T, K, G, ...]`, with so many axes at the end, as `[*B, T, N, ...]`."""
    axis = x.ndim - after - 2
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


@functools.partial(jax.jit, static_argnums=0)
def _run(static: Static, differentiable: Differentiable, fixed: Fixed) -> Results:
    return _attend(static, differentiable, fixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, differentiable: Differentiable, fixed: Fixed) -> Results:
    return forward(static, differentiable, fixed)


def forward(static: Static, differentiable: Differentiable, fixed: Fixed) -> Results:
    """One pass over the tiles: output, log-sum-exp and statistics in the dtype of sums."""
    if static.kernel:
        return _kernel_forward(static, differentiable, fixed)
    query, value = differentiable.query, differentiable.value
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    memory = online.remembered(static.statistics)

    def visit_rows(step: Step, sweep: Sweep, results: Results) -> Results:
        rows_query = step.rows(query).astype(dtype) * step.scale()
        shape = rows_query.shape[:-1]
        rows = online.start(shape, dtype, memory)
        sums = None if value is None else jnp.zeros((*shape, value.shape[-1]), dtype)

        def visit(index: Array, mixed: bool, carry: tuple) -> tuple:
            rows, sums = carry
            tile = step.tile(index)
            key = step.keys(differentiable.key, index).astype(dtype)
            logits = jnp.einsum("bkgth,bksh->bkgts", rows_query, key, precision=static.precision)
            bias, visible = step.bias_and_visible(index, mixed)
            if bias is not None:
                logits = logits + bias
            if static.logits_soft_cap is not None:
                logits = static.logits_soft_cap * jnp.tanh(logits / static.logits_soft_cap)
            if visible is not None:
                logits = jnp.where(visible, logits, -jnp.inf)
            entries = online.Entries(
                logits,
                visible,
                step.grouped(tile.query_positions),
                step.grouped(tile.key_positions),
                step.key_start(index),
            )
            rows, numerators, factor = online.update(rows, entries)
            if sums is not None:
                assert value is not None
                tile_value = step.keys(value, index).astype(dtype)
                if visible is not None and not sweep.plan.all_seen:
                    tile_value = jnp.where(seen_keys(visible), tile_value, 0)
                kept = step.kept(index)
                if kept is not None:
                    numerators = jnp.where(kept, numerators / (1 - static.dropout_rate), 0)
                fetched = jnp.einsum("bkgts,bksv->bkgtv", numerators, tile_value, precision=static.precision)
                sums = sums * factor[..., None] + fetched
            return rows, sums

        rows, sums = sweep.visit_keys(visit, (rows, sums))
        logsumexp = online.logsumexp(rows)
        keys_share, sink_share = step.shares(logsumexp)
        output = results.output
        if sums is not None:
            assert output is not None
            total = jnp.where(rows["total"] == 0, 1, rows["total"])
            output = step.put_rows(output, sums / total[..., None] * keys_share[..., None])
        measured = online.finish(rows, static.statistics, sink_share)
        return Results(
            output,
            step.put_rows(results.logsumexp, logsumexp),
            {name: step.put_rows(results.statistics[name], x) for name, x in measured.items()},
        )

    rows = query.shape[:-1]
    counts = ("argmax_key", "visible_keys")
    nothing = Results(
        None if value is None else jnp.zeros((*rows, value.shape[-1]), dtype),
        jnp.full(rows, -jnp.inf, dtype),
        {name: jnp.zeros(rows, jnp.int32 if name in counts else dtype) for name in static.statistics},
    )
    return sweep_steps(static, differentiable, fixed, visit_rows, nothing)


def _kernel_forward(static: Static, differentiable: Differentiable, fixed: Fixed) -> Results:
    sinks, names = differentiable.sinks, tuple(name for name in static.statistics if name != "sink_share")
    output, logsumexp, measured = adapter.forward(dataclasses.replace(static, statistics=names), differentiable, fixed)
    keys_share, sink_share = jnp.ones_like(logsumexp), jnp.zeros_like(logsumexp)
    if sinks is not None:
        keys_share, sink_share = sink_shares(sinks.reshape(differentiable.query.shape[-3:-1]), logsumexp)
    if "sink_share" in static.statistics:
        measured["sink_share"] = jnp.where(jnp.isneginf(logsumexp) & (sinks is not None), 1, sink_share)
    return Results(output * keys_share[..., None], logsumexp, measured)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Asked:
    """Whether a gradient of what shapes the logits is asked for, or of the values (and sinks) alone."""

    logits: bool


def _attend_forward(static: Static, differentiable: Differentiable, fixed: Fixed) -> tuple[Results, tuple]:
    asked = _Asked(
        any(
            x.perturbed
            for x in jax.tree.leaves(dataclasses.replace(differentiable, value=None, sinks=None), is_leaf=_is_primal)
        )
    )
    differentiable, fixed = jax.tree.map(lambda x: x.value, (differentiable, fixed), is_leaf=_is_primal)
    results = _forward_once(static, differentiable, fixed)
    output = None if results.output is None else checkpoint_name(results.output, OUTPUT)
    results = Results(output, checkpoint_name(results.logsumexp, LOGSUMEXP), results.statistics)
    return results, (differentiable, fixed, results, asked)


def _attend_backward(static: Static, residuals: tuple, cotangents: Results) -> tuple[Differentiable, Any]:
    differentiable, fixed, results, asked = residuals
    static = dataclasses.replace(static, value_only=not asked.logits)
    d_entropy = cotangents.statistics.get("entropy")  # the other statistics are constants
    cotangents = Results(
        None if cotangents.output is None else _without_symbol(cotangents.output),
        _without_symbol(cotangents.logsumexp),
        {} if d_entropy is None or isinstance(d_entropy, SymbolicZero) else {"entropy": d_entropy},
    )
    return _backward_once(static, differentiable, fixed, results, cotangents), None


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)


def _without_symbol(x: Any) -> Array:
    symbol: Any = x  # whose attributes pyright does not know
    return jnp.zeros(symbol.shape, symbol.dtype) if isinstance(x, SymbolicZero) else x


def backward(
    static: Static, differentiable: Differentiable, fixed: Fixed, results: Results, cotangents: Results
) -> dict[str, Any]:
    """What flows back to each field of `differentiable`, in the dtype of sums; of a bias, to each floating leaf.

    The results and cotangents of the rows are those over all of their keys. The keys here may be a part of them: the
    gradients of parts add up.
    """
    query, key, value = differentiable.query, differentiable.key, differentiable.value
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    output, d_entropy = results.output, cotangents.statistics.get("entropy")

    def visit_rows(step: Step, sweep: Sweep, gradients: dict[str, Any]) -> dict[str, Any]:
        gradients = dict(gradients)
        plain_query = step.rows(query).astype(dtype)
        scale = step.scale()
        rows_query = plain_query * scale
        logsumexp = step.rows(results.logsumexp)
        empty, fresh = jnp.isneginf(logsumexp), step.fresh()
        logsumexp = jnp.where(empty, 0, logsumexp)
        keys_share, sink_share = step.shares(logsumexp)

        # ds = p (do·v share + offset + slope s), with 0 for rows that see nothing or were visited before.
        offset = step.rows(cotangents.logsumexp)
        slope, d_output = None, None
        if output is not None:
            assert cotangents.output is not None
            d_output = jnp.where(fresh[..., None] & ~empty[..., None], step.rows(cotangents.output), 0)
            product = (d_output * step.rows(output)).sum(axis=-1)
            offset = offset - product * keys_share
            d_output = d_output * keys_share[..., None]
            if differentiable.sinks is not None:
                gradients["sinks"] = step.add_heads(gradients["sinks"], -product * sink_share)
        if d_entropy is not None:
            slope = -jnp.where(fresh & ~empty, step.rows(d_entropy), 0)
            offset = offset + slope * (step.rows(results.statistics["entropy"]) - logsumexp)
        offset = jnp.where(fresh & ~empty, offset, 0)

        def visit(index: Array, mixed: bool, carry: tuple) -> tuple:
            d_query, gradients = carry
            gradients = dict(gradients)
            tile_key, tile_query = step.keys(key, index).astype(dtype), rows_query
            bias, visible = step.bias_and_visible(index, mixed)
            if visible is not None:
                if not sweep.plan.all_seen:
                    tile_key = jnp.where(seen_keys(visible), tile_key, 0)
                    tile_query = jnp.where(visible.any(axis=-1)[..., None], tile_query, 0)
                visible = keys_first(visible)
            logits = jnp.einsum("bksh,bkgth->bksgt", tile_key, tile_query, precision=static.precision)
            if bias is not None:
                logits = logits + keys_first(bias)
            slope_of_cap = None
            if static.logits_soft_cap is not None:
                bent = jnp.tanh(logits / static.logits_soft_cap)
                logits, slope_of_cap = static.logits_soft_cap * bent, 1 - bent**2
            if visible is not None:
                logits = jnp.where(visible, logits, -jnp.inf)
            weights = jnp.exp(logits - logsumexp[:, :, None])
            pull = offset[:, :, None]
            if value is not None:
                kept = step.kept(index)

                def drop(x: Array) -> Array:
                    return x if kept is None else jnp.where(keys_first(kept), x / (1 - static.dropout_rate), 0)

                d_value = jnp.einsum("bksgt,bkgtv->bksv", drop(weights), d_output, precision=static.precision)
                gradients["value"] = step.add_keys(gradients["value"], d_value, index)
                if static.value_only:
                    return d_query, gradients
                tile_value = step.keys(value, index).astype(dtype)
                if visible is not None and not sweep.plan.all_seen:
                    tile_value = jnp.where(visible.any(axis=(-1, -2))[..., None], tile_value, 0)
                back = jnp.einsum("bksv,bkgtv->bksgt", tile_value, d_output, precision=static.precision)
                pull = pull + drop(back)
            if slope is not None:
                finite = logits if visible is None else jnp.where(visible, logits, 0)
                pull = pull + slope[:, :, None] * finite
            d_logits = weights * pull
            if slope_of_cap is not None:
                d_logits = d_logits * slope_of_cap
            if visible is not None:
                d_logits = jnp.where(visible, d_logits, 0)
            d_key = jnp.einsum("bksgt,bkgth->bksh", d_logits, tile_query, precision=static.precision)
            gradients["key"] = step.add_keys(gradients["key"], d_key, index)
            if differentiable.bias is not None and gradients["bias"]:
                d_bias = step.ungrouped(keys_last(d_logits))
                gradients["bias"] = differentiable.bias.accumulate(gradients["bias"], step.tile(index), d_bias)
            # [h, t]: a product whose long axis comes last is the fast one.
            d_query = d_query + jnp.einsum("bksh,bksgt->bkhgt", tile_key, d_logits, precision=static.precision)
            return d_query, gradients

        *lead, groups, length, width = plain_query.shape
        d_query = jnp.zeros((*lead, width, groups, length), dtype)
        d_query, gradients = sweep.visit_keys(visit, (d_query, gradients))
        d_query = jnp.moveaxis(d_query, 2, -1)
        if differentiable.scale is not None:
            seen = jnp.where((fresh & ~empty)[..., None], plain_query, 0)
            gradients["scale"] = step.add_heads(gradients["scale"], (d_query * seen).sum(axis=-1))
        gradients["query"] = step.put_rows(gradients["query"], d_query * scale, add=True)
        return gradients

    heads = jnp.zeros((fixed.square.shape[-3],), dtype)
    nothing = {
        "query": jnp.zeros(query.shape, dtype),
        "key": jnp.zeros(key.shape, dtype),
        "value": None if value is None else jnp.zeros(value.shape, dtype),
        "bias": [] if differentiable.bias is None else differentiable.bias.zeros(dtype),
        "scale": None if differentiable.scale is None else heads,
        "sinks": None if differentiable.sinks is None else heads,
    }
    return sweep_steps(static, differentiable, fixed, visit_rows, nothing)


def once(function: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
    """`function(static, *arrays)`, whose derivative raises one clear line: loops and kernels say it in many."""
    run = jax.custom_jvp(function, nondiff_argnums=(0,))

    @run.defjvp
    def refuse(static: Any, primals: Any, tangents: Any) -> Any:
        raise ValueError(f"{name(static)} has first derivatives, in reverse mode; 'dense' has all")

    return run


def _backward(static: Static, differentiable: Differentiable, *others: Any) -> Differentiable:
    return like(differentiable, backward(static, differentiable, *others))


def _name(static: Static) -> str:
    return f"implementation={'pallas' if static.kernel else 'blockwise'!r}"


_forward_once, _backward_once = once(forward, _name), once(_backward, _name)
_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


def keys_first(x: Array) -> Array:
    """`[b, k, g, t, s]` as `[b, k, s, g, t]`."""
    return jnp.moveaxis(x, -1, 2)


def keys_last(x: Array) -> Array:
    """`[b, k, s, g, t]` as `[b, k, g, t, s]`."""
    return jnp.moveaxis(x, 2, -1)
