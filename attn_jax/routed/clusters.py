"""What routing is made of: tokens and their affinities to clusters, and the ways in which they then meet.

among_last      each token chooses its nearest cluster, and a query sees the last keys there (causal)
among_nearest   each cluster takes the tokens nearest to it, which all meet (balanced)
among_all       nobody chooses: all meet, weighted by the probability of a common cluster (soft)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_jax import biases, scaling
from attn_jax.exact import dot_product_attention
from attn_jax.routed.cache import GroupCache
from attn_jax.routed.groups import Members, attend_in_groups, check_codes, keep_counted, members
from attn_jax.typing import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """Tokens by head, at least float32, and their affinities to the clusters of the head.

    query `[*B, K, G, T, H]`, key `[*B, K, T, H]`, value `[*B, K, T, V]`, affinities `[..., T, clusters]`, counted
    `[*B, T]` or None.
    """

    query: Array
    key: Array
    value: Array
    query_affinities: Array
    key_affinities: Array
    counted: Bool[Array, "*b t"] | None


class Gates(NamedTuple):
    """`1 + p - p` of each choice: the number 1, with the gradient of its probability. `[..., T, clusters]`."""

    query: Array
    key: Array


def route(query: Array, key: Array, value: Array, centroids: Array, counted: Array | None) -> Tokens:
    """Tokens by head, with their affinities: cosines to the centroids `[K, clusters, H]`."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    query, key, value = (keep_counted(x, counted).astype(wide) for x in (query, key, value))
    check_codes("clusters", centroids.shape[1], query.shape[-3])
    query = query.reshape(*query.shape[:-2], key.shape[-2], -1, query.shape[-1])
    query = jnp.moveaxis(query, -4, -2)
    key, value = (jnp.swapaxes(x, -2, -3) for x in (key, value))
    unit_query, unit_key, unit = (scaling.l2_norm(x, epsilon=0.0) for x in (query, key, centroids.astype(wide)))
    return Tokens(
        query,
        key,
        value,
        jnp.einsum("...kgth,kch->...kgtc", unit_query, unit, precision="highest"),
        jnp.einsum("...kth,kch->...ktc", unit_key, unit, precision="highest"),
        counted,
    )


def nearest(tokens: Tokens, cache: GroupCache | None = None) -> tuple[Members, Members]:
    """Where queries, `[*B, K, G · T]`, and keys, `[*B, K, T]`, belong if each goes to its nearest centroid."""
    clusters = tokens.key_affinities.shape[-1]
    ids = tokens.query_affinities.argmax(axis=-1).astype(jnp.int32)
    key_ids = tokens.key_affinities.argmax(axis=-1).astype(jnp.int32)
    counted = tokens.counted
    if counted is not None:
        key_ids = jnp.where(align(counted, key_ids.ndim), key_ids, clusters)
    query_there, key_there = (None if counted is None else align(counted, x.ndim) for x in (ids, key_ids))

    def before(x: Array) -> Array | None:
        if cache is None:
            return None
        flat = x.reshape(*key_ids.shape[:-1], 1, -1)
        return cache.before(flat).reshape(x.shape)

    of_queries = members(ids, jnp.broadcast_to(key_ids[..., None, :], ids.shape), query_there, before(ids))
    of_keys = members(key_ids, key_ids, key_there, before(key_ids))
    return jax.tree.map(lambda x: x.reshape(*key_ids.shape[:-1], -1), of_queries), of_keys


