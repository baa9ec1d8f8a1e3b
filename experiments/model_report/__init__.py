"""How does a model route, for somebody who wants to look around?

Command: python -m experiments.model_report --model=smollm2 --window=0:48
Time: smoke 25 s, quick 31 s, full about 1 min on two cores.

It writes one HTML page, which opens from disk: what the diagnosis found, a map of layers and heads for each measure,
and of every head its pattern, entropy, spectrum and cluster. With two models, `--model=smollm2,path/of/another.gguf`,
or two steps of a run, `--run=results/train --steps=1600,2000`, it also shows their difference.
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from experiments import command_line
from experiments.command_line import say
from experiments.config import describe, parse
from experiments.harness import PRESETS
from experiments.model_report import sources
from experiments.model_report.config import PRESETS as CHANGES
from experiments.model_report.config import ModelReportConfig
from experiments.model_report.page import reserve, write_report
from experiments.model_report.subjects import Subject, subject_of_captures, subject_of_model

__all__ = ["ModelReportConfig", "Subject", "main", "subject_of_captures", "subject_of_model", "write_report"]

NAME = "model_report"
DEFAULT_OUT = f"results/{NAME}"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line. Wrong flags end with one line and status 2, and nothing is written."""
    sys.exit(command_line.run(_main, argv))


def _main(argv: Sequence[str]) -> int:
    with command_line.refusing():
        asked = parse(ModelReportConfig, argv, presets=PRESETS, out=DEFAULT_OUT)
    if asked.help:
        say(f"{(__doc__ or '').strip()}\n\nFlags:\n{describe(ModelReportConfig, CHANGES, out=DEFAULT_OUT)}")
        return 0
    with command_line.refusing():
        config = asked.configuration(ModelReportConfig, CHANGES)
        page = pathlib.Path(asked.out) / "index.html"
        reserve(page)  # before minutes of work
        subjects = sources.subjects(config)
    for subject in subjects:
        say(command_line.printable(f"{subject.name}: {len(subject.diagnosis.findings)} findings"))
    write_report(page, subjects)
    say(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0
