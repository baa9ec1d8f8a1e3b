"""Attention among the members of a group: what hashing and clustering share.

Every token belongs to a group. Within its group a token has a rank, by position, and a query sees the keys of its group
whose rank differs from its own by less than a window (only earlier ones and itself, if causal). A window of T is the
whole group.

Queries and keys are sorted by group, so that a group lies together, and then meet in exact attention, whose tiles are
skipped where no group crosses them. Which group a token is in never takes the shape of anything: all is static.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import biases, checks, masks
from attn_jax.exact import Blockwise, dot_product_attention
from attn_jax.lazy import Tile
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

# Axes of this package: L are all leading axes (batch, heads, rounds), T queries, S keys, one group each.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Members:
    """Where tokens belong.

    Attributes:
        ids: int32 `[*L, T]`, the group.
        ranks: int32 `[*L, T]`, the place in it; -1 for a token that does not count: it neither sees nor is seen.
    """

    ids: Int[Array, "*l t"]
    ranks: Int[Array, "*l t"]


def members(
    ids: Int[Array, "*l t"],
    key_ids: Int[Array, "*l t"],
    counted: Bool[Array, "*#l t"] | None = None,
    before: Int[Array, "*l t"] | None = None,
) -> Members:
    """The groups of tokens, and their ranks among the keys there: that of the last key at or before their position.

    Args:
        ids, key_ids: of token and key at one position, in `0..2^31 / T`; those of keys that do not count are above
            all others.
        counted: which tokens do.
        before: how many keys their groups have had before.
    """
    length = ids.shape[-1]
    steps = jnp.arange(length, dtype=jnp.int32).reshape((1,) * (ids.ndim - 1) + (-1,))
    codes = jnp.sort(key_ids * length + steps, axis=-1)
    first, upto = (_search(codes, wanted) for wanted in (ids * length, ids * length + steps + 1))
    ranks = upto - first - 1
    if before is not None:
        ranks = ranks + before
    return Members(ids, ranks if counted is None else jnp.where(counted, ranks, -1))


def _search(sorted_codes: Int[Array, "*l s"], wanted: Int[Array, "*l t"]) -> Int[Array, "*l t"]:
    """How many codes are smaller."""
    flat = jax.vmap(jnp.searchsorted)(_one_axis(sorted_codes, 1), _one_axis(wanted, 1))
    return flat.reshape(wanted.shape).astype(jnp.int32)


def check_codes(name: str, num_groups: int, length: int) -> None:
    """Raises where a group and a position do not fit one integer."""
    if (num_groups + 1) * length >= 2**31:
        raise ValueError(f"{name} · T must be below 2^31, got {num_groups} groups and {length} tokens")


def check_scale(scale: float | ArrayLike | None) -> None:
    """Raises unless there is one scale for all heads, which are folded into the batch."""
    if scale is not None and jnp.ndim(scale):
        raise ValueError(f"scale must be one number here, got shape {jnp.shape(scale)}")


class SeenBefore(masks.Mask):
    """Pairs that an earlier round has brought together already: `[*L, T, rounds]` groups and ranks in each round."""

    query_ids: Int[ArrayLike, "l t r"]
    query_ranks: Int[ArrayLike, "l t r"]
    key_ids: Int[ArrayLike, "l s r"]
    key_ranks: Int[ArrayLike, "l s r"]
    window: int | None

    def evaluate(self, tile: Tile) -> Array:
        seen = jnp.zeros((1,) * len(tile.sizes), bool)
        of_queries, of_keys = (
            [jnp.asarray(x) for x in pair]
            for pair in ((self.query_ids, self.query_ranks), (self.key_ids, self.key_ranks))
        )
        for r in range(of_queries[0].shape[-1]):
            queries, query_ranks = (tile.per_query("query_ids", x[..., r]) for x in of_queries)
            keys, key_ranks = (tile.per_key("key_ids", x[..., r]) for x in of_keys)
            together = queries == keys
            if self.window is not None:
                together &= jnp.abs(query_ranks - key_ranks) < self.window
            seen |= together
        return seen


def attend_in_groups(
    query: Float[Array, "*l t h"],
    key: Float[Array, "*l s h"],
    value: Float[Array, "*l s v"],
    of_queries: Members,
    of_keys: Members,
    *,
    window: int | None,
    is_causal: bool,
    scale: float | ArrayLike | None,
    group_size: int,
    see_self: bool = True,
    earlier: tuple[Members, Members] | None = None,
    key_bias: Float[Array, "*l s"] | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Float[Array, "*l t v"], Float[Array, "*l t"]]:
    """Each query's attention over the keys of its group, and its log-sum-exp.

    Args:
        query, key, value: `[*L, T, H]`, `[*L, S, H]`, `[*L, S, V]`.
        of_queries, of_keys: where they belong, `[*L, T]` and `[*L, S]`.
        window: ranks differ by less; None: any rank.
        is_causal: no key of a higher rank.
        group_size: how many keys a group has, about: tiles are as large.
        see_self: whether a query sees the key of its own rank.
        earlier: of queries and of keys, `[*L, T, rounds]` and `[*L, S, rounds]`: pairs to leave out.
        key_bias: `[*L, S]`, added to the logits.

    Returns:
        Output `[*L, T, V]`, 0 where nothing is seen, and log-sum-exp `[*L, T]`, `-inf` there.
    """
    lead = query.shape[:-2]
    query, key, value = (_one_axis(x, 2) for x in (query, key, value))
    of_queries, of_keys = jax.tree.map(lambda x: _one_axis(x, 1), (of_queries, of_keys))
    rows, columns = (jnp.argsort(x.ids, axis=-1) for x in (of_queries, of_keys))  # stable: by position in a group
    of_queries, of_keys = _take(of_queries, rows), _take(of_keys, columns)
    mask: masks.Mask = masks.Segments(of_queries.ids, of_keys.ids)
    if not see_self:
        mask = mask & ~masks.LocalWindow(0, 0)
    if earlier is not None:
        queries, keys = jax.tree.map(lambda x: _one_axis(x, 2), earlier)
        queries, keys = _take(queries, rows), _take(keys, columns)
        mask = mask & ~SeenBefore(queries.ids, queries.ranks, keys.ids, keys.ranks, window)
    bias = None
    if key_bias is not None:
        bias = biases.Array(jnp.take_along_axis(_one_axis(key_bias, 1), columns, axis=-1)[:, None, None, :])
    output, logsumexp = dot_product_attention(
        _take(query, rows)[:, :, None],
        _take(key, columns)[:, :, None],
        _take(value, columns)[:, :, None],
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, window - 1),
        query_positions=of_queries.ranks,
        key_positions=of_keys.ranks,
        precision=precision,
        implementation=_tiles(query.shape[1], key.shape[1], group_size),
        return_residual=True,
    )
    back = jnp.argsort(rows, axis=-1)
    output, logsumexp = _take(output[:, :, 0], back), _take(logsumexp[:, :, 0], back)
    return output.reshape(*lead, *output.shape[1:]), logsumexp.reshape(*lead, -1)


def _tiles(num_queries: int, num_keys: int, group_size: int) -> Blockwise | None:
    """Tiles that a group about fills; None where there are so few pairs that tiles do not matter."""
    if num_queries < 64 or num_keys < 64:
        return None
    side = min(max(2 ** math.ceil(math.log2(max(group_size, 1))), 64), 512)
    return Blockwise(queries=side, keys=side)


def counted_tokens(name: str, lengths: ArrayLike | None, tokens: tuple[int, ...]) -> Bool[Array, "*b t"] | None:
    """Which of `tokens`, `(*B, T)`, are the first `lengths` of their item; None: all."""
    if lengths is None:
        return None
    *batch, length = tokens
    lengths = checks.wide_integers(name, lengths)
    if lengths.ndim:
        checks.shape(name, lengths, batch, "[] or [*B]")
    checks.within(name, lengths, 0, length)
    lengths = jnp.broadcast_to(lengths, tuple(batch))
    return jnp.arange(length).reshape((1,) * len(batch) + (-1,)) < lengths[..., None]


def keep_counted(x: Float[Array, "*b t n h"], counted: Bool[Array, "*b t"] | None) -> Float[Array, "*b t n h"]:
    """`x` with 0 for what does not count, so that whatever stands there reaches nothing."""
    return x if counted is None else jnp.where(counted[..., None, None], x, 0)


def _one_axis(x: Array, last: int) -> Array:
    """`x` with all but its last axes as one."""
    lead = x.shape[: x.ndim - last]
    return x.reshape(math.prod(lead), *x.shape[x.ndim - last :])


def _take(x: Any, order: Int[Array, "l t"]) -> Any:
    """The entries of arrays `[L, T, ...]` in an order."""

    def take(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, order.reshape(order.shape + (1,) * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(take, x)
