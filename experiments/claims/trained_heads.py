"""The claims about heads that only training settles."""

import math

from experiments.verdicts import NEEDS, Claim, Decision, Evidence, above

MARGIN = 0.02  # nats: a difference that matters
MIXINGS = {
    "identity": "no W_O",
    "blocks": "a W_O of one block a head",
    "orthogonal": "a random orthogonal W_O that stays",
}
SETTINGS = {"mlp": "with MLP", "alone": "without MLP"}


def _undecided(e: Evidence) -> Decision:
    if any(math.isnan(estimate.value) for estimate in e.values()):
        return Decision("inconclusive", "an arm is missing, diverged or is best at the edge of its grid of rates")
    return Decision("inconclusive", NEEDS)


def _h3b(e: Evidence) -> Decision:
    worse = {"at fixed h·d_k": above(e["trade"], MARGIN), "at fixed h": above(e["alone"], MARGIN)}
    found = (
        f"the best head under 32 against the best of 32 to 128: {e['trade'].value:+.3f} nats at fixed h·d_k, "
        f"{e['alone'].value:+.3f} at fixed h; lowest at d_k = {e['best_trade'].value:.0f} and "
        f"{e['best_alone'].value:.0f}, and as good as 32 to 128 from d_k = {e['least_trade'].value:.0f} and "
        f"{e['least_alone'].value:.0f} on"
    )
    if None in worse.values():
        return _undecided(e)
    if all(worse.values()):
        return Decision("confirmed", f"at this size: {found}")
    if not any(worse.values()):
        return Decision("refuted", f"as a number for every model; of wide ones this says nothing: {found}")
    (held,) = [how for how, is_worse in worse.items() if is_worse]
    return Decision("refined", f"at this size it holds {held} only: {found}")


def _h4(e: Evidence) -> Decision:
    everywhere, somewhere = above(e["least_difference"], 0.5), above(e["most_difference"], 0.5)
    divides = above(e["division"], 0.05)
    found = (
        f"heads differ {e['least_difference'].value:.2f} to {e['most_difference'].value:.2f} as much as unrelated "
        f"patterns of the same entropy (untrained {e['untrained'].value:.2f}; {e['slope'].value:+.3f} with each "
        f"doubling of h), {e['division'].value:+.3f} against heads of models trained apart; the divergence itself "
        f"went from {e['divergence_untrained'].value:.2f} to {e['divergence'].value:.2f}"
    )
    if somewhere is False:
        return Decision("refuted", found)
    if None in (everywhere, somewhere, divides):
        return _undecided(e)
    if everywhere and divides:
        return Decision("confirmed", found)
    missing = [] if everywhere else ["at some numbers of heads only"]
    missing += [] if divides else ["no more than heads of separate models, so it is not the splitting"]
    return Decision("refined", f"they differ, {' and '.join(missing)}: {found}")


def _h6(e: Evidence) -> Decision:
    falls = {(mixing, setting): above(e[f"{mixing}_{setting}"], MARGIN) for mixing in MIXINGS for setting in SETTINGS}
    decisive = {arm: answer for arm, answer in falls.items() if arm[0] != "orthogonal"}
    found = "; ".join(
        f"{what} " + ", ".join(f"{e[f'{mixing}_{setting}'].value:+.3f} {where}" for setting, where in SETTINGS.items())
        for mixing, what in MIXINGS.items()
    )
    if None in decisive.values():
        return _undecided(e)
    if all(decisive.values()):
        return Decision("confirmed", found)
    if not any(decisive.values()):
        return Decision("refuted", found)
    held = [f"{MIXINGS[mixing]} {SETTINGS[setting]}" for (mixing, setting), answer in decisive.items() if answer]
    return Decision("refined", f"only for {' and '.join(held)}: {found}")


TRAINED = "Character language model on {text}, 2 layers of width {width}, "

