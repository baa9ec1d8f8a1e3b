"""The claims about positions."""

import math

from experiments.estimates import Estimate
from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every, inside

PRESENT = 0.01  # relative: above it a shift of the positions changes something, far above rounding
LEAK = 0.1  # of the variance of the position: above it a linear probe tells it
SAME = 0.01  # of a score's standard deviation: below it a score has not changed
MARGIN = 0.02  # nats: losses that differ by less are as good as each other
HALF = 0.5  # of the runs
SOLVED = 0.9  # accuracy: the task is solved at the trained length
FOUND = 0.5  # accuracy, twice what a guess has: something further back is found

PROBED = {
    "rotary": "rotary",
    "none": "no positions",
    "alibi": "ALiBi",
    "learned": "learned",
    "sinusoidal": "sinusoidal",
}
ADDED = ("sinusoidal", "learned")
EXTENDS = {"alibi": "ALiBi", "ntk": "RoPE with NTK"}  # it is said
STOPS = {"rotary": "plain RoPE", "learned": "learned positions"}
OTHERS = {
    "linear": "RoPE with Linear",
    "dynamic": "RoPE with DynamicNTK",
    "yarn": "RoPE with YaRN",
    "sinusoidal": "sinusoidal",
    "relative": "T5's buckets",
    "none": "no positions",
}
EVALUATED = {**EXTENDS, **STOPS, **OTHERS}


def _undecided(found: str, *estimates: Estimate) -> Decision:
    if any(math.isnan(estimate.value) for estimate in estimates):
        return Decision("inconclusive", f"an arm is missing, diverged or is best at the edge of its rates: {found}")
    return Decision("inconclusive", f"{NEEDS}: {found}")


def _known(e: Evidence, name: str, probe: str) -> bool:
    """Whether such a probe was fitted to models of such positions."""
    return f"{name}_{probe}" in e and not math.isnan(e[f"{name}_{probe}"].value)


def _x1(e: Evidence) -> Decision:
    leaks = every(*(above(e[f"{name}_value"], PRESENT) for name in ADDED))
    spared, turned = inside(e["rotary_value"], 0, 0), above(e["rotary_query"], PRESENT)
    deeper = above(e["rotary_probe"], LEAK)
    linear, squared = (
        ", ".join(f"{what} {e[f'{name}_{probe}'].value:.2f}" for name, what in PROBED.items() if _known(e, name, probe))
        for probe in ("probe", "squares")
    )
    found = (
        f"a shift of all positions changes the first layer's values by {e['sinusoidal_value'].value:.0%} (sinusoidal) "
        f"and {e['learned_value'].value:.0%} (learned), with rotary positions by exactly "
        f"{e['rotary_value'].value:g} (its queries by {e['rotary_query'].value:.0%}) and the second layer's by "
        f"{e['rotary_deep'].value:.0e}. What a linear probe tells of the position from the last layer's values, of "
        f"its variance: {linear} (no positions, untrained: {e['none_untrained'].value:.2f}); from these and their "
        f"squares: {squared}; from the first layer's values: rotary {e['rotary_first'].value:.2f}"
    )
    if False in (leaks, spared, turned):
        return Decision("refuted", found)
    if None in (leaks, spared, turned, deeper):
        return _undecided(found, e["rotary_probe"])
    if not deeper:
        return Decision("confirmed", found)
    return Decision("refined", f"true of the first layer; deeper values tell the position all the same: {found}")


def _x2(e: Evidence) -> Decision:
    reach = f"up to {e['reach_bfloat16'].value:,.0f}" if e["reach_bfloat16"].value >= 1 else "nowhere"
    exact = below(e["fixed_float32"], SAME)
    computed = {
        "with q and k in bfloat16": below(e["fixed_bfloat16"], SAME),
        "with a float32 table of position × frequency": below(e["table_float32"], SAME),
        "with a bfloat16 table": below(e["table_bfloat16"], SAME),
    }
    found = (
        f"at the furthest position a score is off by {e['fixed_float32'].value:.0e} of its standard deviation with "
        f"phases in fixed point ({e['fixed_bfloat16'].value:.0e} with q and k in bfloat16, "
        f"{e['growth_bfloat16'].value:.2f} times as much as at the first), {e['table_float32'].value:.0e} with a "
        f"float32 table and {e['table_bfloat16'].value:.0e} with a bfloat16 one, which holds {reach}"
    )
    if exact is False:
        return Decision("refuted", found)
    if exact is None or None in computed.values():
        return Decision("inconclusive", NEEDS)
    broken = [how for how, holds in computed.items() if not holds]
    if not broken:
        return Decision("confirmed", found)
    return Decision("refined", f"of exact phases; not {' nor '.join(broken)}: {found}")


