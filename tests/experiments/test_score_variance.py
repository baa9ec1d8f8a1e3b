"""The smoke run against what is known of q·k without running anything."""

import numpy as np
import pytest

from experiments import estimates, score_variance
from experiments.score_variance import EXPERIMENT, ScoreVarianceConfig

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return score_variance.run(CONFIG)


def mean_by_width(result, part, arm, measure):
    chosen = result.measurements.query("part == @part and arm == @arm and measure == @measure")
    return estimates.by_run(chosen, "head_dim").mean(axis=0)


def test_the_verdicts_are_those_of_the_known_formulas(result):
    verdicts = {outcome.claim.id: outcome for outcome in result.claims}
    assert {name: outcome.verdict for name, outcome in verdicts.items()} == {
        "S1": "confirmed",
        "S2": "refined",
        "S3": "refined",
    }
    evidence = verdicts["S1"].evidence
    assert evidence["slope"].value == pytest.approx(1, abs=0.02)
    assert evidence["one_white_ratio"].value == pytest.approx(1, abs=0.05)  # tr ΣqI = d
    assert evidence["heavy_spread"].low > 1.5


@pytest.mark.parametrize(("arm", "factor"), [("inverse_sqrt", 1), ("half_inverse_sqrt", 1 / 4), ("temperature", 1)])
def test_rules_leave_their_multiple_of_one_at_every_width(arm, factor, result):
    np.testing.assert_allclose(mean_by_width(result, "rules", arm, "variance"), factor, rtol=0.12)


def test_one_over_d_leaves_one_over_d(result):
    expected = 1 / np.asarray(CONFIG.widths)
    np.testing.assert_allclose(mean_by_width(result, "rules", "inverse", "variance"), expected, rtol=0.12)


def test_norms_leave_the_variance_of_a_cosine(result):
    # √d · cos of independent directions has variance d · 1/d = 1, without the spread of the norms
    np.testing.assert_allclose(mean_by_width(result, "rules", "qk_norm", "variance"), 1, rtol=0.04)


def test_two_correlated_sides_follow_the_trace(result):
    widths = np.asarray(CONFIG.widths)
    trace = widths * (1 + (widths - 1) * CONFIG.correlation**2)
    found = mean_by_width(result, "components", "both_correlated", "variance")
    np.testing.assert_allclose(found, trace, rtol=0.25)


@pytest.mark.parametrize(
    ("arm", "variance"), [("lecun", 1), ("xavier", 1), ("mup", 1), ("normal", 128 * 0.02**2), ("without", 16)]
)
def test_initialisers_set_the_variance_of_q_and_k(arm, variance, result):
    for measure in ("query_variance", "key_variance"):
        chosen = result.measurements.query(f"part == 'initializers' and arm == {arm!r} and measure == {measure!r}")
        assert chosen["value"].mean() == pytest.approx(variance, rel=0.03)


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert len(result.measurements) == 16 * (4 * 4 + 6 * 4 * 2 + 5 * 3)
    assert (
        not result.measurements[["unit", "part", "arm", "measure", "head_dim", "seed", "value"]].isna().any(axis=None)
    )
    assert len(result.figure().axes) == 3
    (table,) = result.tables
    assert [row[0] for row in table.rows] == ["4", "16", "64", "256"]


def test_another_seed_is_another_sample_and_the_same_seed_the_same():
    def measured(seed):
        config = EXPERIMENT.preset("smoke", seed=seed, seeds=2, head_dims=(2, 4), length=8)
        return [row["value"] for row in EXPERIMENT.units(config)[0].measure()]

    assert measured(0) == measured(0)
    assert measured(0) != measured(1)


@pytest.mark.parametrize(
    ("fields", "says"), [({"head_dims": (4,)}, "at least two widths"), ({"model_width": 100}, "multiple of 64")]
)
def test_a_configuration_that_cannot_be_measured_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        ScoreVarianceConfig(**fields)
