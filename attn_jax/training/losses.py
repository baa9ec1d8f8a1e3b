"""What a model of tokens is trained on and judged by: cross-entropy, z-loss, accuracy, bits.

Every function takes logits `[*B, C]` over C classes, targets `[*B]` and weights `[*B]`: a position of weight 0
(padding, a token that nobody is asked about) reaches neither value nor gradient, whatever stands there. Means come with
the sum of their weights, so that means of batches combine to the mean of all: `Σ mean · count / Σ count`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int, Num


def token_losses(
    logits: Float[ArrayLike, "*b c"],
    targets: Int[ArrayLike, "*b"],
    weights: Num[ArrayLike, "*b"] | Bool[ArrayLike, "*b"] | None = None,
    *,
    z_loss: float = 0.0,
) -> Float[Array, "*b"]:
    """The cross-entropy of each position, and 0 where the weight is 0.

        ℓ = lse(s) − s_y + z lse(s)²,   lse(s) = ln Σ_c exp(s_c)

    Args:
        logits: s, floating `[*B, C]`. `-inf` is a class that cannot be.
        targets: y, integer `[*B]`, each in 0..C-1 wherever the weight is not 0.
        weights: finite numbers of at least 0, or booleans, `[*B]`; None weighs every position by 1. Only whether a
            weight is 0 matters here.
        z_loss: z, at least 0; a little of it (1e-4) holds the normaliser `exp(lse)` near 1.

    Returns:
        Nats, `[*B]`, float32 or better. Under `jit`, where values cannot be checked, a target outside 0..C-1 gives NaN.

    Raises:
        ValueError: on shapes that do not fit, no classes, or a target or weight outside its range.
        TypeError: on logits that are not floating, or targets that are not integers.

    Reference: Chowdhery et al. 2022 (PaLM), section 5, for z-loss.
    """
    coefficient = checks.finite_number("z_loss", z_loss, least=0.0)
    s, y, _ = _prepare(logits, targets, weights)
    # ℓ does not depend on the maximum, so no gradient flows through it. Large logits keep their digits: s − max is
    # exact for those near the maximum, lse − s_y would cancel.
    largest = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    shifted = s - largest
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    losses = log_total - jnp.take_along_axis(shifted, y[..., None], axis=-1)[..., 0]
    if coefficient:
        losses += coefficient * (log_total + largest[..., 0]) ** 2
    losses = jnp.where((y >= 0) & (y < s.shape[-1]), losses, jnp.nan)
    return losses if weights is None else jnp.where(jnp.asarray(weights) != 0, losses, 0.0)


def cross_entropy(
    logits: Float[ArrayLike, "*b c"],
    targets: Int[ArrayLike, "*b"],
    weights: Num[ArrayLike, "*b"] | Bool[ArrayLike, "*b"] | None = None,
    *,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted mean of `token_losses`, `Σ w ℓ / Σ w`, and `Σ w`.

    The gradient at the logits is `w / Σw · (p − e_y + 2 z lse · p)`, p = softmax(s), e_y = 1 at the target.

    Args:
        logits, targets, weights, z_loss: as in `token_losses`.

    Returns:
        `(mean, count)`: nats, and the sum of the weights, which is the number of positions where they are 0 and 1.
        Both are 0, and so is the gradient, where every weight is 0.

    Raises:
        ValueError, TypeError: as `token_losses`.
    """
    return _mean(token_losses(logits, targets, weights, z_loss=z_loss), weights)


def accuracy(
    logits: Float[ArrayLike, "*b c"],
    targets: Int[ArrayLike, "*b"],
    weights: Num[ArrayLike, "*b"] | Bool[ArrayLike, "*b"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The weighted share of positions whose largest logit is the target's, and `Σ w`.

    Of equal logits the first counts as the largest. A row with a NaN is wrong.

    Args:
        logits, targets, weights: as in `token_losses`.

    Returns:
        `(mean, count)`, float32 or better; both 0 where every weight is 0.

    Raises:
        ValueError, TypeError: as `token_losses`.
    """
    s, y, _ = _prepare(logits, targets, weights)
    right = (jnp.argmax(s, axis=-1) == y) & ~jnp.isnan(s).any(axis=-1)  # argmax would point at the NaN
    return _mean(right.astype(s.dtype), weights)


def bits_per_token(nats: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
    """A cross-entropy in bits, `nats / ln 2`: what one token costs a perfect compressor. Without z-loss only.

    Args:
        nats: floating, of any shape.

    Returns:
        Of the same shape, float32 or better.

    Raises:
        TypeError: if `nats` is not floating.
    """
    nats = checks.floating_array("nats", nats)
    return nats.astype(jnp.promote_types(nats.dtype, jnp.float32)) / math.log(2)


def _prepare(logits: ArrayLike, targets: ArrayLike, weights: ArrayLike | None) -> tuple[Array, Array, Array]:
    """Checked logits in float32 or better, targets and weights, with harmless numbers where the weight is 0."""
    s = checks.floating_array("logits", logits)
    checks.minimum_rank("logits", s, 1, "[*B, C]")
    if s.shape[-1] == 0:
        raise ValueError(f"logits must have at least one class, [*B, C]; got shape {s.shape}")
    s = s.astype(jnp.promote_types(s.dtype, jnp.float32))
    y = checks.wide_integers("targets", targets)
    checks.shape("targets", y, s.shape[:-1], "[*B]")
    w = _checked_weights(weights, s)
    used = w != 0
    y = jnp.where(used, y, 0)
    checks.within("targets", y, 0, s.shape[-1] - 1)
    return jnp.where(used[..., None], s, 0.0), y, w


def _checked_weights(weights: ArrayLike | None, s: Array) -> Array:
    if weights is None:
        return jnp.ones(s.shape[:-1], s.dtype)
    w = checks.as_array("weights", weights)
    if jnp.issubdtype(w.dtype, jnp.complexfloating):
        raise TypeError(f"weights must be real, got {w.dtype}")
    checks.shape("weights", w, s.shape[:-1], "[*B]")
    if checks.is_concrete(w):
        values = np.asarray(w.astype(jnp.float32))
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"weights must be finite and at least 0, got values in {values.min()}..{values.max()}")
    return w.astype(s.dtype)


def _mean(x: Array, weights: ArrayLike | None) -> tuple[Array, Array]:
    w = jnp.ones(x.shape, x.dtype) if weights is None else jnp.asarray(weights).astype(x.dtype)
    count = jnp.sum(w)
    return jnp.sum(w * x) / jnp.where(count == 0, 1.0, count), count
