"""The claims about what happens with depth and over training: rank, entropy, instability."""

from collections.abc import Mapping

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every

SHARE = 0.25  # of runs: a remedy that lets fewer diverge stops the instability
FAR = 0.1  # of the norm of the tokens: less says that they are nearly the same
RANK = 0.5  # |rank correlation|
COLLAPSED = 0.1  # normalised entropy
STARVED = 0.1  # of the gradient share of a run that learns


def _d4(e: Evidence) -> Decision:
    pure = every(above(e["slope"], 0), above(e["gain"], 0), above(e["gain_bare"], 0))
    causal, sharp = above(e["gain_causal"], 0), above(e["gain_sharp"], 0)
    skip, perceptron = above(e["skip"], FAR), above(e["mlp"], FAR)
    conditions = {
        f"under a causal mask it is exponential, ×{e['causal_factor'].value:.2f} a layer": causal,
        "not shown at the largest logits": sharp,
        "skips do not prevent it": skip,
        "MLPs do not prevent it": perceptron,
    }
    found = (
        f"pure attention: ln(−ln residual) grows by {e['slope'].value:.2f} a layer (ln 3 = 1.10 is cubic); after the "
        f"last layer the residual is {e['skip'].value:.2g} with skips (falling as depth^{e['skip_power'].value:.2f}), "
        f"{e['mlp'].value:.2g} with MLPs, {e['both'].value:.2g} with both"
    )
    neither = every(_no(skip), _no(perceptron))
    return _weigh(every(pure, *conditions.values()), _no(every(pure, _no(neither))), conditions, found)


def _d5(e: Evidence) -> Decision:
    logits, entropy, helps = above(e["logit_ahead"], 0), above(e["entropy_ahead"], 0), above(e["rescued"], 0)
    conditions = {
        "the largest logit is not ahead of the other signals": logits,
        "the entropy is not ahead of the other signals": entropy,
        "QK-norm does not help": helps,
        "QK-norm does not stop it": below(e["normed"], SHARE),
        "QK-norm does not stop it at the highest rate": below(e["normed_top"], SHARE),
    }
    names = ("logit", "entropy", "gradient", "loss", "output")
    leads = ", ".join(f"{name} {e[f'lead_{name}'].value:.0f}" for name in names)
    found = (
        f"lead in steps: {leads}; where {e['plain'].value:.0%} of the plain runs diverge, {e['normed'].value:.0%} do "
        f"with QK-norm, and {e['normed_top'].value:.0%} at the highest rate"
    )
    refuted = every(_no(logits), _no(entropy), _no(helps))
    return _weigh(every(*conditions.values()), refuted, conditions, found)


def _d2b(e: Evidence) -> Decision:
    overfits = every(below(e["gap_sizes"], -RANK), below(e["gap_time"], -RANK))
    starves = every(above(e["starved_heads"], RANK), above(e["starved_time"], RANK))
    collapsed = every(below(e["collapsed_entropy"], COLLAPSED), below(e["collapsed_share"], STARVED))
    conditions = {"it is no sign of overfitting": overfits, "it is no sign of starved gradients": starves}
    found = (
        f"rank correlation of entropy with the gap {e['gap_sizes'].value:.2f} over texts and {e['gap_time'].value:.2f} "
        f"over training, with the share of the gradient {e['starved_heads'].value:.2f} over heads and "
        f"{e['starved_time'].value:.2f} over training; on the largest text the entropy changes by "
        f"{e['control_change'].value:+.2f} at a gap of {e['control_gap'].value:.2f} nats, on the smallest by "
        f"{e['small_change'].value:+.2f} at {e['small_gap'].value:.2f}; at ten times the rate the entropy ends at "
        f"{e['collapsed_entropy'].value:.4f} and the share is ×{e['collapsed_share'].value:.2g}, below a tenth in "
        f"{e['collapsed_heads'].value:.0%} of the heads"
    )
    neither = every(_no(overfits), _no(starves), _no(collapsed))
    return _weigh(every(overfits, starves), neither, conditions, found)


def _no(answer: Answer) -> Answer:
    return None if answer is None else not answer


def _weigh(confirmed: Answer, refuted: Answer, conditions: Mapping[str, Answer], found: str) -> Decision:
    """Refined where neither can be, whatever is still open; `conditions` are told where their answer is no."""
    told = "; ".join([*(text for text, answer in conditions.items() if answer is False), found])
    if confirmed or refuted:
        return Decision("confirmed" if confirmed else "refuted", told)
    if None in (confirmed, refuted):
        return Decision("inconclusive", f"{told}; {NEEDS}")
    return Decision("refined", told)


