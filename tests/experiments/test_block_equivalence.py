"""The smoke run, and its float64 reference against the oracle of the tests."""

import numpy as np
import pytest

from attn_jax import masks
from experiments import block_equivalence, counting
from experiments.block_equivalence import EXPERIMENT, PATTERNS, RESULTS, EquivalenceConfig
from tests import oracles

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return block_equivalence.run(CONFIG)


@pytest.mark.parametrize("name", PATTERNS)
def test_the_reference_is_the_oracle(name):
    rng, n = np.random.default_rng(0), 16
    query, key, value, cotangent = rng.standard_normal((4, 2, n, 3))
    mask = PATTERNS[name](n)
    visible = np.ones((n, n), bool) if mask is None else np.asarray(masks.materialize(mask, n))
    found = block_equivalence.reference(query, key, value, cotangent, visible)
    rows_first = [x.swapaxes(0, 1) for x in (query, key, value)]
    np.testing.assert_allclose(found[0].swapaxes(0, 1), oracles.attention(*rows_first, mask=visible).output, rtol=1e-12)
    for index, (array, gradient) in enumerate(zip((query, key, value), found[1:], strict=True)):
        direction, step = rng.standard_normal(array.shape), 1e-6

        def objective(moved, index=index):
            arrays = [query, key, value]
            arrays[index] = moved
            return (block_equivalence.reference(*arrays, cotangent, visible)[0] * cotangent).sum()

        difference = objective(array + step * direction) - objective(array - step * direction)
        assert difference / (2 * step) == pytest.approx((gradient * direction).sum(), rel=1e-6)


def test_errors_are_those_of_float32(result):
    errors = result.measurements.query("measure == 'error'")
    assert len(errors) == 2 * len(RESULTS) * 16
    assert (errors["value"] > 1e-9).all()
    assert (errors["value"] < 1e-6).all()


def test_the_verdict_is_about_flops_alone(result):
    (outcome,) = result.claims
    assert outcome.verdict == "refined"
    assert outcome.evidence["error_ratio"].count == 16
    assert outcome.evidence["flops_forward"].value == 1
    assert outcome.evidence["flops_training"].value == 7 / 6
    assert outcome.evidence["flops_causal"].value < 1
    assert outcome.evidence["memory_dense"].value == pytest.approx(2, abs=0.1)
    assert outcome.evidence["memory_training"].high < 1.1


def test_work_is_counted_for_every_mask(result):
    counted = result.measurements.query("measure == 'flops' and form == 'tiled' and stage == 'forward'")
    assert list(counted["mask"]) == list(PATTERNS)
    full = counting.dense_flops("forward", CONFIG.counted_length, heads=CONFIG.heads, width=CONFIG.head_dim)
    assert counted["value"].iloc[0] == full
    assert (counted["value"] <= full).all()


def test_all_is_shown(result):
    assert len(result.figure().axes) == 3
    assert [len(table.rows) for table in result.tables] == [1, 2 * len(PATTERNS), 4]


def test_one_length_fits_no_exponent():
    with pytest.raises(ValueError, match=r"memory_lengths must hold two lengths.*got \(64,\)"):
        EquivalenceConfig(memory_lengths=(64,))
