"""Linear attention as a mixer: features of queries and keys in place of the softmax."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.linear import LinearState, RandomFeatures, draw_features, linear_attention
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import MixerState
from attn_jax.nn.mixers.heads import HeadMixer
from attn_jax.nn.mixers.options import FEATURE_MAPS
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import Array

EXPONENTIAL = ("exp", "random")  # whose memory is relative to the largest log-feature so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryState(MixerState):
    """What linear attention and retention keep.

    Attributes:
        memory: the decayed sum of keys and values, float32 or better.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import LinearAttention
    >>> mixer = LinearAttention(1, 1, is_causal=True, kernel_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    >>> _, state = mixer.extend(jnp.array([[[0.0], [2.0]]]), mixer.empty_state(1))
    >>> state.memory.memory.ravel().tolist(), state.memory.normalizer.ravel().tolist()  # 1·0 + 3·2, 1 + 3
    ([6.0], [4.0])
    """

    memory: LinearState


class LinearAttention(HeadMixer[MemoryState]):
    """Linear attention, normalised; without causality every token reads one memory of all.

    q, k, v = project;  y_t = Σ_s (φ(q_t)·φ(k_s)) v_s / Σ_s φ(q_t)·φ(k_s);  output = merge(y) W_O

    Parameters: those of `HeadMixer`, and with "random" `random_features` `[R, H]`, which no gradient reaches.

    Args:
        model_width, num_heads: D and N.
        num_kv_heads: K, which divides N; None: N.
        head_width: H; None: D / N.
        value_width: V; None: H.
        feature_map: "elu", "relu", "exp", "squared", or "random": positive orthogonal random features, which estimate
            softmax attention.
        num_features: R of the random features; None: 2 H.
        is_causal: whether a token sees no later one.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Katharopoulos et al. 2020; Choromanski et al. 2021 (random features).

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import LinearAttention
    >>> mixer = LinearAttention(1, 1, is_causal=True, kernel_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    >>> mixer(jnp.array([[0.0], [2.0]]))[:, 0].tolist()  # values 0 and 2 with features 1 and 3: (1·0 + 3·2) / (1 + 3)
    [0.0, 1.5]
    """

    state_type = MemoryState

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        value_width: int | None = None,
        feature_map: str = "elu",
        num_features: int | None = None,
        is_causal: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        checks.one_of("feature_map", feature_map, FEATURE_MAPS)
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
        self.feature_map = feature_map
        is_random = feature_map == "random"
        if num_features is not None and not is_random:
            raise ValueError(f"num_features has no effect without feature_map='random', got {num_features}")
        count = (2 if is_random else 1) * self.head_width if num_features is None else num_features
        self.num_features = checks.positive_int("num_features", count)
        drawn = draw_features(rngs.params(), self.head_width, count).directions if is_random else None
        self.random_features = None if drawn is None else nnx.Param(drawn.astype(self.value_weight.dtype))

    def _mix(self, x: Array, lengths: Array | None, state: MemoryState | None) -> tuple[Array, dict[str, Any]]:
        features = self.feature_map
        if self.random_features is not None:
            features = RandomFeatures(jax.lax.stop_gradient(self.random_features[...]))
        output, memory = linear_attention(
            *self.project(x),
            feature_map=features,
            is_causal=self.is_causal,
            key_value_seq_lengths=lengths,
            initial_state=None if state is None else state.memory,
            return_state=True,
            precision=self.precision,
        )
        return self._merge(output), {} if state is None else {"memory": memory}

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> MemoryState:
        memory = LinearState.empty(
            batch,
            self.num_kv_heads,
            self.num_features,
            self.value_width,
            normalize=True,
            shifted=self.feature_map in EXPONENTIAL,
            dtype=jnp.promote_types(dtype, jnp.float32),
        )
        return MemoryState(memory=memory, lengths=jnp.zeros(batch, jnp.int32))
