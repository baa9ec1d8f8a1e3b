"""Tables and figure of the attention benchmark: functions of its rows alone."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import figures
from experiments.benchmarks.problems import CASES
from experiments.benchmarks.race import PATTERN, PRODUCT, TORCH_PRODUCT, product_flops
from experiments.benchmarks.timing import ratio
from experiments.estimates import Estimate
from experiments.progress import Table, cells

TITLES = {"forward": "forward", "forward_backward": "forward and backward"}


@dataclasses.dataclass(frozen=True)
class Race:
    """The rows of one unit.

    Attributes:
        unit: its name.
        case, length, direction: what was run.
        seconds: `[rounds]` of each side that was timed.
        values: what was measured otherwise, by side and measure.
        notes: why a side was not timed.
    """

    unit: str
    case: str
    length: int
    direction: str
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    values: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    def median(self, side: str) -> float:
        """Seconds of a side."""
        return float(np.median(self.seconds[side]))

    def over(self, side: str, base: str) -> str:
        """The time of a side over that of another, with its interval."""
        return "1" if side == base else _spell(ratio(self.seconds[side], self.seconds[base]))


def races(measurements: pd.DataFrame) -> list[Race]:
    """The rows, unit by unit."""
    found: dict[str, Race] = {}
    for row in measurements.to_dict("records"):
        unit, side = str(row["unit"]), str(row["side"])
        race = found.setdefault(unit, Race(unit, str(row["case"]), int(row["n"]), str(row["direction"])))
        if pd.notna(row["seconds"]):
            race.seconds.setdefault(side, []).append(float(row["seconds"]))
        elif pd.notna(row["value"]):
            race.values[side, str(row["measure"])] = float(row["value"])
        else:
            race.notes[side] = str(row["note"])
    return list(found.values())


def tables(config: Any, measurements: pd.DataFrame) -> list[Table]:
    """Ratios first, then rates and memory, what statistics and patterns cost, and who did not run and why."""
    everything, first, found = races(measurements), config.sides[0], []
    cells_of = {
        f"Time over that of {first}": lambda race, side: race.over(side, first) if first in race.seconds else "–",
        "Milliseconds": lambda race, side: f"{race.median(side) * 1e3:.3g}",
        "Share of the machine's own matrix product": _share_of_product,
        "Compiled temporary memory in MB": _memory,
    }
    for direction in config.directions:
        compared = [race for race in everything if race.case in CASES and race.direction == direction]
        if compared:
            for title, cell in cells_of.items():
                found.append(_by_side(f"{title}, {TITLES[direction]}", compared, config.sides, cell))
    found += _products(everything)
    found += _variants(everything, "statistics", "output", "Time with statistics over that of the output alone")
    found += _variants(everything, "patterns", "full", "Time of a pattern over that of the full square, one head")
    return [*found, *_not_timed(everything)]


def figure(config: Any, measurements: pd.DataFrame) -> Figure:
    """Median time against length, a panel per pattern and direction."""
    everything, shown = races(measurements), [name for name in config.cases if name in CASES]
    drawn, axes = figures.panels(len(config.directions), max(len(shown), 1), width=3.6, height=3.4)
    for row, direction in zip(axes, config.directions, strict=True):
        for one, case in zip(row, shown, strict=False):
            run = [race for race in everything if race.case == case and race.direction == direction]
            for index, side in enumerate(config.sides):
                timed = sorted((race.length, race.median(side) * 1e3) for race in run if side in race.seconds)
                if timed:
                    lengths, medians = zip(*timed, strict=True)
                    figures.curve(one, index, lengths, medians, side, alpha=0.85)
            one.set(title=f"{case}, {TITLES[direction]}", xlabel="n", ylabel="milliseconds", yscale="log")
            figures.powers(one, sorted(config.lengths))
    if shown:
        axes[0, 0].legend(fontsize=7)
    return drawn


def _by_side(title: str, compared: Sequence[Race], sides: Sequence[str], cell: Callable[[Race, str], str]) -> Table:
    rows = [
        (race.case, str(race.length), *(cell(race, side) if side in race.seconds else "–" for side in sides))
        for race in compared
    ]
    return Table(title, ("case", "n", *sides), cells(rows))


def _share_of_product(race: Race, side: str) -> str:
    """What the pattern asks for, over the side's time, over the rate of JAX's product."""
    rate = race.values[PATTERN, "flops"] / race.median(side)
    return f"{rate / (product_flops() / race.median(PRODUCT)):.0%}"


def _memory(race: Race, side: str) -> str:
    found = race.values.get((side, "temporary_bytes"))
    return "–" if found is None else f"{found / 1e6:.3g}"


def _products(everything: Sequence[Race]) -> Iterator[Table]:
    """The rate of the machine's own product, as the races met it: how steady the machine was."""
    rows = []
    for side in (PRODUCT, TORCH_PRODUCT):
        rates = [product_flops() / race.median(side) / 1e9 for race in everything if side in race.seconds]
        if rates:
            rows.append((side, float(np.median(rates)), min(rates), max(rates)))
    if rows:
        title = "GFLOP/s of the machine's own product over the races"
        yield Table(title, ("product", "median", "least", "most"), cells(rows))


def _variants(everything: Sequence[Race], case: str, base: str, title: str) -> Iterator[Table]:
    """Times of the variants of a side (`side: variant`) over that of its variant `base`."""
    rows, patterns = [], case == "patterns"
    for race in (race for race in everything if race.case == case):
        for name in race.seconds:
            side, _, variant = name.partition(": ")
            if not variant or f"{side}: {base}" not in race.seconds:
                continue
            touched = (f"{race.values[name, 'touched_share']:.3f}",) if patterns else ()
            numbers = (f"{race.median(name) * 1e3:.3g}", race.over(name, f"{side}: {base}"), *touched)
            rows.append((str(race.length), TITLES[race.direction], side, variant, *numbers))
    if rows:
        columns = ("n", "direction", "side", "with", "ms", "ratio", *(("tiles touched",) if patterns else ()))
        yield Table(title, columns, cells(rows))


def _not_timed(everything: Sequence[Race]) -> Iterator[Table]:
    """Who did not run, and why: nothing is left out in silence."""
    units: dict[tuple[str, str], list[str]] = {}
    for race in everything:
        for side, note in race.notes.items():
            units.setdefault((side, note), []).append(race.unit)
    if units:
        rows = [(*who, ", ".join(where)) for who, where in units.items()]
        yield Table("Not timed", ("side", "why", "races"), cells(rows))


def _spell(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"
