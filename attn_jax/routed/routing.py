"""Attention by clustering: queries and keys go to the nearest of a few learned directions and meet there.

The direction of a cluster, its centroid, follows the tokens that come to it, as in k-means. Which cluster a token goes
to is a choice, through which no gradient flows, so `learn` says how the centroids may learn from the task as well:

    "none"               not at all: they move by `update_centroids` alone
    "straight_through"   as if each weight were multiplied by the probabilities of the choices that made it
    "auxiliary"          by a loss that is returned: how far tokens are from their centroid
    "soft"               no choice is made: every pair of tokens meets, weighted by the probability of a common cluster
"""

from typing import Literal, overload

import jax
import jax.numpy as jnp

from attn_jax import checks, scaling
from attn_jax.exact import merge_attention
from attn_jax.routed import clusters
from attn_jax.routed.cache import GroupCache, check_cache
from attn_jax.routed.clusters import align, in_a_row, route, to_tokens
from attn_jax.routed.groups import Members, attend_in_groups, check_scale, counted_tokens, keep_counted
from attn_jax.typing import Array, ArrayLike, Float

LEARN = ("none", "straight_through", "auxiliary", "soft")


def draw_centroids(key: ArrayLike, num_heads: int, num_clusters: int, head_width: int) -> Float[Array, "k c h"]:
    """Centroids to begin with, `[K, clusters, H]`: directions at random, of unit length.

    Args:
        key: a PRNG key.
        num_heads: K, those of the keys.
        num_clusters: of each head.
        head_width: H.

    Raises:
        ValueError, TypeError: on a size that is not a positive integer.

    >>> centroids = draw_centroids(jax.random.key(0), num_heads=2, num_clusters=8, head_width=16)
    >>> centroids.shape, bool(jnp.allclose(jnp.linalg.norm(centroids, axis=-1), 1.0))
    ((2, 8, 16), True)
    """
    sizes = {"num_heads": num_heads, "num_clusters": num_clusters, "head_width": head_width}
    shape = tuple(checks.positive_int(name, size) for name, size in sizes.items())
    return scaling.l2_norm(jax.random.normal(checks.prng_key("key", key), shape), epsilon=0.0)


@overload
def routing_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, centroids: ArrayLike, *,
    learn: Literal["none", "straight_through", "soft"] = "none", window: int | None = None, is_causal: bool = False,
    temperature: float = 0.1, scale: float | ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Array: ...  # fmt: skip


