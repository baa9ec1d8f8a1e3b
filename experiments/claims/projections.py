"""The claims about queries, keys and values: why they are three projections."""

import math

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above, below, every, inside

HALF = 0.5  # of a row's weight, or of the runs: the larger part
EXACT = 1e-3  # relative: below it something is zero but for rounding
PRESENT = 0.1  # relative: above it something is there
MARGIN = 0.02  # nats: losses that differ by less are as good as each other


def _p1(e: Evidence) -> Decision:
    holds = {
        name: every(above(e[f"largest_{name}"], 0.95), above(e[f"weight_{name}"], HALF))
        for name in ("wide", "narrow", "spread")
    }
    found = (
        f"with tokens of one norm the own product is the largest in {e['largest_narrow'].value:.0%} of the rows of "
        f"the narrowest tokens, and has {e['weight_narrow'].value:.2f} of the weight; in the widest "
        f"{e['weight_wide'].value:.2f}. Half of it is passed where √d = {e['condition'].value:.2f} (ln n + ½) "
        f"(unscaled: d = {e['condition_unscaled'].value:.2f} · 2 ln n). With norms spread over a factor of e up and "
        f"down it is the largest in {e['largest_spread'].value:.0%} and has {e['weight_spread'].value:.2f}"
    )
    if None in holds.values():
        return Decision("inconclusive", NEEDS)
    if not holds["wide"]:
        return Decision("refuted", f"not even for wide tokens of one norm: {found}")
    if all(holds.values()):
        return Decision("confirmed", found)
    conditions = {"narrow": "√d above ln n + ½", "spread": "norms that are alike"}
    told = " and ".join(text for name, text in conditions.items() if not holds[name])
    return Decision("refined", f"it takes {told}: {found}")


def _p2(e: Evidence) -> Decision:
    places = {
        "in the widest head at initialisation": above(e["wide"], HALF),
        "in the narrowest head at initialisation": above(e["narrow"], HALF),
        "after training": above(e["trained"], HALF),
    }
    cost, as_good = e["masked_cost"], inside(e["masked_cost"], -MARGIN, MARGIN)
    other = "better than separate ones" if cost.value < 0 else "not as good as separate ones"
    masked = {True: "as good as separate ones", False: other, None: "not settled"}[as_good]
    found = (
        f"on the diagonal lie {e['wide'].value:.2f} in the widest head, {e['narrow'].value:.2f} in the narrowest "
        f"(half at √d_k = {e['condition'].value:.2f} (ln n + ½)); in the language model {e['begun'].value:.2f} before "
        f"and {e['trained'].value:.2f} after training (separate: {e['separate'].value:.2f}). With the self key masked: "
        f"{masked} ({cost.value:+.3f} nats; without the mask {e['tied_cost'].value:+.3f})"
    )
    if not below(e["separate"], HALF):
        return Decision("inconclusive", f"separate projections are not shown to stay below half: {found}")
    if None in places.values():
        return Decision("inconclusive", f"{NEEDS}: {found}")
    if all(places.values()):
        return Decision("confirmed", found)
    if not any(places.values()):
        return Decision("refuted", found)
    there = [[place for place, answer in places.items() if answer is state] for state in (True, False)]
    return Decision("refined", f"{' and '.join(there[0])}, not {' nor '.join(there[1])}: {found}")


