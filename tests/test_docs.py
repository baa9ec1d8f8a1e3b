"""The pages say what is true: their examples run, their links lead somewhere, the commands they name are there."""

import functools
import importlib.util
import itertools
import pathlib
import re

import pytest

from experiments import ledger
from experiments.verdicts import VERDICTS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# The blocks of a page follow one another. The README's are run apart, by test_readme.
EXAMPLES = [
    (page, blocks)
    for page in PAGES[1:]
    if (blocks := re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE))
]


@functools.cache
def runs():
    return ledger.load(ROOT / "docs" / "ledger")


def prose(page):
    """The text of a page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(("page", "blocks"), EXAMPLES, ids=[str(page.relative_to(ROOT)) for page, _ in EXAMPLES])
def test_examples_run_one_after_another(page, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks), page.name, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            assert there.exists(), target
            assert not anchor or f'<a id="{anchor}">' in prose(there), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_numbers_that_cite_the_ledger_are_its_numbers(page):
    """`[1.19](ledger/README.md#D4)`: the number is one of that claim's, rounded; a verdict is its verdict."""
    for text, claim_id in re.findall(r"\[([^\]]+)\]\([\w./]*ledger/README\.md#([A-Z][\w-]*)\)", prose(page)):
        entry, known = ledger.claim(runs(), claim_id), ledger.numbers(runs(), claim_id)
        said = [word for word in VERDICTS if word in text]
        assert said in ([], [entry["verdict"]]), f"{claim_id} is {entry['verdict']}, not {text}"
        for number in map("".join, re.findall(r"(\d[\d,]*)(\.\d+)?", text)):
            decimals = len(number.partition(".")[2])
            shown, half = float(number.replace(",", "")), 0.5001 * 10.0**-decimals
            scales = (1, 100) if f"{number}%" in text else (1,)
            assert any(abs(abs(x) * s - shown) <= half for x, s in itertools.product(known, scales)), (
                f"{claim_id} has no {number} of [{text}]"
            )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_are_named_are_there(page):
    for module in re.findall(r"python -m ((?:experiments|attn_jax|docs)[\w.]*)", page.read_text("utf-8")):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
