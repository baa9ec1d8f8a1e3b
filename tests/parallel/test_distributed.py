"""Several processes meet before they begin, and say in one line why they do not."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from attn_jax.parallel import distributed

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def refusals(port, *whos, timeout=1.0):
    """What `join` raises in each of some processes, `(processes, process)`, played by threads."""

    def one(who):
        processes, process = who
        try:
            distributed.join(f"127.0.0.1:{port}", processes=processes, process=process, timeout=timeout)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("it began")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(one, whos))


def test_a_coordinator_that_does_not_answer(port):
    begun = time.monotonic()
    (said,) = refusals(port, (2, 1))
    assert said == f"TimeoutError: the coordinator at 127.0.0.1:{port} does not answer within 1 s"
    assert time.monotonic() - begun < 10


def test_somebody_else_at_the_address_of_the_coordinator(port):
    with socket.create_server(("127.0.0.1", port)):  # takes the connection and says nothing
        (said,) = refusals(port, (2, 1))
    assert said == f"TimeoutError: the coordinator at 127.0.0.1:{port} does not answer within 1 s"


def test_processes_that_do_not_come(port):
    came, waited = refusals(port, (4, 0), (4, 2))
    assert came == waited == "TimeoutError: of 4 processes these did not come within 1 s: 1, 3"


def test_counts_that_differ(port):
    said = refusals(port, (3, 0), (2, 1), timeout=20.0)
    assert said == ["ValueError: processes must be the same in all, got 3 in process 0 and 2 in 1"] * 2


def test_two_that_are_the_same(port):
    said = refusals(port, (3, 0), (3, 1), (3, 1), timeout=20.0)
    assert said == ["ValueError: process must differ in all, got 1 twice"] * 3


def test_an_address_that_is_taken(port):
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True):
        (said,) = refusals(port, (2, 0))
    assert said.startswith("OSError: [Errno 98] Address already in use")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", 2, 0), "coordinator must be host:port or 'auto', got 'nowhere'"),
        ((":80", 2, 0), "coordinator must be host:port or 'auto', got ':80'"),
        (("host:0", 2, 0), "coordinator must be host:port or 'auto', got 'host:0'"),
        (("host:1", 0, 0), "processes must be at least 1, got 0"),
        (("host:1", 2, 2), "process must be below processes = 2, got 2"),
        (("host:1", 2, -1), "process must be at least 0, got -1"),
        (("auto", 2, None), "processes and process come from the cluster, got 2 and None"),
    ],
)
def test_bad_input(arguments, message):
    coordinator, processes, process = arguments
    with pytest.raises(ValueError, match=message):
        distributed.join(coordinator, processes=processes, process=process)


def test_one_process_needs_nobody():
    assert distributed.is_first()
    assert distributed.in_first(lambda: 3) == 3
    assert distributed.largest(7) == 7
    with pytest.raises(ZeroDivisionError):
        distributed.in_first(lambda: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        distributed.leave(3)
    assert ended.value.code == 3


@pytest.mark.slow
def test_what_processes_tell_each_other(port):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.worker", f"127.0.0.1:{port}", "2", str(process)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    said = [one.communicate(timeout=180) for one in started]
    assert [one.returncode for one in started] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert (first.pop("called"), second.pop("called")) == (1, 0)
    array = np.arange(24.0).reshape(8, 3).tolist()
    drawn = float(np.asarray(jax.random.uniform(jax.random.key(5))))
    assert (
        first
        == second
        == {
            "devices": 4,
            "told": {"process": 0, "rows": [1.5, None]},
            "raised": "of the first",
            "largest": 11,
            "values": array,
            "fetched": array,
            "drawn": drawn,
        }
    )
