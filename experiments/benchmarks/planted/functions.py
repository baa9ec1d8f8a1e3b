"""Attention functions with one fault each, by the link that is broken, and healthy ones.

Every fault is the smallest change to `attention`, the textbook form. A third of them, `HELD_OUT`, was written after the
audit and is never looked at while it is changed.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax import positions
from attn_jax.audit import Expectation
from attn_jax.typing import Array

Function = Callable[..., Array]
STANDARD = Expectation()


@dataclasses.dataclass(frozen=True)
class Planted:
    """A function with a fault.

    Attributes:
        function: called as `function(query, key, value, **options)`.
        link: that is broken.
        expect: what its author meant.
    """

    function: Function
    link: str
    expect: Expectation = STANDARD


def repeat(x: Array, heads: int) -> Array:
    """Key/value heads, one for each query head."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def scores(query: Array, key: Array) -> Array:
    """q·k, `[B, N, T, S]`."""
    return jnp.einsum("btnh,bsnh->bnts", query, repeat(key, query.shape[2]))


def fetch(weights: Array, value: Array) -> Array:
    """The weighted sums of values, `[B, T, N, V]`."""
    return jnp.einsum("bnts,bsnv->btnv", weights, repeat(value, weights.shape[1]).astype(weights.dtype))


def softmax(logits: Array, mask: Array | None = None) -> Array:
    """Weights over the keys that are seen; rows that see nothing are 0."""
    if mask is None:
        return jax.nn.softmax(logits, axis=-1)
    mask = jnp.broadcast_to(mask, logits.shape)
    some = mask.any(axis=-1, keepdims=True)
    return jnp.where(some, jax.nn.softmax(jnp.where(mask, logits, jnp.where(some, -jnp.inf, 0)), axis=-1), 0)


def wide(*arrays: Array) -> tuple[Array, ...]:
    """In float32 or better."""
    return tuple(x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays)


def triangle(length: int, keys: int, offset: int = 0) -> Array:
    """Causal, aligned at the top left, `[1, 1, T, S]`."""
    return jnp.tri(length, keys, offset, dtype=bool)[None, None]


def attention(
    query: Array, key: Array, value: Array, bias: Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, logits_soft_cap: float | None = None,
) -> Array:  # fmt: skip
    """The textbook form, without a fault."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias
    logits = logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    seen = jnp.ones((1, 1, *logits.shape[-2:]), bool) if mask is None else mask
    seen = seen & triangle(*logits.shape[-2:]) if is_causal else seen
    return fetch(softmax(logits, seen), v).astype(query.dtype)


def _scaled(rule: Callable[[Array], float]) -> Function:
    return lambda query, key, value: attention(query, key, value, scale=rule(query))


def _turned(*which: str, interleaved: bool = False) -> Function:
    """Rotary positions on some of the three."""

    def run(query: Array, key: Array, value: Array) -> Array:
        arrays = {"query": query, "key": key, "value": value}
        for name in which:
            at = jnp.arange(arrays[name].shape[1])
            arrays[name] = positions.apply_rotary(arrays[name], at, interleaved=interleaved)
        return attention(arrays["query"], arrays["key"], arrays["value"])

    return run


def _by_weights(change: Callable[[Array], Array]) -> Function:
    """Attention whose logits become weights in another way."""

    def run(query: Array, key: Array, value: Array) -> Array:
        q, k, v = wide(query, key, value)
        return fetch(change(scores(q, k) * q.shape[-1] ** -0.5), v).astype(query.dtype)

    return run


def one_more(logits: Array) -> Array:
    """1 is added to the denominator."""
    raised = jnp.exp(logits)
    return raised / (1 + raised.sum(axis=-1, keepdims=True))


def unit_values(query: Array, key: Array, value: Array) -> Array:
    """Values are normalised."""
    return attention(query, key, value / jnp.linalg.norm(value, axis=-1, keepdims=True))


def reshaped_heads(query: Array, key: Array, value: Array) -> Array:
    """Heads before tokens by a reshape, where a transpose was due."""

    def split(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]), 1, 2)

    return attention(split(query), split(key), split(value))


def tiled_heads(query: Array, key: Array, value: Array) -> Array:
    """Key/value heads 0, 1, 0, 1 where 0, 0, 1, 1 was due."""
    group = query.shape[2] // key.shape[2]
    return attention(query, jnp.tile(key, (1, 1, group, 1)), jnp.tile(value, (1, 1, group, 1)))


def first_heads_keys(query: Array, key: Array, value: Array) -> Array:
    """All heads use the keys of head 0."""
    return attention(query, jnp.broadcast_to(key[:, :, :1], key.shape), value)


def neighbours_values(query: Array, key: Array, value: Array) -> Array:
    """Each head fetches the values of the next."""
    return attention(query, key, jnp.roll(value, 1, axis=2))


def late_triangle(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
    """A causal mask that is one too wide."""
    mask = triangle(query.shape[1], key.shape[1], 1) if is_causal else None
    return attention(query, key, value, mask=mask)


def early_triangle(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
    """A causal mask that hides a query's own key."""
    mask = triangle(query.shape[1], key.shape[1], -1) if is_causal else None
    return attention(query, key, value, mask=mask)


