"""What the low-rank forms check alike, and how they meet the exact engine."""

from typing import NamedTuple

import jax.numpy as jnp

from attn_jax import checks
from attn_jax.exact.arguments import AttentionOptions, prepare
from attn_jax.typing import Array, ArrayLike


class Arrays(NamedTuple):
    """Query, key and value in float32 or better, and the lengths, int `[*B]`, or None."""

    query: Array
    key: Array
    value: Array
    query_lengths: Array | None
    key_lengths: Array | None


def check(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    is_causal: bool,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    why_not_causal: str,
) -> Arrays:
    """The arrays, checked as `dot_product_attention` does it; an error where causality is asked for."""
    if checks.boolean("is_causal", is_causal):
        raise ValueError(f"is_causal must be False, got True: {why_not_causal}")
    if value is None:
        raise TypeError("value must be an array, got None")
    lengths: AttentionOptions = {
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    problem = prepare(query, key, value, None, None, **lengths)
    query, key, value = (
        jnp.asarray(x).astype(problem.accumulation_dtype) for x in (problem.query, problem.key, problem.value)
    )
    batch = problem.query.shape[:-3]
    of_queries = _per_item("query_seq_lengths", query_seq_lengths, batch)
    return Arrays(query, key, value, of_queries, _per_item("key_value_seq_lengths", key_value_seq_lengths, batch))


def counted(lengths: Array | None, size: int) -> Array | None:
    """Which of `size` entries count: boolean, to be aligned with `[*B, size, heads, width]`."""
    if lengths is None:
        return None
    steps = jnp.arange(size, dtype=lengths.dtype).reshape((1,) * lengths.ndim + (-1, 1, 1))
    return steps < lengths[..., None, None, None]


def _per_item(name: str, lengths: ArrayLike | None, batch: tuple[int, ...]) -> Array | None:
    if lengths is None:
        return None
    lengths = checks.wide_integers(name, lengths)
    return jnp.broadcast_to(lengths if batch else lengths.reshape(()), batch)
