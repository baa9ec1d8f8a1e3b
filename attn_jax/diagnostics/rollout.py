"""Attention rollout: how much of each input token a position at the top has seen, if weights were all that mattered."""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured, renormalize
from attn_jax.typing import Array, ArrayLike, Bool, Float


def attention_rollout(weights: Float[ArrayLike, "l *b n t t"]) -> Float[Array, "*b t t"]:
    """The product of the layers' mean weights, each mixed with the residual path.

        R_l = normalise(A_l + I) R_{l−1},    R_0 = I,    A_l the mean over heads

    `normalise` divides each row by its sum, which is `(A_l + I) / 2` where rows of weights sum to 1; weights that were
    thinned out, or stand beside a sink, give the residual path the larger part. Row i says where position i of the last
    layer comes from, and sums to 1. A causal rollout drains to the first token whatever heads do, so read it beside
    `uniform_rollout`.

    Args:
        weights: `[L, *B, N, T, T]`, floating, after the softmax, first layer first.

    Returns:
        `[*B, T, T]`, float32 or better: query positions by input tokens.

    Raises:
        ValueError: if `weights` has no such shape.
        TypeError: if `weights` is not floating.

    Reference: Abnar and Zuidema 2020, "Quantifying attention flow in transformers", equation 1.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import attention_rollout
    >>> weights = jnp.array([[1.0, 0.0], [1.0, 0.0]])  # both positions attend to the first
    >>> two_layers = jnp.broadcast_to(weights, (2, 1, 2, 2))
    >>> attention_rollout(two_layers).tolist()  # each layer leaves position 1 half of what it had of itself
    [[1.0, 0.0], [0.75, 0.25]]
    """
    array = measured("weights", weights, 3, "[L, *B, N, T, T]")
    checks.minimum_rank("weights", array, 4, "[L, *B, N, T, T]")
    length = array.shape[-1]
    checks.shape("weights", array, (*array.shape[:-2], length, length), "[L, *B, N, T, T]")
    layers = jnp.mean(array, axis=-3)
    identity = jnp.broadcast_to(jnp.eye(length, dtype=array.dtype), layers.shape[1:])
    step = jax.lax.scan(lambda rollout, layer: (renormalize(layer + identity) @ rollout, None), identity, layers)
    return step[0]


def uniform_rollout(visible: Bool[ArrayLike, "*b t t"], num_layers: int) -> Float[Array, "*b t t"]:
    """The rollout of weights that are uniform over the visible keys: what `attention_rollout` owes to the mask alone.

    Args:
        visible: which keys a query may see, boolean `[*B, T, T]`; a query that sees none keeps its own.
        num_layers: L.

    Returns:
        `[*B, T, T]`, float32.

    Raises:
        ValueError: if `visible` is not square or `num_layers` not positive.
        TypeError: if `visible` is not boolean.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import uniform_rollout
    >>> causal = jnp.tri(2, dtype=bool)
    >>> [uniform_rollout(causal, num_layers)[1].tolist() for num_layers in (1, 2)]  # it drains to the first token
    [[0.25, 0.75], [0.4375, 0.5625]]
    """
    mask = checks.as_array("visible", visible)
    if mask.dtype != bool:
        raise TypeError(f"visible must be boolean, got {mask.dtype}")
    checks.minimum_rank("visible", mask, 2, "[*B, T, T]")
    num_layers = checks.positive_int("num_layers", num_layers)
    uniform = renormalize(mask.astype(jnp.float32))[..., None, :, :]
    return attention_rollout(jnp.broadcast_to(uniform, (num_layers, *uniform.shape)))
