"""The page: subjects in, one HTML file out, which opens from disk and asks nobody for anything.

The numbers are in it once, as JSON and packed arrays; our scripts draw a figure or a table from them when it is looked
at. A policy in the page lets these scripts run, and nothing else.
"""

import importlib.resources
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from experiments import artifacts
from experiments.model_report.measures import MAIN, Measure, ordered
from experiments.model_report.safe import digest, packed, rounded, to_script, visible, visible_token
from experiments.model_report.subjects import ALIKE, Subject

TEMPLATES = pathlib.Path(__file__).parent / "templates"
SCRIPTS = ("tools.js", "figures.js", "report.js")  # one after the other, as one
GENERATOR = "attn_jax model report"  # by which we know a page of ours
NEAREST = 6  # heads that are named as the most similar ones
SHOWN = 8  # heads of a finding that are always in sight


def write_report(path: str | os.PathLike[str], subjects: Sequence[Subject]) -> pathlib.Path:
    """Writes the page of one model, or of two and their difference.

    Args:
        path: of the HTML file; a page that this function wrote is replaced.
        subjects: one or two.

    Returns:
        The path.

    Raises:
        OutputError: the file cannot be written, or is somebody else's.
        ValueError: no subject, or more than two.
    """
    page = pathlib.Path(path)
    reserve(page)
    artifacts.write_atomic(page, render(subjects).encode())
    return page


def reserve(page: pathlib.Path) -> None:
    """Makes sure that the page can be written and is nobody else's. Raises OutputError."""
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        theirs = page.exists() and GENERATOR not in page.read_text("utf-8", errors="replace")[:2000]
    except OSError as error:
        raise artifacts.unwritable(page, error) from error
    if theirs:
        raise artifacts.foreign(page.parent, page.name)


def render(subjects: Sequence[Subject]) -> str:
    """The page as text. Raises ValueError unless there are one or two subjects."""
    if len(subjects) not in (1, 2):
        raise ValueError(f"subjects must be one or two, got {len(subjects)}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "number": _number}
    ours = "\n".join((TEMPLATES / name).read_text("utf-8") for name in SCRIPTS)
    scripts = {"plotly": plotly_script(), "report": ours}
    encoded, compared = [encode(one) for one in subjects], compare(subjects)
    found = {measure["name"]: measure for one in encoded for measure in one["measures"]}
    same = {name: number for name in found if (number := _same_everywhere(name, encoded)) is not None}
    # The place of a measure among all is how `report.js` knows its map.
    shown = [{**found[name], "id": f"map-{i}"} for i, name in enumerate(found) if name not in same]
    return environment.get_template("page.html.j2").render(
        generator=GENERATOR,
        subjects=subjects,
        shown=shown,
        same=[(found[name]["label"], number) for name, number in same.items()],
        layers=max(one.look.pattern.shape[0] for one in subjects),
        first=SHOWN,
        main=MAIN,
        alike=ALIKE,
        style=(TEMPLATES / "report.css").read_text("utf-8"),
        data=to_script({"subjects": encoded, "sameWindow": compared["window"]}),
        compared=compared,
        scripts=scripts,
        policy=f"default-src 'none'; script-src {' '.join(map(digest, scripts.values()))}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
    )


def plotly_script() -> str:
    """plotly.js, as the package brings it."""
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")


def compare(subjects: Sequence[Subject]) -> dict[str, bool]:
    """Whether two subjects have the same heads, and read the same window token by token."""
    first, last = subjects[0], subjects[-1]
    heads = len(subjects) == 2 and first.look.pattern.shape[:2] == last.look.pattern.shape[:2]
    windows = [(one.tokens, one.start, _columns(one)) for one in (first, last)]
    return {"heads": heads, "window": heads and windows[0] == windows[1]}


def encode(subject: Subject) -> dict[str, Any]:
    """What `report.js` reads of a subject."""
    look, queries = subject.look, list(map(visible_token, subject.tokens))
    there = _columns(subject)
    keys = [*queries, "(all before)", "(all after)"]
    order = np.argsort(subject.divergence + 2 * np.eye(len(subject.divergence)), axis=1, kind="stable")
    nearest = order[:, : min(NEAREST, len(order) - 1)]
    return {
        "name": visible(subject.name),
        "layers": look.pattern.shape[0],
        "heads": look.pattern.shape[1],
        "start": subject.start,
        "queries": queries,
        "keys": [key for key, is_there in zip(keys, there, strict=True) if is_there],
        "measures": [_measure(*found) for found in ordered(subject.diagnosis.measures)],
        "pattern": packed(look.pattern[..., there], "uint8"),
        "positions": subject.positions.tolist(),
        "entropy": packed(look.entropy, "uint16"),
        "spectrum": packed(look.spectrum, "float32"),
        "clusters": subject.clusters.tolist(),
        "nearest": nearest.tolist(),
        "divergence": rounded(np.take_along_axis(subject.divergence, nearest, axis=1)),
    }


def _columns(subject: Subject) -> list[bool]:
    """Which columns of the patterns are shown: the keys of the window, and those outside where they have any weight."""
    outside = subject.look.pattern[..., -2:]
    return [True] * len(subject.tokens) + [bool(np.any(outside[..., side] > 0)) for side in (0, 1)]


def _measure(name: str, words: Measure, values: np.ndarray) -> dict[str, Any]:
    return {
        "name": visible(name),
        "label": visible(words.label),
        "explanation": words.explanation,
        "low": words.low,
        "high": words.high,
        "by_head": values.ndim == 2,
        "values": rounded(values.reshape(len(values), -1)),
    }


def _same_everywhere(name: str, encoded: Sequence[Mapping[str, Any]]) -> float | None:
    """The number that a measure has in all layers and heads of all subjects, if it is one: no map is needed for it."""
    numbers = {
        number
        for one in encoded
        for measure in one["measures"]
        if measure["name"] == name
        for row in measure["values"]
        for number in row
    }
    return numbers.pop() if len(numbers) == 1 else None


def _number(value: float | None) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:.4g}"
