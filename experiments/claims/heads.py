"""The claims about what a head costs and can express. Those on trained heads stand in `trained_heads`."""

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, inside

PATTERNS = {
    "permutation": "a permutation",
    "k_hot": "k keys out of n",
    "sharp": "Dirichlet(0.1)",
    "flat": "Dirichlet(1)",
}
FITS = 0.05  # a pattern is expressed with less than this share of a uniform row's KL left


def _h1(e: Evidence) -> Decision:
    parameters, products = below(e["parameter_spread"], 1.01), below(e["product_spread"], 1.01)
    operations = below(e["operation_ratio"], 1.01)
    found = (
        f"from the fewest to the most heads parameters ×{e['parameter_spread'].value:.3g}, products "
        f"×{e['product_spread'].value:.3g}, all operations ×{e['operation_ratio'].value:.3g}, memory "
        f"×{e['memory_ratio'].value:.3g}, time ×{e['time_ratio'].value:.3g}"
    )
    if None in (parameters, products, operations):
        return Decision("inconclusive", NEEDS)
    if not (parameters and products):
        return Decision("refuted", found)
    if operations:
        return Decision("confirmed", found)
    return Decision("refined", f"true of the parameters and the products; each head adds n² logits: {found}")


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


def _h3a(e: Evidence) -> Decision:
    expressed = {name: below(e[f"left_{name}"], FITS) for name in PATTERNS}
    for name in ("permutation", "k_hot"):
        expressed[name] = _either(expressed[name], below(e[f"by_hand_{name}"], FITS))
    left = ", ".join(f"{what} {e[f'left_{name}'].value:.0%}" for name, what in PATTERNS.items())
    needs = ", ".join(f"{what} {e[f'width_{name}'].value:.0f}" for name, what in PATTERNS.items())
    found = (
        f"KL left at d_k = n/8: {left}; d_k that a fit needs: {needs}. By hand a permutation takes d_k = 2 and k keys "
        f"2k ({e['by_hand_permutation'].value:.1%} and {e['by_hand_k_hot'].value:.1%} left), the permutation with "
        f"logits {e['range_permutation'].value:.2g} apart"
    )
    if None in expressed.values():
        return Decision("inconclusive", f"{found}; {NEEDS}")
    if not any(expressed.values()):
        return Decision("confirmed", found)
    if all(expressed.values()):
        return Decision("refuted", found)
    can, cannot = ([PATTERNS[name] for name in PATTERNS if expressed[name] is state] for state in (True, False))
    return Decision("refined", f"too coarse for {' and '.join(cannot)}, not for {' and '.join(can)}: {found}")


def _either(first: Answer, second: Answer) -> Answer:
    """Yes if one is yes, no if both are no, else not known."""
    if first or second:
        return True
    return None if None in (first, second) else False


def _h7(e: Evidence) -> Decision:
    few, all_of_it = inside(e["seen_share"], 0.0, 0.5), above(e["seen_share"], 0.99)
    bounded = inside(e["query_excess"], -0.5, 0.5)
    found = (
        f"each of q, k, v and the output depends on {e['seen_share'].value:.0%} of the dimensions of X (a slice of X: "
        f"{e['sliced_share'].value:.1%}), through {e['query_rank'].value:.0f} directions each and "
        f"{e['joint_rank'].value:.0f} of {e['model_width'].value:.0f} in all"
    )
    if None in (few, all_of_it, bounded):
        return Decision("inconclusive", NEEDS)
    if few:
        return Decision("confirmed", found)
    if all_of_it and bounded:
        return Decision("refined", f"it sees every dimension, but only so many directions: {found}")
    return Decision("refuted", found)


