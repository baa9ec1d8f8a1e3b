"""Attention by locality-sensitive hashing: tokens meet in buckets, where vectors of one direction tend to fall.

Queries and keys are one vector, the keys at unit length, so that who is near is near for both. A round of hashing turns
the vectors at random and takes the coordinate that is largest, with its sign; several rounds find what one misses.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_jax import checks, scaling
from attn_jax.exact import merge_attention
from attn_jax.routed.cache import GroupCache, check_cache
from attn_jax.routed.groups import (
    Members,
    attend_in_groups,
    check_codes,
    check_scale,
    counted_tokens,
    keep_counted,
    members,
)
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


def draw_rotations(
    key: ArrayLike, num_heads: int, head_width: int, num_buckets: int, *, num_rounds: int = 1
) -> Float[Array, "rounds n h c"]:
    """Random directions to hash by: `[rounds, N, H, buckets / 2]`, standard normal.

    Args:
        key: a PRNG key.
        num_heads: N; each head hashes in its own way.
        head_width: H.
        num_buckets: of each round: even, since a direction and its opposite are a bucket each; or 1, which all share.
        num_rounds: independent rounds.

    Raises:
        ValueError: an odd number of buckets beyond 1, or a size below 1.

    Reference: Andoni et al. 2015, section 3 (cross-polytope hashing).

    >>> draw_rotations(jax.random.key(0), num_heads=2, head_width=16, num_buckets=8, num_rounds=4).shape
    (4, 2, 16, 4)
    """
    sizes = {"num_heads": num_heads, "head_width": head_width, "num_buckets": num_buckets, "num_rounds": num_rounds}
    sizes = {name: checks.positive_int(name, size) for name, size in sizes.items()}
    if num_buckets > 1 and num_buckets % 2:
        raise ValueError(f"num_buckets must be 1 or even, got {num_buckets}")
    shape = (sizes["num_rounds"], sizes["num_heads"], sizes["head_width"], sizes["num_buckets"] // 2)
    return jax.random.normal(checks.prng_key("key", key), shape)


def hash_buckets(
    query_key: Float[ArrayLike, "*b t n h"], rotations: Float[ArrayLike, "rounds n h c"]
) -> Int[Array, "*b t n rounds"]:
    """The bucket of each token: `argmax [x R; -x R]`, in `0..buckets - 1`; ties go to the lowest.

    Args:
        query_key: `[*B, T, N, H]`; only its direction matters.
        rotations: `[rounds, N, H, buckets / 2]`, as by `draw_rotations`; no gradient reaches them.

    Returns:
        int32 `[*B, T, N, rounds]`.

    Raises:
        ValueError, TypeError: on a wrong shape or dtype.

    Reference: Kitaev et al. 2020, section 2.

    >>> from attn_jax.routed import draw_rotations, hash_buckets
    >>> rotations = draw_rotations(jax.random.key(0), num_heads=1, head_width=4, num_buckets=8)
    >>> x = jnp.array([[1.0, 2.0, 0.0, -1.0]])
    >>> one, longer, opposite = hash_buckets(jnp.stack([x, 3 * x, -x]), rotations)[:, 0, 0].tolist()
    >>> one == longer, abs(one - opposite)
    (True, 4)
    """
    query_key = checks.floating_array("query_key", query_key)
    checks.minimum_rank("query_key", query_key, 3, "[*B, T, N, H]")
    rotations = _rotations(query_key, rotations)
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    if rotations.shape[-1] == 0:
        return jnp.zeros((*query_key.shape[:-1], rotations.shape[0]), jnp.int32)
    x, rotations = (jax.lax.stop_gradient(x.astype(wide)) for x in (query_key, rotations))
    turned = jnp.einsum("...nh,rnhc->...nrc", x, rotations, precision="highest")
    return jnp.argmax(jnp.concatenate([turned, -turned], axis=-1), axis=-1).astype(jnp.int32)


def lsh_attention(
    query_key: Float[ArrayLike, "*b t n h"],
    value: Float[ArrayLike, "*b t n v"],
    rotations: Float[ArrayLike, "rounds n h c"],
    *,
    window: int | None = None,
    is_causal: bool = False,
    scale: float | ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*b t n v"]:
    """Self-attention among the tokens that hash to one bucket.

        output = softmax(scale · q·q̂, over the keys found) · value,   q̂ = q / |q|

    A query finds the tokens that share its bucket in some round, within the window, and not itself: its own key would
    always match best. It fetches its own value only where it finds nothing else. A token found in several rounds
    counts once, so the output is exact attention over all that was found, and the more rounds, the nearer it comes to
    attention over all others. Rounds are combined by their log-sum-exps.

    Args:
        query_key: `[*B, T, N, H]`, queries and keys in one.
        value: `[*B, T, N, V]`.
        rotations: `[rounds, N, H, buckets / 2]`, as by `draw_rotations`; no gradient reaches them.
        window: a query sees members of its bucket whose rank there, by position, differs by less; None: all.
        is_causal: no key behind the query's position.
        scale: a number; None for `1/sqrt(H)`.
        key_value_seq_lengths: int `[*B]`; tokens past it are not seen, and give 0.
        precision: of the products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the dtype of `query_key`.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or value.

    Reference: Kitaev et al. 2020, sections 2 and 3, equations 2-6; there keys are found in chunks of the sorted
    sequence, which may hold several buckets, here by rank in the bucket.

    >>> x, rotations = jnp.ones((1, 3, 1, 4)), draw_rotations(jax.random.key(0), 1, 4, num_buckets=8)
    >>> lsh_attention(x, jnp.eye(3).reshape(1, 3, 1, 3), rotations, is_causal=True)[0, :, 0].tolist()
    [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    query_key, value, rotations = _arrays(query_key, value, rotations)
    window = None if window is None else checks.positive_int("window", window)
    is_causal = checks.boolean("is_causal", is_causal)
    counted = counted_tokens("key_value_seq_lengths", key_value_seq_lengths, query_key.shape[:-2])
    tokens = _hash(query_key, value, rotations, counted)
    parts = _attend(tokens, tokens.keys, window=window, is_causal=is_causal, scale=scale, precision=precision)
    return _combine([parts], tokens, query_key.dtype)


def extend_lsh(
    query_key: Float[ArrayLike, "*b t n h"],
    value: Float[ArrayLike, "*b t n v"],
    rotations: Float[ArrayLike, "rounds n h c"],
    cache: GroupCache,
    *,
    scale: float | ArrayLike | None = None,
    counts: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "*b t n v"], GroupCache]:
    """Continues causal `lsh_attention` by T tokens: any cutting of a sequence gives what one call gives.

    Args:
        query_key, value, rotations, scale, precision: as for `lsh_attention`.
        cache: what came before, from `empty_group_cache(batch, N, buckets, window, H, num_rounds=...)`.
        counts: int `[*B]`: how many of the T tokens of each item count, the first ones; the others give 0.

    Returns:
        Output `[*B, T, N, V]`, and the cache after these tokens.

    Raises:
        ValueError, TypeError: on a wrong shape, dtype or value, or a cache of another shape.

    >>> from attn_jax.routed import empty_group_cache
    >>> x, rotations = jnp.ones((1, 1, 1, 4)), draw_rotations(jax.random.key(0), 1, 4, num_buckets=8)
    >>> cache = empty_group_cache(1, num_heads=1, num_groups=8, window=3, head_width=4, value_width=3)
    >>> extend = jax.jit(extend_lsh)
    >>> for value in jnp.eye(3):  # three equal tokens, all of one bucket
    ...     output, cache = extend(x, value.reshape(1, 1, 1, 3), rotations, cache)
    >>> output[0, 0, 0].round(4).tolist()  # the last fetches from those before it
    [0.5, 0.5, 0.0]
    """
    query_key, value, rotations = _arrays(query_key, value, rotations)
    *batch, _, num_heads, width = query_key.shape
    lead = (*batch, num_heads, rotations.shape[0], num_buckets(rotations))
    check_cache(cache, lead, width, value.shape[-1], "[*B, N, rounds, buckets]")
    counted = counted_tokens("counts", counts, query_key.shape[:-2])
    tokens = _hash(query_key, value, rotations, counted, cache)
    attend = functools.partial(_attend, tokens, window=cache.window, is_causal=True, scale=scale, precision=precision)
    key, stored_value, rounds = cache.stored
    wide = tokens.query.dtype
    stored = _Keys(key.astype(wide), stored_value.astype(wide), cache.members, rounds)
    output = _combine([attend(stored), attend(tokens.keys)], tokens, query_key.dtype)
    keys = tokens.keys
    return output, cache.append(keys.key, keys.value, keys.belong, counted, keys.rounds)


