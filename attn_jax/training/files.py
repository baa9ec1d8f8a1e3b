"""The directory of a run: held by one process at a time."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from attn_jax.files import RunError as RunError
from attn_jax.files import refusal as refusal
from attn_jax.files import write_atomic as write_atomic


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
