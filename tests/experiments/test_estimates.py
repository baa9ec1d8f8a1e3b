"""Intervals against their textbook values."""

import numpy as np
import pandas as pd
import pytest

from experiments import estimates
from experiments.estimates import Estimate


def test_mean_has_students_interval():
    found = estimates.mean([1.0, 2.0, 3.0])
    half = 4.302652729749464 / np.sqrt(3)  # t(0.975, 2) · s/√n with s = 1
    np.testing.assert_allclose((found.value, found.low, found.high), (2, 2 - half, 2 + half), rtol=1e-12)
    assert found.count == 3


def test_one_run_bounds_nothing_and_none_is_not_a_number():
    assert estimates.mean([5.0]) == Estimate(5.0, -np.inf, np.inf, 1)
    empty = estimates.mean([])
    assert np.isnan(empty.value)
    assert empty.count == 0


def test_pairing_removes_what_the_runs_share():
    shared = np.asarray([0.0, 100.0, -50.0])
    found = estimates.difference(shared + 1, shared)
    assert (found.value, found.low, found.high) == (1, 1, 1)
    with pytest.raises(ValueError, match="paired"):
        estimates.difference([1.0], [1.0, 2.0])


def test_ratio_is_geometric():
    found = estimates.ratio([1.0, 4.0], [2.0, 2.0])  # a half and a double
    np.testing.assert_allclose(found.value, 1.0)
    np.testing.assert_allclose(found.low * found.high, 1.0)


def test_slope_of_exact_lines_is_exact_per_run():
    x = np.asarray([1.0, 2.0, 4.0])
    found = estimates.slope(x, np.stack([3 * x + 1, 5 * x - 2]))
    np.testing.assert_allclose(found.value, 4.0)
    assert found.count == 2
    with pytest.raises(ValueError, match=r"\[runs, 3\]"):
        estimates.slope(x, x[None, :2])


def test_by_run_orders_runs_and_levels():
    table = pd.DataFrame({"seed": [1, 0, 1, 0], "width": [8, 8, 4, 4], "value": [3.0, 1.0, 2.0, 0.0]})
    np.testing.assert_array_equal(estimates.by_run(table, "width"), [[0, 1], [2, 3]])
    np.testing.assert_array_equal(estimates.by_run(table), [0.5, 2.5])


def test_coverage_of_the_interval_is_what_it_says():
    draws = np.random.default_rng(0).standard_normal((4000, 16))
    found = [estimates.mean(row) for row in draws]
    inside = np.mean([e.low <= 0 <= e.high for e in found])
    assert abs(inside - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 4000)


def test_shares_have_wilsons_interval():
    found = estimates.share([True] * 9 + [False])
    assert (found.value, found.count) == (0.9, 10)
    # Wilson 1927: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    assert (found.low, found.high) == pytest.approx((0.59585, 0.98212), abs=1e-4)
    certain = estimates.share([True] * 10)
    assert certain.high == 1.0
    assert certain.low == pytest.approx(0.72247, abs=1e-4)


def test_the_difference_of_shares_has_newcombes_interval():
    found = estimates.share_difference([True] * 56 + [False] * 14, [True] * 48 + [False] * 32)  # his table II, (a)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    assert found.count == 70
