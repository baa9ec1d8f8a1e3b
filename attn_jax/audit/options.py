"""Checks of the options that the function has: each is honoured, and means what it should."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from attn_jax.audit.context import TOLERANCE, Arrays, Audit, NotApplicable, Registered, check, worst
from attn_jax.audit.report import Finding
from attn_jax.audit.subject import Refused, WrongOutput

AFTER = ("scale of the scores",)
OFF = 10 * TOLERANCE
MANY = {"length": 197, "heads": 2, "batch": 1}  # more tokens than a block has
RATE = 0.3  # of dropout; at a half the share that is kept is that which is dropped


def _moved(audit: Audit, given: Arrays, **options: object) -> float:
    """By how much options change the output."""
    return worst(audit.subject(*given, **options) - audit.subject(*given))


@check("causal option", "mask", after=AFTER)
def causal(audit: Audit, own: Registered) -> Iterator[Finding]:
    """`is_causal` hides what comes later, itself not; T ≠ S is aligned at the top left."""
    audit.needs("is_causal")
    given = audit.problem()
    changed = given._replace(key=given.key.copy(), value=given.value.copy())
    changed.key[:, 5:] += 1
    changed.value[:, 5:] += 1
    leak = np.abs(audit.subject(*given, is_causal=True) - audit.subject(*changed, is_causal=True)).max(axis=(0, 2, 3))
    if (rows := np.flatnonzero(leak[:5] > 1e-5)).size:
        yield own.fault(
            f"With is_causal=True rows {rows.tolist()} change when keys and values from 5 on do.",
            "Query i sees keys j ≤ i: the mask is one too wide, or not applied on this path.",
        )
        return
    if (off := audit.error(given, is_causal=True)) > OFF:
        yield own.fault(
            f"With is_causal=True the output is off by {off:.2g}, though nothing later leaks.",
            "Does a query see its own key? Query i sees j ≤ i.",
        )
        return
    unequal = audit.problem(length=3, keys=7)
    try:
        found = audit.subject(*unequal, is_causal=True)
    except (Refused, WrongOutput) as error:
        yield own.difference(f"With T = 3, S = 7 and is_causal=True {error}.", "Give positions, or pad the queries.")
        return
    if worst(found - audit.answer(unequal, is_causal=True)) > OFF:
        right = worst(found - audit.answer(unequal, is_causal=True, query_offset=4)) < OFF
        said = "aligned at the bottom right" if right else "neither aligned at the top left nor at the bottom right"
        kind = own.difference if right else own.fault
        yield kind(f"With T = 3 and S = 7 the causal mask is {said}.", "Say where queries sit: query_offset = S − T.")
    if (off := audit.error(audit.problem(**MANY), is_causal=True)) > OFF:
        yield own.fault(
            f"With is_causal=True and 197 tokens the output is off by {off:.2g}.",
            "Does each block of queries, or of keys, know where it begins?",
        )


@check("mask option", "mask", after=AFTER)
def mask(audit: Audit, own: Registered) -> Iterator[Finding]:
    """`mask` is boolean, True = may attend, of every broadcastable shape, for each item and head its own."""
    audit.needs("mask")
    given, rng = audit.problem(), np.random.default_rng(2)
    full = rng.random((2, 4, 8, 8)) < 0.6
    full |= np.eye(8, dtype=bool)
    if _moved(audit, given, mask=full) < 1e-5:
        yield own.fault("The output does not change with the mask.", "It is not honoured.")
        return
    if audit.error(given, mask=full) > OFF:
        off = audit.error(given, mask=full)
        inverted = full & ~np.eye(8, dtype=bool)
        if worst(audit.subject(*given, mask=inverted) - audit.answer(given, mask=~inverted)) < OFF:
            yield own.fault(
                "The mask is read the other way round: True hides a key.",
                'True = may attend. If that is meant, say arguments={"mask": ("mask", numpy.logical_not)}.',
            )
        else:
            yield own.fault(
                f"With a mask [B, N, T, S] the output is off by {off:.2g}.",
                "Masked scores are −∞ before the softmax; weights that are zeroed after it no longer sum to 1.",
            )
        return
    refused = set()
    for shape in ((1, 1, 8, 8), (2, 1, 8, 8), (1, 4, 8, 8), (2, 1, 1, 8)):
        part = full[tuple(slice(0, size) for size in shape)].copy()
        part[..., 0] = True
        try:
            found = audit.subject(*given, mask=part)
        except (Refused, WrongOutput) as error:
            refused.add(shape)
            yield own.difference(f"A mask of shape {shape} is refused: {error}.", "Broadcast it.")
            continue
        if (off := worst(found - audit.answer(given, mask=part))) > OFF:
            yield own.fault(
                f"With a mask of shape {shape} the output is off by {off:.2g}.",
                "Align masks with [B, N, T, S]; of grouped heads, before heads are split into groups.",
            )
    # As many items as key heads: a mask that is aligned with the wrong axis fits all the same.
    if audit.grouped and (2, 1, 8, 8) not in refused:
        grouped = audit.problem(heads=4, kv_heads=2)
        part = full[:, :1].copy()
        if (off := audit.error(grouped, mask=part)) > OFF:
            yield own.fault(
                f"With 2 items, 2 key heads and a mask [2, 1, T, S] the output is off by {off:.2g}.",
                "The batch axis of the mask meets the axis of the key heads: give the mask an axis for the group.",
            )
    if "is_causal" in audit.subject.options and (off := audit.error(given, mask=full, is_causal=True)) > OFF:
        yield own.fault(
            f"With a mask and is_causal=True the output is off by {off:.2g}.", "Both hold: they are combined by AND."
        )


@check("rows that see nothing", "mask", after=("mask option",))
def empty_rows(audit: Audit, own: Registered) -> Iterator[Finding]:
    """A query that may see no key gives 0."""
    audit.needs("mask")
    given = audit.problem()
    full = np.ones((2, 4, 8, 8), bool)
    full[:, :, 3] = False
    found = audit.subject(*given, mask=full)
    row, others = found[:, 3], np.delete(found, 3, axis=1)
    mean = given.value.mean(axis=1)
    if not np.isfinite(others).all():
        yield own.fault("A query that sees nothing makes other rows not finite.", "Mask with care.", link="softmax")
    elif not np.isfinite(row).all():
        yield own.fault(
            "A query that may see no key gives NaN.",
            "A softmax over −∞ alone is 0/0: give such a row 0, or its NaN reaches everything after it.",
            link="softmax",
        )
    elif worst(row) > TOLERANCE:
        what = "the mean of all values" if worst(row - mean) < 1e-3 else "neither 0 nor the mean of the values"
        yield own.difference(
            f"A query that may see no key gives {what}.", "Such rows are of padding: keep them out of the loss."
        )


@check("hidden NaN", "mask", after=("mask option",))
def hidden_nan(audit: Audit, own: Registered) -> Iterator[Finding]:
    """What a masked key and its value hold reaches nothing."""
    audit.needs("mask")
    given = audit.problem()
    full = np.ones((2, 4, 8, 8), bool)
    full[..., 6:] = False
    changed = given._replace(key=given.key.copy(), value=given.value.copy())
    changed.key[:, 6:] = 50
    changed.value[:, 6:] = 1e6
    moved = worst(audit.subject(*changed, mask=full) - audit.subject(*given, mask=full))
    if moved > TOLERANCE:
        yield own.fault(
            f"Masked keys and values move the output by {moved:.2g}.", "Their weight is not 0: is −∞ a small number?"
        )
        return
    changed.key[:, 6:] = changed.value[:, 6:] = np.nan
    if not np.isfinite(audit.subject(*changed, mask=full)).all():
        yield own.difference(
            "NaN in masked keys or values reaches the output: 0 · NaN.", "Zero what is masked before the products."
        )


@check("bias option", "bias", after=AFTER)
def bias(audit: Audit, own: Registered) -> Iterator[Finding]:
    """`bias` is added to the scaled scores, before the softmax; −∞ hides."""
    audit.needs("bias")
    given, rng = audit.problem(), np.random.default_rng(4)
    added = rng.standard_normal((2, 4, 8, 8)).astype(np.float32)
    if _moved(audit, given, bias=added) < 1e-5:
        yield own.fault("The output does not change with the bias.", "It is not honoured.")
        return
    if (off := audit.error(given, bias=added)) > OFF:
        found, c = audit.subject(*given, bias=added), audit.scale(8)
        others = {"scaled as q·k is": c * added, "subtracted": -added, "transposed": np.swapaxes(added, -1, -2)}
        named = [what for what, other in others.items() if worst(found - audit.answer(given, bias=other)) < OFF]
        said = f"The bias is {named[0]}." if named else f"With a bias the output is off by {off:.2g}."
        yield own.fault(said, "Logits are scale · q·k + bias.")
        return
    for shape in ((1, 4, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8)):
        part = added[tuple(slice(0, size) for size in shape)]
        try:
            found = audit.subject(*given, bias=part)
        except (Refused, WrongOutput) as error:
            yield own.difference(f"A bias of shape {shape} is refused: {error}.", "Broadcast it.")
            continue
        if (off := worst(found - audit.answer(given, bias=part))) > OFF:
            yield own.fault(
                f"With a bias of shape {shape} the output is off by {off:.2g}.", "Align it with [B, N, T, S]."
            )
    for name, option in (("mask", rng.random((2, 4, 8, 8)) < 0.6), ("is_causal", True)):
        if name not in audit.subject.options:
            continue
        if name == "mask":
            option |= np.eye(8, dtype=bool)
        beside = {name: option}
        found = audit.subject(*given, bias=added, **beside)
        if (off := worst(found - audit.answer(given, bias=added, **beside))) > OFF:
            lost = worst(found - audit.answer(given, **beside)) < OFF
            said = "is not read" if lost else f"gives an output that is off by {off:.2g}"
            yield own.fault(f"Beside {name} the bias {said}.", "Both hold: the bias is added, the mask hides.")
            return
    hidden = np.where(rng.random((2, 4, 8, 8)) < 0.3, -np.inf, added).astype(np.float32)
    hidden[..., 0] = 0
    if (off := audit.error(given, bias=hidden)) > OFF:
        yield own.fault(f"With −∞ in the bias the output is off by {off:.2g}.", "−∞ + x = −∞: such keys are masked.")


@check("length options", "mask", after=AFTER)
def lengths(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Keys past their item's length are not seen, and rows past the query's are 0."""
    if not {"key_value_seq_lengths", "query_seq_lengths"} & audit.subject.options:
        raise NotApplicable("it has no lengths")
    given, counts = audit.problem(), np.array([5, 8], np.int32)
    if "key_value_seq_lengths" in audit.subject.options:
        found = audit.subject(*given, key_value_seq_lengths=counts)
        if (off := worst(found - audit.answer(given, key_value_seq_lengths=counts))) > OFF:
            changed = given._replace(value=given.value.copy())
            changed.value[0, 5:] += 1
            moved = worst(audit.subject(*changed, key_value_seq_lengths=counts) - found)
            said = f"Padding moves the output by {moved:.2g}" if moved > 1e-5 else f"The output is off by {off:.2g}"
            yield own.fault(
                f"{said} with key_value_seq_lengths.", "Keys j ≥ the length are masked, of each item its own."
            )
    if "query_seq_lengths" in audit.subject.options:
        found, plain = audit.subject(*given, query_seq_lengths=counts), audit.answer(given)
        counted = np.arange(8)[None, :] < counts[:, None]
        if (off := worst(np.where(counted[..., None, None], found - plain, 0))) > OFF:
            yield own.fault(f"Rows that count are off by {off:.2g} with query_seq_lengths.", "Only later rows change.")
        elif worst(np.where(counted[..., None, None], 0, found)) > TOLERANCE:
            yield own.difference("Rows past query_seq_lengths are not 0.", "Keep them out of the loss.")


