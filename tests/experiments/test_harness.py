"""What a run leaves: nothing for wrong flags, whole files only, the same bytes however often it was interrupted."""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments import artifacts, harness
from experiments.artifacts import OutputError
from tests.experiments.toy import ToyConfig, make

ROOT = pathlib.Path(__file__).parents[2]
ARTIFACTS = {
    "config.json",
    "measurements.csv",
    "timings.csv",
    "figure.png",
    "claims.json",
    "summary.json",
    "report.html",
    "parts",
}


def run_main(experiment, *flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        harness.main(experiment, ["toy", *flags])
    return ended.value.code


def contents(directory: pathlib.Path, *, timings: bool = False) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files if timings or p.name != "timings.csv"}


def test_run_returns_a_result_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = harness.run(make(), ToyConfig())
    assert list(tmp_path.iterdir()) == []
    assert list(result.measurements.columns) == ["unit", "size", "seed", "label", "value"]
    assert len(result.measurements) == 9
    assert [outcome.verdict for outcome in result.claims] == ["confirmed"]
    assert result.claims[0].scope == "sizes (1, 2, 3)"
    assert list(result.seconds) == ["size_1", "size_2", "size_3"]
    assert len(result.figure().axes) == 1


def test_main_leaves_every_artifact_and_says_where(tmp_path, capsys):
    out = tmp_path / "deep" / "toy"
    assert run_main(make(), f"--out={out}", "--seed=3") == 0
    assert {path.name for path in out.iterdir()} == ARTIFACTS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[1/3] toy: size_1, 0.")
    assert lines[-1] == f"wrote {out}"
    assert any("T1" in line and "confirmed" in line for line in lines)

    config = json.loads((out / "config.json").read_text())
    assert config["experiment"] == "toy"
    assert config["command"] == "python -m experiments.toy --preset=quick --seed=3"
    assert (config["seed"], config["flags"]["sizes"]) == (3, [1, 2, 3])
    assert config["device"]["platform"] == "cpu"
    assert {"jax", "numpy", "python"} <= set(config["versions"])

    (claim,) = json.loads((out / "claims.json").read_text())
    assert {"claim", "statement", "measured", "value", "interval", "verdict", "rule", "scope"} <= set(claim)
    assert claim["interval"][0] < claim["value"] < claim["interval"][1]
    assert list(pd.read_csv(out / "timings.csv")["unit"]) == ["size_1", "size_2", "size_3"]


def test_csv_holds_every_bit_of_a_float_and_every_letter_of_a_text(tmp_path):
    run_main(make(), f"--out={tmp_path / 'o'}")
    table = pd.read_csv(tmp_path / "o" / "measurements.csv")
    expected = harness.run(make(), ToyConfig()).measurements
    np.testing.assert_array_equal(table["value"].to_numpy(), expected["value"].to_numpy())
    assert set(table["label"]) == {'ü, "q"'}


@pytest.mark.parametrize(
    "flags", [["--sizes=1,x"], ["--factor=nan"], ["--unknown=1"], ["stray"], ["--preset=huge"], ["--kind=caf\udce9"]]
)
def test_wrong_flags_end_with_one_line_and_write_nothing(flags, tmp_path, capsys):
    assert run_main(make(), f"--out={tmp_path / 'o'}", *flags) == 2
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("error: ")
    assert flags[0].strip("-").split("=")[0] in printed.err


def test_what_is_timed_is_kept_apart_from_what_is_the_same_in_every_run(tmp_path):
    def timed(measured=None):
        experiment, clock = make(measured), iter(np.random.default_rng().random(100))
        units = experiment.units

        def with_timings(config):
            def measure(unit):
                rows = unit.measure()
                return [*rows, *({"size": 1, "seed": row["seed"], "side": "a", "seconds": next(clock)} for row in rows)]

            return [harness.Unit(unit.name, lambda unit=unit: measure(unit)) for unit in units(config)]

        object.__setattr__(experiment, "units", with_timings)
        object.__setattr__(
            experiment, "figure", lambda config, table: make().figure(config, table.dropna(subset="value"))
        )
        return experiment

    for name in "ab":
        run_main(timed(), f"--out={tmp_path / name}")
    run_main(make(), f"--out={tmp_path / 'plain'}")
    plain = (tmp_path / "plain" / "measurements.csv").read_bytes()
    assert [(tmp_path / name / "measurements.csv").read_bytes() for name in "ab"] == [plain, plain]
    table = pd.read_csv(tmp_path / "a" / "timings.csv")
    assert list(table.columns) == ["unit", "seconds", "size", "seed", "side"]
    assert list(table["side"].isna()) == [True] * 3 + [False] * 9
    before, measured = contents(tmp_path / "a", timings=True), []
    run_main(timed(measured), f"--out={tmp_path / 'a'}")
    assert measured == []
    assert contents(tmp_path / "a", timings=True) == before


