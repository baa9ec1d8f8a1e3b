"""The claims about attention as an explanation: whether other weights would do as well, and what weights agree with.

Rules and predictions were written before anything was trained. Then one thing was changed: with as many keys as pairs,
models with uniform attention solved the look-up too, so that there was nothing to explain. The number of keys and the
length were chosen by trials of accuracy alone, with other seeds.
"""

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below

ARMS = {
    "lookup": "looking up a pair",
    "deep_lookup": "looking up a pair in the second of two layers",
    "keyword": "finding a keyword",
}
SHORT = 0.1  # of accuracy: uniform attention fails the task
HALF = 0.5  # of ln 2: as far as taking seven tenths of its weight from a key that has all of it
POOR = 0.5  # Kendall's τ below which two rankings agree poorly: three pairs of four in one order
ACCOUNTS = {"gradient": "A ⊙ ∂y/∂A", "integrated": "integrated gradients", "left_out": "leaving a token out"}


def _d3(e: Evidence) -> Decision:
    found = "; ".join(
        f"{name}: uniform attention {-e[f'uniform_{arm}'].value:+.2f} of accuracy, JS up to "
        f"{e[f'layer_{arm}'].value:.2f} ln 2 (one head {e[f'head_{arm}'].value:.2f}, largest "
        f"weight {e[f'largest_{arm}'].value:.2f} → {e[f'kept_{arm}'].value:.2f}; a uniform row moves the answer by "
        f"{e[f'flattened_{arm}'].value:.2f})"
        for arm, name in ARMS.items()
    )
    needed = {arm: above(e[f"uniform_{arm}"], SHORT) for arm in ARMS}
    moved = {arm: above(e[f"layer_{arm}"], HALF) for arm in ARMS if needed[arm]}
    if None in needed.values() or None in moved.values():
        return Decision("inconclusive", f"{NEEDS}: {found}")
    if not moved:
        return Decision("inconclusive", f"uniform attention fails no task, there is nothing to explain: {found}")
    if all(moved.values()):
        return Decision("confirmed", found)
    heads = {arm: above(e[f"head_{arm}"], HALF) for arm in moved}
    true = [f"in {ARMS[arm]}" for arm, answer in moved.items() if answer]
    true += [f"of one head in {ARMS[arm]}" for arm, answer in heads.items() if answer and not moved[arm]]
    if not true:
        return Decision("refuted", found)
    return Decision("refined", f"it holds {' and '.join(true)}; {found}")


def _d3b(e: Evidence) -> Decision:
    told = ", ".join(
        f"{name} {e[f'left_out_{arm}'].value:+.2f} with leaving out, {e[f'gradient_{arm}'].value:+.2f} with gradients"
        for arm, name in ARMS.items()
    )
    poor: dict[str, Answer] = {
        f"{ACCOUNTS[account]} in {ARMS[arm]}": below(e[f"{account}_{arm}"], POOR)
        for account in ACCOUNTS
        for arm in ARMS
    }
    if None in poor.values():
        return Decision("inconclusive", f"{NEEDS}: τ {told}")
    if all(poor.values()):
        return Decision("confirmed", f"τ {told}")
    if not any(poor.values()):
        return Decision("refuted", f"τ {told}")
    return Decision(
        "refined", f"they agree with {', '.join(name for name, is_poor in poor.items() if not is_poor)}: τ {told}"
    )


SCOPE = (
    "Transformers of {width}, {heads} heads, trained {steps} steps on keywords ({classes} classes) and on {pairs} "
    "pairs ({keys} keys) in {length} tokens; the row of the answer in the last layer, of {examples} held-out sequences "
    "those answered rightly, ε = {epsilon}, {seeds} seeds."
)

CLAIMS = (
    Claim(
        id="D3",
        statement="Attention weights are not explanations: other weights give the same prediction.",
        paper="Jain and Wallace 2019, section 4.2; Wiegreffe and Pinter 2019, section 3 (uniform weights first)",
        prediction="Refined. A keyword is found as well with uniform weights, so nothing is explained there. A pair is "
        "not, and with one layer its weights cannot go far, since the answer is in one value. In the second of two "
        "layers they can: what it reads has been mixed before, as in the recurrent encoders of the paper.",
        rule="First, uniform attention fails a task if a model trained with it falls short by more than 0.1 of "
        "accuracy, paired by seed. Then, where it fails: the largest Jensen–Shannon divergence of the answer's row, "
        "all heads of the last layer together, that leaves the prediction within ε in total variation, mean over "
        "sequences. Confirmed if it is above half of ln 2 in every such task; refined if in some, or only for one head "
        "at a time; refuted if in none; inconclusive if an interval straddles or uniform attention fails no task.",
        scope=SCOPE,
        evidence={
            f"{name}_{arm}": f"{what}: {task}"
            for arm, task in ARMS.items()
            for name, what in {
                "layer": "largest divergence of the layer's weights / ln 2",
                "head": "of one head's weights / ln 2",
                "uniform": "accuracy learned − accuracy trained with uniform attention",
                "kept": "the layer's largest weights, mean over heads, in the weights found",
                "largest": "the same before",
                "flattened": "total variation if the row is made uniform",
                "permuted": "median total variation if the row is permuted",
            }.items()
        },
        decide=_d3,
        least_count=5,
    ),
    Claim(
        id="D3b",
        statement="Attention weights agree poorly with what gradients and leaving tokens out say is important.",
        paper="Jain and Wallace 2019, section 4.1",
        prediction="Refined: poorly over all tokens, since the order of many small weights is noise, but well with "
        "A ⊙ ∂y/∂A, which holds the weights themselves.",
        rule="Kendall's τ over the tokens before the question, between the answer's row (mean over heads) and the size "
        "of each other account, mean over sequences. Confirmed if it is below 0.5 for every account and task, refuted "
        "if above for every one, refined if some; inconclusive if an interval straddles.",
        scope=SCOPE,
        evidence={
            f"{account}_{arm}": f"τ of weights with {name}: {task}"
            for account, name in ACCOUNTS.items()
            for arm, task in ARMS.items()
        },
        decide=_d3b,
        least_count=5,
    ),
)
