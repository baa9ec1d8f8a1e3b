"""What is told, from hand-made measurements: when it appears, when it is over, and when there is nothing to tell."""

import dataclasses
import json

import numpy as np
import pytest

from attn_jax.diagnostics.diagnosis.signals import SIGNALS
from attn_jax.training.monitor import ALL, Limits, Watch, explain, find
from attn_jax.training.monitor.findings import PATIENCE, WARM

LAYERS, HEADS = 2, 4
HEALTHY = {
    "normalized_entropy": 0.6,
    "normalized_entropy_no_sink": 0.5,
    "max_logit": 12.0,
    "logit_sd": 2.0,
    "saturated": 0.1,
    "sink_mass": 0.1,
    "output_norm": 1.0,
    "nearest_head": 1,
    "nearest_distance": 0.3,
    "nearest_similarity": 0.5,
}
GRADIENTS = {"query_gradient": 0.1, "key_gradient": 0.1, "value_gradient": 0.5}
EVERY = 10


def row(index, **changes):
    """The measurement after `index` others; a change is `{(layer, head): value}`, of all heads or of one layer."""
    measured = {name: np.full((LAYERS, HEADS), value) for name, value in HEALTHY.items()}
    measured |= {name: np.full(LAYERS, value) for name, value in GRADIENTS.items()}
    for name, change in changes.items():
        for at, value in change.items() if isinstance(change, dict) else [(..., change)]:
            measured[name][at] = value
    lists = {name: [None if x is None else x for x in values.tolist()] for name, values in measured.items()}
    return {"step": 1 + EVERY * index, "kind": "attention", **lists}


def series(*changes):
    return [row(index, **change) for index, change in enumerate(changes)]


def told(findings):
    return [(x.step, x.signal, x.layer, x.heads, x.severity, x.before) for x in findings]


