"""Checks of the weights: read off the output with the identity as values, and explained by q·k."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from attn_jax.audit.context import TOLERANCE, Array, Arrays, Audit, NotApplicable, Registered, check, shares, worst
from attn_jax.audit.report import Finding
from attn_jax.diagnostics import name_scale, reference
from attn_jax.diagnostics.reference import Mask

EXPLAINED = 1e-3  # of the spread of log-weights that may stay unexplained
TINY = 1e-6  # a weight of uniform scores that is smaller is none


@check("rows sum to 1", "softmax", after=("groups in order",), answers=False)
def rows_sum(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Values of 1 come out as 1: each query spends its whole weight."""
    given = audit.problem()
    found = audit.subject(*given._replace(value=np.ones_like(given.value)))
    if worst(found - 1) > TOLERANCE:
        low, high = found.min(), found.max()
        if high - low < TOLERANCE:
            yield own.fault(
                f"Values of 1 come out as {found.mean():.4g} everywhere.",
                "The output is multiplied by a constant after the softmax: dropout's 1 / (1 − rate), or one scale too "
                "many?",
                link="output",
            )
        elif worst(found - 1) < 0.01:
            yield own.fault(
                f"Values of 1 come out as {low:.5g} to {high:.5g}: weights are rounded.",
                "Keep weights in float32 until values are summed.",
                link="numerics",
            )
        else:
            yield own.fault(
                f"Values of 1 come out as {low:.4g} to {high:.4g}: rows of weights do not sum to 1.",
                "Normalise over all keys of a query: is it a softmax, and over the last axis of [B, N, T, S]?",
            )


