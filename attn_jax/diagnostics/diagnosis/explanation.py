"""What attention function gave this output? Known mistakes, tried one after another on captured arrays.

Attention with the options that were asked for is tried first; then it with one link changed; then with any scale: what
comes out to the rounding is what was computed. On a few tokens.
"""

from typing import NamedTuple

import numpy as np

from attn_jax.diagnostics.diagnosis.layer_arrays import Context, LayerArrays, contexts
from attn_jax.diagnostics.diagnosis.mistakes import mistakes
from attn_jax.diagnostics.reference import Array, Mask
from attn_jax.diagnostics.scale import effective_scale, name_scale

EXPLAINED = 0.02  # of what attention as asked for leaves over, at most
OFF = 1e-3  # relative, of float32
ROUNDED = 0.02  # less than that is left over: rounding on the way
UNKNOWN = "The output is not that of attention as asked for, and no mistake that is known fits."

FORMS = {
    "inverse_sqrt": "1/√H", "none": "no scale at all", "inverse": "1/H", "inverse_sqrt_model": "1/√(N H)",
    "half_inverse_sqrt": "1/(2√H)", "half_inverse": "1/(2H)", "inverse_square": "1/H²",
}  # fmt: skip


class Explanation(NamedTuple):
    """What a layer's attention function does.

    Attributes:
        link: that is broken.
        says: what it does, a sentence.
        mend: what to do.
        misfit: of attention as asked for, relative, `[N]`.
        scale: the effective scale, if that is what is wrong, else None.
    """

    link: str
    says: str
    mend: str
    misfit: Array
    scale: float | None = None


@np.errstate(all="ignore")  # what is not finite is not compared
def explain(arrays: LayerArrays) -> Explanation | None:
    """What the layer's attention function does, where it is not attention as asked for; None where it is."""
    found = []
    for of in contexts(arrays):
        tolerance = max(OFF, 8 * arrays.rounding)
        misfit = of.misfit(of.attend())
        if not of.known.any() or not (misfit > tolerance).any():
            return None
        found.append(_named(of, misfit, tolerance))
    if not found:
        return None
    return next((one for one in found if one.says != UNKNOWN), found[0])


def _named(of: Context, misfit: Array, tolerance: float) -> Explanation:
    """The first mistake that explains the heads that are wrong."""
    wrong = misfit > tolerance
    enough = max(tolerance, EXPLAINED * min(float(misfit[wrong].min()), 1.0))
    for one in mistakes(of):
        if float(of.misfit(one.make(), wrong)) < enough:
            return Explanation(one.link, one.says, one.mend, misfit)
    if (scaled := _scale(of, wrong, misfit, enough)) is not None:
        return scaled
    if float(misfit[wrong].max()) < ROUNDED:
        says = "The output is that of attention, rounded on the way."
        return Explanation("numerics", says, "Keep scores, weights and sums in float32.", misfit)
    return Explanation("softmax", UNKNOWN, "Audit the function: attn_jax.audit.audit_attention.", misfit)


def _scale(of: Context, wrong: Mask, misfit: Array, enough: float) -> Explanation | None:
    """Another scale that explains the heads that are wrong."""
    arrays = of.arrays
    assert arrays.output is not None
    known = np.swapaxes(of.known, 1, 2)[..., None]
    output = np.where(known, arrays.output, 0).astype(np.float32)
    visible = of.visible & of.known[..., None]
    fitted, left = effective_scale(
        arrays.query.astype(np.float32), of.key.astype(np.float32), of.value.astype(np.float32), output,
        None if arrays.bias is None else arrays.bias.astype(np.float32), visible, logits_soft_cap=arrays.cap,
        sinks=None if arrays.sinks is None else arrays.sinks.astype(np.float32), return_misfit=True,
    )  # fmt: skip
    fitted, left = np.asarray(fitted, np.float64)[wrong], np.asarray(left, np.float64)[wrong]
    if not np.isfinite(fitted).all() or left.max() > enough or (np.abs(fitted / of.scale[wrong] - 1) < 0.01).all():
        return None
    c, asked = float(np.median(fitted)), float(np.median(of.scale[wrong]))
    if np.ptp(fitted) > 0.02 * c:
        says = f"Heads have scales from {fitted.min():.3g} to {fitted.max():.3g}, where {asked:.3g} was asked for."
        return Explanation("scale", says, "One scale, 1/√H, for all heads.", misfit, c)
    named = name_scale(c, arrays.query.shape[-1], arrays.query.shape[-1] * arrays.query.shape[2])
    nearest = f", {FORMS[named.rule]}" if abs(named.ratio - 1) < 0.02 else ""
    says = f"The effective scale is {c:.4g}{nearest}, where {asked:.4g} was asked for."
    return Explanation("scale", says, "Divide q·k by √H once, H the width of one head.", misfit, c)