def _p3(e: Evidence) -> Decision:
    controls = every(above(e["cycle_separate"], PRESENT), above(e["solved_separate"], HALF))
    symmetric = every(below(e["cycle_tied"], EXACT), below(e["swap_none"], EXACT))
    unsaid = below(e["solved_tied"], HALF)
    repaired = above(e["ring_rotary"], PRESENT)
    found = (
        f"tied, what the cycle test finds is {e['cycle_tied'].value:.0e} of the scores (separate: "
        f"{e['cycle_separate'].value:.2f}), though the weights are {e['weight_asymmetry'].value:.0%} antisymmetric; "
        f"{e['solved_tied'].value:.0%} of tied runs learn the relation under a causal mask (accuracy "
        f"{e['accuracy_tied'].value:.2f}), {e['solved_separate'].value:.0%} of separate ones. Around a cycle of "
        f"contents added positions leave {e['ring_additive'].value:.0e}, rotary ones {e['ring_rotary'].value:.2f}"
    )
    if not math.isnan(e["solved_rotary"].value):
        found += f" ({e['solved_rotary'].value:.0%} of tied runs with them learn it)"
    if above(e["accuracy_signed"], e["accuracy_tied"].high):
        beyond = ", more than look-up by symmetric scores can reach" if above(e["accuracy_signed"], 2 / 3) else ""
        found += (
            "; symmetry is not all that stops them: with every other sign of W_K turned the scores are as symmetric, "
            f"no token need match itself best, and accuracy is {e['accuracy_signed'].value:.2f}{beyond}"
        )
    if not controls:
        return Decision("inconclusive", f"separate projections do not show what tied ones should lack: {found}")
    if symmetric is False or (symmetric and unsaid is False):
        return Decision("refuted", found)
    if None in (symmetric, unsaid, repaired):
        return Decision("inconclusive", NEEDS)
    if repaired:
        return Decision(
            "refined", f"true without positions and with added ones; scores with rotary ones can say it: {found}"
        )
    return Decision("confirmed", found)


def _p4(e: Evidence) -> Decision:
    apart = every(
        below(e["value_swap_weights"], EXACT),
        above(e["key_swap_weights"], HALF),
        below(e["rich_change"], EXACT),
        every(below(e["hard_rich_weight"], 0.1), above(e["hard_rich_read"], HALF)),
        every(above(e["easy_poor_weight"], HALF), below(e["easy_poor_read"], HALF)),
    )
    free = below(e["determined_head"], HALF)
    found = (
        f"swapping two values moves no weight, swapping two keys {e['key_swap_weights'].value:.2f} of it, and either "
        f"gives the same output (to {e['same_output'].value:.0e}). A token with {e['hard_rich_weight'].value:.2f} of "
        f"the weight makes {e['hard_rich_read'].value:.0%} of what is read, one with "
        f"{e['easy_poor_weight'].value:.2f} {e['easy_poor_read'].value:.0%}; with one vector for both, making it rich "
        f"adds {e['shared_change'].value:.2f} to its weight. The keys of one head determine "
        f"{e['determined_head'].value:.0%} of its values, those of all heads {e['determined_all'].value:.0%}"
    )
    if apart is None or free is None:
        return Decision("inconclusive", NEEDS)
    if not apart:
        return Decision("refuted", found)
    return Decision("confirmed" if free else "refined", found if free else f"as arrays, not as projections: {found}")


def _p5(e: Evidence) -> Decision:
    plain = below(e["softmax_error"], 1e-5)
    fixed = {
        "with a sink the keys share what it leaves": inside(e["sink_sum"], 0.99, 1.01),
        "sigmoid weights have no budget": inside(e["sigmoid_sum"], 0.99, 1.01),
        "under dropout it is only so on average": below(e["dropout_spread"], 0.01),
    }
    found = (
        f"softmax rows sum to 1 within {e['softmax_error'].value:.0e}. A sink absorbs {e['sink_match'].value:.0%} "
        f"where a key matches and {1 - e['sink_sum'].value:.0%} where none does, and shrinks the output by just that "
        f"(to {e['sink_identity'].value:.0e}). Sigmoid rows sum to {e['sigmoid_match'].value:.2f} and "
        f"{e['sigmoid_sum'].value:.2f}. A twin of the matching key leaves it {e['twin_softmax'].value:.0%} of its "
        f"weight (sigmoid: {e['twin_sigmoid'].value:.0%}). The choice is soft: {e['keys_match'].value:.1f} keys share "
        f"a row with a match, {e['keys_none'].value:.0f} one without"
    )
    if plain is None or None in fixed.values():
        return Decision("inconclusive", NEEDS)
    if not plain:
        return Decision("refuted", found)
    broken = [text for text, answer in fixed.items() if not answer]
    if not broken:
        return Decision("confirmed", found)
    return Decision("refined", f"true of the softmax over keys alone; {'; '.join(broken)}: {found}")


