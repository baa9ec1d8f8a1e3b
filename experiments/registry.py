"""Which experiments there are. What each asks and how long it takes stands in its docstring, read without import."""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Sequence

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
    "head_redundancy",
    "entropy_and_importance",
    "attention_explanation",
)
EXPERIMENTS = ("walkthrough", "tune", *REPRODUCED)
# What is shown where a quarter of an hour must do: each link of the chain, and a real model.
SHORT = (
    "score_variance",
    "softmax_saturation",
    "projections",
    "attention_rank",
    "heads",
    "positions",
    "block_equivalence",
    "kv_cache",
    "linear_stability",
    "rank_collapse",
    "diagnose",
    "head_roles",
)
GROUPS = {"all": REPRODUCED, "short": SHORT}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the list: the module's name, its question, the claims it settles and the time it takes."""

    name: str
    question: str
    claims: str
    time: str

    @property
    def seconds(self) -> float:
        """What its preset `quick` takes, the longest time that is said."""
        (said,) = re.findall(r"quick ([^,]+(?:, \d+ (?:s|min) with [^,]+)?)", self.time)
        return max(float(number) * {"s": 1, "min": 60}[unit] for number, unit in re.findall(r"(\d+) (s|min)\b", said))


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


def select(words: Sequence[str]) -> tuple[str, ...]:
    """The experiments of `REPRODUCED` that are named: by themselves, by a claim that they settle, or by a group.

    Raises:
        ValueError: on a word that names none.
    """
    settles = {name: re.split(r"[ ,]+", read_entry(name).claims) for name in REPRODUCED}
    found: set[str] = set()
    for word in words:
        named = GROUPS.get(word) or [name for name in REPRODUCED if name == word or word in settles[name]]
        if not named:
            raise ValueError(
                f"only must hold names of experiments or ids of claims (python -m experiments lists both), "
                f"or {' or '.join(GROUPS)}; got {word!r}"
            )
        found.update(named)
    return tuple(name for name in REPRODUCED if name in found)
