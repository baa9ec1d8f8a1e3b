"""Runs all experiments, each in a process of its own, and builds the report.

Command: python -m experiments.reproduce --preset=quick [--only=S1,H2,diagnose] --out=results

`--only=short` is a selection that takes a quarter of an hour; what a selection leaves out is said.

A process that is killed, or an experiment that fails, takes nothing else down: the others run, the report says what is
missing, and the exit status is not 0. Run again, it continues where it stopped. The last line is the report's path.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

from experiments import command_line, report
from experiments.command_line import say
from experiments.config import Config, describe, option, parse
from experiments.registry import REPRODUCED, select

PRESETS = ("smoke", "quick", "full")
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceConfig(Config):
    """Flags of the reproduction."""

    only: tuple[str, ...] = option(("all",), "what to run: experiments, claims (S1, H2), short or all")

    def __post_init__(self) -> None:
        super().__post_init__()
        select(self.only)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its status."""
    return command_line.run(_main, argv)


def _main(argv: Sequence[str]) -> int:
    presets = {preset: {} for preset in PRESETS}
    with command_line.refusing():
        asked = parse(ReproduceConfig, argv, presets=PRESETS, out="results")
    if asked.help:
        say((__doc__ or "").strip() + "\n\nFlags:\n" + describe(ReproduceConfig, presets, out="results"))
        return 0
    with command_line.refusing():
        config = asked.configuration(ReproduceConfig, presets)
    out = pathlib.Path(asked.out)
    report.reserve(out)  # before minutes of work
    chosen = select(config.only)
    commands = [*chosen, "model_report"] if "diagnose" in chosen else chosen  # a page that the report links to
    failed = [name for name in commands if not run_one(name, asked.preset, config.seed, out / name)]
    page = report.build(out, REPRODUCED, failed)
    if left := [name for name in REPRODUCED if name not in chosen]:
        say(f"left out by --only={','.join(config.only)}: {', '.join(left)}")
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    say(str(page))
    return 1 if failed else 0


def run_one(name: str, preset: str, seed: int, out: pathlib.Path) -> bool:
    """Runs one experiment in a fresh process, whose output passes through; whether it succeeded."""
    say(f"== {name}")
    flags = [f"--preset={preset}", *([f"--seed={seed}"] if seed else []), f"--out={out}"]  # as one would type it
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"experiments.{name}", *flags]
    # Ctrl-C reaches both processes. The experiment inherits a blocked SIGINT: it is said once, here. Its parts stay.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return process.wait() == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
                if sys.stdout.isatty():
                    say("\x1b[?25h")  # its progress bar had hidden the cursor


if __name__ == "__main__":
    sys.exit(main())
