"""The list of experiments, and running them all: one that fails stops no other."""

import importlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from experiments import __main__ as listing
from experiments import registry, reproduce
from experiments.claims import CLAIMS
from experiments.harness import PRESETS


@pytest.mark.parametrize("name", registry.EXPERIMENTS)
def test_each_experiment_says_its_question_claims_command_and_time(name):
    module, entry = importlib.import_module(f"experiments.{name}"), registry.read_entry(name)
    assert module.__doc__.splitlines()[0] == entry.question
    assert entry.question.endswith("?")
    assert f"python -m experiments.{name}" in module.__doc__
    assert module.EXPERIMENT.name == name
    for preset in PRESETS:
        module.EXPERIMENT.preset(preset)


def test_every_claim_is_settled_by_one_experiment():
    told = " ".join(entry.claims for entry in registry.entries()).replace(",", " ").split()
    assert sorted(word for word in told if word in CLAIMS) == sorted(CLAIMS)


def test_a_selection_is_named_by_claims_and_says_what_it_leaves_out(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(reproduce, "run_one", lambda name, *rest: ran.append(name) or True)
    assert reproduce.main(["reproduce", "--only=H2,S1,C1b", f"--out={tmp_path}"]) == 0
    assert ran == ["score_variance", "attention_rank", "complexity"]
    *_, left, page = capsys.readouterr().out.splitlines()
    assert [name for name in registry.REPRODUCED if name in left] == [x for x in registry.REPRODUCED if x not in ran]
    assert "Not run:" in pathlib.Path(page).read_text("utf-8")


def test_the_short_selection_leaves_time_for_the_set_up_in_a_quarter_of_an_hour():
    assert sum(registry.read_entry(name).seconds for name in registry.SHORT) <= 13 * 60
    assert sum(entry.seconds for entry in registry.entries()[2:]) <= 45 * 60
    assert "diagnose" in registry.SHORT


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("smoke 8 s, quick 13 s, full 4 min on two cores", 13), ("quick 58 s, 142 s with Gemma 3, full 10 min", 142)],
)
def test_seconds_are_read_from_what_is_said(said, seconds):
    assert registry.Entry("x", "x?", "S1", said).seconds == seconds


def test_the_list_names_them_all_with_their_time(capsys):
    assert listing.main(["list"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name in registry.EXPERIMENTS:
        assert name in printed


def test_a_failure_is_named_and_the_others_still_run(tmp_path, capsys, monkeypatch):
    ran = []

    def run_one(name, preset, seed, out):
        ran.append((name, preset, seed, out))
        return name != "softmax_saturation"

    monkeypatch.setattr(reproduce, "run_one", run_one)
    assert reproduce.main(["reproduce", "--preset=smoke", "--seed=4", f"--out={tmp_path}"]) == 1
    assert ran == [(name, "smoke", 4, tmp_path / name) for name in (*registry.REPRODUCED, "model_report")]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(tmp_path / "report" / "index.html")
    assert printed.err == "error: failed: softmax_saturation\n"
    assert "softmax_saturation failed" in " ".join((tmp_path / "report" / "index.html").read_text().split())


def test_only_some_and_all_well(tmp_path, capsys, monkeypatch):
    ran = []
    monkeypatch.setattr(reproduce, "run_one", lambda name, *rest: ran.append(name) or True)
    assert reproduce.main(["reproduce", "--only=attention_rank,score_variance", f"--out={tmp_path}"]) == 0
    assert ran == ["score_variance", "attention_rank"]  # in the order of the report
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flag", "says"),
    [("--only=walkthrough", "only must hold names"), ("--only=a,b", "'a'"), ("--preset=all", "preset"), ("x", "'x'")],
)
def test_wrong_flags_run_nothing(flag, says, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "run_one", lambda *_: pytest.fail("ran"))
    assert reproduce.main(["reproduce", f"--out={tmp_path / 'o'}", flag]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocked", [".", "deep/er", "report"])
def test_an_output_that_cannot_be_written_is_one_line_before_anything_runs(blocked, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "run_one", lambda *_: pytest.fail("ran"))
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / blocked
    if blocked == "report":
        out = tmp_path
        (tmp_path / "report").write_text("mine")
    assert reproduce.main(["reproduce", f"--out={out}"]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: --out: ")
    assert "cannot be written" in line
    assert printed.out == ""
    assert (tmp_path / "file").read_text() == "mine"


def test_a_page_that_is_not_ours_is_refused_untouched(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "run_one", lambda *_: pytest.fail("ran"))
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("<title>my report</title>")
    assert reproduce.main(["reproduce", f"--out={tmp_path}"]) == 2
    assert "holds a report/index.html that no experiment wrote" in capsys.readouterr().err
    assert (tmp_path / "report" / "index.html").read_text() == "<title>my report</title>"


def test_ctrl_c_ends_it_with_one_line(tmp_path):
    """Ctrl-C reaches every process of the group: the one that runs an experiment as well."""
    program = "import sys; from experiments import reproduce; sys.exit(reproduce.main())"
    command = [sys.executable, "-c", program, "--preset=smoke", "--only=score_variance", f"--out={tmp_path}"]
    started = subprocess.Popen(
        command, cwd=reproduce.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stdout is not None
    while started.stdout.readline() != "== score_variance\n":
        assert started.poll() is None
    os.killpg(started.pid, signal.SIGINT)
    printed, error = started.communicate(timeout=30)
    assert error == "interrupted; the same command continues\n"
    assert started.returncode == 130
    assert "==" not in printed
    with pytest.raises(ProcessLookupError):  # nothing of it runs on
        os.killpg(started.pid, 0)


@pytest.mark.slow
def test_the_command_runs_each_in_its_own_process_and_ends_with_the_path(tmp_path):
    command = [sys.executable, "-m", "experiments.reproduce", "--preset=smoke", "--only=attention_rank"]
    root = reproduce.ROOT
    done = subprocess.run([*command, f"--out={tmp_path}"], cwd=root, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report" / "index.html")
    assert "H2" in (tmp_path / "report" / "index.html").read_text("utf-8")