@check("window option", "mask", after=AFTER)
def window(audit: Audit, own: Registered) -> Iterator[Finding]:
    """A window (left, right) holds the keys from i − left to i + right, both included."""
    audit.needs("local_window_size")
    given = audit.problem()
    for sides in ((1, 0), (0, 1), (2, 1), (0, 0)):
        found = audit.read_weights(np.zeros_like(given.query), given.key, local_window_size=sides)
        seen = audit.seen(8, 8, local_window_size=sides)
        counts = (found[0, 0] > 1e-6).sum(axis=-1)
        if ((found > 1e-6) != seen).any():
            yield own.fault(
                f"With local_window_size={sides} queries see {counts.tolist()} keys where "
                f"{seen.sum(axis=-1).tolist()} were expected.",
                "Both ends are included; without causality the right side is bounded too.",
            )
            return
    if (off := audit.error(audit.problem(**MANY), local_window_size=(2, 1))) > OFF:
        yield own.fault(
            f"With a window and 197 tokens the output is off by {off:.2g}.",
            "Does each block of queries, or of keys, know where it begins?",
        )


@check("scale option", "scale", after=AFTER)
def scale_option(audit: Audit, own: Registered) -> Iterator[Finding]:
    """`scale` is the factor on q·k."""
    audit.needs("scale")
    given = audit.problem()
    off = [audit.error(given, scale=value) for value in (0.1, 0.7)]
    if max(off) > OFF:
        moved = _moved(audit, given, scale=0.7)
        said = "does not change the output" if moved < 1e-5 else f"gives outputs that are off by {max(off):.2g}"
        yield own.fault(f"The scale that is asked for {said}.", "It takes the place of 1/√H; it does not come on top.")


