"""The files of a run: written atomically, reused only by the same configuration, never mixed.

A file is written beside its place and moved there, so a reader sees all of it or none. While an experiment runs, each
unit of work leaves `parts/NAME.json`, stamped with the key of the run (experiment, configuration, inputs, versions,
device, source); a rerun takes the parts of its own key and no others.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import pathlib
import platform
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.command_line import CommandError

RESULTS = ("measurements.csv", "timings.csv", "figure.png", "claims.json", "summary.json", "report.html")
SPELLING = ("preset", "command")  # how the configuration was asked for, not what it is
RECORD = {  # fields of config.json, by which we know that an experiment wrote it
    **dict.fromkeys(("experiment", "question", "command", "preset", "source"), str),
    **dict.fromkeys(("flags", "inputs", "versions", "device"), dict),
    "seed": int,
}
TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9]+\.tmp")  # what `write_atomic` moves into place
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "pandas", "matplotlib")

Row = dict[str, Any]


class OutputError(CommandError):
    """The directory of the results cannot be used; the message says why in one line."""


def describe_machine() -> dict[str, Any]:
    """What the numbers may depend on besides the configuration: versions, device, our own source."""
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # both are JAX's answer to a platform that is not there
        asked = f" (JAX_PLATFORMS={os.environ['JAX_PLATFORMS']})" if os.environ.get("JAX_PLATFORMS") else ""
        raise CommandError(f"JAX finds no device{asked}: {str(error) or 'none answered'}") from error
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}
    where = {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}
    return {"versions": versions, "device": where, "source": _source_digest()}


def key_of(record: Mapping[str, Any]) -> str:
    """The key of a run: two runs may share parts when, and only when, their records agree in all but spelling."""
    decisive = {name: value for name, value in record.items() if name not in SPELLING}
    return hashlib.sha256(to_json(decisive).encode()).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes: an input of an experiment is known by what it holds, not by its name."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any) -> str:
    """Strict JSON: floats by repr, NaN and infinities as null, one line a field."""
    return json.dumps(_strict(plain(value)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """NumPy and JAX scalars as Python numbers, tuples as lists, throughout."""
    if isinstance(value, Mapping):
        return {str(name): plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, (np.generic, jax.Array, np.ndarray)):
        if np.ndim(value):
            raise TypeError(f"a measurement must be a scalar, got shape {np.shape(value)}")
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a measurement must be a number or a text, got {type(value).__name__}")


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Writes `data` beside `path` and moves it there: never half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from error


class Store:
    """The directory of one run. Use `open_store`, which refuses a directory that holds something else."""

    def __init__(self, directory: pathlib.Path, key: str):
        self.directory, self.key = directory, key

    def load_part(self, name: str) -> list[Row] | None:
        """The rows of a finished unit of this very run, or None."""
        part = _read_json(self._part(name))
        if not _is_part(part) or part["key"] != self.key or part["digest"] != _digest_of(part["rows"]):
            return None  # absent, or not what this run wrote: measure again
        return part["rows"]

    def save_part(self, name: str, rows: Sequence[Row]) -> None:
        """Stores the rows of a unit. NaN stays NaN here: these files are for ourselves."""
        part = {"key": self.key, "digest": _digest_of(rows), "rows": rows}
        write_atomic(self._part(name), json.dumps(part, indent=1).encode())

    def load_timings(self) -> dict[str, float]:
        """Seconds of each unit measured so far, as far as they can be read: no result depends on them."""
        try:
            table = pd.read_csv(self.directory / "timings.csv")
            table = table[table.drop(columns=["unit", "seconds"]).isna().all(axis="columns")]
            return dict(zip(table["unit"].astype(str), table["seconds"].astype(float), strict=True))
        except (OSError, ValueError, KeyError):
            return {}

    def save_timings(self, seconds: Mapping[str, float], timed: pd.DataFrame | None = None) -> None:
        """Writes timings.csv: each unit's seconds in a row that says no more, then the rows that were timed."""
        units = pd.DataFrame(list(seconds.items()), columns=["unit", "seconds"])
        self.write_table("timings.csv", units if timed is None or timed.empty else pd.concat([units, timed]))

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        write_atomic(self.directory / name, table.to_csv(index=False, lineterminator="\n").encode())

    def write_json(self, name: str, value: Any) -> None:
        write_atomic(self.directory / name, to_json(value).encode())

    def write_figure(self, name: str, figure: Figure) -> None:
        """A PNG without date or software version, so equal measurements give equal bytes."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():  # a letter that the font lacks is drawn as a box; the tables spell it
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            figure.savefig(buffer, format="png", metadata={"Software": None})
        write_atomic(self.directory / name, buffer.getvalue())

    def _part(self, name: str) -> pathlib.Path:
        return self.directory / "parts" / f"{name}.json"


@contextlib.contextmanager
def open_store(
    directory: str | os.PathLike[str], record: Mapping[str, Any], units: Collection[str]
) -> Iterator[tuple[Store, str | None]]:
    """The store of the run that `record` describes, and a line that says what it replaced, if anything.

    A directory that holds another experiment, or files under our names that no experiment wrote, is refused; results of
    the same experiment under another configuration are removed before anything new is written. `units` names the parts.
    """
    path = pathlib.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        try:
            _lock(path, handle)
            replaced = _make_room(path, record, units)
        except OSError as error:
            raise unwritable(path, error) from error
        store = Store(path, key_of(record))
        store.write_json("config.json", record)
        yield store, replaced
    finally:
        os.close(handle)  # and with it the lock


def read_record(directory: pathlib.Path) -> dict[str, Any] | None:
    """The config.json of a run, or None where there is none. Raises OutputError if it is no run's."""
    path = directory / "config.json"
    if not path.exists():
        return None
    record = _read_json(path)
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in RECORD.items()):
        raise foreign(directory, "config.json")
    return record


