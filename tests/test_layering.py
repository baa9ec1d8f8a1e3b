"""A module imports from its own package or from a lower floor, never from above or from a neighbour on its floor."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Bottom up. The ground floor is a stair: each of its modules may use the ones before it.
FLOORS = (
    {"typing"}, {"files"}, {"checks"}, {"lazy"}, {"hashing"},
    {"projections", "scaling", "positions", "masks", "biases"},
    {"exact", "linear"},
    {"routed", "lowrank"},
    {"parallel", "diagnostics"}, {"audit"},
    {"nn"},
    {"models", "training"},
    {"attn_jax"},  # the public names of `attn_jax/__init__.py`
    {"experiments"},
)  # fmt: skip
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
FILES = sorted(path.relative_to(ROOT) for top in ("attn_jax", "experiments") for path in (ROOT / top).rglob("*.py"))


def home(module: str) -> str:
    """The package or module of the layout that a dotted name lies in: `attn_jax.exact.dense` is at home in exact."""
    top, *rest = module.split(".")
    if top == "attn_jax" and rest and rest[0] in FLOOR:
        return rest[0]
    return top


def imported(source: str, module: str, *, is_package: bool) -> list[tuple[int, str]]:
    """Every module of ours that a source imports, at the top, inside functions or by `importlib`, with its line."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join(base + ([node.module] if node.module else []))
            # `from attn_jax import masks` is the module, `from attn_jax import split_heads` the public package.
            found += [(node.lineno, f"{start}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found += [(node.lineno, ".".join(package) + name if name.startswith(".") else name) for name in names]
    return [(line, name) for line, name in found if name.split(".")[0] in ("attn_jax", "experiments", "tests")]


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    own = home(module)
    wrong = []
    for line, name in imported(source, module, is_package=is_package):
        target = home(name)
        if target == "tests" or (target != own and FLOOR[target] >= FLOOR[own]):
            wrong.append(f"{module}, line {line}: {own} (floor {FLOOR[own]}) imports {name}")
    return wrong


def dotted(path: pathlib.Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path):
    source = (ROOT / path).read_text()
    assert not violations(source, dotted(path), is_package=path.name == "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_module_has_a_floor(path):
    if path.parts[0] == "attn_jax" and path != pathlib.Path("attn_jax/__init__.py"):
        assert pathlib.Path(path.parts[1]).stem in FLOOR


def test_there_is_something_to_check():
    assert {"attn_jax", "exact", "masks", "diagnostics"} <= {home(dotted(path)) for path in FILES}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attn_jax.masks", "import attn_jax.exact.dense"),
        ("attn_jax.masks", "from attn_jax import nn"),
        ("attn_jax.masks", "from attn_jax import biases"),
        ("attn_jax.masks", "from attn_jax.biases import Alibi"),
        ("attn_jax.masks", "from attn_jax import dot_product_attention"),
        ("attn_jax.masks", "import attn_jax"),
        ("attn_jax.masks", "from . import scaling"),
        ("attn_jax.masks", "from .exact import dense"),
        ("attn_jax.exact.dense", "from ..diagnostics import entropy"),
        ("attn_jax.exact.dense", "from .. import linear"),
        ("attn_jax.exact.dense", "def f():\n    from attn_jax.nn import layers"),
        ("attn_jax.exact.dense", "if TYPE_CHECKING:\n    from attn_jax import models"),
        ("attn_jax.exact.dense", "import importlib\nimportlib.import_module('attn_jax.nn')"),
        ("attn_jax.exact.dense", "__import__('attn_jax.training')"),
        ("attn_jax.models.load", "import attn_jax.training.loop"),
        ("attn_jax.nn.block", "import experiments.harness"),
        ("attn_jax.nn.block", "from tests import oracles"),
        ("attn_jax.typing", "from attn_jax import checks"),
        ("attn_jax", "import experiments"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attn_jax.exact.dense", "from attn_jax.exact.arguments import Problem"),
        ("attn_jax.exact.dense", "from .tiles import Tile"),
        ("attn_jax.exact.dense", "from attn_jax import checks, masks"),
        ("attn_jax.exact.kernels.flash", "from ...masks import Causal"),
        ("attn_jax", "from attn_jax import nn"),
        ("experiments.walkthrough", "import attn_jax\nfrom experiments import harness"),
        ("attn_jax.masks", "import jax.nn\nfrom jax import nn"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert violations(source, module, is_package=module == "attn_jax") == []


def test_the_package_opens_without_flax():
    """`nn`, `models` and `training` load when they are first touched."""
    heavy = ["flax", "attn_jax.nn", "attn_jax.models", "attn_jax.training", "tokenizers", "gguf", "matplotlib"]
    code = f"import sys, attn_jax; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