CLAIMS = (
    Claim(
        id="H3b",
        statement="32–128 per head is best.",
        paper="common practice since Vaswani et al. 2017, table 3 (A)",
        prediction="Refuted as a number for every model: at width 32 the best head is narrower than 32 at fixed h·d_k. "
        "At fixed h wider heads are as good or better, and little is left to gain beyond 8.",
        rule="Held-out loss of the best head narrower than 32 minus that of the best of 32 to 128 (which is best, the "
        "other seeds say), paired by seed, at h·d_k = D and at fixed h. Confirmed at this size if both intervals lie "
        "above 0.02 nats, refuted if both lie below (a narrower head is as good or better), refined if one does; "
        "inconclusive if one straddles or a best learning rate is at the edge of its grid.",
        scope=TRAINED
        + "(h, d_k) = {arms}, {steps} steps of {batch} × {length}, {seeds} seeds, each arm at its best of "
        "{rates} rates or more. A toy: the range is said of models of width 512 and more, of which it shows nothing.",
        evidence={
            "trade": "loss of the best head under 32 − of the best from 32 to 128, at h·d_k = D",
            "alone": "the same at fixed h",
            "best_trade": "d_k of the lowest loss at h·d_k = D",
            "best_alone": "d_k of the lowest loss at fixed h",
            "least_trade": "smallest d_k within 0.02 nats of the best from 32 to 128, at h·d_k = D",
            "least_alone": "the same at fixed h",
        },
        decide=_h3b,
        least_count=5,
    ),
    Claim(
        id="H4",
        statement="Heads look at different things; splitting gives diversity.",
        paper="Vaswani et al. 2017, section 3.2.2; Voita et al. 2019, Michel et al. 2019 against",
        prediction="Refined: trained heads differ, by less than unrelated patterns of their entropy (they share a "
        "taste for what is near), and no more than heads of models trained apart. Untrained ones are as different as "
        "chance.",
        rule="Mean Jensen–Shannon divergence between heads of a layer, in units of what the same rows give with their "
        "weights shuffled among the visible keys, head by head: the same entropies, unrelated patterns. Confirmed if "
        "it exceeds 0.5 at every h and exceeds that between heads of two models trained apart by more than 0.05; "
        "refined if it exceeds 0.5 at some h and one of the two fails; refuted if at no h; inconclusive if an "
        "interval straddles or a best learning rate is at the edge of its grid.",
        scope=TRAINED + "h = {heads} at h·d_k = D, {steps} steps of {batch} × {length}, {sequences} sequences held "
        "out, {seeds} pairs of models.",
        evidence={
            "least_difference": "divergence between heads / between shuffled rows, smallest over h",
            "most_difference": "the same, largest over h",
            "division": "the same, mean over h, minus that between heads of two models",
            "untrained": "the same within a model, mean over h, before training",
            "slope": "the same within a model, after training, against log2 h",
            "divergence": "Jensen–Shannon divergence / ln 2 between heads, mean over h, after training",
            "divergence_untrained": "the same before training",
        },
        decide=_h4,
        least_count=5,
    ),
    Claim(
        id="H6",
        statement="W_O mixes heads; without it quality falls.",
        paper="Vaswani et al. 2017, section 3.2.2",
        prediction="Refined: with the MLP, which mixes what it reads, little is lost without W_O; without the MLP "
        "more is.",
        rule="Held-out loss minus that of a trained W_O, paired by seed, with and without the MLP: for no W_O "
        "(identity), and for one block a head, which is trained and mixes nothing. Confirmed if all four intervals lie "
        "above 0.02 nats, refuted if all lie below, refined if some lie above; inconclusive if one straddles or a best "
        "learning rate is at the edge of its grid. A random orthogonal W_O that stays (mixing, not learned) is told.",
        scope=TRAINED
        + "{heads} heads of {head_width}, {steps} steps of {batch} × {length}, {seeds} seeds, each arm at "
        "its best of {rates} rates or more. A trained W_O also has more parameters than one of blocks, or none.",
        evidence={
            f"{mixing}_{setting}": f"loss with {what} − with a trained one, {where}"
            for setting, where in SETTINGS.items()
            for mixing, what in MIXINGS.items()
        },
        decide=_h6,
        least_count=5,
    ),
)
