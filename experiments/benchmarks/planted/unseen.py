"""Faulty attention functions whose author never saw what the audit looks for.

They are faults that people have written: letters of an einsum, tiles whose start is forgotten, caches, merges of parts
that were normalised apart, backward passes by hand. Beside them stand healthy functions that are written in unusual
ways.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from attn_jax import positions
from attn_jax.audit import Expectation
from attn_jax.typing import Array
from experiments.benchmarks.planted.functions import (
    CAUSAL,
    ROTARY,
    STANDARD,
    Function,
    Planted,
    attention,
    fetch,
    repeat,
    scores,
    softmax,
    triangle,
    wide,
)

Three = tuple[Array, Array, Array]


def logits_of(query: Array, key: Array) -> Array:
    """q·k / √H."""
    return scores(query, key) * query.shape[-1] ** -0.5


def scaled_after_cap(query: Array, key: Array, value: Array, *, logits_soft_cap: float | None = None) -> Array:
    """The soft cap comes before the scale."""
    if logits_soft_cap is None:
        return attention(query, key, value)
    q, k, v = wide(query, key, value)
    logits = logits_soft_cap * jnp.tanh(scores(q, k) / logits_soft_cap) * q.shape[-1] ** -0.5
    return fetch(softmax(logits), v).astype(query.dtype)


def width_by_key_heads(query: Array, key: Array, value: Array) -> Array:
    """The head width is taken as D / K, where there are fewer key heads."""
    return attention(query, key, value, scale=(query.shape[-1] * query.shape[2] // key.shape[2]) ** -0.5)


def accumulator_kept(query: Array, key: Array, value: Array, *, block: int = 64) -> Array:
    """Blocks of keys: when the maximum rises the denominator is rescaled, and the output is not."""
    q, k, v = wide(query, key, value)
    logits, values = logits_of(q, k), repeat(v, q.shape[2])
    largest = jnp.full(logits.shape[:-1], -jnp.inf)
    total, output = jnp.zeros_like(largest), jnp.zeros((*largest.shape, v.shape[-1]))
    for start in range(0, key.shape[1], block):
        part = logits[..., start : start + block]
        risen = jnp.maximum(largest, part.max(axis=-1))
        raised = jnp.exp(part - risen[..., None])
        total = total * jnp.exp(largest - risen) + raised.sum(axis=-1)
        output = output + jnp.einsum("bnts,bsnv->bntv", raised, values[:, start : start + block])
        largest = risen
    return jnp.swapaxes(output / total[..., None], 1, 2).astype(query.dtype)


def one_maximum(query: Array, key: Array, value: Array) -> Array:
    """The maximum of all logits is subtracted, so that rows far below it vanish."""
    q, k, v = wide(query, key, value)
    logits = logits_of(q, k)
    raised = jnp.exp(logits - logits.max())
    return fetch(raised / raised.sum(axis=-1, keepdims=True), v).astype(query.dtype)


def sink_cut_wrongly(query: Array, key: Array, value: Array, *, sinks: Array | None = None) -> Array:
    """The sink is put before the keys, and cut off behind them."""
    if sinks is None:
        return attention(query, key, value)
    q, k, v = wide(query, key, value)
    logits = logits_of(q, k)
    sink = jnp.broadcast_to(jnp.asarray(sinks, logits.dtype)[None, :, None, None], (*logits.shape[:-1], 1))
    weights = softmax(jnp.concatenate([sink, logits], axis=-1))
    return fetch(weights[..., :-1], v).astype(query.dtype)


def mask_added(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """A boolean mask is added as if it were a bias of 0 and −∞."""
    return attention(query, key, value, None if mask is None else jnp.asarray(mask).astype(jnp.float32))


def mask_or_causal(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, is_causal: bool = False
) -> Array:
    """A key is seen where either mask allows it."""
    if mask is None or not is_causal:
        return attention(query, key, value, mask=mask, is_causal=is_causal)
    return attention(query, key, value, mask=jnp.asarray(mask) | triangle(query.shape[1], key.shape[1]))


def causal_in_block(query: Array, key: Array, value: Array, *, is_causal: bool = False, block: int = 64) -> Array:
    """Blocks of queries, whose causal mask is drawn as if each were the first."""
    if not is_causal:
        return attention(query, key, value)
    rows, columns = jnp.arange(query.shape[1]) % block, jnp.arange(key.shape[1])
    return attention(query, key, value, mask=(columns[None, :] <= rows[:, None])[None, None])


def lengths_of_queries(query: Array, key: Array, value: Array, *, key_value_seq_lengths: Array | None = None) -> Array:
    """The lengths of the keys blank queries, and padded keys are seen."""
    if key_value_seq_lengths is None:
        return attention(query, key, value)
    seen = jnp.arange(query.shape[1])[None, :] < jnp.asarray(key_value_seq_lengths)[:, None]
    return attention(query, key, value, mask=seen[:, None, :, None])


def bias_or_mask(query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None) -> Array:
    """`elif`: the bias is dropped beside a mask."""
    return attention(query, key, value, bias if mask is None else None, mask)


def mean_not_returned(query: Array, key: Array, value: Array) -> Array:
    """Values lose their mean over the tokens, which is never added back."""
    return attention(query, key, value - value.mean(axis=1, keepdims=True))


def other_letter(query: Array, key: Array, value: Array) -> Array:
    """A letter of the einsum: each query head is compared with the sum of all key heads."""
    q, k, v = wide(query, key, value)
    logits = jnp.einsum("btnh,bsmh->bnts", q, k) * q.shape[-1] ** -0.5
    return fetch(softmax(logits), v).astype(query.dtype)


def merged_by_reshape(query: Array, key: Array, value: Array) -> Array:
    """`[B, N, T, V]` becomes `[B, T, N, V]` by a reshape, where a transpose was due."""
    output = attention(query, key, value)
    return jnp.swapaxes(output, 1, 2).reshape(output.shape)


def keys_are_values(query: Array, key: Array, value: Array) -> Array:
    """The projection of the values is read for the keys too."""
    return attention(query, value if value.shape == key.shape else key, value)


def half_turned(query: Array, key: Array, value: Array) -> Array:
    """Rotary positions reach the first half of the width alone."""

    def turned(x: Array) -> Array:
        half = x.shape[-1] // 2
        return jnp.concatenate([positions.apply_rotary(x[..., :half], jnp.arange(x.shape[1])), x[..., half:]], axis=-1)

    return attention(turned(query), turned(key), value)


def rounded_positions(query: Array, key: Array, value: Array) -> Array:
    """Positions are counted in bfloat16, which cannot tell neighbours apart past 256."""

    def turned(x: Array) -> Array:
        at = jnp.arange(x.shape[1]).astype(jnp.bfloat16).astype(jnp.int32)
        return positions.apply_rotary(x, at)

    return attention(turned(query), turned(key), value)


def packed_batch(query: Array, key: Array, value: Array) -> Array:
    """The items are packed into one sequence, and no mask keeps them apart."""

    def packed(x: Array) -> Array:
        return jnp.broadcast_to(x.reshape(1, -1, *x.shape[2:]), (x.shape[0], x.shape[0] * x.shape[1], *x.shape[2:]))

    return attention(query, packed(key), packed(value))


def single_query_sees_all(
    query: Array, key: Array, value: Array, *, is_causal: bool = False, query_offset: int = 0
) -> Array:
    """A single query is taken to be the last, and sees the cache's empty places."""
    mask = triangle(query.shape[1], key.shape[1], query_offset) if is_causal and query.shape[1] > 1 else None
    return attention(query, key, value, mask=mask)


