"""SIGTERM and Ctrl-C wait until the run is saved, then take their usual course."""

import contextlib
import signal
import threading
from collections.abc import Iterator

WAITING = (signal.SIGTERM, signal.SIGINT)


class Pending:
    """The signal that came, if one did."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._handlers = {}

    def install(self) -> None:
        """Begins to wait. Only the main thread gets signals; one that is ignored stays so."""
        if threading.current_thread() is threading.main_thread():
            for number in WAITING:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._receive)

    def restore(self) -> None:
        """Gives every signal back to whom it was meant for."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def deliver(self, number: signal.Signals) -> None:
        """Lets the signal that came, here or to another process of the run, do what it does: end it, mostly."""
        self.restore()
        signal.raise_signal(number)

    def _receive(self, number: int, frame: object) -> None:
        self.number = signal.Signals(number)
        self.restore()  # a second one does not wait


@contextlib.contextmanager
def waiting() -> Iterator[Pending]:
    """Within the block signals wait in `Pending`."""
    pending = Pending()
    pending.install()
    try:
        yield pending
    finally:
        pending.restore()