def test_wrong_input_files_end_with_one_line_and_write_nothing(tmp_path, capsys):
    def digests(config):
        return {"text": artifacts.file_digest(tmp_path / "absent.txt")}

    experiment = make()
    object.__setattr__(experiment, "inputs", digests)
    assert run_main(experiment, f"--out={tmp_path / 'o'}") == 2
    assert list(tmp_path.iterdir()) == []
    assert "absent.txt" in capsys.readouterr().err


def test_an_output_named_in_bytes_that_are_no_text_is_a_name_like_any(tmp_path):
    assert run_main(make(), f"--out={tmp_path}/caf\udce9") == 0
    assert os.listdir(os.fsencode(tmp_path)) == [b"caf\xe9"]


def test_help_measures_and_writes_nothing(tmp_path, capsys):
    measured = []
    assert run_main(make(measured), f"--out={tmp_path / 'o'}", "--help") == 0
    assert measured == []
    assert list(tmp_path.iterdir()) == []
    assert "--factor" in capsys.readouterr().out


def test_two_directories_hold_the_same_bytes(tmp_path):
    for name in "ab":
        run_main(make(), f"--out={tmp_path / name}")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert b"Software" not in (tmp_path / "a" / "figure.png").read_bytes()


def test_an_interrupted_run_continues_and_ends_with_the_same_bytes(tmp_path, capsys):
    run_main(make(), f"--out={tmp_path / 'whole'}")
    cut, measured = tmp_path / "cut", []
    assert run_main(make(measured, interrupt="size_2"), f"--out={cut}") == 130
    assert not (cut / "claims.json").exists()
    assert measured == ["size_1"]
    assert run_main(make(measured), f"--out={cut}") == 0
    assert measured == ["size_1", "size_2", "size_3"]
    assert contents(cut) == contents(tmp_path / "whole")
    assert list(pd.read_csv(cut / "timings.csv")["unit"]) == ["size_1", "size_2", "size_3"]
    assert "size_1, kept from before" in capsys.readouterr().out


def test_a_finished_run_is_not_measured_again(tmp_path):
    measured = []
    for _ in range(2):
        run_main(make(measured), f"--out={tmp_path / 'o'}")
    assert measured == ["size_1", "size_2", "size_3"]


def test_parts_of_another_configuration_are_never_reused(tmp_path, capsys):
    out, measured = tmp_path / "o", []
    run_main(make(), f"--out={out}")
    run_main(make(measured), f"--out={out}", "--factor=2")
    assert measured == ["size_1", "size_2", "size_3"]
    assert "replaced the results of another configuration" in capsys.readouterr().out
    run_main(make(), f"--out={tmp_path / 'fresh'}", "--factor=2")
    assert contents(out) == contents(tmp_path / "fresh")


def test_results_of_another_configuration_are_gone_before_the_new_ones_are_there(tmp_path):
    out = tmp_path / "o"
    run_main(make(), f"--out={out}")
    assert run_main(make(interrupt="size_2"), f"--out={out}", "--factor=2") == 130
    assert {path.name for path in out.iterdir()} == {"config.json", "timings.csv", "parts"}
    assert [path.name for path in (out / "parts").iterdir()] == ["size_1.json"]


def test_changed_inputs_are_another_configuration(tmp_path):
    measured = []
    for digest in ("one", "two", "two"):
        experiment = make(measured)
        object.__setattr__(experiment, "inputs", lambda config, digest=digest: {"text": digest})
        run_main(experiment, f"--out={tmp_path / 'o'}")
    assert measured == ["size_1", "size_2", "size_3"] * 2


