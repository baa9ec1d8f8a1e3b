"""One race: contestants are checked to return the same numbers, then timed in turn with the machine's own product."""

import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from attn_jax.typing import Array
from experiments.artifacts import Row
from experiments.benchmarks.problems import largest_difference
from experiments.benchmarks.sides import Contestant
from experiments.benchmarks.timing import LEAST_SECONDS, interleave

PATTERN = "pattern"  # the side of what is true of a race as a whole
PRODUCT, TORCH_PRODUCT = "matrix product", "matrix product (torch)"
PRODUCT_SIZE = 1024
TOLERANCE = 1e-4  # of the largest entry, in float32


class Entrant(NamedTuple):
    """A contestant, and the arrays that it has to return; None: nobody else says what they are."""

    contestant: Contestant
    expected: list[np.ndarray] | None


def race(
    entrants: Mapping[str, Entrant],
    *,
    rounds: int,
    torch: bool,
    tolerance: float = TOLERANCE,
    least_seconds: float = LEAST_SECONDS,
) -> list[Row]:
    """Rows of one race, without what they have in common.

    A contestant that returns other numbers than it has to is not timed: its row says so, in `note`.

    Args:
        entrants: by name.
        rounds: readings of each.
        torch: whether PyTorch's matrix product is measured beside JAX's.
        tolerance: the largest difference, over the largest entry expected.
        least_seconds: of a reading, also of the matrix product's.
    """
    rows, sides = [], {PRODUCT: _jax_product(), **({TORCH_PRODUCT: _torch_product()} if torch else {})}
    for name, (contestant, expected) in entrants.items():
        found = contestant.result()
        difference = 0.0 if expected is None else largest_difference(found, expected)
        if expected is not None:
            rows.append({"side": name, "measure": "difference", "value": difference})
        if difference > tolerance:
            rows.append({"side": name, "note": f"returns other numbers: {difference:.2g} of the largest entry off"})
            continue
        if contestant.memory is not None:
            rows.append({"side": name, "measure": "temporary_bytes", "value": contestant.memory})
        sides[name] = contestant.run
    readings = interleave(sides, rounds=rounds, least_seconds=least_seconds)
    return rows + [
        {"side": name, "round": number, "seconds": seconds}
        for name, found in readings.items()
        for number, seconds in enumerate(found)
    ]


def product_flops() -> int:
    """FLOPs of the matrix product that stands for the machine's rate."""
    return 2 * PRODUCT_SIZE**3


def _matrix() -> Array:
    return jax.random.normal(jax.random.key(0), (PRODUCT_SIZE, PRODUCT_SIZE))


def _jax_product() -> Callable[[], object]:
    matrix, product = _matrix(), jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(matrix))  # compiles
    return lambda: jax.block_until_ready(product(matrix))


def _torch_product() -> Callable[[], object]:
    return importlib.import_module("experiments.benchmarks.torch_side").matrix_product(_matrix())