def num_buckets(rotations: Float[Array, "rounds n h c"]) -> int:
    """How many buckets each round has."""
    return max(2 * rotations.shape[-1], 1)


class _Keys(NamedTuple):
    """Keys and values as each round sees them, `[*B, N, rounds, S, ...]`; `rounds`, `[..., rounds]`, if several."""

    key: Array
    value: Array
    belong: Members
    rounds: Members | None


class _Tokens(NamedTuple):
    """Hashed tokens: queries and keys of each round, values `[*B, N, T, V]`, and whether they count, `[*B, T]`."""

    query: Array
    keys: _Keys
    value: Array
    counted: Bool[Array, "*b t"] | None
    buckets: int


def _hash(
    query_key: Array, value: Array, rotations: Array, counted: Array | None, cache: GroupCache | None = None
) -> _Tokens:
    """Tokens in their buckets, at least float32, ranked after those of the cache."""
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    query_key, value = (keep_counted(x, counted).astype(wide) for x in (query_key, value))
    num_rounds, buckets, length = rotations.shape[0], num_buckets(rotations), query_key.shape[-3]
    check_codes("num_buckets", buckets, length)
    ids = jnp.moveaxis(hash_buckets(query_key, rotations), -3, -1)  # [*B, N, rounds, T]
    counts_there = None
    if counted is not None:
        counts_there = counted[..., None, None, :]
        ids = jnp.where(counts_there, ids, buckets)
    belong = members(ids, ids, counts_there, None if cache is None else cache.before(ids))
    rounds = None
    if num_rounds > 1:
        lead = (*ids.shape[:-1], length, num_rounds)
        rounds = jax.tree.map(lambda x: jnp.broadcast_to(jnp.swapaxes(x, -1, -2)[..., None, :, :], lead), belong)
    value = jnp.swapaxes(value, -2, -3)

    def each_round(x: Array) -> Array:
        return jnp.broadcast_to(x[..., None, :, :], (*ids.shape, x.shape[-1]))

    query = jnp.swapaxes(query_key, -2, -3)
    key = scaling.l2_norm(query, epsilon=0.0)
    keys = _Keys(each_round(key), each_round(value), belong, rounds)
    return _Tokens(each_round(query), keys, value, counted, buckets)