def among_last(tokens: Tokens, window: int | None, gates: Gates | None, options: Any) -> Float[Array, "*b t n v"]:
    """Each query over the last keys of its cluster."""
    of_queries, of_keys = nearest(tokens)
    key_bias = None
    if gates is not None:
        key_ids = tokens.key_affinities.argmax(axis=-1)
        key_bias = jnp.log(jnp.take_along_axis(gates.key, key_ids[..., None], axis=-1)[..., 0])
    output, _ = attend_in_groups(
        in_a_row(tokens.query), tokens.key, tokens.value, of_queries, of_keys,
        window=window, is_causal=True, group_size=-(-tokens.key.shape[-2] // tokens.key_affinities.shape[-1]),
        key_bias=key_bias, **options,
    )  # fmt: skip
    output = output.reshape(*tokens.query.shape[:-1], -1)
    if gates is not None:
        ids = tokens.query_affinities.argmax(axis=-1)
        output = output * jnp.take_along_axis(gates.query, ids[..., None], axis=-1)
    return to_tokens(output)


def balanced_window(window: int | None, tokens: Tokens) -> int:
    """How many tokens each cluster takes: all of them in equal shares, if nothing else is asked for."""
    length, clusters = tokens.key_affinities.shape[-2:]
    if window is not None:
        return min(window, length)
    if length % clusters:
        raise ValueError(
            f"window must be given where clusters do not divide T, got {clusters} clusters and T = {length}"
        )
    return length // clusters


def among_nearest(tokens: Tokens, window: int, gates: Gates | None, options: Any) -> Float[Array, "*b t n v"]:
    """Each cluster over the queries and keys that are nearest to it."""
    *batch, num_kv_heads, groups, length, _ = tokens.query.shape
    clusters = tokens.key_affinities.shape[-1]
    queries, keys = (
        _best(x, tokens.counted, window) for x in (tokens.query_affinities, tokens.key_affinities)
    )  # [*B, K, G, clusters, w], [*B, K, clusters, w]
    query = jnp.moveaxis(_pick(tokens.query, queries), -4, -2)  # [*B, K, clusters, w, G, H]
    key, value = (_pick(x, keys)[..., None, :] for x in (tokens.key, tokens.value))
    lengths = None
    if tokens.counted is not None:
        lengths = jnp.minimum(tokens.counted.sum(axis=-1), window).reshape(*batch, 1, 1)
        lengths = jnp.broadcast_to(lengths, query.shape[:-3])
    bias = None
    if gates is not None:
        gate = jnp.take_along_axis(jnp.swapaxes(gates.key, -1, -2), keys, axis=-1)
        bias = biases.Array(jnp.log(gate)[..., None, None, :])
    output, logsumexp = dot_product_attention(
        query, key, value, bias,
        query_seq_lengths=lengths, key_value_seq_lengths=lengths, return_residual=True, **options,
    )  # fmt: skip
    output, logsumexp = jnp.moveaxis(output, -2, -4), jnp.moveaxis(logsumexp, -1, -3)  # [*B, K, G, clusters, w, V]
    if gates is not None:
        output = output * jnp.take_along_axis(jnp.swapaxes(gates.query, -1, -2), queries, axis=-1)[..., None]
    merge = jax.vmap(functools.partial(_merge_at, length=length))
    flat = (queries.reshape(-1, clusters * window), logsumexp.reshape(-1, clusters * window))
    merged = merge(*flat, output.reshape(*flat[0].shape, -1))
    return to_tokens(merged.reshape(*batch, num_kv_heads, groups, length, -1))


def _best(affinities: Float[Array, "*l t c"], counted: Array | None, window: int) -> Int[Array, "*l c w"]:
    """The tokens nearest to each cluster, those that do not count last."""
    affinities = jnp.swapaxes(affinities, -1, -2)
    if counted is not None:
        affinities = jnp.where(align(counted, affinities.ndim), affinities, -jnp.inf)
    return jax.lax.top_k(affinities, window)[1]


def _pick(x: Float[Array, "*l t h"], at: Int[Array, "*l c w"]) -> Float[Array, "*l c w h"]:
    rows = jnp.take_along_axis(x, at.reshape(*at.shape[:-2], -1)[..., None], axis=-2)
    return rows.reshape(*at.shape, x.shape[-1])


def _merge_at(
    at: Int[Array, " m"], logsumexp: Float[Array, " m"], output: Float[Array, "m v"], *, length: int
) -> Array:
    """Partial outputs of tokens `at`, combined by their log-sum-exps: `[T, V]`, 0 where there are none."""
    largest = jnp.full(length, -jnp.inf, logsumexp.dtype).at[at].max(jax.lax.stop_gradient(logsumexp))
    shift = jnp.where(jnp.isneginf(largest), 0, largest)
    weight = jnp.exp(logsumexp - shift[at])
    total = jnp.zeros(length, weight.dtype).at[at].add(weight)
    share = weight / jnp.where(total == 0, 1, total)[at]
    return jnp.zeros((length, output.shape[-1]), output.dtype).at[at].add(share[:, None] * output)


def among_all(tokens: Tokens, temperature: float, is_causal: bool, options: Any) -> Float[Array, "*b t n v"]:
    """Every query over every key, weighted by the probability that both choose one cluster."""
    queries, keys = (jax.nn.softmax(x / temperature) for x in (tokens.query_affinities, tokens.key_affinities))
    common = jnp.einsum("...gtc,...sc->...gts", queries, keys, precision="highest")
    possible = common > 0
    bias = jnp.where(possible, jnp.log(jnp.where(possible, common, 1)), -jnp.inf)
    *batch, num_kv_heads, groups, length, _ = tokens.query.shape
    lengths = None if tokens.counted is None else tokens.counted.sum(axis=-1)
    key, value = (jnp.swapaxes(x, -2, -3) for x in (tokens.key, tokens.value))
    return dot_product_attention(
        to_tokens(tokens.query), key, value, bias.reshape(*batch, num_kv_heads * groups, length, length),
        is_causal=is_causal, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options,
    )  # fmt: skip


def choice_gates(tokens: Tokens, temperature: float) -> Gates:
    """The gates of all choices, straight-through."""
    chances = [jax.nn.softmax(x / temperature) for x in (tokens.query_affinities, tokens.key_affinities)]
    return Gates(*(1 + (p - jax.lax.stop_gradient(p)) for p in chances))


def distance(tokens: Tokens) -> Float[Array, ""]:
    """Mean squared distance, `2 - 2 cos`, of unit queries and keys to their nearest unit centroid."""
    total, count = jnp.zeros((), tokens.key.dtype), 0
    for affinities in (tokens.query_affinities, tokens.key_affinities):
        far = 2 - 2 * affinities.max(axis=-1)
        there = jnp.ones_like(far, bool)
        if tokens.counted is not None:
            there = jnp.broadcast_to(align(tokens.counted, far.ndim), far.shape)
        total, count = total + jnp.where(there, far, 0).sum(), count + there.sum()
    return total / jnp.maximum(count, 1)


def in_a_row(x: Float[Array, "*b k g t h"]) -> Float[Array, "*b k gt h"]:
    """The queries of all heads that read one key head, in a row."""
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def to_tokens(x: Float[Array, "*b k g t v"]) -> Float[Array, "*b t n v"]:
    """The heads of every group beside each other, after the tokens."""
    x = jnp.moveaxis(x, -2, -4)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def align(counted: Bool[Array, "*b t"], rank: int) -> Bool[Array, "..."]:
    """`[*B, T]` with axes of 1 between, up to a rank."""
    *batch, length = counted.shape
    return counted.reshape(*batch, *(1,) * (rank - counted.ndim), length)
