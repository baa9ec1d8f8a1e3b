"""The two-layer perceptron of a transformer block, applied to every position alone."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import ArrayLike, Float

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """A gated or a plain perceptron.

    kind "gated": `(act(x gate) * (x up)) down`; "plain": `act(x up) down`.

    Parameters, with F the inner width: `gate_weight` (gated), `up_weight` `[D, F]`, `down_weight` `[F, D]`, by
    `kernel_init`, LeCun by default; `gate_bias`, `up_bias` `[F]`, `down_bias` `[D]` at 0 if `use_bias`.

    Args:
        model_width: D.
        inner_width: F; None: 4 D.
        kind: "gated" or "plain".
        activation: "silu", "gelu" (exact), "gelu_tanh" or "relu".
        use_bias: whether there are biases.
        dtype: of the computation; None: the one that input and parameters promote to.
        param_dtype: of the parameters.
        precision: of the matrix products.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`.
        rngs: the stream `params` draws the weights.

    Raises:
        ValueError, TypeError: on a width, kind or activation that is none.

    Reference: Shazeer 2020, equation 6 (gated).

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn import MLP
    >>> mlp = MLP(1, 2, kind="plain", activation="relu", kernel_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))
    >>> mlp(jnp.array([[-3.0], [3.0]]))[:, 0].tolist()  # with weights of 1, twice relu(x)
    [0.0, 6.0]
    """

    def __init__(
        self,
        model_width: int,
        inner_width: int | None = None,
        *,
        kind: str = "gated",
        activation: str = "silu",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        checks.one_of("kind", kind, ("gated", "plain"))
        checks.one_of("activation", activation, tuple(ACTIVATIONS))
        self.model_width = width = checks.positive_int("model_width", model_width)
        inner = 4 * width if inner_width is None else checks.positive_int("inner_width", inner_width)
        self.activation = activation
        # With one batch axis: on CPUs XLA is slow at the gradient of products over several. But tokens that are spread
        # over devices along two axes would be gathered for it.
        self.joins_tokens = True
        self.dtype = None if dtype is None else parameters.floating_name("dtype", dtype)
        self.precision = precision
        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        bias = functools.partial(parameters.constant, 0.0, dtype=param_dtype)
        with_bias = checks.boolean("use_bias", use_bias)
        gated = kind == "gated"

        self.gate_weight = parameters.weight(rngs, kernel_init, (width,), (inner,), param_dtype) if gated else None
        self.up_weight = parameters.weight(rngs, kernel_init, (width,), (inner,), param_dtype)
        self.down_weight = parameters.weight(rngs, kernel_init, (inner,), (width,), param_dtype)
        self.gate_bias = bias((inner,)) if gated and with_bias else None
        self.up_bias = bias((inner,)) if with_bias else None
        self.down_bias = bias((width,)) if with_bias else None

    def __call__(self, x: Float[ArrayLike, "*b d"]) -> Float[jax.Array, "*b d"]:
        """The perceptron of `x` `[..., D]`, of the same shape."""
        x = checks.floating_array("x", x)
        parameters.check_width("x", x, self.model_width)
        activation = ACTIVATIONS[self.activation]
        shape = x.shape
        if self.joins_tokens:
            x = x.reshape(math.prod(x.shape[:-1]), self.model_width)
        if self.gate_weight is None:
            inner = activation(self._linear(x, self.up_weight, self.up_bias))
        else:
            gate, up = (
                self._linear(x, *pair) for pair in ((self.gate_weight, self.gate_bias), (self.up_weight, self.up_bias))
            )
            # Redone in the backward pass, which keeps two arrays of the inner width instead of five.
            inner = jax.checkpoint(lambda gate, up: activation(gate) * up, prevent_cse=False)(gate, up)
        return self._linear(inner, self.down_weight, self.down_bias).reshape(shape)

    def _linear(self, x: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        """`x weight + bias`, summed in float32 or better and rounded once."""
        x, matrix, offset = parameters.values(x, weight, bias, dtype=self.dtype)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        product = jnp.matmul(x, matrix, precision=self.precision, preferred_element_type=wide)
        if offset is not None:
            product = product + offset.reshape((1,) * (product.ndim - 1) + offset.shape)
        return product.astype(x.dtype)
