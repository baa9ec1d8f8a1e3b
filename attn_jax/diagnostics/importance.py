"""How much a loss hangs on each head: its gradient with respect to a gate on the head's output.

A gate multiplies what a head brings, before the output projection; at 1 the model is as it is. `loss(gates, example)`
says what the loss of an example is with such gates: of a `Transformer` it is built with the intervention
`attn_jax.nn.interventions.gate_heads`, of any other model in whatever way it has.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, measured, root
from attn_jax.typing import Array, ArrayLike, Float

Loss = Callable[[Array, Any], Array]


def gate_gradients(loss: Loss, gates: Float[ArrayLike, "*g"], examples: Any) -> Float[Array, "e *g"]:
    """`∂L_x/∂gate` of every example x, one example after the other.

    Args:
        loss: `loss(gates, example)`, a scalar: of the tokens of one example that count, so that neither its padding nor
            the rest of the batch takes part.
        gates: floating `[L, N]` or of any shape, where the gradient is taken; usually ones.
        examples: a pytree with leaves `[E, ...]`; `example` is the same without the first axis.

    Returns:
        `[E, L, N]`, float32 or better, with signs.

    Raises:
        ValueError: if there is no example, leaves differ in E, or the loss is not a scalar.
        TypeError: if `gates` is not floating or `loss` not a function.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import gate_gradients
    >>> loss = lambda gates, example: jnp.sum(gates * example)  # what each head brings to the loss
    >>> gate_gradients(loss, jnp.ones(2), jnp.array([[2.0, 0.0], [-2.0, 1.0]])).tolist()
    [[2.0, 0.0], [-2.0, 1.0]]
    """
    gates = measured("gates", gates, 0, "[L, N]")
    _check_examples(examples)
    if not callable(loss):
        raise TypeError(f"loss must be a function of gates and an example, got {loss!r}")

    def scalar(gates: Array, example: Any) -> Array:
        value = jnp.asarray(loss(gates, example))
        checks.rank("the result of loss", value, 0, "[]: one number for one example")
        return value

    return jax.lax.map(lambda example: jax.grad(scalar)(gates, example), examples)


def head_importance(
    loss: Loss, gates: Float[ArrayLike, "*g"], examples: Any, *, normalize: bool = False
) -> Float[Array, "*g"]:
    """How much the loss hangs on each head, to first order.

        I_n = mean over examples x of |∂L_x/∂gate_n|

    The absolute value is taken of each example: signs that differ between examples do not cancel. A first-order number
    may miss a head that matters, or find one that others replace: removing the head confirms it.

    Every call traces the loss anew; `jax.jit(functools.partial(head_importance, loss))` keeps the trace.

    Args:
        loss: `loss(gates, example)`, a scalar, as for `gate_gradients`.
        gates: floating `[L, N]`, usually ones.
        examples: a pytree with leaves `[E, ...]`.
        normalize: whether each layer, the last axis of `gates`, is divided by its l2 norm, as the paper does to compare
            heads of different layers. A layer of zeros stays 0.

    Returns:
        `[L, N]`, float32 or better, at least 0.

    Raises:
        ValueError, TypeError: as `gate_gradients`.

    Reference: Michel et al. 2019, "Are sixteen heads really better than one?", equation 2.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import head_importance
    >>> loss = lambda gates, example: jnp.sum(gates * example)  # what each head brings to the loss
    >>> head_importance(loss, jnp.ones(2), jnp.array([[2.0, 0.0], [-2.0, 1.0]])).tolist()  # 2 and -2 do not cancel
    [2.0, 0.5]
    """
    importance = jnp.mean(jnp.abs(gate_gradients(loss, gates, examples)), axis=0)
    if not checks.boolean("normalize", normalize):
        return importance
    checks.minimum_rank("gates", importance, 1, "[L, N]")
    return divide(importance, root(jnp.sum(importance**2, axis=-1, keepdims=True)))


def _check_examples(examples: Any) -> None:
    """Raises unless all leaves have the same number of examples, one or more."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(examples)]
    if not shapes or not all(shape and shape[0] == shapes[0][0] > 0 for shape in shapes):
        raise ValueError(f"examples must have leaves [E, ...] of one E >= 1, got shapes {shapes}")
