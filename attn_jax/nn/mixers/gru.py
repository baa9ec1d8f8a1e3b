"""A gated recurrent unit as a mixer: all that a token knows of those before has gone through one vector."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import padding, parameters
from attn_jax.nn.mixers.base import Mixer, MixerState, causal_only
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GRUState(MixerState):
    """What a GRU keeps.

    Attributes:
        hidden: h, `[*B, D]`, float32 or better.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import GRU
    >>> mixer = GRU(1, rngs=nnx.Rngs(0))
    >>> output, state = mixer.extend(jnp.ones((1, 3, 1)), mixer.empty_state(1))
    >>> bool((state.hidden == output[:, -1]).all()), state.lengths.tolist()
    (True, [3])
    """

    hidden: Float[Array, "*b d"]


class GRU(Mixer[GRUState]):
    """A gated recurrent unit; its state is its output.

        r = σ(x W_r + h U_r + b_r)
        z = σ(x W_z + h U_z + b_z)
        n = tanh(x W_n + b_n + r ⊙ (h U_n + c_n))
        h ← (1 - z) ⊙ n + z ⊙ h

    The reset gate acts after the product, as in cuDNN, PyTorch and Flax. Only the products with h wait for the token
    before; those with x are one product for all tokens.

    Parameters: `input_weight` (W), `recurrent_weight` (U), `[D, 3, D]`, each in the order r, z, n, by `kernel_init`,
    LeCun by default; with `use_bias` `input_bias` (b) `[3, D]` and `recurrent_bias` (c_n) `[D]` at 0.

    Args:
        model_width: D, also the width of the state.
        is_causal: must be True.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Cho et al. 2014 (arXiv 1406.1078v1), section 2.3; later versions of it reset before the product.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import GRU, GRUState
    >>> mixer = GRU(1, kernel_init=jax.nn.initializers.zeros, rngs=nnx.Rngs(0))
    >>> state = GRUState(hidden=jnp.ones((1, 1)), lengths=jnp.zeros(1, jnp.int32))
    >>> mixer.extend(jnp.ones((1, 3, 1)), state)[0][0, :, 0].tolist()  # weights of 0: z = 1/2 and n = 0
    [0.5, 0.25, 0.125]
    """

    state_type = GRUState

    def __init__(
        self,
        model_width: int,
        *,
        is_causal: bool = True,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        causal_only("a GRU", is_causal)
        super().__init__(model_width, is_causal=is_causal, dtype=dtype, precision=precision)
        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        D, with_bias = self.model_width, checks.boolean("use_bias", use_bias)
        self.input_weight = parameters.weight(rngs, kernel_init, (D,), (3, D), param_dtype)
        self.recurrent_weight = parameters.weight(rngs, kernel_init, (D,), (3, D), param_dtype)
        self.input_bias = parameters.constant(0.0, (3, D), param_dtype) if with_bias else None
        self.recurrent_bias = parameters.constant(0.0, (D,), param_dtype) if with_bias else None

    def _mix(self, x: Array, lengths: Array | None, state: GRUState | None) -> tuple[Array, dict[str, Any]]:
        gates = self._linear(x, self.input_weight, self.input_bias)  # [*B, T, 3, D]
        dtype, batch, (length, D) = gates.dtype, x.shape[:-2], x.shape[-2:]
        wide = jnp.promote_types(dtype, jnp.float32)
        matrix, offset = parameters.values(self.recurrent_weight, self.recurrent_bias, dtype=dtype.name)
        matrix = matrix.reshape(D, 3 * D)

        def step(h: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
            x, counts = one
            products = jnp.matmul(h.astype(dtype), matrix, precision=self.precision, preferred_element_type=wide)
            products = products.reshape(*batch, 3, D)
            r, z = (jax.nn.sigmoid(x[..., i, :].astype(wide) + products[..., i, :]) for i in (0, 1))
            recurrent = products[..., 2, :]
            if offset is not None:
                recurrent = recurrent + offset.astype(wide).reshape((1,) * len(batch) + (D,))
            n = jnp.tanh(x[..., 2, :].astype(wide) + r * recurrent)
            h = jnp.where(counts[..., None], (1 - z) * n + z * h, h)
            return h, h.astype(dtype)

        counts = jnp.ones((*batch, length), bool) if lengths is None else padding.counts(lengths, length)
        over_time = jnp.moveaxis(gates, len(batch), 0), jnp.moveaxis(counts, len(batch), 0)
        h = jnp.zeros((*batch, D), wide) if state is None else state.hidden.astype(wide)
        h, outputs = jax.lax.scan(step, h, over_time)
        return jnp.moveaxis(outputs, 0, len(batch)), {} if state is None else {"hidden": h}

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> GRUState:
        hidden = jnp.zeros((*batch, self.model_width), jnp.promote_types(dtype, jnp.float32))
        return GRUState(hidden=hidden, lengths=jnp.zeros(batch, jnp.int32))
