"""What a run tells: a line now and then, rewritten on a terminal."""

import io

import numpy as np
import pytest

from attn_jax.training import progress
from attn_jax.training.progress import Console, Progress, Silent, Speed, describe


class Terminal(io.StringIO):
    def isatty(self):
        return True


def at(step, **metrics):
    return Progress(step, 30, metrics or {"loss": 0.5}, 12345.6)


def test_one_run_many_runs_and_none_that_is_finite():
    assert describe(at(10, loss=np.float32(0.123456))) == "step 10/30  loss 0.1235  12,346 tokens/s"
    many = at(10, loss=np.array([1.0, 2.5, np.nan]), rate=np.array([0.1, 0.1]))
    assert describe(many) == "step 10/30  loss 1..2.5  rate 0.1  12,346 tokens/s"
    assert describe(at(10, loss=np.nan)) == "step 10/30  loss not finite  12,346 tokens/s"
    assert describe(Progress(10, 30, {}, None)) == "step 10/30  compiled"


def test_plain_lines_come_now_and_then_and_at_the_end(monkeypatch):
    now = iter([0.0, 5.0, 11.0, 12.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    stream = io.StringIO()
    console = Console(stream)
    for step in (5, 10, 20, 30):
        console.progress(at(step))
    console.note("done")
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "step 5/30",
        "step 20/30",
        "step 30/30",
        "done",
    ]


def test_a_terminal_has_one_line():
    stream = Terminal()
    console = Console(stream)
    console.progress(at(10))
    console.note("saved")
    console.progress(at(20))
    console.progress(at(30))
    console.note("done")
    shown = [line.split("  ")[0] for line in stream.getvalue().replace("\r\x1b[K", "|").split("\n")]
    # The lines of steps 20 and 30 are one.
    assert shown == ["|step 10/30", "saved", "|step 20/30", "done", ""]
    assert stream.getvalue().count("\r\x1b[K") == 3


def test_silence(capsys):
    Silent().progress(at(10))
    Silent().note("x")
    assert capsys.readouterr() == ("", "")


def test_speed_leaves_out_the_call_that_compiles():
    speed = Speed(100)
    speed.add(10, 60.0)
    assert speed.tokens_per_second is None
    speed.add(10, 2.0)
    speed.add(5, 1.0)
    assert speed.tokens_per_second == pytest.approx(500.0)
