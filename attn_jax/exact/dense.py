"""Softmax attention written out: every link visible, the whole `[*B, N, T, S]` square in memory.

    logits  = cap · tanh((scale · q·k + bias) / cap)
    weights = softmax(logits) over the keys that the mask allows
    output  = weights · value

This is the reference that the other implementations are compared with, and what the diagnostics measure. Rows that
see nothing get weights 0 and log-sum-exp `-inf`; entries that nobody may see reach neither outputs nor gradients.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_jax.exact.arguments import Problem
from attn_jax.exact.dropout import apply_dropout
from attn_jax.scaling import soft_cap
from attn_jax.typing import Array, Bool, Float


class Logits(NamedTuple):
    """Final logits and who may see whom.

    Attributes:
        values: `[*B, N, T, S]`, 0 where not visible.
        visible: boolean, broadcastable to the values; None: all are.
    """

    values: Float[Array, "*b n t s"]
    visible: Bool[Array, "*#b #n #t #s"] | None


class Exponentials(NamedTuple):
    """`exp(logits - shift)` `[*B, N, T, S]`, 0 where not visible; per row `[*B, N, T, 1]` its sum (1 if the row is
    empty), the shift, and whether the row is empty."""

    values: Float[Array, "*b n t s"]
    total: Float[Array, "*b n t 1"]
    shift: Float[Array, "*b n t 1"]
    empty: Bool[Array, "*b n t 1"]


class Shares(NamedTuple):
    """Per row `[*B, N, T, 1]`: the log-sum-exp of the keys, and how they and the sink divide the softmax."""

    logsumexp: Float[Array, "*b n t 1"]
    keys: Float[Array, "*b n t 1"]
    sink: Float[Array, "*b n t 1"]


@jax.jit
def attention(problem: Problem) -> tuple[Float[Array, "*b t n v"], Float[Array, "*b t n"]]:
    """The output and the log-sum-exp of a problem."""
    logits = compute_logits(problem)
    exponentials = exponentiate(logits)
    shares = share(problem, exponentials)
    return fetch(problem, logits, exponentials, shares), jnp.swapaxes(shares.logsumexp.squeeze(-1), -1, -2)


@jax.jit
def weights(problem: Problem) -> Float[Array, "*b n t s"]:
    """The weights of a problem, before dropout."""
    exponentials = exponentiate(compute_logits(problem))
    return exponentials.values / exponentials.total * share(problem, exponentials).keys


def compute_logits(problem: Problem) -> Logits:
    """Match: scale, bias and soft cap, in this order."""
    dtype, tile = problem.accumulation_dtype, problem.tile
    visible = None if problem.mask is None else problem.mask.evaluate(tile)
    bias = None if problem.bias is None else problem.bias.evaluate(tile, dtype)
    if bias is not None:  # decided before the cap, which would make an ordinary number of -inf
        finite = ~jnp.isneginf(bias)
        visible = finite if visible is None else visible & finite

    query, key = _heads_first(problem.query).astype(dtype), _heads_first(problem.key).astype(dtype)
    if visible is not None:
        query = jnp.where(visible.any(axis=-1, keepdims=True), query, 0)  # queries that see a key
        key = jnp.where(_seen_keys(visible, problem.num_kv_heads), key, 0)
    logits = _product("...rh,...sh->...rs", query * _per_head(problem.scale, query), key, problem.precision)
    if bias is not None:
        logits = logits + bias
    if visible is not None:  # before the cap, so that what stands behind the mask has no gradient through it
        logits = jnp.where(visible, logits, 0)
    return Logits(soft_cap(logits, problem.logits_soft_cap), visible)


def exponentiate(logits: Logits) -> Exponentials:
    """The numerators and the denominator of the softmax, shifted by the largest visible logit of the row."""
    values, visible = logits
    if visible is not None:
        values = jnp.where(visible, values, -jnp.inf)
    maximum = jax.lax.stop_gradient(values.max(axis=-1, keepdims=True, initial=-jnp.inf))
    shift = jnp.where(jnp.isneginf(maximum), 0, maximum)
    # exp(-inf) = 0 with derivative 0: no second `where` is needed for a clean gradient.
    exponentials = jnp.exp(values - shift)
    total = exponentials.sum(axis=-1, keepdims=True)
    return Exponentials(exponentials, jnp.where(total == 0, 1, total), shift, total == 0)


def share(problem: Problem, exponentials: Exponentials) -> Shares:
    """What the keys of each row get of its softmax, and what the sink gets: all to the keys where there is none."""
    logsumexp = jnp.log(exponentials.total) + exponentials.shift
    keys, sink = jnp.ones_like(logsumexp), jnp.zeros_like(logsumexp)
    if problem.sinks is not None:
        # e^lse / (e^lse + e^sink): a sigmoid, as exp(-softplus) for the sake of its derivative far from 0.
        difference = problem.tile.per_head("sinks", problem.sinks.astype(logsumexp.dtype)) - logsumexp
        keys = jnp.exp(-jax.nn.softplus(difference))
        sink = jnp.where(exponentials.empty, 1, jax.nn.sigmoid(difference))
    return Shares(jnp.where(exponentials.empty, -jnp.inf, logsumexp), keys, sink)


def fetch(problem: Problem, logits: Logits, exponentials: Exponentials, shares: Shares) -> Float[Array, "*b t n v"]:
    """Fetch: the values by their weights, after dropout, in the query's dtype."""
    assert problem.value is not None
    value, numerators = _heads_first(problem.value).astype(problem.accumulation_dtype), exponentials.values
    if logits.visible is not None:
        value = jnp.where(_seen_keys(logits.visible, problem.num_kv_heads), value, 0)
    if problem.dropout is not None:
        numerators = apply_dropout(problem.dropout, numerators, problem.tile)
    sums = _product("...rs,...sv->...rv", numerators, value, problem.precision)
    # Divided last, [T, V] instead of [T, S]: equal weights over ones then give exactly 1.
    output = sums / exponentials.total * shares.keys
    return _heads_first(output).astype(problem.query.dtype)


