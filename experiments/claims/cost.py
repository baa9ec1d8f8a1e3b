"""The claims about what attention costs: time, memory, FLOPs and bytes."""

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below, every, inside, plain


def _c1(e: Evidence) -> Decision:
    parts = {
        "the smallest exponent": inside(e["excess_least"], -0.2, 0.2),
        "the largest exponent": inside(e["excess_most"], -0.2, 0.2),
        "a whole layer below n = 6D": inside(e["layer_exponent"], 1.8, 2.2),
    }
    found = (
        f"exponents differ from what is said by {e['excess_least'].value:+.2f} to {e['excess_most'].value:+.2f}; a "
        f"whole layer costs n^{e['layer_exponent'].value:.2f} below n = 6D, and attention is half of its FLOPs at "
        f"{e['crossing_counted'].value:.2f} × 6D, half of its time at {e['crossing_timed'].value:.2f} × 6D; in d time "
        f"grows as d^{e['width_least'].value:.2f} to d^{e['width_most'].value:.2f}"
    )
    answers = list(parts.values())
    if None in answers:
        return Decision("inconclusive", NEEDS.replace("seeds", "rounds"))
    if all(answers):
        return Decision("confirmed", found)
    if not any(answers[:2]):
        return Decision("refuted", found)
    outside = ", ".join(name for name, answer in parts.items() if not answer)
    return Decision("refined", f"not so: {outside}. {found}")


def _c1b(e: Evidence) -> Decision:
    found = (
        f"scores take n^{e['scores_n'].value:.2f} d^{e['scores_d'].value:.2f} h^{e['scores_h'].value:.2f}: n²·h, "
        f"whatever d is. Activations take n^{e['activations_n'].value:.2f} d^{e['activations_d'].value:.2f} "
        f"h^{e['activations_h'].value:.2f}; the tile loop, which keeps no scores, n^{e['tiled_n'].value:.2f}"
    )
    if every(inside(e["scores_n"], 1.9, 2.1), inside(e["scores_d"], 0.9, 1.1)):
        return Decision("confirmed", found)
    if below(e["scores_n"], 1.5) or below(e["scores_d"], 0.5):
        return Decision("refuted", found)
    return Decision("inconclusive", "the memory is no power of the sizes over these ranges")


def _c2(e: Evidence) -> Decision:
    holds = every(
        below(e["error_ratio"], 2.0),
        below(e["memory_forward"], 1.1),
        below(e["memory_training"], 1.1),
        below(e["bytes_forward"], 1.0),
        below(e["bytes_training"], 1.0),
    )
    found = (
        f"error ×{e['error_ratio'].value:.2f} of the dense one; memory n^{e['memory_forward'].value:.2f} forward, "
        f"n^{e['memory_training'].value:.2f} with backward (dense n^{e['memory_dense'].value:.2f}); bytes "
        f"×{e['bytes_forward'].value:.3f} and ×{e['bytes_training'].value:.3f}; FLOPs ×{e['flops_forward'].value:.2f} "
        f"forward, ×{e['flops_training'].value:.2f} with backward, ×{e['flops_causal'].value:.2f} under a causal mask"
    )
    if not holds:
        return plain(holds, found)
    names = {"flops_forward": "forward", "flops_training": "with backward", "flops_causal": "under a causal mask"}
    more = {names[name]: above(e[name], 1.0) for name in names}
    if None in more.values():
        return Decision("inconclusive", NEEDS)
    if all(more.values()):
        return Decision("confirmed", found)
    where = ", ".join(name for name, answer in more.items() if answer) or "nowhere"
    return Decision("refined", f"more FLOPs {where} only: {found}")


def _c3(e: Evidence) -> Decision:
    found = (
        f"alone, the cache's bytes pass the weights' at {e['alone_least'].value:.2g} to {e['alone_most'].value:.2g} "
        f"times the trained context, in a batch of 64 at {e['served_least'].value:.2g} to "
        f"{e['served_most'].value:.2g} times, alone with weights of 4 bits from {e['quantized_least'].value:.2g} times "
        f"on. Timed, at the longest context, a step takes ×{e['gqa'].value:.2f} with grouped heads, "
        f"×{e['mqa'].value:.2f} with one key head, ×{e['rolling'].value:.2f} with a ring and "
        f"×{e['recurrent'].value:.2f} with a recurrent state of what it takes with all heads, whose time doubles at "
        f"×{e['crossing_timed'].value:.2f} of the context where its bytes do"
    )
    inside_context = [below(e[name], 1.0) for name in ("alone_least", "alone_most", "served_least", "served_most")]
    if None in inside_context:
        return Decision("inconclusive", NEEDS)
    if all(inside_context):
        return Decision("confirmed", found)
    if not any(inside_context):
        return Decision("refuted", found)
    return Decision("refined", f"it depends on batch, model and context: {found}")


