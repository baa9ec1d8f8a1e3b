"""Which module knows which: nobody imports in a circle, not even for annotations."""

import ast
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FILES = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "experiments").rglob("*.py")}
MODULES = {".".join(name.parts[1:]): ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}


def imported(tree: ast.Module) -> set[str]:
    """Modules of the package that are named in any import, wherever it stands."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {name.removeprefix("experiments.") for name in names if name.startswith("experiments.")} & set(MODULES)


def test_no_experiment_imports_in_a_circle():
    graph = {name: imported(tree) for name, tree in MODULES.items()}
    assert graph["walkthrough"] >= {"harness", "config", "figures"}
    assert graph["benchmarks.attention"] >= {"harness", "benchmarks.race"}
    list(graphlib.TopologicalSorter(graph).static_order())
