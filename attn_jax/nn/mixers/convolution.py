"""Convolution as a mixer: each channel sees its neighbourhood, then the channels mix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import Mixer, MixerState
from attn_jax.nn.mixers.shifts import convolve, last_rows
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionState(MixerState):
    """What a causal convolution of width W keeps: the last W - 1 tokens, 0 where there was none.

    Attributes:
        inputs: `[*B, W - 1, D]`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import Convolution
    >>> mixer = Convolution(1, width=3, is_causal=True, rngs=nnx.Rngs(0))
    >>> _, state = mixer.extend(jnp.array([[[1.0], [2.0], [3.0], [4.0]]]), mixer.empty_state(1))
    >>> state.inputs[0, :, 0].tolist(), state.lengths.tolist()
    ([3.0, 4.0], [4])
    """

    inputs: Float[Array, "*b w d"]


class Convolution(Mixer[ConvolutionState]):
    """A depthwise convolution over time and a projection of the channels.

        y[t, d] = Σ_j convolution_weight[j, d] x[t + j - left, d];   output = y W_O

    with left = W - 1 if causal (the last weight is that of the token itself), else (W - 1) / 2 of an odd W. Beyond the
    ends stands 0. With the norm before and the MLP after it, it is the block of ConvNeXt in one dimension.

    Parameters: `convolution_weight` `[W, D]`, `output_weight` `[D, D]`, by `kernel_init`, LeCun by default (fan in W
    and D); `convolution_bias`, `output_bias` `[D]` at 0 if `use_bias`.

    Args:
        model_width: D.
        width: W, the tokens that one sees.
        is_causal: whether a token sees no later one.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none, or an even width without `is_causal`.

    Reference: Liu et al. 2022 (ConvNeXt), section 2.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import Convolution
    >>> mixer = Convolution(1, width=3, is_causal=True, kernel_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    >>> mixer(jnp.array([[1.0], [2.0], [3.0], [4.0]]))[:, 0].tolist()  # with weights of 1, sums of three tokens
    [1.0, 3.0, 6.0, 9.0]
    """

    state_type = ConvolutionState

    def __init__(
        self,
        model_width: int,
        *,
        width: int = 7,
        is_causal: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(model_width, is_causal=is_causal, dtype=dtype, precision=precision)
        self.width = checks.positive_int("width", width)
        if not is_causal and width % 2 == 0:
            raise ValueError(f"width must be odd without is_causal, as many on each side, got {width}")
        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        D, with_bias = self.model_width, checks.boolean("use_bias", use_bias)
        self.convolution_weight = parameters.weight(rngs, kernel_init, (width,), (D,), param_dtype)
        self.output_weight = parameters.weight(rngs, kernel_init, (D,), (D,), param_dtype)
        self.convolution_bias = parameters.constant(0.0, (D,), param_dtype) if with_bias else None
        self.output_bias = parameters.constant(0.0, (D,), param_dtype) if with_bias else None

    def _mix(self, x: Array, lengths: Array | None, state: ConvolutionState | None) -> tuple[Array, dict[str, Any]]:
        x, weight, bias = parameters.values(x, self.convolution_weight, self.convolution_bias, dtype=self.dtype)
        kept = self.width - 1
        left = kept if self.is_causal else kept // 2
        changes = {}
        if state is None:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(left, kept - left), (0, 0)])
        else:
            x = jnp.concatenate([state.inputs.astype(x.dtype), x], axis=-2)
            changes["inputs"] = last_rows(x, kept, lengths)
        return self._linear(convolve(x, weight, bias).astype(x.dtype), self.output_weight, self.output_bias), changes

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> ConvolutionState:
        inputs = jnp.zeros((*batch, self.width - 1, self.model_width), dtype)
        return ConvolutionState(inputs=inputs, lengths=jnp.zeros(batch, jnp.int32))