CLAIMS = (
    Claim(
        id="C1",
        statement="Doubling the length costs four times (linear attention: two).",
        paper="Vaswani et al. 2017, table 1; Katharopoulos et al. 2020",
        prediction="Refined: of the attention function alone, at lengths where its tiles are full; a whole layer costs "
        "little more than twice until n nears 6D, where attention is half of its FLOPs.",
        rule="Exponents of time in n, fitted to medians, less what is said (2; of linear, windowed, routed and "
        "low-rank attention 1), least and most over mechanisms and directions, and the exponent of a whole layer below "
        "n = 6D. Confirmed if the first two lie in ± 0.2 and the layer's in 2 ± 0.2; refuted if neither of the first "
        "two does; refined if some do; inconclusive if an interval straddles.",
        scope="{device}, float32, {mechanisms}; n = {lengths}, {heads} heads of {width}, layer of D = {model_width}; "
        "medians of {rounds} rounds.",
        evidence={
            "excess_least": "exponent of time in n less what is said, the smallest",
            "excess_most": "exponent of time in n less what is said, the largest",
            "layer_exponent": "exponent in n of a whole layer's time, n ≤ 6D",
            "crossing_timed": "n where attention is half of a layer's time, over 6D",
            "crossing_counted": "n where attention is half of a layer's FLOPs, over 6D",
            "width_least": "exponent of time in d, the smallest",
            "width_most": "exponent of time in d, the largest",
        },
        decide=_c1,
    ),
    Claim(
        id="C1b",
        statement="Memory is O(n²·d).",
        paper="tutorials, after the FLOPs of Vaswani et al. 2017, table 1",
        prediction="Refuted in d: that is the count of FLOPs. The scores take n²·h whatever d is, the activations "
        "n·d·h; and the n² is not needed.",
        rule="Compiled temporary memory of the dense form, forward and backward: the exponent in each size, its "
        "interval the range over neighbouring sizes. Confirmed if it is in 2 ± 0.1 in n and in 1 ± 0.1 in d; refuted "
        "if it is below 1.5 in n or below 0.5 in d; else inconclusive.",
        scope="Programs compiled for {device}, float32; n = {lengths}, d = {widths}, h = {heads}; what is not varied "
        "is n = {length}, d = {width}, h = {head}.",
        evidence={
            "scores_d": "exponent in d of the dense form's temporary memory",
            "scores_n": "the same in n",
            "scores_h": "the same in h",
            "activations_n": "exponent in n of what the tile loop keeps for backward",
            "activations_d": "the same in d",
            "activations_h": "the same in h",
            "tiled_n": "exponent in n of the tile loop's temporary memory",
        },
        decide=_c1b,
    ),
    Claim(
        id="C2",
        statement="Tiled attention returns the same numbers in O(n) memory: more FLOPs, fewer bytes moved.",
        paper="Dao et al. 2022, theorems 1 and 2",
        prediction="Refined: the same numbers, O(n), fewer bytes; more FLOPs only backward, where the weights are "
        "computed again (7 products for 6), and fewer wherever a mask empties tiles.",
        rule="Must hold: the error against float64, tiled over dense, is below 2 (largest mean over outputs and "
        "gradients, masks, dtypes); temporary memory grows below n^1.1, forward and with backward; bytes, tiled over "
        "dense, are below 1 under every mask. Refuted if one does not. Then confirmed if the FLOPs, tiled over dense, "
        "exceed 1 forward, with backward and under a causal mask; refined if not in all; inconclusive if an interval "
        "straddles.",
        scope="Compiled for {device}. Errors: n = {length}, tiles of {tile}, {heads} heads of {width}, {seeds} seeds, "
        "{dtypes}, {masks}. FLOPs and bytes: counted at n = {counted}. Memory: one head, n = {lengths}.",
        evidence={
            "error_ratio": "error against float64, tiled over dense, the largest",
            "memory_forward": "exponent in n of the tile loop's temporary memory, forward",
            "memory_training": "the same, forward and backward",
            "memory_dense": "the same of the dense form",
            "flops_forward": "FLOPs of products, tiled over dense, no mask, forward",
            "flops_training": "the same, forward and backward",
            "flops_causal": "the same under a causal mask",
            "bytes_forward": "bytes, tiled over dense, forward, the largest over masks",
            "bytes_training": "the same, forward and backward",
        },
        decide=_c2,
    ),
    Claim(
        id="C3",
        statement="The KV cache is the bottleneck of decoding.",
        paper="Shazeer 2019, section 3; Pope et al. 2023, section 2",
        prediction="Refined: alone, the weights are most of the bytes of a step up to the trained context and beyond; "
        "in a batch of 64 the cache is, from a small part of it on. Grouped heads move the crossing by their factor, "
        "and a ring stops the growth.",
        rule="n* is the context at which the bytes of the cache that a step reads are those of the weights, counted. "
        "Of n* over the trained context, bfloat16, the least and the most over the models, alone and in a batch of 64: "
        "confirmed if all four are below 1; refuted if none is; refined if some are; inconclusive if an interval "
        "straddles. Times are shown and decide nothing.",
        scope="{models}: sizes as published. Time: {device}, float32, {layers} layers of {width}, batch {batch}, "
        "{heads} heads of {head_width}, ring of {window}, contexts {contexts}, medians of {rounds} rounds.",
        evidence={
            "alone_least": "n* over the trained context, batch 1, bfloat16, the least over models",
            "alone_most": "the same, the most",
            "served_least": "n* over the trained context, batch 64, bfloat16, the least over models",
            "served_most": "the same, the most",
            "quantized_least": "n* over the trained context, batch 1, weights of 4 bits, cache of 16, the least",
            "crossing_timed": "context at which a step's time is twice that without a cache, over the one for bytes",
            "gqa": "time of a step at the longest context, grouped heads over all heads",
            "mqa": "the same, one key/value head",
            "rolling": "the same, a ring",
            "recurrent": "the same, a recurrent state (state space)",
        },
        decide=_c3,
    ),
)
