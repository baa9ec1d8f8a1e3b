"""Retention as a mixer: each head forgets at a rate of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.linear import LinearState, retention
from attn_jax.nn import parameters
from attn_jax.nn.mixers.base import causal_only
from attn_jax.nn.mixers.heads import HeadMixer
from attn_jax.nn.mixers.linear import MemoryState
from attn_jax.nn.parameters import Initializer
from attn_jax.positions import apply_rotary
from attn_jax.typing import Array, Float


class Retention(HeadMixer[MemoryState]):
    """Multi-scale retention with a gate.

        q, k, v = project;  q, k = rotate;  y_t = Σ_{s≤t} γ^(t-s) (q_t·k_s / √H) v_s
        output = merge(silu(x W_G) ⊙ norm(y)) W_O

    with γ_n = 1 - 2^(-5-n) of head n, the rotation of rotary positions, and the norm of each head by itself
    (`(y - mean y) / √(var y + ε)`, times a weight): the sum has no denominator, so its size means nothing.

    Parameters: those of `HeadMixer`, `gate_weight` `[D, N, V]` by `kernel_init`, `gate_bias` `[N, V]` at 0 if
    `use_bias`, and `norm_weight` `[N, V]` at 1.

    Args:
        model_width, num_heads: D and N.
        num_kv_heads: K, which divides N; None: N.
        head_width: H, even; None: D / N.
        value_width: V, at least 2; None: H.
        norm_epsilon: ε.
        is_causal: must be True.
        use_bias, dtype, param_dtype, precision, kernel_init, rngs: as in `attn_jax.nn.MLP`.

    Raises:
        ValueError, TypeError: on a size or choice that is none.

    Reference: Sun et al. 2023 (RetNet), equations 5, 7 and 8.

    >>> import jax
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import Retention
    >>> mixer = jax.jit(Retention(8, 2, rngs=nnx.Rngs(0)))
    >>> x = jax.random.normal(jax.random.key(0), (3, 8))
    >>> change = mixer(x.at[1].set(0)) - mixer(x)  # of the second token
    >>> (abs(change).max(axis=1) > 1e-4).tolist()  # the first does not see it
    [False, True, True]
    >>> Retention(8, 2, is_causal=False, rngs=nnx.Rngs(0))
    Traceback (most recent call last):
    ValueError: is_causal must be True for retention, which reads its sequence in one direction, got False
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
        norm_epsilon: float = 1e-6,
        is_causal: bool = True,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        causal_only("retention", is_causal)
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
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, since positions turn pairs, got {self.head_width}")
        checks.positive_int("value_width", self.value_width, least=2)  # the norm of one number is 0
        self.norm_epsilon = checks.finite_number("norm_epsilon", norm_epsilon, positive=True)
        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        shape = (self.num_heads, self.value_width)
        self.gate_weight = parameters.weight(rngs, kernel_init, (self.model_width,), shape, param_dtype)
        self.gate_bias = parameters.constant(0.0, shape, param_dtype) if use_bias else None
        self.norm_weight = parameters.constant(1.0, shape, param_dtype)

    def _mix(self, x: Array, lengths: Array | None, state: MemoryState | None) -> tuple[Array, dict[str, Any]]:
        query, key, value = self.project(x)
        positions = jnp.arange(x.shape[-2])
        if state is not None:
            positions = state.lengths[..., None] + positions.reshape((1,) * state.lengths.ndim + (-1,))
        query, key = apply_rotary(query, positions), apply_rotary(key, positions)
        output, memory = retention(
            query,
            key * self.head_width**-0.5,
            value,
            lengths=lengths,
            initial_state=None if state is None else state.memory,
            return_state=True,
            precision=self.precision,
        )
        gate = jax.nn.silu(self._linear(x, self.gate_weight, self.gate_bias))
        return self._merge(gate * self._norm(output)), {} if state is None else {"memory": memory}

    def _norm(self, x: Float[Array, "*b t n v"]) -> Float[Array, "*b t n v"]:
        """Each head by itself, in float32 or better."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        weight = self.norm_weight[...].astype(wide.dtype).reshape((1,) * (x.ndim - 2) + self.norm_weight.shape)
        return (centred * jax.lax.rsqrt(variance + self.norm_epsilon) * weight).astype(x.dtype)

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> MemoryState:
        memory = LinearState.empty(
            batch, self.num_heads, self.head_width, self.value_width, dtype=jnp.promote_types(dtype, jnp.float32)
        )
        return MemoryState(memory=memory, lengths=jnp.zeros(batch, jnp.int32))
