"""The claims about the scale of the logits in models that are trained."""

import math
from collections.abc import Iterable, Mapping

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every, inside

MARGIN = 0.02  # nats: what is within it is as good
UNIT = (0.5, 2.0)  # a variance within it is that of a unit, as for S7 at initialisation
SHARE = 0.3  # of seeds
EDGE = "an arm has no best learning rate inside its grid"
BLIND = "this text does not reward routing: uniform attention is as good"


def _s3_trained(e: Evidence) -> Decision:
    begins = inside(e["logit_start"], *UNIT)
    kept = {name: inside(e[name], *UNIT) for name in ("logit", "query", "key")}
    found = (
        f"after training Var(logit) = {e['logit'].value:.3g} (before {e['logit_start'].value:.3g}), a component of q "
        f"{e['query'].value:.3g}, of k {e['key'].value:.3g}; q and k of their sizes, but independent, would give "
        f"{e['logit'].value / e['alignment'].value:.3g}: alignment is a factor of {e['alignment'].value:.3g}"
    )
    if not begins or None in kept.values():
        return _open(e, ("logit_start", *kept))
    if all(kept.values()):
        return Decision("confirmed", found)
    if not any(kept.values()):
        return Decision("refuted", found)
    names = ", ".join(name for name in kept if kept[name])
    return Decision("refined", f"only of {names}: {found}")


def _s6a(e: Evidence) -> Decision:
    rules = {"none": "no scale", "inverse": "1/d_k", "inverse_base": "1/d_k, agreeing at the narrowest head"}
    shows = {
        rule: every(above(e[f"{rule}_wide"], MARGIN), above(e[f"{rule}_growth"], 0)) for rule in rules
    }  # what departs from variance 1 costs, and the more the wider the head
    found = (
        "nats above 1/√d_k at the widest head: "
        + ", ".join(f"{spelled} {e[f'{rule}_wide'].value:+.3f}" for rule, spelled in rules.items())
        + f"; best rates there ×{e['none_rate'].value:.2g} and ×{e['inverse_rate'].value:.2g} for the first two"
    )
    return _weigh(e, shows, rules, found, "departing from variance 1 costs under", "and does not under")


def _s6b(e: Evidence) -> Decision:
    rules = {"half": "1/(2√d_k)", "temperature": "a learned temperature", "qk_norm": "QK-norm"}
    serves = {rule: every(*(below(e[f"{rule}_{width}"], MARGIN) for width in ("narrow", "wide"))) for rule in rules}
    better = [
        spelled
        for rule, spelled in rules.items()
        if any(below(e[f"{rule}_{width}"], -MARGIN) for width in ("narrow", "wide"))
    ]
    found = ", ".join(
        f"{spelled} {e[f'{rule}_narrow'].value:+.3f} and {e[f'{rule}_wide'].value:+.3f}"
        for rule, spelled in rules.items()
    )
    found = f"nats above 1/√d_k, narrowest and widest head: {found}"
    if not above(e["uniform"], MARGIN):
        return _blind(e)
    if better:
        return Decision("refined", f"1/√d_k is not best: better is {', '.join(better)}; {found}")
    return _weigh(e, serves, rules, found, "as good:", "not as good:")


def _s6b_recall(e: Evidence) -> Decision:
    rules = {"half": "1/(2√d_k)", "temperature": "a learned temperature", "qk_norm": "QK-norm"}
    serves = {rule: above(e[rule], -SHARE) for rule in rules}
    found = f"{e['sqrt'].value:.0%} of seeds solve it under 1/√d_k; more or less: " + ", ".join(
        f"{spelled} {e[rule].value:+.0%}" for rule, spelled in rules.items()
    )
    if not above(e["sqrt"], 0.5):
        return _open(e, ("sqrt",), "fewer than half of the seeds may solve the task under 1/√d_k")
    return _weigh(e, serves, rules, found, "as good:", "not as good:")


def _s6c(e: Evidence) -> Decision:
    equal = every(*(inside(e[f"folded_{width}"], -MARGIN, MARGIN) for width in ("narrow", "wide")))
    same = inside(e["folded_same_rate"], -MARGIN, MARGIN)
    found = (
        f"1/√d_k folded into the initial W_Q: {e['folded_narrow'].value:+.3f} and {e['folded_wide'].value:+.3f} nats "
        f"at the narrowest and the widest head, each at its best rate (×{e['folded_rate'].value:.2g} at the widest), "
        f"{e['folded_same_rate'].value:+.3f} at the best rate of 1/√d_k; nothing at all: {e['none_wide'].value:+.3f}"
    )
    if not above(e["uniform"], MARGIN):
        return _blind(e)
    if equal is None or (equal and same is None):
        return _open(e, ("folded_narrow", "folded_wide", "folded_same_rate"))
    if not equal:
        return Decision("refuted", f"the initialisation is not all: {found}")
    if same:
        return Decision("confirmed", found)
    return Decision("refined", f"it also sets how fast the logits learn; with a rate of its own all is equal: {found}")


