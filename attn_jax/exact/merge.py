"""Attention over a set of keys from attention over its parts.

Each part is a softmax over its own keys. Its log-sum-exp says what the part weighs among the others, so the whole is
the mean of the parts by `exp(logsumexp)`: the step of the online softmax, between calls.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float


def merge_attention(
    outputs: Sequence[Float[ArrayLike, "*b t n v"]],
    logsumexps: Sequence[Float[ArrayLike, "*b t n"]],
    *,
    sinks: Float[ArrayLike, " n"] | None = None,
) -> tuple[Float[Array, "*b t n v"], Float[Array, "*b t n"]]:
    """The attention of equal queries over the union of disjoint sets of keys.

        output = Σ_i exp(lse_i) · output_i / (Σ_i exp(lse_i) + exp(sink)),   lse = ln Σ_i exp(lse_i)

    Args:
        outputs: one `[*B, T, N, V]` per set of keys, none with sinks.
        logsumexps: one `[*B, T, N]` per set, `-inf` where a query sees none of its keys.
        sinks: `[N]`, which join the denominator here, once.

    Returns:
        Output `[*B, T, N, V]` in the dtype of the first, 0 where nothing is seen; its log-sum-exp `[*B, T, N]`,
        without the sinks.

    Raises:
        ValueError: on shapes that differ, or no parts.

    Reference: Milakov & Gimelshein 2018, section 3.1.

    >>> output, logsumexp = merge_attention([jnp.ones((1, 1, 1)), jnp.zeros((1, 1, 1))], [jnp.zeros((1, 1))] * 2)
    >>> output.item(), round(logsumexp.item(), 4)
    (0.5, 0.6931)
    """
    outputs = [checks.floating_array("outputs", x) for x in outputs]
    logsumexps = [checks.floating_array("logsumexps", x) for x in logsumexps]
    if not outputs or len(outputs) != len(logsumexps):
        raise ValueError(f"outputs must have one logsumexps each, got {len(outputs)} and {len(logsumexps)}")
    for output, logsumexp in zip(outputs, logsumexps, strict=True):
        checks.shape("outputs", output, outputs[0].shape, "[*B, T, N, V]")
        checks.shape("logsumexps", logsumexp, outputs[0].shape[:-1], "[*B, T, N]")
    largest = functools.reduce(jnp.maximum, logsumexps)
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
    weights = [jnp.exp(logsumexp - shift) for logsumexp in logsumexps]
    total = functools.reduce(jnp.add, weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    logsumexp = jnp.log(total) + shift
    if sinks is not None:
        sinks = checks.floating_array("sinks", sinks)
        checks.shape("sinks", sinks, total.shape[-1:], "[N]")
        # e^lse / (e^lse + e^sink), by a logarithm: a large sink does not overflow
        sinks = sinks.astype(total.dtype).reshape((1,) * (total.ndim - 1) + (-1,))
        weights = [weight * jnp.exp(-jax.nn.softplus(sinks - logsumexp)) for weight in weights]
    shares = jnp.stack([weight / total for weight in weights], axis=-1)
    # A product and not a sum: XLA would compute a sum again for every row of a product that follows.
    stacked = jnp.stack(outputs, axis=-2).astype(total.dtype)
    output = jnp.einsum("...p,...pv->...v", shares, stacked, precision="highest")
    return output.astype(outputs[0].dtype), jnp.where(empty, -jnp.inf, logsumexp)