@check("soft cap option", "scale", after=AFTER)
def soft_cap(audit: Audit, own: Registered) -> Iterator[Finding]:
    """`logits_soft_cap` is c·tanh(logits / c), before the mask."""
    audit.needs("logits_soft_cap")
    given = audit.problem(size=2.0)
    if (off := audit.error(given, logits_soft_cap=1.5)) > OFF:
        yield own.fault(f"With a soft cap of 1.5 the output is off by {off:.2g}.", "Logits become c·tanh(logits / c).")
        return
    hiding = [name for name in ("is_causal", "mask") if name in audit.subject.options]
    for name in hiding:
        option = True if name == "is_causal" else np.broadcast_to(np.tri(8, dtype=bool), (2, 4, 8, 8))
        if (off := audit.error(given, logits_soft_cap=1.5, **{name: option})) > OFF:
            yield own.fault(
                f"With a soft cap and {name} the output is off by {off:.2g}.",
                "The cap comes before the mask: after it, masked scores become −c and keep weight.",
                link="mask",
            )
            return


@check("sinks option", "softmax", after=AFTER)
def sinks(audit: Audit, own: Registered) -> Iterator[Finding]:
    """A sink joins the denominator of its head, and fetches nothing."""
    audit.needs("sinks")
    given = audit.problem()
    logits = np.array([-1.0, 0.0, 1.0, 2.0], np.float32)
    if (off := audit.error(given, sinks=logits)) > OFF:
        yield own.fault(
            f"With sinks the output is off by {off:.2g}.", "exp(sink) is added to the denominator, unscaled; no value."
        )


