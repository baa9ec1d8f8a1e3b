"""Every exact implementation against the NumPy oracle, forward and backward, on drawn problems.

`programs.py` holds the geometries and structures, `problems.py` draws the data, `conformance.py` is the table that an
implementation joins by one line. A draw that fails becomes a named example in `test_cases.py`.
"""

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import attn_jax
from tests import oracles
from tests.exact.conformance import IMPLEMENTATIONS, Implementation
from tests.exact.problems import Problem, arguments, problems
from tests.exact.programs import DIFFERENTIABLE, PLAIN_PROGRAMS, TABLE_ROWS, Program, programs

PROGRAMS = programs(per_geometry=2) + PLAIN_PROGRAMS
DRAWS = 8
SLOW_PROGRAMS = programs(per_geometry=6)
SLOW_DRAWS = 21


def able(programs):
    return [(i, p) for i in IMPLEMENTATIONS for p in programs if i.refuses(p) is None]


def names(pairs):
    return [f"{implementation}-{program}" for implementation, program in pairs]


@pytest.mark.parametrize(("implementation", "program"), able(PROGRAMS), ids=names(able(PROGRAMS)))
def test_agrees_with_the_oracle(implementation, program):
    check_draws(implementation, program, DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "program"), able(SLOW_PROGRAMS), ids=names(able(SLOW_PROGRAMS)))
def test_agrees_with_the_oracle_in_long(implementation, program):
    check_draws(implementation, program, SLOW_DRAWS)


def test_enough_problems_are_drawn():
    """Each pair above asserts that it checked its draws: together these are the figures promised."""
    assert len(PROGRAMS) * DRAWS >= 300
    assert len(SLOW_PROGRAMS) * SLOW_DRAWS >= 3000
    for implementation in IMPLEMENTATIONS:
        assert sum(i is implementation for i, _ in able(PROGRAMS)) >= 5, implementation


REFUSED = [(i, p) for i in IMPLEMENTATIONS for p in PROGRAMS if i.refuses(p) is not None]


@pytest.mark.parametrize(("implementation", "program"), REFUSED, ids=names(REFUSED))
def test_what_it_cannot_do_raises_and_names_who_can(implementation, program):
    with program.x64():
        call = arguments(program, example(program).arrays)
        with pytest.raises(ValueError, match=rf"{implementation.name}.*dense"):
            attn_jax.dot_product_attention(**call, implementation=implementation.name)
        assert implementation.name in attn_jax.choose_implementation(**call).refused


@pytest.mark.parametrize("program", PROGRAMS[::4], ids=str)
def test_weights_agree_with_the_oracle(program):
    problem = example(program)
    forward = problem.oracle()

    @jax.jit
    def weights_of(arrays):
        call = arguments(program, arrays)
        del call["value"]
        return attn_jax.attention_weights(**call)

    with program.x64():
        weights = np.asarray(weights_of(problem.poisoned(forward)))
    assert weights.dtype == (np.float64 if program.dtype == "float64" else np.float32)
    assert weights.shape == forward.weights.shape
    assert (weights[~forward.visible] == 0).all()
    unit = 1e-12 if program.dtype == "float64" else 1e-5
    np.testing.assert_allclose(weights, forward.weights, rtol=0, atol=unit * logit_size(forward))


def check_draws(implementation: Implementation, program: Program, draws: int) -> None:
    checked = 0

    @settings(max_examples=draws, report_multiple_bugs=False)
    @given(problems(program))
    def agree(problem):
        nonlocal checked
        check(implementation, problem)
        checked += 1

    agree()
    assert checked >= draws
    # Values, lengths, offsets, positions and array masks are data: they never trace again.
    # Counted, not read from the cache of `jit`, which forgets when a process compiles thousands of programs.
    assert implementation.traces[program] == 1


