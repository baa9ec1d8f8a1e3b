"""How arrays are cut by the axes that they have, and that a part knows its place in the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import biases, masks
from attn_jax.exact.arguments import Dropout, prepare
from attn_jax.exact.dropout import keep_mask
from attn_jax.lazy import Square
from attn_jax.parallel import parts

SHAPE = (2, 3, 4, 6, 5)  # two axes of the batch, N, T, S


def letters(tree, shape=SHAPE):
    return [tuple(spelling) for spelling in jax.tree.leaves(parts.spelled(tree, Square(shape)))]


def filled(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (masks.Causal(), []),
        (masks.Padding(np.ones((2, 3), int)), [("b", None)]),
        (masks.Padding(np.array(3)), [()]),
        (masks.PrefixLM(np.ones((2, 3), int)), [("b", None)]),
        (masks.Segments(np.ones(6, int), np.ones(5, int)), [("t",), ("s",)]),
        (masks.Segments(np.ones((2, 3, 6), int), np.ones((2, 1, 5), int)), [("b", None, "t"), ("b", None, "s")]),
        (masks.Array(filled(6, 5) == 0), [("t", "s")]),
        (masks.Array(filled(2, 3, 1, 6, 1) == 0), [("b", None, None, "t", None)]),
        (masks.Array(filled(1, 3, 4, 1, 5) == 0), [(None, None, "n", None, "s")]),
        (masks.Causal() & ~masks.Padding(np.array(3)) | masks.Array(filled(6, 1) == 0), [(), ("t", None)]),
        (biases.Alibi(4), []),
        (biases.RelativeBuckets(filled(8, 4)), [(None, "n")]),
        (biases.Alibi(4) + filled(2, 3, 4, 6, 5), [("b", None, "n", "t", "s")]),
        (
            Square(SHAPE, None, np.zeros((2, 3, 1, 6, 1), int), np.zeros((1, 1, 1, 1, 5), int)),
            [("b", None, None, "t", None), (None, None, None, None, "s")],
        ),
    ],
    ids=str,
)
def test_the_axes_of_an_array_are_those_that_its_field_names(tree, expected):
    assert letters(tree) == expected


def test_segments_of_the_queries_serve_the_keys_too():
    mask = masks.Causal() & ~masks.Segments(np.ones(6, int))
    assert letters(parts.with_ids_of_keys(mask), (1, 6, 6)) == [("t",), ("s",)]
    assert parts.with_ids_of_keys(None) is None


def test_lengths_and_positions_have_axes():
    x = np.ones((2, 6, 4, 8), np.float32)
    options = {"query_seq_lengths": np.array([1, 2]), "key_positions": np.arange(6)}
    problem = prepare(x, x, x, None, None, **options)
    assert letters(problem.mask, problem.square.shape) == [("b", "t"), ("s",)]
    assert letters(problem.square, problem.square.shape) == [(None, None, None, "s")]


def test_cut_put_and_add():
    x, letters = jnp.arange(24.0).reshape(2, 3, 4), jax.sharding.PartitionSpec("b", None, "s")
    place = {"s": (2, 2), "t": (0, 1)}
    np.testing.assert_array_equal(parts.cut(x, letters, place), x[:, :, 2:])
    np.testing.assert_array_equal(parts.put(x, x[:, :, :2], letters, place), x[:, :, np.array([0, 1, 0, 1])])
    added = parts.add(x, jnp.ones((2, 3, 2)), letters, place)
    np.testing.assert_array_equal(added - x, np.broadcast_to([0, 0, 1, 1], x.shape))
    other = jax.sharding.PartitionSpec("n")  # which has no axis that is cut
    assert parts.cut(x, other, place) is x
    np.testing.assert_array_equal(parts.add(x, x, other, place), 2 * x)
    padded = parts.pad(x, letters, {"s": 7, "b": 2})
    np.testing.assert_array_equal(padded, np.pad(x, [(0, 0), (0, 0), (0, 3)]))


WHOLE, STARTS, SIZES = (4, 6, 8, 10), (2, 3, 4, 5), (2, 3, 4, 5)
BOX = tuple(slice(start, start + size) for start, size in zip(STARTS, SIZES, strict=True))


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda tile: keep_mask(Dropout(0.5, jax.random.key(1)), tile),
        lambda tile: biases.Alibi(6).evaluate(tile, jnp.float32),
        lambda tile: masks.RandomBlocks(0, 2, 2).evaluate(tile),
        lambda tile: masks.bigbird(1, 1, per_row=1, block=2).evaluate(tile),
    ],
    ids=["dropout", "alibi", "random blocks", "bigbird"],
)
def test_a_part_is_a_box_of_the_whole(evaluate):
    """What is hashed or counted by indices: those of the whole, not of the part."""
    positions = (jnp.arange(start, start + size) for start, size in zip(STARTS[-2:], SIZES[-2:], strict=True))
    local = Square(SIZES)
    part = Square(
        SIZES,
        None,
        local.per_query("query_positions", next(positions)),
        local.per_key("key_positions", next(positions)),
        part_of=WHOLE,
        origin=jnp.array(STARTS),
    )
    expected = np.broadcast_to(jax.jit(lambda: evaluate(Square(WHOLE).whole()))(), WHOLE)[BOX]
    np.testing.assert_array_equal(np.broadcast_to(jax.jit(lambda: evaluate(part.whole()))(), SIZES), expected)
    assert len(np.unique(expected)) > 1
