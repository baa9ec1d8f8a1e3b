"""The README says what is true: its examples run, its tables match the code."""

import pathlib
import re
import subprocess
import sys

import pytest

from experiments import registry

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_each_example_runs_by_itself(example):
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})


def test_the_first_example_needs_nothing_that_others_imported():
    ran = subprocess.run([sys.executable, "-W", "error", "-c", EXAMPLES[0]], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_first_example_is_twelve_lines():
    assert len(EXAMPLES[0].strip().splitlines()) == 12


def test_table_of_experiments():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|.*\| (.*?) \|$", README, flags=re.MULTILINE)
    assert rows.pop()[0] == "reproduce"
    quick = {
        entry.name: re.search(r"(?:quick )?(\d+ \w+)(?:,| at every)", entry.time.split("quick")[-1])
        for entry in registry.entries()
    }
    assert rows == [(entry.name, entry.question, quick[entry.name][1]) for entry in registry.entries()]


def test_layout_map_names_what_there_is():
    layout = README.split("## Where things are")[1].split("## ")[0]
    for path in (ROOT / "attn_jax").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert path.name in layout, path.name
        if (path / "__init__.py").exists():
            assert f"{path.name}/" in layout, path.name
