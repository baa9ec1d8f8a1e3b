"""The claims about what measurements tell of a model."""

import math
from collections.abc import Callable, Mapping

from experiments.verdicts import NEEDS, Answer, Claim, Decision, Evidence, above, below, every

# What a head of a kind scores at least; syntax and coreference are differences between two words.
ROLE_LINES = {"local": 0.5, "previous_token": 0.3, "induction": 0.3, "syntax": 0.1, "coreference": 0.1}
NAMED_ROLES = ("local", "previous_token", "syntax", "coreference")  # by the statement


MOST_CHECKPOINTS = 3
D1_FIELDS = {
    "spearman": "rank correlation of normalised entropy with depth",
    "spearman_no_sink": "the same without the first token",
    "spearman_random": "the same at random weights",
}
D6_FIELDS = {
    "excess": "mass on the first token, trained − random weights",
    "sink_mass": "mass on the first token, mean over layers and heads",
    "sink_heads": "share of heads with more than 0.3 on the first token",
    "excess_other_token": "the difference with another first token",
    "window_cost": "loss in a window less that with the first 4 tokens in sight as well, nats (decoders)",
}


def slot(field: str, index: int) -> str:
    """The evidence of one checkpoint; the scope names them in order."""
    return f"{field}_{index + 1}"


def slots(fields: Mapping[str, str]) -> dict[str, str]:
    """The evidence of every checkpoint, and what it is."""
    return {
        slot(field, i): f"checkpoint {i + 1}: {what}" for i in range(MOST_CHECKPOINTS) for field, what in fields.items()
    }


def each_checkpoint(
    e: Evidence, fields: Mapping[str, str], answer: Callable[[Evidence], str | None], *, digits: int = 2
) -> Decision:
    """One verdict of the checkpoints' answers: "yes", "no", what holds of it in part, or None."""
    first, *_ = fields
    measured = [i for i in range(MOST_CHECKPOINTS) if not math.isnan(e[slot(first, i)].value)]
    answers = [answer({field: e[slot(field, i)] for field in fields}) for i in measured]
    found = "; ".join(
        f"checkpoint {i + 1}: {one or 'not settled'} ("
        + ", ".join(f"{field.replace('_', ' ')} {e[slot(field, i)].value:.{digits}f}" for field in fields)
        + ")"
        for i, one in zip(measured, answers, strict=True)
    )
    found = found.replace(" nan", " –")
    if not answers or None in answers:
        return Decision("inconclusive", f"{found}; {NEEDS.replace('seeds', 'documents')}")
    yes = sum(one == "yes" for one in answers)
    if yes == len(answers):
        return Decision("confirmed", f"{yes} of {len(answers)}: {found}")
    if all(one == "no" for one in answers):
        return Decision("refuted", f"0 of {len(answers)}: {found}")
    return Decision("refined", f"{yes} of {len(answers)}: {found}")


def _d1(e: Evidence) -> Decision:
    def falls(one: Evidence) -> str | None:
        whole, without = below(one["spearman"], -0.5), below(one["spearman_no_sink"], -0.5)
        control = below(one["spearman_random"], -0.5)
        if None in (whole, without, control):
            return None
        if not whole and not without:
            return "no"
        if control:
            return None  # the untrained control falls as well
        return "yes" if whole and without else f"only {'with' if whole else 'without'} the sink"

    return each_checkpoint(e, D1_FIELDS, falls)


def _d6(e: Evidence) -> Decision:
    def parks(one: Evidence) -> str | None:
        excess, heads = above(one["excess"], 0.1), above(one["sink_heads"], 0.1)
        other = above(one["excess_other_token"], 0.1)
        if None in (excess, heads, other):
            return None
        if not excess:
            return "no"
        if heads and other:
            return "yes"
        return "only in few heads" if not heads else "only with its usual first token"

    return each_checkpoint(e, D6_FIELDS, parks)


