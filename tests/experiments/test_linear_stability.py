"""The smoke run against what rounding must do, and the reference against the package's oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import linear_stability
from experiments.linear_stability import EXPERIMENT, StabilityConfig, features, reference, relative_errors
from experiments.linear_stability.results import ARMS, DTYPES, FORMS, errors
from tests import oracles

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return linear_stability.run(CONFIG)


def test_sums_in_float32_err_by_the_rounding_of_the_output_alone(result):
    for dtype in DTYPES:
        unit = float(jnp.finfo(dtype).eps)
        for arm in ARMS:
            for form in FORMS:
                found = errors(result.measurements, dtype, arm, form)
                assert (found < 8 * unit).all(), (dtype, arm, form)
                assert (found > unit / 64).all(), (dtype, arm, form)


def test_sums_in_bfloat16_stall_unless_the_memory_fades(result):
    own = {arm: errors(result.measurements, "bfloat16", arm, "own sums").mean(0) for arm in ARMS}
    assert own["normalised"][-1] > 10 * own["normalised"][0]
    assert own["unnormalised"][-1] > 2 * own["unnormalised"][0]
    assert own["fading"][-1] < 2 * own["fading"][0]


def test_all_that_was_asked_for_is_measured_and_shown(result):
    rows = result.measurements
    assert set(rows["n"]) == {64, 512}
    forms = 2 * 2 + 1  # the parallel form at the shorter length alone
    assert len(rows) == CONFIG.seeds * (3 * 3 * forms + 2 * 3 * 2 + 3 * 2)
    (outcome,) = result.claims
    assert outcome.evidence["kept"].count == CONFIG.seeds
    assert outcome.evidence["growth_tokens"].value > 0.2
    assert len(result.figure().axes) == 3
    assert len(result.tables[0].rows) == 3 * (3 * 3 + 1) + 2 * 3


@pytest.mark.parametrize("arm", ARMS)
def test_the_reference_is_the_definition(arm):
    config = StabilityConfig(lengths=(8, 20), square_length=8, width=3, rows=4, seeds=2, decay=0.8)
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 20, 1, 3))
    mapped = features(query), features(key)
    np.testing.assert_allclose(mapped[0], oracles.elu_plus_one(np.asarray(query)), rtol=1e-6)
    log_decay = np.log([0.8]) if ARMS[arm].fades else None
    whole = oracles.recurrence(*mapped, value, log_decay, normalize=ARMS[arm].normalize).output[:, :, 0]
    found = reference(config, mapped, value, ARMS[arm])
    np.testing.assert_allclose(found[:, 0], whole[:, 4:8], rtol=1e-12)
    np.testing.assert_allclose(found[:, 1], whole[:, 16:20], rtol=1e-12)


def test_what_is_not_finite_is_all_wrong():
    exact = np.ones((2, 2, 3, 4))
    found = exact.copy()
    found[0, 1, 2, 3] = np.inf
    found[1, 0] = 1.5
    np.testing.assert_array_equal(relative_errors(found, exact), [[0, 1], [0.5, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (256,)}, "lengths must hold two lengths"),
        ({"square_length": 128}, "square_length must be at least 256, got 128"),
        ({"rows": 512}, "rows must be at most 256, got 512"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StabilityConfig(**changes)