def _p6(e: Evidence) -> Decision:
    limited = inside(e["cost"], -MARGIN, MARGIN)
    roles = {
        "the query's": above(e["query_none"], PRESENT),
        "the key's with rotary positions": above(e["key_rotary"], PRESENT),
    }
    found = (
        f"trained, the three biases change the loss by {e['cost'].value:+.3f} nats. As large as q, k and v are, they "
        f"change a layer's output by: key {e['key_none'].value:.0e} ({e['key_rotary'].value:.2f} with rotary "
        f"positions), query {e['query_none'].value:.2f} ({e['query_rotary'].value:.2f}), value "
        f"{e['value_none'].value:.2f}, of which all but {e['value_rest'].value:.0e} is the constant b_V W_O"
    )
    if limited is None or None in roles.values():
        return Decision("inconclusive", NEEDS)
    if not limited:
        return Decision("refuted", found)
    if not any(roles.values()):
        return Decision("confirmed", found)
    moving = " and ".join(name for name, answer in roles.items() if answer)
    idle = every(below(e["key_none"], EXACT), below(e["value_rest"], EXACT))
    rest = "; the key's without them cancels and the value's is a constant" if idle else ""
    return Decision(
        "refined", f"limited in effect on what is learned, by role: what can matter is {moving}{rest}: {found}"
    )


def _p7(e: Evidence) -> Decision:
    costs = above(e["all_cost"], MARGIN)
    free = {"query and key": below(e["query_key_cost"], MARGIN), "key and value": below(e["key_value_cost"], MARGIN)}
    found = (
        f"at equal parameters Q = K = V costs {e['all_cost'].value:+.3f} nats, Q = K {e['query_key_cost'].value:+.3f}, "
        f"K = V {e['key_value_cost'].value:+.3f}"
    )
    if costs is None:
        return Decision("inconclusive", f"{found}; {NEEDS}")
    if not costs:
        return Decision("refuted", found)
    sharing = [pair for pair, answer in free.items() if answer]
    if sharing:
        return Decision(
            "refined", f"one matrix for all three costs, one for {' or for '.join(sharing)} does not: {found}"
        )
    return Decision("confirmed", f"{found}; neither pair is shown to share one for free")


LANGUAGE = (
    "Trained: {layers} layer(s), width {width}, {heads} heads, rotary positions, characters of {text}, length "
    "{length}, {steps} steps of {batch}, {runs} seeds, each arm at its best of {rates} or more learning rates"
)

