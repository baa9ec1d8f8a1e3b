"""The ledger: what is kept of a run, the page made of it, and where another run contradicts it."""

import dataclasses
import pathlib

import pytest

from experiments import harness, ledger, report
from experiments.registry import REPRODUCED
from tests.experiments.toy import make

ROOT = pathlib.Path(__file__).parents[2]
NAME = "attention_rank"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A directory with one complete run, of a toy under an experiment's name, and one that is not complete."""
    out = tmp_path_factory.mktemp("results")
    with pytest.raises(SystemExit):
        harness.main(make(name=NAME), [NAME, f"--out={out / NAME}"])
    (out / "heads").mkdir()
    (out / "heads" / "config.json").write_bytes((out / NAME / "config.json").read_bytes())
    return out


def with_verdict(runs, verdict):
    return {
        name: dataclasses.replace(run, claims=[{**entry, "verdict": verdict} for entry in run.claims])
        for name, run in runs.items()
    }


def test_it_keeps_complete_runs_and_writes_their_page(results, tmp_path, capsys):
    out = tmp_path / "kept"
    assert ledger.main(["ledger", f"--results={results}", f"--out={out}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "README.md")
    assert sorted(path.name for path in (out / NAME).iterdir()) == sorted(ledger.KEPT)
    assert not (out / "heads").exists()
    kept, (run,) = ledger.load(out), ledger.load(results).values()
    assert kept == {NAME: run}
    page = (out / "README.md").read_text("utf-8")
    for entry in run.claims:
        assert f"### {entry['claim']}: {entry['statement']}" in page
        assert f"| {report.spell(entry)} |" in page
        assert ledger.claim(kept, entry["claim"]) == entry
    assert "heads" in page.split("Not measured yet", 1)[1].splitlines()[0]
    with pytest.raises(KeyError):
        ledger.claim(kept, "none")


def test_a_new_run_takes_the_place_of_the_old_one(results, tmp_path):
    out = tmp_path / "kept"
    for _ in range(2):
        assert ledger.main(["ledger", f"--results={results}", f"--out={out}"]) == 0
    assert list(ledger.load(out)) == [NAME]
    page = (out / "README.md").read_text("utf-8")
    (out / "README.md").unlink()
    assert ledger.main(["ledger", f"--results={out}", f"--out={out}"]) == 0  # the page alone
    assert (out / "README.md").read_text("utf-8") == page


@pytest.mark.parametrize(
    ("kept", "new", "contradict"),
    [
        ("confirmed", "refuted", True),
        ("refuted", "confirmed", True),
        ("refined", "refuted", True),
        ("refuted", "refined", True),
        ("confirmed", "refined", False),
        ("refuted", "refuted", False),
        ("inconclusive", "refuted", False),
        ("confirmed", "inconclusive", False),
    ],
)
def test_what_was_refuted_is_not_true(kept, new, contradict, results):
    runs = ledger.load(results)
    found = ledger.contradictions(with_verdict(runs, kept), with_verdict(runs, new))
    claims = [entry["claim"] for entry in runs[NAME].claims]
    assert found == ([(claim, kept, new) for claim in claims] if contradict else [])
    assert ledger.contradictions({}, with_verdict(runs, new)) == []


def test_compare_writes_nothing_and_its_status_tells(results, tmp_path, monkeypatch, capsys):
    out = tmp_path / "kept"
    assert ledger.main(["ledger", f"--results={results}", f"--out={out}", "--compare"]) == 0
    assert not out.exists()
    runs = ledger.load(results)
    told = {results: with_verdict(runs, "refuted"), out: with_verdict(runs, "confirmed")}
    monkeypatch.setattr(ledger, "load", told.__getitem__)
    assert ledger.main(["ledger", f"--results={results}", f"--out={out}", "--compare"]) == 1
    assert "refuted" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--results=nowhere"], "holds no complete run"),
        (["--preset=quick"], "preset"),
        (["--compare=maybe"], "compare"),
    ],
)
def test_bad_input(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ledger.main(["ledger", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_one_line(results, tmp_path, capsys):
    (tmp_path / "kept").write_text("mine")
    assert ledger.main(["ledger", f"--results={results}", f"--out={tmp_path / 'kept'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "mine"


def test_the_page_in_the_repository_is_that_of_its_data():
    runs = ledger.load(ROOT / "docs" / "ledger")
    assert runs
    assert (ROOT / "docs" / "ledger" / "README.md").read_text("utf-8") == ledger.render(runs)
    assert {run.record["preset"] for run in runs.values()} == {"full"}
    assert list(runs) == [name for name in REPRODUCED if name in runs]
