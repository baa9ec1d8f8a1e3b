"""The benchmark of linear attention at sizes that say nothing about speed."""

import numpy as np
import pytest

from experiments.benchmarks import linear
from experiments.benchmarks.linear import CHUNKS, GROWING, SIDES, TILES, TOKENS, LinearConfig
from experiments.benchmarks.problems import DIRECTIONS

CONFIG = LinearConfig(length=70, lengths=(64, 256), heads=2, growing_heads=1, head_dim=4)


@pytest.fixture(scope="module")
def result():
    return linear.run(CONFIG)


def test_chunks_and_tokens_return_the_same_numbers(result):
    found = result.measurements.query("measure == 'difference'")
    assert len(found) == 2 * 2
    assert (found["value"] < 1e-5).all()
    assert set(found["side"]) == {CHUNKS, TOKENS}


def test_every_side_is_timed_and_ratios_are_of_medians(result):
    for direction in DIRECTIONS:
        rows = result.measurements.query("part == 'sides' and direction == @direction")
        times = rows.dropna(subset="seconds").groupby("side")["seconds"]
        assert set(SIDES) < set(times.groups)
        assert (times.size() == CONFIG.rounds).all()
        medians = times.median()
        for side in (TOKENS, TILES):
            ratio = linear.over(result.measurements, side, CHUNKS, direction)
            assert ratio.value == pytest.approx(medians[side] / medians[CHUNKS])


def test_growth_is_fitted_over_all_lengths(result):
    for name in GROWING:
        for direction in DIRECTIONS:
            rows = result.measurements.query("part == @name and direction == @direction")
            medians = rows.dropna(subset="seconds").groupby("n")["seconds"].median()
            slope = np.log(medians[256] / medians[64]) / np.log(4)
            assert linear.time_exponent(result.measurements, name, direction).value == pytest.approx(slope)
            assert linear.memory_exponent(result.measurements, name, direction).value < 1.1


def test_tables_and_figure(result):
    compared, grown = result.tables
    assert len(compared.rows) == len(SIDES) * 2
    assert len(grown.rows) == len(GROWING) * 2
    assert len(result.figure().axes) == 2


def test_one_length_has_no_exponent():
    with pytest.raises(ValueError, match="lengths must hold two lengths"):
        LinearConfig(lengths=(64,))
