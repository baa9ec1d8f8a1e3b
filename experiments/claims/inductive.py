"""The claims about what a mixer finds easy: how far it reaches, and how it fares with little data."""

import math

from experiments.estimates import Estimate
from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every, inside

KEPT = 0.1  # of the gradient at distance 1: above it a distance costs little
LOST = 0.01  # below it a distance costs nearly all
HALF = 0.5  # of the runs
SOLVED = 0.9  # accuracy
LESS = 0.02  # of the answers: accuracies that differ by less are as good as each other
NATS = 0.02  # losses that differ by less are
ARMS = {"attention": "attention", "gru": "GRU", "convolution": "convolution"}
OTHERS = {"convolution": "convolution", "gru": "GRU"}


def _undecided(found: str, *estimates: Estimate) -> Decision:
    if any(math.isnan(estimate.value) for estimate in estimates):
        return Decision("inconclusive", f"an arm is missing, diverged or is best at the edge of its rates: {found}")
    return Decision("inconclusive", f"{NEEDS}: {found}")


def _c4(e: Evidence) -> Decision:
    structure = every(
        above(e["kept_attention"], KEPT),
        below(e["kept_gru"], LOST),
        inside(e["beyond_convolution"], 0, 0),
        above(e["reach_convolution"], 0),
    )
    copied, near, held = (
        ", ".join(f"{what} {e[f'{kind}_{name}'].value:.0%}" for name, what in ARMS.items())
        for kind in ("far", "near", "held")
    )
    found = (
        f"before training the gradient at the far distance is {e['kept_attention'].value:.2g} of that at distance 1 "
        f"for attention and {e['kept_gru'].value:.0e} for the GRU; for the convolution exactly "
        f"{e['beyond_convolution'].value:g} beyond its reach. Runs that copy every symbol at the far distance: "
        f"{copied} (at the near one: {near}); that hold one marked symbol as long: {held}"
    )
    if structure is False:
        return Decision("refuted", found)
    learned = every(*(above(e[f"near_{name}"], HALF) for name in ARMS))
    attention = above(e["far_attention"], HALF)
    beyond = [above(e[f"{kind}_convolution"], HALF) for kind in ("far", "held")]
    recurrent: list[Answer] = [above(e[f"{kind}_gru"], HALF) for kind in ("far", "held")]
    if learned and (attention is False or True in beyond):
        return Decision("refuted", found)
    if structure is None or not learned or None in (attention, *beyond, *recurrent):
        return _undecided(found, *e.values())
    if not any(recurrent):
        return Decision("confirmed", found)
    what = {
        (True, True): "a GRU copies them all the same",
        (True, False): "a GRU copies them all, and fails at one",
        (False, True): "a GRU's steps cost it many symbols and not one, which it carries as far",
    }[bool(recurrent[0]), bool(recurrent[1])]
    return Decision("refined", f"the paths are as said, but {what}: {found}")


def _little(e: Evidence, line: float, found: str, *, shrinks: bool) -> Decision:
    """Whether attention is worse than each of the others with little data, and if asked whether data heals it."""
    loses = {name: above(e[f"little_{name}"], line) for name in OTHERS}
    if None in loses.values():
        return _undecided(found, *(e[f"little_{name}"] for name in OTHERS))
    behind = [name for name, answer in loses.items() if answer]
    if not behind:
        return Decision("refuted", found)
    if len(behind) < len(OTHERS):
        return Decision("refined", f"it loses to the {OTHERS[behind[0]]} alone: {found}")
    healed = every(*(above(e[f"shrinks_{name}"], 0) for name in OTHERS)) if shrinks else True
    if healed is None:
        return _undecided(found, *(e[f"shrinks_{name}"] for name in OTHERS))
    if not healed:
        return Decision("refined", f"it loses with much data as well: {found}")
    return Decision("confirmed", found)


def _gaps(e: Evidence, kind: str, form: str) -> str:
    return ", ".join(f"{what} {e[f'{kind}_{name}'].value:{form}}" for name, what in OTHERS.items())


def _c5(e: Evidence) -> Decision:
    found = (
        f"accuracy of the others above that of attention, with the fewest images: {_gaps(e, 'little', '+.3f')}; with "
        f"the most: {_gaps(e, 'much', '+.3f')}"
    )
    return _little(e, LESS, found, shrinks=True)


def _c5b(e: Evidence) -> Decision:
    found = (
        f"loss of attention above that of the others, with the fewest series: {_gaps(e, 'little', '+.3f')} nats; with "
        f"the most: {_gaps(e, 'much', '+.3f')}"
    )
    return _little(e, NATS, found, shrinks=False)


TRAINED = (
    "{layers} layers of width {width}, {heads} heads, {steps} steps of {batch}, {seeds} seeds, each arm at its best of "
    "{rates} rates or more"
)
EQUAL = (
    "Causal models of equal parameters (within 1%; the MLP takes up what a mixer leaves), "
    + TRAINED
    + ", judged at the best of {evaluations} evaluations (a small set is learned by heart)"
    + "; attention with a learned table of positions, a convolution of width {convolution}, a GRU with biases, which "
    "need none."
)

