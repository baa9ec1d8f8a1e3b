"""The log of a run, one JSON object a line.

    log.jsonl       what was measured, by step: the same bytes whether or not the run was interrupted
    events.jsonl    what happened, by the clock: begun, resumed, saved, stopped, tokens per second
    tensorboard/    the numbers of log.jsonl as curves, where tensorboardX is installed

A resumed run drops the lines past the step that it continues from, and one that a kill cut short, and writes on. So no
line is there twice or by half. Of several processes the first writes; all have the rows in memory.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from attn_jax.parallel.distributed import in_first, is_first
from attn_jax.training.curves import Curves, installed
from attn_jax.training.files import refusal, write_atomic

Row = dict[str, Any]


class RunLog:
    """Rows in memory and, if there is a directory, on disk. Each row has a `step` and a `kind`.

    Args:
        directory: of the run; None: nothing is written.
        step: what the run continues from: rows past it are dropped. None: it begins, and all are.

    Raises:
        RunError: in one line, here and in every method, if the log cannot be read or written.

    >>> import pathlib, tempfile, numpy as np
    >>> from attn_jax.training import RunLog
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     log = RunLog(pathlib.Path(directory))
    ...     log.write({"step": step, "kind": "train", "loss": np.float32(1 / step)} for step in (1, 2, 4))
    ...     log.close()
    ...     continued = RunLog(pathlib.Path(directory), step=2)  # of a run whose last checkpoint is that of step 2
    ...     continued.close()
    >>> continued.rows
    [{'step': 1, 'kind': 'train', 'loss': 1.0}, {'step': 2, 'kind': 'train', 'loss': 0.5}]
    """

    def __init__(self, directory: pathlib.Path | None, *, step: int | None = None) -> None:
        self.rows: list[Row] = []
        self.notes: tuple[str, ...] = ()
        self._directory = directory
        self._file = self._curves = None
        if directory is None:
            return
        self.rows, self.notes = in_first(lambda: self._reopen(directory / "log.jsonl", -1 if step is None else step))
        if not is_first():
            self._directory = None
            return
        with self._refusing():
            self._file = open(directory / "log.jsonl", "ab")  # noqa: SIM115 - open as long as the run
            self._curves = Curves(directory / "tensorboard", step=step or 0) if installed() else None

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends rows. Arrays become lists; NaN and infinities become null, strict JSON having no word for them."""
        rows = [_plain(row) for row in rows]
        self.rows += rows
        with self._refusing():
            if self._file is not None:
                self._file.write(b"".join(map(_line, rows)))
                self._file.flush()
            if self._curves is not None:
                for row in rows:
                    self._curves.draw(row)

    def event(self, what: str, **details: Any) -> None:
        """Notes what happened, and when."""
        if self._directory is None:
            return
        row = {"time": round(time.time(), 3), "event": what, **_plain(details)}
        with self._refusing(), open(self._directory / "events.jsonl", "a+b") as file:
            cut_short = file.seek(0, io.SEEK_END) and file.seek(-1, io.SEEK_END) and file.read(1) != b"\n"
            file.write((b"\n" if cut_short else b"") + _line(row))

    def sync(self) -> None:
        """Waits until the disk has every row: no checkpoint is ahead of its log."""
        with self._refusing():
            if self._file is not None:
                os.fsync(self._file.fileno())
            if self._curves is not None:
                self._curves.flush()

    def close(self) -> None:
        """Closes the files; what could not be written was said before."""
        for part in (self._file, self._curves):
            if part is not None:
                with contextlib.suppress(OSError):
                    part.close()

    def _reopen(self, path: pathlib.Path, step: int) -> tuple[list[Row], tuple[str, ...]]:
        """The whole rows up to `step`, which alone are kept, and what should be known of the others."""
        with self._refusing():
            data = path.read_bytes() if path.exists() else b""
            rows, damaged = read_rows(data)
            rows = [row for row in rows if row["step"] <= step]
            kept = b"".join(map(_line, rows))
            if kept != data:
                write_atomic(path, kept)
        notes = []
        if damaged:
            notes.append(f"{damaged} damaged lines of {path} were dropped")
        if step > 0 and not rows:
            notes.append(f"{path} holds nothing of the {step} steps that were done")
        return rows, tuple(notes)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise refusal("the log cannot be kept in", self._directory or pathlib.Path(), error) from error


def read_rows(data: bytes) -> tuple[list[Row], int]:
    """The rows of a log, and how many lines are none; a last line that a kill cut short is no row and not counted."""
    rows, damaged = [], 0
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        else:
            damaged += 1
    return rows, damaged


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Numbers, texts, lists and mappings of Python."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if hasattr(value, "dtype"):
        return _plain(np.asarray(value).tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
