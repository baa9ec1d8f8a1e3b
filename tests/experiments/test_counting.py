"""Counts against unrolled programs, where XLA counts every tile, and the reason why loops are counted by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import masks
from attn_jax.exact.tiles import Blockwise
from experiments import counting

WIDTH = 128  # what is done to a logit besides the products is small next to it


def shapes(count, length, width=WIDTH):
    return [jax.ShapeDtypeStruct((length, 1, width), jnp.float32)] * count


def one_head(length, width=WIDTH):
    return [jax.ShapeDtypeStruct((length, width), jnp.float32)] * 3


def unrolled(tile, visited):
    """Forward attention of one head in plain Python, tile by tile: the same algorithm without a loop."""

    def attend(query, key, value):
        outputs = []
        for i in range(0, query.shape[0], tile):
            maximum, total, sums = (
                jnp.full((tile, 1), -jnp.inf),
                jnp.zeros((tile, 1)),
                jnp.zeros((tile, value.shape[1])),
            )
            for j in range(0, key.shape[0], tile):
                if visited(i, j):
                    logits = query[i : i + tile] @ key[j : j + tile].T
                    new = jnp.maximum(maximum, logits.max(axis=1, keepdims=True))
                    numerators, factor = jnp.exp(logits - new), jnp.exp(maximum - new)
                    total = total * factor + numerators.sum(axis=1, keepdims=True)
                    sums, maximum = sums * factor + numerators @ value[j : j + tile], new
            outputs.append(sums / total)
        return jnp.concatenate(outputs)

    return attend


def trained(attend):
    def both(cotangent, *inputs):
        output, pull = jax.vjp(attend, *inputs)
        return output, *pull(cotangent)

    return both


def work(direction, mask, length, tile, width=WIDTH):
    return counting.tile_loop(direction, mask, length, (tile, tile), heads=1, kv_heads=1, width=width)


@pytest.mark.parametrize(("length", "tile"), [(256, 128), (512, 128)])
@pytest.mark.parametrize(
    ("mask", "visited"),
    [(None, lambda i, j: True), (masks.Causal(), lambda i, j: j <= i), (masks.LocalWindow(0, 0), lambda i, j: j == i)],
)
def test_flops_are_those_of_the_unrolled_program(length, tile, mask, visited):
    found = counting.xla_cost(unrolled(tile, visited), *one_head(length))
    assert found.flops == pytest.approx(work("forward", mask, length, tile).flops, rel=0.03)


def test_flops_of_the_tile_loop_are_those_of_its_program_when_it_has_one_tile():
    attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(256, 256))
    forward, backward = (work(direction, None, 256, 256) for direction in ("forward", "backward"))
    assert counting.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(forward.flops, rel=0.03)
    both = counting.xla_cost(trained(attend), *shapes(4, 256))
    assert both.flops == pytest.approx((forward + backward).flops, rel=0.03)


def test_xla_counts_the_body_of_a_loop_once():
    attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(128, 128))
    counted = work("forward", None, 256, 128).flops
    assert counting.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(counted / 4, rel=0.03)


def test_flops_of_the_dense_form_are_those_of_its_program():
    attend = functools.partial(attn_jax.dot_product_attention, implementation="dense")
    forward, backward = (counting.dense_flops(d, 256, heads=1, width=WIDTH) for d in ("forward", "backward"))
    assert counting.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(forward, rel=0.03)
    assert counting.xla_cost(trained(attend), *shapes(4, 256)).flops == pytest.approx(forward + backward, rel=0.03)


def test_bytes_grow_as_those_of_the_unrolled_program():
    """What grows with the width of a head is what passes between tiles; what does not, a tile keeps to itself.

    XLA counts it about three times: a slice is copied first, and the sums go out and come in at every tile.
    """
    for length, tile in ((256, 128), (512, 128), (512, 256)):
        program = unrolled(tile, lambda i, j: j <= i)
        wide, narrow = (counting.xla_cost(program, *one_head(length, width)).bytes for width in (256, 128))
        counted = [work("forward", masks.Causal(), length, tile, width).bytes for width in (256, 128)]
        assert 2.5 < (wide - narrow) / (counted[0] - counted[1]) < 3.5


def test_bytes_by_hand():
    """Two tiles of queries; the first visits one tile of keys, the second both; two query heads share a key head."""
    sizes = {"heads": 2, "kv_heads": 1, "width": 10}
    forward = counting.tile_loop("forward", masks.Causal(), 8, (4, 4), **sizes)
    assert forward.bytes == 4 * (2 * 8 * (10 + 10 + 1) + 3 * 4 * (10 + 10))
    backward = counting.tile_loop("backward", masks.Causal(), 8, (4, 4), **sizes, itemsize=2)
    assert backward.bytes == 2 * (2 * 8 * (4 * 10 + 1) + 3 * 4 * (2 * 10 + 2 * 2 * 10))
    assert backward.flops == 5 * 2 * 10 * 2 * 3 * 16


def test_touched_share():
    assert counting.touched_share(None, 100, (32, 32)) == 1
    assert counting.touched_share(masks.Causal(), 64, (32, 32)) == 3 / 4
    assert counting.touched_share(masks.SlidingWindow(1), 128, (32, 32)) == 1 / 4


def test_the_tile_is_the_one_that_blockwise_chooses():
    assert counting.tile_of(None, 32, heads=2, kv_heads=2) == (32, 32)
    queries, keys = counting.tile_of(masks.Causal(), 2**14, heads=8, kv_heads=8)
    assert queries < 2**14
    assert keys < 2**14


def test_temporary_memory_of_a_program_that_must_keep_a_square():
    square = counting.temporary_bytes(lambda x: jnp.tanh(x @ x.T) @ x, jax.ShapeDtypeStruct((512, 8), jnp.float32))
    assert square >= 4 * 512**2
    assert counting.temporary_bytes(lambda x: x + 1, jax.ShapeDtypeStruct((512, 8), jnp.float32)) < 4 * 512


def test_counted_exponents():
    sizes = np.array([2, 4, 16])
    found = counting.counted_exponent(sizes, 3.0 * sizes**1.5)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found.count is None
    bent = counting.counted_exponent([1, 2, 4], [1, 2, 8])
    assert (bent.low, bent.high) == pytest.approx((1, 2))
    with pytest.raises(ValueError, match=r"at least two, got shapes \(1,\) and \(1,\)"):
        counting.counted_exponent([1], [1])
