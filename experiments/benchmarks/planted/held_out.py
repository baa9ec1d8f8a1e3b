"""Faulty attention functions that were written after the audit, and measured once before anything was changed for them.

What an audit makes of faults that nobody looked at while building it is the better half of the benchmark. They are
changes to `functions.attention`, of the same links and of other kinds.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax import positions
from attn_jax.typing import Array
from experiments.benchmarks.planted.functions import (
    ROTARY,
    Planted,
    attention,
    fetch,
    scores,
    softmax,
    triangle,
    wide,
)


def scale_of_length(query: Array, key: Array, value: Array) -> Array:
    """1/√S in place of 1/√H."""
    return attention(query, key, value, scale=key.shape[1] ** -0.5)


def doubled_scale(query: Array, key: Array, value: Array) -> Array:
    """2/√H."""
    return attention(query, key, value, scale=2 * query.shape[-1] ** -0.5)


def uncapped(query: Array, key: Array, value: Array, *, logits_soft_cap: float | None = None) -> Array:
    """c·tanh(x), without the division."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * q.shape[-1] ** -0.5
    logits = logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits)
    return fetch(softmax(logits), v).astype(query.dtype)


def softmax_over_heads(query: Array, key: Array, value: Array) -> Array:
    """Heads compete for a key."""
    q, k, v = wide(query, key, value)
    return fetch(jax.nn.softmax(scores(q, k) * q.shape[-1] ** -0.5, axis=1), v).astype(query.dtype)


def positive_parts(query: Array, key: Array, value: Array) -> Array:
    """Normalised positive parts of the scores."""
    q, k, v = wide(query, key, value)
    kept = jnp.maximum(scores(q, k) * q.shape[-1] ** -0.5, 0) + 1e-6
    return fetch(kept / kept.sum(axis=-1, keepdims=True), v).astype(query.dtype)


def clipped_logits(query: Array, key: Array, value: Array) -> Array:
    """Scores are clipped to ± 1."""
    q, k, v = wide(query, key, value)
    return fetch(softmax(jnp.clip(scores(q, k) * q.shape[-1] ** -0.5, -1, 1)), v).astype(query.dtype)


def float16_weights(query: Array, key: Array, value: Array) -> Array:
    """Weights are rounded to float16."""
    q, k, v = wide(query, key, value)
    weights = softmax(scores(q, k) * q.shape[-1] ** -0.5).astype(jnp.float16)
    return fetch(weights.astype(v.dtype), v).astype(query.dtype)


def next_tokens_values(query: Array, key: Array, value: Array) -> Array:
    """Each key fetches the value of the token before it."""
    return attention(query, key, jnp.roll(value, 1, axis=1))


def positive_values(query: Array, key: Array, value: Array) -> Array:
    """Values lose their negative parts."""
    return attention(query, key, jnp.maximum(value, 0))


def heads_reversed(query: Array, key: Array, value: Array) -> Array:
    """Key/value heads in the opposite order."""
    return attention(query, key[:, :, ::-1], value[:, :, ::-1])


def queries_reversed(query: Array, key: Array, value: Array) -> Array:
    """Query heads in the opposite order."""
    return attention(query[:, :, ::-1], key, value)


def heads_averaged(query: Array, key: Array, value: Array) -> Array:
    """Every head gives the mean of all."""
    output = attention(query, key, value)
    return jnp.broadcast_to(output.mean(axis=2, keepdims=True), output.shape)


