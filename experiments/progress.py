"""What a run tells on the way: a bar on a terminal, plain lines elsewhere, small tables at the end."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from experiments.command_line import printable, say


@dataclasses.dataclass(frozen=True)
class Table:
    """A small table: for the end of a run, and for the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows of {self.title!r} must have {len(self.columns)} cells, got {row}")


Report = Callable[[str, float | None], None]  # (unit, seconds; None where the stored part was reused)


def silent(unit: str, seconds: float | None) -> None:
    """Tells nothing: for tests."""


@contextlib.contextmanager
def watch(name: str, total: int) -> Iterator[Report]:
    """Follows `total` units of work on standard output."""
    if not sys.stdout.isatty():
        done = 0

        def line(unit: str, seconds: float | None) -> None:
            nonlocal done
            done += 1
            say(f"[{done}/{total}] {name}: {unit}, {_took(seconds)}")

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(name, total=total)

        def advance(unit: str, seconds: float | None) -> None:
            bar.update(task, advance=1, description=f"{name}: {unit}, {_took(seconds)}")

        yield advance


def show(table: Table) -> None:
    """Prints a table; what the cells hold is text, never markup and never a terminal's commands."""
    drawn = RichTable(title=Text(printable(table.title)), title_justify="left")
    for column in table.columns:
        drawn.add_column(Text(printable(column)), overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    terminal, encoding = sys.stdout.isatty(), sys.stdout.encoding or "utf-8"
    page = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace")  # in memory: only `say` meets a full disk
    Console(file=page, force_terminal=terminal, width=None if terminal else 120).print(drawn)
    page.seek(0)
    say(page.read().rstrip("\n"))


def cells(rows: Sequence[Sequence[object]]) -> tuple[tuple[str, ...], ...]:
    """Cells as text: floats to three digits, from a hundred on without decimals."""

    def text(cell: object) -> str:
        if not isinstance(cell, float):
            return str(cell)
        return f"{cell:.0f}" if 100 <= abs(cell) < 1e6 else f"{cell:.3g}"

    return tuple(tuple(map(text, row)) for row in rows)


def _took(seconds: float | None) -> str:
    return "kept from before" if seconds is None else f"{seconds:.1f} s"