def window_without_offset(
    query: Array, key: Array, value: Array, *, is_causal: bool = False, query_offset: int = 0,
    local_window_size: tuple[int, int] | None = None,
) -> Array:  # fmt: skip
    """The causal mask counts from the offset, and the window does not."""
    length, keys = query.shape[1], key.shape[1]
    seen = triangle(length, keys, query_offset) if is_causal else jnp.ones((1, 1, length, keys), bool)
    if local_window_size is not None:
        left, right = local_window_size
        distance = jnp.arange(length)[:, None] - jnp.arange(keys)[None, :]
        seen = seen & ((distance <= left) & (distance >= -right))[None, None]
    return attention(query, key, value, mask=seen)


def rate_kept(
    query: Array, key: Array, value: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None
) -> Array:
    """The rate is the share that is kept."""
    q, k, v = wide(query, key, value)
    weights = softmax(logits_of(q, k))
    if dropout_rate and dropout_rng is not None:
        weights = weights * jax.random.bernoulli(dropout_rng, dropout_rate, weights.shape) / dropout_rate
    return fetch(weights, v).astype(query.dtype)


@jax.custom_vjp
def _softmax_by_hand(logits: Array) -> Array:
    return softmax(logits)


def _forward(logits: Array) -> tuple[Array, Array]:
    weights = softmax(logits)
    return weights, weights


