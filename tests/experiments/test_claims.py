"""Every rule on hand-made measurements: each verdict it can give, its lines, and what too little evidence does."""

import math
import string

import pytest

from experiments import claims, verdicts
from experiments.claims import CLAIMS
from experiments.estimates import Estimate
from experiments.verdicts import VERDICTS

WIDE = "wide"  # an interval that settles nothing


def evidence(claim_id: str, **values) -> dict[str, Estimate]:
    """Tight intervals around the given values (a pair is an interval); what is not given is 1."""
    found = {}
    for name in CLAIMS[claim_id].evidence:
        value = values.pop(name, 1.0)
        if value == WIDE:
            found[name] = Estimate(0.5, -1e6, 1e6, 16)
        elif isinstance(value, tuple):
            found[name] = Estimate(sum(value) / 2, *value, 16)
        else:
            found[name] = Estimate(value, value - 1e-6, value + 1e-6, 16)
    assert not values, f"{claim_id} reads no {sorted(values)}"
    return found


S2_HOLDS = {
    "sqrt_slope": 0.0, "inverse_slope": -1.0, "inverse_entropy_wide": 0.999, "inverse_entropy_narrow": 0.995,
    "correlated_ratio": 1.0,
}  # fmt: skip
S4_LIMIT = {"rise": 0.8, "scaled_rise": 0.01, "weight_wide": 0.95, "entropy_wide": 0.02}
S5_DEAD = {"logit_median_ratio": 0.0, "query_median_ratio": 0.01, "logit_mean_ratio": 0.02, "query_mean_ratio": 0.09}
S5_ALIVE = dict.fromkeys(S5_DEAD, 0.5)
S5B_DIAGONAL = {"diagonal_error": 1e-6, "off_share_sharp": 1e-3, "off_share_uniform": 1e-3, "diagonal_only_error": 1e-3}
H2_BOUNDED = {"score_excess": 0.0, "weight_excess_least": -1.0, "weight_excess_most": 0.0}
D1_FALLS = {"spearman": -0.9, "spearman_no_sink": -0.8, "spearman_random": 0.1}
D6_PARKED = {"excess": 0.4, "sink_heads": 0.5, "excess_other_token": 0.4}
C1_HOLDS = {"excess_least": -0.05, "excess_most": 0.05, "layer_exponent": 2.0}
C1B_HOLDS = {"scores_n": 2.0, "scores_d": 1.0}
C2_HOLDS = {
    "error_ratio": 1.0, "memory_forward": 1.0, "memory_training": 1.0, "bytes_forward": 0.1, "bytes_training": 0.1,
    "flops_forward": 1.1, "flops_training": 1.2, "flops_causal": 1.1,
}  # fmt: skip

