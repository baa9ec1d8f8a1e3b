"""The claims about heads."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below


def _h2(e: Evidence) -> Decision:
    scores = below(e["score_excess"], 0.5)
    most, least = above(e["weight_excess_most"], 0.5), above(e["weight_excess_least"], 0.5)
    found = (
        f"the scores keep to d_k; after the softmax the rank is {e['weight_rank_narrow'].value:.0f} at the narrowest "
        f"head ({e['weight_effective_narrow'].value:.1f} effective)"
    )
    if None in (scores, most, least):
        return Decision("inconclusive", NEEDS)
    if not scores:
        return Decision("refuted", "even the scores before the softmax exceed d_k")
    if not most:
        return Decision("confirmed", found)
    if least:
        return Decision("refuted", f"true of the logits before mask and softmax, not of the weights: {found}")
    return Decision("refined", f"true of the logits, and of the weights at some widths only: {found}")


CLAIMS = (
    Claim(
        id="H2",
        statement="One head's attention matrix has rank at most d_k.",
        paper="Bhojanapalli et al. 2020",
        prediction="Refuted as said: true of the scores QKᵀ; the exponential is entrywise and lifts the rank to "
        "nearly n. A causal mask alone makes it n.",
        rule="Numerical rank (float32, NumPy's tolerance) against d_k at every d_k ≤ n/2, unmasked, scaled. "
        "Confirmed if the weights' rank exceeds d_k nowhere, refuted if everywhere (or if the scores' does), "
        "refined if at some widths only; an excess counts if its interval lies above 0.5; "
        "inconclusive if one straddles.",
        scope="Simulated Gaussian q and k, n = {length}, d_k = {widths}, {seeds} seeds. No model, no data.",
        evidence={
            "weight_excess_least": "rank(A) − d_k, the smallest over widths",
            "weight_excess_most": "rank(A) − d_k, the largest over widths",
            "score_excess": "rank(S) − d_k, the largest over widths",
            "weight_rank_narrow": "rank(A) at the narrowest head",
            "weight_effective_narrow": "effective rank of A at the narrowest head",
        },
        decide=_h2,
    ),
)
