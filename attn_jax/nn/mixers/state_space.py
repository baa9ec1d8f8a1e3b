"""A selective state space as a mixer: what a token writes, and how much is forgotten there, depend on the token."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.linear import LinearState, state_space
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import Mixer, MixerState, causal_only
from attn_jax.nn.mixers.shifts import convolve, last_rows
from attn_jax.nn.options import fill_sizes
from attn_jax.nn.parameters import Initializer
from attn_jax.scaling import rms_norm
from attn_jax.typing import Array, Float

RATES = (1.0, 16.0)  # of forgetting, -A, at the beginning
STEPS = (1e-3, 1e-1)  # Δ of a token that says nothing, at the beginning


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceState(MixerState):
    """What a state space keeps.

    Attributes:
        memory: `[*B, N, R, V]` in a `LinearState`, float32 or better.
        inputs: of the short convolution of width W, the last W - 1, `[*B, W - 1, N V + 2 R]`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import StateSpace
    >>> mixer = StateSpace(4, 2, state_width=3, convolution_width=4, rngs=nnx.Rngs(0))
    >>> _, state = jax.eval_shape(mixer.extend, jnp.ones((1, 500, 4)), mixer.empty_state(1))
    >>> state.memory.memory.shape, state.inputs.shape  # N = 2, R = 3, V = 2, W = 4, however many tokens there were
    ((1, 2, 3, 2), (1, 3, 10))
    """

    memory: LinearState
    inputs: Float[Array, "*b w c"]


class StateSpace(Mixer[StateSpaceState]):
    """Mamba-2: N heads with a scalar decay of each step, and inputs that pass a short convolution and a gate.

        z, u, Δ = project;   x, B, C = silu(convolve(u));   Δ = softplus(Δ + step_bias)
        S_t = exp(Δ_t A) S_{t-1} + B_t (Δ_t x_t)ᵀ;   y_t = S_tᵀ C_t + skip x_t,   A = -exp(log_rate)
        output = norm(y ⊙ silu(z)) W_O

    B and C are the same of all heads, x `[*B, T, N, V]` has V columns of each. The norm is that of the root mean square
    over all N V numbers.

    Parameters, with C = N V + 2 R:

        gate_weight [D, N, V]   input_weight [D, C]   step_weight [D, N]   output_weight [N, V, D]
            by `kernel_init`, LeCun by default
        convolution_weight [W, C]    the same, fan in W
        convolution_bias [C]         0
        step_bias [N]                softplus of it log-uniform in 0.001..0.1
        log_rate [N]                 exp of it uniform in 1..16
        skip [N], norm_weight [N V]  1
        gate_bias [N, V]   input_bias [C]   output_bias [D]     0, with `use_bias`

    Args:
        model_width, num_heads: D and N.
        value_width: V; None: D / N.
        state_width: R; None: V.
        convolution_width: W, tokens that the short convolution sees.
        norm_epsilon: ε of the norm.
        is_causal: must be True.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Dao & Gu 2024 (Mamba-2), section 7.

    >>> import jax
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import StateSpace
    >>> mixer = jax.jit(StateSpace(4, 2, rngs=nnx.Rngs(0)))
    >>> x = jax.random.normal(jax.random.key(0), (3, 4))
    >>> change = mixer(x.at[1].set(0)) - mixer(x)  # of the second token
    >>> (abs(change).max(axis=1) > 1e-4).tolist()  # the first does not see it
    [False, True, True]
    """

    state_type = StateSpaceState

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        value_width: int | None = None,
        state_width: int | None = None,
        convolution_width: int = 4,
        norm_epsilon: float = 1e-6,
        is_causal: bool = True,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        causal_only("a state space", is_causal)
        super().__init__(model_width, is_causal=is_causal, dtype=dtype, precision=precision)
        D, N, _, V, _, _ = fill_sizes(model_width, num_heads, head_width=value_width)
        R = V if state_width is None else checks.positive_int("state_width", state_width)
        self.num_heads, self.value_width, self.state_width = N, V, R
        self.convolution_width = W = checks.positive_int("convolution_width", convolution_width)
        self.norm_epsilon = checks.finite_number("norm_epsilon", norm_epsilon, positive=True)
        with_bias, name = checks.boolean("use_bias", use_bias), parameters.floating_name("param_dtype", param_dtype)
        C = N * V + 2 * R

        def draw(fan_in: tuple[int, ...], fan_out: tuple[int, ...]) -> nnx.Param:
            return parameters.weight(rngs, kernel_init, fan_in, fan_out, name)

        def zeros(*shape: int) -> nnx.Param | None:
            return parameters.constant(0.0, shape, name) if with_bias else None

        self.gate_weight, self.input_weight, self.step_weight = draw((D,), (N, V)), draw((D,), (C,)), draw((D,), (N,))
        self.convolution_weight, self.output_weight = draw((W,), (C,)), draw((N, V), (D,))
        self.convolution_bias = parameters.constant(0.0, (C,), name)
        least, most = map(math.log, STEPS)
        step = jnp.exp(jax.random.uniform(rngs.params(), (N,), minval=least, maxval=most))
        self.step_bias = nnx.Param(jnp.log(jnp.expm1(step)).astype(name))
        rate = jax.random.uniform(rngs.params(), (N,), minval=RATES[0], maxval=RATES[1])
        self.log_rate = nnx.Param(jnp.log(rate).astype(name))
        self.skip = parameters.constant(1.0, (N,), name)
        self.norm_weight = parameters.constant(1.0, (N * V,), name)
        self.gate_bias, self.input_bias, self.output_bias = zeros(N, V), zeros(C), zeros(D)

    def _mix(self, x: Array, lengths: Array | None, state: StateSpaceState | None) -> tuple[Array, dict[str, Any]]:
        N, V, R, kept = self.num_heads, self.value_width, self.state_width, self.convolution_width - 1
        batch, lead = x.shape[:-1], (1,) * (x.ndim - 1)
        gate = self._linear(x, self.gate_weight, self.gate_bias)
        step = self._linear(x, self.step_weight, None)
        raw = self._linear(x, self.input_weight, self.input_bias)
        dtype, wide = raw.dtype, jnp.promote_types(raw.dtype, jnp.float32)
        before = jnp.zeros((*batch[:-1], kept, raw.shape[-1]), dtype) if state is None else state.inputs.astype(dtype)
        raw = jnp.concatenate([before, raw], axis=-2)
        mixed = jax.nn.silu(convolve(raw, self.convolution_weight[...], self.convolution_bias[...]))
        inputs, key, query = jnp.split(mixed, [N * V, N * V + R], axis=-1)
        inputs = inputs.reshape(*batch, N, V)
        per_head = (self.step_bias, self.log_rate, self.skip)
        bias, log_rate, skip = (one[...].astype(wide).reshape(*lead, N) for one in per_head)
        step = jax.nn.softplus(step.astype(wide) + bias)
        output, memory = state_space(
            jnp.broadcast_to(query[..., None, :], (*batch, N, R)),
            jnp.broadcast_to(key[..., None, :], (*batch, N, R)),
            step[..., None] * inputs,
            -jnp.exp(log_rate) * step,
            lengths=lengths,
            initial_state=None if state is None else state.memory,
            return_state=True,
            precision=self.precision,
        )
        gated = (output + skip[..., None] * inputs) * jax.nn.silu(gate.astype(wide))
        weight = self.norm_weight[...].astype(wide)
        normed = rms_norm(gated, weight, epsilon=self.norm_epsilon).astype(dtype)
        changes = {} if state is None else {"memory": memory, "inputs": last_rows(raw, kept, lengths)}
        return self._linear(normed, self.output_weight, self.output_bias, inputs=2), changes

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> StateSpaceState:
        N, V, R = self.num_heads, self.value_width, self.state_width
        memory = LinearState.empty(batch, N, R, V, dtype=jnp.promote_types(dtype, jnp.float32))
        inputs = jnp.zeros((*batch, self.convolution_width - 1, N * V + 2 * R), dtype)
        return StateSpaceState(memory=memory, inputs=inputs, lengths=jnp.zeros(batch, jnp.int32))
