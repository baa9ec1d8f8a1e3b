"""Lazy masks against their definitions, on whole squares, on tiles, as pytrees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import attention_weights, biases, masks
from attn_jax.lazy import Square, Tile
from tests import oracles
from tests.squares import whole

QUERY_IDS, KEY_IDS = (
    np.array([[0, 0, 1, 1, 2], [3, 3, 3, 0, 0]]),
    np.array([[0, 1, 1, 2, 2, 2, 0], [3, 0, 3, 0, 3, 0, 1]]),
)
ARRAY = np.random.default_rng(0).random((2, 3, 5, 7)) < 0.5
SIBLINGS = {
    "causal": (masks.Causal(), oracles.causal),
    "local_window": (masks.LocalWindow(2, 1), oracles.local_window(2, 1)),
    "open_window": (masks.LocalWindow(None, 1), oracles.local_window(99, 1)),
    "identity": (masks.LocalWindow(0, 0), oracles.local_window(0, 0)),
    "sliding_window": (masks.SlidingWindow(3), oracles.sliding_window(3)),
    "prefix_lm": (masks.PrefixLM(2), oracles.prefix_lm(2)),
    "prefix_lm_per_item": (masks.PrefixLM(np.array([0, 4])), oracles.prefix_lm(np.array([0, 4]))),
    "global_tokens": (masks.GlobalTokens(2), oracles.global_tokens(2)),
    "strided": (masks.Strided(3), oracles.strided(3)),
    "dilated": (masks.Dilated(2, 1, 2), oracles.dilated(2, 1, 2)),
    "block_diagonal": (masks.BlockDiagonal(4), oracles.block_diagonal(4)),
    "padding": (masks.Padding(np.array([3, 7])), oracles.padding(np.array([3, 7]))),
    "segments": (masks.Segments(QUERY_IDS, KEY_IDS), oracles.segments(QUERY_IDS, KEY_IDS)),
    "array": (masks.Array(ARRAY), lambda q, k: ARRAY),
    "not": (~masks.Causal(), oracles.opposite(oracles.causal)),
    "longformer": (masks.longformer(1, 1), oracles.either(oracles.local_window(1, 1), oracles.global_tokens(1))),
    "longformer_per_item": (
        masks.longformer(2, np.array([0, 3])),
        oracles.either(oracles.local_window(2, 2), lambda q, k: np.minimum(q, k) < np.array([0, 3])[:, None, None, None]),
    ),
    "sparse_transformer": (
        masks.sparse_transformer(3),
        lambda q, k: (k <= q) & ((q - 3 <= k) | ((q - k) % 3 == 0)),
    ),
    "documents": (
        masks.documents(QUERY_IDS, KEY_IDS),
        oracles.both(oracles.causal, oracles.segments(QUERY_IDS, KEY_IDS)),
    ),
}  # fmt: skip
SQUARE = (2, 3, 5, 7)
POSITIONS = {
    "from_zero": (np.arange(5), np.arange(7)),
    "offset_per_item": (np.arange(5) + np.array([[2], [9]]), np.arange(7)),
    "rolled": (np.arange(5) + 6, np.array([[7, 8, 9, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]])),
}


def expected(mask, queries, keys):
    queries, keys = np.broadcast_to(queries, (2, 5)), np.broadcast_to(keys, (2, 7))
    return np.broadcast_to(mask(queries[:, None, :, None], keys[:, None, None, :]), SQUARE)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", SIBLINGS)
def test_definition(name, positions):
    mask, oracle = SIBLINGS[name]
    queries, keys = POSITIONS[positions]
    actual = mask.evaluate(whole(SQUARE, jnp.asarray(queries), jnp.asarray(keys)))
    assert actual.ndim == 4
    np.testing.assert_array_equal(np.broadcast_to(actual, SQUARE), expected(oracle, queries, keys))


@pytest.mark.parametrize("name", SIBLINGS)
def test_tile_is_part_of_the_whole(name):
    mask, oracle = SIBLINGS[name]
    queries, keys = POSITIONS["offset_per_item"]
    rows = np.array([4, 1])
    tile = whole(SQUARE, jnp.asarray(queries), jnp.asarray(keys), query_indices=jnp.asarray(rows))
    actual = np.broadcast_to(mask.evaluate(tile), (2, 3, 2, 7))
    np.testing.assert_array_equal(actual, expected(oracle, queries, keys)[:, :, rows])


@pytest.mark.parametrize("name", SIBLINGS)
def test_box_is_part_of_the_whole(name):
    mask, oracle = SIBLINGS[name]
    queries, keys = POSITIONS["offset_per_item"]
    square = whole(SQUARE, jnp.asarray(queries), jnp.asarray(keys)).square
    sizes = (1, 2, 3, 4)

    @jax.jit
    def part(mask, starts):
        return jnp.broadcast_to(mask.evaluate(Tile(square, starts, sizes)), sizes)

    full = expected(oracle, queries, keys)
    for starts in ((0, 0, 0, 0), (1, 1, 2, 3), (1, 0, 1, 2)):
        box = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        np.testing.assert_array_equal(part(mask, starts), full[box])


def test_positions_that_follow_need_no_array():
    for first in (0, 3, -2):
        given, known = (
            masks.longformer(2, 1).evaluate(square.whole())
            for square in (whole((1, 5, 7), jnp.arange(5) + first, jnp.arange(7)).square, Square((1, 5, 7), first))
        )
        np.testing.assert_array_equal(given, known)


def test_random_blocks():
    mask = masks.RandomBlocks(seed=3, per_row=2, block=4)
    values = np.asarray(masks.materialize(mask, 64, 40))
    blocks = values.reshape(16, 4, 10, 4)
    assert (blocks == blocks[:, :1, :, :1]).all(), "a block is visible as a whole"
    assert (blocks[:, 0, :, 0].sum(1) == 2).all(), "each row of blocks sees per_row distinct ones"
    other = np.asarray(masks.materialize(masks.RandomBlocks(seed=4, per_row=2, block=4), 64, 40))
    assert (values != other).any(), "another seed draws other blocks"
    assert np.asarray(masks.materialize(masks.RandomBlocks(0, 10, 4), 8, 40)).all()


def test_bigbird_is_its_three_parts():
    parts = masks.RandomBlocks(seed=5, per_row=2, block=4), masks.LocalWindow(3, 3), masks.GlobalTokens(2)
    expected = np.any([np.asarray(masks.materialize(part, 40)) for part in parts], axis=0)
    np.testing.assert_array_equal(masks.materialize(masks.bigbird(3, 2, per_row=2, block=4, seed=5), 40), expected)
    shorter = masks.bigbird(3, 2, per_row=2, block=4, seed=5, length=40)
    np.testing.assert_array_equal(masks.materialize(shorter, 8, 40), expected[:8])


def test_random_blocks_of_a_shard_are_those_of_the_whole():
    mask = masks.RandomBlocks(0, 3, 2, length=104)
    whole_row = np.asarray(mask.evaluate(whole((1, 1, 104), jnp.array([100]), jnp.arange(104))))[0, 0]
    shard = whole((1, 1, 4), jnp.array([100]), jnp.arange(100, 104), keys_in_place=False)
    np.testing.assert_array_equal(np.asarray(mask.evaluate(shard))[0, 0], whole_row[100:])
    assert whole_row.sum() == 6
    np.testing.assert_array_equal(masks.materialize(mask, 104), masks.materialize(masks.RandomBlocks(0, 3, 2), 104))
    x = np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="length of RandomBlocks must be given where key_positions are, got None"):
        attention_weights(x, x, mask=masks.RandomBlocks(0, 1, 2), key_positions=np.array([100]))


def test_random_blocks_are_drawn_evenly():
    values = np.asarray(masks.materialize(masks.RandomBlocks(seed=0, per_row=3, block=1), 4000, 30))
    # 4000 draws of one in ten, thrice: 400 expected, standard deviation 19.
    assert values.sum() == 12000
    assert (abs(values.sum(0) - 400) < 5 * 19).all()


def test_random_blocks_last_block_may_be_short():
    values = np.asarray(masks.materialize(masks.RandomBlocks(seed=1, per_row=3, block=4), 400, 10))
    assert values[:, 8:].any()
    assert (values[:, 8] == values[:, 9]).all()


@pytest.mark.parametrize(("width", "counts"), [(3, [1, 2, 3, 3, 3]), (1, [1] * 5), (9, [1, 2, 3, 4, 5])])
def test_sliding_window_counts_its_own_key(width, counts):
    assert masks.materialize(masks.SlidingWindow(width), 5).sum(1).tolist() == counts


def test_equal_masks_share_a_trace():
    traces = []

    @jax.jit
    def visible(mask, queries):
        traces.append(mask)
        return mask.evaluate(whole((1, 4, 4), queries, jnp.arange(4)))

    queries = jnp.arange(4)
    for _ in range(3):
        visible(masks.Causal() & masks.SlidingWindow(2), queries)
    assert len(traces) == 1
    for lengths in (1, 2, 3):  # arrays are leaves: other values, one more trace in all
        visible(masks.Padding(jnp.asarray(lengths)), queries)
    assert len(traces) == 2
    visible(masks.Causal() & masks.SlidingWindow(3), queries)
    assert len(traces) == 3


def test_pytree():
    mask = masks.Causal() & (masks.Padding(np.array([3])) | ~masks.Segments(np.array([0, 1])))
    leaves, structure = jax.tree_util.tree_flatten(mask)
    assert len(leaves) == 2
    assert jax.tree_util.tree_unflatten(structure, leaves) == mask
    mapped = jax.vmap(lambda m: m.evaluate(whole((1, 1, 4), jnp.arange(1), jnp.arange(4))))(
        masks.Padding(jnp.array([1, 3]))
    )
    assert mapped.sum((1, 2, 3)).tolist() == [1, 3]


def test_a_mask_may_be_partly_mapped():
    lengths, ids = jnp.array([1, 3]), jnp.array([0, 0, 1, 1])

    def count(mask):
        return mask.evaluate(whole((1, 4, 4), jnp.arange(4), jnp.arange(4))).sum()

    mask = masks.Padding(lengths) & masks.Segments(ids)
    actual = jax.vmap(count, in_axes=(masks.And(0, None),))(mask)
    assert actual.tolist() == [count(masks.Padding(n) & masks.Segments(ids)) for n in lengths]


def test_mapping_a_number_over_leaves_keeps_them_leaves():
    mask = masks.PrefixLM(np.array([3])) & masks.Padding(np.array([2])) & masks.Segments(np.array([0, 1]))
    for numbers in (jax.tree.map(lambda x: 0, mask), jax.tree.map(lambda x: float(x.sum()), mask)):
        assert len(jax.tree.leaves(numbers)) == 3
    assert jax.tree.leaves(masks.PrefixLM(3)) == []
    assert len({masks.PrefixLM(3), masks.PrefixLM(np.int64(3)), masks.PrefixLM(np.uint8(3))}) == 1


def test_a_mask_has_no_truth_value():
    with pytest.raises(TypeError, match="Causal has no truth value: combine masks by"):
        masks.Causal() and masks.SlidingWindow(2)


@pytest.mark.parametrize(
    ("far", "near"),
    [
        (masks.LocalWindow(2**40, 0), masks.Causal()),
        (masks.SlidingWindow(2**31), masks.Causal()),
        (masks.Strided(2**40), masks.LocalWindow(0, 0)),
        (masks.Dilated(2**20, 0, 2**20), masks.LocalWindow(0, 0)),
        (masks.PrefixLM(2**40), masks.LocalWindow(None, None)),
        (masks.GlobalTokens(2**31), masks.LocalWindow(None, None)),
        (masks.BlockDiagonal(2**40), masks.LocalWindow(None, None)),
        (masks.RandomBlocks(0, 1, 2**40), masks.LocalWindow(None, None)),
        (masks.sparse_transformer(2**40), masks.Causal()),
    ],
)
def test_numbers_beyond_any_length(far, near):
    np.testing.assert_array_equal(masks.materialize(far, 6), masks.materialize(near, 6))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int64"])
def test_arrays_of_any_integer_type(dtype):
    queries, keys = jnp.arange(300), jnp.arange(300)
    for build in (
        masks.Padding,
        masks.PrefixLM,
        masks.GlobalTokens,
        lambda n: masks.Segments(jnp.zeros(300, int), n + np.zeros(300, dtype)),
    ):
        narrow, wide = (
            build(np.array(100, kind)).evaluate(whole((1, 300, 300), queries, keys)) for kind in (dtype, "int32")
        )
        np.testing.assert_array_equal(narrow, wide)


def test_equality_and_hash_are_by_value():
    kinds = [masks.Causal(), masks.SlidingWindow(2), masks.SlidingWindow(3), masks.LocalWindow(2, 0), ~masks.Causal()]
    for (i, one), (j, other) in itertools.product(enumerate(kinds), repeat=2):
        assert (one == other) == (i == j)
    assert len({masks.SlidingWindow(2), masks.SlidingWindow(2), masks.SlidingWindow(np.int64(2))}) == 1
    assert masks.Causal() != 3


def test_operators_take_arrays():
    values = masks.materialize(masks.Causal() & np.array([[True, True], [False, True]]), 2)
    assert values.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: masks.SlidingWindow(0), "width must be at least 1, got 0"),
        (lambda: masks.SlidingWindow(2.5), "width must be an integer, got float 2.5"),
        (lambda: masks.LocalWindow(-1, 0), "left must be at least 0, got -1"),
        (lambda: masks.LocalWindow(0, True), "right must be an integer"),
        (lambda: masks.Strided(0), "stride must be at least 1"),
        (lambda: masks.Dilated(1, 1, 0), "dilation must be at least 1"),
        (lambda: masks.PrefixLM(-1), "n must be at least 0"),
        (lambda: masks.PrefixLM(np.array([0.5])), "n must have an integer dtype, got float32"),
        (lambda: masks.GlobalTokens(-2), "n must be at least 0"),
        (lambda: masks.RandomBlocks(-1, 1, 1), "seed must be at least 0"),
        (lambda: masks.RandomBlocks(0, 0, 1), "per_row must be at least 1"),
        (lambda: masks.Padding(np.array([True])), "lengths must have an integer dtype, got bool"),
        (lambda: masks.Segments(np.zeros(3)), "query_ids must have an integer dtype"),
        (lambda: masks.Array(np.ones((2, 2))), "mask must be boolean, True = may attend; got dtype float32"),
        (lambda: masks.Array(None), "mask must be an array, got NoneType None"),
        (lambda: masks.PrefixLM(np.int64(-2)), "n must be at least 0, got -2"),
        (lambda: masks.PrefixLM(np.array([-1, 3])), "n must be at least 0, got values in -1..3"),
        (lambda: masks.Padding(np.array([-1, 2])), "lengths must be at least 0, got values in -1..2"),
        (lambda: masks.Padding(np.array([2**31 + 5], np.uint32)), "lengths must lie in 0..2147483647"),
        (lambda: masks.Segments(np.array([2**31 + 1], np.uint32)), "query_ids must lie in 0..2147483647"),
        (lambda: masks.RandomBlocks(0, 1, 1, length=0), "length must be at least 1"),
        (lambda: masks.RandomBlocks(0, 1, 1, length=2**31), "length must be at most 2147483647, got 2147483648"),
        (lambda: masks.BlockDiagonal(0), "block must be at least 1"),
        (lambda: masks.longformer(-1, 1), "window must be at least 0, got -1"),
        (lambda: masks.longformer(1, -1), "global_tokens must be at least 0, got -1"),
        (lambda: masks.longformer(1, np.array([-1])), "global_tokens must be at least 0, got values in -1..-1"),
        (lambda: masks.bigbird(1, 1, per_row=0, block=1), "per_row must be at least 1"),
        (lambda: masks.bigbird(1, 1, per_row=1, block=1, seed=-1), "seed must be at least 0"),
        (lambda: masks.sparse_transformer(0), "stride must be at least 1"),
        (lambda: masks.documents(np.zeros(3)), "query_ids must have an integer dtype"),
        (lambda: masks.materialize(masks.Causal(), 2.5), "query_length must be an integer"),
        (lambda: masks.materialize(np.ones((2, 2)), 2), "mask must be boolean"),
        (lambda: masks.Causal() & biases.Alibi(2), "mask must be a mask, got the attn_jax.biases.Alibi"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.Array(np.ones((3, 5, 7), bool)), "mask must have rank 2 or 4"),
        (masks.Array(np.ones((5, 6), bool)), r"mask must broadcast to \[\*B, N, T, S\] = \(2, 3, 5, 7\), got shape \(1, 1, 5, 6\)"),
        (masks.Padding(np.array([1, 2, 3])), r"lengths must have shape \[\] or \[\*B\] = \(2,\), got \(3,\)"),
        (masks.Segments(np.zeros(5, int)), r"key_ids must have shape \[S\] or \[\*B, S\] = \(2, 7\), got \(5,\)"),
    ],
)  # fmt: skip
def test_other_sizes_than_the_square(mask, message):
    with pytest.raises(ValueError, match=message):
        mask.evaluate(whole(SQUARE, jnp.arange(5), jnp.arange(7)))
