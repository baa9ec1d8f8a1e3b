"""Real processes on this machine: they train as one, and a lost one ends all and loses nothing."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import launch_local
from experiments.train import main as train

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = (
    "--task=copy", "--length=16", "--distance=3", "--num_layers=1", "--model_width=16", "--num_heads=2",
    "--batch_size=4", "--steps=60", "--evaluate_every=20", "--checkpoint_every=20", "--monitor=false",
    "--evaluation_batches=100",  # seconds between one checkpoint and the next, in which a process can be killed
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def start(folder, *command, devices=4):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "MPLBACKEND": "agg",
    }
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def launch(folder, out, *flags):
    command = ("-m", "experiments.train", *FLAGS, f"--out={out}", *flags)
    return start(folder, "-m", "experiments.launch_local", "--processes=2", "--devices=2", "--", *command)


def finish(process, status=0):
    said, errors = process.communicate(timeout=400)
    assert process.returncode == status, said + errors
    return said, errors


def rows(out, kind="train"):
    found = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in found if row["kind"] == kind}


def same(found, expected):
    for kind in ("train", "evaluation"):
        assert rows(found, kind) == pytest.approx(rows(expected, kind), rel=1e-5)


@pytest.fixture(scope="module")
def alone(folder):
    """One process with four devices."""
    finish(start(folder, "-m", "experiments.train", *FLAGS, "--data=4", f"--out={folder / 'alone'}"))
    return folder / "alone"


@pytest.mark.slow
def test_two_processes_train_as_one(folder, alone):
    out = folder / "two"
    said, _ = finish(launch(folder, out, "--sequence=2", "--shard_parameters"))
    assert said.count(f"wrote {out}") == 1
    assert set(rows(out)) == set(range(1, 61))  # one log, by one process
    same(out, alone)
    command = json.loads((out / "config.json").read_text())["command"]
    assert "--sequence=2" in command
    assert "--coordinator" not in command
    assert "--process" not in command


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process(folder, alone, victim):
    out = folder / f"lost {victim}"
    launcher = launch(folder, out)
    wait_for_a_checkpoint(launcher, out)
    (process,) = [pid for pid, words in children(launcher.pid) if f"--process={victim}" in words]
    os.kill(process, signal.SIGKILL)
    begun = time.monotonic()
    _, errors = finish(launcher, status=2)
    assert time.monotonic() - begun < 60
    line = errors.splitlines()[-1]
    assert line.startswith(f"error: process {victim} of 2 was ended by SIGKILL after "), errors
    assert max(rows(out)) < 60
    # On one device, which does other sums, it goes on from the last checkpoint.
    said, _ = finish(start(folder, "-m", "experiments.train", *FLAGS, f"--out={out}", devices=1))
    assert "continuing from step" in said
    assert "the checkpoint was written on 4 cpu, this is 1 cpu: bits may differ" in said
    same(out, alone)


def wait_for_a_checkpoint(launcher, out):
    while not (out / "checkpoints" / "00000020").exists():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


def children(parent):
    for entry in pathlib.Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text()
            if f"\nPPid:\t{parent}\n" in status:
                yield int(entry.name), (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue


@pytest.mark.slow
def test_sigterm_saves_and_ends_all(folder, alone):
    out = folder / "stopped"
    launcher = launch(folder, out)
    wait_for_a_checkpoint(launcher, out)
    launcher.send_signal(signal.SIGTERM)
    _, errors = finish(launcher, status=2)
    assert "was ended by SIGTERM" in errors.splitlines()[-1]
    saved = max(int(path.name) for path in (out / "checkpoints").iterdir())
    assert 20 < saved < 60
    assert max(rows(out)) == saved
    finish(launch(folder, out))
    same(out, alone)


@pytest.mark.slow
def test_flags_that_are_wrong_in_all(folder):
    _, errors = finish(launch(folder, folder / "wrong", "--batch_size=3"), status=2)
    told = "batch_size must be a multiple of the 4 devices along 'data', got 3"
    assert f"error: {told}" in errors.splitlines()
    assert "ended with status 2" in errors.splitlines()[-1]
    assert not (folder / "wrong").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--processes=2"], "the command follows --"),
        (["--processes=2", "-m", "experiments.train"], "the command follows --"),
        (["--processes=0", "--", "-m", "x"], "processes=0"),
        (["--wheels=2", "--", "-m", "x"], "Unknown command line flag 'wheels'"),
    ],
)
def test_bad_flags(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        launch_local.main(["launch_local", *argv])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--process=1",), "processes and process have no effect without a coordinator, got 0 and 1"),
        (("--coordinator=here", "--processes=2"), "coordinator must be host:port or 'auto', got 'here'"),
        (("--data=16",), "a mesh of data 16 · heads 1 · sequence 1 takes 16 devices, got 8"),
        (("--data=3",), "batch_size must be a multiple of the 3 devices along 'data', got 4"),
        (("--heads=8",), "heads of key_weight must be a multiple of the 8 devices along 'heads', got 2"),
        (("--data=2", "--seeds=2"), "seeds are trained on one device, got seeds=2"),
        (("--shard_parameters",), "shard_parameters has no effect on one device"),
    ],
)
def test_flags_of_a_mesh(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        train(["train", *FLAGS, *flags, f"--out={tmp_path / 'out'}"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
