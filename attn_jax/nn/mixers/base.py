"""What all mixers share: the checks, padding, and how a sequence is continued.

A mixer stands where attention stands in a block: it maps `[*B, T, D]` to `[*B, T, D]` and is all that carries something
from one token to another. Each is a module of its own parameters, made of pure functions.

    mixer(x, lengths=lengths)                       all tokens at once
    output, state = mixer.extend(x, state)          tokens that continue those that `state` has seen

A state has one size, however long the sequence; any cutting of a sequence into calls gives what one call gives.
"""

import dataclasses
import math
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.nn import padding, parameters
from attn_jax.typing import Array, ArrayLike, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerState:
    """What every state has; those of the mixers are registered as pytrees.

    Attributes:
        lengths: int32 `[*B]`, tokens seen so far.
    """

    lengths: Int[Array, "*b"]


State = TypeVar("State", bound=MixerState)


class Mixer(nnx.Module, Generic[State]):
    """The protocol, and what is done for every mixer. A mixer has `_mix`, and `_empty` if it can be causal.

    Rows of `x` past their item's length are not read. What comes out there is finite and means nothing.

    Args:
        model_width: D.
        is_causal: whether a token sees no later one; `empty_state` and `extend` need it.
        dtype: of the computation; None: the one that input and parameters promote to.
        precision: of the matrix products.

    Raises:
        ValueError, TypeError: on a size, choice or dtype that is none.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn.mixers import Convolution
    >>> mixer = Convolution(2, width=3, is_causal=True, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (1, 4, 2))
    >>> first, state = mixer.extend(x[:, :2], mixer.empty_state(1))
    >>> second, state = mixer.extend(x[:, 2:], state)
    >>> bool(jnp.allclose(jnp.concatenate([first, second], axis=1), mixer(x), atol=1e-5)), state.lengths.tolist()
    (True, [4])
    """

    state_type: ClassVar[type[MixerState]]

    def __init__(self, model_width: int, *, is_causal: bool, dtype: DTypeLike | None, precision: Any) -> None:
        self.model_width = checks.positive_int("model_width", model_width)
        self.is_causal = checks.boolean("is_causal", is_causal)
        self.dtype = None if dtype is None else parameters.floating_name("dtype", dtype)
        self.precision = precision

    def __call__(
        self, x: Float[ArrayLike, "*b t d"], *, lengths: Int[ArrayLike, "*b"] | None = None
    ) -> Float[jax.Array, "*b t d"]:
        """The tokens of `x`, mixed.

        Args:
            x: `[*B, T, D]`.
            lengths: int `[*B]`, rows of `x` that count; None: all.

        Returns:
            `[*B, T, D]`.

        Raises:
            ValueError, TypeError: on an argument of a wrong shape, dtype or value.
        """
        return self._mix(*self._check(x, lengths), None)[0]

    def empty_state(self, batch: int | tuple[int, ...], *, dtype: DTypeLike = "float32") -> State:
        """What `extend` begins with: the state before any token.

        Args:
            batch: B, or the batch axes.
            dtype: of tokens that are kept; what is summed up is float32 or better.

        Raises:
            ValueError, TypeError: on a mixer that is not causal, and on sizes or a dtype that are none.
        """
        self._check_causal("empty_state")
        batch = batch if isinstance(batch, (tuple, list)) else (batch,)
        sizes = tuple(checks.positive_int("batch", size) for size in batch)
        return self._empty(sizes, jnp.dtype(parameters.floating_name("dtype", dtype)))

    def extend(
        self, x: Float[ArrayLike, "*b t d"], state: State, *, lengths: Int[ArrayLike, "*b"] | None = None
    ) -> tuple[Float[jax.Array, "*b t d"], State]:
        """The tokens of `x`, which continue those that `state` has seen, and the state after them.

        Args:
            x: `[*B, T, D]`.
            state: of `empty_state`, or what `extend` returned.
            lengths: int `[*B]`, rows of `x` that count; the others change nothing. None: all.

        Returns:
            `(output [*B, T, D], state)`, the state of the same structure, shapes and dtypes.

        Raises:
            ValueError, TypeError: on an argument of a wrong shape, dtype or value, or a mixer that is not causal.
        """
        self._check_causal("extend")
        x, lengths = self._check(x, lengths)
        if not isinstance(state, self.state_type):
            name = self.state_type.__name__
            raise TypeError(f"state must be a {name}, as empty_state makes it, got {type(state).__name__}")
        checks.shape("state.lengths", state.lengths, x.shape[:-2], "[*B] of x")
        output, changes = self._mix(x, lengths, state)
        # Whatever it was computed in, what is kept has the dtype that it began with.
        changes = {
            name: jax.tree.map(lambda new, old: new.astype(old.dtype), new, getattr(state, name))
            for name, new in changes.items()
        }
        added = jnp.asarray(x.shape[-2] if lengths is None else lengths, jnp.int32)
        return output, dataclasses.replace(state, lengths=state.lengths + added, **changes)

    def _mix(self, x: Array, lengths: Array | None, state: State | None) -> tuple[Array, dict[str, Any]]:
        """The output, and what `x` changes of the state if one came (but for its `lengths`). Padding of `x` is 0."""
        raise NotImplementedError(f"{type(self).__name__} must define _mix(x, lengths, state)")

    def _empty(self, batch: tuple[int, ...], dtype: DTypeLike) -> State:
        """The state before any token."""
        raise NotImplementedError(f"{type(self).__name__} must define _empty(batch, dtype)")

    def _linear(self, x: Array, weight: nnx.Param, bias: nnx.Param | None, *, inputs: int = 1) -> Array:
        """`x weight + bias` over the last `inputs` axes of `x` and the first of the weight, rounded once."""
        x, weights, offset = parameters.values(x, weight, bias, dtype=self.dtype)
        batch, outputs = x.shape[: x.ndim - inputs], weights.shape[inputs:]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # With one batch axis: on CPUs XLA is slow at the gradient of products over several.
        rows = x.reshape(math.prod(batch), math.prod(weights.shape[:inputs]))
        matrix = weights.reshape(rows.shape[-1], math.prod(outputs))
        product = jnp.matmul(rows, matrix, precision=self.precision, preferred_element_type=wide)
        if offset is not None:
            product = product + offset.reshape(1, -1)
        return product.astype(x.dtype).reshape(batch + outputs)

    def _check(self, x: ArrayLike, lengths: ArrayLike | None) -> tuple[Array, Array | None]:
        x = checks.floating_array("x", x)
        checks.minimum_rank("x", x, 2, "[*B, T, D]")
        parameters.check_width("x", x, self.model_width)
        if lengths is not None:
            lengths = padding.check_lengths("lengths", lengths, x.shape[:-2], x.shape[-2], None)
        return padding.without_padding(x, lengths), lengths

    def _check_causal(self, name: str) -> None:
        if not self.is_causal:
            raise ValueError(f"{name} needs is_causal=True: tokens that were seen have not seen those that follow")


def causal_only(name: str, is_causal: bool) -> None:
    """Raises unless `is_causal`: the mixer `name` reads in one direction."""
    if not checks.boolean("is_causal", is_causal):
        raise ValueError(f"is_causal must be True for {name}, which reads its sequence in one direction, got False")