def _attend(
    tokens: _Tokens, keys: _Keys, *, window: int | None, scale: float | ArrayLike | None, **options: Any
) -> tuple[Float[Array, "*b n rounds t v"], Float[Array, "*b n rounds t"]]:
    """Each round over the pairs that no earlier one has brought together."""
    check_scale(scale)
    earlier = None
    if tokens.keys.rounds is not None:
        assert keys.rounds is not None
        earlier = (_earlier(tokens.keys.rounds, -1), _earlier(keys.rounds, -2))
    return attend_in_groups(
        tokens.query, keys.key, keys.value, tokens.keys.belong, keys.belong,
        window=window, group_size=-(-keys.key.shape[-2] // tokens.buckets), see_self=False, earlier=earlier,
        scale=scale, **options,
    )  # fmt: skip


def _earlier(rounds: Members, nowhere: int) -> Members:
    """Where tokens belong in earlier rounds, `[*B, N, rounds, S, rounds]`; in the others nowhere."""
    num_rounds = rounds.ids.shape[-1]
    before = jnp.tri(num_rounds, k=-1, dtype=bool)[:, None, :]
    before = before.reshape((1,) * (rounds.ids.ndim - 3) + before.shape)
    return Members(jnp.where(before, rounds.ids, nowhere), rounds.ranks)


def _combine(parts: list[tuple[Array, Array]], tokens: _Tokens, dtype: jnp.dtype) -> Float[Array, "*b t n v"]:
    """All rounds of all parts as one, and the own value where they found nothing."""
    num_rounds = tokens.query.shape[-3]
    outputs = [output[..., r, :, :] for output, _ in parts for r in range(num_rounds)]
    logsumexps = [logsumexp[..., r, :] for _, logsumexp in parts for r in range(num_rounds)]
    output, logsumexp = merge_attention(outputs, logsumexps)
    output = jnp.where(jnp.isneginf(logsumexp)[..., None], tokens.value, output)
    return keep_counted(jnp.swapaxes(output, -2, -3), tokens.counted).astype(dtype)


def _arrays(query_key: ArrayLike, value: ArrayLike, rotations: ArrayLike) -> tuple[Array, Array, Array]:
    query_key, value = checks.floating_array("query_key", query_key), checks.floating_array("value", value)
    checks.minimum_rank("query_key", query_key, 3, "[*B, T, N, H]")
    if value.dtype != query_key.dtype:
        raise TypeError(f"value must have the dtype of query_key, {query_key.dtype}, got {value.dtype}")
    checks.shape("value", value, (*query_key.shape[:-1], *value.shape[-1:]), "[*B, T, N, V] of query_key")
    return query_key, value, _rotations(query_key, rotations)


def _rotations(query_key: Array, rotations: ArrayLike) -> Array:
    rotations = checks.floating_array("rotations", rotations)
    checks.rank("rotations", rotations, 4, "[rounds, N, H, buckets / 2]")
    rounds, *_, half = rotations.shape
    checks.shape("rotations", rotations, (max(rounds, 1), *query_key.shape[-2:], half), "[rounds, N, H, buckets / 2]")
    return rotations
