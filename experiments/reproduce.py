"""Runs all experiments, each in a process of its own, and builds the report.

Command: python -m experiments.reproduce --preset=quick [--only=score_variance,diagnose] --out=results

A process that is killed, or an experiment that fails, takes nothing else down: the others run, the report says what is
missing, and the exit status is not 0. Run again, it continues where it stopped. The last line is the report's path.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from experiments import artifacts, report
from experiments.config import Config, describe, option, parse
from experiments.registry import REPRODUCED

PRESETS = ("smoke", "quick", "full")
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceConfig(Config):
    """Flags of the reproduction."""

    only: tuple[str, ...] = option(REPRODUCED, "the experiments to run", choices=REPRODUCED)


def main(argv: Sequence[str] | None = None) -> int:
    presets = {preset: {} for preset in PRESETS}
    try:
        asked = parse(ReproduceConfig, sys.argv if argv is None else argv, presets=PRESETS, out="results")
        if asked.help:
            print((__doc__ or "").strip() + "\n\nFlags:\n" + describe(ReproduceConfig, presets, out="results"))
            return 0
        config = asked.configuration(ReproduceConfig, presets)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = pathlib.Path(asked.out)
    failed = [name for name in config.only if not run_one(name, asked.preset, config.seed, out / name)]
    try:
        page = report.build(out, REPRODUCED, failed)
    except artifacts.OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    print(page)
    return 1 if failed else 0


def run_one(name: str, preset: str, seed: int, out: pathlib.Path) -> bool:
    """Runs one experiment in a fresh process, whose output passes through; whether it succeeded."""
    print(f"== {name}", flush=True)
    flags = [f"--preset={preset}", f"--seed={seed}", f"--out={out}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", f"experiments.{name}", *flags]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
