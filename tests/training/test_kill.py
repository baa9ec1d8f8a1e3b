"""kill -9 at random moments, also inside the writing of a checkpoint: every run ends in the bits of an undisturbed one.

Each process is a fresh interpreter: a child forked from one that has started JAX would hang.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 20


def start(directory, cache, *flags):
    """A run that has begun to train."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        # Filled by the undisturbed run, so that no kill cuts the cache's own files short.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.training.toy", str(directory), *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n", process.stderr.read()
    return process


def finish(process):
    """What it printed at its end: the digest of the state, and how many operations on files of checkpoints it made."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    digest, operations = out.split()
    return digest, int(operations)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(directory, cache, digest, operations, seconds) of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder / "warm", folder / "cache"))
    begun = time.monotonic()
    digest, operations = finish(start(folder / "run", folder / "cache"))
    return folder / "run", folder / "cache", digest, operations, time.monotonic() - begun


def notes(directory):
    events = map(json.loads, (directory / "events.jsonl").read_bytes().splitlines())
    return [event["text"] for event in events if event["event"] == "note"]


@pytest.mark.slow
def test_kill_9_at_random_moments(tmp_path, undisturbed):
    directory, cache, digest, operations, seconds = undisturbed
    draw = random.Random(0)
    kills = runs = 0
    while kills < KILLS:
        runs += 1
        ours = tmp_path / str(runs)
        while True:
            # By turns inside the work on a checkpoint, at a certain operation on its files, and at any time.
            if (kills + runs) % 2:
                process = start(ours, cache, f"--kill_at={draw.randint(1, operations // 2)}")
                process.wait(timeout=120)
            else:
                process = start(ours, cache)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=draw.uniform(0, seconds / 2))
                process.kill()
                process.wait()
            if process.returncode == 0:
                break
            process.communicate()
            assert process.returncode == -signal.SIGKILL
            kills += 1
        # Finished by itself; whatever was killed on the way, nothing differs.
        assert finish(process)[0] == digest
        assert (ours / "log.jsonl").read_bytes() == (directory / "log.jsonl").read_bytes()
        assert all(note.startswith("continuing from step") for note in notes(ours))
        assert sorted(os.listdir(ours / "checkpoints")) == ["00000058", "00000060"]


@pytest.mark.slow
def test_sigterm_ends_the_process_after_saving(tmp_path, undisturbed):
    directory, cache, digest, _, seconds = undisturbed
    process = start(tmp_path / "run", cache)
    time.sleep(seconds / 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert finish(start(tmp_path / "run", cache))[0] == digest
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == (directory / "log.jsonl").read_bytes()