CLAIMS = (
    Claim(
        id="C4",
        statement="Any two positions are one step apart in attention, n steps in an RNN, n/k or log n in a "
        "convolution.",
        paper="Vaswani et al. 2017, table 1; Bengio et al. 1994 (gradients of an RNN over time)",
        prediction="Refined. The paths are as said: before training the gradient at the far distance is a third or "
        "more of that at distance 1 for attention, less than a thousandth for the GRU, and exactly 0 beyond the reach "
        "of the convolution, which copies within it and never beyond. Attention copies at both distances, the GRU only "
        "at the near one; but it carries one marked symbol over the same number of steps in most runs: its gates make "
        "a long path harmless, and what it lacks is room for all the symbols in between.",
        rule="Gradients: of the last output with respect to what enters the first layer, before training, mean over "
        "sequences. Refuted if attention's at the far distance is not above a tenth of that at distance 1, if the "
        "GRU's is not below a hundredth, if the convolution's is not exactly 0 beyond its reach, L (k − 1), or is 0 at "
        "the end of it. Then by the share of runs that solve a task (accuracy above 0.9 in more than half, Wilson's "
        "interval): copying at every token what stood a distance before, and holding one marked symbol up to the last "
        "token. Inconclusive unless all three copy at the near distance. Refuted if attention does not copy at the far "
        "one, or the convolution does or holds; confirmed if the GRU neither copies nor holds there; refined if it "
        "does one of these; inconclusive if an interval straddles, or if the best rate for a task that some runs solve "
        "and others, at this rate or another, do not is at an edge.",
        scope="Copying at distances {near} and {far} among {symbols} symbols, and one marked symbol held over {far}, "
        "T = {length}: " + TRAINED + ". Convolution of width {convolution}, undilated (log n layers would need "
        "dilation); GRU with biases; attention with {positions} positions.",
        evidence={
            "kept_attention": "gradient at the far distance / at distance 1, attention, before training",
            "kept_gru": "the same, GRU",
            "beyond_convolution": "largest gradient beyond the reach, convolution",
            "reach_convolution": "gradient at the end of the reach / at distance 1, convolution",
            **{f"far_{name}": f"share of runs that copy at the far distance, {what}" for name, what in ARMS.items()},
            **{f"near_{name}": f"the same at the near distance, {what}" for name, what in ARMS.items()},
            **{f"held_{name}": f"share of runs that hold one symbol as long, {what}" for name, what in ARMS.items()},
        },
        decide=_c4,
        least_count=10,
    ),
    Claim(
        id="C5",
        statement="Attention's weak inductive bias loses on little data (images).",
        paper="Dosovitskiy et al. 2021 (ViT), section 4.3",
        prediction="Confirmed: with 50 digits the convolution names 10 of 100 more than attention and the GRU 5, with "
        "all of them the difference to both is below 3.",
        rule="Accuracy on the held-out digits, paired by seed, of the convolution and of the GRU minus that of "
        "attention. Attention loses to one of them if the interval with the fewest images lies above 0.02. Refuted if "
        "it loses to neither; refined if to one alone, or to both without the difference shrinking (interval above 0, "
        "both) from the fewest to the most images; else confirmed. Inconclusive if an interval straddles, or a best "
        "rate is at an edge.",
        scope="8 × 8 digits as 16 patches of 2 × 2, row by row, asked at the last; {fewest} and {most} training images "
        "(the same of all seeds), {held_out} held out. " + EQUAL,
        evidence={
            **{f"little_{name}": f"accuracy, {what} − attention, fewest images" for name, what in OTHERS.items()},
            **{f"much_{name}": f"the same, most images, {what}" for name, what in OTHERS.items()},
            **{f"shrinks_{name}": f"the former − the latter, {what}" for name, what in OTHERS.items()},
        },
        decide=_c5,
        least_count=5,
    ),
    Claim(
        id="C5b",
        statement="Attention's weak inductive bias loses on structured series.",
        paper="Zeng et al. 2023 (Are Transformers Effective for Time Series Forecasting?)",
        prediction="Confirmed: with 16 series attention's loss is 0.1 nats above that of the convolution and of the "
        "GRU.",
        rule="Loss of the next value on held-out series, paired by seed, of attention minus that of the convolution "
        "and of the GRU. Attention loses to one of them if the interval with the fewest series lies above 0.02 nats. "
        "Confirmed if it loses to both, refined if to one alone, refuted if to neither. Inconclusive if an interval "
        "straddles, or a best rate is at an edge.",
        scope="Simulated seasonal series of {length} steps and {levels} levels; {fewest} and {most} training series "
        "(the same of all seeds), {held_out} held out. " + EQUAL,
        evidence={
            **{f"little_{name}": f"loss, attention − {what}, fewest series" for name, what in OTHERS.items()},
            **{f"much_{name}": f"the same, most series, {what}" for name, what in OTHERS.items()},
        },
        decide=_c5b,
        least_count=5,
    ),
)
