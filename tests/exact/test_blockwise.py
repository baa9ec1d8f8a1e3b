"""The tile loop: which tiles it visits, what it keeps in memory, and that no choice of tiles changes a number.

Values and gradients against the oracle are the conformance suite's.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import Blockwise, biases, masks
from attn_jax.exact.tiles import Blocks, choose_blocks, make_plan
from attn_jax.lazy import Square
from tests.exact.calls import draw

B, T, S, N, K, H, V = 2, 21, 26, 4, 2, 8, 6
ARRAYS = (draw(B, T, N, H), draw(B, S, K, H, seed=1), draw(B, S, K, V, seed=2))
EVERYTHING = {
    "bias": biases.Alibi(N) + draw(1, N, T, S, seed=3),
    "mask": masks.LocalWindow(9, 4) | masks.GlobalTokens(2) | masks.RandomBlocks(0, 2, 3),
    "query_offset": 2,
    "key_value_seq_lengths": np.array([26, 17]),
    "logits_soft_cap": 6.0,
    "sinks": draw(N, seed=4),
    "dropout_rate": 0.3,
    "dropout_rng": jax.random.key(7),
}
TILES = [
    Blockwise(),
    Blockwise(queries=1, keys=1, entries=1),
    Blockwise(queries=5, keys=7, entries=1),
    Blockwise(queries=7, keys=13, entries=200),
    Blockwise(queries=21, keys=4, entries=400),
    Blockwise(queries=100, keys=100),
]


def both_ways(implementation, *arrays, **options):
    """Output, log-sum-exp and the gradients of a loss that reads both."""

    def loss(arrays, bias, sinks):
        given = {"bias": bias, "sinks": sinks} if bias is not None else {}
        output, logsumexp = attn_jax.dot_product_attention(
            *arrays, implementation=implementation, return_residual=True, **(options | given)
        )
        return (output**2).sum() + jnp.where(jnp.isneginf(logsumexp), 0, jnp.sin(logsumexp)).sum(), (output, logsumexp)

    gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(arrays, options.get("bias"), options.get("sinks"))
    return results, gradients


@functools.cache
def dense():
    return both_ways("dense", *ARRAYS, **EVERYTHING)


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_no_choice_of_tiles_changes_a_number(tiles):
    chex.assert_trees_all_close(both_ways(tiles, *ARRAYS, **EVERYTHING), dense(), rtol=2e-5, atol=1e-5)


def blocks_of(queries, keys):
    return Blocks(items=1, kv_heads=1, queries=queries, keys=keys)


def visits(mask, square, blocks):
    plan = make_plan(square, blocks, 1, mask, None)
    return np.asarray(plan.full), np.asarray(plan.mixed), plan


def test_only_the_tiles_that_a_mask_touches_are_visited():
    square = Square((1, 64, 64))
    full, mixed, plan = visits(masks.Causal(), square, blocks_of(16, 8))
    np.testing.assert_array_equal(full[0], [0, 2, 4, 6])
    np.testing.assert_array_equal(mixed[0], [2, 2, 2, 2])
    assert isinstance(plan.order, np.ndarray), "known when the program is traced"
    np.testing.assert_array_equal(np.sort(plan.order[0, 1, :4]), [0, 1, 2, 3])
    full, mixed, plan = visits(masks.SlidingWindow(8), square, blocks_of(8, 8))
    assert not plan.may_be_full
    np.testing.assert_array_equal(mixed[0], [1, 2, 2, 2, 2, 2, 2, 2])
    full, mixed, plan = visits(None, square, blocks_of(16, 16))
    assert not plan.may_be_mixed
    np.testing.assert_array_equal(full[0], [4, 4, 4, 4])


def test_what_comes_with_the_data_bounds_the_loops_at_run_time():
    square = Square((3, 1, 32, 32))

    @jax.jit
    def count(lengths):
        plan = make_plan(square, blocks_of(8, 8), 1, masks.Causal() & masks.Padding(lengths), None)
        return plan.full, plan.mixed

    full, mixed = count(np.array([0, 12, 32]))
    np.testing.assert_array_equal(full[:, 0], [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 3]])
    np.testing.assert_array_equal(mixed[:, 0], [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    count(np.array([5, 6, 7]))
    assert count._cache_size() == 1


def test_a_last_tile_that_overlaps_is_never_full():
    full, mixed, _ = visits(None, Square((1, 10, 10)), blocks_of(4, 4))
    np.testing.assert_array_equal(full[0], [2, 2, 2])
    np.testing.assert_array_equal(mixed[0], [1, 1, 1])


def test_steps_hold_what_divides():
    blocks = choose_blocks(Square((6, 8, 100, 100)), 4, Blockwise(queries=50, keys=50, entries=15_000))
    assert blocks == Blocks(items=1, kv_heads=2, queries=50, keys=50)
    blocks = choose_blocks(Square((6, 8, 10, 10)), 4, Blockwise(entries=2_500))
    assert blocks == Blocks(items=3, kv_heads=4, queries=10, keys=10)


def test_the_mask_chooses_the_size_of_tiles():
    square = Square((8, 8192, 8192))

    def side(mask):
        return choose_blocks(square, 8, Blockwise(), mask).queries

    assert side(masks.Causal()) == 512
    assert side(masks.bigbird(64, 64, per_row=3, block=64)) < 512
    assert side(masks.Causal() & masks.Padding(np.array(100))) == 512, "known at run time only"


def lowered(n, *, backward=True, **options):
    x = jax.ShapeDtypeStruct((1, n, 1, 64), jnp.float32)

    def forward(q, k, v):
        return attn_jax.dot_product_attention(q, k, v, implementation="blockwise", **options).sum()

    return jax.jit(jax.grad(forward, (0, 1, 2)) if backward else forward).trace(x, x, x)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (1023, 0)}], ids=str)
def test_the_program_does_not_grow_with_the_length(options):
    def size(n):
        return str(lowered(n, **options).jaxpr).count(" = ")

    assert size(131_072) == size(16_384)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_with_the_length_not_with_its_square(backward):
    def temporary(n):
        return lowered(n, backward=backward, is_causal=True).lower().compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(16_384), temporary(32_768)
    assert short <= 1e8
    assert long <= 2.2 * short


def products(function, *arguments):
    """The matrix products of a traced function, those of a loop's body once."""
    return str(jax.make_jaxpr(function)(*arguments)).count("dot_general")