CLAIMS = (
    Claim(
        id="H1",
        statement="At fixed width, parameters and FLOPs do not depend on the number of heads.",
        paper="Vaswani et al. 2017, section 3.2.2",
        prediction="Refined: parameters and products are the same to the last one. Each head has n² logits of its own, "
        "so the other operations, the memory of the scores and the time grow with h.",
        rule="One attention layer at h·d_k = D, from one head to many. Confirmed if the largest over the smallest "
        "count stays below 1.01 for parameters, for FLOPs of matrix products, and for all operations (XLA's count, "
        "most heads over one); refined if it does for parameters and products alone; refuted if not for these; "
        "inconclusive if one straddles. Memory and time are told, and decide nothing.",
        scope="One self-attention layer of width {width}, h = {heads}, n = {length}, forward, dense, float32, as "
        "compiled for {device}; {rounds} rounds of time.",
        evidence={
            "operation_ratio": "all operations that XLA counts (exponentials apart), most heads / one head",
            "parameter_spread": "parameters, most / fewest over h",
            "product_spread": "FLOPs of matrix products, most / fewest over h",
            "memory_ratio": "temporary memory of the compiled program, most heads / one head",
            "time_ratio": "time, most heads / one head",
        },
        decide=_h1,
        least_count=5,
    ),
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
    Claim(
        id="H3a",
        statement="Small d_k is too coarse: a head cannot express a given pattern.",
        paper="Bhojanapalli et al. 2020 (theorem 1); Alon, Frankl and Rödl 1985 for sparse patterns",
        prediction="Refined: dense patterns (Dirichlet) need d_k of the order of n; sparse ones do not: k keys out of "
        "n, wherever they are, take d_k = 2k in principle, a permutation 2, at logits that grow as n². Gradient "
        "descent needs more than that.",
        rule="A pattern is expressed at a width if less than 5% is left of the KL that uniform rows have to it, by a "
        "gradient fit of q and k or, for permutations (d_k = 2) and k keys (d_k = 2k), by construction. At d_k = n/8, "
        "for permutation, k keys, Dirichlet(0.1) and Dirichlet(1): confirmed if none is expressed, refuted if all "
        "are, refined if some are; inconclusive if an interval straddles.",
        scope="One head without mask or data, n = {length}, d_k = n/8 = {narrow} (of {widths}), k = {k}, {steps} steps "
        "of Adam on free q and k, {seeds} seeds.",
        evidence={
            **{f"left_{name}": f"KL left of uniform's at d_k = n/8, fitted: {what}" for name, what in PATTERNS.items()},
            "by_hand_permutation": "the same by construction at d_k = 2: a permutation",
            "by_hand_k_hot": "the same by construction at d_k = 2k: k keys out of n",
            "range_permutation": "largest − smallest logit of that construction of a permutation",
            **{
                f"width_{name}": f"smallest d_k whose fit leaves less than 5% (n if none does): {what}"
                for name, what in PATTERNS.items()
            },
        },
        decide=_h3a,
    ),
    Claim(
        id="H7",
        statement="A head sees less, since it only has 64 of 512 dimensions.",
        paper="Vaswani et al. 2017, section 3.2.2, as told in tutorials",
        prediction="Refined: the projections are dense, so a head depends on every dimension of X; but q, k and v each "
        "keep d_k directions of it, together 3·d_k. Slicing X would keep d_k dimensions: as many directions, other "
        "ones.",
        rule="Share of the dimensions of X on which a head depends (a Jacobian entry that is not 0), the least of q, "
        "k, v and output. Confirmed if it is at most 0.5; refined if it is above 0.99 and the rank of the Jacobian of "
        "q is d_k to within 0.5; refuted otherwise; inconclusive if an interval straddles.",
        scope="Random projections (LeCun) of Gaussian X, width {width}, {heads} heads of {head_width}, n = {length}, "
        "{seeds} seeds. No training.",
        evidence={
            "seen_share": "share of the dimensions of X that q, k, v and output depend on, the least of them",
            "sliced_share": "the same where a head gets a slice of X",
            "query_rank": "rank of the Jacobian of q",
            "query_excess": "rank of the Jacobian of q − d_k",
            "joint_rank": "rank of the Jacobian of q, k and v together",
            "model_width": "D",
        },
        decide=_h7,
    ),
)