def _x3(e: Evidence) -> Decision:
    said: dict[str, Answer] = {}
    for name in (*EXTENDS, *STOPS):
        recalls = above(e[f"recall_{name}"], HALF) if above(e[f"within_{name}"], HALF) else None
        for what, answer in (("loss", below(e[f"harm_{name}"], MARGIN)), ("recall", recalls)):
            said[f"{name} {what}"] = answer
    losses, near, recalls = (
        ", ".join(f"{what} {e[f'{kind}_{name}'].value:{form}}" for name, what in (EXTENDS | STOPS).items())
        for kind, form in (("harm", "+.3f"), ("near", "+.3f"), ("recall", ".0%"))
    )
    found = (
        f"loss past the trained length over that of the last L tokens: {losses} nats (up to 2 L: {near}). Runs that "
        f"find what is further back than L: {recalls}"
    )
    if None in said.values():
        read = [e[f"{kind}_{name}"] for kind in ("harm", "recall", "within") for name in (*EXTENDS, *STOPS)]
        return _undecided(
            f"not settled: {', '.join(name for name, answer in said.items() if answer is None)}; {found}", *read
        )
    as_said = {
        **{f"{name} {what}": bool(said[f"{name} {what}"]) for name in EXTENDS for what in ("loss", "recall")},
        **{f"{name} {what}": not said[f"{name} {what}"] for name in STOPS for what in ("loss", "recall")},
    }
    if all(as_said.values()):
        return Decision("confirmed", found)
    if not any(said[f"{name} {what}"] for name in EXTENDS for what in ("loss", "recall")) or all(
        said[f"{name} {what}"] for name in STOPS for what in ("loss", "recall")
    ):
        return Decision("refuted", found)
    told = {"loss": "the loss", "recall": "recall"}
    wrong = [
        f"{(EXTENDS | STOPS)[name]} {'does not keep' if name in EXTENDS else 'keeps'} {told[what]}"
        for name, what in (key.split() for key, right in as_said.items() if not right)
    ]
    return Decision("refined", f"but {'; '.join(wrong)}: {found}")


LANGUAGE = (
    "Character language model on {text}, {layers} layers of width {width}, {heads} heads of {head_width}, {steps} "
    "steps of {batch} × L = {length}, {seeds} seeds, each arm at its best of {rates} rates or more"
)