def _backward(weights: Array, cotangent: Array) -> tuple[Array]:
    return (weights * cotangent,)


_softmax_by_hand.defvjp(_forward, _backward)


def row_sums_left_out(query: Array, key: Array, value: Array) -> Array:
    """A backward pass by hand: w·g, without the row's sum of w·g subtracted from g."""
    q, k, v = wide(query, key, value)
    return fetch(_softmax_by_hand(logits_of(q, k)), v).astype(query.dtype)


def constant_bias(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """No gradient reaches the bias."""
    return attention(query, key, value, None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias)))


def rounded_residual(query: Array, key: Array, value: Array) -> Array:
    """The log-sum-exp is kept in bfloat16, and weights are made from it."""
    q, k, v = wide(query, key, value)
    logits = logits_of(q, k)
    residual = jax.nn.logsumexp(logits, axis=-1, keepdims=True).astype(jnp.bfloat16)
    return fetch(jnp.exp(logits - residual.astype(logits.dtype)), v).astype(query.dtype)


def mean_of_heads(query: Array, key: Array, value: Array) -> Array:
    """Outputs are divided by the number of heads."""
    return attention(query, key, value) / query.shape[2]


UNSEEN: Mapping[str, Planted] = {
    "scaled after the cap": Planted(scaled_after_cap, "scale"),
    "width by key heads": Planted(width_by_key_heads, "scale"),
    "accumulator not rescaled": Planted(accumulator_kept, "softmax"),
    "one maximum for all": Planted(one_maximum, "softmax"),
    "sink cut at the wrong end": Planted(sink_cut_wrongly, "softmax"),
    "mask added": Planted(mask_added, "mask"),
    "mask or causal": Planted(mask_or_causal, "mask"),
    "causal within a block": Planted(causal_in_block, "mask"),
    "lengths on queries": Planted(lengths_of_queries, "mask"),
    "bias dropped beside a mask": Planted(bias_or_mask, "bias"),
    "mean of values not added back": Planted(mean_not_returned, "values"),
    "another letter": Planted(other_letter, "heads"),
    "heads merged by reshape": Planted(merged_by_reshape, "heads"),
    "keys are values": Planted(keys_are_values, "projections"),
    "half the width turned": Planted(half_turned, "positions", ROTARY),
    "positions in bfloat16": Planted(rounded_positions, "positions", ROTARY),
    "packed batch": Planted(packed_batch, "batch"),
    "single query sees all": Planted(single_query_sees_all, "cache"),
    "window without offset": Planted(window_without_offset, "cache"),
    "rate is kept": Planted(rate_kept, "dropout"),
    "row sums left out": Planted(row_sums_left_out, "gradients"),
    "no gradient to the bias": Planted(constant_bias, "gradients"),
    "log-sum-exp in bfloat16": Planted(rounded_residual, "numerics"),
    "mean of heads": Planted(mean_of_heads, "output"),
}


