"""Checkpoints that are whole or not there: a kill at any moment, also while one is written, loses none that was kept.

    checkpoints/00000300/          one rename made it visible
        state/                     every array of the state, written by orbax
        manifest.json              step, versions, what is trained, every array's shape, and the digest of every file

What is read is first compared with the digests: a file that is damaged, short or missing makes a checkpoint damaged,
and the one before is used. A checkpoint that is whole but of something else is refused, never adapted.

Of several processes the first alone touches the files; the others send their parts of the arrays, and are told what
was read. So a run may go on with other devices, or with other processes, than it was begun with.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from attn_jax import checks
from attn_jax.parallel import distributed
from attn_jax.training import identity
from attn_jax.training.files import RunError, refusal, write_atomic
from attn_jax.training.state import TrainState

NAME = re.compile(r"\d{8,}")
MANIFEST = "manifest.json"
# What a manifest's parts are called where one differs.
PARTS = {
    "versions": "library version",
    "architecture": "architecture",
    "run": "run",
    "arrays": "architecture",
}


# Arrays that a run never changes.
OWN = {"key": "seed", "learning_rate": "learning rate"}


class CheckpointError(RunError):
    """A checkpoint cannot be written, or is not of this run.

    >>> import functools, pathlib
    >>> from flax import nnx
    >>> from attn_jax.training import CheckpointError, Checkpoints, OptimizerConfig, init_state
    >>> state = init_state(functools.partial(nnx.Linear, 2, 2), OptimizerConfig(), learning_rate=0.1)
    >>> try:
    ...     Checkpoints(pathlib.Path("nowhere"), run=None).read(5, state)
    ... except CheckpointError as error:
    ...     print(error)
    there is no checkpoint of step 5 in nowhere, nor of any other
    """


class _Damaged(Exception):
    """A checkpoint does not hold what its manifest says."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state that was read: `step` calls of the optimizer old; `notes` say what the user should know."""

    state: TrainState
    step: int
    notes: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: theirs alone.
        run: what is trained and how, as JSON holds it; a checkpoint of anything else is refused. The architecture, the
            shapes and the versions of the libraries are compared without being named here. None: of whatever run, for
            who reads and does not continue it.
        keep: how many are kept; at least 2, so that there is one to fall back on.

    >>> import functools, pathlib, tempfile
    >>> from flax import nnx
    >>> from attn_jax.training import Checkpoints, OptimizerConfig, init_state
    >>> state = init_state(functools.partial(nnx.Linear, 2, 2), OptimizerConfig(), learning_rate=0.1)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoints = Checkpoints(pathlib.Path(directory), run={"task": "a toy"})
    ...     checkpoints.save(10, state)
    ...     restored = checkpoints.restore(state)
    >>> restored.step, bool((restored.state.params["kernel"] == state.params["kernel"]).all())
    (10, True)
    """

    def __init__(self, directory: pathlib.Path, *, run: Mapping[str, Any] | None, keep: int = 3) -> None:
        self.directory, self.keep = directory, checks.positive_int("keep", keep, least=2)
        self.run = json.loads(json.dumps(run))

    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, oldest first."""
        try:
            return sorted(int(entry.name) for entry in self.directory.iterdir() if NAME.fullmatch(entry.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise refusal("the checkpoints cannot be read:", self.directory, error) from error

    def save(self, step: int, state: TrainState) -> None:
        """Writes a checkpoint, then removes those that are too many. One of the same step is kept as it is.

        Raises:
            CheckpointError: in one line, if it cannot be written; those before are as they were.
        """
        of, arrays = self._identity(state), distributed.values(_by_path(state)[0])
        distributed.in_first(lambda: self._write(step, of, arrays))

    def _write(self, step: int, of: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        path = self.path(step)
        try:
            self._sweep()
            if path.exists():
                return
            unfinished = self.directory / f".{path.name}.tmp"
            unfinished.mkdir(parents=True)
            _find_room(unfinished / "reserved", arrays)
            with _orbax_silent():
                _orbax().save(unfinished.absolute() / "state", arrays)
            files = {str(file.relative_to(unfinished)): _file_digest(file) for file in _files(unfinished)}
            manifest = {"step": step, **of, "device": identity.device(), "files": files}
            sealed = {**manifest, "seal": _seal(manifest)}
            write_atomic(unfinished / MANIFEST, json.dumps(sealed, indent=1).encode())
            os.replace(unfinished, path)
            _sync(self.directory)
        except Exception as error:  # orbax raises whatever its back ends do
            with contextlib.suppress(OSError):
                self._sweep()
            last = f"; that of step {steps[-1]} is intact" if (steps := self.steps()) else ""
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.directory}: {_reason(error)}{last}"
            ) from error
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def restore(self, state: TrainState) -> Restored | None:
        """The newest checkpoint that is whole, in place of `state`, or None where there is none.

        Damaged ones are removed, and `notes` say so.

        Args:
            state: of the same run before its first step: what a checkpoint is compared with.

        Raises:
            CheckpointError: in one line, if it is of another run, architecture or version, or all are damaged.
        """
        mine, own = self._identity(state), _own(state)
        found = distributed.in_first(lambda: self._newest(mine, own))
        if found is None:
            return None
        step, arrays, notes = found
        return Restored(_from_arrays(arrays, state), step, notes)

    def _newest(
        self, mine: Mapping[str, Any], own: Mapping[str, np.ndarray]
    ) -> tuple[int, dict[str, np.ndarray], tuple[str, ...]] | None:
        notes, steps = [], self.steps()
        for step in reversed(steps):
            try:
                manifest = self._verify(step)
            except PermissionError as error:
                raise refusal("the checkpoint cannot be read:", self.path(step), error) from error
            except (_Damaged, OSError) as error:
                notes.append(f"the checkpoint of step {step} is damaged ({_reason(error)})")
                continue
            arrays = self._load(step, manifest, mine, own)
            if notes:
                for damaged in steps[steps.index(step) + 1 :]:
                    self._remove(damaged)
                notes.append(f"continuing from that of step {step}")
            if manifest["device"] != identity.device():
                notes.append(
                    f"the checkpoint was written on {manifest['device']}, this is {identity.device()}: bits may differ"
                )
            return step, arrays, tuple(notes)
        if notes:
            raise CheckpointError(
                f"nothing to continue from in {self.directory}: {'; '.join(notes)}; remove the directory to start anew"
            )
        return None

    def read(self, step: int, state: TrainState) -> TrainState:
        """The state of one step, in place of `state`; nothing is changed on disk.

        Args:
            step: of the checkpoint.
            state: of the same run before its first step, as for `restore`.

        Raises:
            CheckpointError: in one line, if it is not there, damaged, or of something else.
        """
        steps = self.steps()
        if step not in steps:
            there = f"only of {', '.join(map(str, steps))}" if steps else "nor of any other"
            raise CheckpointError(f"there is no checkpoint of step {step} in {self.directory}, {there}")
        try:
            manifest = self._verify(step)
        except (_Damaged, OSError) as error:
            raise CheckpointError(f"the checkpoint {self.path(step)} cannot be read: {_reason(error)}") from error
        return _from_arrays(self._load(step, manifest, self._identity(state), _own(state)), state)

    def path(self, step: int) -> pathlib.Path:
        """Where the checkpoint of a step is."""
        return self.directory / f"{step:08d}"

    def _load(
        self, step: int, manifest: Mapping[str, Any], mine: Mapping[str, Any], own: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """What a checkpoint that was verified holds, if it is of this run; else the error names what differs first."""
        for part, now in mine.items():
            if part == "run" and now is None:
                continue
            if difference := identity.difference(manifest.get(part), now):
                raise self._foreign(step, PARTS[part], f": {difference}")
        with _orbax_silent():
            arrays = _orbax().restore(self.path(step).absolute() / "state")
        for name, value in own.items():
            if not np.array_equal(arrays[name], value):
                raise self._foreign(step, OWN[name])
        return arrays

    def _identity(self, state: TrainState) -> dict[str, Any]:
        arrays = {name: f"{x.dtype}{list(x.shape)}" for name, x in _by_path(state)[0].items()}
        return {**identity.identity(state), "run": self.run, "arrays": arrays}

    def _foreign(self, step: int, what: str, difference: str = "") -> CheckpointError:
        advice = "continue as it was begun, or use another directory"
        return CheckpointError(f"the checkpoint {self.path(step)} is of another {what}{difference}; {advice}")

    def _verify(self, step: int) -> dict[str, Any]:
        """The manifest, if every file is what it says."""
        path = self.path(step)
        try:
            manifest = _read_manifest(path / MANIFEST)
        except FileNotFoundError:
            raise _Damaged(f"{MANIFEST} is missing") from None
        for name, digest in manifest["files"].items():
            try:
                found = _file_digest(path / name)
            except FileNotFoundError:
                raise _Damaged(f"{name} is missing") from None
            if found != digest:
                raise _Damaged(f"{name} is not what was written")
        return manifest

    def _remove(self, step: int) -> None:
        """Out of sight by one rename first: half a checkpoint is never seen."""
        doomed = self.directory / f".{step:08d}.tmp"
        with contextlib.suppress(OSError):  # what cannot be removed is swept later
            os.replace(self.path(step), doomed)
            shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Removes what a killed process left unfinished."""
        for entry in self.directory.glob(".*.tmp"):
            if NAME.fullmatch(entry.name.removeprefix(".").removesuffix(".tmp")):
                shutil.rmtree(entry)


def _by_path(state: TrainState) -> tuple[dict[str, jax.Array], Any]:
    """Every array of the state by the path to it, the key as its words; and the structure that they fill."""
    plain = dataclasses.replace(state, key=jax.random.key_data(state.key))
    leaves, structure = jax.tree_util.tree_flatten_with_path(plain)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}, structure


def _own(state: TrainState) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in _by_path(state)[0].items() if name in OWN}


def _orbax() -> ocp.Checkpointer:
    """Of the first process alone: by itself orbax waits for all."""
    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0}, barrier_sync_key_prefix="first")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _from_arrays(arrays: Mapping[str, np.ndarray], state: TrainState) -> TrainState:
    """The state of those arrays, each where and how its counterpart in `state` is."""
    leaves, structure = _by_path(state)
    values = [
        # An array that is bound to no device stays so: it would compile anew, perhaps to another program.
        distributed.put(arrays[name], leaf.sharding) if leaf.committed else jnp.asarray(arrays[name])
        for name, leaf in leaves.items()
    ]
    restored = jax.tree.unflatten(structure, values)
    key = jax.random.wrap_key_data(restored.key, impl=jax.random.key_impl(state.key))
    return dataclasses.replace(restored, key=key)


def _find_room(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises OSError if the disk is too full for the arrays: the threads of orbax would say it in many lines."""
    size = sum(array.nbytes + 4096 for array in arrays.values()) + 65536
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    path.unlink()


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(entry for entry in directory.rglob("*") if entry.is_file())


def _file_digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """The digest of a manifest: what says that it is as it was written."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.pop("seal", None) != _seal(manifest):
        raise _Damaged(f"{path.name} is not what was written")
    return manifest


def _sync(directory: pathlib.Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: Exception) -> str:
    """Why in a few words: the system's, where its number stands in the message of a back end."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(found[1]))
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _orbax_silent() -> Iterator[None]:
    """Without the tracebacks that orbax logs from its threads: what goes wrong is raised, and said once."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
