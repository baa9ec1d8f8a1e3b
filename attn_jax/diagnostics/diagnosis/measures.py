"""What is measured in every layer of a model that is diagnosed: an `observe` function, and its measures by name.

Of heads `[N]`, means over the sequences of a batch (the largest of `max_logit`, the sum of `non_finite`):

    the fields of `HeadSummary`     from all rows
    output_norm, nearest_head, nearest_distance, nearest_similarity
                                    as in `diagnosis.rows`, from 16 rows, evenly spread
    query_norm, key_norm, value_norm
                                    root mean square of |q|, |k| and |v|; of the key/value head that a head reads
    scale_ratio                     the scale on q·k that was asked for, times √H: 1 is the usual one
    first_value_ratio               |v| of the first token over the median of the others
    function_misfit                 how far what the attention function returns is from attention with these options,
                                    as a part of it; 0 where it is our own
Of the layer, one number:

    token_cosine                    mean cosine between the values of two tokens, all heads side by side, without the
                                    first token: near 1 where tokens have become alike
    future_keys, past_share         how many keys after itself a query sees, and which part of those before it
    own_share                       share of queries that see their own key
    visible_keys                    how many keys a query sees, the median
    key_slots, head_width           S and H

Memory grows with T for each head: no square of T × S is made, but for the rows that are compared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics.diagnosis.rows import OF_HEADS, compare_heads
from attn_jax.diagnostics.heads import HeadSummary, summarize_heads
from attn_jax.diagnostics.numerics import divide
from attn_jax.exact import dense
from attn_jax.exact.arguments import prepare
from attn_jax.exact.attention import dot_product_attention
from attn_jax.typing import Array, ArrayLike, Bool, Float

COMPARED = 16  # rows in which heads are compared with each other
OF_LAYERS = ("token_cosine", "future_keys", "past_share", "own_share", "visible_keys", "key_slots", "head_width")
OF_HEAD_SUMMARY = tuple(field.name for field in dataclasses.fields(HeadSummary))
MEASURES = (
    *OF_HEAD_SUMMARY, *OF_HEADS, "query_norm", "key_norm", "value_norm", "first_value_ratio", "scale_ratio",
    "function_misfit", *OF_LAYERS,
)  # fmt: skip


def measure_layer(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Any = None,
    mask: Any = None,
    *,
    attention_fn: Callable[..., Any] = dot_product_attention,
    **options: Any,
) -> dict[str, Array]:
    """The measures of one layer, from what its attention gets; an `observe` function of `attn_jax.nn.Transformer`.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, V]`.
        bias, mask, options: as for `attn_jax.dot_product_attention`.
        attention_fn: what the layer calls with all this; its output is held against ours where it is another.

    Returns:
        By name, `[N]` each of heads, and `[]` of the layer; `measures.__doc__` explains them.

    Raises:
        ValueError, TypeError: as `attn_jax.dot_product_attention`.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import measure_layer
    >>> x, value = jnp.zeros((4, 1, 2)), jnp.ones((4, 1, 2))
    >>> measures = jax.jit(lambda x, value: measure_layer(x, x, value, is_causal=True))(x, value)
    >>> float(measures["future_keys"]), float(measures["own_share"])  # no key after itself, but its own
    (0.0, 1.0)
    >>> round(float(measures["token_cosine"]), 3)  # the tokens' values are all alike
    1.0
    """
    options = {name: option for name, option in options.items() if name != "implementation"}
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    heads = query.shape[-2]
    summary = summarize_heads(query, key, value, bias, mask, **options)
    measured = {name: _over_sequences(name, getattr(summary, name)) for name in OF_HEAD_SUMMARY}
    length = query.shape[-3]
    rows = jnp.asarray(np.unique(np.linspace(0, length - 1, min(length, COMPARED)).astype(int)))
    measured |= compare_heads(query, key, value, bias, mask, rows=rows, **options)
    measured |= _norms(query, key, value, heads)
    measured["function_misfit"] = jnp.zeros(heads)
    if attention_fn is not dot_product_attention:
        given = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None} | options
        expected = dot_product_attention(query, key, value, bias, mask, **options)
        measured["function_misfit"] = misfit(attention_fn(query, key, value, **given), expected)
    measured["token_cosine"] = token_cosine(value)
    return {**measured, **_seen(query, key, value, bias, mask, rows, options)}


def misfit(output: Float[Array, "*b t n v"], expected: Float[Array, "*b t n v"]) -> Float[Array, " n"]:
    """‖output − expected‖ / ‖expected‖ of each head, over what is finite in the expected one."""
    wide = jnp.promote_types(expected.dtype, jnp.float32)
    output, expected = output.astype(wide), expected.astype(wide)
    axes = (*range(output.ndim - 2), output.ndim - 1)
    known = jnp.isfinite(expected)
    rest = jnp.where(known, output - expected, 0)
    return jnp.sqrt(divide((rest**2).sum(axis=axes), jnp.where(known, expected**2, 0).sum(axis=axes)))


def token_cosine(value: Float[Array, "*b s k v"]) -> Float[Array, ""]:
    """Mean cosine between two tokens' values, all heads side by side, without the first token; NaN of less than two.

    From one sum: `|Σ u|² − n` is the sum over pairs of unit vectors.
    """
    x = value.astype(jnp.promote_types(value.dtype, jnp.float32)).reshape(*value.shape[:-2], -1)
    x = x.reshape(-1, *x.shape[-2:])[:, 1:]
    size = jnp.sqrt((x**2).sum(axis=-1, keepdims=True))
    counted = jnp.isfinite(size) & (size > 0)
    x = jnp.where(counted, x / jnp.where(counted, size, 1), 0)
    count = counted.sum(axis=(1, 2))
    pairs = count * (count - 1)
    known = pairs > 0
    cosines = ((x.sum(axis=1) ** 2).sum(axis=-1) - count) / jnp.where(known, pairs, 1)
    return _mean_where(cosines, known, axis=0)


def _over_sequences(name: str, x: Array) -> Float[Array, " n"]:
    """`[N]` of `[*B, N]`."""
    x = x.reshape(-1, x.shape[-1])
    if name == "non_finite":
        return x.sum(axis=0).astype(jnp.float32)
    known = jnp.isfinite(x)
    if name == "max_logit":
        largest = jnp.where(known, x, -jnp.inf).max(axis=0)
        return jnp.where(known.any(axis=0), largest, jnp.nan)
    return _mean_where(x, known, axis=0)


def _norms(query: Array, key: Array, value: Array, heads: int) -> dict[str, Float[Array, " n"]]:
    measured = {}
    for name, x in (("query_norm", query), ("key_norm", key), ("value_norm", value)):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = (x**2).sum(axis=-1).reshape(-1, *x.shape[-3:-1])  # [B, T, heads]
        norm = jnp.sqrt(_mean_where(squares, jnp.isfinite(squares), axis=(0, 1)))
        measured[name] = jnp.repeat(norm, heads // norm.shape[0])
        if name == "value_norm":
            others = jnp.nanmedian(jnp.sqrt(squares[:, 1:]), axis=1) if squares.shape[1] > 1 else squares[:, 0] * 0
            ratio = divide(jnp.sqrt(squares[:, 0]), others).mean(axis=0)
            measured["first_value_ratio"] = jnp.repeat(ratio, heads // ratio.shape[0])
    return measured


def _seen(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, rows: Array, options: dict[str, Any]
) -> dict[str, Float[Array, ""]]:
    """Whom queries see, of some rows and all heads: those that see nothing do not count."""
    problem = prepare(query, key, value, bias, mask, rows=rows, **options)
    logits = dense.compute_logits(problem)
    seen: Bool[Array, "*b n r s"] = jnp.broadcast_to(
        True if logits.visible is None else logits.visible, logits.values.shape
    )
    queries, keys = problem.tile.query_positions, problem.tile.key_positions
    some = seen.any(axis=-1)

    def mean(x: Array) -> Array:
        return _mean_where(x.astype(jnp.float32), some, axis=None)

    before = jnp.broadcast_to(keys < queries, seen.shape)
    past = (seen & before).sum(axis=-1) / jnp.maximum(before.sum(axis=-1), 1)
    earlier = before.any(axis=-1) & some
    number = jnp.where(some, seen.sum(axis=-1), jnp.nan)
    ratio = jnp.asarray(problem.scale, jnp.float32) * query.shape[-1] ** 0.5
    return {
        "scale_ratio": jnp.broadcast_to(ratio, (query.shape[-2],)),
        "future_keys": mean((seen & (keys > queries)).sum(axis=-1)),
        "past_share": _mean_where(past, earlier, axis=None),
        "own_share": mean((seen & (keys == queries)).any(axis=-1)),
        "visible_keys": jnp.nanmedian(number.astype(jnp.float32)),
        "key_slots": jnp.asarray(key.shape[-3], jnp.float32),
        "head_width": jnp.asarray(query.shape[-1], jnp.float32),
    }


def _mean_where(x: Array, counted: Array, axis: int | tuple[int, ...] | None) -> Array:
    """The mean of what counts; NaN where nothing does."""
    total = counted.sum(axis=axis)
    mean = jnp.where(counted, x, 0).sum(axis=axis) / jnp.maximum(total, 1)
    return jnp.where(total > 0, mean, jnp.nan)
