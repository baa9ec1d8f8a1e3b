"""Whether heads are alike: the divergence between their patterns, and the alignment of their outputs.

Raw cosines of causal patterns are high for any two heads, and so is any overlap of two diffuse ones: read the
divergence beside the entropies, or against heads of the same entropies. The same pattern is not the same output.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import xlog1py

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured, renormalize, unit_scale, visible_mask
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

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import head_similarity
    >>> itself, next_key = jnp.eye(3), jnp.roll(jnp.eye(3), 1, axis=-1)
    >>> head_similarity(jnp.stack([itself, itself, next_key])).round(3).tolist()  # 0 is the same, 1 no key in common
    [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    p = renormalize(measured("weights", weights, 3, "[*B, N, T, S]"))
    counted = choosing_rows(p, visible_mask(visible, p))

    def to_all(one: tuple[Array, Array]) -> tuple[Array, Array]:
        """Sums and counts of one head `[*B, T, S]` with each, `[*B, N]`: all pairs of rows at once would not fit."""
        row, row_counted = one
        both = counted & row_counted[..., None, :]
        rows = jnp.where(both, row_divergence(p, row[..., None, :, :]), 0.0)
        return jnp.sum(rows, axis=-1), jnp.sum(both, axis=-1)

    by_head = jnp.moveaxis(p, -3, 0), jnp.moveaxis(counted, -2, 0)
    total, count = (jnp.moveaxis(x, 0, -2) for x in jax.lax.map(to_all, by_head))
    with jax.debug_nans(False):  # a mark, not a fault
        return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(total.dtype), jnp.nan)


def linear_cka(x: Float[ArrayLike, "*b n p"], y: Float[ArrayLike, "*b n q"]) -> Float[Array, "*b"]:
    """Linear centred kernel alignment of two representations of the same items: are they one up to a rotation?

        ‖XᵀY‖_F² / (‖XᵀX‖_F ‖YᵀY‖_F)    of the centred x, y

    1: the same up to a rotation, a factor and a shift; 0: every feature of one is uncorrelated with every feature of
    the other. With few items it is high for any two: unrelated ones of p and q features reach about
    `√(p q / ((n + p) (n + q)))`.

    All pairs of heads, of their outputs `heads [N, n, V]`:

        jax.vmap(lambda x: jax.vmap(lambda y: linear_cka(x, y))(heads))(heads)

    Args:
        x: floating `[*B, n, p]`: n items (tokens), p features.
        y: floating `[*B, n, q]`: the same items.

    Returns:
        `[*B]`, float32 or better; NaN where x or y is the same for all items.

    Raises:
        ValueError: if an array has too few axes or is empty, or the items differ.
        TypeError: if an array is not floating.

    Reference: Kornblith et al. 2019, "Similarity of neural network representations revisited", equation 3.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import linear_cka
    >>> x = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])  # four items of two features
    >>> turned = 3 * x @ jnp.array([[0.6, 0.8], [-0.8, 0.6]]) + 1
    >>> unrelated = jnp.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    >>> round(float(linear_cka(x, turned)), 3), round(float(linear_cka(x, unrelated)), 3)
    (1.0, 0.0)
    """
    x, y = (measured(name, given, 2, f"[*B, n, {axis}]") for name, given, axis in (("x", x, "p"), ("y", y, "q")))
    checks.shape("y", y, (*x.shape[:-1], y.shape[-1]), "[*B, n, q], the items of x,")
    (x, x_varies), (y, y_varies) = _centred(x), _centred(y)
    together, alone_x, alone_y = (
        jnp.sum(jnp.square(jnp.swapaxes(one, -1, -2) @ other), axis=(-2, -1)) for one, other in ((x, y), (x, x), (y, y))
    )
    varies = x_varies & y_varies
    alignment = together / jnp.where(varies, jnp.sqrt(alone_x) * jnp.sqrt(alone_y), 1.0)
    with jax.debug_nans(False):  # a mark, not a fault
        return jnp.where(varies, alignment, jnp.nan)


def _centred(x: Float[Array, "*b n p"]) -> tuple[Float[Array, "*b n p"], Bool[Array, "*b"]]:
    """Items less their mean, brought near 1, and whether they differ by more than rounding."""
    scaled = unit_scale(x, 2)
    centred = scaled - jnp.mean(scaled, axis=-2, keepdims=True)
    spread, size = (jnp.max(jnp.abs(one), axis=(-2, -1)) for one in (centred, scaled))
    return unit_scale(centred, 2), spread > 4 * jnp.finfo(x.dtype).eps * size


def choosing_rows(p: Float[Array, "*b t s"], visible: Bool[Array, "*b t s"]) -> Bool[Array, "*b t"]:
    """Queries that see something, and have two keys to choose from."""
    return (jnp.sum(visible, axis=-1) >= 2) & jnp.any(p != 0, axis=-1)


def row_divergence(p: Float[Array, "*b s"], q: Float[Array, "*#b s"]) -> Float[Array, "*b"]:
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
