"""How fast is exact attention, in how much memory, and against whom?

Claims: none; the figures of the README rest on it.
Command: python -m experiments.benchmarks.attention --preset=quick --out=results/benchmarks.attention
Time: smoke 12 s, quick 90 s, full 20 min on two cores with all peers.

Forward, and forward and backward, of each pattern at each length: our implementations, jax.nn, flax.nnx, tokamax and
PyTorch where they are installed (`pip install tokamax torch`). All sides are checked to return the same numbers, then
run in turn; times are medians of rounds, ratios are of medians with a bootstrap interval, and each rate is a fraction
of what the machine's own matrix product reaches in the same rounds. Then what statistics cost on top of the output,
and what a sparse pattern costs at a length where the square would not fit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import attn_jax
from attn_jax import diagnostics
from experiments import counting, harness
from experiments.artifacts import Row
from experiments.benchmarks import attention_results as results
from experiments.benchmarks.problems import CASES, DIRECTIONS, Case, Problem
from experiments.benchmarks.race import PATTERN, Entrant, race
from experiments.benchmarks.sides import (
    IMPLEMENTATIONS,
    SIDES,
    Contestant,
    contestant,
    installed,
    stands_in_the_way,
    versions,
)
from experiments.benchmarks.timing import LEAST_ROUNDS
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit

SAMPLED_ROWS = 64
VARIANTS: dict[str, Callable[..., Any]] = {  # of the statistics
    "output": lambda query, key, value, rows, **how: attn_jax.dot_product_attention(query, key, value, **how),
    "default statistics": lambda query, key, value, rows, **how: diagnostics.attention_with_statistics(
        query, key, value, **how
    ),
    "all statistics": lambda query, key, value, rows, **how: diagnostics.attention_with_statistics(
        query, key, value, statistics=diagnostics.ALL, **how
    ),
    f"{SAMPLED_ROWS} sampled rows alone": lambda query, key, value, rows, **how: diagnostics.attention_statistics(
        query, key, rows=rows, **how
    ),
}
PATTERNS = ("full", "window", "bigbird")  # at the long length
FAMILIES = (*CASES, "statistics", "patterns")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Flags of this benchmark."""

    cases: tuple[str, ...] = option(FAMILIES, "what to time", choices=FAMILIES)
    lengths: tuple[int, ...] = option((64, 256, 1024, 4096), "queries and keys n", least=1, most=2**17)
    square_length: int = option(1024, "longest n of the sides that show nothing new there", least=1, most=2**17)
    long_length: int = option(16384, "n of the patterns, one head", least=1, most=2**20)
    directions: tuple[str, ...] = option(DIRECTIONS, "what to run", choices=DIRECTIONS)
    sides: tuple[str, ...] = option(tuple(SIDES), "who runs it; ratios are against the first", choices=tuple(SIDES))
    heads: int = option(8, "query heads", least=1, most=256)
    head_dim: int = option(64, "head width", least=1, most=1024)
    rounds: int = option(LEAST_ROUNDS, "readings of each side", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.cases:
            if name in CASES and self.heads % CASES[name].groups:
                raise ValueError(f"heads must be a multiple of {CASES[name].groups} for {name}, got {self.heads}")
            if name not in CASES and not self.ours:
                raise ValueError(f"sides must hold one of ours for {name}, got {', '.join(self.sides)}")

    def problem(self, case: Case, length: int) -> Problem:
        """A case at a length, at this configuration's size."""
        return Problem(case, length, self.heads, self.head_dim, self.seed)

    def reference(self, length: int) -> str:
        """Whose numbers the others have to return: the tests hold both to a float64 oracle."""
        return "dense" if length <= self.square_length else "blockwise"

    @property
    def ours(self) -> tuple[str, ...]:
        """The sides that are implementations of our own."""
        return tuple(name for name in self.sides if name in IMPLEMENTATIONS)


Measure = Callable[[AttentionConfig, str, int, str], list[Row]]  # (config, case, length, direction)


def units(config: AttentionConfig) -> list[Unit]:
    found = []
    for name in config.cases:
        lengths = (config.long_length,) if name == "patterns" else config.lengths
        measure = {"statistics": _statistics, "patterns": _patterns}.get(name, _sides)
        directions = [d for d in config.directions if name != "statistics" or d == "forward"]
        for length, direction in ((n, d) for n in lengths for d in directions):
            work = functools.partial(_measure, measure, config, name, length, direction)
            found.append(Unit(f"{name}-{length}-{direction}", work))
    return found


def _measure(measure: Measure, config: AttentionConfig, name: str, length: int, direction: str) -> list[Row]:
    where = {"case": name, "n": length, "direction": direction}
    return [{**where, **row} for row in measure(config, name, length, direction)]


def _sides(config: AttentionConfig, name: str, length: int, direction: str) -> list[Row]:
    """Every side on one case."""
    problem = config.problem(CASES[name], length)
    present, rows = _who_is_here(config, config.sides, length)
    ready = {side: SIDES[side].build(problem, direction) for side in present}
    reference = config.reference(length)
    expected = (ready.get(reference) or SIDES[reference].build(problem, direction)).result()
    rows += _race(config, {side: Entrant(one, expected) for side, one in ready.items()})
    kv_heads = config.heads // problem.case.groups
    return [*rows, *_work(problem.case, length, direction, config.heads, kv_heads, config.head_dim)]


def _statistics(config: AttentionConfig, name: str, length: int, direction: str) -> list[Row]:
    """What statistics cost on top of the output, per implementation of ours."""
    problem = config.problem(CASES["full"], length)
    present, rows = _who_is_here(config, config.ours, length)
    chosen = np.random.default_rng(config.seed).choice(length, min(SAMPLED_ROWS, length), replace=False)
    arguments = (*problem.inputs, jnp.asarray(np.sort(chosen)))

    def ready(variant: str, side: str) -> Contestant:
        attend = functools.partial(VARIANTS[variant], implementation=IMPLEMENTATIONS[side])
        return contestant(attend, arguments, problem.cotangent, direction)

    entrants = {}
    for variant in VARIANTS:
        expected = ready(variant, config.reference(length)).result()
        entrants |= {f"{side}: {variant}": Entrant(ready(variant, side), expected) for side in present}
    return rows + _race(config, entrants)


def _who_is_here(config: AttentionConfig, sides: tuple[str, ...], length: int) -> tuple[list[str], list[Row]]:
    """The sides that take part, and rows that say why the others do not."""
    reasons = {side: stands_in_the_way(SIDES[side], length, config.square_length) for side in sides}
    rows: list[Row] = [{"side": side, "note": reason} for side, reason in reasons.items() if reason is not None]
    return [side for side, reason in reasons.items() if reason is None], rows


def _patterns(config: AttentionConfig, name: str, length: int, direction: str) -> list[Row]:
    """What sparse patterns cost where the square does not fit, against the whole square: our first side, one head."""
    side, entrants, rows = config.ours[0], {}, []
    for case in (CASES[pattern] for pattern in PATTERNS):
        problem = Problem(case, length, 1, config.head_dim, config.seed)
        entrants[f"{side}: {case.name}"] = Entrant(SIDES[side].build(problem, direction), None)
        pattern = case.pattern(length)
        share = counting.touched_share(pattern, length, counting.tile_of(pattern, length, heads=1, kv_heads=1))
        rows.append({"side": f"{side}: {case.name}", "measure": "touched_share", "value": share})
    return rows + _race(config, entrants)


def _race(config: AttentionConfig, entrants: dict[str, Entrant]) -> list[Row]:
    torch = "torch_sdpa" in config.sides and installed("torch")
    return race(entrants, rounds=config.rounds, torch=torch)


def _work(case: Case, length: int, direction: str, heads: int, kv_heads: int, width: int) -> list[Row]:
    """The FLOPs that the tiles of the pattern ask for: the same for all sides, whatever each of them does."""
    pattern, sizes = case.pattern(length), {"heads": heads, "kv_heads": kv_heads}
    tile = counting.tile_of(pattern, length, **sizes)
    parts = direction.split("_")
    flops = sum(counting.tile_loop(part, pattern, length, tile, width=width, **sizes).flops for part in parts)
    share = counting.touched_share(pattern, length, tile)
    found = {"flops": flops, "touched_share": share}
    return [{"side": PATTERN, "measure": measure, "value": value} for measure, value in found.items()]


EXPERIMENT = Experiment(
    name="benchmarks.attention",
    question="How fast is exact attention, in how much memory, and against whom?",
    config=AttentionConfig,
    presets={
        "smoke": {"cases": ("full", "causal"), "lengths": (64,), "heads": 2, "head_dim": 16},
        "quick": {
            "cases": ("full", "causal", "window", "statistics", "patterns"),
            "lengths": (1024,),
            "long_length": 8192,
            "sides": tuple(name for name in SIDES if name != "default"),
        },
        "full": {},
    },
    units=units,
    judge=lambda config, measurements: (),
    figure=results.figure,
    alt="Log-log plots of time against length: a panel per pattern and direction, a line per side.",
    tables=results.tables,
    inputs=lambda config: versions(config.sides),
    documentation=__doc__ or "",
)


def run(config: AttentionConfig) -> Result:
    """Measures; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
