"""What a run tells on the way: one line that is rewritten on a terminal, plain lines now and then elsewhere."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np

EVERY = 10.0  # seconds between plain lines


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: steps done.
        steps: steps in all.
        metrics: of the last step; `[runs]` where there are many.
        tokens_per_second: of training, all runs together; None after the first call, which compiles.

    >>> import numpy as np
    >>> from attn_jax.training import Console, Progress
    >>> losses = np.array([2.5, 1.5, np.nan])  # of three runs at once, of which one diverged
    >>> Console().progress(Progress(step=100, steps=100, metrics={"loss": losses}, tokens_per_second=12345.0))
    step 100/100  loss 1.5..2.5  12,345 tokens/s
    """

    step: int
    steps: int
    metrics: Mapping[str, Any]
    tokens_per_second: float | None


class Speed:
    """Tokens per second over all calls but the first, which compiles.

    Args:
        tokens: of a step, all runs together.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self._calls, self._steps, self._seconds = tokens, 0, 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        """A call is done."""
        if self._calls:
            self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._calls += 1

    @property
    def tokens_per_second(self) -> float | None:
        """None after the first call."""
        return self._steps * self._tokens / self._seconds if self._seconds else None


@runtime_checkable
class Reporter(Protocol):
    """Who is told."""

    def progress(self, progress: Progress) -> None:
        """After every call."""
        ...

    def note(self, text: str) -> None:
        """What a user should know, in one line."""
        ...


class Silent:
    """Tells nobody."""

    def progress(self, progress: Progress) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


class Console:
    """Tells who sits before the terminal, or reads the file that the output goes to.

    Args:
        stream: where it is printed; None: on standard output.

    >>> from attn_jax.training import Console, Progress
    >>> console = Console()
    >>> console.note("continuing from step 80")
    continuing from step 80
    >>> console.progress(Progress(step=100, steps=100, metrics={"loss": 2.31}, tokens_per_second=12345.0))
    step 100/100  loss 2.31  12,345 tokens/s
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._last = -EVERY
        self._open = False

    def progress(self, progress: Progress) -> None:
        """Rewrites the line; a plain one every ten seconds, and the last."""
        terminal, now, done = self._out.isatty(), time.monotonic(), progress.step >= progress.steps
        if terminal:
            self._print(f"\r\x1b[K{describe(progress)}", end="\n" if done else "")
            self._open = not done
        elif done or now - self._last >= EVERY:
            self._last = now
            self._print(describe(progress))

    def note(self, text: str) -> None:
        """On a line of its own."""
        self.close()
        self._print(text)

    def close(self) -> None:
        """Ends the line that would be rewritten, if there is one."""
        if self._open:
            self._print("")
        self._open = False

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stdout

    def _print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self._out, flush=True)


def describe(progress: Progress) -> str:
    """`step 120/1000  loss 2.31  gradient_norm 0.52  12,345 tokens/s`; of many runs, the range."""
    parts = [f"step {progress.step}/{progress.steps}"]
    for name, value in progress.metrics.items():
        numbers = np.ravel(np.asarray(value, np.float64))
        numbers = numbers[np.isfinite(numbers)]
        if not numbers.size:
            parts.append(f"{name} not finite")
        elif numbers.min() == numbers.max():
            parts.append(f"{name} {numbers[0]:.4g}")
        else:
            parts.append(f"{name} {numbers.min():.4g}..{numbers.max():.4g}")
    speed = progress.tokens_per_second
    return "  ".join([*parts, "compiled" if speed is None else f"{speed:,.0f} tokens/s"])
