"""Findings: checked, ranked, told and written."""

import json

import numpy as np
import pytest

from attn_jax.diagnostics.diagnosis import Diagnosis, Finding
from attn_jax.diagnostics.diagnosis.findings import LINKS
from attn_jax.diagnostics.diagnosis.words import WORDS, finding


def make(severity, value, limit, signal="max_logit"):
    return finding(signal, f"It is {value}.", severity=severity, value=value, limit=limit)


def test_ranked_by_severity_then_by_how_far_beyond_the_limit():
    given = [
        make("notice", 900.0, 100.0),
        make("serious", 1.1, 1.0),
        make("information", 9.0, 1.0),
        make("serious", 0.01, 0.05),
    ]
    diagnosis = Diagnosis("a model", tuple(given), {})
    assert diagnosis.findings == (given[3], given[1], given[0], given[2])
    assert diagnosis.alarms == (given[3], given[1])
    assert not diagnosis.ok
    assert Diagnosis("a model", (given[0], given[2]), {}).ok


def test_what_has_no_number_comes_first_in_its_severity():
    assert Diagnosis("", (make("notice", 200.0, 100.0), make("notice", np.nan, 1.0)), {}).findings[0].excess == np.inf


def test_printed_worst_first_with_what_was_skipped():
    lines = str(
        Diagnosis("a model", (make("notice", 2.0, 1.0), make("serious", 3.0, 1.0)), {}, (("gradients", "too many"),))
    )
    first, *rest = lines.splitlines()
    assert first == "a model: 1 serious, 1 notice, 0 information"
    assert [line.split(":")[0].strip() for line in rest] == ["serious", "notice", "not looked at"]
    assert "gradients (too many)" in rest[-1]


def test_as_json():
    measures = {"max_logit": np.array([[1.0, np.nan]])}
    record = Diagnosis("a model", (make("notice", np.inf, 1.0),), measures, (("a", "b"),)).as_dict()
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again["measures"] == {"max_logit": [[1.0, None]]}
    assert again["findings"][0]["value"] is None
    assert again["findings"][0]["link"] == "projections"
    assert again["skipped"] == [["a", "b"]]


@pytest.mark.parametrize(("name", "value"), [("link", "depth"), ("severity", "fatal")])
def test_a_link_or_severity_that_is_none_is_refused(name, value):
    texts = dict.fromkeys(("origin", "evidence", "cause", "check", "mend"), "")
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        Finding(**{"signal": "x", "link": "mask", "severity": "notice", **texts, name: value})


def test_every_signal_has_its_words():
    for signal, words in WORDS.items():
        assert words.link in LINKS, signal
        assert all((words.origin, words.cause, words.check)), signal
