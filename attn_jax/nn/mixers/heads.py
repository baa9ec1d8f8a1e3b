"""What mixers with queries, keys and values share: the projections."""

import functools
from typing import Any, TypeVar

from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import Mixer, MixerState
from attn_jax.nn.options import fill_sizes
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import Array, Float

State = TypeVar("State", bound=MixerState)


class HeadMixer(Mixer[State]):
    """A mixer of N query heads over K key/value heads.

    Parameters, as those of `MultiHeadAttention`:

        query_weight [D, N, H]   key_weight [D, K, H]   value_weight [D, K, V]   output_weight [N, V, D]
            by `kernel_init`, LeCun by default: variance 1 / fan in. `key_weight` is absent if tied.
        query_bias [N, H]   key_bias [K, H]   value_bias [K, V]   output_bias [D]      0, with `use_bias`
    """

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        head_width: int | None,
        value_width: int | None,
        tie_query_key: bool = False,
        is_causal: bool,
        use_bias: bool,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        precision: Any,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(model_width, is_causal=is_causal, dtype=dtype, precision=precision)
        sizes = fill_sizes(model_width, num_heads, num_kv_heads, head_width, value_width)
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.head_width, self.value_width = sizes.head_width, sizes.value_width
        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        draw = functools.partial(parameters.weight, rngs, kernel_init, dtype=param_dtype)
        D, N, K, H, V, _ = sizes
        self.query_weight = draw((D,), (N, H))
        self.key_weight = None if tie_query_key else draw((D,), (K, H))
        self.value_weight = draw((D,), (K, V))
        self.output_weight = draw((N, V), (D,))
        with_bias = checks.boolean("use_bias", use_bias)

        def zeros(*shape: int) -> nnx.Param | None:
            return parameters.constant(0.0, shape, param_dtype) if with_bias else None

        self.query_bias, self.value_bias, self.output_bias = zeros(N, H), zeros(K, V), zeros(D)
        self.key_bias = None if tie_query_key else zeros(K, H)

    def project(self, x: Array) -> tuple[Float[Array, "*b t n h"], Float[Array, "*b t k h"], Float[Array, "*b t k v"]]:
        """Queries, keys (the queries, where these are tied) and values."""
        query = self._linear(x, self.query_weight, self.query_bias)
        key = query if self.key_weight is None else self._linear(x, self.key_weight, self.key_bias)
        return query, key, self._linear(x, self.value_weight, self.value_bias)

    def _merge(self, output: Float[Array, "*b t n v"]) -> Float[Array, "*b t d"]:
        """The output projection."""
        return self._linear(output, self.output_weight, self.output_bias, inputs=2)