@check("offset option", "cache", after=AFTER)
def offset(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Queries that begin at an offset are the last rows of the whole sequence."""
    audit.needs("query_offset", "is_causal")
    given = audit.problem()
    for more in ({}, {"local_window_size": (2, 0)}):
        if more.keys() - audit.subject.options:
            continue
        options = {"is_causal": True, **more}
        whole = audit.subject(*given, **options)
        for start, stop in ((3, 8), (7, 8), (3, 4)):  # the last ones, the last, and one that others follow
            query = given.query[:, start:stop]
            part = audit.subject(query, given.key, given.value, **options, query_offset=start)
            if (off := worst(part - whole[:, start:stop])) > OFF:
                which = f"queries {start} to {stop - 1}" if stop - start > 1 else f"query {start} alone"
                which += f", with query_offset={start}{' and a window' if more else ''},"
                yield own.fault(
                    f"The rows of {which} are {off:.2g} off those of the whole sequence.",
                    "Query i sits at query_offset + i; the causal mask and windows read that.",
                )
                return


@check("dropout option", "dropout", after=AFTER)
def dropout(audit: Audit, own: Registered) -> Iterator[Finding]:
    """Dropout zeroes weights at its rate and divides the others by 1 − rate; without it nothing changes."""
    audit.needs("dropout_rate")
    options: dict[str, Any] = {"dropout_rate": RATE}
    if "dropout_rng" in audit.subject.options:
        options["dropout_rng"] = jax.random.key(0)
    given = audit.problem()
    if "deterministic" in audit.subject.options:
        moved = _moved(audit, given, **options, deterministic=True)
        if moved > TOLERANCE:
            yield own.fault(
                f"With deterministic=True dropout moves the output by {moved:.2g}.", "It is off in evaluation."
            )
        options["deterministic"] = False
    try:
        found = audit.read_weights(given.query, given.key, **options)
    except Refused as error:
        raise NotApplicable(f"dropout could not be switched on: {error}") from error
    plain = audit.read_weights(given.query, given.key)
    seen = plain > 1e-6
    kept = seen & (found != 0)
    if kept.sum() == seen.sum():
        yield own.fault(f"With dropout_rate={RATE} no weight is 0.", "The rate is not honoured.")
        return
    share, times = 1 - kept.sum() / seen.sum(), float(np.median(found[kept] / plain[kept]))
    if abs(share - RATE) > 0.12:
        yield own.fault(
            f"With dropout_rate={RATE} {share:.0%} of the weights are dropped.", "The rate is that of dropping."
        )
    elif abs(times - 1 / (1 - RATE)) > 0.02:
        yield own.fault(
            f"With dropout_rate={RATE} weights that are kept are {times:.3g} times as large.",
            "They are divided by 1 − rate, and not normalised again.",
        )


CHECKS = (
    causal, mask, empty_rows, hidden_nan, bias, lengths, window, scale_option, soft_cap, sinks, offset, dropout,
)  # fmt: skip