CLAIMS = (
    Claim(
        id="X1",
        statement="Positions added to X leak into Q, K and V; RoPE touches only Q and K.",
        paper="Su et al. 2021 (RoFormer), section 3; Haviv et al. 2022 (models without positions) against",
        prediction="Refined. In the first layer it is exact: a shift changes no bit of the rotary values, and a tenth "
        "or more of the added ones. Deeper values of a rotary model tell the position to a linear probe (more than "
        "0.3 of its variance), as those of a model without positions do: the causal mask lets the n-th token average "
        "over n.",
        rule="Refuted if a shift of all positions changes the first layer's values with rotary positions (by anything "
        "but exactly 0), does not change those with sinusoidal or learned ones (by more than 1%), or does not change "
        "the rotary queries (by more than 1%). Otherwise by what a ridge regression tells of the position from the "
        "last layer's values of the trained rotary model, on sequences it was not fitted to: confirmed if that is "
        "less than a tenth of the variance, refined if it is more; inconclusive if an interval straddles or the best "
        "rate is at an edge.",
        scope=LANGUAGE + "; {probed} sequences to fit a probe and as many to judge it. Shifts: {shifted} untrained "
        "models, by {shift} positions.",
        evidence={
            "rotary_probe": "share of the position's variance told by values of the last layer, rotary, trained",
            "none_probe": "the same, no positions",
            "learned_probe": "the same, learned",
            "alibi_probe": "the same, ALiBi",
            "sinusoidal_probe": "the same, sinusoidal",
            "rotary_squares": "the same of values and their squares, rotary",
            "none_squares": "the same of values and their squares, no positions",
            "none_untrained": "the same of values, no positions, before training",
            "rotary_first": "the same, rotary, first layer",
            "rotary_value": "largest relative change of a value by a shift, first layer, rotary",
            "rotary_query": "‖change of the queries‖ / ‖queries‖, the same",
            "rotary_deep": "‖change of the values‖ / ‖values‖ by a shift, second layer, rotary",
            "sinusoidal_value": "the same, first layer, sinusoidal",
            "learned_value": "the same, first layer, learned",
        },
        decide=_x1,
        least_count=5,
    ),
    Claim(
        id="X2",
        statement="RoPE scores depend on the distance only.",
        paper="Su et al. 2021 (RoFormer), equation 16",
        prediction="Refined: true of phases that are right, in float32 (1e-6 of a score's standard deviation) and with "
        "bfloat16 q and k (3e-3 everywhere, their own rounding). A float32 table of position × frequency is hundreds "
        "of times worse than float32 at 131,072, about 1e-3, and passes; a bfloat16 table breaks from a few hundred "
        "positions on.",
        rule="A score has not changed if its root mean square error, over distances and pairs of q and k, against "
        "float64 at the furthest position is below 1% of its standard deviation. Refuted if it has changed with "
        "float32 q and k and phases in fixed point; else confirmed if it has not with bfloat16 q and k, with a "
        "float32 table and with a bfloat16 one; refined if it has with one of them; inconclusive if an interval "
        "straddles.",
        scope="Independent Gaussian q and k of width {head_width}, base 10,000, keys at {positions}, queries "
        "{distances} later, {seeds} seeds of {pairs} pairs. No model, no data.",
        evidence={
            "fixed_float32": "error of a score at the furthest position / its standard deviation, fixed-point phases",
            "fixed_bfloat16": "the same, q and k in bfloat16 before and after rotation",
            "table_float32": "the same, float32 q and k, float32 table of position × frequency",
            "table_bfloat16": "the same, bfloat16 table",
            "growth_bfloat16": "error at the furthest position / that at the first, fixed point, bfloat16 q and k",
            "reach_bfloat16": "furthest position up to which the bfloat16 table keeps it below 1%; 0: nowhere",
        },
        decide=_x2,
    ),
    Claim(
        id="X3",
        statement="ALiBi and NTK-aware RoPE extend past the trained length; plain RoPE and learned positions do not.",
        paper="Press et al. 2022 (ALiBi), figure 1; Peng et al. 2023 (YaRN), section 3",
        prediction="Refined: ALiBi keeps the loss and is no better than the last L tokens; NTK keeps it at less than "
        "plain RoPE loses. Of what stands further back than L, ALiBi finds little, since its heads hardly see it, and "
        "plain RoPE finds much, since content needs only its slow pairs. Learned positions fail in both.",
        rule="Two questions of each. Loss: over positions L to {extension} L of held-out text, the loss given all that "
        "came before minus that of the same model given the last L tokens: kept if the interval of the mean over "
        "seeds lies below 0.02 nats. Recall: a model of one layer that is trained to look up pairs within L has "
        "accuracy above one half on pairs further back than L in more than half of its runs (Wilson's interval). "
        "Confirmed if ALiBi and NTK keep both and plain RoPE and learned positions neither; refuted if ALiBi and NTK "
        "keep neither, or plain RoPE and learned positions both; else refined. Inconclusive if an interval straddles, "
        "a best rate is at an edge, or an arm does not solve the task within L in more than half of its runs.",
        scope=LANGUAGE
        + ", read up to {extension} L, {sequences} sequences. Recall: one layer, {lookup_pairs} pairs among "
        "{lookup_keys} keys, {lookup_steps} steps at one rate, {lookup_seeds} seeds. Scalings have factor "
        "{extension} and come at evaluation only. Learned positions past L are refused by a table of L rows, so "
        "theirs has {extension} L, of which training reads L.",
        evidence={
            **{f"harm_{name}": f"loss given all − given the last L tokens, {what}" for name, what in EVALUATED.items()},
            **{f"near_{name}": f"the same from L to 2 L, {what}" for name, what in (EXTENDS | STOPS).items()},
            **{
                f"recall_{name}": f"share of runs that find pairs further back than L, {what}"
                for name, what in EVALUATED.items()
            },
            **{
                f"within_{name}": f"share of runs that find pairs at the trained length, {what}"
                for name, what in (EXTENDS | STOPS).items()
            },
        },
        decide=_x3,
        least_count=5,
    ),
)
