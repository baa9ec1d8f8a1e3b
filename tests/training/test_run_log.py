"""The log: every row once and whole, whatever interrupted the run."""

import json
import math
import resource
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.training import curves
from attn_jax.training.files import RunError, holding
from attn_jax.training.run_log import RunLog, read_rows


def row(step, **values):
    return {"step": step, "kind": "train", **values}


def written(path):
    return (path / "log.jsonl").read_bytes()


def test_rows_are_lines_of_strict_json(tmp_path):
    log = RunLog(tmp_path)
    narrow = jnp.array([1.5, -2.0], jnp.bfloat16)
    log.write([row(1, loss=np.float32(0.1), per_run=narrow, finite=np.bool_(True), where="ü"), row(2, loss=math.nan)])
    log.write([row(3, loss=jnp.float32(jnp.inf), nested={"a": (1, None)})])
    log.close()
    assert written(tmp_path).decode().splitlines() == [
        '{"step": 1, "kind": "train", "loss": 0.10000000149011612, "per_run": [1.5, -2.0], "finite": true, "where": "ü"}',
        '{"step": 2, "kind": "train", "loss": null}',
        '{"step": 3, "kind": "train", "loss": null, "nested": {"a": [1, null]}}',
    ]
    assert log.rows == [json.loads(line) for line in written(tmp_path).splitlines()]


def test_without_a_directory_rows_are_kept_in_memory():
    log = RunLog(None)
    log.write([row(1, loss=0.5)])
    log.event("saved", step=1)
    log.sync()
    log.close()
    assert log.rows == [row(1, loss=0.5)]


def test_a_resumed_run_drops_what_is_past_its_step_and_writes_on(tmp_path):
    log = RunLog(tmp_path)
    log.write([row(step, loss=step / 3) for step in range(7)])
    log.close()
    whole = written(tmp_path)
    for step in (4, None, 6, 0):
        log = RunLog(tmp_path, step=step)
        kept = -1 if step is None else step
        assert [r["step"] for r in log.rows] == list(range(kept + 1))
        log.write([row(step, loss=step / 3) for step in range(kept + 1, 7)])
        log.close()
        assert written(tmp_path) == whole
        assert log.notes == ()


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_line_cut_short_is_dropped_wherever_it_was_cut(tmp_path, cut):
    log = RunLog(tmp_path)
    log.write([row(1, loss=0.5), row(2, loss=0.25)])
    log.close()
    whole = written(tmp_path)
    (tmp_path / "log.jsonl").write_bytes(whole[:-cut])
    log = RunLog(tmp_path, step=1)
    log.write([row(2, loss=0.25)])
    log.close()
    assert written(tmp_path) == whole
    assert log.notes == ()


def test_damaged_lines_are_dropped_and_said(tmp_path):
    lines = [json.dumps(row(1)), "{", json.dumps(row(2)), "[3]", '{"step": "4"}', "", json.dumps(row(3))]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    log = RunLog(tmp_path, step=3)
    assert [r["step"] for r in log.rows] == [1, 2, 3]
    assert log.notes == (f"4 damaged lines of {tmp_path / 'log.jsonl'} were dropped",)
    assert read_rows(written(tmp_path))[1] == 0
    log.close()


def test_a_log_that_is_gone_is_said(tmp_path):
    log = RunLog(tmp_path, step=5)
    assert log.notes == (f"{tmp_path / 'log.jsonl'} holds nothing of the 5 steps that were done",)
    log.close()


def test_events_are_appended_also_after_half_a_line(tmp_path):
    log = RunLog(tmp_path)
    log.event("begun", step=0, speed=math.inf)
    log.close()
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"time": 1')
    log = RunLog(tmp_path)
    log.event("resumed", step=2)
    log.close()
    first, half, last = path.read_text().splitlines()
    assert json.loads(first)["event"] == "begun"
    assert json.loads(first)["speed"] is None
    assert half == '{"time": 1'
    assert json.loads(last)["event"] == "resumed"


def points(path):
    """(step, tag, value) of every number in a file of events; tensorboardX writes length, checksum, data, checksum."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        if event.HasField("session_log"):
            found.append((event.step, "start", event.session_log.status))
    return found


def test_curves_hold_the_numbers_and_hide_what_is_done_again(tmp_path):
    pytest.importorskip("tensorboardX")
    log = RunLog(tmp_path, step=0)
    log.write([row(1, loss=0.5, per_run=[1.0, None]), row(2, loss=None, count=3)])
    log.sync()
    (path,) = (tmp_path / "tensorboard").iterdir()
    expected = [(1, "start", 1), (1, "train/loss", 0.5), (1, "train/per_run/0", 1.0)]
    assert points(path) == expected
    log.close()


def test_training_does_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(curves.importlib.util, "find_spec", lambda name: None)
    log = RunLog(tmp_path)
    log.write([row(1, loss=0.5)])
    log.sync()
    log.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.jsonl"]


def test_a_full_disk_is_one_line(tmp_path):
    log = RunLog(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        for write in (lambda: log.write([row(1, loss=0.5)]), lambda: log.event("saved", text="long enough")):
            with pytest.raises(RunError) as error:
                write()
            assert str(error.value) == f"the log cannot be kept in {tmp_path}: File too large"
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log = RunLog(tmp_path)
    assert log.rows == []
    log.close()


def test_a_file_in_place_of_the_directory_is_one_line(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match=r"^the run cannot be kept in .*/run: File exists$"), holding(tmp_path / "run"):
        pass
    with pytest.raises(RunError, match=r"^the log cannot be kept in .*: Not a directory$"):
        RunLog(tmp_path / "run")


def test_a_directory_serves_one_process_at_a_time(tmp_path):
    code = f"""
from attn_jax.training.files import RunError, holding
try:
    with holding({str(tmp_path)!r}): print("held")
except RunError as error: print(error)
"""

    def ask():
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with holding(tmp_path):
        assert ask() == f"the run cannot be kept in {tmp_path}: another run uses it\n"
    assert ask() == "held\n"