@check("sees what it should", "mask", after=("rows sum to 1",), answers=False)
def sees(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Without content, each query weighs the keys that it may see alike, and no others."""
    given = audit.problem()
    found = audit.read_weights(np.zeros_like(given.query), given.key)
    seen = audit.seen(8, 8)
    at: Mask = np.greater(found, TINY)  # [B, N, T, S]
    wrong = np.argwhere(np.not_equal(at, seen))
    if len(wrong):
        row = int(wrong[0][2])
        extra = np.flatnonzero(np.any(at[:, :, row], axis=(0, 1)) & ~seen[row]).tolist()
        lost = np.flatnonzero(~np.all(at[:, :, row], axis=(0, 1)) & seen[row]).tolist()
        counts = at[0, 0].sum(axis=-1)
        said = " and ".join(
            [f"sees keys {extra} that it must not"] * bool(extra) + [f"misses keys {lost}"] * bool(lost)
        )
        yield own.fault(
            f"Query {row} {said}; queries see {counts.tolist()} keys, not {seen.sum(axis=-1).tolist()}.",
            "Check the mask's direction and edges; one that is meant is said by Expectation(causal=..., window=...).",
        )
        return
    even = seen / seen.sum(axis=-1, keepdims=True)
    if (off := worst(found - even)) > TOLERANCE:
        squares = -(np.asarray(given.key, np.float64) ** 2).sum(axis=-1).swapaxes(1, 2)[:, :, None]  # [B, N, 1, S]
        one = fit(found, squares, np.broadcast_to(seen, found.shape))
        if one.misfit < EXPLAINED and (one.slope > 0).all():
            yield own.fault(
                "Queries of 0 weigh keys by −|k|²: the weights are a softmax of minus squared distances, not of q·k.",
                "Scores are q·k; the squared distance adds −|k|²/2 to them.",
                link="scale",
            )
            return
        again = audit.read_weights(np.zeros_like(given.query), audit.problem(seed=3).key)
        link, what = ("positions", "by position") if worst(found - again) < TOLERANCE else ("projections", "by key")
        yield own.fault(
            f"Queries of 0 weigh visible keys {what} by up to {off:.2g} off from alike.",
            "Is a position bias, or something of the keys alone, added to the scores?",
            link=link,
        )


class Fit(NamedTuple):
    """How scores explain log-weights.

    Attributes:
        slope: of each head, `[N]`.
        misfit: the share of the spread of log-weights that is left, over all heads.
    """

    slope: Array
    misfit: float


def fit(found: Array, scores: Array, seen: Mask) -> Fit:
    """Log-weights `[B, N, T, S]` on scores, up to a constant of each row."""
    counted = seen & (found > 0)
    logs = np.log(np.where(counted, found, 1))

    def centred(x: Array) -> Array:
        total = np.maximum(counted.sum(axis=-1, keepdims=True), 1)
        return np.where(counted, x - np.where(counted, x, 0).sum(axis=-1, keepdims=True) / total, 0)

    x, y = centred(np.broadcast_to(scores, found.shape)), centred(logs)
    power = (x * x).sum(axis=(0, 2, 3))
    slope = (x * y).sum(axis=(0, 2, 3)) / np.where(power == 0, 1, power)
    rest = y - slope[:, None, None] * x
    return Fit(slope, float(np.sqrt((rest**2).sum() / max((y**2).sum(), 1e-30))))


@check("scale of the scores", "scale", after=("sees what it should",), answers=False)
def scale(audit: Audit, own: Registered) -> Iterator[Finding]:
    """The weights are the softmax of c q·k, and c is the one that was meant, at two head widths."""
    fitted = {}
    for width in (8, 16):
        given = audit.problem(width=width, value_width=8 if width == 8 else None, size=width**-0.25)
        query, key = (audit.positioned(np.asarray(x, np.float64)) for x in (given.query, given.key))
        seen = np.broadcast_to(audit.seen(8, 8), (2, 4, 8, 8))
        found = _weights(audit, given, width)
        one = fit(found, reference.scores(query, key), seen)
        if one.misfit > EXPLAINED and audit.expected.logits_soft_cap is None:
            yield _explain(audit, own, given, found, seen, one)
            return
        fitted[width] = one.slope
    audit.explained = True
    expected = {width: audit.expected.factor(width) for width in fitted}
    off = {width: np.abs(slope / expected[width] - 1).max() for width, slope in fitted.items()}
    if audit.expected.logits_soft_cap is not None or max(off.values()) < 0.01:
        return
    width = 16
    c = float(np.median(fitted[width]))
    if c > 0:  # what follows is judged by the scale that was found, as a power of the width
        power = float(np.log2(c / np.median(fitted[8])))
        audit.scale = lambda head_width: c * (head_width / 16) ** power
    if np.ptp(fitted[width]) > 0.01 * abs(c):
        yield own.fault(
            f"The scale differs between heads: {shares(fitted[width])} at width 16, where {expected[width]:.4g} was "
            "expected.",
            "A learned temperature is part of the module, not of the function; or are heads scaled by their number?",
        )
        return
    named = "" if c <= 0 else _named(fitted)
    yield own.fault(
        f"The effective scale is {c:.4g} at head width 16 and {np.median(fitted[8]):.4g} at 8, where "
        f"{expected[16]:.4g} and {expected[8]:.4g} were expected{named}.",
        "Divide q·k by √H once, H the width of one head; another that is meant is said by Expectation(scale=...).",
    )


def _weights(audit: Audit, given: Arrays, width: int) -> Array:
    """Weights of 8 keys at this head width; at others than 8 values are padded to the width."""
    if width == 8:
        return audit.read_weights(given.query, given.key)
    identity = np.zeros((2, 8, 4, width), np.float32)
    identity[:, np.arange(8), :, np.arange(8)] = 1
    return np.moveaxis(audit.subject(given.query, given.key, identity), 2, 1)[..., :8]


def _named(fitted: dict[int, Array]) -> str:
    """The rule that fits at both widths."""
    c = {width: float(np.median(slope)) for width, slope in fitted.items()}
    if all(abs(value * width - 1) < 0.01 for width, value in c.items()):
        return ": 1/H, which is 1/√H applied twice"
    if abs(c[16] / c[8] - 1) < 0.01:
        return ": no scale at all" if abs(c[16] - 1) < 0.01 else ": one number for both widths"
    nearest = name_scale(c[16], 16)
    return f": nearest is {nearest.rule}, times {nearest.ratio:.3g}"


def _explain(audit: Audit, own: Registered, given: Arrays, found: Array, seen: Mask, plain: Fit) -> Finding:
    """Another score, or something added to it, that explains the weights; else what is left."""
    q, k = (np.asarray(x, np.float64) for x in (given.query, given.key))

    def better(scores: Array) -> bool:
        return fit(found, scores, seen).misfit < max(EXPLAINED, plain.misfit / 10)

    def normed(x: Array) -> Array:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    if better(reference.scores(normed(q), normed(k))):
        return own.fault(
            "The weights are a softmax of q·k of unit vectors, not of q·k.",
            "A QK-norm is part of the module: hand normalised queries and keys over.",
            link="scale",
        )
    if audit.expected.positions is not None and better(reference.scores(q, k)):
        return own.fault(
            "The weights are those of q·k as they come: positions that were expected are not applied.",
            "Turn queries and keys by their positions before the product.",
            link="positions",
        )
    for interleaved in (False, True):
        turned = [reference.rotate(x, base=10000.0, interleaved=interleaved) for x in (q, k)]
        name = "rotary_interleaved" if interleaved else "rotary"
        both = (turned[0], turned[1])
        if better(reference.scores(*both)):
            return own.fault(
                f"The weights are those of q and k after rotary positions ({name}, base 10,000).",
                f'Positions that are meant are said by Expectation(positions="{name}").',
                link="positions",
            )
        for one, what in (((turned[0], k), "queries"), ((q, turned[1]), "keys")):
            if better(reference.scores(*one)):
                return own.fault(
                    f"Rotary positions are applied to the {what} alone.", "Turn both, or neither.", link="positions"
                )
    for step in (1, -1):
        if fit(np.roll(found, step, axis=-1), reference.scores(q, k), seen).misfit < max(EXPLAINED, plain.misfit / 10):
            return own.fault(
                f"Each key fetches the value of the token {abs(step)} {'before' if step > 0 else 'after'} it.",
                "Keys and values of a token stand at one index.",
                link="values",
            )
    return _residual(audit, own, given, found, seen, plain)


def _residual(audit: Audit, own: Registered, given: Arrays, found: Array, seen: Mask, plain: Fit) -> Finding:
    """What is added to the scores, whatever the content is; or nothing that we know."""
    again = audit.problem(seed=5, size=8**-0.25)
    other = audit.read_weights(again.query, again.key)

    def rest(weights: Array, arrays: Arrays) -> Array:
        slope = fit(weights, reference.scores(*(np.asarray(x, np.float64) for x in arrays[:2])), seen).slope
        logs = np.log(np.where(seen & (weights > 0), weights, 1))
        left = logs - slope[:, None, None] * reference.scores(*(np.asarray(x, np.float64) for x in arrays[:2]))
        return np.where(seen, left - left.mean(axis=-1, keepdims=True), 0)

    if given.query.shape[-1] == 8:
        one, two = rest(found, given), rest(other, again)
        if worst(one - two) < 0.05 * max(worst(one), 1e-9):
            return own.fault(
                f"Something is added to the scores that does not depend on content, up to {worst(one):.2g}.",
                "Position biases are an argument, bias=, or part of the module.",
                link="positions",
            )
    if plain.misfit < 0.05:
        return own.fault(
            f"Weights are those of q·k but for {plain.misfit:.1%} of the spread of their logarithms.",
            "Scores or weights of float32 arrays are rounded on the way: accumulate in float32.",
            link="numerics",
        )
    if audit.expected.positions is not None:
        return own.fault(
            f"Positions as expected leave {plain.misfit:.0%} of the spread of log-weights over, with any scale.",
            "Compare the base, the pairing, the scaling and where positions begin.",
            link="positions",
        )
    return own.fault(
        f"No scale times q·k explains the weights: {plain.misfit:.0%} of the spread of their logarithms is left over.",
        "Are queries and keys projected, normalised, turned or rounded on the way; is it a softmax at all?",
        link="softmax" if _monotone(found, given) else "projections",
    )


def _monotone(found: Array, given: Arrays) -> bool:
    """Whether weights rise with q·k all the same: then the scores are right, and what follows them is not."""
    scores = reference.scores(*(np.asarray(x, np.float64) for x in given[:2]))
    order = np.argsort(scores, axis=-1)
    ranked = np.take_along_axis(found, order, axis=-1)
    return bool((np.diff(ranked, axis=-1) >= -1e-6).mean() > 0.99)


@check("order of the keys", "positions", after=("scale of the scores",), answers=False)
def order(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Without positions, the order of keys and values does not matter; with them it does."""
    if audit.expected.causal or audit.expected.window:
        raise NotApplicable("a mask by position is meant")
    given = audit.problem()
    turned = np.random.default_rng(7).permutation(8)
    moved = worst(audit.subject(given.query, given.key[:, turned], given.value[:, turned]) - audit.subject(*given))
    if audit.expected.positions is None and moved > TOLERANCE:
        yield own.fault(
            f"The output moves by {moved:.2g} when keys and values are put in another order.",
            "Something depends on where keys stand; positions that are meant are said by Expectation(positions=...).",
        )
    elif audit.expected.positions is not None and moved < TOLERANCE:
        yield own.fault(
            "The order of keys and values does not matter, though positions were expected.",
            "Are queries and keys turned before the product?",
        )


@check("row constants", "softmax", after=("order of the keys",), answers=False)
def row_constants(audit: Audit, own: Registered) -> Iterator[Finding]:
    """What is added to all scores of a query changes nothing."""
    if audit.expected.logits_soft_cap is not None or audit.expected.positions is not None:
        raise NotApplicable("a soft cap or positions are meant")
    given = audit.problem()
    shifted = given._replace(key=given.key + 5 * np.ones(8, np.float32))
    if (moved := worst(audit.subject(*shifted) - audit.subject(*given))) > 10 * TOLERANCE:
        yield own.fault(
            f"The output moves by {moved:.2g} when one vector is added to all keys.",
            "Is something added to the denominator, or are scores clipped before the softmax?",
        )


@check("scale of grouped heads", "scale", after=("scale of the scores",))
def grouped_scale(audit: Audit, own: Registered) -> Iterator[Finding]:
    """With fewer key heads the weights are the softmax of the same multiple of q·k."""
    if not audit.grouped:
        raise NotApplicable("it takes no grouped heads")
    if audit.expected.logits_soft_cap is not None:
        raise NotApplicable("a soft cap is meant")
    given = audit.problem(heads=4, kv_heads=2, size=8**-0.25)
    query, key = (audit.positioned(np.asarray(x, np.float64)) for x in (given.query, given.key))
    seen = np.broadcast_to(audit.seen(8, 8), (2, 4, 8, 8))
    one = fit(audit.read_weights(given.query, given.key), reference.scores(query, key), seen)
    if one.misfit > EXPLAINED:
        yield own.fault(
            f"With 2 key heads no scale times q·k explains the weights of 4 heads: {one.misfit:.0%} is left over.",
            "Query head n reads key head n // (N / K).",
            link="heads",
        )
    elif np.abs(one.slope / audit.scale(8) - 1).max() > 0.01:
        yield own.fault(
            f"With 2 key heads for 4 heads the scale is {np.median(one.slope):.4g}, where it is {audit.scale(8):.4g} "
            "with as many of both.",
            "Take the head width from the last axis, not as a width divided by a number of heads.",
        )


@check("many positions", "positions", after=("scale of the scores", "order of the keys"))
def many_positions(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Positions of some hundreds are told apart."""
    if audit.expected.positions is None:
        raise NotApplicable("no positions are meant")
    if (off := audit.error(audit.problem(length=600, heads=1, batch=1))) > 10 * TOLERANCE:
        yield own.fault(
            f"With 600 tokens the output is off by {off:.2g}, with 8 it is not.",
            "Positions and angles in float32, positions as integers: bfloat16 counts to 256.",
        )


CHECKS = (rows_sum, sees, scale, order, row_constants, grouped_scale, many_positions)