def _s7_trained(e: Evidence) -> Decision:
    rules = {"model": "1/√D", "half_inverse": "1/(2 d_k)"}
    serves = {rule: below(e[rule], MARGIN) for rule in rules}
    found = ", ".join(f"{spelled} {e[rule].value:+.3f}" for rule, spelled in rules.items())
    if not above(e["uniform"], MARGIN):
        return _blind(e)
    return _weigh(e, serves, rules, f"nats above 1/√d_k: {found}", "as good:", "not as good:")


def _weigh(
    e: Evidence, answers: Mapping[str, Answer], spelled: Mapping[str, str], found: str, yes: str, no: str
) -> Decision:
    """Confirmed if all are so, refuted if none is, refined if one is and one is not; else it is not known."""
    so, not_so = ([spelled[rule] for rule in answers if answers[rule] is state] for state in (True, False))
    if len(so) == len(answers):
        return Decision("confirmed", found)
    if len(not_so) == len(answers):
        return Decision("refuted", found)
    if so and not_so:
        return Decision("refined", f"{yes} {', '.join(so)}; {no} {', '.join(not_so)}. {found}")
    return _open(e, e)


def _blind(e: Evidence) -> Decision:
    return _open(e, ("uniform",), BLIND)


def _open(e: Evidence, names: Iterable[str], otherwise: str = NEEDS) -> Decision:
    """Not known, and why: no estimate at all where the best rate was not found."""
    return Decision("inconclusive", EDGE if any(math.isnan(e[name].value) for name in names) else otherwise)


VASWANI = "Vaswani et al. 2017, section 3.2.1"
MODEL = (
    "Trained: {layers} layers, D = {model_width}, {heads} heads, {length} characters of {text}, {steps} steps of batch "
    "{batch} (Adam, clipped, cosine), {seeds} seeds"
)

