"""Checkpoints: the same bits back, one to fall back on, and a line for whatever is in the way."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil
import tempfile

import jax
import jax.numpy as jnp
import pytest

from attn_jax.nn import Transformer
from attn_jax.training import checkpoints as module
from attn_jax.training import identity
from attn_jax.training.checkpoints import CheckpointError, Checkpoints
from attn_jax.training.files import RunError
from attn_jax.training.state import init_states
from tests.training import toy

RUN = {"text": "a", "batch_size": 3}


@functools.cache
def state_at(step, **options):
    """A state that says its step in every float."""
    state = toy.begin(toy.make_bigrams, toy.OPTIMIZER, **options)
    moved = jax.tree.map(lambda x: x + step, (state.params, state.optimizer_state))
    return dataclasses.replace(state, params=moved[0], optimizer_state=moved[1], step=state.step + step)


def saved(directory, *steps, **options):
    checkpoints = Checkpoints(directory / "checkpoints", run=RUN, **options)
    for step in steps:
        checkpoints.save(step, state_at(step))
    return checkpoints


def test_every_bit_comes_back(tmp_path):
    for make, options in ((toy.begin, {"seed": 3}), (init_states, {"seeds": [0, 1], "learning_rates": [0.1, 0.2]})):
        state = make(toy.make_transformer, toy.OPTIMIZER, **options)
        params = jax.tree.map(lambda x: x.at[..., 0].set(jnp.float32(1) / 3).at[..., 1].set(-0.0), state.params)
        state = dataclasses.replace(state, params=params, step=state.step + 7)
        checkpoints = Checkpoints(tmp_path / make.__name__, run=RUN)
        assert checkpoints.restore(state) is None
        checkpoints.save(7, state)
        restored = checkpoints.restore(make(toy.make_transformer, toy.OPTIMIZER, **options))
        assert toy.bits(restored.state) == toy.bits(state)
        assert (restored.step, restored.notes) == (7, ())
        assert jax.tree.structure(restored.state) == jax.tree.structure(state)
        same = jax.tree.map(lambda a, b: (a.aval, a.committed) == (b.aval, b.committed), restored.state, state)
        assert all(jax.tree.leaves(same))  # or a resumed run would compile another program


def test_narrow_and_wide_dtypes_come_back(tmp_path):
    config = dataclasses.replace(toy.TRANSFORMER, param_dtype="bfloat16")
    state = toy.begin(functools.partial(Transformer, config))
    checkpoints = Checkpoints(tmp_path, run=RUN)
    checkpoints.save(0, state)
    assert toy.bits(checkpoints.restore(state).state) == toy.bits(state)


def test_the_newest_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 2, 10, 4, 6, keep=2)
    assert checkpoints.steps() == [6, 10]
    assert checkpoints.restore(state_at(0)).step == 10
    assert sorted(entry.name for entry in checkpoints.directory.iterdir()) == ["00000006", "00000010"]


def test_a_checkpoint_that_is_there_is_not_written_again(tmp_path):
    checkpoints = saved(tmp_path, 2)
    before = (checkpoints.path(2) / "manifest.json").stat().st_mtime_ns
    checkpoints.save(2, state_at(2))
    assert (checkpoints.path(2) / "manifest.json").stat().st_mtime_ns == before


FILES = sorted({"manifest.json", "state/_METADATA", "state/manifest.ocdbt", "state/d/*", "state/ocdbt.process_0/d/*"})


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["flipped", "cut short", "removed"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path, file, how):
    checkpoints = saved(tmp_path, 2, 4)
    (path, *_) = sorted(checkpoints.path(4).glob(file))
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    restored = checkpoints.restore(state_at(0))
    assert restored.step == 2
    assert toy.bits(restored.state) == toy.bits(state_at(2))
    name = path.relative_to(checkpoints.path(4))
    reason = "is missing" if how == "removed" else "is not what was written"
    expected = (f"the checkpoint of step 4 is damaged ({name} {reason})", "continuing from that of step 2")
    assert restored.notes == expected
    assert checkpoints.steps() == [2]
    checkpoints.save(4, state_at(4))
    assert checkpoints.restore(state_at(0)).step == 4


def test_a_manifest_that_is_no_json_or_no_mapping_is_damage(tmp_path):
    checkpoints = saved(tmp_path, 2, 4, 6)
    (checkpoints.path(6) / "manifest.json").write_text("[1, 2]")
    (checkpoints.path(4) / "manifest.json").write_text('{"seal": "", "step": 4')
    assert checkpoints.restore(state_at(0)).step == 2


def test_a_directory_in_place_of_a_file_is_damage(tmp_path):
    checkpoints = saved(tmp_path, 2, 4)
    (checkpoints.path(4) / "manifest.json").unlink()
    (checkpoints.path(4) / "manifest.json").mkdir()
    assert "Is a directory" in checkpoints.restore(state_at(0)).notes[0]


def test_when_all_are_damaged_nothing_is_begun_anew(tmp_path):
    checkpoints = saved(tmp_path, 2, 4)
    for step in (2, 4):
        (checkpoints.path(step) / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"nothing to continue from .* step 4 is damaged .* step 2 is damaged"
    ) as error:
        checkpoints.restore(state_at(0))
    assert "\n" not in str(error.value)
    assert checkpoints.steps() == [2, 4]


class Killed(BaseException):
    """What no handler of errors catches, as a kill is."""


@pytest.mark.parametrize(
    "moment", ["in orbax", "before the manifest", "before the rename", "after it", "in the removal"]
)
def test_a_kill_while_writing_leaves_the_checkpoints_that_were_there(tmp_path, monkeypatch, moment):
    checkpoints = saved(tmp_path, 2, 4, keep=2)

    def killed(*_, **__):
        raise Killed

    def half_written(self, directory, *_, **__):
        directory.mkdir()
        (directory / "d").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "in orbax":
            patch.setattr(module.ocp.PyTreeCheckpointer, "save", half_written)
        elif moment == "before the manifest":
            patch.setattr(module, "write_atomic", killed)
        elif moment == "in the removal":
            patch.setattr(module.shutil, "rmtree", killed)
        else:
            replace, after = os.replace, moment == "after it"

            def rename(source, target):
                if pathlib.Path(source).suffix == ".tmp" and pathlib.Path(target).parent == checkpoints.directory:
                    if after:
                        replace(source, target)
                    raise Killed
                replace(source, target)

            patch.setattr(module.os, "replace", rename)
        with pytest.raises(Killed):
            checkpoints.save(6, state_at(6))
    expected = {"after it": 6, "in the removal": 6}.get(moment, 4)
    again = Checkpoints(checkpoints.directory, run=RUN, keep=2)
    restored = again.restore(state_at(0))
    assert (restored.step, restored.notes) == (expected, ())
    assert toy.bits(restored.state) == toy.bits(state_at(expected))
    again.save(6, state_at(6))
    again.save(8, state_at(8))
    assert sorted(entry.name for entry in again.directory.iterdir()) == ["00000006", "00000008"]


def refusal(checkpoints, state):
    with pytest.raises(CheckpointError) as error:
        checkpoints.restore(state)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"the checkpoint {checkpoints.path(checkpoints.steps()[-1])} is of another ")


ADVICE = "; continue as it was begun, or use another directory"


def test_one_step_is_read_and_nothing_is_changed(tmp_path):
    saved(tmp_path, 1, 2)
    reader = Checkpoints(tmp_path / "checkpoints", run=None)  # of whatever run
    assert toy.bits(reader.read(1, state_at(0))) == toy.bits(state_at(1))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 3 in .*, only of 1, 2"):
        reader.read(3, state_at(0))
    with pytest.raises(CheckpointError, match="of another run"):
        Checkpoints(tmp_path / "checkpoints", run={**RUN, "text": "b"}).read(2, state_at(0))
    (reader.path(2) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot be read: manifest\.json is not what was written"):
        reader.read(2, state_at(0))
    assert reader.steps() == [1, 2]  # what is damaged stays, too


def test_another_library_version_is_refused(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2)
    there, here = identity.versions(), {**identity.versions(), "jax": "99.0"}
    monkeypatch.setattr(identity, "versions", lambda: here)
    message = refusal(checkpoints, state_at(0))
    assert message == f"library version: jax is {there['jax']} there, 99.0 here{ADVICE}"
    assert checkpoints.steps() == [2]


def test_another_architecture_is_refused(tmp_path):
    state = toy.begin(toy.make_transformer)
    checkpoints = Checkpoints(tmp_path, run=RUN)
    checkpoints.save(2, state)
    deeper = dataclasses.replace(toy.TRANSFORMER, num_layers=3, num_heads=4)
    message = refusal(checkpoints, toy.begin(functools.partial(Transformer, deeper)))
    assert message.startswith("architecture: num_layers is 2 there, 3 here, num_heads is 2 there, 4 here;")
    # Nothing in the shapes tells these two apart.
    scaled = dataclasses.replace(toy.TRANSFORMER, scale_rule="none")
    message = refusal(checkpoints, toy.begin(functools.partial(Transformer, scaled)))
    assert message == f"architecture: scale_rule is 'inverse_sqrt' there, 'none' here{ADVICE}"
    message = refusal(checkpoints, state_at(0))
    assert "model is attn_jax.nn.transformer.Transformer there, tests.training.toy.Bigrams here" in message


def test_other_shapes_are_refused(tmp_path):
    checkpoints = saved(tmp_path, 2)
    state = dataclasses.replace(state_at(0), params={"table": jnp.zeros((5, 6))})
    assert (
        refusal(checkpoints, state) == f"architecture: params.table is float32[5, 5] there, float32[5, 6] here{ADVICE}"
    )


def test_another_run_is_refused(tmp_path):
    saved(tmp_path, 2)
    other = Checkpoints(tmp_path / "checkpoints", run={"text": "b", "batch_size": 3, "new": [1, 2]})
    assert refusal(other, state_at(0)) == f"run: text is a there, b here, new is absent there, [1, 2] here{ADVICE}"


def test_another_seed_or_learning_rate_is_refused(tmp_path):
    checkpoints = saved(tmp_path, 2)
    assert refusal(checkpoints, state_at(0, seed=1)) == f"seed{ADVICE}"
    assert refusal(checkpoints, state_at(0, learning_rate=0.5)) == f"learning rate{ADVICE}"


def test_another_device_is_said(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2)
    here = identity.device()
    monkeypatch.setattr(identity, "device", lambda: "4 abacus")
    (note,) = checkpoints.restore(state_at(0)).notes
    assert note == f"the checkpoint was written on {here}, this is 4 abacus: bits may differ"


def test_names_are_the_same_in_every_process():
    function = functools.partial(toy.bits, 3, tree=jnp.arange(3))
    assert identity.describe(function).startswith("partial(tests.training.toy.bits, 3, tree=int32[3] ")
    assert " at 0x" not in identity.describe(toy.TASK) + identity.describe(toy.main) + identity.describe(
        toy.TRANSFORMER
    )


@contextlib.contextmanager
def no_room(size):
    """No file can grow beyond `size` bytes: the system answers as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 300])