def test_a_gradient_of_the_values_alone_takes_two_products_a_tile():
    query, key, value = (np.zeros((64, 1, 8), np.float32) for _ in range(3))
    attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(queries=32, keys=32))
    forward = products(attend, query, key, value)

    def backward(argnums):
        return products(jax.grad(lambda *arrays: attend(*arrays).sum(), argnums), query, key, value) - forward

    assert forward == 2  # the logits, and what they fetch
    assert backward(2) == 2  # the logits again, and dv
    assert backward((0, 1, 2)) == backward(0) == 5
    assert backward((0, 2)) == 5


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_rate": 0.3, "sinks": np.array([0.5, -1.0])}])
def test_a_gradient_of_the_values_alone_is_that_among_others(options):
    query, key, value = (draw(37, 2, 8, seed=seed) for seed in range(3))
    weight = draw(37, 2, 8, seed=3)
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].astype(np.float32), "dropout_rng": jax.random.key(0)}

    def loss(value, query):
        attend = functools.partial(attn_jax.dot_product_attention, implementation=Blockwise(queries=16, keys=8))
        return (attend(query, key, value, **options) * weight).sum()

    alone, (among, _) = jax.grad(loss)(value, query), jax.grad(loss, (0, 1))(value, query)
    np.testing.assert_array_equal(alone, among)


def test_statistics_without_a_gradient_cost_none():
    query, key, value = (np.zeros((64, 1, 8), np.float32) for _ in range(3))
    measure = functools.partial(
        attn_jax.diagnostics.attention_with_statistics,
        statistics=("entropy", "max_logit", "visible_keys"),
        implementation=Blockwise(queries=32, keys=32),
    )

    def loss(query, with_entropy):
        output, statistics = measure(query, key, value)
        return output.sum() + (statistics.entropy.sum() if with_entropy else 0.0)

    def size(with_entropy):
        return str(jax.make_jaxpr(jax.grad(lambda query: loss(query, with_entropy)))(query)).count(" = ")

    assert size(False) < size(True)


def test_output_and_logsumexp_have_names_for_rematerialisation():
    x = draw(1, 16, 1, 8)

    def loss(x, policy):
        attend = jax.checkpoint(
            lambda x: attn_jax.dot_product_attention(x, x, x, implementation="blockwise").sum(), policy=policy
        )
        return attend(x)

    def loops(policy):
        return str(jax.make_jaxpr(jax.grad(lambda x: loss(x, policy)))(x)).count("while[")

    saved = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_logsumexp")
    assert loops(saved) < loops(jax.checkpoint_policies.nothing_saveable)
    np.testing.assert_allclose(
        jax.grad(lambda x: loss(x, saved))(x),
        jax.grad(lambda x: attn_jax.dot_product_attention(x, x, x, implementation="dense").sum())(x),
        atol=1e-5,
    )


