"""Whether heads look at the same keys: divergence between their patterns.

Raw cosines of causal patterns are high for any two heads, and so is any overlap of two diffuse ones: read these numbers
beside the entropies, or against heads of the same entropies.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import xlog1py

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured, renormalize
from attn_jax.typing import Array, ArrayLike, Bool, Float


def head_similarity(
    weights: Float[ArrayLike, "*b n t s"], visible: Bool[ArrayLike, "..."] | None = None
) -> Float[Array, "*b n n"]:
    """Mean Jensen–Shannon divergence between the rows of two heads, in units of its largest value.

        JS(p, q) / ln 2,    JS(p, q) = ½ KL(p ‖ m) + ½ KL(q ‖ m),    m = (p + q) / 2

    0: the same pattern; 1: no key in common. The square root of it is a metric. The mean runs over the queries that see
    two keys or more in both heads; each head's weights are taken as `p / Σp`, that is, without a sink logit's share.

    Args:
        weights: `[*B, N, T, S]`, floating, after the softmax.
        visible: which keys a query may see, boolean `[T, S]` or broadcastable to the weights; None: all of them. A
            weight of 0 does not tell: it may have underflowed.

    Returns:
        `[*B, N, N]`, float32 or better, symmetric, 0 on the diagonal; NaN for two heads that have no such query in
        common. Queries whose row is all 0 in either head (padding, say) are left out.

    Raises:
        ValueError: if `weights` is no `[*B, N, T, S]`, or `visible` does not fit.
        TypeError: if `weights` is not floating, or `visible` not boolean.

    Reference: Lin 1991, "Divergence measures based on the Shannon entropy", equation 3.7.
    """
    p = renormalize(measured("weights", weights, 3, "[*B, N, T, S]"))
    counted = _choosing(p, visible)

    def to_all(one: tuple[Array, Array]) -> tuple[Array, Array]:
        """Sums and counts of one head `[*B, T, S]` with each, `[*B, N]`: all pairs of rows at once would not fit."""
        row, row_counted = one
        both = counted & row_counted[..., None, :]
        rows = jnp.where(both, _divergence(p, row[..., None, :, :]), 0.0)
        return jnp.sum(rows, axis=-1), jnp.sum(both, axis=-1)

    by_head = jnp.moveaxis(p, -3, 0), jnp.moveaxis(counted, -2, 0)
    total, count = (jnp.moveaxis(x, 0, -2) for x in jax.lax.map(to_all, by_head))
    with jax.debug_nans(False):  # a mark, not a fault
        return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(total.dtype), jnp.nan)


def _choosing(p: Float[Array, "*b n t s"], visible: ArrayLike | None) -> Bool[Array, "*b n t"]:
    """Queries that see something, and have two keys to choose from."""
    mask = jnp.ones((1,) * p.ndim, bool) if visible is None else checks.as_array("visible", visible)
    if mask.dtype != bool:
        raise TypeError(f"visible must be boolean, got {mask.dtype}")
    if mask.ndim < p.ndim:
        mask = mask.reshape((1,) * (p.ndim - mask.ndim) + mask.shape)
    checks.broadcastable("visible", mask, p.shape, "[*B, N, T, S]")
    keys = jnp.sum(jnp.broadcast_to(mask, p.shape), axis=-1)
    return (keys >= 2) & jnp.any(p != 0, axis=-1)


def _divergence(p: Float[Array, "*b s"], q: Float[Array, "*#b s"]) -> Float[Array, "*b"]:
    """JS(p, q) / ln 2 of each row.

    With u = |p − q| / (p + q), one key adds m ((1 + u) ln(1 + u) + (1 − u) ln(1 − u)) / 2, which is never negative: no
    large terms cancel, and nothing is added to a weight of 0.
    """
    total = p + q
    u = jnp.where(total == 0, 0.0, jnp.abs(p - q) / jnp.where(total == 0, 1.0, total))
    small = jnp.where(u < 0.5, u, 0.0)  # here the two terms nearly cancel: ≈ u²
    nearby = 2 * small * jnp.arctanh(small) + jnp.log1p(-(small**2))
    apart = (1 + u) * jnp.log1p(u) + xlog1py(1 - u, -u)
    return jnp.sum(total * jnp.where(u < 0.5, nearby, apart), axis=-1) / (4 * math.log(2))
