"""Checks of what may depend on what: values, batch items, heads and queries. They need no answer, only changes."""

from collections.abc import Iterator

import numpy as np

from attn_jax.audit.context import TOLERANCE, Arrays, Audit, NotApplicable, Registered, check, worst
from attn_jax.audit.report import Finding
from attn_jax.audit.subject import Refused, WrongOutput

ROUNDED = 0.05  # what rounding to bfloat16 explains
CHANGED = 1e-5  # an output of order one that moves by more depends on what was changed


@check("runs", "output", answers=False)
def runs(audit: Audit, own: Registered) -> Iterator[Finding]:
    """An ordinary call gives finite numbers of the right shape."""
    problem = audit.problem()
    try:
        try:
            found = audit.subject(*problem)
        except Refused:
            audit.subject.prefer_numpy()
            found = audit.subject(*problem)
    except (Refused, WrongOutput) as error:
        shapes = ", ".join(str(x.shape) for x in problem)
        yield own.fault(
            f"Called with float32 query, key and value of shapes {shapes}, {error}.",
            "The layout is [B, T, N, H] for queries and [B, S, K, H] for keys and values; wrap a function of another "
            "layout, and name its arguments by arguments=.",
        )
        return
    if not np.isfinite(found).all():
        yield own.fault(
            f"{(~np.isfinite(found)).mean():.0%} of an ordinary output is not finite.",
            "Look for a softmax that overflows, or a row that sees nothing.",
            link="softmax",
        )


@check("inputs stay", "numerics", after=("runs",), answers=False)
def inputs_stay(audit: Audit, own: Registered) -> Iterator[Finding]:
    """What it is given is not written to."""
    given = audit.problem()
    copies = [x.copy() for x in given]
    try:
        audit.subject.function(*copies)
    except Exception as error:
        raise NotApplicable("it takes no NumPy arrays") from error
    for name, before, after in zip(Arrays._fields, given, copies, strict=True):
        if not np.array_equal(before, after):
            yield own.fault(f"It changed the {name} that it was given.", "Work on a copy.")


@check("same twice", "dropout", after=("runs",), answers=False)
def same_twice(audit: Audit, own: Registered) -> Iterator[Finding]:
    """The same call gives the same numbers."""
    problem = audit.problem()
    first = audit.subject(*problem)
    moved = max(worst(audit.subject(*problem) - first) for _ in range(3))
    if moved > 0:
        yield own.fault(
            f"Equal calls differ by {moved:.2g}.", "Dropout that is on in evaluation, or a state that it keeps?"
        )


@check("items apart", "batch", after=("same twice",), answers=False)
def items_apart(audit: Audit, own: Registered) -> Iterator[Finding]:
    """An item of the batch gives what it gives alone, whatever stands beside it."""
    one, other = audit.problem(), audit.problem(seed=1, size=3.0)
    mixed = Arrays(*(np.concatenate([x[:1], 100 * y[1:]]) for x, y in zip(one, other, strict=True)))
    whole, beside = audit.subject(*one)[0], audit.subject(*mixed)[0]
    alone = audit.subject(*(x[:1] for x in one))[0]
    if not np.isfinite(beside).all():
        yield own.fault(
            "Beside an item with scores of some thousands, item 0 is not finite.",
            "Subtract the largest score of each row before exp: one of all lets the rows far below it vanish.",
            link="softmax",
        )
    elif (moved := worst(whole - beside)) > TOLERANCE:
        yield own.fault(
            f"Item 0 moves by {moved:.2g} when item 1 changes.",
            "Look for a mean, a maximum or a reshape over the batch axis.",
        )
    elif (moved := worst(whole - alone)) > TOLERANCE:
        yield own.fault(f"Item 0 moves by {moved:.2g} when it comes alone.", "What depends on the size of the batch?")