class Checkered(masks.Mask):
    """A mask of somebody else, which says nothing of its tiles."""

    def evaluate(self, tile):
        return (tile.query_positions + tile.key_positions) % 2 == 0


class Learned(biases.Bias):
    """A bias of somebody else, with a parameter and a table that has no gradient."""

    slope: jax.Array
    shift: jax.Array

    def evaluate(self, tile, dtype):
        return self.slope.astype(dtype) * (tile.key_positions - tile.query_positions + self.shift).astype(dtype)


def test_masks_and_biases_of_others_join():
    def both(implementation, slope):
        def loss(slope):
            bias = Learned(slope, jnp.asarray(3)) + biases.Alibi(N)
            return (
                attn_jax.dot_product_attention(*ARRAYS, bias, Checkered(), implementation=implementation) ** 2
            ).sum()

        return jax.value_and_grad(loss)(slope)

    slope = jnp.asarray(0.05)
    chex.assert_trees_all_close(both(TILES[3], slope), both("dense", slope), rtol=1e-5)


def test_under_vmap_each_lane_keeps_its_own_lengths():
    lengths = np.array([3, 26, 0, 11])
    query, key, value = (np.stack([x[0]] * 4) + draw(4, 1, 1, 1, seed=9) for x in ARRAYS)

    def attend(query, key, value, length):
        return attn_jax.dot_product_attention(
            query, key, value, key_value_seq_lengths=length, is_causal=True, implementation=TILES[3]
        )

    mapped = jax.vmap(attend)(query, key, value, lengths)
    alone = jnp.stack([attend(*x) for x in zip(query, key, value, lengths, strict=True)])
    chex.assert_trees_all_close(mapped, alone, atol=1e-6)
    partly = jax.vmap(attend, (0, None, None, 0))(query, key[0], value[0], lengths)
    chex.assert_trees_all_close(partly[0], mapped[0], atol=1e-6)


def test_lanes_share_the_bounds_of_their_loops():
    square = Square((1, 32, 32))

    def counts(length):
        plan = make_plan(square, blocks_of(8, 8), 1, masks.Causal() & masks.Padding(length), None)
        return plan.full[0], plan.mixed[0]

    lengths = np.array([[3, 12], [17, 0]])
    for full, mixed in (jax.vmap(jax.vmap(counts))(lengths), jax.jit(jax.vmap(jax.vmap(counts)))(lengths)):
        np.testing.assert_array_equal(full, np.broadcast_to([0, 0, 0, 0], (2, 2, 4)))
        np.testing.assert_array_equal(mixed, np.broadcast_to([1, 2, 3, 3], (2, 2, 4)))


@pytest.mark.parametrize("name", ["blockwise", "pallas"])
def test_a_second_derivative_is_refused_in_one_line(name):
    def loss(query):
        return attn_jax.dot_product_attention(query, *ARRAYS[1:], is_causal=True, implementation=name).sum()

    def twice(query):
        return (jax.grad(loss)(query) ** 2).sum()

    for gradient, query in (
        (jax.grad(twice), ARRAYS[0]),
        (jax.jit(jax.grad(twice)), ARRAYS[0]),
        (jax.vmap(jax.grad(twice)), ARRAYS[0][None]),
    ):
        with pytest.raises(ValueError, match=f"implementation='{name}' has first derivatives, .*; 'dense' has all"):
            gradient(query)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Blockwise(queries=0), "queries must be at least 1, got 0"),
        (lambda: Blockwise(keys=-3), "keys must be at least 1, got -3"),
        (lambda: Blockwise(entries=2.5), "entries must be an int"),
        (lambda: call(mask=masks.Segments(np.zeros(T + 1, int), np.zeros(S, int))), r"query_ids must have shape"),
        (lambda: call(mask=masks.Array(np.ones((T, S - 1), bool))), "mask must broadcast"),
        (lambda: call(bias=biases.Alibi(N + 1)), "the slopes of Alibi must have shape"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def call(**options):
    return attn_jax.dot_product_attention(*ARRAYS, implementation="blockwise", **options)