def _h8(e: Evidence) -> Decision:
    def there(role: str) -> Answer:
        control = above(e[f"{role}_random"], ROLE_LINES[role])
        return every(above(e[role], ROLE_LINES[role]), None if control is None else not control)

    kinds = {role: there(role) for role in NAMED_ROLES}
    found = "best head, and at random weights: " + ", ".join(
        f"{role.replace('_', ' ')} {e[role].value:.2f} ({e[f'{role}_random'].value:.2f})" for role in ROLE_LINES
    )
    if None in kinds.values():
        return Decision("inconclusive", f"{found}; {NEEDS.replace('seeds', 'documents')}")
    names = [role.replace("_", " ") for role, answer in kinds.items() if answer]
    if len(names) == len(kinds):
        return Decision("confirmed", found)
    if not names:
        return Decision("refuted", found)
    return Decision("refined", f"only {' and '.join(names)}; {found}")


CLAIMS = (
    Claim(
        id="D1",
        statement="Healthy models have high entropy in shallow layers and low entropy in deep ones.",
        paper="Zhai et al. 2023, on training curves; repeated in tutorials",
        prediction="Refuted for decoders with sinks: the entropy follows the sink, which grows early and stays.",
        rule="Of each checkpoint the rank correlation of a layer's normalised entropy with its depth, per document. It "
        "falls if the interval lies below −0.5, with and without the sink, and not at random weights. Confirmed if it "
        "falls in every checkpoint, refuted if in none, neither with nor without the sink; refined if in some, or only "
        "with or without the sink; inconclusive if an interval straddles or a control falls too.",
        scope="{models}; {documents} documents of {tokens} tokens of {text}.",
        evidence=slots(D1_FIELDS),
        decide=_d1,
        least_count=5,
    ),
    Claim(
        id="D6",
        statement="Trained language models park mass on the first token.",
        paper="Xiao et al. 2023",
        prediction="Confirmed for decoders: far above the random-weight baseline, in a third of the heads or more, "
        "whatever the first token is.",
        rule="A checkpoint does if the first token's mass exceeds the random-weight baseline by more than 0.1 (the "
        "interval of the paired difference over documents), with another first token as well, and more than 10% of "
        "heads give it over 0.3; in part if the difference holds and one of the others does not. Confirmed if every "
        "checkpoint does, refuted if none does in any part, refined otherwise; inconclusive if an interval straddles.",
        scope="{models}; {documents} documents of {tokens} tokens of {text}.",
        evidence=slots(D6_FIELDS),
        decide=_d6,
        least_count=5,
    ),
    Claim(
        id="H8",
        statement="Heads specialise: local, previous token, syntax, coreference.",
        paper="Clark et al. 2019 and Voita et al. 2019 (BERT and translation); Olsson et al. 2022 for induction",
        prediction="Refined: heads for what is near, for the previous token and for induction are there; those for "
        "a verb's subject and a pronoun's antecedent stay below the line on sentences that are balanced for place.",
        rule="The score of a head is the weight that it puts where a head of the kind would, over rows that ask: local "
        "(last 8 tokens, line 0.5), previous token (0.3), syntax (a verb's subject less the other noun, 0.1), "
        "coreference (a pronoun's name less the other, 0.1). The best head is chosen on every other example and scored "
        "on those between. A kind is there if its interval lies above the line and the best head's at random weights "
        "does not. Confirmed if all four are, refined if some, refuted if none; inconclusive if an interval straddles.",
        scope="{model}, {documents} documents of {tokens} tokens, 32 sets of 4 templated sentences.",
        evidence={
            name: text
            for role in ROLE_LINES
            for name, text in (
                (role, f"score of the best head: {role.replace('_', ' ')}"),
                (f"{role}_random", f"the same at random weights: {role.replace('_', ' ')}"),
            )
        },
        decide=_h8,
        least_count=5,
    ),
)