def test_the_same_configuration_under_another_preset_is_the_same_work(tmp_path):
    measured = []
    run_main(make(measured), f"--out={tmp_path / 'o'}", "--sizes=1,2")
    run_main(make(measured), f"--out={tmp_path / 'o'}", "--preset=smoke")
    assert measured == ["size_1", "size_2"]
    assert json.loads((tmp_path / "o" / "config.json").read_text())["preset"] == "smoke"


@pytest.mark.parametrize(
    "rows",
    [None, "absent", [], {}, "text", 7, [1], [{}], [{"size": 9}], [{"size": 1, "seed": 0, "label": "", "value": 9}]],
)
def test_a_part_whose_rows_are_not_what_was_stored_is_measured_again(rows, tmp_path):
    out, measured = tmp_path / "o", []
    run_main(make(), f"--out={out}")
    before = contents(out)
    part = json.loads((out / "parts" / "size_2.json").read_text())
    kept = {name: value for name, value in part.items() if name != "rows"}
    (out / "parts" / "size_2.json").write_text(json.dumps(kept if rows == "absent" else {**part, "rows": rows}))
    assert run_main(make(measured), f"--out={out}") == 0
    assert measured == ["size_2"]
    assert contents(out) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "\0", '{"key": "other", "rows": []}', '{"rows": [{"size": 9}]}']
)
def test_a_part_that_is_not_ours_is_measured_again(text, tmp_path):
    out, measured = tmp_path / "o", []
    run_main(make(), f"--out={out}")
    before = contents(out)
    (out / "parts" / "size_2.json").write_text(text)
    assert run_main(make(measured), f"--out={out}") == 0
    assert measured == ["size_2"]
    assert contents(out) == before


@pytest.mark.parametrize("text", ["", "\n", "a,b\n1,2\n", "unit,seconds\nsize_1,soon\n", "unit\n", '"', "\0\xff"])
def test_timings_that_cannot_be_read_are_done_without(text, tmp_path):
    out = tmp_path / "o"
    run_main(make(), f"--out={out}")
    (out / "timings.csv").write_bytes(text.encode("latin-1"))
    assert run_main(make(), f"--out={out}") == 0
    assert list(pd.read_csv(out / "timings.csv")["unit"]) == ["size_1", "size_2", "size_3"]


def test_a_directory_of_another_experiment_is_refused_untouched(tmp_path, capsys):
    out = tmp_path / "o"
    run_main(make(), f"--out={out}")
    before = contents(out, timings=True)
    assert run_main(make(name="other"), f"--out={out}") == 2
    assert "holds a run of toy" in capsys.readouterr().err
    assert contents(out, timings=True) == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", '{"model_type": "llama"}'),
        ("config.json", '{"experiment": "toy"}'),
        ("config.json", "[" * 100_000),
        ("config.json", ""),
        ("measurements.csv", "a,b\n"),
        ("parts/notes.json", '{"mine": 1}'),
        ("parts/notes.json", '{"key": "mine", "rows": []}'),
        ("parts/size_1.json", '{"mine": 1}'),
        ("parts/.letter.tmp", "draft"),
    ],
)
def test_files_that_no_experiment_wrote_are_refused_untouched(name, text, tmp_path, capsys):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert run_main(make(), f"--out={tmp_path}") == 2
    assert f"holds a {name} that no experiment wrote" in capsys.readouterr().err
    assert contents(tmp_path) == {name: text.encode()}


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert run_main(make(), f"--out={tmp_path}") == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("flags", [[], ["--factor=2"]])
@pytest.mark.parametrize("name", ["parts/notes.json", "parts/notes", "parts/.notes", "parts/deep/size_1.json"])
def test_among_our_parts_nothing_foreign_is_touched(name, flags, tmp_path, capsys):
    run_main(make(), f"--out={tmp_path}")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"mine": 1}')
    before = contents(tmp_path, timings=True)
    assert run_main(make(), f"--out={tmp_path}", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"holds a {'/'.join(name.split('/')[:2])} that no experiment wrote" in line
    assert contents(tmp_path, timings=True) == before


FOREIGN = (".letter.tmp", ".figure.png.tmp", ".figure.png.12x.tmp", ".notes.json.12.tmp", "figure.png.12.tmp")


def test_temporary_files_that_are_not_ours_are_left_alone(tmp_path):
    for name in (*FOREIGN, ".figure.png.12.tmp"):  # before the first run not even the last is ours
        (tmp_path / name).write_text("draft")
    assert run_main(make(), f"--out={tmp_path}") == 0
    assert all((tmp_path / name).read_text() == "draft" for name in (*FOREIGN, ".figure.png.12.tmp"))
    assert run_main(make(), f"--out={tmp_path}", "--factor=2") == 0
    assert all((tmp_path / name).read_text() == "draft" for name in FOREIGN)


@pytest.mark.parametrize("flags", [[], ["--factor=2"]])
@pytest.mark.parametrize("name", ["config.json", "claims.json", "timings.csv", "measurements.csv", "parts"])
def test_a_directory_in_the_place_of_a_file_and_the_reverse_are_refused(name, flags, tmp_path, capsys):
    out, measured = tmp_path / "o", []
    run_main(make(), f"--out={out}")
    (out / name).rename(tmp_path / "away")
    if name == "parts":
        (out / name).write_text("mine")
    else:
        (out / name).mkdir()
    before = contents(out, timings=True)
    assert run_main(make(measured), f"--out={out}", *flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"holds a {name} that no experiment wrote" in line
    assert measured == []
    assert contents(out, timings=True) == before


@pytest.mark.parametrize("field", ["flags", "versions", "device", "command", "source", "seed", "inputs"])
@pytest.mark.parametrize("value", [None, [1]])
def test_a_record_of_another_shape_is_no_record_of_ours(field, value, tmp_path, capsys):
    run_main(make(), f"--out={tmp_path}")
    record = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**record, field: value}))
    before = contents(tmp_path, timings=True)
    assert run_main(make(), f"--out={tmp_path}", "--factor=2") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds a config.json that no experiment wrote" in line
    assert contents(tmp_path, timings=True) == before


