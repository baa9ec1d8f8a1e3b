"""How a command ends: one line for whatever is wrong, quietly without a reader, on any terminal."""

import io
import os
import signal
import subprocess
import sys

import jax
import pytest

from experiments import __main__ as listing
from experiments import command_line, harness, progress
from experiments.command_line import CommandError
from experiments.progress import Table
from experiments.reproduce import ROOT
from tests.experiments.toy import make


def run_toy(*flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        harness.main(make(), ["toy", *flags])
    return ended.value.code


def ended(command: str, **settings: str) -> subprocess.CompletedProcess:
    """A shell command; `python` is the interpreter of the tests."""
    command = command.replace("python", sys.executable)
    environment = {**os.environ, **settings}
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_what_stops_a_command_is_one_line_and_a_status(capsys):
    def stop(argv):
        raise error

    error = CommandError("two\nlines, \x1b[31mred")
    assert command_line.run(stop, []) == 2
    assert capsys.readouterr().err == "error: two lines, \ufffd[31mred\n"
    error = KeyboardInterrupt()
    assert command_line.run(stop, []) == 130
    assert capsys.readouterr().err == "interrupted; the same command continues\n"
    error = BrokenPipeError()
    assert command_line.run(stop, []) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""
    error = RuntimeError("ours")  # a mistake of the program is no mistake of the user
    with pytest.raises(RuntimeError, match="ours"):
        command_line.run(stop, [])


def test_an_interrupt_while_flags_are_read_is_one_line(tmp_path, capsys):
    def interrupt(config):
        raise KeyboardInterrupt

    experiment = make()
    object.__setattr__(experiment, "inputs", interrupt)
    with pytest.raises(SystemExit) as stopped:
        harness.main(experiment, ["toy", f"--out={tmp_path / 'o'}"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_a_full_disk_behind_standard_output_is_one_line(flags, tmp_path, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_toy(f"--out={tmp_path / 'o'}", *flags) == 2
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_a_reader_that_left_ends_the_command_quietly(flags, tmp_path, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run_toy(f"--out={tmp_path / 'o'}", *flags) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_a_terminal_that_knows_ascii_only_shows_what_it_can(tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run_toy(f"--out={tmp_path / 'ü'}") == 0
    assert b"T1" in written.getvalue()
    assert written.getvalue().endswith(b"?\n")


def test_a_closed_standard_output_changes_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_toy(f"--out={tmp_path / 'o'}") == 0
    sys.stdout.close()
    assert (tmp_path / "o" / "claims.json").exists()


@pytest.mark.parametrize(
    ("command", "status", "error"),
    [
        ("python -m experiments >/dev/full", 2, "error: standard output cannot be written: No space left on device\n"),
        ("python -m experiments | true; exit ${PIPESTATUS[0]}", 141, ""),
        ("PYTHONIOENCODING=ascii python -m experiments", 0, ""),
        ("PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C python -m experiments", 0, ""),
        ("python -m experiments >&-", 0, ""),
    ],
)
def test_the_interpreter_ends_as_quietly(command, status, error):
    done = ended(command)
    assert (done.returncode, done.stderr) == (status, error)


@pytest.mark.parametrize(
    ("error", "says"),
    [(RuntimeError("no backend\n'cuda'"), "no backend 'cuda'"), (AssertionError(), "none answered")],
)
def test_no_device_is_one_line_and_nothing_is_written(error, says, tmp_path, monkeypatch, capsys):
    def none():
        raise error

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert run_toy(f"--out={tmp_path / 'o'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: JAX finds no device (JAX_PLATFORMS=cuda): {says}"
    assert list(tmp_path.iterdir()) == []


def test_no_device_is_one_line_in_a_real_experiment(tmp_path):
    done = ended(f"python -m experiments.walkthrough --out={tmp_path / 'o'}", JAX_PLATFORMS="absent")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: JAX finds no device (JAX_PLATFORMS=absent)")
    assert list(tmp_path.iterdir()) == []


def test_the_list_takes_no_arguments_but_help(capsys):
    for argv, status in ((["list"], 0), (["list", "--help"], 0), (["list", "foo"], 2), (["list", "--undefok=x"], 2)):
        assert listing.main(argv) == status
        printed = capsys.readouterr()
        assert (printed.out == "") == (status != 0)
        assert printed.err.count("\n") == (status != 0)
        assert all(argument in printed.err for argument in argv[1:] if status)


def test_control_characters_never_reach_the_terminal(capsys):
    progress.show(Table("a\x1b[2Jb", ("c\x07",), (("d\x00\x85\ne",),)))
    shown = capsys.readouterr().out
    assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert "a\ufffd[2Jb" in shown
