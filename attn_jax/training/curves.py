"""The log's numbers as curves for TensorBoard, where tensorboardX is installed."""

import importlib
import importlib.util
import os
import pathlib
import re
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any


class Curves:
    """A file of TensorBoard's events; what an earlier process wrote past `step` is hidden by it.

    The events are tensorboardX's, the file is ours: the thread of its `SummaryWriter` dies on a full disk, and the run
    would wait for it forever.
    """

    def __init__(self, directory: pathlib.Path, *, step: int) -> None:
        proto, summary, self._records = map(_part, ("proto.event_pb2", "proto.summary_pb2", "record_writer"))
        self._event, self._summary = proto.Event, summary.Summary
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._file = open(directory / name, "wb")  # noqa: SIM115 - open as long as the run
        self._write(file_version="brain.Event:2")
        self._write(step=step + 1, session_log=proto.SessionLog(status=proto.SessionLog.START))

    def draw(self, row: Mapping[str, Any]) -> None:
        """One curve a number, and one a run, layer and head where there are many. Raises OSError."""
        if row["kind"] == "finding":  # its value is a point of another curve
            return
        summary = self._summary()
        for name, value in row.items():
            for tag, x in _numbers(re.sub(r"[^-/\w.]", "_", f"{row['kind']}/{name}"), value):
                summary.value.add(tag=tag, simple_value=x)
        if summary.value:
            self._write(step=row["step"], summary=summary)

    def flush(self) -> None:
        """Puts the curves on disk. Raises OSError."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file. Raises OSError."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """An event as a record: length, its checksum, data, its checksum."""
        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._records.masked_crc32c(part)) for part in (length, data))
        self._file.write(length + next(checksums) + data + next(checksums))


def _numbers(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """The floats in a value, each under its place in lists of lists."""
    if isinstance(value, list):
        for index, x in enumerate(value):
            yield from _numbers(f"{tag}/{index}", x)
    elif isinstance(value, float):
        yield tag, value


def _part(name: str) -> Any:
    """A module of tensorboardX, which need not be there."""
    return importlib.import_module(f"tensorboardX.{name}")


def installed() -> bool:
    """Whether there is a tensorboardX to draw with."""
    return importlib.util.find_spec("tensorboardX") is not None
