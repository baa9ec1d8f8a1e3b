"""Checks of what numbers do: large scores, few bits, long rows, odd shapes, and gradients."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.audit.context import TOLERANCE, Arrays, Audit, NotApplicable, Registered, check, worst
from attn_jax.audit.report import Finding
from attn_jax.audit.subject import Refused, WrongOutput

AFTER = ("scale of the scores",)
OFF = 10 * TOLERANCE


@check("large scores", "softmax", after=AFTER)
def large_scores(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Scores far beyond what exp holds give weights all the same."""
    given = audit.problem(size=30.0)
    found = audit.subject(*given)
    low = given._replace(query=np.full_like(given.query, 30.0), key=np.full_like(given.key, -30.0))
    if not (np.isfinite(found).all() and np.isfinite(audit.subject(*low)).all()):
        yield own.fault(
            "Scores of some thousands give an output that is not finite.",
            "Subtract the row's largest score before exp.",
        )
    elif (off := worst(found - audit.answer(given))) > 0.05:
        yield own.fault(f"With scores of some thousands the output is off by {off:.2g}.", "Are scores clipped?")


@check("few bits", "numerics", after=("large scores",))
def few_bits(audit: Audit, own: Registered) -> Iterator[Finding]:
    """In half precision, sums are float32: 4,096 equal weights sum to 1."""
    for dtype in (jnp.bfloat16, jnp.float16):
        name, given = jnp.dtype(dtype).name, audit.problem(length=64, size=2.0)
        rounded = Arrays(*(jnp.asarray(x, dtype) for x in given))
        try:
            found = audit.subject.raw(*rounded)
        except (Refused, WrongOutput) as error:
            yield own.difference(f"It takes no {name}: {error}.", "Hand float32 over.")
            continue
        sums = _long_sums(audit, dtype)
        if sums is not None and worst(sums - 1) > 0.01:
            yield own.fault(
                f"4,096 equal {name} weights, and values 1, give {sums.min():.4g} to {sums.max():.4g}.",
                "Sum weights, and products with values, in float32: bfloat16 stops at 256, float16 at 2,048.",
            )
            return
        if found.dtype != dtype:
            yield own.difference(f"{name} inputs give {found.dtype} outputs.", "Outputs have the query's dtype.")
        exact = audit.answer(Arrays(*(np.asarray(x, np.float32) for x in rounded)))
        off = worst(np.asarray(found, np.float64) - exact)
        allowed = 6 * float(jnp.finfo(dtype).eps) * float(np.abs(exact).max())
        if off > allowed:
            yield own.fault(
                f"{name} outputs are off by {off:.2g}, where rounding the result alone allows {allowed:.2g}.",
                "Compute logits and softmax in float32, and round the output once.",
            )
            return


def _long_sums(audit: Audit, dtype: Any) -> Any:
    """What 4,096 equal weights make of values of 1; None where not all are seen, or so many keys are refused."""
    if audit.expected.causal or audit.expected.window:
        return None
    key = jnp.zeros((1, 4096, 1, 8), dtype)
    for length in (4, 4096):  # some take as many queries as keys alone
        try:
            return np.asarray(audit.subject.raw(key[:, :length], key, jnp.ones_like(key)), np.float64)
        except (Refused, WrongOutput):
            continue
    return None


@check("float64", "numerics", after=AFTER)
def float64(audit: Audit, own: Registered) -> Iterator[Finding]:
    """With x64 on, float64 arrays are computed in float64."""
    with jax.enable_x64(True):
        given = Arrays(*(np.asarray(x, np.float64) for x in audit.problem()))
        try:
            found = audit.subject(*given)
        except (Refused, WrongOutput) as error:
            yield own.difference(f"float64 arrays are refused: {error}.", "Hand float32 over.")
            return
    off = worst(found - audit.answer(given))
    fitted = audit.scale(8) != audit.expected.factor(8)  # to float32 weights, and no better than they are
    if off > (1e-6 if fitted else 1e-9):
        kind = own.difference if off < 1e-3 else own.fault
        yield kind(f"float64 outputs are off by {off:.2g}: computed in less.", "For references use another function.")


