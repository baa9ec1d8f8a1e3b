"""The scale: what keeps the logits of a wide head from saturating the softmax.

For independent components of unit variance `Var(q·k) = H`, so `1/√H` restores variance 1. The alternatives act on
the dot product (another factor, a learned temperature), on its inputs (QK-norm) or on its result (a soft cap).
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float

RULES = ("inverse_sqrt", "none", "inverse", "inverse_sqrt_model", "half_inverse_sqrt", "half_inverse")


def scale_factor(rule: str | float, head_width: int, model_width: int | None = None) -> float:
    """The number that multiplies q·k, by name.

    | rule | factor |
    |---|---|
    | `"inverse_sqrt"` | 1/√H, the usual one |
    | `"none"` | 1 |
    | `"inverse"` | 1/H, as in muP |
    | `"inverse_sqrt_model"` | 1/√D |
    | `"half_inverse_sqrt"` | 1/(2√H) |
    | `"half_inverse"` | 1/(2H) |
    | a finite number | itself |

    Args:
      rule: one of the above.
      head_width: H.
      model_width: D, needed by `"inverse_sqrt_model"`.

    Returns:
      The factor.

    Raises:
      TypeError: a width is not an integer.
      ValueError: an unknown rule, a number that is not finite, a width below 1, or D missing where it is needed.

    Reference: Vaswani et al. 2017, section 3.2.1; 1/H: Yang et al. 2022 (muP), definition 4.1.

    >>> scale_factor("inverse_sqrt", 64), scale_factor("inverse", 64), scale_factor(0.5, 64)
    (0.125, 0.015625, 0.5)
    """
    head_width = checks.positive_int("head_width", head_width)
    if model_width is not None:
        model_width = checks.positive_int("model_width", model_width)
    if not isinstance(rule, str):
        return checks.finite_number("rule", rule)
    checks.one_of("rule", rule, RULES)
    if rule == "inverse_sqrt_model":
        if model_width is None:
            raise ValueError("model_width must be given for rule 'inverse_sqrt_model', got None")
        return 1.0 / math.sqrt(model_width)
    return {
        "inverse_sqrt": 1.0 / math.sqrt(head_width),
        "none": 1.0,
        "inverse": 1.0 / head_width,
        "half_inverse_sqrt": 0.5 / math.sqrt(head_width),
        "half_inverse": 0.5 / head_width,
    }[rule]


def temperature(
    query: Float[ArrayLike, "*b t n h"], log_temperature: Float[ArrayLike, " n"]
) -> Float[Array, "*b t n h"]:
    """A learned temperature per head: `query / exp(log_temperature)`, so that the logits are divided by it.

    Args:
      query: `[*B, T, N, H]`.
      log_temperature: `[N]`; 0 leaves the logits alone, larger is softer, and the temperature stays positive.

    Returns:
      `[*B, T, N, H]` in the query's dtype.

    Raises:
      TypeError: an argument is not a floating array.
      ValueError: `log_temperature` is not of shape `[N]`.

    >>> query = jnp.ones((1, 2, 3))  # one token, two heads
    >>> temperature(query, jnp.log(jnp.array([1.0, 2.0]))).round(4).tolist()
    [[[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]]
    """
    query = checks.floating_array("query", query)
    log_temperature = checks.floating_array("log_temperature", log_temperature)
    checks.minimum_rank("query", query, 3, "[*B, T, N, H]")
    checks.shape("log_temperature", log_temperature, query.shape[-2:-1], "[N]")
    wide = _wide(query)
    factor = jnp.exp(-log_temperature.astype(wide))
    return (query.astype(wide) * factor.reshape((1,) * (query.ndim - 2) + (-1, 1))).astype(query.dtype)


def rms_norm(
    x: Float[ArrayLike, "*b t n h"], weight: Float[ArrayLike, " h_or_nh"] | None = None, *, epsilon: float = 1e-6
) -> Float[Array, "*b t n h"]:
    """Root-mean-square norm, as QK-norm over each head: `x / √(mean(x²) + ε) · weight`.

    A weight of `N*H` entries says that the norm runs over all heads at once, as some checkpoints were trained; for
    keys that is `K*H`, their own width.

    Args:
      x: `[*B, T, N, H]`.
      weight: `[H]`, or `[N*H]` for one norm over all heads, or None for no weight.
      epsilon: ε, not negative. A zero vector stays zero, with finite gradients, for ε = 0 too.

    Returns:
      The shape and dtype of x, computed in float32 or better; right at every finite size of x.

    Raises:
      TypeError: an argument is not a floating array.
      ValueError: the weight has neither H nor N*H entries, or ε is negative.

    Reference: Zhang & Sennrich 2019, equation 4; on queries and keys: Henry et al. 2020, Dehghani et al. 2023.

    >>> x = jnp.array([[[5.0, -5.0]]])
    >>> rms_norm(x).round(4).tolist(), rms_norm(x, jnp.array([1.0, 2.0])).round(4).tolist()
    ([[[1.0, -1.0]]], [[[1.0, -2.0]]])
    """
    x = checks.floating_array("x", x)
    checks.minimum_rank("x", x, 2, "[*B, T, N, H]")
    axes: tuple[int, ...] = (-1,)
    if weight is not None:
        weight = checks.floating_array("weight", weight)
        if weight.shape == (x.shape[-2] * x.shape[-1],) and x.shape[-2] > 1:
            axes = (-2, -1)
        elif weight.shape != x.shape[-1:]:
            raise ValueError(
                f"weight must have shape [H] = ({x.shape[-1]},) or [N*H] = ({x.shape[-2] * x.shape[-1]},) "
                f"for x {x.shape}, got {weight.shape}"
            )
    wide = x.astype(_wide(x))
    y = _normed(wide, jnp.mean, axes, epsilon)
    if weight is not None:
        normed_axes = x.shape[-len(axes) :]
        y = y * weight.astype(wide.dtype).reshape((1,) * (x.ndim - len(axes)) + normed_axes)
    return y.astype(x.dtype)


def l2_norm(x: Float[ArrayLike, "*b t n h"], *, epsilon: float = 1e-6) -> Float[Array, "*b t n h"]:
    """Unit length over the last axis, so that q·k is a cosine: `x / √(Σ x² + ε)`.

    Args:
      x: `[*B, T, N, H]`.
      epsilon: ε, not negative. A zero vector stays zero, with finite gradients, for ε = 0 too.

    Returns:
      The shape and dtype of x, computed in float32 or better; right at every finite size of x.

    Raises:
      TypeError: x is not a floating array.
      ValueError: ε is negative.

    Reference: Henry et al. 2020 (query-key normalization).

    >>> unit = l2_norm(jnp.array([[3.0, 4.0], [0.0, 0.0]]))
    >>> bool(jnp.allclose(unit, jnp.array([[0.6, 0.8], [0.0, 0.0]])))
    True
    """
    x = checks.floating_array("x", x)
    checks.minimum_rank("x", x, 1, "[*B, T, N, H]")
    return _normed(x.astype(_wide(x)), jnp.sum, (-1,), epsilon).astype(x.dtype)


def soft_cap(logits: Float[ArrayLike, "*s"], cap: float | None) -> Float[Array, "*s"]:
    """Bounds the logits smoothly: `cap · tanh(logits / cap)`, near the identity far below the cap.

    It comes before the mask: a capped `-inf` would be `-cap`, and a masked key would keep weight.

    Args:
      logits: any shape.
      cap: positive and finite; None leaves the logits as they are.

    Returns:
      The shape and dtype of the logits, computed in float32 or better.

    Raises:
      TypeError: the logits are not a floating array, or the cap is not a number.
      ValueError: the cap is not positive, not finite, or too small for float32.

    Reference: Gemma Team 2024 (Gemma 2), section 2.

    >>> soft_cap(jnp.array([1.0, 10.0, 1e6]), 8.0).round().tolist()
    [1.0, 7.0, 8.0]
    """
    logits = checks.floating_array("logits", logits)
    if cap is None:
        return logits
    cap = check_cap("cap", cap)
    if cap > 1e30:  # the identity to the last digit, where `logits / cap` would underflow
        return logits
    wide = logits.astype(_wide(logits))
    return (cap * jnp.tanh(wide / cap)).astype(logits.dtype)


def check_cap(name: str, cap: float) -> float:
    """`cap` as a positive and finite number that float32 can hold."""
    return checks.finite_number(name, cap, positive=True, least=float(jnp.finfo(jnp.float32).tiny))


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _normed(x: Array, total: Callable[..., Array], axes: tuple[int, ...], epsilon: float) -> Array:
    """`x / √(total(x²) + ε)`, and 0 where that root is 0: neither the value nor the gradient of a zero vector is NaN.

    A power of two near the larger of |x| and √ε is taken out first. It changes no digit, and squares then neither
    overflow nor vanish.
    """
    root = math.sqrt(checks.finite_number("epsilon", epsilon, least=0.0))
    largest = jnp.max(jnp.abs(lax.stop_gradient(x)), axis=axes, keepdims=True, initial=root)
    limits = jnp.finfo(x.dtype)  # a quarter of the largest number, so that the inverse is a normal number too
    unit = lax.reduce_precision(jnp.clip(largest, limits.tiny, limits.max / 4), limits.nexp, 0)  # no mantissa is left
    y = x / unit
    square = total(jnp.square(y), axis=axes, keepdims=True) + jnp.square(root / unit)
    positive = square > 0
    return y * jnp.where(positive, lax.rsqrt(jnp.where(positive, square, 1.0)), 0.0)
