"""Limits: checked, kept in a file, and taken from a healthy run."""

import dataclasses
import json

import numpy as np
import pytest

from attn_jax.diagnostics.diagnosis.signals import SIGNALS
from attn_jax.training.files import RunError
from attn_jax.training.monitor import Limits, LimitsError, calibrate, find
from tests.training.monitor.test_findings import CASES, WARM_UP, row, series


def test_every_signal_has_a_limit_of_its_direction():
    fields = {field.name: field.metadata["above"] for field in dataclasses.fields(Limits)}
    assert {signal.name: signal.above for signal in SIGNALS}.items() <= fields.items()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_logit": -1.0}, ValueError, "max_logit must be at least 0, got -1.0"),
        ({"logit_sd": float("nan")}, ValueError, "logit_sd must be finite, got nan"),
        ({"saturated": 1.5}, ValueError, "saturated must be at most 1, got 1.5"),
        ({"sink_mass": "0.3"}, TypeError, "sink_mass must be one number, got str '0.3'"),
        ({"clone_similarity": None}, TypeError, "clone_similarity must be one number, got NoneType None"),
        ({"max_logit": 2000.0}, ValueError, "serious_max_logit must be at least max_logit = 2000, got 1000"),
        ({"max_logits": 10.0}, TypeError, ".*unexpected keyword argument 'max_logits'.*"),
    ],
)
def test_what_is_no_limit_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        Limits(**arguments)


def test_limits_are_values():
    assert Limits(max_logit=50) == Limits(max_logit=50.0)
    assert hash(Limits(max_logit=50)) == hash(Limits(max_logit=50.0))
    assert Limits(max_logit=50) != Limits()


def test_limits_come_back_from_their_file(tmp_path):
    limits = Limits(max_logit=1 / 3, sink_mass=None, gradient_ratio=1e-7)
    limits.save(tmp_path / "limits.json")
    assert Limits.load(tmp_path / "limits.json") == limits
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]


def test_a_file_need_not_hold_every_limit(tmp_path):
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"format": "attn_jax attention limits", "version": 1, "limits": {"max_logit": 50}}))
    assert Limits.load(path) == Limits(max_logit=50.0)


GOOD = {"format": "attn_jax attention limits", "version": 1, "limits": {}}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is no JSON"),
        (b"\xff\xfe", "it is no JSON"),
        (b"[" * 100_000, "it is no JSON"),
        (b"[]", "it is no file of limits"),
        (b'{"limits": {}}', "it is no file of limits"),
        ({**GOOD, "version": 2}, "it has version 2, and this is version 1"),
        ({**GOOD, "limits": None}, "it holds no limits"),
        ({**GOOD, "limits": {"max_logits": 3}}, r"unknown limit max_logits; the limits are clone_distance, .*"),
        ({**GOOD, "limits": {"saturated": 3}}, "saturated must be at most 1, got 3"),
        ({**GOOD, "limits": {"saturated": "much"}}, "saturated must be one number, got str 'much'"),
        (b'{"format": "attn_jax attention limits", "version": 1, "limits": {"max_logit": NaN}}', "max_logit .*nan"),
    ],
)
def test_a_broken_or_foreign_file_is_one_clear_error(tmp_path, content, reason):
    path = tmp_path / "limits.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(LimitsError, match=f"^no limits in {path}: {reason}$"):
        Limits.load(path)


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(RunError, match=r"^no limits in .*/limits.json: No such file or directory$"):
        Limits.load(tmp_path / "limits.json")
    with pytest.raises(RunError, match=r"^the limits cannot be written to .*/limits.json: No such file or directory$"):
        Limits().save(tmp_path / "missing" / "limits.json")


HEALTHY_BUT_SHARP = [
    *WARM_UP,
    {"max_logit": {(0, 1): 300.0}, "logit_sd": 14.0, "saturated": {0: 0.6}, "sink_mass": {(1, 1): 0.8}},
    {"normalized_entropy_no_sink": {0: 0.02}, "normalized_entropy": {0: 0.15}, "output_norm": {(1, 3): 0.004}},
    {"nearest_distance": {(0, 1): 0.01}, "nearest_similarity": {(0, 1): 0.99}, "query_gradient": 1e-4},
    {"key_gradient": 1e-5, "query_gradient": 1e-5},
]


def test_a_run_that_is_known_to_be_healthy_passes_by_its_own_limits():
    rows = series(*HEALTHY_BUT_SHARP)
    assert len({x.signal for x in find(rows)}) == len(SIGNALS)
    limits = calibrate([{"step": 1, "kind": "train", "loss": 1.0}, *rows])
    assert find(rows, limits) == []
    expected = {
        "max_logit": 600.0,
        "serious_max_logit": 6000.0,
        "logit_sd": 28.0,
        "saturated": 0.8,
        "sink_mass": 0.9,
        "sharp_entropy": 0.01,
        "dead_output": 0.002,
        "clone_distance": 0.005,
        "gradient_ratio": np.hypot(1e-5, 1e-5) / 0.5 / 2,
    }
    np.testing.assert_allclose([getattr(limits, name) for name in expected], list(expected.values()))
    np.testing.assert_allclose(limits.entropy_ratio, 0.15 / (0.6 * 11 + 0.15) * 11 / 2, rtol=0.2)


@pytest.mark.parametrize("case", ["a large logit", "a layer of saturated rows", "large logits in most heads", "a sink"])
def test_a_change_against_a_healthy_run_is_found(case):
    """Calibrated on a calm run the limits are tighter than the starting values."""
    limits = calibrate(series(*WARM_UP))
    name = CASES[case][1][0]
    between = (getattr(limits, name) + getattr(Limits(), name)) / 2
    if name in ("saturated", "sink_mass"):
        assert getattr(limits, name) == pytest.approx(0.55)
        assert find(series({name: 0.5}), limits) == []
        return
    assert find(series({name: between})) == []
    assert {x.signal for x in find(series({name: between}), limits)} == {name}


def test_calibration_starts_from_given_limits_and_keeps_what_it_cannot_tell():
    rows = series({}, {}, {})
    limits = calibrate(rows, limits=Limits(sink_mass=None, logit_growth=2.0), margin=4)
    assert limits.sink_mass is None
    assert limits.logit_growth == 2.0
    assert limits.max_logit == 48.0
    assert limits.entropy_ratio == 0.5  # no running mean yet
    assert limits.clone_distance == 0.05  # no heads alike
    negative = calibrate(series({"max_logit": -3.0}))
    assert negative.max_logit == 100.0


def test_a_signal_that_was_at_zero_is_never_told_of():
    limits = calibrate(series({"normalized_entropy_no_sink": 0.0}, {"saturated": 1.0}))
    assert limits.sharp_entropy == 0
    assert limits.saturated == 1
    assert find(series({"normalized_entropy_no_sink": 0.0, "saturated": 1.0}), limits) == []


def test_calibration_needs_measurements_and_a_margin():
    with pytest.raises(ValueError, match="rows must hold measurements, of kind 'attention'"):
        calibrate([{"step": 1, "kind": "train", "loss": 1.0}])
    with pytest.raises(ValueError, match="margin must be above 1, got 1"):
        calibrate([row(0)], margin=1)