@overload
def routing_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, centroids: ArrayLike, *,
    learn: Literal["auxiliary"], window: int | None = None, is_causal: bool = False,
    temperature: float = 0.1, scale: float | ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def routing_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b t k h"],
    value: Float[ArrayLike, "*b t k v"],
    centroids: Float[ArrayLike, "k c h"],
    *,
    learn: str = "none",
    window: int | None = None,
    is_causal: bool = False,
    temperature: float = 0.1,
    scale: float | ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Array | tuple[Array, Array]:
    """Self-attention among the queries and keys that are nearest to one centroid.

        affinity of x to cluster c: cos(x, μ_c)

    Causal, a query and a key each go to the cluster of the highest affinity, a choice that no other token can change.
    A query sees the last `window` keys of its cluster, up to its own position. Not causal, membership is balanced:
    each cluster takes the `window` queries and the `window` keys that are nearest to it, all of which meet. A token
    may then be in several clusters, whose outputs are combined by their log-sum-exps (a pair counts once for each
    cluster that it shares), or in none. A query that meets no key gives 0.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, T, K, H]`; query head n reads, and routes by, key/value head `n // (N // K)`.
        value: `[*B, T, K, V]`.
        centroids: `[K, clusters, H]`, as by `draw_centroids`; their length does not matter.
        learn: what gradient reaches the centroids (and what affinities give to queries and keys).
            "none": none. "straight_through": that of outputs multiplied by the probability of the query's cluster,
            p = softmax(affinities / temperature), and of unnormalised weights multiplied by that of the key's; the
            output itself is as for "none". "auxiliary": none by the output, but also returns a loss, the mean squared
            distance of unit queries and keys to the unit centroid nearest to them. "soft": every pair meets, its
            unnormalised weight multiplied by Σ_c p_c(query) p_c(key); memory is O(T²), and `window` must be None.
        window: None: all of a cluster if causal, T / clusters if not.
        is_causal: no key behind the query's position.
        temperature: positive, of the probabilities.
        scale: a number; None for `1/sqrt(H)`.
        key_value_seq_lengths: int `[*B]`; tokens past it are not seen, and give 0.
        precision: of the products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `learn="auxiliary"` also the loss, a scalar.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or value; where clusters do not divide T and no window is given.

    Reference: Roy et al. 2021, section 4.1 and equations 7-10; straight-through: Bengio et al. 2013, section 4;
    gates: Fedus et al. 2021, equation 2.

    >>> x, centroids = jnp.ones((1, 3, 1, 4)), draw_centroids(jax.random.key(0), 1, 2, 4)
    >>> routing_attention(x, x, jnp.eye(3).reshape(1, 3, 1, 3), centroids, is_causal=True)[0, 1, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    query, key, value, centroids = _arrays(query, key, value, centroids)
    checks.one_of("learn", learn, LEARN)
    is_causal = checks.boolean("is_causal", is_causal)
    window = None if window is None else checks.positive_int("window", window)
    temperature = checks.finite_number("temperature", temperature, positive=True)
    counted = counted_tokens("key_value_seq_lengths", key_value_seq_lengths, query.shape[:-2])
    check_scale(scale)
    if not query.shape[-3]:  # no tokens
        output = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
        return (output, jnp.zeros((), jnp.promote_types(query.dtype, jnp.float32))) if learn == "auxiliary" else output
    tokens = route(query, key, value, centroids, counted)
    options = {"scale": scale, "precision": precision}
    if learn == "soft":
        if window is not None:
            raise ValueError(f"window must be None for learn='soft', where all pairs meet, got {window}")
        output = clusters.among_all(tokens, temperature, is_causal, options)
    else:
        gates = clusters.choice_gates(tokens, temperature) if learn == "straight_through" else None
        if is_causal:
            output = clusters.among_last(tokens, window, gates, options)
        else:
            output = clusters.among_nearest(tokens, clusters.balanced_window(window, tokens), gates, options)
    output = keep_counted(output, counted).astype(query.dtype)
    return (output, clusters.distance(tokens)) if learn == "auxiliary" else output


def extend_routing(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b t k h"],
    value: Float[ArrayLike, "*b t k v"],
    centroids: Float[ArrayLike, "k c h"],
    cache: GroupCache,
    *,
    scale: float | ArrayLike | None = None,
    counts: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "*b t n v"], GroupCache]:
    """Continues causal `routing_attention` by T tokens: any cutting of a sequence gives what one call gives.

    Args:
        query, key, value, centroids, scale, precision: as for `routing_attention`.
        cache: what came before, from `empty_group_cache(batch, K, clusters, window, H)`.
        counts: int `[*B]`: how many of the T tokens of each item count, the first ones; the others give 0.

    Returns:
        Output `[*B, T, N, V]`, and the cache after these tokens.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or value, or a cache of another shape.

    >>> from attn_jax.routed import empty_group_cache
    >>> x, centroids = jnp.ones((1, 1, 1, 4)), draw_centroids(jax.random.key(0), 1, 2, 4)
    >>> cache = empty_group_cache(1, num_heads=1, num_groups=2, window=2, head_width=4)
    >>> extend = jax.jit(extend_routing)
    >>> for value in jnp.eye(4)[:3]:  # three equal tokens, all of one cluster, in a window of two
    ...     output, cache = extend(x, x, value.reshape(1, 1, 1, 4), centroids, cache)
    >>> output[0, 0, 0].round(4).tolist()
    [0.0, 0.5, 0.5, 0.0]
    """
    query, key, value, centroids = _arrays(query, key, value, centroids)
    *batch, _, num_kv_heads, width = key.shape
    lead = (*batch, num_kv_heads, 1, centroids.shape[1])
    check_cache(cache, lead, width, value.shape[-1], "[*B, K, 1, clusters]")
    counted = counted_tokens("counts", counts, query.shape[:-2])
    check_scale(scale)
    if not query.shape[-3]:  # no tokens
        return jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype), cache
    tokens = route(query, key, value, centroids, counted)
    of_queries, of_keys = clusters.nearest(tokens, cache)
    rows, belong = in_a_row(tokens.query), jax.tree.map(lambda x: x[..., 0, :], cache.members)
    key, value = (x[..., 0, :, :].astype(rows.dtype) for x in cache.stored[:2])

    def attend(key: Array, value: Array, of_keys: Members) -> tuple[Array, Array]:
        size = -(-key.shape[-2] // centroids.shape[1])
        return attend_in_groups(
            rows, key, value, of_queries, of_keys,
            window=cache.window, is_causal=True, scale=scale, group_size=size, precision=precision,
        )  # fmt: skip

    old, new = attend(key, value, belong), attend(tokens.key, tokens.value, of_keys)
    output, _ = merge_attention(*zip(old, new, strict=True))
    output = keep_counted(to_tokens(output.reshape(*tokens.query.shape[:-1], -1)), counted).astype(query.dtype)
    key, value = (x[..., None, :, :] for x in (tokens.key, tokens.value))
    return output, cache.append(key, value, jax.tree.map(lambda x: x[..., None, :], of_keys), counted)


def update_centroids(
    centroids: Float[ArrayLike, "k c h"],
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b t k h"],
    *,
    decay: float = 0.99,
    key_value_seq_lengths: ArrayLike | None = None,
) -> Float[Array, "k c h"]:
    """Centroids moved towards the tokens that are nearest to them, as in k-means by moving average.

        μ_c ← decay · μ̂_c + (1 - decay) · mean of the unit queries and keys of cluster c

    A cluster without tokens stays, at unit length. What a batch does to centroids is seen by the batches after it, so a
    causal model reads no future of its own sequence.

    Args:
        centroids: `[K, clusters, H]`.
        query, key: `[*B, T, N, H]` and `[*B, T, K, H]`; no gradient flows through them.
        decay: in [0, 1).
        key_value_seq_lengths: int `[*B]`; tokens past it do not count.

    Returns:
        `[K, clusters, H]` in the dtype of the centroids.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or value.

    Reference: Roy et al. 2021, equation 11.

    >>> import functools
    >>> centroids = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])  # of one head
    >>> x = jnp.array([[[3.0, 4.0]]])  # one token, nearer to the second
    >>> moved = jax.jit(functools.partial(update_centroids, decay=0.5))(centroids, x, x)
    >>> bool(jnp.allclose(moved, jnp.array([[[1.0, 0.0], [0.3, 0.9]]])))  # (0, 1) halfway to (0.6, 0.8)
    True
    """
    query, key, _, centroids = _arrays(query, key, key, centroids)
    decay = checks.rate("decay", decay)
    counted = counted_tokens("key_value_seq_lengths", key_value_seq_lengths, query.shape[:-2])
    tokens = jax.lax.stop_gradient(route(query, key, key, centroids, counted))
    num_clusters, width = centroids.shape[1:]
    sums, counts = 0.0, 0.0
    for x, affinities, extra in ((tokens.query, tokens.query_affinities, 1), (tokens.key, tokens.key_affinities, 0)):
        member = jax.nn.one_hot(affinities.argmax(axis=-1), num_clusters, dtype=x.dtype)
        if counted is not None:
            member = member * align(counted, member.ndim - 1)[..., None]
        unit = scaling.l2_norm(x, epsilon=0.0)
        kv_heads = x.shape[x.ndim - 3 - extra]
        unit = jnp.moveaxis(unit, -3 - extra, 0).reshape(kv_heads, -1, width)
        member = jnp.moveaxis(member, -3 - extra, 0).reshape(kv_heads, -1, num_clusters)
        sums += jnp.einsum("kmc,kmh->kch", member, unit, precision="highest")
        counts += member.sum(axis=1)
    mean = sums / jnp.maximum(counts, 1)[..., None]
    unit = scaling.l2_norm(jax.lax.stop_gradient(centroids).astype(mean.dtype), epsilon=0.0)
    moved = jnp.where((counts > 0)[..., None], decay * unit + (1 - decay) * mean, unit)
    return moved.astype(centroids.dtype)


def _arrays(query: ArrayLike, key: ArrayLike, value: ArrayLike, centroids: ArrayLike) -> tuple[Array, ...]:
    arrays = {"query": query, "key": key, "value": value}
    query, key, value = (checks.floating_array(name, x) for name, x in arrays.items())
    for name, x, axes in (("query", query, "[*B, T, N, H]"), ("key", key, "[*B, T, K, H]")):
        checks.minimum_rank(name, x, 3, axes)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, got {x.dtype}")
    checks.shape("key", key, (*query.shape[:-2], key.shape[-2], query.shape[-1]), "[*B, T, K, H] of the query")
    checks.grouped_heads(query.shape[-2], key.shape[-2])
    checks.shape("value", value, (*key.shape[:-1], *value.shape[-1:]), "[*B, T, K, V] of the key")
    centroids = checks.floating_array("centroids", centroids)
    checks.rank("centroids", centroids, 3, "[K, clusters, H]")
    checks.shape("centroids", centroids, (key.shape[-2], max(centroids.shape[1], 1), key.shape[-1]), "[K, clusters, H]")
    return query, key, value, centroids
