"""What masks say of tiles before they are evaluated: never wrong, and exact where it can be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_jax import masks
from attn_jax.exact.arguments import prepare
from attn_jax.lazy import Grid, Square
from tests.masks.drawn import LAST, EveryThird, cases

TILES = [(1, 1), (2, 3), (5, 4), (20, 30)]
LENGTHS = [(5, 7), (12, 12), (1, 9), (9, 1), (0, 3), (3, 0)]


def per_tile(visible, tile):
    """Whether each tile holds any True, and whether only True, found by looking: `[2, *B, N, nq, nk]`."""
    spans = []
    for length, size in zip(visible.shape[-2:], tile, strict=True):
        last = max(length - size, 0)  # where the last tile begins
        spans.append([slice(min(start, last), min(start, last) + size) for start in range(0, length, size)])
    found = np.zeros((2, *visible.shape[:-2], len(spans[0]), len(spans[1])), bool)
    for i, rows in enumerate(spans[0]):
        for j, columns in enumerate(spans[1]):
            part = visible[..., rows, columns]
            found[..., i, j] = part.any((-2, -1)), part.all((-2, -1))
    return found


def bounds(mask, square, tile):
    """`Mask.bounds` in full, `[2, *B, N, nq, nk]`."""
    grid = Grid(square, tile)
    pair = mask.bounds(grid)
    for bound in pair:
        assert bound.dtype == bool
        assert bound.ndim == len(square.shape)
    return np.stack([np.broadcast_to(bound, (*square.shape[:-2], *grid.counts)) for bound in pair])


def check(mask, square, tile, visible=None):
    evaluated = np.broadcast_to(mask.evaluate(square.whole()), square.kept)
    if visible is not None:
        np.testing.assert_array_equal(evaluated, visible)
    (some, every), (any_true, all_true) = bounds(mask, square, tile), per_tile(evaluated, tile)
    assert not (any_true & ~some).any(), "called empty, but holds a True"
    assert not (every & ~all_true).any(), "called full, but holds a False"
    assert not (every & ~some).any(), "called full and empty at once"
    if not jax.tree.leaves((mask, square)):
        assert all(isinstance(bound, np.ndarray) for bound in mask.bounds(Grid(square, tile)))


@settings(max_examples=40)
@given(cases([(12, 7), (1, 9), (3, 0)]), st.sampled_from([(5, 2), (20, 30)]))  # few shapes: they cost the time
def test_never_wrong(case, tile):
    check(case.mask, case.square, tile, case.visible)


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases(LENGTHS), st.sampled_from(TILES))
def test_never_wrong_in_long(case, tile):
    check(case.mask, case.square, tile, case.visible)


FULLY_KNOWN = {
    "causal": masks.Causal(),
    "window": masks.LocalWindow(5, 2),
    "window ahead": masks.LocalWindow(0, 7),
    "open to the left": masks.LocalWindow(None, 3),
    "open to the right": masks.LocalWindow(1, None),
    "all": masks.LocalWindow(None, None),
    "sliding": masks.SlidingWindow(4),
    "prefix": masks.PrefixLM(9),
    "prefix per item": masks.PrefixLM(np.array([0, 13])),
    "global": masks.GlobalTokens(6),
    "global per item": masks.GlobalTokens(np.array([3, 40])),
    "padding": masks.Padding(np.array([5, 16])),
    "strided": masks.Strided(5),
    "block diagonal": masks.BlockDiagonal(8),
    "block diagonal, odd": masks.BlockDiagonal(5),
    "random blocks": masks.RandomBlocks(1, 3, 4),
    "random blocks, odd": masks.RandomBlocks(2, 2, 5),
    "all random blocks": masks.RandomBlocks(0, 9, 8),
    "segments": masks.Segments(np.repeat(np.arange(4), (5, 9, 3, 7)), np.repeat(np.arange(4), (8, 8, 10, 6))),
    "array": masks.Array(np.random.default_rng(0).random((1, 2, 24, 32)) < 0.8),
    "not causal": ~masks.Causal(),
    "causal prefix of padding": masks.PrefixLM(9) & masks.Padding(np.array([24, 32])),
    "separate halves": masks.Causal() | ~masks.Causal() & masks.BlockDiagonal(1),
}  # fmt: skip


@pytest.mark.parametrize("name", FULLY_KNOWN)
def test_exact(name):
    """Contiguous positions: a mask of this kind knows every tile."""
    mask = FULLY_KNOWN[name]
    for first in (0, 7, -3):
        square = Square((2, 2, 24, 32), first)
        visible = np.broadcast_to(mask.evaluate(square.whole()), square.shape)
        for tile in ((1, 1), (4, 4), (8, 8), (8, 5), (5, 8), (24, 32), (7, 31)):
            np.testing.assert_array_equal(bounds(mask, square, tile), per_tile(visible, tile), str((first, tile)))


@pytest.mark.parametrize("seed", range(3))
def test_bigbird_is_exact_on_its_blocks(seed):
    square = Square((1, 64, 64))
    mask = masks.bigbird(6, 8, per_row=2, block=4, seed=seed)
    visible = np.broadcast_to(mask.evaluate(square.whole()), square.shape)
    np.testing.assert_array_equal(bounds(mask, square, (4, 4)), per_tile(visible, (4, 4)))
    for size in (8, 16):  # there a window and random blocks may fill a tile together, which neither of them knows
        (some, every), (any_true, all_true) = bounds(mask, square, (size, size)), per_tile(visible, (size, size))
        np.testing.assert_array_equal(some, any_true)
        assert (every <= all_true).all()


@pytest.mark.parametrize("seed", range(4))
def test_random_blocks_of_queries_that_jump(seed):
    """Between the first and the last position of a tile lie blocks that may be seen or not."""
    keys = jnp.arange(64).reshape(1, 1, 64)
    for queries in ([0, 40], [40, 41], [3, 2], [63, 0]):
        square = Square((1, 2, 64), None, jnp.array(queries).reshape(1, 2, 1), keys)
        check(masks.RandomBlocks(seed, 2, 4, length=64), square, (2, 4))


def test_two_halves_that_fill_a_tile_may_be_called_mixed():
    square = Square((1, 4, 4))
    halves = masks.Causal() | masks.LocalWindow(0, None)
    assert np.asarray(halves.evaluate(square.whole())).all()
    some, every = bounds(halves, square, (4, 4))
    assert some.all()
    assert not every.any()


def test_a_mask_that_says_nothing_is_mixed_everywhere():
    square = Square((1, 12, 12))
    some, every = bounds(EveryThird(), square, (3, 3))
    assert some.all()
    assert not every.any()
    some, every = bounds(EveryThird() & masks.Causal(), square, (3, 3))
    np.testing.assert_array_equal(some[0], np.tri(4, dtype=bool))
    assert not every.any()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_at_the_ends_of_int32(dtype):
    """Differences of such positions do not fit; an empty slot at -1 makes them one farther."""

    def at(queries, keys):
        queries, keys = jnp.array(queries, dtype).reshape(1, -1, 1), jnp.array(keys, dtype).reshape(1, 1, -1)
        return Square((1, queries.size, keys.size), None, queries, keys)

    with jax.enable_x64(dtype == "int64"):
        far = at([-1, 5], [LAST])
        everywhere = (masks.Causal(), masks.LocalWindow(None, LAST), masks.LocalWindow(LAST, 0), masks.Strided(3))
        for mask in (*everywhere, masks.PrefixLM(LAST + 1), masks.BlockDiagonal(LAST), masks.Padding(LAST)):
            for square in (far, at([5], [-1, LAST]), at([LAST - 1, LAST], [-1]), at([-(2**30), 2**30], [LAST])):
                check(mask, square, (2, 2))
                check(~mask, square, (2, 2))
        assert bounds(masks.Causal(), far, (2, 1)).ravel().tolist() == [False, False]
        assert bounds(masks.LocalWindow(None, LAST), far, (2, 1)).ravel().tolist() == [True, False]
        assert bounds(masks.PrefixLM(LAST + 1), far, (2, 1)).ravel().tolist() == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"query_seq_lengths": np.array([0, 5])},
        {"key_value_seq_lengths": np.array([3, 7]), "is_causal": True},
        {"query_positions": np.array([4, -1, 5, -1, 6]), "local_window_size": 2},
        {"key_positions": np.array([[7, 8, -1, 3, 4, 5, 6], [-1] * 7]), "is_causal": True, "query_offset": 4},
        {"query_offset": np.array([2, 9]), "mask": masks.longformer(1, 2), "rows": np.array([4, 0])},
        {"mask": masks.Segments(np.arange(5), np.arange(7)), "rows": np.array([4, 3, 0, 1])},
    ],
)
def test_arguments_of_attention_become_masks_that_are_never_wrong(options):
    problem = prepare(np.zeros((2, 5, 2, 1)), np.zeros((2, 7, 2, 1)), None, None, options.pop("mask", None), **options)
    for tile in TILES:
        check(problem.mask, problem.square, tile)


def test_bounds_inside_a_trace():
    """What is static plans tiles while a program is traced, what is not becomes part of it."""

    @jax.jit
    def touched(lengths):
        grid = Grid(Square((2, 1, 8, 8)), (4, 4))
        static, _ = masks.Causal().bounds(grid)
        assert isinstance(static, np.ndarray)
        some, _ = (masks.Causal() & masks.Padding(lengths)).bounds(grid)
        return some

    assert touched(jnp.array([3, 8]))[:, 0].tolist() == [[[True, False], [True, False]], [[True, False], [True, True]]]
