"""Files that are written whole or not at all, and the error that says in one line why one cannot be used."""

import os
import pathlib


class RunError(Exception):
    """A run cannot begin or go on; the message says why in one line.

    >>> from attn_jax.diagnostics import Limits
    >>> from attn_jax.training import RunError
    >>> try:
    ...     Limits.load("nowhere.json")
    ... except RunError as error:
    ...     print(error)
    no limits in nowhere.json: No such file or directory
    """


def refusal(what: str, path: pathlib.Path, reason: BaseException | str) -> RunError:
    """The error that `path` cannot be used; the system's reason, without its noise."""
    text = (reason.strerror or str(reason)) if isinstance(reason, OSError) else str(reason)
    return RunError(f"{what} {path}: {' '.join(text.split())}")


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Writes `data` beside `path` and moves it there. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
