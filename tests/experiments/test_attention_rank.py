"""The smoke run against what linear algebra says, and the patterns against their reference values."""

import numpy as np
import pytest

from experiments import attention_rank
from experiments.attention_rank import EXPERIMENT, RankConfig

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return attention_rank.run(CONFIG)


def values(result, part, arm, measure):
    chosen = result.measurements.query("part == @part and arm == @arm and measure == @measure")
    return chosen.pivot_table(index="seed", columns="head_dim", values="value").to_numpy()


def test_scores_have_exactly_the_rank_of_the_head(result):
    np.testing.assert_array_equal(values(result, "scores", "none", "numerical"), [[2, 8, 32]] * 16)


def test_the_softmax_lifts_the_rank(result):
    (outcome,) = result.claims
    assert outcome.verdict == "refuted"
    assert outcome.evidence["score_excess"].value == 0
    assert (values(result, "weights", "inverse_sqrt", "numerical")[:, 0] > 10).all()


def test_ranks_are_ordered(result):
    for part, arm in (("scores", "none"), ("weights", "none"), ("causal_weights", "inverse_sqrt")):
        numerical, stable, effective = (values(result, part, arm, name) for name in attention_rank.RANKS)
        assert (stable <= numerical).all()
        assert (effective <= CONFIG.length).all()
        assert (stable >= 1).all()


def test_patterns_have_their_reference_ranks_at_128():
    config = EXPERIMENT.preset("smoke", length=128)
    rows = EXPERIMENT.units(config)[-1].measure()
    found = {(row["arm"], row["measure"]): row["value"] for row in rows}
    reference = {
        "identity": (128, 128, 128),
        "uniform, two-way": (1, 1, 1),
        "uniform, causal": (128, 2.0, 32),
        "all on one key": (1, 1, 1),
        "0.9 on one key, 0.1 on itself": (128, 1.01, 28.9),
    }
    for pattern, expected in reference.items():
        measured = [found[pattern, name] for name in attention_rank.RANKS]
        np.testing.assert_allclose(measured, expected, rtol=0.01)


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert len(result.measurements) == 16 * 3 * 3 * (1 + 2 + 2) + 5 * 3
    assert len(result.figure().axes) == 3
    assert [len(table.rows) for table in result.tables] == [3, 5]


def test_a_bound_that_says_nothing_is_refused():
    with pytest.raises(ValueError, match="head_dims must hold a width of at most n/2 = 16"):
        RankConfig(head_dims=(32,), length=32)