@check("other shapes", "output", after=AFTER)
def shapes(audit: Audit, own: Registered) -> Iterator[Finding]:
    """One query, one key, more keys than queries, values of another width, lengths that no block divides."""
    cases: dict[str, tuple[dict[str, int], str]] = {
        "T = 3, S = 7": ({"length": 3, "keys": 7}, "mask"),
        "T = 7, S = 3": ({"length": 7, "keys": 3}, "mask"),
        "T = S = 1": ({"length": 1}, "numerics"),
        "a value width of 5 beside a head width of 8": ({"value_width": 5}, "values"),
        "T = S = 256": ({"length": 256, "batch": 1}, "mask"),  # which blocks divide
        "T = S = 197": ({"length": 197, "batch": 1}, "mask"),
        "T = 130, S = 257": ({"length": 130, "keys": 257, "batch": 1}, "mask"),
        "one head of width 32": ({"heads": 1, "width": 32}, "heads"),
    }
    if audit.scale(8) != audit.expected.factor(8):
        del cases["one head of width 32"]  # the scale that was found may depend on the number of heads
    refused = []
    for what, (sizes, link) in cases.items():
        given = audit.problem(**sizes)
        try:
            off = audit.error(given)
        except (Refused, WrongOutput) as error:
            refused.append(f"{what} ({error})")
            continue
        if off > OFF and what == "T = S = 256":
            sums = audit.subject(*given._replace(value=np.ones_like(given.value)))
            if worst(sums - 1) > OFF:
                yield own.fault(
                    f"With {what} values of 1 come out as {sums.min():.4g} to {sums.max():.4g}.",
                    "Where keys come in blocks and the maximum rises, denominator and output are both rescaled.",
                    link="softmax",
                )
                return
        if off > OFF:
            yield own.fault(
                f"With {what} the output is off by {off:.2g}.",
                "Does padding to a multiple of a block take part, or a size that is taken for another?",
                link=link,
            )
            return
    if refused:
        yield own.difference(f"Refused: {'; '.join(refused)}.", "Other shapes are a convention, if they raise.")