CLAIMS = (
    Claim(
        id="P1",
        statement="Without projections, softmax(XXᵀ)X, every token attends to itself because the self product is the "
        "largest.",
        paper="folklore; Vaswani et al. 2017, section 3.2.2, for the projections",
        prediction="Refined. With norms that are alike the self product is always the largest (Cauchy and Schwarz), "
        "but it has the weight only where it exceeds what all others sum to: scaled √d > ln n + ½, unscaled d > 2 ln "
        "n. With norms spread, tokens attend to the long ones.",
        rule="It holds in a place if the share of rows whose largest weight is on the diagonal lies above 0.95 and "
        "the mean weight there above 0.5. Three places, at the longest n, scaled: the widest tokens and the "
        "narrowest, each of one norm, and the widest with log-normal norms (σ = 1). Confirmed if it holds in all, "
        "refuted if not in the first, refined if not in one of the others; inconclusive if an interval straddles.",
        scope="Simulated tokens, independent directions, d = {widths}, n = {lengths}, {seeds} seeds of {rows} rows. No "
        "model, no data.",
        evidence={
            "weight_wide": "weight on the diagonal, widest tokens, one norm, longest n",
            "largest_wide": "share of rows whose largest weight is on the diagonal, the same",
            "weight_narrow": "weight on the diagonal, narrowest tokens, one norm, longest n",
            "largest_narrow": "share of rows whose largest weight is on the diagonal, the same",
            "weight_spread": "weight on the diagonal, widest tokens, log-normal norms, longest n",
            "largest_spread": "share of rows whose largest weight is on the diagonal, the same",
            "condition": "√d where the diagonal passes half, over ln n + ½, mean over n, scaled",
            "condition_unscaled": "d where the diagonal passes half, over 2 ln n, mean over n, unscaled",
        },
        decide=_p1,
    ),
    Claim(
        id="P2",
        statement="W_Q = W_K makes attention collapse onto the diagonal (“narcissism”).",
        paper="Kitaev et al. 2020 (Reformer: shared QK)",
        prediction="Refined: at initialisation where √d_k > ln n + ½, which the usual heads of 64 at n = 1024 just "
        "pass; training leaves it, since what a token holds is in the stream already. With the self key masked it "
        "trains as well as separate projections.",
        rule="It collapses in a place if the mean weight on the diagonal lies above 0.5: in the widest and in the "
        "narrowest head at initialisation, at the longest n, and in the trained language model (rows from the second "
        "on). Confirmed if in all three, refuted if in none, refined if in some; inconclusive if an interval "
        "straddles, if separate projections do not stay below 0.5, or if a best rate is at an edge. Told beside it: "
        "with the self key masked the arm is as good as separate projections if the interval of the paired difference "
        "in loss lies within ±0.02 nats.",
        scope="Simulated: normalised tokens of width {model_width}, LeCun projections, d_k = {widths}, n = {lengths}, "
        "{seeds} seeds. " + LANGUAGE + ", equal parameters (the freed ones go to the perceptron).",
        evidence={
            "trained": "weight on the diagonal, tied, after training",
            "begun": "weight on the diagonal, tied, the same model before training",
            "separate": "weight on the diagonal, separate projections, after training",
            "wide": "weight on the diagonal, tied, simulated, widest head, longest n",
            "narrow": "weight on the diagonal, tied, simulated, narrowest head, longest n",
            "condition": "√d_k where the tied diagonal passes half, over ln n + ½, mean over n",
            "masked_cost": "loss, tied with the self key masked − separate",
            "tied_cost": "loss, tied − separate",
        },
        decide=_p2,
        least_count=5,
    ),
    Claim(
        id="P3",
        statement="W_Q = W_K makes scores symmetric, so “A attends to B, not B to A” cannot be said; a causal mask "
        "does not repair it.",
        paper="Tsai et al. 2019 (attention as a kernel: symmetric and not)",
        prediction="Refined. Tied scores are symmetric whatever the positions, and without positions no mask helps; "
        "the weights are not symmetric, since each row has its own denominator. Positions added to the tokens let the "
        "score prefer one content first, but not in a cycle; rotary ones do, and then a model in which the question "
        "comes after its facts learns the relation.",
        rule="Symmetric if at initialisation the cycle test, ln A_ij A_jk A_ki − ln A_ik A_kj A_ji, and the content "
        "swap without positions give less than 1e-3 of the scores' spread. Unsaid if fewer than half of the tied runs "
        "solve the relation task (accuracy above 0.9), by the whole interval. Refuted if not symmetric, or symmetric "
        "and not unsaid. Confirmed if both and rotary positions leave no difference around a cycle of contents (below "
        "0.1), refined if they leave one; inconclusive if an interval straddles, a best rate is at an edge, or "
        "separate projections do not give more than 0.1 in the cycle test and do not solve the task in more than half "
        "of their runs. Told beside it, if its accuracy lies above the tied one's, a control that was added after the "
        "first run: scores that are as symmetric but of which a token's own need not be the largest (W_K = W_Q with "
        "every other sign turned).",
        scope="Simulated: heads of {head_width} on {tokens} tokens of width {model_width}, {seeds} seeds. Trained: "
        "relation task of {cycles} cycles, {shown} shown, {payloads} payloads, a fact before its question and before "
        "or after the asking entity's own fact; 1 layer, width {width}, {heads} heads, causal, {relation_steps} steps "
        "of {batch}, {relation_runs} seeds, each arm at its best of {rates} or more learning rates; symmetric scores "
        "reach at most 2/3 by look-up.",
        evidence={
            "cycle_tied": "cycle test, tied, the largest of no, added and rotary positions, over the scores' spread",
            "cycle_separate": "cycle test, separate projections, the smallest of the three",
            "swap_none": "content swap, tied, no positions, over the scores' spread",
            "swap_additive": "content swap, tied, added positions",
            "swap_rotary": "content swap, tied, rotary positions",
            "ring_additive": "swaps summed around a cycle of three contents, tied, added positions",
            "ring_rotary": "swaps summed around a cycle of three contents, tied, rotary positions",
            "weight_asymmetry": "‖(A − Aᵀ)/2‖² / ‖A‖² of tied weights, no positions",
            "solved_separate": "share of runs that solve the relation task, separate, no positions",
            "solved_tied": "share of runs that solve it, tied, no positions",
            "solved_rotary": "share of runs that solve it, tied, rotary positions (`full` alone)",
            "accuracy_tied": "accuracy, tied, no positions",
            "accuracy_signed": "accuracy, W_K = W_Q with every other column's sign turned, no positions",
        },
        decide=_p3,
        least_count=10,
    ),
    Claim(
        id="P4",
        statement="Key and value are separate: a token can be hard to find and rich to read, or the reverse.",
        paper="Vaswani et al. 2017, section 3.2; Miller et al. 2016 (key-value memory networks)",
        prediction="Confirmed for a head, exactly: weights read keys alone, the output is linear in the values. But "
        "all heads together have as many key dimensions as the model has, so their keys determine the token and its "
        "values.",
        rule="Apart if swapping two values moves less than 1e-3 of the weight and swapping two keys more than half; "
        "if a token with a tenth of the key and a hundred times the value has under 0.1 of the weight and over half "
        "of what is read, unmoved by its value (1e-3); and one with the whole key and a hundredth of the value the "
        "reverse. Refuted if not. Then confirmed if the keys of a head determine less than half of the variance of "
        "its values, refined if more; inconclusive if an interval straddles.",
        scope="Simulated planted retrieval among n = {tokens} keys of {head_width}, {seeds} seeds; random projections "
        "of a stream of {model_width} for what keys determine. No training.",
        evidence={
            "hard_rich_read": "share of what is read, a tenth of the key and a hundred times the value",
            "hard_rich_weight": "weight of that token",
            "easy_poor_read": "share of what is read, the whole key and a hundredth of the value",
            "easy_poor_weight": "weight of that token",
            "rich_change": "change of the hard token's weight by making its value rich",
            "shared_change": "the same where key and value are one vector",
            "value_swap_weights": "weight that moves when two values are swapped",
            "key_swap_weights": "weight that moves when two keys are swapped",
            "same_output": "relative difference of the outputs after either swap",
            "determined_head": "variance of a head's values that its keys determine",
            "determined_all": "variance of all values that all keys determine",
        },
        decide=_p4,
    ),
    Claim(
        id="P5",
        statement="Each row of weights is a fixed budget of 1: a soft choice.",
        paper="Vaswani et al. 2017, section 3.2.1; Ramapuram et al. 2024 (sigmoid attention); Xiao et al. 2023 (sinks)",
        prediction="Refined: exactly so for the softmax over keys. A sink takes what no key claims, dropout keeps the "
        "budget on average only, and sigmoid weights have none.",
        rule="Refuted if a softmax row's sum differs from 1 by 1e-5 or more. Confirmed if the rows of keys beside a "
        "sink and of sigmoid weights, where no key matches, sum to 1 ± 0.01 as well and dropout spreads a row's sum "
        "by less than 0.01; refined if one of these does not; inconclusive if an interval straddles.",
        scope="Simulated planted retrieval among n = {tokens} keys of {head_width}, {seeds} seeds of {rows} rows; sink "
        "logit ln n + 2, sigmoid(s − ln n), dropout {dropout}. No training.",
        evidence={
            "softmax_error": "largest |row sum − 1|, softmax",
            "sink_sum": "row sum over keys beside a sink, no key matches",
            "sink_match": "share of the sink where a key matches",
            "sink_identity": "‖output with sink − (1 − its share) · output without‖ / ‖output without‖",
            "sigmoid_sum": "row sum of sigmoid weights, no key matches",
            "sigmoid_match": "row sum of sigmoid weights where a key matches",
            "dropout_spread": "standard deviation of a row's sum under dropout, no key matches",
            "twin_softmax": "weight of the matching key beside a twin, over that without, softmax",
            "twin_sigmoid": "the same, sigmoid",
            "keys_match": "1 / Σp² where a key matches, softmax",
            "keys_none": "1 / Σp² where none does",
        },
        decide=_p5,
    ),
    Claim(
        id="P6",
        statement="Biases on Q, K and V have limited effect.",
        paper="Touvron et al. 2023 (Llama: none); Bai et al. 2023 (Qwen: Q, K and V)",
        prediction="Refined: trained, less than 0.02 nats. One by one: the key's adds q·b_K to a whole row, which the "
        "softmax ignores, unless rotary positions turn it; the value's adds the constant b_V W_O; the query's adds "
        "b_Q·k_j, a preference among keys, and matters.",
        rule="Limited if the interval of the paired difference in loss, with the three biases − without, lies within "
        "±0.02 nats; refuted if it lies outside. Limited, it is refined if a bias as large as what it is added to "
        "changes a layer's output by more than 0.1 (the query's, or the key's under rotary positions), confirmed if "
        "neither does; inconclusive if an interval straddles or a best rate is at an edge.",
        scope="Simulated layer of width {model_width}, heads of {head_width}, {tokens} tokens, {seeds} seeds. "
        + LANGUAGE
        + ".",
        evidence={
            "cost": "loss, biases on Q, K and V − none",
            "key_none": "relative change of the output by a key bias, no positions",
            "key_rotary": "relative change by a key bias, rotary positions",
            "query_none": "relative change by a query bias, no positions",
            "query_rotary": "relative change by a query bias, rotary positions",
            "value_none": "relative change by a value bias",
            "value_rest": "relative change by a value bias beyond b_V W_O",
        },
        decide=_p6,
        least_count=5,
    ),
    Claim(
        id="P7",
        statement="One matrix for Q, K and V mixes three roles: not enough freedom.",
        paper="Vaswani et al. 2017, section 3.2.2; Kitaev et al. 2020 (shared QK)",
        prediction="Refined: one for all three costs, and so does Q = K; K = V is nearly free, since W_O follows it.",
        rule="At equal parameters (each tie widens the perceptron by what it frees), by the paired difference in loss "
        "to separate matrices. Refuted if Q = K = V is shown to cost less than 0.02 nats. If it costs more: refined "
        "if one of Q = K and K = V is shown to cost less, else confirmed. Inconclusive if the interval of Q = K = V "
        "straddles or a best rate is at an edge.",
        scope=LANGUAGE + "; {parameters} parameters in every arm.",
        evidence={
            "all_cost": "loss, Q = K = V − separate",
            "query_key_cost": "loss, Q = K − separate",
            "key_value_cost": "loss, K = V − separate",
        },
        decide=_p7,
        least_count=5,
    ),
)
