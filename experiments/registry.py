"""Which experiments there are. What each asks and how long it takes stands in its docstring, read without import."""

import ast
import dataclasses
import pathlib

REPRODUCED = (
    "score_variance",
    "softmax_saturation",
    "scale_rules",
    "projections",
    "attention_rank",
    "heads",
    "positions",
    "block_equivalence",
    "complexity",
    "kv_cache",
    "associative_recall",
    "linear_stability",
    "low_rank",
    "sparse_patterns",
    "path_length",
    "inductive_bias",
    "rank_collapse",
    "instability",
    "entropy_over_training",
    "diagnose",
    "head_roles",
)
EXPERIMENTS = ("walkthrough", *REPRODUCED)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the list: the module's name, its question, the claims it settles and the time it takes."""

    name: str
    question: str
    claims: str
    time: str


def entries() -> list[Entry]:
    """All experiments, in the order in which they are best read."""
    return [read_entry(name) for name in EXPERIMENTS]


def read_entry(name: str) -> Entry:
    """The entry of the experiment `name`, from the first line, `Claims:` and `Time:` of its docstring."""
    path = pathlib.Path(__file__).parent / name
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    field = {line.split(":", 1)[0]: line.split(":", 1)[1].strip() for line in lines if ":" in line}
    if not lines or "Time" not in field or "Claims" not in field:
        raise ValueError(f"the docstring of experiments.{name} must have a first line, 'Claims:' and 'Time:'")
    return Entry(name, lines[0], field["Claims"].rstrip("."), field["Time"].rstrip("."))