@check("gradients", "gradients", after=AFTER)
def gradients(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Derivatives along random directions are those of the function itself."""
    given = Arrays(*(jnp.asarray(x) for x in audit.problem()))
    rng = np.random.default_rng(8)
    cotangent = jnp.asarray(rng.standard_normal(given.query.shape), jnp.float32)

    def objective(arrays: Arrays) -> Any:
        output = audit.subject.traced(*arrays)
        output = output[0] if isinstance(output, (tuple, list)) else output
        return jnp.sum(output * cotangent)

    try:
        gradient = jax.grad(objective)(given)
    except Exception as error:
        raise NotApplicable(f"it cannot be differentiated by JAX ({type(error).__name__})") from error
    for name in Arrays._fields:
        direction = rng.standard_normal(getattr(given, name).shape).astype(np.float32)
        told = float(np.sum(np.asarray(getattr(gradient, name), np.float64) * direction))
        exact = _along(audit, given, name, direction, np.asarray(cotangent, np.float64))
        size = float(np.linalg.norm(np.asarray(getattr(gradient, name), np.float64))) + abs(exact)
        if not np.isfinite(told) or abs(told - exact) > 0.01 * size:
            yield own.fault(
                f"The derivative by the {name} along a random direction is {told:.4g} where {exact:.4g} was expected.",
                "Check the custom derivative, and every stop_gradient.",
            )
            return
    yield from _of_options(audit, own, given)
    if "mask" in audit.subject.options:
        yield from _behind_masks(audit, own, given)


def _along(audit: Audit, given: Arrays, name: str, direction: Any, cotangent: Any) -> float:
    """The derivative of the expected output, by a difference in float64."""

    def value(step: float) -> float:
        moved = np.asarray(getattr(given, name), np.float64) + step * direction
        arrays = Arrays(*(np.asarray(x, np.float64) for x in given))._replace(**{name: moved})
        return float(np.sum(audit.answer(arrays) * cotangent))

    return (value(1e-5) - value(-1e-5)) / 2e-5


def _of_options(audit: Audit, own: Registered, given: Arrays) -> Iterator[Finding]:
    """The derivatives by a bias and by sinks, which are learned where there are any."""
    rng = np.random.default_rng(9)
    wide = Arrays(*(np.asarray(x, np.float64) for x in given))
    for name, shape in (("bias", (2, 4, 8, 8)), ("sinks", (4,))):
        if name not in audit.subject.options:
            continue
        at, direction = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        cotangent = rng.standard_normal(given.query.shape)

        def objective(x: Any, name: str = name, cotangent: Any = cotangent) -> Any:
            output = audit.subject.traced(*given, **{name: x})
            output = output[0] if isinstance(output, (tuple, list)) else output
            return jnp.sum(output * jnp.asarray(cotangent, output.dtype))

        def value(step: float, name: str = name, at: Any = at, direction: Any = direction, c: Any = cotangent) -> float:
            return float(np.sum(audit.answer(wide, **{name: np.float64(at) + step * direction}) * c))

        told = float(np.sum(np.asarray(jax.grad(objective)(jnp.asarray(at)), np.float64) * direction))
        exact = (value(1e-5) - value(-1e-5)) / 2e-5
        if not np.isfinite(told) or abs(told - exact) > 0.02 * abs(exact) + 1e-4:
            yield own.fault(
                f"The derivative by the {name} along a random direction is {told:.4g} where {exact:.4g} was expected.",
                "Check the custom derivative, and every stop_gradient.",
            )
            return


def _behind_masks(audit: Audit, own: Registered, given: Arrays) -> Iterator[Finding]:
    """A row that sees nothing, and large scores behind a mask, leave gradients finite."""
    mask = np.ones((2, 4, 8, 8), bool)
    mask[..., 6:] = False
    large = given._replace(key=given.key.at[:, 6:].set(1e4))

    def objective(arrays: Arrays, mask: Any) -> Any:
        output = audit.subject.traced(*arrays, mask=mask)
        output = output[0] if isinstance(output, (tuple, list)) else output
        return jnp.sum(output**2)

    found = jax.grad(objective)(large, mask)
    if not all(np.isfinite(np.asarray(x)).all() for x in found):
        yield own.fault(
            "Large scores behind a mask make gradients NaN.",
            "where() hides what exp has overflowed in the forward pass, not in the backward one: mask before exp.",
        )
        return
    mask = np.ones((2, 4, 8, 8), bool)
    mask[:, :, 3] = False
    found = jax.grad(objective)(given, mask)
    if not all(np.isfinite(np.asarray(x)).all() for x in found):
        yield own.fault(
            "A query that sees nothing makes gradients NaN.", "Put a finite number in its place before the softmax."
        )


@check("under jit", "numerics", after=AFTER)
def jitted(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Compiled it gives the same, and equal shapes share one trace."""
    given, traces = Arrays(*(jnp.asarray(x) for x in audit.problem())), []

    def run(query: Any, key: Any, value: Any) -> Any:
        traces.append(1)
        return audit.subject.traced(query, key, value)

    compiled = jax.jit(run)
    try:
        found = compiled(*given)
    except Exception as error:
        raise NotApplicable(f"it cannot be traced by JAX ({type(error).__name__})") from error
    found = found[0] if isinstance(found, (tuple, list)) else found
    if (off := worst(np.asarray(found, np.float64) - audit.subject(*given))) > TOLERANCE:
        yield own.fault(f"Under jit the output differs by {off:.2g}.", "What does it decide by values?")


CHECKS = (large_scores, few_bits, float64, shapes, gradients, jitted)
