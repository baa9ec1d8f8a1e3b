"""Counts against unrolled programs, where XLA counts every tile, and the reason why loops are counted by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import linear, lowrank, masks, routed
from attn_jax.diagnostics import costs
from attn_jax.exact.tiles import Blockwise

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
    return costs.tile_loop(direction, mask, length, (tile, tile), heads=1, kv_heads=1, width=width)


@pytest.mark.parametrize(("length", "tile"), [(256, 128), (512, 128)])
@pytest.mark.parametrize(
    ("mask", "visited"),
    [(None, lambda i, j: True), (masks.Causal(), lambda i, j: j <= i), (masks.LocalWindow(0, 0), lambda i, j: j == i)],
)
def test_flops_are_those_of_the_unrolled_program(length, tile, mask, visited):
    found = costs.xla_cost(unrolled(tile, visited), *one_head(length))
    assert found.flops == pytest.approx(work("forward", mask, length, tile).flops, rel=0.03)


def test_flops_of_the_tile_loop_are_those_of_its_program_when_it_has_one_tile():
    attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(256, 256))
    forward, backward = (work(direction, None, 256, 256) for direction in ("forward", "backward"))
    assert costs.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(forward.flops, rel=0.03)
    both = costs.xla_cost(trained(attend), *shapes(4, 256))
    assert both.flops == pytest.approx((forward + backward).flops, rel=0.03)


def test_xla_counts_the_body_of_a_loop_once():
    attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(128, 128))
    counted = work("forward", None, 256, 128).flops
    assert costs.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(counted / 4, rel=0.03)


def test_flops_of_the_dense_form_are_those_of_its_program():
    attend = functools.partial(attn_jax.dot_product_attention, implementation="dense")
    forward, backward = (costs.dense_flops(d, 256, heads=1, width=WIDTH) for d in ("forward", "backward"))
    assert costs.xla_cost(attend, *shapes(3, 256)).flops == pytest.approx(forward, rel=0.03)
    assert costs.xla_cost(trained(attend), *shapes(4, 256)).flops == pytest.approx(forward + backward, rel=0.03)


def test_bytes_grow_as_those_of_the_unrolled_program():
    """What grows with the width of a head is what passes between tiles; what does not, a tile keeps to itself.

    XLA counts it about three times: a slice is copied first, and the sums go out and come in at every tile.
    """
    for length, tile in ((256, 128), (512, 128), (512, 256)):
        program = unrolled(tile, lambda i, j: j <= i)
        wide, narrow = (costs.xla_cost(program, *one_head(length, width)).bytes for width in (256, 128))
        counted = [work("forward", masks.Causal(), length, tile, width).bytes for width in (256, 128)]
        assert 2.5 < (wide - narrow) / (counted[0] - counted[1]) < 3.5


def test_bytes_by_hand():
    """Two tiles of queries; the first visits one tile of keys, the second both; two query heads share a key head."""
    sizes = {"heads": 2, "kv_heads": 1, "width": 10}
    forward = costs.tile_loop("forward", masks.Causal(), 8, (4, 4), **sizes)
    assert forward.bytes == 4 * (2 * 8 * (10 + 10 + 1) + 3 * 4 * (10 + 10))
    backward = costs.tile_loop("backward", masks.Causal(), 8, (4, 4), **sizes, itemsize=2)
    assert backward.bytes == 2 * (2 * 8 * (4 * 10 + 1) + 3 * 4 * (2 * 10 + 2 * 2 * 10))
    assert backward.flops == 5 * 2 * 10 * 2 * 3 * 16


def test_touched_share():
    assert costs.touched_share(None, 100, (32, 32)) == 1
    assert costs.touched_share(masks.Causal(), 64, (32, 32)) == 3 / 4
    assert costs.touched_share(masks.SlidingWindow(1), 128, (32, 32)) == 1 / 4


def test_the_tile_is_the_one_that_blockwise_chooses():
    assert costs.tile_of(None, 32, heads=2, kv_heads=2) == (32, 32)
    queries, keys = costs.tile_of(masks.Causal(), 2**14, heads=8, kv_heads=8)
    assert queries < 2**14
    assert keys < 2**14


def test_temporary_memory_of_a_program_that_must_keep_a_square():
    square = costs.temporary_bytes(lambda x: jnp.tanh(x @ x.T) @ x, jax.ShapeDtypeStruct((512, 8), jnp.float32))
    assert square >= 4 * 512**2
    assert costs.temporary_bytes(lambda x: x + 1, jax.ShapeDtypeStruct((512, 8), jnp.float32)) < 4 * 512


# The other mechanisms: FLOPs against their own programs, loop-free at these sizes; bytes by what grows with the width.

HEADS = {"heads": 2, "kv_heads": 1, "width": WIDTH}


def grouped(length, width=WIDTH):
    """query, key and value, two query heads to a key head."""
    return [jax.ShapeDtypeStruct((length, heads, width), jnp.float32) for heads in (2, 1, 1)]


def projection(rank, length):
    return jax.ShapeDtypeStruct((rank, length), jnp.float32)


def random_features(query, key, value, directions):
    return linear.linear_attention(query, key, value, feature_map=linear.RandomFeatures(directions))


@pytest.mark.parametrize("rank", [16, 48])
def test_linformer(rank):
    found = costs.xla_cost(lowrank.linformer_attention, *grouped(60), *[projection(rank, 60)] * 2)
    assert found.flops == pytest.approx(costs.linformer(60, rank, **HEADS).flops, rel=0.03)


@pytest.mark.parametrize(("landmarks", "iterations"), [(20, 6), (30, 2)])
def test_nystrom(landmarks, iterations):
    attend = functools.partial(lowrank.nystrom_attention, landmarks=landmarks, iterations=iterations)
    counted = costs.nystrom(60, landmarks, iterations=iterations, **HEADS)
    assert costs.xla_cost(attend, *grouped(60)).flops == pytest.approx(counted.flops, rel=0.05)


@pytest.mark.parametrize("features", [32, 96])
def test_linear(features):
    directions = jax.ShapeDtypeStruct((features, WIDTH), jnp.float32)
    found = costs.xla_cost(random_features, *grouped(64), directions)
    assert found.flops == pytest.approx(costs.linear(64, features, drawn=True, **HEADS).flops, rel=0.05)
    attend = functools.partial(linear.linear_attention, feature_map="relu")
    found = costs.xla_cost(attend, *grouped(64))
    assert found.flops == pytest.approx(costs.linear(64, WIDTH, **HEADS).flops, rel=0.05)


def test_causal_linear_of_one_chunk():
    options = {"feature_map": "relu", "is_causal": True, "chunk_size": 64}
    counted = costs.linear(64, WIDTH, chunk=64, **HEADS)
    # continued from a state: XLA would leave out the products with one of zeros
    state = linear.LinearState.empty((), 1, WIDTH, WIDTH, normalize=True)

    def run(state, *inputs):
        return linear.linear_attention(*inputs, initial_state=state, return_state=True, **options)

    assert costs.xla_cost(run, state, *grouped(64)).flops == pytest.approx(counted.flops, rel=0.05)
    # of two chunks, where XLA counts the body of the loop once, by hand
    two = costs.linear(128, WIDTH, chunk=64, **HEADS)
    assert two.flops == 2 * counted.flops
    assert two.bytes == 2 * counted.bytes  # the state goes out of one and into the next


def test_routed_in_one_group():
    """All pairs meet, in one dense pass; what else is done to a vector (norms, sums of rounds) is a tenth of that."""
    hashing = jax.ShapeDtypeStruct((1, 2, WIDTH, 0), jnp.float32)
    query, *_ = grouped(60)
    found = costs.xla_cost(routed.lsh_attention, query, query, hashing)
    counted = costs.routed(60, 1, hashed=True, heads=2, kv_heads=2, width=WIDTH)
    assert found.flops == pytest.approx(counted.flops, rel=0.12)


@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_pairs_that_meet(size, window):
    ranks = np.arange(size)
    distance = ranks[:, None] - ranks[None, :]
    near = np.abs(distance) < (window or size)
    assert costs.met_pairs(size, window, is_causal=False) == near.sum()
    assert costs.met_pairs(size, window, is_causal=True) == (near & (distance >= 0)).sum()


def test_routed_by_hand():
    counted = costs.routed(12, 3, window=2, is_causal=True, heads=2, kv_heads=1, width=10, itemsize=1)
    assert counted.flops == 2 * 12 * 10 * 3 * (2 + 1) + 2 * 2 * 10 * 2 * (3 * (4 + 3))
    assert counted.bytes == 3 * 12 * 10 * (2 + 2 + 1 + 1)
    hashed = costs.routed(12, 4, rounds=2, hashed=True, heads=2, kv_heads=2, width=10)
    assert hashed.flops == 2 * 12 * 10 * 2 * 2 * 2 + 2 * 2 * 10 * 2 * (2 * 4 * 9)


@pytest.mark.parametrize(
    ("attend", "extra", "count"),
    [
        (lowrank.linformer_attention, [projection(16, 512)] * 2, functools.partial(costs.linformer, rank=16)),
        (
            functools.partial(lowrank.nystrom_attention, landmarks=16),
            [],
            functools.partial(costs.nystrom, landmarks=16),
        ),
        (functools.partial(linear.linear_attention, feature_map="relu"), [], None),
    ],
    ids=("linformer", "nystrom", "linear"),
)
def test_bytes_grow_as_those_of_the_programs(attend, extra, count):
    """XLA counts an array for each operation that touches it, up to about three where one stage is meant."""
    wide, narrow = (costs.xla_cost(attend, *grouped(512, width), *extra).bytes for width in (128, 64))

    def counted(width):
        sizes = {"heads": 2, "kv_heads": 1, "width": width}
        return costs.linear(512, width, **sizes).bytes if count is None else count(512, **sizes).bytes

    assert 1.3 < (wide - narrow) / (counted(128) - counted(64)) < 3.5
