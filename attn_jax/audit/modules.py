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
from attn_jax.audit.module_case import LENGTH, Case, Skip, Turned
from attn_jax.audit.report import AuditReport, Finding, Outcome
from attn_jax.diagnostics import head_weights, reference

Array = NDArray[np.float64]
OFF, CHANGED = 1e-3, 1e-5
ALIKE = 1e-8  # 1 − the cosine of heads that are one
DEAD = 1e-4  # of the median head

Check = Callable[[Case], Iterator[Finding]]


def _fault(link: str, check: str, evidence: str, advice: str) -> Finding:
    return Finding("fault", link, check, evidence, advice)


def _runs(case: Case) -> Iterator[Finding]:
    try:
        found = case.run(case.x)
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield _fault("output", "runs", f"Called with x {case.x.shape}, it failed: {line}", "Say how: call=.")
        return
    if not np.isfinite(found).all():
        yield _fault("softmax", "runs", "An ordinary output is not finite.", "Look for an empty row, or an overflow.")


def _same_twice(case: Case) -> Iterator[Finding]:
    first = case.run(case.x)
    moved = max(worst(case.run(case.x) - first) for _ in range(3))
    if moved > 0:
        yield _fault(
            "dropout", "same twice", f"Equal calls in evaluation differ by {moved:.2g}.", "Switch dropout off there."
        )


def _items_apart(case: Case) -> Iterator[Finding]:
    mixed = np.concatenate([case.x[:1], 50 * case.other[1:]])
    if (moved := worst(case.run(mixed)[0] - case.run(case.x)[0])) > OFF:
        yield _fault(
            "batch",
            "items apart",
            f"Item 0 moves by {moved:.2g} when item 1 changes.",
            "What runs over the batch axis?",
        )


def _tokens_seen(case: Case) -> Iterator[Finding]:
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
        said = [f"reads tokens {extra.tolist()} too many"] * bool(extra.size)
        said += [f"does not read tokens {lost.tolist()}"] * bool(lost.size)
        yield _fault(
            "mask", "tokens seen", f"Output {row} {' and '.join(said)}.",
            "Check the mask; one that is meant is said by Expectation(causal=..., window=...).",
        )  # fmt: skip


def _order(case: Case) -> Iterator[Finding]:
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
        raise Skip("a mask by position is meant")
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


def _projections(case: Case) -> Iterator[Finding]:
    """Untied projections, and an output projection that mixes heads."""
    weights = case.found.weights
    if not weights:
        case.require_projections()
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


def _heads(case: Case) -> Iterator[Finding]:
    """Heads that are alive, and different."""
    case.require_projections()
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


def _heads_cut(case: Case) -> Iterator[Finding]:
    """Heads are cut by an axis of their own: not by a reshape that gives a head some of the tokens."""
    case.require_projections()
    if len({case.found.weights[role].shape for role in roles.ROLES[:3]}) > 1:
        raise Skip("heads are grouped")
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


