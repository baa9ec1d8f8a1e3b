"""Linformer: keys and values are projected along the length, to as many rows as one can afford.

    output = softmax(scale · Q (E K)ᵀ) (F V),    E, F  [R, S]

A query chooses among R mixtures of keys and fetches the same mixtures of values. The projections are learned, and
belong to positions: token j always enters by column j.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.exact import dot_product_attention
from attn_jax.lowrank import arguments
from attn_jax.typing import Array, ArrayLike, Float


def linformer_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    key_projection: Float[ArrayLike, "..."],
    value_projection: Float[ArrayLike, "..."] | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*b t n v"]:
    """Softmax attention over R projected keys and values, in O(R (T + S)).

        output = softmax(scale · Q (E K)ᵀ) (F V)

    With a permutation for both projections this is exact attention: the identity, say. No other full-rank projection
    gives that, since the softmax is of mixed keys. A projected row holds something of every key, so there is no causal
    form and no mask of keys.

    Keys and values past their length are zeroed before they are projected: they reach nothing, whatever they hold. What
    is left of a row that projects padding alone is a key 0 of value 0, which still takes its share of the softmax.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; query head n reads key/value head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        key_projection: E, `[R, L]`, or one per key/value head `[K, R, L]`; of L columns the first S are used.
        value_projection: F, of either shape; None for E.
        scale: a number, or one per head `[N]`; None for `1/sqrt(H)`.
        is_causal: False; True is refused.
        query_seq_lengths: int `[*B]`; queries past it give 0.
        key_value_seq_lengths: int `[*B]`; keys and values past it are not read.
        precision: of the matrix products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype. Products and sums are at least float32.

    Raises:
        ValueError: a wrong shape or value, fewer columns than keys, or `is_causal=True`.
        TypeError: a wrong type or dtype.

    Reference: Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", equation 7.

    >>> from attn_jax.lowrank import draw_projection
    >>> x = jax.random.normal(jax.random.key(0), (12, 1, 4))
    >>> linformer_attention(x, x, x, draw_projection(jax.random.key(1), rank=3, length=16)).shape
    (12, 1, 4)
    >>> bool(jnp.allclose(linformer_attention(x, x, x, jnp.eye(12)), dot_product_attention(x, x, x), atol=1e-5))
    True
    """
    arrays = arguments.check(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        why_not_causal="a projected row mixes all keys, those ahead of a query too",
    )  # fmt: skip
    length, heads = arrays.key.shape[-3:-1]
    key_projection = _projection("key_projection", key_projection, length, heads)
    projections = [key_projection, key_projection]
    if value_projection is not None:
        projections[1] = _projection("value_projection", value_projection, length, heads)
        if projections[1].shape[-2] != key_projection.shape[-2]:
            raise ValueError(
                f"value_projection must have the R = {key_projection.shape[-2]} rows of key_projection, got shape "
                f"{jnp.shape(value_projection)}"
            )
    is_counted = arguments.counted(arrays.key_lengths, length)
    projected = [
        _project(projection, x if is_counted is None else jnp.where(is_counted, x, 0), precision)
        for projection, x in zip(projections, (arrays.key, arrays.value), strict=True)
    ]
    output = dot_product_attention(
        arrays.query, *projected, scale=scale, query_seq_lengths=arrays.query_lengths, precision=precision
    )
    return output.astype(jnp.asarray(query).dtype)


def draw_projection(
    key: ArrayLike, rank: int, length: int, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "r length"]:
    """A random projection `[R, L]` to start from: independent normal entries of variance 1/L.

    A projected key is then as large as a key. (Theorem 2 of the paper has variance 1/R, the Johnson–Lindenstrauss
    scaling: this one times `sqrt(L / R)`.)

    Args:
        key: of `jax.random`.
        rank: R, rows.
        length: L, the most keys that it can project.
        dtype: floating.

    Returns:
        `[R, L]`.

    Raises:
        ValueError: `rank` or `length` below 1.
        TypeError: `key` that is none, `rank` or `length` that is no integer.

    >>> from attn_jax.lowrank import draw_projection
    >>> projection = draw_projection(jax.random.key(0), rank=32, length=128)
    >>> projection.shape, round(float(projection.var()) * 128, 1)
    ((32, 128), 1.0)
    """
    key = checks.prng_key("key", key)
    rank, length = checks.positive_int("rank", rank), checks.positive_int("length", length)
    drawn = jax.random.normal(key, (rank, length), jnp.promote_types(dtype, jnp.float32))
    return (drawn / math.sqrt(length)).astype(dtype)


def _projection(name: str, projection: ArrayLike, length: int, heads: int) -> Float[Array, "..."]:
    """The columns for `length` keys: `[R, S]` or `[K, R, S]`."""
    projection = checks.floating_array(name, projection)
    checks.rank(name, projection, (2, 3), "[R, L] or [K, R, L]")
    *per_head, rank, columns = projection.shape
    if per_head and per_head != [heads]:
        raise ValueError(f"{name} must have one matrix per key/value head, K = {heads}, got shape {projection.shape}")
    if rank < 1:
        raise ValueError(f"{name} must have at least one row, got shape {projection.shape}")
    if columns < length:
        raise ValueError(f"{name} must have a column for each of S = {length} keys, got shape {projection.shape}")
    return projection[..., :length]


def _project(projection: Array, x: Array, precision: jax.lax.PrecisionLike) -> Float[Array, "*b r k width"]:
    """`[*B, S, K, width]` to `[*B, R, K, width]`."""
    letters = "krs" if projection.ndim == 3 else "rs"
    return jnp.einsum(f"{letters},...skw->...rkw", projection.astype(x.dtype), x, precision=precision)
