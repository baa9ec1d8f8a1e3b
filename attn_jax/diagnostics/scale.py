"""Which scale an attention function really applies to q·k, read off its output.

A small standard deviation of the logits does not say: it may only be a small initialiser. Fitting the one number that
turns queries, keys and values into the output does.
"""

import dataclasses
import math
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.biases import Bias
from attn_jax.diagnostics.numerics import divide, measured
from attn_jax.exact import dot_product_attention
from attn_jax.exact.arguments import AttentionOptions
from attn_jax.masks import Mask
from attn_jax.scaling import scale_factor
from attn_jax.typing import Array, ArrayLike, Float

LOWEST, HIGHEST = 1e-6, 1e2  # 1/H² is 1e-6 at H = 1000
POINTS = 65  # eight for each factor of ten
STEPS = 28  # golden sections: each leaves 0.618 of the bracket
GOLDEN = (math.sqrt(5) - 1) / 2


@overload
def effective_scale(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike,
    bias: Bias | ArrayLike | None = None, mask: Mask | ArrayLike | None = None, *,
    return_misfit: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Array: ...  # fmt: skip


@overload
def effective_scale(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, output: ArrayLike,
    bias: Bias | ArrayLike | None = None, mask: Mask | ArrayLike | None = None, *,
    return_misfit: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


def effective_scale(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    output: Float[ArrayLike, "*b t n v"],
    bias: Bias | ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    return_misfit: bool = False,
    **options: Unpack[AttentionOptions],
) -> Array | tuple[Array, Array]:
    """The scale c of each head that best explains its output, `argmin_c ‖softmax(c·qkᵀ + bias) v − o‖`.

    The misfit may have several minima, so c is first looked for on a logarithmic grid from 1e-6 to 100, then refined
    by golden sections around the best point: to 1e-5 for a float32 output of this very form, less finely where nearly
    all its rows are one-hot or uniform, and as far as its rounding allows for a half-precision one.

    Args:
        query: `[*B, T, N, H]`, as it enters the dot product (after rotary positions and normalisation).
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        output: `[*B, T, N, V]`, what the attention function under test returned, before the output projection.
        bias, mask: as of `dot_product_attention`.
        return_misfit: also return how much of the output the best c leaves unexplained.
        **options: the other options of `dot_product_attention` (`is_causal=True`, a window, lengths, ...), not `scale`.

    Returns:
        c, `[N]`, float32 or better; with `return_misfit` also `‖softmax(c·qkᵀ)v − o‖ / ‖o‖`, `[N]`: near the rounding
        of the output when the function is attention with these options, near 1 when it is something else, and
        then c means nothing. c is NaN where the output does not depend on it: one visible key per query, equal scores
        or equal values. A c at either end of the grid says uniform weights, or one-hot ones.

    Raises:
        ValueError: if a shape does not fit, or `scale` is given.
        TypeError: if an array is not floating.

    >>> import jax
    >>> from attn_jax import dot_product_attention
    >>> from attn_jax.diagnostics import effective_scale
    >>> x = jax.random.normal(jax.random.key(0), (6, 1, 4))
    >>> output = dot_product_attention(x, x, x, scale=1.0)  # the division by √H was forgotten
    >>> effective_scale(x, x, x, output).round(2).tolist()
    [1.0]
    """
    for fitted in ("scale", "return_residual", "dropout_rate", "dropout_rng"):
        if fitted in options:
            raise ValueError(f"{fitted} is not an option here: the scale is fitted to a given output")
    checks.boolean("return_misfit", return_misfit)
    named = {"query": query, "key": key, "value": value, "output": output}
    arrays = {name: measured(name, x, 3, f"[*B, {axes}]") for (name, x), axes in zip(named.items(), _AXES, strict=True)}
    dtype = jnp.result_type(*arrays.values())
    q, k, v, o = (x.astype(dtype) for x in arrays.values())
    checks.shape("output", o, (*q.shape[:-1], v.shape[-1]), "[*B, T, N, V]")
    exact: AttentionOptions = {"precision": jax.lax.Precision.HIGHEST, **options}
    per_head = tuple(axis for axis in range(o.ndim) if axis != o.ndim - 2)

    def misfit(log_scale: Float[Array, " n"]) -> Float[Array, " n"]:
        fit = dot_product_attention(q, k, v, bias, mask, **{**exact, "scale": jnp.exp(log_scale)})
        return jnp.sum((fit - o) ** 2, axis=per_head)

    grid = jnp.linspace(math.log(LOWEST), math.log(HIGHEST), POINTS, dtype=dtype)
    misfits = jax.lax.map(lambda point: misfit(jnp.broadcast_to(point, o.shape[-2:-1])), grid)  # [points, N]
    best = jnp.argmin(misfits, axis=0)

    def narrow(_: Array | int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        lower_half = misfit(left) < misfit(right)
        return jnp.where(lower_half, low, left), jnp.where(lower_half, right, high)

    bracket = grid[jnp.maximum(best - 1, 0)], grid[jnp.minimum(best + 1, POINTS - 1)]
    low, high = jax.lax.fori_loop(0, STEPS, narrow, bracket)
    fitted_log = (low + high) / 2
    energy = jnp.sum(o**2, axis=per_head)
    rounding = 64 * float(jnp.finfo(dtype).eps)
    identified = jnp.max(misfits, axis=0) - jnp.min(misfits, axis=0) > rounding**2 * energy
    scale = jnp.where(identified, jnp.exp(fitted_log), jnp.nan)
    if not return_misfit:
        return scale
    return scale, jnp.sqrt(divide(misfit(fitted_log), energy))


_AXES = ("T, N, H", "S, K, H", "S, K, V", "T, N, V")


@dataclasses.dataclass(frozen=True)
class NamedScale:
    """The named scale nearest to a fitted one.

    Attributes:
        rule: "inverse_sqrt", "none", ..., as in `scaling.scale_factor`, or "inverse_square" for 1/H².
        factor: what that rule gives at these widths.
        ratio: the fitted scale over `factor`; 1 when they agree.
        also: other rules that give the same factor at these widths, such as 1/√D = 1/H at D = H².

    >>> from attn_jax.diagnostics import name_scale
    >>> found = name_scale(0.125, head_width=64, model_width=4096)
    >>> found.rule, found.factor, found.ratio
    ('inverse_sqrt', 0.125, 1.0)
    >>> name_scale(1 / 64, head_width=64, model_width=4096).also  # widths at which 1/H is 1/√D
    ('inverse_sqrt_model',)
    """

    rule: str
    factor: float
    ratio: float
    also: tuple[str, ...] = ()


def name_scale(c: float | ArrayLike, head_width: int, model_width: int | None = None) -> NamedScale:
    """The rule whose factor is nearest to c on a logarithmic scale.

    Args:
        c: one positive number, such as an entry of what `effective_scale` returns.
        head_width: H.
        model_width: D; without it 1/√D is not among the candidates.

    Returns:
        The rule, its factor and the ratio `c / factor`. Where rules agree the more usual one is named first.

    Raises:
        ValueError: if c is not positive and finite, or a width is below 1.
        TypeError: if c is not a number, or a width not an integer.

    >>> name_scale(0.12, head_width=64).rule
    'inverse_sqrt'
    """
    number = checks.finite_number("c", c, positive=True)
    width = checks.positive_int("head_width", head_width)
    names = ["inverse_sqrt", "none", "inverse", "inverse_sqrt_model", "half_inverse_sqrt", "half_inverse"]
    if model_width is None:
        names.remove("inverse_sqrt_model")
    factors = {name: scale_factor(name, width, model_width) for name in names} | {"inverse_square": width**-2.0}
    distance = {name: abs(math.log(number / factor)) for name, factor in factors.items()}
    rule = min(distance, key=lambda name: distance[name])  # the first of equals
    also = tuple(name for name in factors if name != rule and np.isclose(factors[name], factors[rule], rtol=1e-9))
    return NamedScale(rule, factors[rule], number / factors[rule], also)