def test_an_output_that_cannot_be_a_directory_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_main(make(), f"--out={tmp_path / 'file' / 'o'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --out")
    assert "cannot be written" in line


def test_two_runs_never_share_a_directory(tmp_path, capsys):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert run_main(make(), f"--out={tmp_path}") == 2
    finally:
        os.close(handle)
    assert "in use by another run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "claims.json"
    artifacts.write_atomic(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match=r"claims.json cannot be written: No space left on device"):
        artifacts.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_half_written_files_of_a_killed_run_are_swept(tmp_path):
    run_main(make(), f"--out={tmp_path}")
    for leftover in (".figure.png.123.tmp", "parts/.size_1.json.123.tmp"):
        (tmp_path / leftover).write_text("half")
    run_main(make(), f"--out={tmp_path}")
    assert not list(tmp_path.rglob("*.tmp"))


def test_json_is_strict_and_numbers_are_plain():
    text = artifacts.to_json({"a": np.float32(0.5), "b": float("nan"), "c": [jnp.asarray(2), float("inf")], "d": (1,)})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": 0.5, "b": None, "c": [2, None], "d": [1]}
    with pytest.raises(TypeError, match=r"scalar, got shape \(2,\)"):
        artifacts.plain({"value": np.zeros(2)})
    with pytest.raises(TypeError, match="number or a text, got set"):
        artifacts.plain({"value": {1}})


def test_a_measurement_that_is_not_a_number_survives_being_stored(tmp_path):
    store = artifacts.Store(tmp_path, "key")
    store.save_part("unit", [{"value": float("nan")}, {"value": float("-inf")}])
    first, second = store.load_part("unit")
    assert np.isnan(first["value"])
    assert second["value"] == float("-inf")


@pytest.mark.slow
def test_kill_9_in_the_middle_and_a_rerun_leave_the_bytes_of_an_uninterrupted_run(tmp_path):
    # A copy: an edit of the source in the meantime is another configuration, as it should be.
    root = tmp_path / "source"
    for package in ("attn_jax", "experiments"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "experiments.score_variance", "--preset=smoke"]
    subprocess.run([*command, f"--out={tmp_path / 'whole'}"], cwd=root, check=True, capture_output=True)
    cut = tmp_path / "cut"
    for part in ("independent", "heavy_tailed"):  # killed twice, at different places
        process = subprocess.Popen([*command, f"--out={cut}"], cwd=root, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (cut / "parts" / f"{part}.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (cut / "claims.json").exists()
    last = subprocess.run([*command, f"--out={cut}"], cwd=root, check=True, capture_output=True, text=True)
    assert "independent, kept from before" in last.stdout
    assert contents(cut) == contents(tmp_path / "whole")