def deaf_to_causal(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, is_causal: bool = False
) -> Array:
    """The causal mask is dropped where another mask is given."""
    return attention(query, key, value, mask=mask, is_causal=is_causal and mask is None)


def masks_as_zero(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """Masked weights are zeroed after the softmax."""
    q, k, v = wide(query, key, value)
    weights = softmax(scores(q, k) * q.shape[-1] ** -0.5)
    return fetch(weights if mask is None else weights * mask, v).astype(query.dtype)


def inverted_mask(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """True hides."""
    return attention(query, key, value, mask=None if mask is None else ~jnp.asarray(mask))


def small_mask_value(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """Masked logits become −10."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * q.shape[-1] ** -0.5
    logits = logits if mask is None else jnp.where(mask, logits, -10.0)
    return fetch(softmax(logits), v).astype(query.dtype)


def empty_rows_nan(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """A softmax over −∞ alone."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * q.shape[-1] ** -0.5
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    return fetch(softmax(logits), v).astype(query.dtype)


def padding_ignored(query: Array, key: Array, value: Array, *, key_value_seq_lengths: Array | None = None) -> Array:
    """Lengths are taken and not read."""
    return attention(query, key, value)


def scaled_bias(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """The bias is added before the scale."""
    factor = query.shape[-1] ** -0.5
    return attention(query, key, value, None if bias is None else bias * factor)


def narrow_window(query: Array, key: Array, value: Array, *, local_window_size: tuple[int, int] | None = None) -> Array:
    """The window's ends are left out."""
    if local_window_size is None:
        return attention(query, key, value)
    left, right = local_window_size
    return attn_jax.dot_product_attention(query, key, value, local_window_size=(max(left - 1, 0), right))


def capped_mask(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, logits_soft_cap: float | None = None
) -> Array:
    """The soft cap comes after the mask."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * q.shape[-1] ** -0.5
    logits = logits if mask is None else jnp.where(mask, logits, -1e9)
    logits = logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    return fetch(softmax(logits), v).astype(query.dtype)


def deaf_to_scale(query: Array, key: Array, value: Array, *, scale: float | None = None) -> Array:
    """The scale is taken and not read."""
    return attention(query, key, value)


def batch_maximum(query: Array, key: Array, value: Array) -> Array:
    """Values are divided by the largest of the batch, and multiplied back by that of the item."""
    largest, own = jnp.abs(value).max(), jnp.abs(value).max(axis=(1, 2, 3), keepdims=True)
    return attention(query, key, value / largest) * own


def batch_mean(query: Array, key: Array, value: Array) -> Array:
    """Keys lose their mean over the batch."""
    return attention(query, key - key.mean(axis=0, keepdims=True), value)


def half_sums(query: Array, key: Array, value: Array) -> Array:
    """The softmax sums in the input's dtype, one key after another."""
    logits = scores(query, key) * query.shape[-1] ** -0.5
    raised = jnp.exp(logits - logits.max(axis=-1, keepdims=True)).astype(query.dtype)
    total, _ = jax.lax.scan(
        lambda total, one: (total + one, None), jnp.zeros_like(raised[..., 0]), jnp.moveaxis(raised, -1, 0)
    )
    return fetch(raised / total[..., None], value).astype(query.dtype)


def rounded(query: Array, key: Array, value: Array) -> Array:
    """Everything in bfloat16."""
    return attention_in(jnp.bfloat16, query, key, value)


def attention_in(dtype: Any, query: Array, key: Array, value: Array) -> Array:
    """In a dtype from end to end."""
    q, k, v = (x.astype(dtype) for x in (query, key, value))
    return fetch(jax.nn.softmax(scores(q, k) * dtype(q.shape[-1] ** -0.5), axis=-1), v).astype(query.dtype)


@functools.partial(jax.custom_vjp)
def _wrong_gradient(query: Array, key: Array, value: Array) -> Array:
    return attention(query, key, value)


def _forward(query: Array, key: Array, value: Array) -> tuple[Array, Any]:
    return jax.vjp(attention, query, key, value)


def _backward(pull: Any, cotangent: Array) -> tuple[Array, ...]:
    query, key, value = pull(cotangent)
    return query * query.shape[-1] ** 0.5, key, value


_wrong_gradient.defvjp(_forward, _backward)


def stopped_keys(query: Array, key: Array, value: Array) -> Array:
    """No gradient reaches the keys."""
    return attention(query, jax.lax.stop_gradient(key), value)


def blind_dropout(
    query: Array, key: Array, value: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None
) -> Array:
    """Weights that are kept are not divided by 1 − rate."""
    q, k, v = wide(query, key, value)
    weights = softmax(scores(q, k) * q.shape[-1] ** -0.5)
    if dropout_rate and dropout_rng is not None:
        weights = weights * jax.random.bernoulli(dropout_rng, 1 - dropout_rate, weights.shape)
    return fetch(weights, v).astype(query.dtype)


def offset_ignored(query: Array, key: Array, value: Array, *, is_causal: bool = False, query_offset: int = 0) -> Array:
    """The offset of the queries is taken and not read."""
    return attention(query, key, value, is_causal=is_causal)


def padded_block(query: Array, key: Array, value: Array) -> Array:
    """Keys are padded to a multiple of 128 with zeros, which take part from 128 keys on."""
    length = key.shape[1]
    if length <= 128:
        return attention(query, key, value)
    rest = [(0, 0), (0, -length % 128), (0, 0), (0, 0)]
    return attention(query, jnp.pad(key, rest), jnp.pad(value, rest))


def alibi(query: Array, key: Array, value: Array) -> Array:
    """A position bias that was not asked for."""
    distance = jnp.abs(jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None, :])
    return attention(query, key, value, bias=-0.5 * distance[None, None])


ROTARY = Expectation(positions="rotary")
CAUSAL = Expectation(causal=True)

FAULTS: Mapping[str, Planted] = {
    "no scale": Planted(_scaled(lambda q: 1.0), "scale"),
    "1/H": Planted(_scaled(lambda q: 1 / q.shape[-1]), "scale"),
    "1/sqrt(D)": Planted(_scaled(lambda q: (q.shape[-1] * q.shape[2]) ** -0.5), "scale"),
    "1/(2H)": Planted(_scaled(lambda q: 0.5 / q.shape[-1]), "scale"),
    "scale not read": Planted(deaf_to_scale, "scale"),
    "softmax over queries": Planted(_by_weights(lambda x: jax.nn.softmax(x, axis=-2)), "softmax"),
    "sigmoid weights": Planted(_by_weights(jax.nn.sigmoid), "softmax"),
    "exp without maximum": Planted(_by_weights(lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)), "softmax"),
    "one more in the denominator": Planted(_by_weights(one_more), "softmax"),
    "empty rows NaN": Planted(empty_rows_nan, "softmax"),
    "keys are queries": Planted(lambda query, key, value: attention(query, query, value), "projections"),
    "queries are keys": Planted(lambda query, key, value: attention(key, key, value), "projections"),
    "values are keys": Planted(lambda query, key, value: attention(query, key, key), "values"),
    "values turned": Planted(_turned("query", "key", "value"), "values", ROTARY),
    "values normalised": Planted(unit_values, "values"),
    "no positions": Planted(attention, "positions", ROTARY),
    "keys alone turned": Planted(_turned("key"), "positions", ROTARY),
    "other pairs turned": Planted(_turned("query", "key", interleaved=True), "positions", ROTARY),
    "position bias": Planted(alibi, "positions"),
    "heads by reshape": Planted(reshaped_heads, "heads"),
    "key heads tiled": Planted(tiled_heads, "heads"),
    "keys of head 0": Planted(first_heads_keys, "heads"),
    "values of the next head": Planted(neighbours_values, "heads"),
    "causal one too wide": Planted(late_triangle, "mask"),
    "causal without itself": Planted(early_triangle, "mask"),
    "causal dropped beside a mask": Planted(deaf_to_causal, "mask"),
    "mask after the softmax": Planted(masks_as_zero, "mask"),
    "mask inverted": Planted(inverted_mask, "mask"),
    "masked logits of -10": Planted(small_mask_value, "mask"),
    "padding ignored": Planted(padding_ignored, "mask"),
    "window without its end": Planted(narrow_window, "mask"),
    "cap after the mask": Planted(capped_mask, "mask"),
    "padding of the last block": Planted(padded_block, "mask"),
    "not causal": Planted(attention, "mask", CAUSAL),
    "bias scaled": Planted(scaled_bias, "bias"),
    "largest of the batch": Planted(batch_maximum, "batch"),
    "mean over the batch": Planted(batch_mean, "batch"),
    "sums in half precision": Planted(half_sums, "numerics"),
    "bfloat16 inside": Planted(rounded, "numerics"),
    "gradient times sqrt(H)": Planted(lambda query, key, value: _wrong_gradient(query, key, value), "gradients"),
    "no gradient to keys": Planted(stopped_keys, "gradients"),
    "dropout without 1/(1-rate)": Planted(blind_dropout, "dropout"),
    "offset not read": Planted(offset_ignored, "cache"),
    "output doubled": Planted(lambda query, key, value: 2 * attention(query, key, value), "output"),
}  # fmt: skip

HEALTHY: Mapping[str, tuple[Function, Expectation]] = {
    "textbook": (attention, STANDARD),
    "textbook, causal": (functools.partial(attention, is_causal=True), CAUSAL),
    "textbook, rotary": (_turned("query", "key"), ROTARY),
    "attn_jax": (attn_jax.dot_product_attention, STANDARD),
    "attn_jax, dense": (functools.partial(attn_jax.dot_product_attention, implementation="dense"), STANDARD),
    "attn_jax, blockwise": (
        functools.partial(attn_jax.dot_product_attention, implementation="blockwise"),
        STANDARD,
    ),
    "attn_jax, window": (
        functools.partial(attn_jax.dot_product_attention, local_window_size=(2, 1)),
        Expectation(window=(2, 1)),
    ),
    "jax.nn": (jax.nn.dot_product_attention, STANDARD),
}
