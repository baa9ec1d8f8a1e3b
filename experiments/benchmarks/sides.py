"""Who computes it: our implementations and the libraries that people would swap from.

To add one: a function from a problem to `attend(query, key, value, *extra)` and its extra arrays, and a row of `SIDES`.
A library that is not installed is named with its reason; nothing is left out in silence.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from absl import flags

import attn_jax
from attn_jax.typing import Array
from experiments.benchmarks.problems import Problem
from experiments.counting import temporary_bytes

Attend = Callable[..., Any]  # (query, key, value, *extra) -> output, and statistics if asked for


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A side, ready to run on one problem.

    Attributes:
        run: does the work and returns when it is done.
        result: the arrays of a run in our layout: the output, then the gradients by query, key and value if asked for.
        memory: compiled temporary memory in bytes; None where the library does not say.
    """

    run: Callable[[], Any]
    result: Callable[[], list[np.ndarray]]
    memory: int | None


@dataclasses.dataclass(frozen=True)
class Side:
    """A row of the table.

    Attributes:
        package: the distribution that has to be installed, named like its module.
        build: makes the contestant for a problem and a direction.
        short: it is run at short lengths only, since it takes long and another side shows the same.
    """

    package: str
    build: Callable[[Problem, str], Contestant]
    short: bool = False


def stands_in_the_way(side: Side, length: int, longest: int) -> str | None:
    """Why the side does not take part at a length, or None; `longest` is that of the sides that are run short."""
    if not installed(side.package):
        return f"absent: {side.package} is not installed"
    return f"left out above n = {longest}" if side.short and length > longest else None


def installed(package: str) -> bool:
    """Whether a library is there; nothing is imported."""
    return importlib.util.find_spec(package) is not None


def versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of the libraries behind these sides: timings depend on them."""
    return package_versions(SIDES[name].package for name in names)


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of these libraries, or "absent"; ours is known by its source."""
    packages = set(packages) - {"attn_jax"}
    return {name: metadata.version(name) if installed(name) else "absent" for name in sorted(packages)}


def contestant(attend: Attend, arguments: Sequence[Any], cotangent: Array, direction: str) -> Contestant:
    """A jitted JAX function as a contestant: forward, or forward and backward by query, key and value.

    Args:
        attend: `(query, key, value, *extra) -> output`.
        arguments: query, key, value, then the extra arrays or lazy objects.
        cotangent: the gradient at the output.
        direction: one of `DIRECTIONS`.
    """

    def both(cotangent: Array, query: Array, key: Array, value: Array, *extra: Any) -> tuple[Array, ...]:
        output, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *extra), query, key, value)
        return output, *pull(cotangent)

    forward = direction == "forward"
    compiled = jax.jit(attend if forward else both)
    given = tuple(arguments) if forward else (cotangent, *arguments)

    def run() -> Any:
        return jax.block_until_ready(compiled(*given))

    def result() -> list[np.ndarray]:
        return [np.asarray(x) for x in jax.tree.leaves(run())]

    return Contestant(run, result, temporary_bytes(compiled, *given))


def _in_jax(say: Callable[[Problem], tuple[Attend, Sequence[Any]]]) -> Callable[[Problem, str], Contestant]:
    def build(problem: Problem, direction: str) -> Contestant:
        attend, extra = say(problem)
        return contestant(attend, (*problem.inputs, *extra), problem.cotangent, direction)

    return build


def _ours(implementation: str | None) -> Callable[[Problem], tuple[Attend, Sequence[Any]]]:
    def say(problem: Problem) -> tuple[Attend, Sequence[Any]]:
        def attend(query: Array, key: Array, value: Array, bias: Any, mask: Any) -> Array:
            return attn_jax.dot_product_attention(
                query, key, value, bias, mask, is_causal=problem.case.causal, local_window_size=problem.window,
                implementation=implementation,
            )  # fmt: skip

        return attend, (problem.bias, problem.mask)

    return say


def _jax_nn(problem: Problem) -> tuple[Attend, Sequence[Any]]:
    def attend(query: Array, key: Array, value: Array, bias: Any, mask: Any) -> Array:
        causal, window = problem.case.causal, problem.window
        return jax.nn.dot_product_attention(query, key, value, bias, mask, is_causal=causal, local_window_size=window)

    return attend, (problem.bias, problem.visible if problem.mask is not None else None)


def _flax_nnx(problem: Problem) -> tuple[Attend, Sequence[Any]]:
    nnx = importlib.import_module("flax.nnx")
    masked = problem.case.windowed or problem.mask is not None  # it has no word for a window

    def attend(query: Array, key: Array, value: Array, bias: Any, mask: Any) -> Array:
        return nnx.dot_product_attention(query, key, value, bias, mask, is_causal=problem.case.causal and not masked)

    return attend, (problem.bias, problem.visible if masked else None)


def _tokamax(problem: Problem) -> tuple[Attend, Sequence[Any]]:
    tokamax = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["tokamax"])  # it would read our command line, whose flags it does not know

    def attend(query: Array, key: Array, value: Array, bias: Any, mask: Any) -> Array:
        return tokamax.dot_product_attention(
            query, key, value, bias, mask, is_causal=problem.case.causal, local_window_size=problem.window,
            implementation="xla_chunked",
        )  # fmt: skip

    return attend, (problem.bias, problem.visible if problem.mask is not None else None)


def _torch(problem: Problem, direction: str) -> Contestant:
    module = importlib.import_module("experiments.benchmarks.torch_side")  # imports PyTorch
    return module.contestant(problem, direction)


IMPLEMENTATIONS = {"blockwise": "blockwise", "dense": "dense", "default": None}  # ours, by the name of the side
SIDES = {
    **{name: Side("attn_jax", _in_jax(_ours(way)), short=way == "dense") for name, way in IMPLEMENTATIONS.items()},
    "jax.nn": Side("jax", _in_jax(_jax_nn)),
    "flax.nnx": Side("flax", _in_jax(_flax_nnx), short=True),  # it hands over to jax.nn
    "tokamax_chunked": Side("tokamax", _in_jax(_tokamax)),
    "torch_sdpa": Side("torch", _torch),
}