def one_heads_mask(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """The mask of head 0 serves all."""
    return attention(query, key, value, mask=None if mask is None else jnp.asarray(mask)[:, :1])


def mask_transposed(query: Array, key: Array, value: Array, mask: Array | None = None) -> Array:
    """Queries and keys exchanged in the mask."""
    return attention(query, key, value, mask=None if mask is None else jnp.swapaxes(jnp.asarray(mask), -1, -2))


def lengths_one_more(query: Array, key: Array, value: Array, *, key_value_seq_lengths: Array | None = None) -> Array:
    """One padded key is seen."""
    if key_value_seq_lengths is None:
        return attention(query, key, value)
    seen = jnp.arange(key.shape[1])[None, :] <= jnp.asarray(key_value_seq_lengths)[:, None]
    return attention(query, key, value, mask=seen[:, None, None, :])


def first_items_length(query: Array, key: Array, value: Array, *, key_value_seq_lengths: Array | None = None) -> Array:
    """The length of item 0 serves all."""
    if key_value_seq_lengths is None:
        return attention(query, key, value)
    seen = jnp.arange(key.shape[1]) < jnp.asarray(key_value_seq_lengths)[0]
    return attention(query, key, value, mask=seen[None, None, None, :])


def window_turned(query: Array, key: Array, value: Array, *, local_window_size: tuple[int, int] | None = None) -> Array:
    """Left and right exchanged."""
    sides = None if local_window_size is None else (local_window_size[1], local_window_size[0])
    return attn_jax.dot_product_attention(query, key, value, local_window_size=sides)


def anticausal(query: Array, key: Array, value: Array, *, is_causal: bool = False) -> Array:
    """What comes later is seen, and what came before is not."""
    mask = jnp.swapaxes(triangle(key.shape[1], query.shape[1]), -1, -2) if is_causal else None
    return attention(query, key, value, mask=mask)


def bias_subtracted(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """The sign of the bias."""
    return attention(query, key, value, None if bias is None else -jnp.asarray(bias))


def bias_of_one_head(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """The bias of head 0 serves all."""
    return attention(query, key, value, None if bias is None else jnp.asarray(bias)[:, :1])


def bias_after_softmax(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """The bias is added to the weights."""
    q, k, v = wide(query, key, value)
    weights = softmax(scores(q, k) * q.shape[-1] ** -0.5)
    return fetch(weights if bias is None else weights + bias, v).astype(query.dtype)


def other_base(query: Array, key: Array, value: Array) -> Array:
    """Rotary positions of base 100 where 10,000 was meant."""
    query, key = (positions.apply_rotary(x, jnp.arange(x.shape[1]), base=100.0) for x in (query, key))
    return attention(query, key, value)


def turned_twice(query: Array, key: Array, value: Array) -> Array:
    """Rotary positions applied twice."""
    query, key = (positions.apply_rotary(x, 2 * jnp.arange(x.shape[1])) for x in (query, key))
    return attention(query, key, value)


def keys_one_late(query: Array, key: Array, value: Array) -> Array:
    """Keys are turned by the position after theirs."""
    query = positions.apply_rotary(query, jnp.arange(query.shape[1]))
    key = positions.apply_rotary(key, 1 + jnp.arange(key.shape[1]))
    return attention(query, key, value)


def batch_norm(query: Array, key: Array, value: Array) -> Array:
    """Values are centred by the mean of the batch."""
    return attention(query, key, value - value.mean(axis=(0, 1), keepdims=True))


def residual(query: Array, key: Array, value: Array) -> Array:
    """The query is added to the output."""
    output = attention(query, key, value)
    return output + query if query.shape == output.shape else output


def output_normalised(query: Array, key: Array, value: Array) -> Array:
    """Outputs are unit vectors."""
    output = attention(query, key, value)
    return output / (jnp.linalg.norm(output, axis=-1, keepdims=True) + 1e-6)


def logits_dropped(
    query: Array, key: Array, value: Array, *, dropout_rate: float = 0.0, dropout_rng: Array | None = None
) -> Array:
    """Dropout zeroes logits."""
    q, k, v = wide(query, key, value)
    logits = scores(q, k) * q.shape[-1] ** -0.5
    if dropout_rate and dropout_rng is not None:
        logits = logits * jax.random.bernoulli(dropout_rng, 1 - dropout_rate, logits.shape) / (1 - dropout_rate)
    return fetch(softmax(logits), v).astype(query.dtype)


def no_gradient_to_values(query: Array, key: Array, value: Array) -> Array:
    """Values are constants of the derivative."""
    return attention(query, key, jax.lax.stop_gradient(value))


def offset_reversed(query: Array, key: Array, value: Array, *, is_causal: bool = False, query_offset: int = 0) -> Array:
    """The offset is counted backwards."""
    mask = triangle(query.shape[1], key.shape[1], -query_offset) if is_causal else None
    return attention(query, key, value, mask=mask)


HELD_OUT: Mapping[str, Planted] = {
    "1/sqrt(S)": Planted(scale_of_length, "scale"),
    "2/sqrt(H)": Planted(doubled_scale, "scale"),
    "cap without division": Planted(uncapped, "scale"),
    "softmax over heads": Planted(softmax_over_heads, "softmax"),
    "positive parts": Planted(positive_parts, "softmax"),
    "clipped logits": Planted(clipped_logits, "softmax"),
    "float16 weights": Planted(float16_weights, "numerics"),
    "values of the token before": Planted(next_tokens_values, "values"),
    "positive values": Planted(positive_values, "values"),
    "key heads reversed": Planted(heads_reversed, "heads"),
    "query heads reversed": Planted(queries_reversed, "heads"),
    "heads averaged": Planted(heads_averaged, "heads"),
    "one head's mask": Planted(one_heads_mask, "mask"),
    "mask transposed": Planted(mask_transposed, "mask"),
    "lengths one more": Planted(lengths_one_more, "mask"),
    "one item's length": Planted(first_items_length, "mask"),
    "window turned": Planted(window_turned, "mask"),
    "anticausal": Planted(anticausal, "mask"),
    "bias subtracted": Planted(bias_subtracted, "bias"),
    "bias of one head": Planted(bias_of_one_head, "bias"),
    "bias after the softmax": Planted(bias_after_softmax, "bias"),
    "another base": Planted(other_base, "positions", ROTARY),
    "turned twice": Planted(turned_twice, "positions", ROTARY),
    "keys one late": Planted(keys_one_late, "positions", ROTARY),
    "centred by the batch": Planted(batch_norm, "batch"),
    "query added": Planted(residual, "output"),
    "output normalised": Planted(output_normalised, "output"),
    "logits dropped": Planted(logits_dropped, "dropout"),
    "no gradient to values": Planted(no_gradient_to_values, "gradients"),
    "offset reversed": Planted(offset_reversed, "cache"),
}

# Seven of the nine that were missed had weights, positions or an output changed in a way that no check asked about.
FIRST_MEASURED = "21 of 30, 70%"