CLAIMS = (
    Claim(
        id="S3-trained",
        statement="Layer normalisation keeps Q and K at unit variance, and so the logits at variance 1, in a trained "
        "model too.",
        paper="Ba et al. 2016; " + VASWANI,
        prediction="Refuted: the norm fixes what the projections read and not the projections. W_Q and W_K grow and, "
        "above all, align: q and k are no longer independent, and the variance of their product is several times "
        "that of independent vectors of their sizes.",
        rule="Mean square of a component of q and of k, and the variance of the scaled logits over visible pairs, "
        "mean over layers and heads, under 1/√d_k at its best rate, narrowest head. One is kept if its interval lies "
        "in [0.5, 2]. Confirmed if all three are kept, refuted if none is, refined otherwise; inconclusive if an "
        "interval straddles or the logits do not begin there.",
        scope=MODEL + ", d_k = {narrow}, RMS norm before attention.",
        evidence={
            "logit": "variance of the scaled logits after training",
            "logit_start": "the same before training",
            "query": "mean square of a component of q after training",
            "key": "mean square of a component of k after training",
            "alignment": "variance of the logits / that of independent q and k of these sizes",
            "logit_wide": "variance of the scaled logits after training, widest head",
            "alignment_wide": "alignment at the widest head",
        },
        decide=_s3_trained,
        least_count=5,
    ),
    Claim(
        id="S6a",
        statement="√d_k is the only natural choice: it follows from variance.",
        paper=VASWANI + "; 1/d: Yang et al. 2022 (muP), definition 4.1",
        prediction="Refined: without any scale the loss rises with d_k, with 1/d_k it does not: logits that begin "
        "small grow to where training wants them, those that begin large do not come back.",
        rule="Three other ways to depend on d_k: none, 1/d_k, and 1/d_k times a constant that makes it 1/√d_k at the "
        "narrowest head; loss held out minus that under 1/√d_k, each at its own best rate. That variance decides "
        "shows under a rule if the difference at the widest head lies above 0.02 nats and has grown from the narrowest "
        "(interval above 0). Confirmed if it shows under all three, refuted if under none, refined if under some and "
        "not under others; else inconclusive.",
        scope=MODEL + ", d_k = {widths} at fixed heads, D and value width.",
        evidence={
            "none_wide": "loss − that of 1/√d_k, no scale, widest head, nats",
            "inverse_wide": "the same under 1/d_k",
            "inverse_base_wide": "the same under 1/d_k that agrees at the narrowest head",
            "none_growth": "the difference at the widest head − at the narrowest, no scale",
            "inverse_growth": "the same under 1/d_k",
            "inverse_base_growth": "the same under 1/d_k that agrees at the narrowest head",
            "none_rate": "best rate without scale / that under 1/√d_k, widest head",
            "inverse_rate": "the same under 1/d_k",
            "sqrt_rate": "best rate under 1/√d_k, widest / narrowest head",
        },
        decide=_s6a,
        least_count=5,
    ),
    Claim(
        id="S6b",
        statement="√d_k is an empirical best; 2√d_k, a learned temperature, QK-norm would do as well.",
        paper=VASWANI + "; Henry et al. 2020, Dehghani et al. 2023 (QK-norm)",
        prediction="Confirmed for all three, within a margin that half a factor of the learning rate costs.",
        rule="Loss held out minus that under 1/√d_k, each at its own best rate, at the narrowest and the widest head. "
        "A rule does as well if both intervals lie below 0.02 nats. Confirmed if all three do and none is better "
        "(an interval below −0.02); refined if one is better, or some do and some do not; refuted if none does; "
        "inconclusive if an interval that decides straddles, an arm has no best rate inside its grid, or attention "
        "that is uniform is as good.",
        scope=MODEL + ", d_k = {narrow} and {wide}.",
        evidence={
            "half_wide": "loss − that of 1/√d_k under 1/(2√d_k), widest head, nats",
            "half_narrow": "the same, narrowest head",
            "temperature_wide": "the same with a learned temperature, widest head",
            "temperature_narrow": "narrowest head",
            "qk_norm_wide": "the same with QK-norm, widest head",
            "qk_norm_narrow": "narrowest head",
            "uniform": "the same with uniform attention: what routing is worth, narrowest head",
        },
        decide=_s6b,
        least_count=5,
    ),
    Claim(
        id="S6b-recall",
        statement="√d_k is an empirical best; 2√d_k, a learned temperature, QK-norm would do as well: at looking up.",
        paper=VASWANI + "; the task: Arora et al. 2023",
        prediction="Refined: the sharper the logits can become, the sooner look-up is found; QK-norm and a learned "
        "temperature solve it as often, half the scale less often in so few steps.",
        rule="A seed solves recall if it answers 90% right at the end, at the arm's best rate. A rule does as well if "
        "the interval of its share minus that of 1/√d_k lies above −0.3. Confirmed if all three do, refuted if none "
        "does, refined if one does and one does not; inconclusive otherwise, or if the share under 1/√d_k does not lie "
        "above one half.",
        scope="Trained: {layers} layers, D = {model_width}, {heads} heads, d_k = {recall_dim}; recall of {pairs} "
        "pairs among {keys} keys, {recall_length} tokens, {recall_steps} steps of batch {recall_batch}, {recall_seeds} "
        "seeds.",
        evidence={
            "sqrt": "share of seeds that solve it under 1/√d_k",
            "half": "share under 1/(2√d_k) − that",
            "temperature": "share with a learned temperature − that",
            "qk_norm": "share with QK-norm − that",
            "none": "share without scale − that",
            "inverse": "share under 1/d_k − that",
            "folded": "share with the scale folded into the initial W_Q − that",
        },
        decide=_s6b_recall,
        least_count=10,
    ),
    Claim(
        id="S6c",
        statement="1/√d_k only keeps the initialisation stable.",
        paper="Raffel et al. 2020 (T5 folds it into the initialiser); muP: Yang et al. 2022",
        prediction="Refined: equally good at a rate of its own, not at the same one. Adam moves every entry of W_Q by "
        "the rate whatever its size, so with the scale folded into W_Q the logits learn √d_k times faster.",
        rule="An arm without scale whose W_Q begins d_k^-1/2 times as large computes the same function at the first "
        "step. Loss held out minus that under 1/√d_k: confirmed if the intervals at the narrowest and the widest head, "
        "each at its best rate, and at the widest head at the best rate of 1/√d_k all lie in ±0.02 nats; refined if "
        "only the last one lies outside; refuted if one of the first two does; inconclusive if an interval that "
        "decides straddles, an arm has no best rate inside its grid, or attention that is uniform is as good.",
        scope=MODEL + ", d_k = {narrow} and {wide}.",
        evidence={
            "folded_wide": "loss − that of 1/√d_k, folded into W_Q, widest head, nats",
            "folded_narrow": "the same, narrowest head",
            "folded_same_rate": "the same at the best rate of 1/√d_k, widest head",
            "folded_rate": "best rate folded / that under 1/√d_k, widest head",
            "none_wide": "loss − that of 1/√d_k with no scale anywhere, widest head",
            "inverse_base_wide": "the same under 1/d_k that agrees at the narrowest head",
            "uniform": "the same with uniform attention, narrowest head",
        },
        decide=_s6c,
        least_count=5,
    ),
    Claim(
        id="S7-trained",
        statement="Any reading of d will do once the model is trained: 1/√D with the model width, or 1/(2 d_k), serves "
        "as 1/√d_k does.",
        paper=VASWANI,
        prediction="Refined: 1/√D serves, being 1/(2√d_k) with four heads; 1/(2 d_k) begins too flat and is still "
        "behind when the schedule ends.",
        rule="Loss held out minus that under 1/√d_k, each at its own best rate, d_k = D / heads. A reading serves if "
        "the interval lies below 0.02 nats. Confirmed if both serve, refuted if none does, refined if one does; "
        "inconclusive if an interval straddles, an arm has no best rate inside its grid, or attention that is uniform "
        "is as good.",
        scope=MODEL + ", d_k = {narrow}.",
        evidence={
            "model": "loss − that of 1/√d_k under 1/√D, nats",
            "half_inverse": "the same under 1/(2 d_k)",
            "uniform": "the same with uniform attention",
        },
        decide=_s7_trained,
        least_count=5,
    ),
)
