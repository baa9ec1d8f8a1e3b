"""The directory of a run: held by one process at a time, its files written whole or not at all."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


class RunError(Exception):
    """A run cannot begin or go on; the message says why in one line."""


def refusal(what: str, path: pathlib.Path, reason: BaseException | str) -> RunError:
    """The error that `path` cannot be used; the system's reason, without its noise."""
    text = (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(reason)
    return RunError(f"{what} {path}: {' '.join(text.split())}")


@contextlib.contextmanager
def holding(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Makes the directory if need be and keeps other runs out of it; the system lets go however the process ends."""
    path = pathlib.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise refusal("the run cannot be kept in", path, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
            raise refusal("the run cannot be kept in", path, "another run uses it" if taken else error) from None
        yield path
    finally:
        os.close(handle)


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Writes `data` beside `path` and moves it there. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