CLAIMS = (
    Claim(
        id="D4",
        statement="Pure attention loses rank doubly exponentially with depth; skips and MLPs prevent it.",
        paper="Dong et al. 2021, theorem 2.2 and section 3",
        prediction="Refined. Two-way attention without skips: yes, at the cubic rate, with norms and without. Under "
        "a causal mask only exponentially, since the first token never mixes. Skips prevent it; MLPs at their "
        "initialisation do not, since a rate that is cubic outruns any fixed stretch.",
        rule="ρ = ‖X − 1x̄ᵀ‖ / ‖X‖ in the norm sqrt(l1 · l∞), after every layer until float64 underflows. It falls "
        "doubly exponentially if ln(−ln ρ) rises with depth and its line explains more than that of ln ρ (difference "
        "of R², interval above 0). A remedy prevents it if ρ after the last layer lies above 0.1. Refuted if the fall "
        "of pure two-way attention, with norms and without, is not doubly exponential, or neither remedy prevents it; "
        "confirmed if it is, under a causal mask and at the largest logits too, and each remedy alone prevents it; "
        "refined otherwise; inconclusive if an interval that decides straddles.",
        scope="Random weights (LeCun), {heads} heads, width {width}, {length} Gaussian tokens, {depth} layers, "
        "norms before each branch, logits of sd {scales} at the first layer, {seeds} seeds. No data, no training.",
        evidence={
            "slope": "slope of ln(−ln ρ) on depth: pure, two-way, logits of sd 1",
            "gain": "R² of that line − R² of the line of ln ρ",
            "gain_bare": "the same without norms",
            "gain_causal": "the same under a causal mask",
            "gain_sharp": "the same at the largest logits, two-way",
            "causal_factor": "ρ of a layer / ρ of the layer before, under a causal mask",
            "skip": "ρ after the last layer with skips, two-way",
            "skip_power": "with skips ρ falls as this power of depth",
            "mlp": "ρ after the last layer with MLPs",
            "both": "ρ after the last layer with skips and MLPs",
        },
        decide=_d4,
    ),
    Claim(
        id="D5",
        statement="Instability shows first as falling entropy and growing logits; QK-norm stops it.",
        paper="Zhai et al. 2023, figure 1; Wortsman et al. 2023, section 3.1",
        prediction="Refined: the largest logit leads, the entropy follows it closely, the gradient norm and the loss "
        "come later; QK-norm moves the rate at which runs diverge up, and above that they diverge all the same.",
        rule="A run diverges where its loss, the mean of a look of a few steps, lies 0.5 nats above that of the same "
        "seed at the lowest rate on the same batches, or is not finite. Signals: the largest |logit|, the smallest "
        "entropy of a layer, the gradient norm, the loss above its lowest so far and the largest |output logit|, from "
        "a tenth of the steps on. Each alarms beyond a line that 5% of the plain runs that do not diverge pass; its "
        "lead is the steps from the alarm to the divergence, 0 without one. Per seed: the mean over its plain runs "
        "that diverge. A signal is ahead if its lead exceeds that of the best of gradient, loss and output (interval "
        "of the paired difference above 0). The edge is the lowest rate at which half of the plain runs diverge. "
        "QK-norm helps if fewer diverge there (interval above 0), and stops it if their share lies below 0.25. "
        "Confirmed if logit and entropy are both ahead and QK-norm helps and stops it, at the highest rate too; "
        "refuted if neither is ahead and QK-norm does not help; refined otherwise; inconclusive if an interval that "
        "decides straddles or no rate is an edge.",
        scope="Transformer of {layers} layers, width {width}, {heads} heads, {length} characters of {text}, {steps} "
        "steps of Adam on {batch} sequences without clipping, warm-up of a quarter, rates {rates}, {seeds} seeds; "
        "{diverged} plain runs diverge, half of them from {edge} on.",
        evidence={
            "logit_ahead": "lead of the largest logit − that of the best of gradient, loss and output, steps",
            "entropy_ahead": "lead of the smallest entropy − the same",
            "lead_logit": "lead of the largest attention logit, steps",
            "lead_entropy": "lead of the smallest entropy",
            "lead_gradient": "lead of the gradient norm",
            "lead_loss": "lead of the loss",
            "lead_output": "lead of the largest output logit",
            "plain": "share of plain runs that diverge at the edge",
            "normed": "share of those with QK-norm there",
            "rescued": "the difference",
            "normed_top": "share of those with QK-norm at the highest rate",
        },
        decide=_d5,
        least_count=10,
    ),
    Claim(
        id="D2b",
        statement="Low attention entropy means overfitting or starved gradients.",
        paper="repeated in tutorials; entropy collapse: Zhai et al. 2023",
        prediction="Refuted: entropy falls with learning, on a large text as on a small one, and it is the sharp "
        "heads whose queries and keys receive gradient. Where it collapses, large keys pay back what the softmax "
        "takes.",
        rule="Normalised entropy, mean over rows. Per seed: rank correlation with the gap (held-out − training loss) "
        "over text sizes at the last step and over training on the smallest text; with the share "
        "(‖∂W_Q‖ + ‖∂W_K‖) / ‖∂W_V‖ over heads at the last step and over training, mean over texts. Low entropy means "
        "overfitting if both correlations with the gap lie below −0.5, and starved gradients if both with the share "
        "lie above 0.5. And at ten times the rate on the largest text: a collapse starves if the entropy ends below "
        "0.1 and the share (median over heads) below a tenth of that at the usual rate. Confirmed if low entropy means "
        "both; refined if it means one of them or only a collapse starves; refuted if nothing of it holds; "
        "inconclusive if an interval that decides straddles.",
        scope="Transformer of {layers} layers, width {width}, {heads} heads, {length} characters, texts of {sizes} "
        "characters of {text}, {steps} steps of batch {batch} at rate {rate}, {seeds} seeds.",
        evidence={
            "gap_sizes": "rank correlation of entropy and gap over text sizes",
            "gap_time": "the same over training, smallest text",
            "starved_heads": "rank correlation of entropy and gradient share over heads",
            "starved_time": "the same over training",
            "small_change": "entropy at the end − at the start, smallest text",
            "small_gap": "gap at the end, smallest text, nats",
            "control_change": "entropy at the end − at the start, largest text",
            "control_gap": "gap at the end, largest text, nats",
            "collapsed_entropy": "entropy at the end, at ten times the rate, largest text",
            "collapsed_share": "gradient share there / that at the usual rate, medians over heads",
            "collapsed_heads": "share of its heads that get less than a tenth of that",
        },
        decide=_d2b,
        least_count=5,
    ),
)
