"""The command: `python -m attn_jax.audit --target=package.module:function`, or `--target=path/file.py:function`.

Exits with 0 if there is no fault, 1 if there is one, 2 if the target cannot be audited.
"""

import argparse
import importlib
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from attn_jax.audit import Expectation, audit_attention


def main(arguments: Sequence[str] | None = None) -> int:
    """Audits the target and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m attn_jax.audit", description="Audits an attention function.")
    target = "package.module:function or path/file.py:function, called as f(query, key, value)"
    parser.add_argument("--target", required=True, help=target)
    parser.add_argument("--scale", help="that is meant: a number, or a rule such as inverse_sqrt")
    parser.add_argument("--causal", action="store_true", help="it applies a causal mask without being asked")
    parser.add_argument("--window", help="left,right that it applies without being asked, both ends included")
    parser.add_argument("--positions", help="rotary or rotary_interleaved, that it applies itself")
    parser.add_argument("--argument", action="append", default=[], help="our option by its name there: mask=attn_mask")
    parser.add_argument("--json", metavar="FILE", help="also write the report there")
    given = parser.parse_args(arguments)
    try:
        expect = Expectation(
            scale=_scale(given.scale), causal=given.causal, window=_window(given.window), positions=given.positions
        )
        report = audit_attention(_load(given.target), expect=expect, arguments=dict(map(_pair, given.argument)))
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    if given.json:
        try:
            pathlib.Path(given.json).write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: the report cannot be written to {given.json}: {error.strerror}", file=sys.stderr)
            return 2
    return 0 if report.ok else 1


def _load(target: str) -> Any:
    """The function that a target names; the working directory is looked in, too."""
    module, colon, path = target.partition(":")
    if not (module and colon and path):
        raise ValueError(f"target must be package.module:function or path/file.py:function, got {target!r}")
    file = pathlib.Path(module)
    sys.path.insert(0, str(file.parent.resolve()) if file.suffix == ".py" else os.getcwd())
    try:
        found = _run(file) if file.suffix == ".py" else importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"target {module} cannot be imported: {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ValueError(f"target {module} has no {path}")
        found = getattr(found, name)
    return found


def _run(file: pathlib.Path) -> Any:
    """The module that a file is, whatever else bears its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _scale(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError as error:
        raise ValueError(f"window must be left,right, got {text!r}") from error
    return left, right


def _pair(text: str) -> tuple[str, str]:
    name, equals, own = text.partition("=")
    if not (name and equals and own):
        raise ValueError(f"argument must be option=name, got {text!r}")
    return name, own


if __name__ == "__main__":
    sys.exit(main())
