"""Norms over the model width: Flax's own, with the settings that agree with published models.

    "rms"    x / sqrt(mean x² + ε) * scale                     Zhang and Sennrich 2019
    "layer"  (x - mean x) / sqrt(var x + ε) * scale + bias     Ba et al. 2016

Statistics are at least float32. The variance is that of the centred values: E[x²] - E[x]² loses digits where the
mean is large. The norm of queries and keys over the head width is `attn_jax.scaling.rms_norm` and `l2_norm`.
"""

import functools

import jax
from flax import nnx
from flax.nnx import LayerNorm, RMSNorm
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax.typing import Float

NORMS = ("rms", "layer")

__all__ = ["NORMS", "LayerNorm", "RMSNorm", "make_norm", "normalize"]


def make_norm(
    kind: str,
    width: int,
    *,
    epsilon: float = 1e-6,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = "float32",
    rngs: nnx.Rngs,
) -> RMSNorm | LayerNorm:
    """The norm of `kind` over the last axis: `scale` `[D]` starts at 1, `bias` `[D]` ("layer" only) at 0.

    Args:
        kind: "rms" or "layer".
        width: D.
        epsilon: ε.
        dtype: of the result; None: of the input.
        param_dtype: of `scale` and `bias`.
        rngs: as every Flax module; nothing is drawn.

    Returns:
        A module that maps `[..., D]` to `[..., D]`.
    """
    checks.one_of("kind", kind, NORMS)
    width = checks.positive_int("width", width)
    epsilon = checks.finite_number("epsilon", epsilon, positive=True)
    if kind == "rms":
        return RMSNorm(width, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    return LayerNorm(width, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, use_fast_variance=False, rngs=rngs)


@functools.partial(jax.checkpoint, prevent_cse=False)
def normalize(norm: RMSNorm | LayerNorm, x: Float[jax.Array, "*b t d"]) -> Float[jax.Array, "*b t d"]:
    """`norm(x)`, redone in the backward pass: what it would keep is as large as `x`, which is kept anyway."""
    return norm(x)
