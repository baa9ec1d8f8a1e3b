"""The audit of a whole attention module: what its output depends on, and whether its parameters explain it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from attn_jax import checks
from attn_jax.audit import roles
from attn_jax.audit.context import Expectation, worst
from attn_jax.audit.report import AuditReport, Finding, Outcome
from attn_jax.diagnostics import head_weights, reference

Array = NDArray[np.float64]
OFF, CHANGED, LENGTH = 1e-3, 1e-5, 8
ALIKE = 1e-8  # 1 − the cosine of heads that are one
DEAD = 1e-4  # of the median head


class _Skip(Exception):
    """A check cannot say anything; the message says why."""


class _Case:
    """One module under audit."""

    def __init__(
        self,
        module: nnx.Module,
        width: int,
        call: Callable[..., Any],
        decode: Callable[..., Any] | None,
        expect: Expectation,
        found: roles.Projections,
    ) -> None:
        self.module, self.width, self.expect, self.found = module, width, expect, found
        self._call, self._decode = call, decode
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((2, LENGTH, width)).astype(np.float32)
        self.other = rng.standard_normal((2, LENGTH, width)).astype(np.float32)

    def run(self, x: Any) -> Array:
        """The output in float64."""
        output = self._call(self.module, jnp.asarray(x))
        output = output[0] if isinstance(output, (tuple, list)) else output
        output = np.asarray(output, np.float64)
        if output.shape != np.shape(x):
            raise ValueError(f"it returned shape {output.shape} where {np.shape(x)}, [B, T, D], was expected")
        return output

    def decoded(self, x: Any) -> Array:
        """The same, token by token."""
        if self._decode is None:
            raise _Skip("no decode= was given")
        return np.asarray(self._decode(self.module, jnp.asarray(x)), np.float64)

    def seen(self) -> NDArray[np.bool_]:
        window = self.expect.window
        assert not isinstance(window, int)
        return reference.visible(LENGTH, LENGTH, causal=self.expect.causal, window=window)

    def answer(self, x: Any, scale: float, *, turned: str | None) -> Array:
        """What its projections give with a scale and rotary positions."""
        query, key, value = (self.found.heads(role, np.asarray(x, np.float64)) for role in roles.ROLES[:3])
        if turned is not None:
            interleaved = turned == "rotary_interleaved"
            base = self.expect.rotary_base
            query, key = (reference.rotate(y, base=base, interleaved=interleaved) for y in (query, key))
        logits = scale * reference.scores(query, key)
        mask = np.broadcast_to(self.seen(), logits.shape)
        weights = reference.weights(logits, mask, cap=self.expect.logits_soft_cap)
        return self.found.merged(reference.outputs(weights, value))


Check = Callable[[_Case], Iterator[Finding]]


def _fault(link: str, check: str, evidence: str, advice: str) -> Finding:
    return Finding("fault", link, check, evidence, advice)


def _runs(case: _Case) -> Iterator[Finding]:
    try:
        found = case.run(case.x)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield _fault("output", "runs", f"Called with x {case.x.shape}, it failed: {line}", "Say how: call=.")
        return
    if not np.isfinite(found).all():
        yield _fault("softmax", "runs", "An ordinary output is not finite.", "Look for an empty row, or an overflow.")


def _same_twice(case: _Case) -> Iterator[Finding]:
    first = case.run(case.x)
    moved = max(worst(case.run(case.x) - first) for _ in range(3))
    if moved > 0:
        yield _fault(
            "dropout", "same twice", f"Equal calls in evaluation differ by {moved:.2g}.", "Switch dropout off there."
        )


def _items_apart(case: _Case) -> Iterator[Finding]:
    mixed = np.concatenate([case.x[:1], 50 * case.other[1:]])
    if (moved := worst(case.run(mixed)[0] - case.run(case.x)[0])) > OFF:
        yield _fault(
            "batch",
            "items apart",
            f"Item 0 moves by {moved:.2g} when item 1 changes.",
            "What runs over the batch axis?",
        )


def _tokens_seen(case: _Case) -> Iterator[Finding]:
    """Which tokens each output reads."""
    base, reached = case.run(case.x), np.zeros((LENGTH, LENGTH), bool)
    for token in range(LENGTH):
        changed = case.x.copy()
        changed[:, token] = case.other[:, token]
        reached[:, token] = np.abs(case.run(changed) - base).max(axis=(0, 2)) > CHANGED
    seen = case.seen()
    if (reached != seen).any():
        row = int(np.argwhere(reached != seen)[0][0])
        extra, lost = np.flatnonzero(reached[row] & ~seen[row]), np.flatnonzero(~reached[row] & seen[row])
        said = [f"reads tokens {extra.tolist()} too many"] * bool(extra.size) + [f"not tokens {lost.tolist()}"] * bool(
            lost.size
        )
        yield _fault(
            "mask", "tokens seen", f"Output {row} {' and '.join(said)}.",
            "Check the mask; one that is meant is said by Expectation(causal=..., window=...).",
        )  # fmt: skip


def _order(case: _Case) -> Iterator[Finding]:
    """Positions: whether the order of tokens matters, and not by way of the values."""
    same = np.broadcast_to(case.x[:, :1], case.x.shape)
    spread = np.ptp(case.run(same), axis=1).max()
    if spread > OFF:
        yield _fault(
            "values", "positions in values",
            f"Equal tokens come out up to {spread:.2g} apart: positions enter the values.",
            "Positions belong to queries and keys; added to the input, they reach the values, too.",
        )  # fmt: skip
        return
    if case.expect.causal or case.expect.window:
        raise _Skip("a mask by position is meant")
    turned = np.random.default_rng(7).permutation(LENGTH)
    moved = worst(case.run(case.x[:, turned]) - case.run(case.x)[:, turned])
    if case.expect.positions is None and moved > OFF:
        yield _fault(
            "positions", "order of the tokens", f"Outputs move by {moved:.2g} when tokens are put in another order.",
            "Positions that are meant are said by Expectation(positions=...).",
        )  # fmt: skip
    elif case.expect.positions is not None and moved < OFF:
        yield _fault(
            "positions", "order of the tokens", "The order of tokens does not matter, though positions were expected.",
            "Turn queries and keys by their positions.",
        )  # fmt: skip


def _projections(case: _Case) -> Iterator[Finding]:
    """Untied projections, and an output projection that mixes heads."""
    weights = case.found.weights
    if not weights:
        raise _Skip("no projections were found: say parameters=")
    for one, other in head_weights.equal_projections(weights):
        yield _fault(
            "projections", "projections apart", f"The weights of {one} and {other} are equal.",
            "Tied projections make scores symmetric: give each its own.",
        )  # fmt: skip
    kind = head_weights.mixing(weights["out"]) if "out" in weights else "full"
    if kind == "identity":
        yield _fault("output", "heads are mixed", "The output projection is the identity.", "Is it trained?")
    elif kind == "blocks":
        yield _fault(
            "output", "heads are mixed", "The output projection keeps each head to its own dimensions.",
            "A full matrix lets heads write to all of them.",
        )  # fmt: skip


def _heads(case: _Case) -> Iterator[Finding]:
    """Heads that are alive, and different."""
    if not case.found.complete:
        raise _Skip("not all projections were found: say parameters=")
    q, k, v, o = (case.found.weights[role] for role in roles.ROLES)
    sizes = head_weights.fetch_norms(v, o)
    dead = np.flatnonzero(sizes < DEAD * np.median(sizes)).tolist()
    if dead:
        yield _fault("heads", "heads alive", f"Heads {dead} write nothing.", "Were they pruned, or is W_V or W_O 0?")
    match, fetch = head_weights.alike(q, k, v, o)
    for one, other in np.argwhere(np.triu(np.minimum(match, fetch) > 1 - ALIKE, 1)).tolist():
        yield _fault(
            "heads", "heads differ", f"Heads {one} and {other} are the same function.",
            "Draw each head apart; copies stay copies under training.",
        )  # fmt: skip


def _heads_cut(case: _Case) -> Iterator[Finding]:
    """Heads are cut by an axis of their own: not by a reshape that gives a head some of the tokens."""
    if not case.found.complete or len({case.found.weights[role].shape for role in roles.ROLES[:3]}) > 1:
        raise _Skip("not all projections were found, or heads are grouped")
    output, x = case.run(case.x), np.asarray(case.x, np.float64)
    three = [case.found.heads(role, x) for role in roles.ROLES[:3]]  # [B, T, N, H]
    batch, length, heads, width = three[0].shape
    query, key, value = (np.swapaxes(y.reshape(batch, heads, length, width), 1, 2) for y in three)
    mask = np.broadcast_to(case.seen(), (batch, heads, length, length))
    logits = case.expect.factor(width) * reference.scores(query, key)
    fetched = reference.outputs(reference.weights(logits, mask), value)
    back = np.swapaxes(fetched, 1, 2).reshape(batch, length, heads, width)
    for merged in (fetched, back):
        if worst(case.found.merged(merged) - output) < OFF:
            yield _fault(
                "heads", "heads are cut", "Heads are cut by a reshape to [B, N, T, H], which gives a head some tokens.",
                "Reshape to [B, T, N, H], then exchange the two axes.",
            )  # fmt: skip
            return


def _explained(case: _Case) -> Iterator[Finding]:
    """Whether the projections, a scale and the positions that were meant give the output."""
    tied = "key" not in case.found.weights and {"query", "value", "out"} <= set(case.found.weights)
    if tied:
        weights = {**case.found.weights, "key": case.found.weights["query"]}
        case.found = dataclasses.replace(case.found, weights=weights)
    if not case.found.complete:
        raise _Skip("not all projections were found: say parameters=")
    output, width = case.run(case.x), case.found.weights["query"].shape[-1]
    size = np.linalg.norm(output)

    def misfit(scale: float, turned: str | None) -> float:
        return float(np.linalg.norm(case.answer(case.x, scale, turned=turned) - output) / size)

    meant = case.expect.factor(width)
    if misfit(meant, case.expect.positions) < OFF:
        if tied:
            yield _fault(
                "projections", "explained by its parameters", "Keys are made by the weight of the queries.",
                "Tied projections make scores symmetric: give each its own.",
            )  # fmt: skip
        return
    grid = np.exp(np.linspace(np.log(1e-4), np.log(30), 120))
    for turned in dict.fromkeys((case.expect.positions, None, "rotary", "rotary_interleaved")):
        if turned is not None and width % 2:
            continue
        best = min(grid, key=lambda scale, turned=turned: misfit(scale, turned))
        for step in (0.05, 0.01, 0.002, 0.0005):
            best = min(
                (best * (1 + step * i) for i in range(-6, 7)), key=lambda scale, turned=turned: misfit(scale, turned)
            )
        if misfit(best, turned) < 2 * OFF:
            if turned != case.expect.positions:
                yield _fault(
                    "positions", "explained by its parameters", f"Positions are {turned}, not {case.expect.positions}.",
                    "Say what is meant by Expectation(positions=...).",
                )  # fmt: skip
            if abs(best / meant - 1) > 0.01:
                yield _fault(
                    "scale", "explained by its parameters",
                    f"The effective scale is {best:.4g} where {meant:.4g} was expected, of heads of width {width}.",
                    "Divide q·k by √H once, H the width of a head.",
                )  # fmt: skip
            return
    yield _fault(
        _where(case, output), "explained by its parameters",
        f"The projections {', '.join(case.found.names.values())} with any scale leave "
        f"{min(misfit(s, case.expect.positions) for s in grid):.0%} of the output unexplained.",
        "How are heads split, grouped and merged, and is a bias left out?",
    )  # fmt: skip


def _where(case: _Case, output: Array) -> str:
    """The link that is broken where no scale explains: by one token alone, which has but values and output."""
    alone = case.run(case.x[:, :1])
    value = case.found.heads("value", np.asarray(case.x[:, :1], np.float64))
    group = case.found.weights["query"].shape[1] // value.shape[2]
    exact = case.found.merged(np.repeat(value, group, axis=2))
    if worst(alone - exact) < OFF * max(worst(exact), 1.0):
        return "projections"
    tiled = case.found.merged(np.tile(value, (1, 1, group, 1)))
    return "heads" if worst(alone - tiled) < OFF else "output"


def _decodes(case: _Case) -> Iterator[Finding]:
    """Token by token it gives what one call gives."""
    off = np.abs(case.decoded(case.x) - case.run(case.x)).max(axis=(0, 2))
    if off.max() > OFF:
        rows = np.flatnonzero(off > OFF).tolist()
        yield _fault(
            "cache", "decoding", f"Token by token rows {rows} are off by up to {off.max():.2g}.",
            "Where do new keys go, which positions do they get, and what does the mask see?",
        )  # fmt: skip


def _gradients(case: _Case) -> Iterator[Finding]:
    """Every projection gets a gradient."""
    graphdef, params, rest = nnx.split(case.module, nnx.Param, ...)

    def objective(params: Any) -> Any:
        output = case._call(nnx.merge(graphdef, params, rest), jnp.asarray(case.x))
        output = output[0] if isinstance(output, (tuple, list)) else output
        return jnp.sum(jnp.sin(3 * output))

    try:
        gradient = jax.grad(objective)(params)
    except Exception as error:
        raise _Skip(f"it cannot be differentiated ({type(error).__name__})") from error
    flat = {".".join(map(str, path)): np.asarray(roles._read(x)) for path, x in nnx.to_flat_state(gradient)}
    for role, path in case.found.names.items():
        if not np.isfinite(flat[path]).all():
            yield _fault("gradients", "gradients", f"The gradient of {path} is not finite.", "Mask before exp.")
        elif not flat[path].any():
            yield _fault(
                "gradients", "gradients", f"No gradient reaches {path}, the weight of {role}.", "A stop_gradient?"
            )


BATTERY: Mapping[str, Check] = {
    "runs": _runs,
    "same twice": _same_twice,
    "items apart": _items_apart,
    "tokens seen": _tokens_seen,
    "heads are cut": _heads_cut,
    "order of the tokens": _order,
    "projections apart": _projections,
    "heads": _heads,
    "explained by its parameters": _explained,
    "decoding": _decodes,
    "gradients": _gradients,
}
# What a check stands on: it is not run where one of these found a fault.
_CALLS = ("runs", "same twice", "items apart")
AFTER = {
    "runs": (),
    "tokens seen": _CALLS,
    "heads are cut": _CALLS,
    "order of the tokens": (*_CALLS, "tokens seen", "heads are cut"),
    "explained by its parameters": (*_CALLS, "tokens seen", "heads are cut", "order of the tokens"),
    "decoding": (*_CALLS, "tokens seen"),
}
_STANDARD = Expectation()


def audit_module(
    module: nnx.Module,
    *,
    width: int,
    expect: Expectation = _STANDARD,
    call: Callable[..., Any] | None = None,
    decode: Callable[..., Any] | None = None,
    parameters: Mapping[str, str] | None = None,
    num_heads: int | None = None,
) -> AuditReport:
    """Audits a self-attention module: its dependencies, its projections, and whether these explain its output.

    Args:
        module: an NNX module, in evaluation.
        width: D, of the inputs `[B, T, D]` that it maps to `[B, T, D]`.
        expect: what its author meant beside standard attention: a causal mask, rotary positions, another scale.
        call: `call(module, x)`, where `module(x)` is not how it is called.
        decode: `decode(module, x)`, which gives the outputs of `x` token by token from a cache.
        parameters: the paths of the weights of "query", "key", "value" and "out", where names do not tell.
        num_heads: N, where weights are matrices `[D, N H]` without an axis of heads.

    Returns:
        An `AuditReport`.

    Raises:
        ValueError, TypeError: on arguments of the audit itself.

    Reference values are computed in float64 from the module's own parameters.

    >>> from flax import nnx
    >>> layer = nnx.MultiHeadAttention(num_heads=4, in_features=16, decode=False, rngs=nnx.Rngs(0))
    >>> audit_module(layer, width=16).ok
    True
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be a flax.nnx.Module, got {type(module).__name__}")
    if not isinstance(expect, Expectation):
        raise TypeError(f"expect must be an Expectation, got {type(expect).__name__}")
    width = checks.positive_int("width", width)
    found = roles.find(module, width, parameters or {}, num_heads)
    case = _Case(module, width, call or (lambda module, x: module(x)), decode, expect, found)
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    broken: set[str] = set()
    for name, check in BATTERY.items():
        cause = next((other for other in AFTER.get(name, ("runs",)) if other in broken), None)
        if cause is not None:
            outcomes.append(Outcome(name, "not applicable", f"after {cause}"))
            continue
        try:
            one = list(check(case))
        except _Skip as error:
            outcomes.append(Outcome(name, "not applicable", str(error)))
            continue
        findings += one
        broken |= {name} if one else set()
        outcomes.append(Outcome(name, "failed" if one else "passed"))
    return AuditReport(type(module).__name__, tuple(outcomes), tuple(findings))
