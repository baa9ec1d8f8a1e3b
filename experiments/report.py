"""The report: one self-contained HTML page from what the experiments left.

It opens from disk, offline, in light and dark; figures are `data:` URIs. Beside it may lie the page of a model, which
it links to. Everything that is read (model names, token
texts, file names, flags) is text from outside and is escaped by the template.
"""

import base64
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import pandas as pd

from experiments import artifacts
from experiments.verdicts import VERDICTS

TITLE = "Claims about attention: the report"
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, jinja2.TemplateError)
LAYERED = {"layer", "measure", "value"}  # columns of measurements that are told layer by layer


@dataclasses.dataclass(frozen=True)
class Run:
    """The artifacts of one experiment, as the page shows them.

    Attributes:
        name: the experiment.
        record: its config.json.
        claims: its claims.json.
        tables: of its summary.json, or a table by layer made from its measurements.
        figure: the PNG as a `data:` URI, or None.
        alt: what the figure shows.
    """

    name: str
    record: Mapping[str, Any]
    claims: Sequence[Mapping[str, Any]]
    tables: Sequence[Mapping[str, Any]]
    figure: str | None
    alt: str


def load_run(directory: pathlib.Path) -> Run | None:
    """The run that is complete under `directory`; None if there is none. Raises OutputError if its files are broken."""
    record = artifacts.read_record(directory)
    if record is None or not (directory / "claims.json").exists():
        return None
    try:
        run = _read_run(directory, record)
        render([run])  # what the page cannot show is broken, whatever is wrong with it
    except BROKEN as error:
        raise artifacts.OutputError(f"{directory} holds results that cannot be shown: {error}") from error
    return run


def _read_run(directory: pathlib.Path, record: Mapping[str, Any]) -> Run:
    claims = json.loads((directory / "claims.json").read_text("utf-8"))
    shown = directory / "summary.json"
    summary = json.loads(shown.read_text("utf-8")) if shown.exists() else {}
    figure = directory / "figure.png"
    image = f"data:image/png;base64,{base64.b64encode(figure.read_bytes()).decode()}" if figure.exists() else None
    tables = summary.get("tables") or _by_layer(directory / "measurements.csv")
    alt = summary.get("alt") or f"Figure of {record['experiment']}; its numbers are in the tables."
    return Run(record["experiment"], record, claims, tables, image, alt)


def build(out: pathlib.Path, names: Sequence[str], failed: Sequence[str] = ()) -> pathlib.Path:
    """Writes `out/report/index.html` from the runs under `out/NAME`, and returns its path."""
    runs, broken = [], list(failed)
    for name in names:
        try:
            run = load_run(out / name)
        except artifacts.OutputError:
            run = None
            broken += [name] if name not in broken else []
        runs += [] if run is None else [run]
    page = reserve(out)
    missing = [name for name in names if name not in broken and name not in {run.name for run in runs}]
    model = "../model_report/index.html" if (out / "model_report" / "index.html").exists() else None
    artifacts.write_atomic(page, render(runs, broken, missing, model).encode())
    return page


def reserve(out: pathlib.Path) -> pathlib.Path:
    """The page's path under `out`, made sure that it can be written and is nobody else's. Raises OutputError."""
    page = out / "report" / "index.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        theirs = page.exists() and TITLE not in page.read_text("utf-8", errors="replace")
    except OSError as error:
        raise artifacts.unwritable(out, error) from error
    if theirs:
        raise artifacts.foreign(out, "report/index.html")
    return page


def render(
    runs: Sequence[Run], failed: Sequence[str] = (), missing: Sequence[str] = (), model: str | None = None
) -> str:
    """The page as text, which says what failed and what was not run, and where the page of a model is."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["measured"] = spell
    counts = {verdict: sum(c["verdict"] == verdict for run in runs for c in run.claims) for verdict in VERDICTS}
    return environment.get_template("report.html.j2").render(
        title=TITLE, runs=runs, failed=failed, missing=missing, counts=counts, model=model
    )


def spell(entry: Mapping[str, Any]) -> str:
    """A value with its interval; what is not known is a dash."""
    low, high = entry["interval"]
    return f"{_number(entry['value'])} [{_number(low)}, {_number(high)}]"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _by_layer(path: pathlib.Path) -> list[dict[str, Any]]:
    """Means per layer of everything that was measured by layer."""
    if not path.exists():
        return []
    measurements = pd.read_csv(path)
    if not set(measurements.columns) >= LAYERED:
        return []
    means = measurements.pivot_table(index="layer", columns="measure", values="value", aggfunc="mean")
    rows = [[str(row[0]), *(_number(float(x)) for x in row[1:])] for row in means.itertuples()]
    return [{"title": "Means per layer", "columns": ["layer", *map(str, means.columns)], "rows": rows}]
