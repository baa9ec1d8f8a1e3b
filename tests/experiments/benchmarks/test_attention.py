"""The benchmark as a whole, at sizes that say nothing about speed: who takes part, who does not and why."""

import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import masks
from experiments.benchmarks import attention, problems, sides
from experiments.benchmarks.attention import EXPERIMENT, AttentionConfig
from experiments.benchmarks.attention_results import races
from experiments.benchmarks.problems import CASES, Problem
from experiments.benchmarks.race import PRODUCT, Entrant, race
from experiments.benchmarks.sides import SIDES, Contestant

CHOSEN = tuple(name for name in SIDES if name != "default")  # which is one of the others
SMALL = {"lengths": (24,), "heads": 4, "head_dim": 8, "long_length": 24, "sides": CHOSEN}
HERE = {name for name in CHOSEN if sides.installed(SIDES[name].package)}


@pytest.fixture(scope="module")
def forward():
    """Every case forward."""
    return attention.run(AttentionConfig(**SMALL, directions=("forward",)))


@pytest.fixture(scope="module")
def both():
    """One case with its gradients."""
    return attention.run(AttentionConfig(**SMALL, cases=("causal",), directions=("forward_backward",)))


def test_every_side_that_is_here_returns_the_same_numbers_in_every_case(forward):
    rows = forward.measurements
    assert {"blockwise", "dense", "jax.nn", "flax.nnx"} <= HERE
    for case in CASES:
        found = rows[(rows["case"] == case) & (rows["measure"] == "difference")].set_index("side")["value"]
        assert set(found.index) == HERE, case
        assert (found < 1e-5).all(), found


def test_gradients_are_the_same_as_well(both):
    found = both.measurements.query("measure == 'difference'").set_index("side")["value"]
    assert set(found.index) == HERE
    assert (found < 1e-5).all()


def test_who_is_not_here_is_named_and_all_others_are_timed(forward):
    rows = forward.measurements
    absent = set(CHOSEN) - HERE
    for found in races(rows):
        if found.case in CASES:
            assert found.notes == {side: f"absent: {SIDES[side].package} is not installed" for side in absent}
    for case in CASES:
        timed = rows[(rows["case"] == case) & rows["seconds"].notna()]
        assert set(timed["side"]) - {"matrix product (torch)"} == HERE | {PRODUCT}
        assert (timed.groupby("side")["round"].nunique() == 7).all()
    titles = [table.title for table in forward.tables]
    assert titles[0] == "Time over that of blockwise, forward"
    assert (titles[-1] == "Not timed") == bool(absent)


def test_a_library_that_is_not_installed_is_named_in_the_tables(monkeypatch):
    monkeypatch.setattr(sides, "installed", lambda package: package not in ("flax", "tokamax", "torch"))
    chosen = ("blockwise", "flax.nnx", "torch_sdpa", "tokamax_chunked")
    config = AttentionConfig(**{**SMALL, "sides": chosen}, cases=("full",), directions=("forward",))
    found = attention.run(config)
    ratios, *_, missing = found.tables
    assert ratios.rows == (("full", "24", "1", "–", "–", "–"),)
    assert missing.rows == tuple(
        (side, f"absent: {SIDES[side].package} is not installed", "full-24-forward") for side in chosen[1:]
    )
    versions = EXPERIMENT.inputs(config)
    assert versions == {"flax": "absent", "tokamax": "absent", "torch": "absent"}


def test_who_is_left_out_at_long_lengths_is_named_and_the_others_are_checked_all_the_same():
    config = AttentionConfig(**SMALL, cases=("full",), directions=("forward",), square_length=23)
    (found,) = races(attention.run(config).measurements)
    assert found.notes["dense"] == found.notes["flax.nnx"] == "left out above n = 23"
    checked = {side for side, measure in found.values if measure == "difference"}
    assert checked == HERE - {"dense", "flax.nnx"}


def test_statistics_and_patterns_are_timed_against_what_they_add_to(forward):
    tables = {table.title: table for table in forward.tables}
    statistics = tables["Time with statistics over that of the output alone"].rows
    assert {(row[2], row[3]) for row in statistics} == {
        (side, variant) for side in ("blockwise", "dense") for variant in attention.VARIANTS
    }
    patterns = tables["Time of a pattern over that of the full square, one head"].rows
    assert [row[3] for row in patterns] == list(attention.PATTERNS)
    assert patterns[0][5] == "1"


def test_the_figure_has_a_panel_for_each_case_and_direction(forward, both):
    assert [len(result.figure().axes) for result in (forward, both)] == [len(CASES), 1]


def test_who_returns_other_numbers_is_not_timed():
    def contestant(array):
        return Contestant(lambda: None, lambda: [array], None)

    expected = [np.array([1.0, -2.0])]
    rows = race(
        {
            "right": Entrant(contestant(np.array([1.0, -2.0 + 1e-5])), expected),
            "wrong": Entrant(contestant(np.array([1.0, -2.001])), expected),
            "broken": Entrant(contestant(np.array([1.0, np.nan])), expected),
        },
        rounds=7,
        torch=False,
    )
    assert {row["side"] for row in rows if "seconds" in row} == {"right", PRODUCT}
    notes = {row["side"]: row["note"] for row in rows if "note" in row}
    assert notes == {
        "wrong": "returns other numbers: 0.0005 of the largest entry off",
        "broken": "returns other numbers: inf of the largest entry off",
    }


def test_results_of_another_shape_are_a_mistake_of_ours():
    with pytest.raises(ValueError, match=r"same shape, got \(2,\) and \(3,\)"):
        problems.largest_difference([np.zeros(2)], [np.zeros(3)])
    assert problems.largest_difference([np.zeros(2)], [np.zeros(2)]) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_pattern_says_as_a_mask_what_the_case_says_in_arguments(name):
    case, n = CASES[name], 24
    problem = Problem(case, n, heads=4, width=8)
    said = {"is_causal": case.causal, "local_window_size": problem.window}
    by_arguments = attn_jax.attention_weights(jnp.zeros((n, 1, 4)), jnp.zeros((n, 1, 4)), mask=problem.mask, **said) > 0
    pattern = case.pattern(n)
    by_mask = np.ones((n, n), bool) if pattern is None else masks.materialize(pattern, n)
    np.testing.assert_array_equal(by_arguments[0], by_mask)
    assert (problem.visible is None) == (pattern is None)


def test_the_fraction_of_the_machine_is_of_what_the_pattern_asks_for(forward):
    flops = forward.measurements.query("measure == 'flops'").set_index("case")["value"]
    assert flops["full"] == 2 * 2 * 24 * 24 * 4 * 8
    assert (flops == flops["full"]).all()  # one tile holds this length: nothing is skipped


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"heads": 6}, "heads must be a multiple of 4 for gqa, got 6"),
        ({"rounds": 3}, "rounds must be at least 7"),
        ({"sides": ("jax.nn",)}, "sides must hold one of ours for statistics, got jax.nn"),
        ({"cases": ("dense",)}, "cases must be one of full, causal"),
    ],
)
def test_flags_that_cannot_be_honoured_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        AttentionConfig(**fields)
