"""The claim about the rank of attention weights, and about the approximations that live on it."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below

SHARE_LINE = 0.9  # of the sum of the singular values
ERROR_LINE = 0.1  # of an output, relative


def _l2(e: Evidence) -> Decision:
    low, could, good = above(e["share"], SHARE_LINE), below(e["rank_error"], ERROR_LINE), below(e["error"], ERROR_LINE)
    found = (
        f"a quarter of the singular values hold {e['share'].value:.2f} of their sum (at random weights "
        f"{e['share_random'].value:.2f}), and the best matrix of that rank misses the output by "
        f"{e['rank_error'].value:.2f}; for equal FLOPs Linformer misses it by {e['linformer'].value:.2f}, Nyström by "
        f"{e['nystrom'].value:.2f}, Performer by {e['performer'].value:.2f} (under the model's mask "
        f"{e['performer_own'].value:.2f}), the plain mean of the values by {e['uniform'].value:.2f}"
    )
    if None in (low, could, good):
        return Decision("inconclusive", NEEDS.replace("seeds", "documents"))
    if low and could and good:
        return Decision("confirmed", found)
    if not good and not (low and could):
        return Decision("refuted", found)
    if good:
        return Decision(
            "refined", f"the approximations are good though the weights are not nearly of low rank: {found}"
        )
    return Decision(
        "refined", f"the weights are nearly of low rank, and no approximation finds it for that cost: {found}"
    )


CLAIMS = (
    Claim(
        id="L2",
        statement="Attention matrices are nearly low-rank, so low-rank approximations are cheap and good.",
        paper="Wang et al. 2020, theorem 1 and figure 1; Xiong et al. 2021; Choromanski et al. 2021",
        prediction="Refined: a quarter of the singular values hold more than 0.9 of their sum, at random weights as "
        "well, where rows are near uniform, and the best matrix of that rank fetches the same output. But none of the "
        "three comes near it for half the FLOPs: they miss the output by 0.2 to 0.6.",
        rule="Singular values of the model's weights, as it masks them: the share of the first n/4 in the sum of all "
        "(Wang et al. measure it so), and the relative output error of the best matrix of rank n/4. Without the mask, "
        "which Linformer and Nyström cannot have: the relative output error of Linformer (projections fitted to other "
        "documents), Nyström and Performer, each as wide as a given share of the FLOPs of exact attention allows, and "
        "the least of the three. Means over heads, intervals over documents. Confirmed if the share exceeds 0.9 and "
        "both errors are below 0.1; refuted if the approximations' is not, and one of the others fails; refined if "
        "only one side of the statement holds; inconclusive if an interval straddles.",
        scope="{model}, {documents} documents of {tokens} tokens of {text}, layers {layers}; {budget} of the FLOPs of "
        "exact attention: {ranks}; {draws} draws. No model was trained with an approximation.",
        evidence={
            "share": "share of the first n/4 singular values in their sum, as the model masks",
            "share_random": "the same at random weights",
            "rank_error": "relative output error of the best matrix of rank n/4, as the model masks",
            "error": "relative output error of the best of the three for the same FLOPs, no mask",
            "linformer": "relative output error of Linformer, fitted to other documents",
            "nystrom": "relative output error of Nyström",
            "performer": "relative output error of Performer",
            "performer_own": "the same, as the model masks",
            "uniform": "relative output error of the mean of all values",
        },
        decide=_l2,
        least_count=5,
    ),
)
