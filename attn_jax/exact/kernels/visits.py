"""Which tiles of keys a tile of queries visits, and the same as the flat lists that kernels read."""

from typing import NamedTuple

import numpy as np

from attn_jax.typing import Int


class Visits(NamedTuple):
    """Which tiles of keys each tile of queries visits. Tile i begins at i · its size; the last one may be cut short.

    Attributes:
        order: int `[nq, nk]`, row i for tile i of queries: first the full tiles, of which it sees every key, then the
            mixed ones. What comes after them has no meaning.
        full, mixed: int `[nq]`, how many there are of each.
    """

    order: Int[np.ndarray, "nq nk"]
    full: Int[np.ndarray, " nq"]
    mixed: Int[np.ndarray, " nq"]


class Lists(NamedTuple):
    """The visits one after another, int32: tile `rows[n]` of queries visits tile `columns[n]` of keys.

    Those of tile i begin at `begins[i]`: first `full[i]`, then `mixed[i]`. If it has none one stands there all the
    same, which is not carried out.
    """

    rows: np.ndarray
    columns: np.ndarray
    begins: np.ndarray
    full: np.ndarray
    mixed: np.ndarray


def in_turn(visits: Visits, *, cut_short: bool) -> Lists:
    """The lists of `visits`, with a last tile of keys that is cut short among the mixed ones."""
    order, full, mixed = map(np.asarray, visits)
    turn, last = np.arange(order.shape[1])[None, :], order.shape[1] - 1
    kind = np.where(turn < full[:, None], 0, np.where(turn < (full + mixed)[:, None], 1, 2))
    if cut_short:
        kind = np.maximum(kind, order == last)
    order = np.take_along_axis(order, np.argsort(kind, axis=1, kind="stable"), axis=1).clip(0, last)
    full, mixed = ((kind == k).sum(axis=1) for k in (0, 1))
    counts = np.maximum(full + mixed, 1)
    begins = counts.cumsum() - counts
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = order[rows, np.arange(len(rows)) - begins[rows]]
    return Lists(*(x.astype(np.int32) for x in (rows, columns, begins, full, mixed)))
