"""Keeps what a run of the experiments found: the verdicts and figures that README and docs quote.

Command: python -m experiments.ledger --results=results --out=docs/ledger

Of each experiment that is complete under `--results` it keeps the record (flags, versions, machine), the claims, the
small tables and the figure, in place of what was kept of it before; then it writes the page that shows them all. Before
that it says where the new verdicts contradict the kept ones; with `--compare` it does nothing else, and its status says
whether there are any.
"""

import dataclasses
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jinja2

from experiments import artifacts, command_line, report
from experiments.command_line import CommandError, say
from experiments.config import Config, describe, option, parse
from experiments.progress import Table, show
from experiments.registry import REPRODUCED
from experiments.report import Run
from experiments.verdicts import VERDICTS

KEPT = ("config.json", "claims.json", "summary.json", "figure.png")
PAGE = "README.md"
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerConfig(Config):
    """Flags of the ledger."""

    results: str = option("results", "directory of the runs, as experiments.reproduce leaves them")
    compare: bool = option(False, "only say where verdicts contradict those that are kept")


def load(directory: pathlib.Path) -> dict[str, Run]:
    """The runs that are complete under a directory, by experiment. Raises OutputError if one is broken."""
    found = {name: report.load_run(directory / name) for name in REPRODUCED}
    return {name: run for name, run in found.items() if run is not None}


def contradictions(kept: dict[str, Run], new: dict[str, Run]) -> list[tuple[str, str, str]]:
    """The claims of both whose verdicts cannot be true together, with the kept verdict and the new one.

    What was refuted is not true, not even under a condition. `confirmed` and `refined` differ in the conditions that
    were looked at, and `inconclusive` contradicts nothing.
    """
    before, after = (
        {c["claim"]: c["verdict"] for run in runs.values() for c in run.claims if c["verdict"] != "inconclusive"}
        for runs in (kept, new)
    )
    both = [(claim_id, before[claim_id], after[claim_id]) for claim_id in after if claim_id in before]
    return [(claim_id, old, now) for claim_id, old, now in both if (old == "refuted") != (now == "refuted")]


def keep(results: pathlib.Path, out: pathlib.Path, names: Sequence[str]) -> None:
    """Copies what is kept of the named runs, the record last, so that a broken copy is no complete run."""
    for name in names:
        target = out / name
        try:
            target.mkdir(parents=True, exist_ok=True)
            for file in reversed(KEPT):
                if (results / name / file).exists():
                    shutil.copyfile(results / name / file, target / file)
        except OSError as error:
            raise artifacts.unwritable(target, error) from error


def render(runs: dict[str, Run]) -> str:
    """The page, in Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["measured"] = report.spell
    environment.filters["cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split())
    claims = [claim for run in runs.values() for claim in run.claims]
    counts = {verdict: sum(claim["verdict"] == verdict for claim in claims) for verdict in VERDICTS}
    missing = [name for name in REPRODUCED if name not in runs]
    template = environment.get_template("ledger.md.j2")
    return template.render(runs=list(runs.values()), counts=counts, missing=missing)


def claim(runs: dict[str, Run], claim_id: str) -> dict[str, Any]:
    """What is kept of one claim. Raises KeyError if nothing is."""
    for run in runs.values():
        for entry in run.claims:
            if entry["claim"] == claim_id:
                return dict(entry)
    raise KeyError(claim_id)


def numbers(runs: dict[str, Run], claim_id: str) -> list[float]:
    """Every number that is kept of one claim: its evidence, what its verdict and scope say, the tables of its run."""
    entry = claim(runs, claim_id)
    (tables,) = [run.tables for run in runs.values() if any(c["claim"] == claim_id for c in run.claims)]
    values = [x for e in entry["evidence"] for x in (e["value"], *e["interval"], e["count"])]
    texts = [entry["because"], entry["scope"], *(cell for table in tables for row in table["rows"] for cell in row)]
    spelled = [found.replace(",", "") for text in texts for found in NUMBER.findall(str(text))]
    return [float(x) for x in (*values, *spelled) if x is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; its status."""
    return command_line.run(_main, argv)


def _main(argv: Sequence[str]) -> int:
    with command_line.refusing():
        asked = parse(LedgerConfig, argv, presets=("kept",), out="docs/ledger")
    if asked.help:
        say((__doc__ or "").strip() + "\n\nFlags:\n" + describe(LedgerConfig, {"kept": {}}, out="docs/ledger"))
        return 0
    with command_line.refusing():
        config = asked.configuration(LedgerConfig, {"kept": {}})
    results, out = pathlib.Path(config.results), pathlib.Path(asked.out)
    new, kept = load(results), load(out)
    if not new:
        raise CommandError(
            f"--results={results} holds no complete run of an experiment: run experiments.reproduce first"
        )
    found = contradictions(kept, new)
    if found:
        show(Table("Verdicts that contradict those that are kept", ("claim", "kept", "new"), tuple(found)))
    else:
        say("no verdict contradicts one that is kept")
    if config.compare:
        return 1 if found else 0
    if results.resolve() != out.resolve():  # else only the page is written anew
        keep(results, out, list(new))
    artifacts.write_atomic(out / PAGE, render(load(out)).encode())
    say(str(out / PAGE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
