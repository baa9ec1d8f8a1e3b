"""An experiment, from flags to artifacts.

An experiment is a list of named units of work whose rows, put together, are its measurements; claims, figure and tables
are functions of the measurements alone. `run` does that and writes nothing; `main` reads the flags, keeps each finished
unit so that an interrupted run continues, and writes what `run` returned.

    EXPERIMENT = Experiment(name="…", question="…", config=MyConfig, presets={…}, units=…, judge=…, figure=…, alt=…)

    def run(config: MyConfig) -> Result:
        return harness.run(EXPERIMENT, config)

    if __name__ == "__main__":
        harness.main(EXPERIMENT)
"""

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import pandas as pd
from matplotlib.figure import Figure

from experiments import artifacts, command_line, progress, report
from experiments.artifacts import Row, Store
from experiments.claims import Outcome
from experiments.command_line import CommandError, say
from experiments.config import Config, describe, parse
from experiments.progress import Table

PRESETS = ("smoke", "quick", "full")

C = TypeVar("C", bound=Config)


class InputError(CommandError):
    """Something the user named (a file, a model) cannot be used; the message says why in one line."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """A named piece of work. `measure()` returns rows: flat mappings of names to numbers or texts, one a measurement.

    A row with `seconds` is a timing: it goes to timings.csv, since it differs from run to run. The name is a file name.
    Whatever units share should be made lazily: a unit whose rows are stored is not run again.
    """

    name: str
    measure: Callable[[], Sequence[Row]]


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[C]):
    """One question and how it is answered.

    Attributes:
        name: of the module under `experiments`.
        question: one line.
        config: the dataclass of its flags.
        presets: for each of `PRESETS`, the fields that differ from the configuration's defaults.
        units: the work a configuration asks for.
        judge: the verdicts, from the measurements.
        figure: the figure, from the measurements.
        alt: what the figure shows, for those who cannot see it.
        tables: small tables for the end of the run and for the report.
        records: what is written as JSON besides, by the name of the file.
        inputs: digests of the files that are read, so that parts are only reused for the same contents. Called before
            anything is written: what a user named wrongly raises here, in one line (ValueError, OSError).
        documentation: the module's docstring, for --help.
    """

    name: str
    question: str
    config: type[C]
    presets: Mapping[str, Mapping[str, Any]]
    units: Callable[[C], Sequence[Unit]]
    judge: Callable[[C, pd.DataFrame], Sequence[Outcome]]
    figure: Callable[[C, pd.DataFrame], Figure]
    alt: str
    tables: Callable[[C, pd.DataFrame], Sequence[Table]] = lambda config, measurements: ()
    records: Callable[[C, pd.DataFrame], Mapping[str, Any]] = lambda config, measurements: {}
    inputs: Callable[[C], Mapping[str, str]] = lambda config: {}
    documentation: str = ""

    def __post_init__(self) -> None:
        if tuple(self.presets) != PRESETS:
            raise ValueError(f"presets must be {PRESETS}, got {tuple(self.presets)}")

    def preset(self, name: str, **changes: Any) -> C:
        """The configuration of a preset, with some fields changed."""
        return self.config(**{**self.presets[name], **changes})


@dataclasses.dataclass(frozen=True)
class Result:
    """What `run` returns.

    Attributes:
        experiment: its name.
        config: what was asked for.
        measurements: tidy, one row a measurement; timings, too, where there are any.
        claims: the verdicts.
        tables: small tables.
        records: what is written as JSON besides, by the name of the file.
        figure: draws the figure.
        seconds: of each unit that was measured in this run.
    """

    experiment: str
    config: Config
    measurements: pd.DataFrame
    claims: tuple[Outcome, ...]
    tables: tuple[Table, ...]
    records: Mapping[str, Any]
    figure: Callable[[], Figure]
    seconds: Mapping[str, float]


def run(
    experiment: Experiment[C], config: C, *, store: Store | None = None, report: progress.Report = progress.silent
) -> Result:
    """Measures what is not stored yet, then judges. Writes only the parts and timings of `store`, if there is one."""
    rows: list[Row] = []
    seconds = {} if store is None else store.load_timings()
    kept = {}
    for unit in _units(experiment, config):
        part = None if store is None else store.load_part(unit.name)
        if part is not None:
            kept[unit.name] = seconds.get(unit.name, float("nan"))
            report(unit.name, None)
        else:
            started = time.perf_counter()
            # Through JSON even when nothing is stored: a run that continued sees the very same values.
            part = json.loads(json.dumps([artifacts.plain(row) for row in unit.measure()]))
            kept[unit.name] = time.perf_counter() - started
            if store is not None:
                store.save_part(unit.name, part)
                store.save_timings(kept)
            report(unit.name, kept[unit.name])
        rows.extend({"unit": unit.name, **row} for row in part)
    measurements = pd.DataFrame(rows)
    return Result(
        experiment=experiment.name,
        config=config,
        measurements=measurements,
        claims=tuple(experiment.judge(config, measurements)),
        tables=tuple(experiment.tables(config, measurements)),
        records=experiment.records(config, measurements),
        figure=lambda: experiment.figure(config, measurements),
        seconds=kept,
    )


def record_of(experiment: Experiment[C], config: C, *, preset: str, command: str) -> dict[str, Any]:
    """What config.json holds: enough to run it again, nothing that differs between equal runs."""
    machine = artifacts.describe_machine()  # first: reading the inputs may need a device
    return {
        "experiment": experiment.name,
        "question": experiment.question,
        "command": command,
        "preset": preset,
        "seed": config.seed,
        "flags": config.as_dict(),
        "inputs": dict(experiment.inputs(config)),
        **machine,
    }


def write(experiment: Experiment[C], result: Result, store: Store) -> None:
    """Writes the artifacts; the claims last, so that a directory with claims is complete."""
    measured, timed = _apart(result.measurements)
    store.write_table("measurements.csv", measured)
    store.save_timings(result.seconds, timed)
    store.write_figure("figure.png", result.figure())
    tables = [dataclasses.asdict(table) for table in result.tables]
    for name, record in result.records.items():
        store.write_json(name, record)
    store.write_json("summary.json", {"alt": experiment.alt, "tables": tables})
    store.write_json("claims.json", [outcome.as_dict() for outcome in result.claims])


def main(experiment: Experiment[Any], argv: Sequence[str] | None = None) -> NoReturn:
    """The command line of an experiment. Wrong flags end with one line and status 2, and nothing is written."""
    sys.exit(command_line.run(functools.partial(_main, experiment), argv))


def _main(experiment: Experiment[Any], argv: Sequence[str]) -> int:
    default_out = f"results/{experiment.name}"
    with command_line.refusing():
        asked = parse(experiment.config, argv, presets=PRESETS, out=default_out)
    if asked.help:
        flags = describe(experiment.config, experiment.presets, out=default_out)
        say(f"{experiment.documentation.strip()}\n\nFlags:\n{flags}")
        return 0
    with command_line.refusing():
        config = asked.configuration(experiment.config, experiment.presets)
        record = record_of(experiment, config, preset=asked.preset, command=asked.command(experiment.name))
        units = [unit.name for unit in _units(experiment, config)]
    with artifacts.open_store(asked.out, record, units) as (store, replaced):
        if replaced:
            say(replaced)
        with progress.watch(experiment.name, len(units)) as tell:
            result = run(experiment, config, store=store, report=tell)
        write(experiment, result, store)
        if page := report.load_run(store.directory):
            artifacts.write_atomic(store.directory / "report.html", report.render([page]).encode())
    for table in result.tables:
        progress.show(table)
    if result.claims:
        progress.show(verdicts(result.claims))
    say(f"wrote {asked.out}")
    return 0


def verdicts(claims: Sequence[Outcome]) -> Table:
    """The table that ends every run."""
    rows = tuple((x.claim.id, x.verdict, str(x.headline), x.because) for x in claims)
    return Table("Verdicts", ("claim", "verdict", "measured, 95% interval", "because"), rows)


def _apart(measurements: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """What is the same in every run, and what was timed, each with its own columns."""
    if "seconds" not in measurements:
        return measurements, None
    measured, timed = (measurements.query(f"seconds.{which}()") for which in ("isna", "notna"))
    # Whole numbers, which the other rows had made floats, are whole numbers again.
    return measured.dropna(axis="columns", how="all"), timed.dropna(axis="columns", how="all").convert_dtypes()


def _units(experiment: Experiment[C], config: C) -> Sequence[Unit]:
    units = list(experiment.units(config))
    names = [unit.name for unit in units]
    if len(set(names)) != len(names):
        raise RuntimeError(f"units of {experiment.name} must have different names, got {names}")
    return units
