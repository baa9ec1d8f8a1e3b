"""The smoke run against what is known of saturated softmaxes without running anything."""

import math

import numpy as np
import pytest

from experiments import estimates, softmax_saturation
from experiments.softmax_saturation import EXPERIMENT
from experiments.softmax_saturation.config import SATURATION
from experiments.softmax_saturation.results import by_width, gaussian_end, onset

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return softmax_saturation.run(CONFIG)


def outcome(result, claim):
    (found,) = [x for x in result.claims if x.claim.id == claim]
    return found


def test_every_claim_is_settled(result):
    verdicts = {x.claim.id: x.verdict for x in result.claims}
    assert verdicts == {"S4": "refined", "S5": "refined", "S5b": "refined", "S7": "refuted"}


def test_unscaled_rows_sharpen_with_width_and_scaled_rows_do_not(result):
    for n in CONFIG.lengths:
        weight, entropy = (
            by_width(result.measurements, "rows", "none", measure, n).mean(axis=0)
            for measure in ("max_weight", "normalized_entropy")
        )
        assert (np.diff(weight) > 0).all()
        assert (np.diff(entropy) < 0).all()
        scaled = by_width(result.measurements, "rows", "inverse_sqrt", "normalized_entropy", n).mean(axis=0)
        # from d_k = 64 on the logits are Gaussian of variance 1: H ≈ ln n − 1/2
        np.testing.assert_allclose(scaled[-2:], 1 - 0.5 / math.log(n), atol=0.05)


def test_a_saturated_row_has_participation_of_random_energies(result):
    # Σp² ≈ 1 − 1/r for Gaussian logits of sd r·√(2 ln n), r ≥ 2
    r = math.sqrt(512) / math.sqrt(2 * math.log(64))
    found = by_width(result.measurements, "rows", "none", "sum_p2", 64)[:, -1].mean()
    assert found == pytest.approx(1 - 1 / r, abs=0.05)


def test_the_median_gradient_dies_and_the_mean_at_the_query_does_not(result):
    evidence = outcome(result, "S5").evidence
    assert evidence["logit_median_ratio"].high < 0.1
    assert evidence["query_mean_ratio"].low > 1
    # at q the gradient is scale · Kᵀ · (gradient at the logits): unscaled pays back about √d_k
    payback = evidence["query_mean_ratio"].value / evidence["logit_mean_ratio"].value
    assert payback == pytest.approx(math.sqrt(512), rel=0.1)


def test_the_jacobian_is_diagonal_minus_outer_product(result):
    evidence = outcome(result, "S5b").evidence
    assert evidence["diagonal_error"].high < 1e-9  # float64
    assert evidence["row_sum"].high < 1e-9
    assert 0.2 < evidence["off_share_sharp"].value < 0.5  # two keys that compete share it equally
    trace, norm = (by_width(result.measurements, "jacobian", "none", m) for m in ("trace", "frobenius"))
    assert (norm <= trace + 1e-12).all()  # positive semidefinite: ‖J‖ ≤ tr J
    assert (trace <= 1 - 1 / CONFIG.jacobian_length).all()


def test_other_readings_of_d_leave_other_variances(result):
    evidence = outcome(result, "S7").evidence
    assert evidence["head"].value == pytest.approx(1, abs=0.1)
    assert evidence["model"].value == pytest.approx(64 / 128, abs=0.05)
    assert evidence["half"].value == pytest.approx(1 / (4 * 64), rel=0.1)


def test_the_small_variance_form_ends_near_half(result):
    errors = estimates.by_run(result.measurements.query("part == 'small_variance' and length == 64"), "ratio").mean(
        axis=0
    )
    assert np.abs(errors[: SATURATION.index(0.2)]).max() < 0.01
    assert 0.35 < gaussian_end(CONFIG, result.measurements).mean() < 0.65


def test_the_onset_lies_where_the_weight_passes_one_half(result):
    found = onset(CONFIG, result.measurements, 64)
    weight = by_width(result.measurements, "rows", "none", "max_weight", 64)
    assert ((found > 4) & (found < 64)).all()
    assert (weight[:, 0] < 0.5).all()
    assert (weight[:, 2] > 0.5).all()


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert set(result.measurements["unit"]) == set(result.seconds)
    assert not result.measurements[["unit", "part", "measure", "seed", "value"]].isna().any(axis=None)
    assert len(result.figure().axes) == 6
    assert [len(table.rows) for table in result.tables] == [4, 4, 4]
