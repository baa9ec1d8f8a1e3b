"""Which module knows which: nobody imports in a circle, not even for annotations."""

import ast
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {path.stem: ast.parse(path.read_text("utf-8")) for path in (ROOT / "experiments").glob("*.py")}


def imported(tree: ast.Module) -> set[str]:
    """Modules of the package that are named in any import, wherever it stands."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {name.split(".")[1] for name in names if name.startswith("experiments.")} & set(MODULES)


def test_no_experiment_imports_in_a_circle():
    graph = {name: imported(tree) for name, tree in MODULES.items()}
    assert graph["walkthrough"] >= {"harness", "config", "figures"}
    list(graphlib.TopologicalSorter(graph).static_order())
