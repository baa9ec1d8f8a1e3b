"""How a command ends: with a status, and with one line on standard error for whatever stopped it."""

import contextlib
import io
import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence


class CommandError(Exception):
    """The command cannot do what was asked for; the message says why in one line."""


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """The status of `command(argv)`: its own, 2 after a CommandError, 130 when interrupted, 141 without a reader."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as we run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without √ shows the rest
    try:
        return command(sys.argv if argv is None else argv)
    except CommandError as error:
        print(printable("error: " + " ".join(str(error).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has seen enough
        return 128 + signal.SIGPIPE


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """What is wrong with the flags, and with the files they name, ends the command in one line."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(str(error)) from error


def say(text: str) -> None:
    """Prints a line at once. Raises BrokenPipeError if nobody reads, CommandError if it cannot be written."""
    with printing():
        print(text, flush=True)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """What goes to standard output within the block meets a closed pipe or a full disk as `say` does."""
    try:
        yield
    except OSError as error:
        # What is still buffered would fail once more, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandError(f"standard output cannot be written: {error.strerror}") from error


def printable(text: str) -> str:
    """Text for a terminal or a figure: control characters, which could move the cursor, become �."""
    return "".join(c if c == "\n" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
