"""How is a run of several processes started on this machine?

Command: python -m experiments.launch_local --processes=2 -- -m experiments.train --preset=smoke
Time: that of the command.

What follows `--` is given to Python in each process, with --coordinator, --processes and --process added. What process
0 says is shown, of the others what they said last if they fail. Where one is lost the runtime ends the others; the same
command continues the run, also with another number of processes or devices.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, NoReturn

from absl import flags

from attn_jax.parallel.distributed import HEARTBEAT
from experiments import command_line
from experiments.command_line import CommandError

GRACE = HEARTBEAT + 15  # seconds after which those are ended that the runtime did not end
USAGE = "the command follows --, as in: --processes=2 -- -m experiments.train --preset=smoke"
FLAGS = {
    "processes": (2, "how many are started", 1),
    "devices": (1, "CPU devices of each; 0: what JAX finds", 0),
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line."""
    sys.exit(command_line.run(_main, argv))


def _main(argv: Sequence[str]) -> int:
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    values = flags.FlagValues()
    for name, (default, text, least) in FLAGS.items():
        flags.DEFINE_integer(name, default, text, lower_bound=least, flag_values=values)
    flags.DEFINE_bool("help", False, "show this help", flag_values=values)
    with command_line.refusing():
        try:
            rest = values(argv[:split])[1:]
        except flags.Error as error:
            raise ValueError(str(error) if "--" in argv else USAGE) from error
        if values["help"].value:
            listed = [f"  --{name}: {text} ({default})" for name, (default, text, _) in FLAGS.items()]
            command_line.say("\n".join([(__doc__ or "").strip(), "", "Flags:", *listed]))
            return 0
        if rest or not argv[split + 1 :]:
            raise ValueError(USAGE)
    counts = {name: int(str(values[name].value)) for name in FLAGS}
    return launch(argv[split + 1 :], **counts)


def launch(command: Sequence[str], *, processes: int, devices: int) -> int:
    """Runs `python COMMAND` in so many processes, and waits for all.

    Args:
        command: what Python gets.
        processes: how many.
        devices: CPU devices of each; 0: what JAX finds.

    Returns:
        0.

    Raises:
        CommandError: in one line, which process was lost and why.
    """
    environment = dict(os.environ)
    if devices:
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        kept = environment.get("XLA_FLAGS", "").split()  # one of them says another number
        environment["XLA_FLAGS"] = " ".join(flag for flag in kept if "force_host_platform_device_count" not in flag)
    coordinator, started, said = f"127.0.0.1:{_free_port()}", [], []
    try:
        for process in range(processes):
            who = [f"--coordinator={coordinator}", f"--processes={processes}", f"--process={process}"]
            said.append(None if process == 0 else tempfile.TemporaryFile())  # noqa: SIM115 - as long as the process
            started.append(
                subprocess.Popen(
                    [sys.executable, *command, *who],
                    env=environment,
                    stdout=said[-1],
                    stderr=said[-1] and subprocess.STDOUT,
                )
            )
        lost = _wait(started)
    finally:
        for one in started:
            one.kill()
            one.wait()
    if lost is None:
        return 0
    process, after = lost
    raise CommandError(
        f"process {process} of {processes} {_ending(started[process].returncode)} after {after:.0f} s"
        f"{_last_words(said[process])}; the others were ended, the same command continues"
    )


def _wait(started: Sequence[subprocess.Popen]) -> tuple[int, float] | None:
    """Waits for all; which failed first, if one did, and after how many seconds. Signals are passed on."""
    begun, lost, deadline = time.monotonic(), None, float("inf")

    def pass_on(number: int, frame: object) -> None:
        for one in started:
            one.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        while any(one.poll() is None for one in started) and time.monotonic() < deadline:
            failed = [i for i, one in enumerate(started) if one.poll()]
            if failed and lost is None:
                lost, deadline = (failed[0], time.monotonic() - begun), time.monotonic() + GRACE
            try:
                time.sleep(0.02)
            except KeyboardInterrupt:  # the terminal tells it to all of them: they save, and end
                continue
    finally:
        signal.signal(signal.SIGTERM, before)
    if lost is None:
        failed = [i for i, one in enumerate(started) if one.returncode]
        lost = (failed[0], time.monotonic() - begun) if failed else None
    return lost


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last_words(said: IO[bytes] | None) -> str:
    """The last line that a process wrote, if nobody has seen it yet."""
    if said is None:
        return ""
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return f" ({command_line.printable(lines[-1].strip())[:300]})" if lines else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    main()