WARM_UP = [{}] * WARM
AT = 1 + EVERY * WARM
CASES = {
    "a large logit": (
        {"max_logit": {(1, 2): 101.0}},
        ("max_logit", (2,), "notice", 101.0, 100.0),
    ),
    "a huge logit": (
        {"max_logit": {(1, 2): 1001.0}},
        ("max_logit", (2,), "serious", 1001.0, 1000.0),
    ),
    "one sharp head": (
        {"normalized_entropy_no_sink": {(1, 0): 0.04}},
        ("sharp_entropy", (0,), "information", 0.04, 0.05),
    ),
    "half of the heads sharp": (
        {"normalized_entropy_no_sink": {(1, 0): 0.04, (1, 3): 0.03}},
        ("sharp_entropy", (0, 3), "notice", 0.03, 0.05),
    ),
    "a layer whose entropy falls": (
        {"normalized_entropy": {1: 0.29}},
        ("entropy_ratio", (), "notice", 0.29 / 0.6, 0.5),
    ),
    "a layer of saturated rows": (
        {"saturated": {1: 0.31}},
        ("saturated", (), "notice", 0.31, 0.3),
    ),
    "large logits in most heads": (
        {"logit_sd": {(1, (0, 1, 2)): 11.0}},
        ("logit_sd", (), "notice", 11.0, 10.0),
    ),
    "a sink": (
        {"sink_mass": {(1, 2): 0.4}},
        ("sink_mass", (2,), "information", 0.4, 0.3),
    ),
    "clones": (
        {"nearest_distance": {(1, (1, 2)): 0.02}, "nearest_similarity": {(1, (1, 2)): 0.97}},
        ("clone_distance", (1, 2), "notice", 0.02, 0.05),
    ),
    "a dead head": (
        {"output_norm": {(1, 3): 0.005}},
        ("dead_output", (3,), "notice", 0.005, 0.01),
    ),
    "a layer of dead heads": (
        {"output_norm": {(1, (0, 1)): 0.005}},
        ("dead_output", (0, 1), "serious", 0.005, 0.01),
    ),
    "no gradient in queries and keys": (
        {"query_gradient": {1: 3e-4}, "key_gradient": {1: 3e-4}},
        ("gradient_ratio", (), "notice", np.hypot(3e-4, 3e-4) / 0.5, 1e-3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_found_at_once_and_named(case):
    changes, (signal, heads, severity, value, limit) = CASES[case]
    (found,) = find(series(*WARM_UP, changes, changes))
    assert told([found]) == [(AT, signal, 1, heads, severity, None)]
    assert found.run is None
    np.testing.assert_allclose([found.value, found.limit], [value, limit])


def test_every_signal_has_a_case():
    assert {case[1][0] for case in CASES.values()} == {signal.name for signal in SIGNALS}


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_sd": {(1, (0, 1)): 30.0}},  # in half of the heads
        {"nearest_distance": 0.01},  # outputs differ
        {"nearest_similarity": 0.99},  # patterns differ
        {"nearest_distance": 0.01, "nearest_similarity": 0.99, "normalized_entropy": 0.95},  # nothing is learned yet
        {"nearest_distance": 0.01, "nearest_similarity": 0.99, "sink_mass": 0.95},  # idle
        {"output_norm": 0.001},  # all alike
        {"value_gradient": 0.0},  # nothing to compare with
        {"saturated": {(1, 0): 0.85}},  # one head
        {"normalized_entropy": {(1, 0): 0.0}},  # one head
    ],
)
def test_what_only_looks_like_a_fault_is_not_told(changes):
    findings = find(series(*WARM_UP, changes))
    assert [x for x in findings if x.signal != "sink_mass"] == []


def test_a_healthy_run_has_no_findings():
    numbers = np.random.default_rng(0)
    rows = []
    for index in range(300):
        progress = index / 300
        noise = {name: numbers.normal(1, 0.1, (LAYERS, HEADS)) for name in HEALTHY}
        values = HEALTHY | {"normalized_entropy": 0.9 - 0.5 * progress, "max_logit": 4 + 40 * progress}
        measured = {name: (values[name] * noise[name]).tolist() for name in HEALTHY}
        rows.append(row(index) | measured)
    assert find(rows) == []


def test_falling_entropy_beside_large_growing_logits_is_serious():
    fallen = {"normalized_entropy": {0: 0.2}}
    (small,) = find(series(*WARM_UP, fallen | {"max_logit": {(0, 1): 90.0}}))
    assert small.severity == "notice"
    grown = find(series(*WARM_UP, fallen | {"max_logit": {(0, 1): 150.0}}))
    assert [(x.signal, x.severity) for x in grown] == [("max_logit", "notice"), ("entropy_ratio", "serious")]
    always_large = find(series(*[{"max_logit": {(0, 1): 150.0}}] * WARM, fallen | {"max_logit": {(0, 1): 150.0}}))
    assert [(x.signal, x.severity) for x in always_large] == [("max_logit", "notice"), ("entropy_ratio", "notice")]


def test_sharp_heads_beside_a_large_logit_are_serious():
    sharp = {"normalized_entropy_no_sink": {0: 0.01}}
    found = find(series(sharp | {"max_logit": {(0, 3): 150.0}}))
    assert [(x.signal, x.severity) for x in found] == [("max_logit", "notice"), ("sharp_entropy", "serious")]


def test_a_running_mean_is_none_after_a_few_measurements():
    assert find(series(*[{}] * (WARM - 1), {"normalized_entropy": 0.1})) == []


def test_an_entropy_that_fell_is_compared_with_what_it_was():
    low, back = {"normalized_entropy": {0: 0.2}}, {"normalized_entropy": {0: 0.55}}
    findings = find(series(*WARM_UP, *[low] * 200, *[back] * PATIENCE))
    assert [(x.severity, x.before) for x in findings] == [("notice", None), (None, "notice")]
    np.testing.assert_allclose(findings[1].value, 0.55 / 0.6)


def test_a_slow_fall_is_followed_by_the_mean():
    falling = [{"normalized_entropy": 0.6 * 0.995**index} for index in range(400)]
    assert find(series(*falling)) == []


def test_what_hovers_at_its_limit_is_told_of_once():
    hovering = [{"max_logit": {(0, 0): value}} for value in [101.0, 82.0, 99.0, 120.0, 70.0, 90.0] * 20]
    assert told(find(series(*hovering))) == [(1, "max_logit", 0, (0,), "notice", None)]


def test_it_is_over_after_it_was_well_back_for_a_while():
    above, back = {"max_logit": {(0, 0): 150.0}}, {"max_logit": {(0, 0): 79.0}}
    almost = series(above, *[back] * (PATIENCE - 1), above, *[back] * PATIENCE, {})
    over = 1 + EVERY * (2 * PATIENCE)
    assert told(find(almost)) == [
        (1, "max_logit", 0, (0,), "notice", None),
        (over, "max_logit", 0, (), None, "notice"),
    ]


def test_it_rises_at_once_and_falls_step_by_step():
    values = [150.0, 1500.0, *[500.0] * PATIENCE, *[10.0] * PATIENCE]
    findings = find(series(*({"max_logit": {(0, 0): value}} for value in values)))
    assert [(x.severity, x.before, x.limit) for x in findings] == [
        ("notice", None, 100.0),
        ("serious", "notice", 1000.0),
        ("notice", "serious", 100.0),
        (None, "notice", 100.0),
    ]


def test_layers_are_followed_apart():
    findings = find(series({"max_logit": {(0, 0): 150.0}}, {"max_logit": {(0, 0): 150.0, (1, 3): 150.0}}))
    assert [(x.step, x.layer, x.heads) for x in findings] == [(1, 0, (0,)), (11, 1, (3,))]


def many(*runs):
    """The measurements of many runs at once."""
    together = []
    for rows in zip(*runs, strict=True):
        names = [name for name in rows[0] if name not in ("step", "kind")]
        together.append({**rows[0], **{name: [row[name] for row in rows] for name in names}})
    return together


def test_runs_are_followed_apart_and_as_if_alone():
    changes = [CASES[case][0] for case in CASES]
    alone = [series(*WARM_UP, change, change) for change in changes]
    together = find(many(*alone))
    for run, rows in enumerate(alone):
        expected = [dataclasses.replace(x, run=run) for x in find(rows)]
        assert [x for x in together if x.run == run] == expected
    assert len(together) == len(changes)


def test_what_is_not_known_changes_nothing():
    """A run that diverged is null from there on: what stands is not over, and nothing new appears."""
    nothing = row(0)
    for name in nothing:
        if name in ALL or name in GRADIENTS:
            nothing[name] = [[None] * HEADS] * LAYERS if name in ALL else [None] * LAYERS
    rows = series(*WARM_UP, {"max_logit": 150.0})
    later = [{**nothing, "step": 1000 + index} for index in range(2 * PATIENCE)]
    assert find(rows + later) == find(rows)


def test_what_is_not_measured_is_not_told():
    rows = [{name: row(0)[name] for name in ("step", "kind", "saturated")}]
    assert find(rows) == []
    rows[0]["saturated"] = [[0.9] * HEADS] * LAYERS
    assert [x.signal for x in find(rows)] == ["saturated", "saturated"]


def test_a_limit_can_be_moved_and_switched_off():
    rows = series({"max_logit": 30.0, "sink_mass": 0.9})
    assert {x.signal for x in find(rows)} == {"sink_mass"}
    assert {x.signal for x in find(rows, Limits(max_logit=20.0))} == {"sink_mass", "max_logit"}
    assert find(rows, Limits(sink_mass=None)) == []
    assert find(series({"max_logit": 1e4}), Limits(serious_max_logit=None))[0].severity == "notice"
    many_heads = {"normalized_entropy_no_sink": 0.01, "output_norm": {0: 0.001}}
    severities = {x.signal: x.severity for x in find(series(many_heads), Limits(share_of_heads=None))}
    assert severities == {"sharp_entropy": "information", "dead_output": "notice"}


def test_tied_keys_have_no_gradient_of_their_own():
    measured = row(0, query_gradient=1e-5)
    del measured["key_gradient"]
    assert [x.signal for x in find([measured])] == ["gradient_ratio", "gradient_ratio"]


def test_whoever_begins_behind_a_log_goes_on_as_if_from_the_start():
    changes = [*WARM_UP, *({"max_logit": value, "normalized_entropy": 0.2} for value in [150.0, 20.0] * PATIENCE)]
    changes += [{"max_logit": 20.0}] * (2 * PATIENCE)
    rows = series(*changes)
    other = {"step": 5, "kind": "train", "loss": 1.0}
    whole = find(rows)
    for cut in (0, 3, WARM + 1, WARM + 7, len(rows) - 4):
        watch = Watch(Limits(), [other, *json.loads(json.dumps(rows[:cut]))])
        later = [x for measured in rows[cut:] for x in watch.look(measured)]
        assert later == [x for x in whole if x.step > 1 + EVERY * (cut - 1)]
    assert len(whole) >= 8


def test_lines_name_step_layer_head_value_limit_link_and_mend():
    rows = series({"max_logit": {(1, 2): 132.4, (1, 3): 101.0}, "sink_mass": 0.5})
    assert explain(find(rows)) == [
        "step 1, notice: largest logit 132, limit 100 (layer 1, heads 2, 3). "
        "projections: QK-norm, clipping, spectral reparametrisation, a lower rate"
    ]
    rows = series(*WARM_UP, {"saturated": {0: 0.5, 1: 0.4}}, *[{}] * PATIENCE)
    assert explain(find(rows)) == [
        f"step {AT}, notice: share of rows with nearly all weight on one key 0.5, limit 0.3 (layer 0; also layer 1). "
        "softmax: the scale, QK-norm; what the mask leaves visible",
        f"step {AT + EVERY * PATIENCE}, over: share of rows with nearly all weight on one key 0.1, limit 0.3 "
        "(layer 0; also layer 1)",
    ]
    (line,) = explain(find(many(series({}), series({"output_norm": {(1, 0): 0.001}}))))
    assert line.startswith(
        "step 1, notice: output as a part of the median head's 0.001, limit 0.01 (run 1, layer 1, head 0)."
    )


def test_a_pair_that_is_no_longer_alike_is_over_without_a_value():
    clones = {"nearest_distance": {(1, 1): 0.02}, "nearest_similarity": {(1, 1): 0.97}}
    lines = explain(find(series(clones, *[{}] * PATIENCE)))
    assert (
        lines[1]
        == f"step {1 + EVERY * PATIENCE}, over: divergence from the nearest head, whose output is alike, (layer 1)"
    )


def test_a_finding_is_a_row_of_the_log():
    (found,) = find(series({"max_logit": {(1, 2): 123.4567891}}))
    assert found.row == {
        "step": 1, "kind": "finding", "run": None, "layer": 1, "heads": (2,), "signal": "max_logit",
        "severity": "notice", "before": None, "value": 123.457, "limit": 100.0,
    }  # fmt: skip