CASES = {
    "S1": [
        ("confirmed", {}),
        ("confirmed", {"heavy_ratio": WIDE, "both_slope": 1.9}),  # what breaks the condition does not refute
        ("refuted", {"slope": 0.9}),
        ("refuted", {"slope": WIDE, "ratio": 1.2}),
        ("inconclusive", {"slope": (0.97, 1.03)}),
        ("inconclusive", {"slope": math.nan}),
    ],
    "S2": [
        ("confirmed", S2_HOLDS),
        ("refined", {**S2_HOLDS, "correlated_ratio": 20.0}),
        ("refined", {**S2_HOLDS, "inverse_entropy_narrow": 0.97}),
        ("refuted", {**S2_HOLDS, "sqrt_slope": 0.1}),
        ("refuted", {**S2_HOLDS, "inverse_entropy_wide": 0.9, "correlated_ratio": 20.0}),
        ("inconclusive", {**S2_HOLDS, "inverse_slope": (-1.1, -0.9), "correlated_ratio": 20.0}),
    ],
    "S3": [
        ("confirmed", {"without": 16.0}),
        ("refined", {"without": 16.0, "normal": 0.2}),
        ("refuted", {"without": 1.0}),
        ("refuted", {"without": 16.0, "lecun": 2.0, "xavier": 2.0, "normal": 0.2, "mup": 2.0}),
        ("inconclusive", {"without": 16.0, "normal": (0.5, 1.0)}),
        ("inconclusive", {"without": WIDE}),
    ],
    "S4": [
        ("confirmed", {**S4_LIMIT, "weight_common": 0.95}),
        ("refined", {**S4_LIMIT, "weight_common": 0.7}),
        ("refined", {**S4_LIMIT, "weight_common": 0.7, "onset_exponent": math.nan}),  # the sweep need not show it
        ("refuted", {**S4_LIMIT, "rise": -0.1}),
        ("refuted", {**S4_LIMIT, "scaled_rise": 0.5}),
        ("inconclusive", {**S4_LIMIT, "weight_common": (0.8, 0.95)}),
        ("inconclusive", {**S4_LIMIT, "weight_wide": (0.8, 0.95)}),
    ],
    "S5": [
        ("confirmed", S5_DEAD),
        ("refined", {**S5_DEAD, "query_mean_ratio": 20.0}),
        ("refined", {**S5_DEAD, "query_mean_ratio": 20.0, "query_median_ratio": (0.05, 0.2)}),
        ("refuted", S5_ALIVE),
        ("inconclusive", {**S5_DEAD, "logit_median_ratio": (0.05, 0.2)}),
        ("inconclusive", {**S5_ALIVE, "logit_median_ratio": (0.05, 0.2)}),
    ],
    "S5b": [
        ("confirmed", S5B_DIAGONAL),
        ("refined", {**S5B_DIAGONAL, "off_share_sharp": 0.4}),
        ("refined", {**S5B_DIAGONAL, "off_share_sharp": 0.4, "off_share_uniform": (0.005, 0.02)}),
        ("refuted", {**S5B_DIAGONAL, "diagonal_error": 0.1}),
        ("inconclusive", {**S5B_DIAGONAL, "diagonal_error": (0.0, 1e-3)}),
        ("inconclusive", {**S5B_DIAGONAL, "diagonal_only_error": (0.0, 0.02)}),
    ],
    "S7": [
        ("confirmed", {}),
        ("refined", {"half": 0.004}),
        ("refined", {"model": 0.125}),
        ("refuted", {"half": 0.004, "model": 0.125}),
        ("inconclusive", {"half": 0.004, "model": (0.4, 0.6)}),
        ("inconclusive", {"head": 3.0}),
    ],
    "H2": [
        ("confirmed", H2_BOUNDED),
        ("refined", {**H2_BOUNDED, "weight_excess_most": 30.0}),
        ("refuted", {**H2_BOUNDED, "weight_excess_most": 90.0, "weight_excess_least": 30.0}),
        ("refuted", {**H2_BOUNDED, "score_excess": 2.0}),
        ("inconclusive", {**H2_BOUNDED, "weight_excess_most": (0.0, 1.0)}),
    ],
    "D1": [
        ("confirmed", D1_FALLS),
        ("refined", {**D1_FALLS, "spearman": 0.2}),
        ("refined", {**D1_FALLS, "spearman_no_sink": 0.2}),
        ("refuted", {**D1_FALLS, "spearman": 0.2, "spearman_no_sink": -0.3}),
        ("inconclusive", {**D1_FALLS, "spearman": (-0.7, -0.3)}),
        ("inconclusive", {**D1_FALLS, "spearman_random": -0.9}),  # the control shows the same
    ],
    "D6": [
        ("confirmed", D6_PARKED),
        ("refined", {**D6_PARKED, "sink_heads": 0.05}),
        ("refined", {**D6_PARKED, "excess_other_token": 0.01}),
        ("refuted", {**D6_PARKED, "excess": 0.01}),
        ("inconclusive", {**D6_PARKED, "excess": (0.05, 0.2)}),
    ],
    "C1": [
        ("confirmed", C1_HOLDS),
        ("refined", {**C1_HOLDS, "layer_exponent": 1.2}),
        ("refined", {**C1_HOLDS, "excess_least": -0.6}),
        ("refuted", {**C1_HOLDS, "excess_least": -0.9, "excess_most": -0.8}),
        ("refuted", {**C1_HOLDS, "excess_least": 0.3, "excess_most": 0.8, "layer_exponent": 1.0}),
        ("inconclusive", {**C1_HOLDS, "excess_most": (0.1, 0.3)}),
        ("inconclusive", {**C1_HOLDS, "layer_exponent": (1.7, 1.9)}),
    ],
    "C1b": [
        ("confirmed", C1B_HOLDS),
        ("refuted", {**C1B_HOLDS, "scores_d": 0.02}),
        ("refuted", {**C1B_HOLDS, "scores_d": (0.0, 0.2)}),
        ("refuted", {**C1B_HOLDS, "scores_n": 1.0}),
        ("inconclusive", {**C1B_HOLDS, "scores_d": (0.4, 0.8)}),
        ("inconclusive", {**C1B_HOLDS, "scores_n": 1.7}),
    ],
    "C2": [
        ("confirmed", C2_HOLDS),
        ("confirmed", {**C2_HOLDS, "memory_forward": 0.1}),  # less than O(n) is within O(n)
        ("refined", {**C2_HOLDS, "flops_forward": (1.0, 1.0)}),  # exactly as many is not more
        ("refined", {**C2_HOLDS, "flops_forward": 0.5, "flops_training": 0.6, "flops_causal": 0.3}),
        ("refuted", {**C2_HOLDS, "error_ratio": 3.0}),
        ("refuted", {**C2_HOLDS, "memory_training": 2.0}),
        ("refuted", {**C2_HOLDS, "bytes_training": (1.0, 1.0)}),
        ("inconclusive", {**C2_HOLDS, "error_ratio": (1.5, 2.5)}),
        ("inconclusive", {**C2_HOLDS, "memory_forward": (0.8, 1.3)}),
        ("inconclusive", {**C2_HOLDS, "flops_training": (0.9, 1.1)}),
    ],
}  # fmt: skip


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
    assert claim.least_count >= (5 if claim_id.startswith("D") else 16)


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