def _heads_first(x: Array) -> Array:
    """`[*B, T, N, H]` as `[*B, N, T, H]`, or back."""
    return jnp.swapaxes(x, -2, -3)


def _product(equation: str, rows: Array, matrices: Array, precision: jax.lax.PrecisionLike) -> Array:
    """A product of the rows `[*B, N, T, _]` of head n with the matrix `[*B, K, S, _]` of head n // G, not repeated.

    Written as one matrix product per key/value head, heads first: XLA takes it without turning operands around.
    """
    *batch, num_heads, length, width = rows.shape
    num_kv_heads, group = _groups(num_heads, matrices.shape[-3])
    products = jnp.einsum(
        equation, rows.reshape(*batch, num_kv_heads, group * length, width), matrices, precision=precision
    )
    return products.reshape(*batch, num_heads, length, products.shape[-1])


def _groups(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """K and G: spelled out, since `reshape` cannot infer an axis of an array without entries."""
    return num_kv_heads, num_heads // num_kv_heads


def _per_head(scale: float | Array, query: Array) -> Array:
    scale = jnp.asarray(scale, query.dtype)
    return scale if scale.ndim == 0 else scale.reshape((1,) * (query.ndim - 3) + (-1, 1, 1))


def _seen_keys(visible: Bool[Array, "*#b #n #t #s"], num_kv_heads: int) -> Bool[Array, "*#b #k #s 1"]:
    """Keys that at least one query of their group sees."""
    seen = visible.any(axis=-2)
    if seen.shape[-2] != 1:
        seen = seen.reshape(*seen.shape[:-2], *_groups(seen.shape[-2], num_kv_heads), seen.shape[-1]).any(axis=-2)
    return seen[..., None]