def test_a_disk_without_room_is_one_line_and_leaves_the_last_one(tmp_path, capfd, size):
    checkpoints = saved(tmp_path, 2, 4)
    with no_room(size), pytest.raises(CheckpointError) as error:
        checkpoints.save(6, state_at(6))
    where = checkpoints.directory
    expected = f"the checkpoint of step 6 cannot be written to {where}: File too large; that of step 4 is intact"
    assert str(error.value) == expected
    assert capfd.readouterr().err == ""  # nothing of what orbax logs
    assert sorted(entry.name for entry in where.iterdir()) == ["00000002", "00000004"]
    assert toy.bits(checkpoints.restore(state_at(0)).state) == toy.bits(state_at(4))
    checkpoints.save(6, state_at(6))
    assert checkpoints.restore(state_at(0)).step == 6


@pytest.fixture
def shared_directory():
    """One that other users can reach, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        path.chmod(0o755)
        yield path


@contextlib.contextmanager
def read_only(*directories):
    """Directories that this process cannot write to; root, who can, becomes nobody for the while."""
    for directory in directories:
        directory.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for directory in directories:
            directory.chmod(0o755)


def test_a_read_only_directory_is_one_line_and_leaves_the_last_one(shared_directory):
    checkpoints = saved(shared_directory, 2, 4)
    with read_only(checkpoints.directory), pytest.raises(CheckpointError) as error:
        checkpoints.save(6, state_at(6))
    where = checkpoints.directory
    expected = f"the checkpoint of step 6 cannot be written to {where}: Permission denied; that of step 4 is intact"
    assert str(error.value) == expected
    assert toy.bits(checkpoints.restore(state_at(0)).state) == toy.bits(state_at(4))


def test_the_first_checkpoint_in_a_read_only_directory(shared_directory):
    with read_only(shared_directory), pytest.raises(CheckpointError, match=r"Permission denied$"):
        saved(shared_directory, 2)


def test_a_checkpoint_that_must_not_be_read_is_not_called_damaged(shared_directory):
    checkpoints = saved(shared_directory, 2, 4)
    manifest = checkpoints.path(4) / "manifest.json"
    manifest.chmod(0)
    with read_only(), pytest.raises(RunError, match=r"cannot be read: .*Permission denied"):
        checkpoints.restore(state_at(0))
    manifest.chmod(0o644)
    assert checkpoints.restore(state_at(0)).step == 4


def test_files_of_others_are_left_alone(tmp_path):
    checkpoints = saved(tmp_path, 2)
    for name in ("notes.txt", ".hidden.tmp"):
        (checkpoints.directory / name).write_text("mine")
    shutil.copytree(checkpoints.path(2), checkpoints.directory / "best")
    for step in (4, 6, 8):
        checkpoints.save(step, state_at(step))
    assert {"notes.txt", ".hidden.tmp", "best"} <= {entry.name for entry in checkpoints.directory.iterdir()}


def test_the_manifest_is_plain_json(tmp_path):
    manifest = json.loads((saved(tmp_path, 2).path(2) / "manifest.json").read_text())
    assert manifest["step"] == 2
    assert manifest["run"] == RUN
    assert manifest["arrays"]["params.table"] == "float32[5, 5]"


def test_one_checkpoint_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 2, got 1"):
        Checkpoints(tmp_path, run=RUN, keep=1)
