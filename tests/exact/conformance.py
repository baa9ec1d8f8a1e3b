"""The table of implementations: a new one joins by one line, and says what it refuses and how exact it is."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import attn_jax
from tests.exact.problems import Problem, arguments
from tests.exact.programs import DIFFERENTIABLE, Program, Structure, programs


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far from the oracle a result may be.

    Attributes:
        entry: on one entry, in units of max(1, largest logit / 16).
        norm: on the whole output, relative to its norm, in the same units.
        ulps: of the output dtype, on one entry: the alternative to `row` where outputs are rounded.
        row: on one entry, relative to the largest of its row.
        gradient: relative to the largest entry of the tensor.
        rounding: on a gradient, relative to the sum of the absolute terms: below it lies only noise of the dtype.
    """

    entry: float
    norm: float
    gradient: float
    rounding: float
    ulps: float = 0.0
    row: float = 0.0


FLOAT32 = Tolerance(entry=1e-5, norm=2e-6, gradient=1e-5, rounding=1e-6)
FLOAT64 = Tolerance(entry=1e-12, norm=1e-12, gradient=1e-12, rounding=1e-14)
ROUNDED = Tolerance(entry=0, norm=2**-7, ulps=2, row=1e-6, gradient=1e-5, rounding=1e-6)
# `jax.nn` and the kernel round weights to bfloat16 and float16 before it fetches the values, and again on the way back.
ROUNDED_WEIGHTS = Tolerance(entry=1e-2, norm=2**-6, gradient=2e-2, rounding=1e-2, ulps=2)
EXACT = {"float32": FLOAT32, "float64": FLOAT64, "bfloat16": ROUNDED, "float16": ROUNDED}


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Implementation:
    """One row of the table: what it is called, what it takes, and how exact it is.

    Attributes:
        name: as `dot_product_attention` takes it.
        refuses: why it cannot run a program, or None where it can; then it must raise, and name one that can.
        tolerances: by dtype.
        residual: whether it also returns the log-sum-exp.
        asked: what stands for the name in the call, if it is more than the name.
        traces: how often each program was traced.
    """

    name: str
    refuses: Callable[[Program], str | None]
    tolerances: dict[str, Tolerance]
    residual: bool = True
    asked: Any = None
    traces: Counter = dataclasses.field(default_factory=Counter)

    def __str__(self):
        return self.name

    @functools.cache  # noqa: B019 - the table lives as long as the tests
    def compiled(self, program: Program):
        """The jitted forward and backward pass: (differentiable, other arrays, cotangents) -> results, gradients."""

        def run(differentiable, others, cotangents):
            self.traces[program] += 1

            def forward(differentiable):
                call = arguments(program, differentiable | others)
                return attn_jax.dot_product_attention(
                    **call, implementation=self.asked or self.name, return_residual=self.residual
                )

            results, pull = jax.vjp(forward, differentiable)
            return results, pull(cotangents)[0]

        return jax.jit(run)

    def run(self, problem: Problem, arrays: dict[str, np.ndarray]):
        """Output, log-sum-exp (None without) and gradients by name, as NumPy arrays."""
        differentiable = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
        others = {name: x for name, x in arrays.items() if name not in DIFFERENTIABLE}
        cotangents = (problem.d_output, problem.d_logsumexp) if self.residual else problem.d_output
        with problem.program.x64():
            results, gradients = self.compiled(problem.program)(differentiable, others, cotangents)
        output, logsumexp = results if self.residual else (results, None)
        gradients = {name: np.asarray(x) for name, x in gradients.items()}
        return np.asarray(output), None if logsumexp is None else np.asarray(logsumexp), gradients


def _xla_refuses(program: Program) -> str | None:
    """`jax.nn` means the same only where every query sees a key, every key is seen, and nothing differs in dtype."""
    g, s = program.geometry, program.structure
    taken = Structure(is_causal=s.is_causal, local_window_size=s.local_window_size)
    if s != taken:
        return "an argument beyond is_causal and local_window_size"
    if program.dtype == "float64":
        return "its softmax is float32"
    if g.V != g.H:
        return "V != H"
    visible = np.ones((g.T, g.S), bool)
    q, k = np.arange(g.T)[:, None], np.arange(g.S)
    if s.is_causal:
        visible &= k <= q
    if s.local_window_size is not None:
        left, right = s.local_window_size
        visible &= (k >= q - left) & (k <= q + right)
    return None if visible.any(0).all() and visible.any(1).all() else "empty rows or unseen keys"


def _pallas_refuses(program: Program) -> str | None:
    """The kernel takes what follows from numbers alone, in float32 and below; it is interpreted here."""
    s = program.structure
    arrays = s.bias or s.lengths or s.scale == "per head" or s.positions not in ("", "offset")
    if arrays or s.mask not in (None, "causal & window", "longformer"):
        return "arrays besides query, key, value and sinks"
    if s.positions:
        return "an offset that is traced"
    return "float64" if program.dtype == "float64" else None


IMPLEMENTATIONS = (
    Implementation("dense", lambda program: None, EXACT),
    # Tiles that divide nothing, and steps that hold a few heads or items.
    Implementation("blockwise", lambda program: None, EXACT, asked=attn_jax.Blockwise(queries=3, keys=4, entries=50)),
    Implementation("pallas", _pallas_refuses, EXACT | {"bfloat16": ROUNDED_WEIGHTS, "float16": ROUNDED_WEIGHTS}),
    Implementation(
        "xla", _xla_refuses, EXACT | {"bfloat16": ROUNDED_WEIGHTS, "float16": ROUNDED_WEIGHTS}, residual=False
    ),
)
# Those that take every argument.
GENERAL = [i for i in IMPLEMENTATIONS if all(i.refuses(program) is None for program in programs(per_geometry=6))]
