"""The claim about sparse attention: what fixed patterns keep, what content routing finds, and whether it learns."""

import math

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every

MOST = 0.5  # of the mass: more than half of it
SHORT = 0.1  # of accuracy: a difference that matters
PATTERNS = ("window", "window_global", "bigbird", "hashing", "clustering", "random", "best")
LEARNED = {
    "none": "no signal",
    "straight_through": "straight-through",
    "auxiliary": "an auxiliary loss",
    "soft": "a soft relaxation",
}


def _keeps(e: Evidence) -> Answer:
    return above(e["kept"], MOST)


def _finds(e: Evidence) -> Answer:
    return every(above(e["found_hashing"], MOST), above(e["found_clustering"], MOST))


def _is_hard(e: Evidence) -> Answer:
    """Hard by choices alone, hard where only the pairs that met give a signal, and not where all pairs do."""
    return every(
        above(e["short_none"], SHORT), above(e["short_straight_through"], SHORT), below(e["short_soft"], SHORT)
    )


def _l3(e: Evidence) -> Decision:
    trained = ", ".join(f"{e[f'short_{learn}'].value:+.2f} with {what}" for learn, what in LEARNED.items())
    found = (
        f"window and first tokens keep {e['kept'].value:.0%} of the mass in {e['kept_pairs'].value:.0%} of the pairs "
        f"({e['kept_random'].value:.0%} at random weights; the window alone {e['kept_window'].value:.0%}); of the rest "
        f"hashing finds {e['found_hashing'].value:.0%} in {e['pairs_hashing'].value:.0%} of the pairs, clustering "
        f"{e['found_clustering'].value:.0%} in {e['pairs_clustering'].value:.0%}; accuracy short of dense attention "
        f"{trained}"
    )
    parts = {
        "window and global tokens keep most of the mass": _keeps(e),
        "hashing and clustering find most of the rest": _finds(e),
        "routing is hard to train for want of signal": _is_hard(e),
    }
    if None in parts.values():
        missing = any(math.isnan(e[f"short_{learn}"].value) for learn in LEARNED)
        reason = "an arm is missing, diverged or is best at the edge of its grid of rates" if missing else NEEDS
        return Decision("inconclusive", f"{reason}: {found}")
    if all(parts.values()):
        return Decision("confirmed", found)
    if not any(parts.values()):
        return Decision("refuted", found)
    true, false = ([what for what, answer in parts.items() if answer is which] for which in (True, False))
    return Decision("refined", f"it holds that {' and '.join(true)}, not that {' or that '.join(false)}: {found}")


CLAIMS = (
    Claim(
        id="L3",
        statement="Window + global keeps most of the mass; hashing and clustering find the rest; routing is hard to "
        "train because its signal is sparse.",
        paper="Beltagy et al. 2020, Zaheer et al. 2020; Kitaev et al. 2020; Roy et al. 2021, section 4.1",
        prediction="Refined. The window with the first tokens keeps over half of the mass, most of it by the first "
        "token, which is a sink. Hashing and clustering find more of the rest than chance, less than half of it. "
        "Routing with no signal falls short of dense attention on a look-up task, and straight-through less so.",
        rule="In the last half of each document, mean over heads. Kept: the share of the mass in the window and the "
        "first tokens is above one half. Found: hashing, and clustering, each bring together pairs that hold more than "
        "half of the mass outside. Hard: accuracy on a look-up task falls short of dense attention by more than 0.1, "
        "paired by seed, with no signal to the centroids and with straight-through (a signal from the pairs that met), "
        "and not with a soft relaxation (a signal from all pairs), each judged by hard routing. Confirmed if all three "
        "hold, refuted if none, refined if some; inconclusive if an interval straddles or a best learning rate is at "
        "the edge of its grid.",
        scope="{model}: {documents} documents of {tokens} tokens of {text}, window {window}, {first} first tokens, "
        "{rounds} rounds of {buckets} buckets, {clusters} clusters fitted to {fitted} other documents; look-up of one "
        "of {pairs} pairs by {routed} clusters, {steps} steps, {seeds} seeds.",
        evidence={
            "kept": "share of the mass in the window and the first tokens",
            "kept_pairs": "share of the visible pairs that these are",
            "kept_window": "share of the mass in the window alone",
            "kept_random": "share of the mass in the window and the first tokens at random weights",
            "found_hashing": "share of the mass outside that hashing finds",
            "pairs_hashing": "share of the pairs outside that it takes",
            "found_clustering": "share of the mass outside that clustering finds",
            "pairs_clustering": "share of the pairs outside that it takes",
            **{
                f"short_{learn}": f"accuracy of dense attention − of routing with {what}"
                for learn, what in LEARNED.items()
            },
        },
        decide=_l3,
        least_count=5,
    ),
)
