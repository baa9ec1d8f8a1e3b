"""What a claim is, and how a rule turns measurements into a verdict.

A rule is a pure function of estimates with intervals. It asks questions that an interval answers by yes, no or not yet
(`inside`, `above`, `below`); only a whole interval on one side of a line answers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from experiments.estimates import Estimate

Verdict = Literal["confirmed", "refined", "refuted", "inconclusive"]
VERDICTS: tuple[Verdict, ...] = ("confirmed", "refined", "refuted", "inconclusive")

NEEDS = "the intervals do not settle it; more seeds would"

Evidence = Mapping[str, Estimate]
Answer = bool | None  # None: the interval straddles the line


class Decision(NamedTuple):
    """A verdict and, in a sentence, what was found: for `refined`, the condition."""

    verdict: Verdict
    because: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement people make, and the rule that settles it, written before measuring.

    Attributes:
        id: of the list of claims.
        statement: the sentence it tests, in the words people use.
        paper: where it comes from.
        prediction: what we expected before the run.
        rule: `decide` in words.
        scope: what a verdict is about; a template filled by the experiment.
        evidence: name of each estimate that the rule reads, and what it is; the first is the headline.
        decide: evidence to decision, pure.
        least_count: independent runs (seeds, documents, rounds) that any verdict needs of what is sampled.
    """

    id: str
    statement: str
    paper: str
    prediction: str
    rule: str
    scope: str
    evidence: Mapping[str, str]
    decide: Callable[[Evidence], Decision]
    least_count: int = 16


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A claim, what was measured, and the verdict on it."""

    claim: Claim
    scope: str
    evidence: Evidence
    verdict: Verdict
    because: str

    @property
    def headline(self) -> Estimate:
        """The first estimate of the evidence."""
        return self.evidence[next(iter(self.claim.evidence))]

    def as_dict(self) -> dict[str, Any]:
        """An entry of claims.json."""
        claim = self.claim
        measured = [
            {"name": name, "measured": what, **_numbers(self.evidence[name])} for name, what in claim.evidence.items()
        ]
        return {
            "claim": claim.id,
            "statement": claim.statement,
            "paper": claim.paper,
            "verdict": self.verdict,
            "because": self.because,
            "scope": self.scope,
            "measured": measured[0]["measured"],
            **_numbers(self.headline),
            "prediction": claim.prediction,
            "rule": claim.rule,
            "evidence": measured,
        }


def judge(claim: Claim, evidence: Evidence, **scope: Any) -> Outcome:
    """The verdict of the claim's rule on `evidence`; too few runs are inconclusive whatever they show."""
    if set(evidence) != set(claim.evidence):
        raise ValueError(f"evidence for {claim.id} must be {sorted(claim.evidence)}, got {sorted(evidence)}")
    fewest = min((x.count for x in evidence.values() if x.count is not None), default=claim.least_count)
    if fewest < claim.least_count:
        decision = Decision("inconclusive", f"{fewest} independent runs; the rule needs {claim.least_count}")
    else:
        decision = claim.decide(evidence)
    return Outcome(claim, claim.scope.format(**scope), dict(evidence), decision.verdict, decision.because)


def inside(estimate: Estimate, low: float, high: float) -> Answer:
    """Whether the interval lies in [low, high] (yes), misses it (no), or neither (None)."""
    if low <= estimate.low and estimate.high <= high:
        return True
    return False if estimate.high < low or estimate.low > high else None


def above(estimate: Estimate, line: float) -> Answer:
    """Whether the interval lies above the line."""
    if estimate.low > line:
        return True
    return False if estimate.high <= line else None


def below(estimate: Estimate, line: float) -> Answer:
    """Whether the interval lies below the line."""
    if estimate.high < line:
        return True
    return False if estimate.low >= line else None


def every(*answers: Answer) -> Answer:
    """Yes if all are yes, no if one is no, else not known."""
    if any(answer is False for answer in answers):
        return False
    return None if any(answer is None for answer in answers) else True


def plain(answer: Answer, found: str) -> Decision:
    """The decision of a rule with one question."""
    if answer is None:
        return Decision("inconclusive", NEEDS)
    return Decision("confirmed" if answer else "refuted", found)


def _numbers(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "interval": [estimate.low, estimate.high], "count": estimate.count}