def foreign(directory: pathlib.Path, name: str) -> OutputError:
    """The refusal to write where `name` is somebody else's."""
    return OutputError(f"--out={directory} holds a {name} that no experiment wrote; choose another directory")


def unwritable(path: pathlib.Path, error: OSError) -> OutputError:
    """The refusal that the system gave."""
    return OutputError(f"--out: {path} cannot be written: {error.strerror or error}")


def _make_room(path: pathlib.Path, record: Mapping[str, Any], units: Collection[str]) -> str | None:
    """Removes what another configuration of the same experiment left, and says so; whatever is not ours stays."""
    old, new = read_record(path), json.loads(to_json(record))
    present = [path / name for name in RESULTS if (path / name).exists()]
    for result in present:
        if old is None or not result.is_file():
            raise foreign(path, result.name)
    if old is not None and old["experiment"] != new["experiment"]:
        raise OutputError(f"--out={path} holds a run of {old['experiment']}; choose another directory")
    parts = _stored_parts(path, units, ours=old is not None)
    if old is None:
        return None
    for folder, names in ((path, ("config.json", *RESULTS)), (path / "parts", [f"{unit}.json" for unit in units])):
        for entry in folder.glob(".*.tmp"):  # of a run that was killed while writing
            found = TEMPORARY.fullmatch(entry.name)
            if found and found["name"] in names:
                entry.unlink(missing_ok=True)
    if key_of(old) == key_of(new):
        return None
    for stale in [*present, *parts]:
        stale.unlink()
    was, now = old["flags"], new["flags"]
    changed = [name for name in now if was.get(name) != now[name]]
    changed += [name for name in new if name not in ("flags", *SPELLING) and old.get(name) != new[name]]
    return f"replaced the results of another configuration in {path} (changed: {', '.join(changed)})"


def _stored_parts(path: pathlib.Path, units: Collection[str], *, ours: bool) -> list[pathlib.Path]:
    """The parts of any run. In a directory of ours a unit's own file may be damaged; all else must be a part."""
    folder, parts = path / "parts", []
    if folder.exists() and not folder.is_dir():
        raise foreign(path, "parts")
    for entry in sorted(folder.glob("*")):
        if entry.is_file() and _is_part(_read_json(entry)):
            parts.append(entry)
        elif not (ours and entry.is_file() and (TEMPORARY.fullmatch(entry.name) or _is_unit(entry, units))):
            raise foreign(path, f"parts/{entry.name}")
    return parts


def _is_unit(entry: pathlib.Path, units: Collection[str]) -> bool:
    return entry.suffix == ".json" and entry.stem in units


def _is_part(part: Any) -> bool:
    """Whether this is what `save_part` writes, for whatever run."""
    return isinstance(part, dict) and set(part) == {"key", "digest", "rows"} and isinstance(part["rows"], list)


def _digest_of(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _read_json(path: pathlib.Path) -> Any:
    """What a file holds; None if it is absent, no file, or no JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror or error}") from error


def _lock(path: pathlib.Path, handle: int) -> None:
    """Holds the directory for this process; the system lets go of it however the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"--out={path} is in use by another run") from None


def _source_digest() -> str:
    """Changes with any module of attn_jax or of the experiments: parts made by other code are not ours."""
    root = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for module in sorted([*root.glob("attn_jax/**/*.py"), *root.glob("experiments/**/*.py")]):
        digest.update(str(module.relative_to(root)).encode() + b"\0" + module.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_strict(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
