"""Attention among tokens that belong together, as mixers: by hashing, and by clusters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import MixerState
from attn_jax.nn.mixers.heads import HeadMixer
from attn_jax.nn.parameters import Initializer
from attn_jax.routed.cache import GroupCache, empty_group_cache
from attn_jax.routed.lsh import draw_rotations, extend_lsh, lsh_attention
from attn_jax.routed.routing import draw_centroids, extend_routing, routing_attention
from attn_jax.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupState(MixerState):
    """What attention in groups keeps.

    Attributes:
        cache: the last members of every group.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import RoutingAttention
    >>> mixer = RoutingAttention(4, 1, num_clusters=2, window=8, is_causal=True, rngs=nnx.Rngs(0))
    >>> _, state = jax.eval_shape(mixer.extend, jnp.ones((1, 500, 4)), mixer.empty_state(1))
    >>> state.cache.key.shape  # 8 keys of width 4 of each of 2 clusters, however many tokens there were
    (1, 1, 1, 2, 8, 4)
    """

    cache: GroupCache


class LSHAttention(HeadMixer[GroupState]):
    """Attention among tokens that hash to one bucket, with queries and keys in one.

    Parameters: those of `HeadMixer` with tied keys, and `rotations` `[rounds, N, H, buckets / 2]`, drawn once, which no
    gradient reaches.

    Args:
        model_width, num_heads: D and N.
        head_width: H; None: D / N.
        value_width: V; None: H.
        num_buckets: of a round, 1 or even.
        num_rounds: rounds that are combined.
        window: members of its own bucket that a token sees: those whose rank there differs by less.
        is_causal: whether a token sees no later one.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Kitaev et al. 2020 (Reformer), section 2. There the rotations are drawn anew in every step.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import LSHAttention
    >>> def identity(key, shape, dtype):
    ...     return jnp.eye(*shape, dtype=dtype)
    >>> mixer = LSHAttention(2, 1, num_buckets=2, num_rounds=1, kernel_init=identity, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    >>> jax.jit(mixer)(x).tolist()  # opposite tokens are in different buckets
    [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]
    """

    state_type = GroupState

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        head_width: int | None = None,
        value_width: int | None = None,
        num_buckets: int = 8,
        num_rounds: int = 2,
        window: int = 64,
        is_causal: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            model_width,
            num_heads,
            num_kv_heads=None,
            head_width=head_width,
            value_width=value_width,
            tie_query_key=True,
            is_causal=is_causal,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        drawn = draw_rotations(rngs.params(), self.num_heads, self.head_width, num_buckets, num_rounds=num_rounds)
        self.num_buckets, self.num_rounds = num_buckets, num_rounds
        self.window = checks.positive_int("window", window)
        self.rotations = nnx.Param(drawn.astype(self.value_weight.dtype))

    def _mix(self, x: Array, lengths: Array | None, state: GroupState | None) -> tuple[Array, dict[str, Any]]:
        query_key, _, value = self.project(x)
        rotations = self.rotations[...]
        if state is not None:
            output, cache = extend_lsh(
                query_key, value, rotations, state.cache, counts=lengths, precision=self.precision
            )
            return self._merge(output), {"cache": cache}
        output = lsh_attention(
            query_key,
            value,
            rotations,
            window=self.window,
            is_causal=self.is_causal,
            key_value_seq_lengths=lengths,
            precision=self.precision,
        )
        return self._merge(output), {}

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> GroupState:
        cache = empty_group_cache(
            batch,
            self.num_heads,
            self.num_buckets,
            self.window,
            self.head_width,
            value_width=self.value_width,
            num_rounds=self.num_rounds,
            dtype=dtype,
        )
        return GroupState(cache=cache, lengths=jnp.zeros(batch, jnp.int32))


class RoutingAttention(HeadMixer[GroupState]):
    """Attention among the queries and keys that are nearest to one centroid.

    Parameters: those of `HeadMixer`, and `centroids` `[K, clusters, H]`, directions drawn at random, which learn by a
    straight-through gradient.

    Args:
        model_width, num_heads: D and N.
        num_kv_heads: K, which divides N; None: N.
        head_width: H; None: D / N.
        value_width: V; None: H.
        num_clusters: of each key/value head.
        window: if causal, keys of its own cluster that a token sees; else queries and keys that a cluster takes.
        is_causal: whether a token sees no later one.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Roy et al. 2021, section 4.1. There the centroids follow the tokens by a moving average, as they do here
    by `update_centroids`; what `project` returns is also what `routing_attention` takes with another `learn`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import RoutingAttention
    >>> def identity(key, shape, dtype):
    ...     return jnp.eye(*shape, dtype=dtype)
    >>> mixer = RoutingAttention(2, 1, num_clusters=2, is_causal=True, kernel_init=identity, rngs=nnx.Rngs(0))
    >>> x = jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]])
    >>> jax.jit(mixer)(x).tolist()  # opposite tokens are in different clusters
    [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]
    >>> from attn_jax.routed import update_centroids
    >>> query, key, _ = mixer.project(x)
    >>> mixer.centroids[...] = update_centroids(mixer.centroids[...], query, key, decay=0.0)
    >>> sorted(mixer.centroids[0].round(3).tolist())  # each at the tokens that came to it
    [[-1.0, 0.0], [1.0, 0.0]]
    """

    state_type = GroupState

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        value_width: int | None = None,
        num_clusters: int = 8,
        window: int = 64,
        is_causal: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            model_width,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_width=head_width,
            value_width=value_width,
            is_causal=is_causal,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        drawn = draw_centroids(rngs.params(), self.num_kv_heads, num_clusters, self.head_width)
        self.num_clusters = num_clusters
        self.window = checks.positive_int("window", window)
        self.centroids = nnx.Param(drawn.astype(self.value_weight.dtype))

    def _mix(self, x: Array, lengths: Array | None, state: GroupState | None) -> tuple[Array, dict[str, Any]]:
        tokens, centroids = self.project(x), self.centroids[...]
        if state is not None:
            output, cache = extend_routing(*tokens, centroids, state.cache, counts=lengths, precision=self.precision)
            return self._merge(output), {"cache": cache}
        output = routing_attention(
            *tokens,
            centroids,
            learn="straight_through",
            window=self.window,
            is_causal=self.is_causal,
            key_value_seq_lengths=lengths,
            precision=self.precision,
        )
        return self._merge(output), {}

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> GroupState:
        cache = empty_group_cache(
            batch,
            self.num_kv_heads,
            self.num_clusters,
            self.window,
            self.head_width,
            value_width=self.value_width,
            dtype=dtype,
        )
        return GroupState(cache=cache, lengths=jnp.zeros(batch, jnp.int32))