def _explained(case: Case) -> Iterator[Finding]:
    """Whether the projections, a scale and the positions that were meant give the output."""
    tied = "key" not in case.found.weights and {"query", "value", "out"} <= set(case.found.weights)
    if tied:
        weights = {**case.found.weights, "key": case.found.weights["query"]}
        case.found = dataclasses.replace(case.found, weights=weights)
    case.require_projections()
    output, width = case.run(case.x), case.found.weights["query"].shape[-1]
    size = np.linalg.norm(output)

    def misfit(scale: float, turned: Turned, tiled: bool = False) -> float:
        return float(np.linalg.norm(case.answer(case.x, scale, turned, tiled=tiled) - output) / size)

    meant, kind = case.expect.factor(width), case.expect.positions
    if misfit(meant, (kind, kind)) < OFF:
        if tied:
            yield _fault(
                "projections", "explained by its parameters", "Keys are made by the weight of the queries.",
                "Tied projections make scores symmetric: give each its own.",
            )  # fmt: skip
        return
    if misfit(meant, (kind, kind), tiled=True) < OFF:
        yield _fault(
            "heads", "explained by its parameters", "Query head n reads key head n mod K.",
            "Repeat each key head for its group (repeat_interleave); tiling gives 0, 1, 0, 1.",
        )  # fmt: skip
        return
    grid = np.exp(np.linspace(np.log(1e-4), np.log(30), 120))
    rotary = ("rotary", "rotary_interleaved") if width % 2 == 0 else ()
    both = [(kind, kind), (None, None), *((one, one) for one in rotary)]
    half = [pair for one in rotary for pair in ((one, None), (None, one))]
    for turned in dict.fromkeys([*both, *half]):
        best = min(grid, key=lambda scale, turned=turned: misfit(scale, turned))
        for step in (0.05, 0.01, 0.002, 0.0005):
            best = min(
                (best * (1 + step * i) for i in range(-6, 7)), key=lambda scale, turned=turned: misfit(scale, turned)
            )
        if misfit(best, turned) < 2 * OFF:
            if turned != (kind, kind):
                query, key = turned
                found = str(query) if query == key else f"{query} of the queries and {key} of the keys"
                yield _fault(
                    "positions", "explained by its parameters", f"Positions are {found}, not {kind}.",
                    "Say what is meant by Expectation(positions=...)." if query == key else "Turn both alike.",
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
        f"{min(misfit(s, (kind, kind)) for s in grid):.0%} of the output unexplained.",
        "How are heads split, grouped and merged, and is a bias left out?",
    )  # fmt: skip


def _where(case: Case, output: Array) -> str:
    """The link that is broken where no scale explains: by one token alone, which has but values and output."""
    alone = case.run(case.x[:, :1])
    value = case.found.heads("value", np.asarray(case.x[:, :1], np.float64))
    group = case.found.weights["query"].shape[1] // value.shape[2]
    exact = case.found.merged(np.repeat(value, group, axis=2))
    if worst(alone - exact) < OFF * max(worst(exact), 1.0):
        return "projections"
    tiled = case.found.merged(np.tile(value, (1, 1, group, 1)))
    return "heads" if worst(alone - tiled) < OFF else "output"


def _decodes(case: Case) -> Iterator[Finding]:
    """Token by token it gives what one call gives."""
    off = np.abs(case.decoded(case.x) - case.run(case.x)).max(axis=(0, 2))
    if off.max() > OFF:
        rows = np.flatnonzero(off > OFF).tolist()
        yield _fault(
            "cache", "decoding", f"Token by token rows {rows} are off by up to {off.max():.2g}.",
            "Where do new keys go, which positions do they get, and what does the mask see?",
        )  # fmt: skip


def _gradients(case: Case) -> Iterator[Finding]:
    """Every projection gets a gradient."""
    graphdef, params, rest = nnx.split(case.module, nnx.Param, ...)

    def objective(params: Any) -> Any:
        output = case.call(nnx.merge(graphdef, params, rest), jnp.asarray(case.x))
        output = output[0] if isinstance(output, (tuple, list)) else output
        return jnp.sum(jnp.sin(3 * output))

    try:
        gradient = jax.grad(objective)(params)
    except Exception as error:
        raise Skip(f"it cannot be differentiated ({type(error).__name__})") from error
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
        parameters: where names do not tell, the paths of the weights of "query", "key", "value" and "out":
            `{"query": "wq.kernel"}`.
        num_heads: N, where weights are matrices `[D, N H]` without an axis of heads; keys and values may have fewer.

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
    num_heads = None if num_heads is None else checks.positive_int("num_heads", num_heads)
    found = roles.find(module, width, parameters or {}, num_heads)
    case = Case(module, width, call or (lambda module, x: module(x)), decode, expect, found)
    outcomes: list[Outcome] = []
    findings: list[Finding] = []
    broken: set[str] = set()
    for name, check in BATTERY.items():
        cause = next((other for other in AFTER.get(name, ("runs",)) if other in broken), None)
        if cause is not None:
            outcomes.append(Outcome(name, "not applicable", f"{cause} failed"))
            continue
        try:
            one = list(check(case))
        except Skip as error:
            outcomes.append(Outcome(name, "not applicable", str(error)))
            continue
        findings += one
        broken |= {name} if one else set()
        outcomes.append(Outcome(name, "failed" if one else "passed"))
    return AuditReport(type(module).__name__, tuple(outcomes), tuple(findings))
