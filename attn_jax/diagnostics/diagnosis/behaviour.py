"""What the calls of a model show, whatever it is made of: whom outputs depend on, and whether two ways agree.

Everything is seen on a few tokens, by changing some of them and looking at what moves.
"""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from attn_jax.diagnostics.diagnosis.findings import Finding
from attn_jax.diagnostics.diagnosis.words import finding
from attn_jax.diagnostics.reference import Array

OFF = 1e-3  # relative to the largest output; sums in another order move outputs by a hundredth of it
LIKE = 1e-5  # of equal calls


@dataclasses.dataclass(frozen=True)
class Calls:
    """A model as a function of its tokens.

    Attributes:
        run: `run(token_ids [B, T], lengths or None)` -> outputs `[B, T, ...]`, float64.
        token_ids: `[B, T]`, two items or more.
        others: tokens of the same shape, different everywhere.
        causal: whether it looks back only; None: not known.
        takes_lengths: whether lengths may be given.
        meant_to_order: whether it is meant to have positions; None: not known.
        decode: the outputs of `token_ids` in two pieces with a cache; None: it cannot.
        rounding: of the dtype that it computes in.
    """

    run: Callable[[Array, Array | None], Array]
    token_ids: Array
    others: Array
    causal: bool | None
    takes_lengths: bool
    meant_to_order: bool | None
    decode: Callable[[Array], Array] | None = None
    rounding: float = 0.0

    @property
    def off(self) -> float:
        """By how much outputs must move to be other ones: in half precision sums in another order move them more."""
        return max(OFF, 8 * self.rounding)


def examine(calls: Calls) -> Iterator[Finding]:
    """Findings on the calls; those that would only follow from another are left out."""
    base = calls.run(calls.token_ids, None)
    if not np.isfinite(base).all():
        share = 1 - float(np.isfinite(base).mean())
        evidence = f"{share:.0%} of the outputs are not finite."
        yield finding("outputs", evidence, severity="serious", value=share, limit=0.0)
        return
    size = float(np.abs(base).max()) or 1.0
    if (moved := float(np.abs(calls.run(calls.token_ids, None) - base).max()) / size) > LIKE:
        evidence = f"Equal calls differ by {moved:.2g} of the largest output."
        yield finding("two_calls", evidence, severity="serious", value=moved, limit=LIKE)
        return
    mixed = np.concatenate([calls.token_ids[:1], calls.others[1:]])
    if (moved := float(np.abs(calls.run(mixed, None)[0] - base[0]).max()) / size) > calls.off:
        evidence = f"Item 0 moves by {moved:.2g} of the largest output when the others change."
        yield finding("batch_items", evidence, severity="serious", value=moved, limit=calls.off)
        return
    leaks = list(_future(calls, base, size))
    yield from leaks
    if calls.takes_lengths and not calls.causal:  # what looks back only does not see what follows
        yield from _padding(calls, base, size)
    if not leaks:
        yield from _order(calls, base, size)
        yield from _decoding(calls, base, size)


def _future(calls: Calls, base: Array, size: float) -> Iterator[Finding]:
    """Outputs before a place where later tokens change."""
    if calls.causal is False:
        return
    length = base.shape[1]
    at = length // 2
    changed = np.concatenate([calls.token_ids[:, :at], calls.others[:, at:]], axis=1)
    moved = np.abs(calls.run(changed, None) - base).reshape(*base.shape[:2], -1).max(axis=(0, 2))[:at] / size
    rows = np.flatnonzero(moved > calls.off)
    if not rows.size:
        return
    if calls.causal is None:  # an encoder sees all: of those that see a little ahead only the nearest move
        last = np.concatenate([calls.token_ids[:, :-1], calls.others[:, -1:]], axis=1)
        reached = (
            np.abs(calls.run(last, None) - base).reshape(*base.shape[:2], -1).max(axis=(0, 2))[:-1] / size > calls.off
        )
        if reached.mean() > 0.5 or reached[: length // 4].any():
            return
    evidence = (
        f"When tokens from {at} on change, outputs {rows[0]} to {rows[-1]} before them move, by up to "
        f"{moved.max():.2g} of the largest output."
    )
    yield finding("future", evidence, severity="serious", value=float(moved.max()), limit=calls.off)


def _padding(calls: Calls, base: Array, size: float) -> Iterator[Finding]:
    """Padded items against their tokens alone, and against themselves with other padding; one item in turn is whole."""
    items, length = calls.token_ids.shape
    kept = length - length // 3
    alone = calls.run(calls.token_ids[:, :kept], None)
    other = np.concatenate([calls.token_ids[:, :kept], calls.others[:, kept:]], axis=1)
    moved: dict[str, float] = {}

    def note(says: str, off: Array) -> None:
        moved[says] = max(moved.get(says, 0.0), float(np.abs(off).max(initial=0.0)) / size)

    for whole in (None, 0, items - 1):
        lengths = np.full(items, kept)
        if whole is not None:
            lengths[whole] = length
        short = lengths == kept
        padded = calls.run(calls.token_ids, lengths)
        note("are off from those of the tokens alone", (padded[:, :kept] - alone)[short])
        changed = np.where(short[:, None], other, calls.token_ids)
        note("move when the padding changes", (calls.run(changed, lengths) - padded)[short, :kept])
        if whole is not None:
            note("of one item change those of another that has none", padded[whole] - base[whole])
    says, worst = max(moved.items(), key=lambda item: item[1])
    if worst > calls.off:
        evidence = f"Outputs of {kept} tokens with {length - kept} of padding {says}, by {worst:.2g} of the largest."
        yield finding("padding", evidence, severity="serious", value=worst, limit=calls.off)


def _order(calls: Calls, base: Array, size: float) -> Iterator[Finding]:
    """Whether an encoder's outputs only follow their tokens into another order."""
    changed = np.concatenate([calls.token_ids[:, :-1], calls.others[:, -1:]], axis=1)
    if float(np.abs(calls.run(changed, None) - base)[:, :-1].max()) / size < calls.off:
        return  # nothing is read from other tokens, or from earlier ones only
    turned = np.random.default_rng(7).permutation(base.shape[1])
    moved = float(np.abs(calls.run(calls.token_ids[:, turned], None) - base[:, turned]).max()) / size
    if moved < calls.off:
        severity = "serious" if calls.meant_to_order else "notice"
        evidence = f"In another order tokens have the same outputs, to {moved:.1g} of the largest."
        yield finding("order", evidence, severity=severity, value=moved, limit=calls.off)


def _decoding(calls: Calls, base: Array, size: float) -> Iterator[Finding]:
    if calls.decode is None:
        return
    off = np.abs(calls.decode(calls.token_ids) - base).reshape(*base.shape[:2], -1).max(axis=(0, 2)) / size
    rows = np.flatnonzero(off > calls.off)
    if rows.size:
        evidence = f"With a cache, outputs {rows[0]} to {rows[-1]} are off by up to {off.max():.2g} of the largest."
        yield finding("decoding", evidence, severity="serious", value=float(off.max()), limit=calls.off)
