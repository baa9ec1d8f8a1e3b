"""Masks drawn at random on squares drawn at random, each with its definition."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from attn_jax import masks
from attn_jax.lazy import Square
from tests import oracles

B, N = 2, 2
LAST = 2**31 - 1
BASES = [0, 0, 3, 2**30, LAST - 9, -(2**30)]  # where the queries begin, about


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask on a square, and what it should be: `[*B, N, T or R, S]`, or None where only the mask knows."""

    mask: masks.Mask
    square: Square
    visible: np.ndarray | None


class EveryThird(masks.Mask):
    """Somebody's own mask, which says nothing of tiles."""

    def evaluate(self, tile):
        return (tile.query_positions % 3 + tile.key_positions % 3) % 3 == 0


class Pencil:
    """Draws masks for keys that sit at `base` and after."""

    def __init__(self, draw, T, S, base, in_place):
        self.draw, self.T, self.S, self.base, self.in_place = draw, T, S, base, in_place

    def number(self, least, most):
        """Small as a rule, now and then larger than int32 holds."""
        return self.draw(st.one_of(st.integers(least, most), st.sampled_from([LAST, LAST + 1, 2**40])))

    def side(self):
        return None if self.draw(st.booleans()) else self.number(0, self.T + self.S)

    def near(self):
        return max(0, self.base + self.draw(st.integers(-1, max(self.T, self.S) + 1)))

    def lengths(self):
        """For each item one, or one for all."""
        each = [min(self.near(), LAST) for _ in range(B)]
        return np.array(each if self.draw(st.booleans()) else each[0])

    def count(self):
        """A number or an array of them."""
        return self.draw(st.sampled_from([self.near(), 2**40, self.lengths()]))

    def ids(self, length):
        shape = (B, length) if self.draw(st.booleans()) else (length,)
        ids = self.draw(st.lists(st.integers(-1, 3), min_size=math.prod(shape), max_size=math.prod(shape)))
        return np.sort(np.array(ids, int).reshape(shape), axis=-1)

    def flags(self):
        T, S = self.T, self.S
        shape = self.draw(st.sampled_from([(T, S), (B, 1, 1, S), (1, N, T, 1), (B, N, T, S), (1, N, 1, 1)]))
        return np.random.default_rng(self.draw(st.integers(0, 99))).random(shape) < self.draw(
            st.sampled_from([0.1, 0.9])
        )

    def leaf(self):
        """A mask, and its definition as a function of positions; None where it is the hash that knows."""
        return LEAVES[self.draw(st.sampled_from(sorted(LEAVES)), label="mask")](self)

    def tree(self, depth):
        how = self.draw(st.sampled_from(["leaf", "not", "and", "or"] if depth else ["leaf"]))
        if how == "leaf":
            return self.leaf()
        mask, oracle = self.tree(depth - 1)
        if how == "not":
            return ~mask, None if oracle is None else oracles.opposite(oracle)
        other, its_oracle = self.tree(depth - 1)
        both = how == "and"
        known = oracle is not None and its_oracle is not None
        combined = (oracles.both if both else oracles.either)(oracle, its_oracle) if known else None
        return (mask & other if both else mask | other), combined


def _window(pencil):
    sides = pencil.side(), pencil.side()
    return masks.LocalWindow(*sides), oracles.local_window(*(2**60 if side is None else side for side in sides))


def _sliding(pencil):
    width = pencil.number(1, pencil.T + 1)
    return masks.SlidingWindow(width), oracles.sliding_window(width)


def _prefix(pencil):
    n = pencil.count()
    return masks.PrefixLM(n), oracles.prefix_lm(np.broadcast_to(n, B))


def _global(pencil):
    n = pencil.count()
    return masks.GlobalTokens(n), oracles.global_tokens(np.broadcast_to(n, B)[:, None, None, None])


def _strided(pencil):
    stride = pencil.draw(st.one_of(st.integers(1, 7), st.sampled_from([LAST, 2**40])))
    return masks.Strided(stride), oracles.strided(stride)


def _dilated(pencil):
    numbers = [pencil.draw(st.integers(least, 4)) for least in (0, 0, 1)]
    return masks.Dilated(*numbers), oracles.dilated(*numbers)


def _block_diagonal(pencil):
    block = pencil.number(1, 7)
    return masks.BlockDiagonal(block), oracles.block_diagonal(block)


def _random_blocks(pencil):
    length = None if pencil.in_place else pencil.draw(st.sampled_from([min(pencil.near() + 1, LAST), LAST]))
    seed, per_row = (pencil.draw(st.integers(least, 3)) for least in (0, 1))
    return masks.RandomBlocks(seed, per_row, pencil.number(1, 5), length), None


def _padding(pencil):
    lengths = pencil.lengths()
    return masks.Padding(lengths), oracles.padding(np.broadcast_to(lengths, B))


def _segments(pencil):
    ids = pencil.ids(pencil.T), pencil.ids(pencil.S)
    return masks.Segments(*ids), oracles.segments(*ids)


def _array(pencil):
    values = pencil.flags()
    return masks.Array(values), lambda q, k: values


LEAVES = {
    "causal": lambda pencil: (masks.Causal(), oracles.causal),
    "window": _window,
    "sliding": _sliding,
    "prefix": _prefix,
    "global": _global,
    "strided": _strided,
    "dilated": _dilated,
    "block diagonal": _block_diagonal,
    "random blocks": _random_blocks,
    "padding": _padding,
    "segments": _segments,
    "array": _array,
    "own": lambda pencil: (EveryThird(), lambda q, k: (q + k) % 3 == 0),
}


def draw_positions(draw, length, base):
    """Explicit ones, `[L]` or `[B, L]`: following each other or in any order, with empty slots now and then."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    steps = np.arange(length) if draw(st.booleans()) else rng.integers(0, length + 3, (B, length))
    positions = np.minimum(base + steps, LAST)
    return np.where(rng.random(positions.shape) < draw(st.sampled_from([0, 0.2])), -1, positions)


@st.composite
def cases(draw, lengths):
    """A `Case` whose T and S are one of `lengths`."""
    T, S = draw(st.sampled_from(lengths))
    base = draw(st.sampled_from(BASES))
    queries = keys = first = rows = None
    if draw(st.booleans(), label="static queries"):
        first = min(base, LAST - T)
        at_query = np.broadcast_to(first + np.arange(T), (B, T))
    else:
        queries = draw_positions(draw, T, base)
        at_query = np.broadcast_to(queries, (B, T))
    base = max(base, 0)
    if draw(st.booleans(), label="explicit keys"):
        keys = draw_positions(draw, S, draw(st.sampled_from([base, LAST - S])))
    at_key = np.broadcast_to(np.arange(S) if keys is None else keys, (B, S))
    if T and draw(st.booleans(), label="rows"):
        rows = np.array(draw(st.lists(st.integers(0, T - 1), min_size=4, max_size=4)))
    shape = (B, N, T, S)
    square = Square(
        shape,
        first,
        None if queries is None else Square(shape).per_query("query_positions", jnp.asarray(queries)),
        None if keys is None else Square(shape).per_key("key_positions", jnp.asarray(keys)),
        None if rows is None else jnp.asarray(rows),
        keys is None,
    )
    mask, oracle = Pencil(draw, T, S, base, keys is None).tree(2)
    if oracle is None:
        return Case(mask, square, None)
    visible = np.broadcast_to(oracle(at_query[:, None, :, None], at_key[:, None, None, :]), shape)
    return Case(mask, square, visible if rows is None else visible[:, :, rows])
