"""The pages say what is true: their examples run, their links lead somewhere, the commands they name are there."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Each page in one interpreter: its blocks follow one another. The README's are run apart, by test_readme.
EXAMPLES = [
    (page, blocks)
    for page in PAGES[1:]
    if (blocks := re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("page", "blocks"), EXAMPLES, ids=[str(page.relative_to(ROOT)) for page, _ in EXAMPLES])
def test_examples_run_one_after_another(page, blocks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        cwd=tmp_path, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_that_are_named_are_there(page):
    for module in re.findall(r"python -m ((?:experiments|attn_jax|docs)[\w.]*)", page.read_text("utf-8")):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