def check(implementation: Implementation, problem: Problem) -> None:
    """Output, log-sum-exp and every gradient of one problem."""
    tolerance = implementation.tolerances[problem.program.dtype]
    forward = problem.oracle()
    output, logsumexp, gradients = implementation.run(problem, problem.poisoned(forward))

    assert output.dtype == problem.arrays["query"].dtype
    assert output.shape == forward.output.shape
    blind = ~problem.reached(forward)["query"]  # [*B, T, N]
    assert (output[blind] == 0).all()
    check_output(tolerance, output, forward)
    if logsumexp is not None:
        assert logsumexp.dtype == (np.float64 if output.dtype == np.float64 else np.float32)
        assert (logsumexp[blind] == -np.inf).all()
        seeing = np.abs(logsumexp[~blind] - forward.logsumexp[~blind])
        unit = 1e-12 if output.dtype == np.float64 else 1e-5
        assert (seeing <= unit * logit_size(forward)).all(), f"log-sum-exp is off by {seeing.max()}"

    d_logsumexp = None if logsumexp is None else problem.d_logsumexp
    exact = oracle_gradients(problem, forward, d_logsumexp)
    sizes = oracle_gradients(problem, forward, d_logsumexp, absolute=True)
    reached = problem.reached(forward)
    assert gradients.keys() == {name for name in problem.arrays if name in DIFFERENTIABLE}
    for name, gradient in gradients.items():
        assert gradient.dtype == problem.arrays[name].dtype, name
        if name in reached:
            assert (gradient[~reached[name]] == 0).all(), f"a gradient flows to unseen entries of {name}"
        check_gradient(tolerance, name, gradient, exact[name], sizes[name])


def check_output(tolerance, output, forward) -> None:
    error = np.abs(output.astype(np.float64) - forward.output)
    row = np.abs(forward.output).max(-1, initial=0, keepdims=True)
    rounded = tolerance.ulps * spacing(forward.output, output.dtype)
    limit = np.maximum(tolerance.entry * logit_size(forward), np.maximum(rounded, tolerance.row * row))
    assert (error <= limit).all(), f"output is off by {error.max()}, {(error / limit).max():.3g} times the limit"
    # No float32 sum is better than its logits: near 100 they are 8e-6 apart, so the norm is held to the same unit.
    distance, norm = np.linalg.norm(error), np.linalg.norm(forward.output)
    limit = tolerance.norm * norm * logit_size(forward) + underflow(output.dtype)
    assert distance <= limit, f"output is off by {distance / norm} of its norm"


def check_gradient(tolerance, name, gradient, exact, size) -> None:
    error = np.abs(gradient.astype(np.float64) - exact)
    largest, terms = np.abs(exact).max(initial=0), size.max(initial=0)
    rounded = tolerance.ulps * spacing(exact, gradient.dtype)
    noise = max(tolerance.gradient * largest, tolerance.rounding * terms, underflow(gradient.dtype))
    limit = np.maximum(noise, rounded)
    assert (error <= limit).all(), f"d {name} is off by {error.max()}, {(error / limit).max():.3g} times the limit"


def oracle_gradients(problem, forward, d_logsumexp, *, absolute=False):
    """The oracle's gradients, in the shapes of the arrays of the problem."""
    pulled = oracles.gradients(forward, problem.d_output, d_logsumexp, absolute=absolute)
    if "table" in problem.arrays:
        pulled["table"] = table_gradient(problem, forward, pulled["bias"])
    return {
        name: oracles.sum_to(pulled[name], x.shape) if name in ("bias", "scale", "sinks") else pulled[name]
        for name, x in problem.arrays.items()
        if name in DIFFERENTIABLE
    }


def table_gradient(problem, forward, d_bias):
    one_way = problem.program.structure.bias == "one-way buckets"
    buckets = oracles.relative_bucket(
        forward.query_positions[..., :, None],
        forward.key_positions[..., None, :],
        buckets=TABLE_ROWS,
        bidirectional=not one_way,
        max_distance=12 if one_way else 16,
    )
    table = np.zeros(problem.arrays["table"].shape)
    np.add.at(table, buckets.reshape(-1), np.moveaxis(d_bias, -3, -1).reshape(-1, table.shape[1]))
    return table


def logit_size(forward) -> float:
    """The unit of absolute errors: rounding grows with the largest logit."""
    largest = np.abs(forward.logits[forward.visible]).max(initial=0)
    return max(1.0, largest / 16)


def underflow(dtype) -> float:
    return float(jax.numpy.finfo(dtype).tiny)


def spacing(x, dtype):
    """One unit in the last place of `dtype` at `x`."""
    if dtype in (np.float32, np.float64):
        return np.spacing(np.abs(x).astype(dtype)).astype(np.float64)
    info = jax.numpy.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def example(program: Program) -> Problem:
    """One problem of a program, always the same."""
    found = []

    @settings(max_examples=2)
    @given(problems(program))
    def keep(problem):
        found.append(problem)

    keep()
    return found[-1]