def online(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """Causal, one key after another: maximum, denominator and output are carried along and rescaled."""
    q, k, v = wide(query, key, value)
    logits, values = logits_of(q, k), repeat(v, q.shape[2])
    seen = triangle(*logits.shape[-2:])
    seen = jnp.broadcast_to(seen if mask is None else seen & mask, logits.shape)

    def step(carry: Three, one: Three) -> tuple[Three, None]:
        largest, total, output = carry
        logit, allowed, fetched = one
        risen = jnp.where(allowed, jnp.maximum(largest, jax.lax.stop_gradient(logit)), largest)
        shrunk = jnp.exp(largest - risen)
        raised = jnp.where(allowed, jnp.exp(jnp.where(allowed, logit - risen, 0.0)), 0.0)
        output = output * shrunk[..., None] + raised[..., None] * fetched[:, :, None]
        return (risen, total * shrunk + raised, output), None

    lowest = jnp.full(logits.shape[:-1], -1e30, logits.dtype)
    start = (lowest, jnp.zeros_like(lowest), jnp.zeros((*lowest.shape, v.shape[-1]), logits.dtype))
    columns = (jnp.moveaxis(logits, -1, 0), jnp.moveaxis(seen, -1, 0), jnp.moveaxis(values, 1, 0))
    (_, total, output), _ = jax.lax.scan(step, start, columns)
    output = output / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.swapaxes(output, 1, 2).astype(query.dtype)


def head_by_head(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """One item and one head at a time, in logarithms."""
    q, k, v = wide(query, key, value)
    batch, heads = q.shape[0], q.shape[2]
    shape = (batch, heads, q.shape[1], k.shape[1])
    added = jnp.zeros(shape, q.dtype) if bias is None else jnp.broadcast_to(bias, shape)

    def one(q: Array, k: Array, v: Array, added: Array) -> Array:
        logits = q @ k.T / q.shape[-1] ** 0.5 + added
        logits = logits - jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
        return jnp.exp(logits - jnp.log(jnp.exp(logits).sum(axis=1, keepdims=True))) @ v

    every = jax.vmap(jax.vmap(one, in_axes=(1, 1, 1, 0), out_axes=1))
    return every(q, repeat(k, heads), repeat(v, heads), added).astype(query.dtype)


def sorted_tokens(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, is_causal: bool = False
) -> Array:
    """Queries and keys are sorted by their first number, and outputs are put back."""
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    seen = jnp.broadcast_to(jnp.bool_(True) if mask is None else jnp.asarray(mask), shape)
    seen = seen & triangle(*shape[2:]) if is_causal else seen
    rows, columns = jnp.argsort(query[:, :, 0, 0], axis=1), jnp.argsort(key[:, :, 0, 0], axis=1)
    query = jnp.take_along_axis(query, rows[:, :, None, None], axis=1)
    key, value = (jnp.take_along_axis(x, columns[:, :, None, None], axis=1) for x in (key, value))
    seen = jnp.take_along_axis(seen, rows[:, None, :, None], axis=2)
    seen = jnp.take_along_axis(seen, columns[:, None, None, :], axis=3)
    output = attention(query, key, value, mask=seen)
    return jnp.take_along_axis(output, jnp.argsort(rows, axis=1)[:, :, None, None], axis=1)


def centred_keys(query: Array, key: Array, value: Array) -> Array:
    """Keys lose their mean over the tokens, which no softmax sees."""
    q, k, v = wide(query, key, value)
    return attention(q, k - k.mean(axis=1, keepdims=True), v).astype(query.dtype)


FIRST_MEASURED = "12 of 24, 50%"  # before the audit was changed for some of them

UNSEEN_HEALTHY: Mapping[str, tuple[Function, Expectation]] = {
    "one key after another, causal": (online, CAUSAL),
    "head by head, in logarithms": (head_by_head, STANDARD),
    "tokens sorted and put back": (sorted_tokens, STANDARD),
    "keys centred": (centred_keys, STANDARD),
}
