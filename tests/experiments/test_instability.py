"""Alarms and leads on series made by hand, and the smoke run."""

import math

import numpy as np
import pandas as pd
import pytest

from experiments import instability
from experiments.instability import EXPERIMENT, InstabilityConfig
from experiments.instability import results as instability_results
from experiments.instability.config import ARMS, MEASURES
from experiments.instability.results import SIGNALS, divergence, edge_of, sensitivity, watch

SMOKE = EXPERIMENT.preset("smoke")
MADE = InstabilityConfig(learning_rates=(0.01, 0.1), steps=80, look=2, seeds=20)  # 40 looks


@pytest.fixture(scope="module")
def result():
    return instability.run(SMOKE)


def made(*, normed_diverges: bool) -> pd.DataFrame:
    """Runs that are quiet at 0.01, and at 0.1 grow their logits at look 10, their gradients at 20, and lose at 30."""
    looks = np.arange(40)
    rows = []
    for arm in ARMS:
        for rate in MADE.rates:
            for seed in range(20):
                wrong = rate == 0.1 and (arm == "plain" or normed_diverges)
                noise = 0.01 * seed / 20 * (rate == 0.01)
                series = {
                    "loss": 3 - looks / 40 + noise + 4.0 * wrong * (looks >= 30),
                    "logit": math.e ** (1 + noise + 3.0 * wrong * (looks >= 10)),
                    "entropy": 0.8 - noise - 0.5 * wrong * (looks >= 10),
                    "gradient_norm": math.e ** (noise + 3.0 * wrong * (looks >= 20)),
                    "output": np.full(40, 5 + noise),
                }
                rows += [
                    {"arm": arm, "rate": rate, "seed": seed, "step": 2 * (look + 1)}
                    | {name: np.broadcast_to(series[name], 40)[look] for name in MEASURES}
                    for look in looks
                ]
    return pd.DataFrame(rows)


def test_leads_count_steps_from_the_alarm_to_the_divergence():
    found = watch(MADE, made(normed_diverges=False))
    expected = {"logit": 40, "entropy": 40, "gradient": 20, "loss": 0, "output": 0}
    for name in SIGNALS:
        assert np.isnan(found.leads[name][0]).all()  # no run at the lowest rate diverged
        np.testing.assert_array_equal(found.leads[name][1], expected[name])
        np.testing.assert_array_equal(found.by_seed(name), [expected[name]] * 20)


def test_every_signal_alarms_on_as_many_stable_runs():
    found = watch(MADE, made(normed_diverges=False))
    for name in ("logit", "entropy", "gradient", "output"):
        alarms = found.signals[name][found.stable].max(axis=-1) > found.lines[name]
        assert alarms.sum() == 1  # of 20


def test_attention_tells_first_and_the_norm_stops_it():
    table = made(normed_diverges=False)
    (outcome,) = instability_results.judge(MADE, table.sample(frac=1, random_state=0))
    assert outcome.verdict == "confirmed"
    assert outcome.evidence["logit_ahead"].value == 20
    assert outcome.evidence["plain"].value == 1
    assert outcome.evidence["normed"].value == 0
    assert "20 plain runs diverge, half of them from 0.1 on" in outcome.scope


def test_a_norm_that_changes_nothing_refines_it():
    (outcome,) = instability_results.judge(MADE, made(normed_diverges=True))
    assert outcome.verdict == "refined"
    assert "QK-norm does not stop it" in outcome.because


def test_nothing_is_settled_where_no_run_diverges():
    table = made(normed_diverges=False).query("rate == 0.01")
    quiet = pd.concat([table, table.assign(rate=0.1)])
    (outcome,) = instability_results.judge(MADE, quiet)
    assert outcome.verdict == "inconclusive"
    assert math.isnan(outcome.evidence["plain"].value)
    assert "no rate" in outcome.scope


def test_what_is_not_finite_has_diverged_and_alarms_nobody():
    table = made(normed_diverges=False)
    broken = (table["seed"] == 3) & (table["rate"] == 0.1) & (table["step"] > 30)
    table.loc[broken, list(MEASURES)] = np.nan
    assert divergence(MADE, table, "plain")[1, 3] == 15
    found = watch(MADE, table)
    assert found.leads["gradient"][1, 3] == 0
    assert found.leads["logit"][1, 3] == 10


def test_the_beginning_of_training_is_no_alarm():
    table = made(normed_diverges=False)
    table.loc[table["step"] <= 8, "gradient_norm"] = 1e6  # a tenth
    assert watch(MADE, table).leads["gradient"][1].tolist() == [20] * 20


@pytest.mark.parametrize(
    ("diverged", "edge"),
    [([[0, 0], [1, 0], [1, 1]], 1), ([[0, 0], [0, 0], [1, 1]], 2), ([[0, 0], [0, 0], [0, 0]], None)],
)
def test_the_edge_is_the_lowest_rate_at_which_half_diverge(diverged, edge):
    assert edge_of(np.array(diverged, bool)) == edge


def test_a_wrong_rate_costs_no_more_than_learning_nothing():
    runs, noise = made(normed_diverges=False), 0.01 * np.arange(20) / 20
    np.testing.assert_allclose(sensitivity(MADE, runs, "plain"), 39 / 80, rtol=1e-12)  # half of what was learned
    np.testing.assert_allclose(sensitivity(MADE, runs, "qk_norm"), noise / 2, atol=1e-12)
    runs.loc[(runs.arm == "plain") & (runs.rate == 0.1), "loss"] = np.nan
    np.testing.assert_allclose(sensitivity(MADE, runs, "plain"), 39 / 80, rtol=1e-12)


def test_runs_of_a_seed_begin_alike(result):
    first = result.measurements.query("step == step.min() and rate == 0.01")
    losses = first.pivot_table(index="seed", columns="arm", values="loss")
    np.testing.assert_allclose(losses["plain"], losses["qk_norm"], rtol=0.02)  # the norm changes little at first
    assert (np.ptp(losses.to_numpy(), axis=0) > 0.01).all()  # seeds differ


def test_the_highest_rate_breaks_what_the_lowest_learns(result):
    lost = divergence(SMOKE, result.measurements, "plain") < SMOKE.looks
    assert not lost[0].any()
    assert lost[1].all()


def test_the_norm_holds_the_logits(result):
    largest = result.measurements.query("rate == 1.0").groupby("arm")["logit"].max()
    assert largest["qk_norm"] < largest["plain"] / 3


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert len(result.measurements) == 2 * 2 * 3 * 10
    assert not result.measurements[list(MEASURES)].isna().any(axis=None)
    assert len(result.figure().axes) == 4
    assert [len(table.rows) for table in result.tables] == [4, 5, 3]
    (outcome,) = result.claims
    assert "3 independent runs; the rule needs 10" in outcome.because


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 10, "look": 8}, "steps must be a multiple of look = 8, got 10"),
        ({"learning_rates": (0.1,)}, "learning_rates must hold at least two rates"),
        ({"model_width": 10, "num_heads": 4}, "model_width must be a multiple of 2 num_heads = 8, got 10"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        InstabilityConfig(**changes)
