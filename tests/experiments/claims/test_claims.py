"""Every rule on hand-made measurements: each verdict it can give, its lines, and what too little evidence does."""

import importlib
import math
import string

import pytest

from experiments import claims, verdicts
from experiments.claims import CLAIMS
from experiments.estimates import Estimate
from experiments.verdicts import VERDICTS
from tests.experiments.claims.cases import evidence
from tests.experiments.claims.heads import H2_BOUNDED

TOPICS = [topic.__name__.split(".")[-1] for topic in claims.TOPICS]
CASES = {
    claim_id: known
    for topic in TOPICS
    for claim_id, known in importlib.import_module(f"tests.experiments.claims.{topic}").CASES.items()
}


def named(cases):
    return [
        pytest.param(claim_id, verdict, values, id=f"{claim_id}-{verdict}-{i}")
        for claim_id, known in cases.items()
        for i, (verdict, values) in enumerate(known)
    ]


@pytest.mark.parametrize(("claim_id", "verdict", "values"), named(CASES))
def test_the_rule_decides(claim_id, verdict, values):
    decision = CLAIMS[claim_id].decide(evidence(claim_id, **values))
    assert decision.verdict == verdict
    assert len(decision.because) > 10


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_every_verdict_that_a_rule_names_is_reached(claim_id):
    told = {verdict for verdict in VERDICTS if verdict in CLAIMS[claim_id].rule.lower()}
    assert {verdict for verdict, _ in CASES[claim_id]} == told
    assert {"confirmed", "refuted", "inconclusive"} <= told


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_an_entry_says_all_that_a_reader_needs(claim_id):
    claim = CLAIMS[claim_id]
    assert claim.id == claim_id
    for text in (claim.statement, claim.paper, claim.prediction, claim.rule, claim.scope):
        assert len(text) > 10
    assert claim.least_count in (5, 10, 16)  # trainings or documents, yes-or-no outcomes, simulations


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_too_few_runs_are_inconclusive_whatever_they_show(claim_id):
    claim = CLAIMS[claim_id]
    values = next(v for verdict, v in CASES[claim_id] if verdict == "confirmed")
    few = {n: Estimate(e.value, e.low, e.high, claim.least_count - 1) for n, e in evidence(claim_id, **values).items()}
    fields = {name: "x" for _, name, _, _ in string.Formatter().parse(claim.scope) if name}
    outcome = claims.judge(claim_id, few, **fields)
    assert outcome.verdict == "inconclusive"
    assert f"the rule needs {claim.least_count}" in outcome.because
    assert "{" not in outcome.scope
    enough = claims.judge(claim_id, evidence(claim_id, **values), **fields)
    assert enough.verdict == "confirmed"


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (0.0, ": as good as separate ones"),
        (-0.1, ": better than"),
        (0.1, ": not as good as"),
        ((0, 0.1), ": not settled"),
    ],
)
def test_a_tied_head_that_may_not_see_itself_is_worse_equal_or_better(cost, told):
    values = next(v for verdict, v in CASES["P2"] if verdict == "confirmed")
    assert told in CLAIMS["P2"].decide(evidence("P2", **{**values, "masked_cost": cost})).because


def test_what_is_counted_needs_no_runs_but_what_is_sampled_does():
    def with_counts(sampled):
        found = evidence("H2", **H2_BOUNDED)
        counts = {name: sampled if name == "score_excess" else None for name in found}
        return {name: Estimate(e.value, e.low, e.high, counts[name]) for name, e in found.items()}

    fields = {"length": 128, "widths": "2, 4", "seeds": 16}
    assert claims.judge("H2", with_counts(16), **fields).verdict == "confirmed"
    assert claims.judge("H2", with_counts(15), **fields).verdict == "inconclusive"
    all_counted = claims.judge("H2", with_counts(None), **fields)
    assert all_counted.verdict == "confirmed"
    assert all_counted.as_dict()["count"] is None


def test_evidence_must_be_what_the_rule_reads():
    with pytest.raises(ValueError, match=r"evidence for H2 must be .*score_excess.*got \['other'\]"):
        claims.judge("H2", {"other": Estimate(0, 0, 0, 16)})


@pytest.mark.parametrize(
    ("interval", "inside", "above", "below"),
    [
        ((0.2, 0.8), True, None, None),
        ((0.0, 1.0), True, None, None),
        ((1.1, 2.0), False, True, False),
        ((-2.0, -0.1), False, False, True),
        ((0.4, 2.0), None, None, None),
        ((math.nan, math.nan), None, None, None),
        ((-math.inf, math.inf), None, None, None),
    ],
)
def test_an_interval_answers_only_when_it_lies_on_one_side(interval, inside, above, below):
    estimate = Estimate(sum(interval) / 2, *interval, 16)
    assert verdicts.inside(estimate, 0.0, 1.0) is inside
    assert verdicts.above(estimate, 0.5) is above
    assert verdicts.below(estimate, 0.5) is below


def test_one_no_outweighs_what_is_not_known():
    assert verdicts.every(True, True) is True
    assert verdicts.every(True, None) is None
    assert verdicts.every(None, False) is False


def test_an_outcome_is_told_in_numbers_and_words():
    fields = {"length": 128, "widths": "2, 4", "seeds": 16}
    told = claims.judge("H2", evidence("H2", **H2_BOUNDED), **fields).as_dict()
    assert told["claim"] == "H2"
    assert told["measured"] == CLAIMS["H2"].evidence["weight_excess_least"]
    assert told["interval"] == pytest.approx([-1.000001, -0.999999])
    assert [entry["name"] for entry in told["evidence"]] == list(CLAIMS["H2"].evidence)
    assert told["scope"] == "Simulated Gaussian q and k, n = 128, d_k = 2, 4, 16 seeds. No model, no data."
