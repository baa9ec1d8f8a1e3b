"""The cache of grouped attention, for decoding: the last members of every group, whatever the length of the context.

A token of rank r in its group lies in slot `r mod window` of the group's ring. A query reaches no farther back than the
window, so what the ring has lost nobody sees: any cutting of a sequence into calls gives what one call gives.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.routed.groups import Members
from attn_jax.typing import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupCache:
    """The last keys and values of every group; made by `empty_group_cache`. P are the rounds of hashing, or 1.

    Attributes:
        key, value: `[*B, N, P, groups, window, H]` and `[..., V]`.
        counts: int32 `[*B, N, P, groups]`, tokens that each group has had.
        lengths: int32 `[*B]`, tokens that each item has had.
        rounds: where the token of each slot belongs in every round, `[*B, N, P, groups, window, P]`; None where P = 1.

    >>> from attn_jax.routed import draw_centroids, empty_group_cache, extend_routing
    >>> x, centroids = jnp.ones((1, 1, 1, 4)), draw_centroids(jax.random.key(0), 1, 2, 4)
    >>> cache = empty_group_cache(1, num_heads=1, num_groups=2, window=2, head_width=4)
    >>> extend = jax.jit(extend_routing)
    >>> for _ in range(3):  # three equal tokens, all of one cluster, which keeps two
    ...     _, cache = extend(x, x, x, centroids, cache)
    >>> cache.lengths.tolist(), sorted(cache.counts[0, 0, 0].tolist()), cache.window
    ([3], [0, 3], 2)
    """

    key: Float[Array, "*b n p g w h"]
    value: Float[Array, "*b n p g w v"]
    counts: Int[Array, "*b n p g"]
    lengths: Int[Array, "*b"]
    rounds: Members | None = None

    @property
    def window(self) -> int:
        """How many members of a group are kept."""
        return self.key.shape[-2]

    @property
    def members(self) -> Members:
        """Where the tokens of all slots belong, `[*B, N, P, groups · window]`; an empty slot has rank -1."""
        slots = jnp.arange(self.window, dtype=jnp.int32).reshape((1,) * self.counts.ndim + (-1,))
        last = self.counts[..., None] - 1
        ranks = jnp.maximum(last - (last - slots) % self.window, -1)
        groups = jnp.arange(self.counts.shape[-1], dtype=jnp.int32).reshape((1,) * (ranks.ndim - 2) + (-1, 1))
        return Members(_slots(jnp.broadcast_to(groups, ranks.shape), 0), _slots(ranks, 0))

    @property
    def stored(self) -> tuple[Float[Array, "*b n p s h"], Float[Array, "*b n p s v"], Members | None]:
        """Keys, values and `rounds` of all slots, in a row."""
        return jax.tree.map(lambda x: _slots(x, 1), (self.key, self.value, self.rounds))

    def before(self, ids: Int[Array, "*b n p t"]) -> Int[Array, "*b n p t"]:
        """How many tokens the group of each new token has had."""
        return _of_group(self.counts, ids)

    def append(
        self,
        key: Float[Array, "*b n p t h"],
        value: Float[Array, "*b n p t v"],
        of_keys: Members,
        counted: Bool[Array, "*b t"] | None,
        rounds: Members | None = None,
    ) -> "GroupCache":
        """The cache with T more tokens, ranked after those that are stored; those that do not count change nothing."""
        groups, window, lead = self.counts.shape[-1], self.window, self.counts.ndim - 1
        ids = of_keys.ids
        counts = self.counts + jnp.sum(
            (ids[..., None] == jnp.arange(groups, dtype=ids.dtype).reshape((1,) * ids.ndim + (-1,)))
            & (of_keys.ranks >= 0)[..., None],
            axis=-2,
            dtype=jnp.int32,
        )
        # Each slot gets the last token that goes there; what a group has outgrown, and what does not count, goes to
        # no slot.
        last = (of_keys.ranks >= 0) & (of_keys.ranks >= _of_group(counts, ids) - window)
        slots = jnp.where(last, ids * window + of_keys.ranks % window, groups * window)

        def put(old: Array, new: Array) -> Array:
            flat = old.reshape(math.prod(old.shape[:lead]), groups * window, *old.shape[lead + 2 :])
            new = new.reshape(flat.shape[0], -1, *flat.shape[2:]).astype(old.dtype)
            written = jax.vmap(lambda to, at, x: to.at[at].set(x, mode="drop"))(
                flat, slots.reshape(flat.shape[0], -1), new
            )
            return written.reshape(old.shape)

        added = ids.shape[-1] if counted is None else counted.sum(axis=-1, dtype=jnp.int32)
        return GroupCache(
            put(self.key, key),
            put(self.value, value),
            counts,
            self.lengths + added,
            jax.tree.map(put, self.rounds, rounds),
        )


def empty_group_cache(
    batch: int | tuple[int, ...],
    num_heads: int,
    num_groups: int,
    window: int,
    head_width: int,
    *,
    value_width: int | None = None,
    num_rounds: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> GroupCache:
    """A cache without tokens.

    Args:
        batch: B, or the batch axes.
        num_heads: N of `lsh_attention`, K of `routing_attention`.
        num_groups: buckets or clusters.
        window: how many members of a group a query reaches back, itself included.
        head_width: H.
        value_width: V; None: H.
        num_rounds: of hashing.
        dtype: of keys and values.

    Raises:
        ValueError, TypeError: on a size that is not a positive integer.

    >>> empty_group_cache(2, num_heads=1, num_groups=4, window=8, head_width=16).key.shape
    (2, 1, 1, 4, 8, 16)
    """
    sizes = {"num_heads": num_heads, "num_rounds": num_rounds, "num_groups": num_groups, "window": window}
    lead = tuple(checks.positive_int(name, size) for name, size in sizes.items())
    widths = [("head_width", head_width), ("value_width", head_width if value_width is None else value_width)]
    head_width, value_width = (checks.positive_int(name, size) for name, size in widths)
    batch = tuple(checks.positive_int("batch", x) for x in (batch if isinstance(batch, (tuple, list)) else (batch,)))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be a floating dtype, got {dtype}")
    ranks = [jnp.full((*batch, *lead, lead[1]), -1, jnp.int32) for _ in range(2)]  # two, since a cache is donated
    return GroupCache(
        key=jnp.zeros((*batch, *lead, head_width), dtype),
        value=jnp.zeros((*batch, *lead, value_width), dtype),
        counts=jnp.zeros((*batch, *lead[:3]), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        rounds=Members(*ranks) if lead[1] > 1 else None,
    )


def check_cache(cache: GroupCache, lead: tuple[int, ...], head_width: int, value_width: int, axes: str) -> None:
    """Raises unless the cache is for these groups, `(*B, N, P, groups)`, and widths."""
    if not isinstance(cache, GroupCache):
        raise TypeError(f"cache must be a GroupCache, as empty_group_cache makes it, got {type(cache).__name__}")
    checks.shape("cache.counts", cache.counts, lead, axes)
    checks.shape("cache.key", cache.key, (*lead, cache.window, head_width), f"{axes[:-1]}, window, H]")
    checks.shape("cache.value", cache.value, (*lead, cache.window, value_width), f"{axes[:-1]}, window, V]")


def _of_group(counts: Int[Array, "*l g"], ids: Int[Array, "*l t"]) -> Int[Array, "*l t"]:
    """The count of each token's group, 0 for a token of none."""
    groups = counts.shape[-1]
    found = jnp.take_along_axis(counts, jnp.minimum(ids, groups - 1), axis=-1)
    return jnp.where(ids < groups, found, 0)


def _slots(x: Array, last: int) -> Array:
    """`[..., groups, window, *last]` with the slots of all groups in a row."""
    at = x.ndim - last
    return x.reshape(*x.shape[: at - 2], x.shape[at - 2] * x.shape[at - 1], *x.shape[at:])
