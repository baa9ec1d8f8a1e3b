"""Several processes as one run: each has devices of its own, and all run the same program on the devices of all.

    join("10.0.0.1:9000", processes=2, process=0)     # before anything else is asked of JAX, in each of them
    mesh = make_mesh(data=jax.device_count())
    ...
    leave(0)

JAX's runtime connects them (gloo on CPUs, NCCL on GPUs), and ends them all when one gives no sign of life. Before it
does they meet here: it aborts a process, with a stack of C++, where another does not come.
"""

import contextlib
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from attn_jax import checks

T = TypeVar("T")

AUTO = "auto"
HEARTBEAT = 30  # seconds without a sign of life from a process, after which the runtime ends the others
LINGER = 2  # seconds that the coordinator stays to tell latecomers what is wrong


def join(coordinator: str, *, processes: int | None = None, process: int | None = None, timeout: float = 60.0) -> None:
    """Makes this process one of several. Called before any computation, and once.

    Args:
        coordinator: `host:port`, where process 0 is found by all; "auto": what the environment of a cluster says, as
            far as JAX knows it (Slurm, Open MPI, Kubernetes, Cloud TPU).
        processes: how many there are.
        process: which of them this one is, from 0.
        timeout: seconds that they wait for each other.

    Raises:
        TimeoutError: if the coordinator does not answer, or others do not come, within that time.
        ValueError: on an address or a number that is none, if processes count differently or two are the same, or
            where there is no cluster that JAX knows.
        OSError: if process 0 cannot listen at its address.
    """
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is left to whoever waits for it
    options: dict[str, Any] = {"heartbeat_timeout_seconds": HEARTBEAT, "initialization_timeout": int(timeout)}
    if coordinator == AUTO:
        if processes is not None or process is not None:
            raise ValueError(f"processes and process come from the cluster, got {processes} and {process}")
        try:
            jax.distributed.initialize(**options)
        except ValueError as error:
            raise ValueError(f"no environment of a cluster that JAX knows was found: {error}") from error
        return
    host, port = _address(coordinator)
    processes = checks.positive_int("processes", processes)
    process = checks.positive_int("process", process, least=0)
    if process >= processes:
        raise ValueError(f"process must be below processes = {processes}, got {process}")
    deadline = time.monotonic() + timeout
    if process == 0:
        _receive(port, processes, deadline, timeout)
    else:
        _meet(host, port, processes, process, deadline, timeout)
    jax.distributed.initialize(coordinator, processes, process, cluster_detection_method="deactivate", **options)


def leave(status: int) -> NoReturn:
    """Ends this process. One that failed does not wait for the others, which may be waiting for it, as JAX would."""
    if status == 0 or not jax.distributed.is_initialized():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def in_first(function: Callable[[], T]) -> T:
    """What `function()` returns, or raises, in the first process, in all of them; the others do not call it.

    Whoever waits here waits for all. What comes back is sent by `pickle`.
    """
    if jax.process_count() == 1:
        return function()
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_first():
        try:
            outcome = (function(), None)
        except Exception as error:  # whatever it is, the others have to know
            outcome = (None, error)
    value, error = outcome if is_first() else (None, None)
    sent = pickle.dumps(outcome) if is_first() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(sent), np.uint32)))
    data = np.frombuffer(sent, np.uint8) if is_first() else np.zeros(size, np.uint8)
    received = multihost_utils.broadcast_one_to_all(data)
    if not is_first():
        value, error = pickle.loads(received.tobytes())
    if error is not None:
        raise error
    return value  # pyright: ignore[reportReturnType] - what the function returned


def largest(number: int) -> int:
    """The largest of the numbers that the processes bring, at least 0 and below 2³¹."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.asarray(number, np.int32)).max())


def values(tree: Any) -> Any:
    """Every array as NumPy has it, wherever its parts lie. Of several processes all call this."""

    def value(x: jax.Array) -> np.ndarray:
        here = x.is_fully_addressable or x.is_fully_replicated
        return np.asarray(x if here else multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(value, tree)


def put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array that every process has, put where each of its parts belongs."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"coordinator must be host:port or {AUTO!r}, got {coordinator!r}")
    return host.strip("[]"), int(port)


def _receive(port: int, processes: int, deadline: float, timeout: float) -> None:
    """Process 0 waits until each of the others has come and counts as it does, and tells all of them."""
    guests: dict[int, socket.socket] = {}
    strays: list[socket.socket] = []
    refusal: Exception | None = None
    with _listening(port) as server:
        while len(guests) < processes - 1 or refusal is not None:
            try:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                guest, _ = server.accept()
                guest.settimeout(5)
                said = json.loads(guest.makefile().readline())
                process, count = said["process"], said["processes"]
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue  # somebody who says nothing
                missing = ", ".join(str(i) for i in range(1, processes) if i not in guests)
                late = TimeoutError(f"of {processes} processes these did not come within {timeout:g} s: {missing}")
                refusal = refusal or late
                break
            except (OSError, ValueError, KeyError, TypeError):
                continue  # somebody else
            wrong = None
            if count != processes:
                wrong = f"processes must be the same in all, got {processes} in process 0 and {count} in {process}"
            elif process in guests:
                wrong = f"process must differ in all, got {process} twice"
            if wrong is None:
                guests[process] = guest
                continue
            strays.append(guest)
            if refusal is None:  # those who are about to come are told as well
                refusal, deadline = ValueError(wrong), min(deadline, time.monotonic() + LINGER)
    answer = {"kind": type(refusal).__name__ if refusal else "", "text": str(refusal or "")}
    for guest in (*guests.values(), *strays):
        with guest, contextlib.suppress(OSError):
            guest.sendall(json.dumps(answer).encode() + b"\n")
    if refusal is not None:
        raise refusal


def _listening(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _meet(host: str, port: int, processes: int, process: int, deadline: float, timeout: float) -> None:
    """Another process says who it is, and waits for what process 0 says."""
    silence = TimeoutError(f"the coordinator at {host}:{port} does not answer within {timeout:g} s")
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise silence
        try:
            with socket.create_connection((host, port), timeout=left) as line:
                line.sendall(json.dumps({"processes": processes, "process": process}).encode() + b"\n")
                line.settimeout(max(deadline - time.monotonic(), 0.01) + LINGER)
                answer = json.loads(line.makefile().readline() or "null")
        except TimeoutError:
            raise silence from None
        except (OSError, ValueError):
            answer = None
        if answer is not None:
            break
        time.sleep(0.2)
    if answer["kind"]:
        raise {"TimeoutError": TimeoutError}.get(answer["kind"], ValueError)(answer["text"])