@check("inputs are read", "projections", after=("items apart",), answers=False)
def inputs_read(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Other values, other queries and other keys give another output."""
    one, other = audit.problem(), audit.problem(seed=1)
    base = audit.subject(*one)
    twice = "Is another array read in its place, twice?"
    for field, link, advice in (
        ("value", "values", "What is it that the weights fetch?"),
        ("query", "projections", twice),
        ("key", "projections", twice),
    ):
        if worst(audit.subject(*one._replace(**{field: getattr(other, field)})) - base) <= CHANGED:
            yield own.fault(f"The output does not change with the {field}.", advice, link=link)
            return


@check("linear in values", "values", after=("inputs are read",), answers=False)
def linear_in_values(audit: Audit, own: Registered) -> Iterator[Finding]:
    """The output is a linear function of the values, channel by channel."""
    one, other = audit.problem(), audit.problem(seed=1)
    nothing = audit.subject(one.query, one.key, np.zeros_like(one.value))
    if not np.isfinite(nothing).all():
        yield own.fault("Values of 0 do not come out finite.", "Are values divided by their size?")
        return
    if (left := worst(nothing)) > TOLERANCE:
        yield own.fault(
            f"Values of 0 come out as up to {left:.2g}: something is added that was not fetched.",
            "A residual or a bias belongs after the output projection.",
            link="output",
        )
        return
    both = audit.subject(one.query, one.key, 2 * one.value - other.value)
    apart = 2 * audit.subject(*one) - audit.subject(one.query, one.key, other.value)
    off = worst(both - apart)
    if TOLERANCE < off < ROUNDED:
        yield own.fault(
            f"The output for 2v − w is 2 o(v) − o(w) but for {off:.2g}: float32 arrays are rounded on the way.",
            "Compute logits, softmax and sums in float32.",
            link="numerics",
        )
    elif off > TOLERANCE and _normalised_after(audit, one):
        yield own.fault(
            f"The output for 2v − w is not 2 o(v) − o(w), off by {off:.2g}, and is the same for v and 2v.",
            "Outputs are normalised after the values were fetched.",
            link="output",
        )
    elif off > TOLERANCE:
        yield own.fault(
            f"The output for 2v − w is not 2 o(v) − o(w): off by {off:.2g}.",
            "Values are only weighted and summed: no bias, norm or activation on the way.",
        )
        return
    changed = one.value.copy()
    changed[..., 0] += 1
    moved = np.abs(audit.subject(one.query, one.key, changed) - audit.subject(*one)).max(axis=(0, 1, 2))
    if moved[1:].max() > CHANGED:
        reached = np.flatnonzero(moved > CHANGED).tolist()
        yield own.fault(
            f"Channel 0 of the values reaches channels {reached} of the output.",
            "Are values rotated or projected? Rotary positions belong to queries and keys alone.",
        )
        return
    if worst(audit.subject(one.query, one.key, one.value + 1) - audit.subject(*one)) <= CHANGED:
        yield own.fault(
            "A number that is added to all values does not come out.", "Are values centred before they are fetched?"
        )


def _normalised_after(audit: Audit, given: Arrays) -> bool:
    """Whether outputs do not change with the size of all values, but do with the size of one token's."""
    base = audit.subject(*given)
    one = given.value.copy()
    one[:, 2] *= 3
    same, other = (audit.subject(given.query, given.key, value) for value in (2 * given.value, one))
    return worst(same - base) < TOLERANCE < worst(other - base)


@check("heads apart", "heads", after=("linear in values",), answers=False)
def heads_apart(audit: Audit, own: Registered) -> Iterator[Finding]:
    """A head reads its own queries, keys and values alone, and a query changes its own row alone."""
    given = audit.problem()
    base = audit.subject(*given)
    moved = {}  # by each array, where outputs move when one token of one head does, [T, N]
    for field in Arrays._fields:
        changed = getattr(given, field).copy()
        changed[:, 2, 1] += np.linspace(0.5, 1.5, changed.shape[-1])
        moved[field] = np.abs(audit.subject(*given._replace(**{field: changed})) - base).max(axis=(0, 3)) > CHANGED
    for field, at in moved.items():
        if not at.any():
            changed = getattr(given, field).copy()
            changed[:, 2] += np.linspace(0.5, 1.5, changed.shape[-1])  # of all heads
            if (np.abs(audit.subject(*given._replace(**{field: changed})) - base)[:, :, 1] > CHANGED).any():
                yield own.fault(
                    f"Head 1 does not read its own {field}, but another head's.", "Heads of q, k and v stay in order."
                )
                return
            yield own.fault(
                f"The output does not change with the {field} of token 2, head 1.",
                "Is another array used in its place, or the same one twice?",
                link="values" if field == "value" else "projections",
            )
            return
    others = {field: np.delete(at, 1, axis=1).any() for field, at in moved.items()}
    if others["query"] and moved["query"][2, 1] and not others["value"]:
        yield own.fault(
            "The weights of other heads change with the queries of head 1, what they fetch does not.",
            "The softmax runs over the keys of a query, the last axis of [B, N, T, S], not over heads.",
            link="softmax",
        )
        return
    for field, at in moved.items():
        if others[field] or (field == "query" and not at[2, 1]):
            reached = [f"token {token}, head {head}" for token, head in np.argwhere(at)[:4].tolist()]
            yield own.fault(
                f"A change to the {field} of token 2, head 1 reaches {'; '.join(reached)}, …",
                "Heads are split by reshape and then transpose; a reshape alone mixes heads with tokens. Is there a "
                "sum over heads?",
            )
            return
    rows = {field: np.flatnonzero(moved[field][:, 1]).tolist() for field in ("query", "key")}
    if rows["query"] != [2] and rows["key"] == [2]:
        yield own.fault(
            f"A change to query 2 reaches rows {rows['query']} of its head, a change to key 2 its own row alone.",
            "Queries and keys are exchanged: is the order of the arguments query, key, value?",
            link="projections",
        )
    elif rows["query"] != [2]:
        yield own.fault(
            f"A change to query 2 reaches rows {rows['query']} of its head.",
            "The softmax runs over the keys of a query, the last axis of [B, N, T, S]: over queries it couples them.",
            link="softmax",
        )


@check("groups in order", "heads", after=("heads apart",), answers=False)
def groups_in_order(audit: Audit, own: Registered) -> Iterator[Finding]:
    """With fewer key/value heads, query head n reads head n // (N / K)."""
    given = audit.problem(heads=4, kv_heads=2)
    try:
        base = audit.subject(*given)
    except (Refused, WrongOutput) as error:
        raise NotApplicable("it takes no grouped heads") from error
    audit.grouped = True
    reached = []
    for head in range(2):
        changed = given.value.copy()
        changed[:, :, head] += 1
        moved = np.abs(audit.subject(given.query, given.key, changed) - base).max(axis=(0, 1, 3)) > CHANGED
        reached.append(np.flatnonzero(moved).tolist())
    if reached != [[0, 1], [2, 3]]:
        yield own.fault(
            f"Of 4 query heads and 2 key/value heads, value head 0 reaches query heads {reached[0]} and head 1 reaches "
            f"{reached[1]}; [0, 1] and [2, 3] were expected.",
            "Repeat each key/value head (repeat_interleave); tiling all of them gives 0, 1, 0, 1.",
        )
        return
    changed = given.key.copy()
    changed[:, :, 0] += np.linspace(-1, 1, 8)[None, :, None]
    moved = np.abs(audit.subject(given.query, changed, given.value) - base).max(axis=(0, 1, 3)) > CHANGED
    if np.flatnonzero(moved).tolist() != [0, 1]:
        yield own.fault(
            f"Key head 0 reaches query heads {np.flatnonzero(moved).tolist()} where [0, 1] was expected.",
            "Keys and values must be grouped alike.",
        )


CHECKS = (runs, inputs_stay, same_twice, items_apart, inputs_read, linear_in_values, heads_apart, groups_in_order)
