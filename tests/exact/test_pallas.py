"""The kernels, interpreted against the oracle, and lowered for the machines that are not here."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import diagnostics
from attn_jax.exact import tiles
from attn_jax.exact.kernels import adapter
from attn_jax.exact.kernels.pallas import STATISTICS, flash_attention
from attn_jax.exact.kernels.visits import Visits, in_turn
from tests import oracles

MACHINES = ("cuda", "tpu")
CALLS = {"cuda": "xla.gpu.triton|triton_kernel_call", "tpu": "tpu_custom_call"}  # in the lowered program
TILE = (16, 16)
# Who may see whom, of the indices of queries and of keys: NumPy for the oracle, traced in the kernel.
PATTERNS = {
    "all": None,
    "causal": oracles.causal,
    "window": oracles.local_window(5, 2),
    "bigbird": lambda q, k: (abs(q - k) < 4) | (q < 2) | (k < 2) | ((q * 7 + 3) % 5 == k % 5) & (k >= 32),
    "rows that see nothing": lambda q, k: k > q + 20,
}


def square(pattern, T, S):
    if pattern is None:
        return np.ones((T, S), bool)
    with jax.ensure_compile_time_eval():
        return np.broadcast_to(pattern(np.arange(T)[:, None], np.arange(S)[None, :]), (T, S))


def plan(mask):
    """The visits of a mask that is written out."""

    def visits(queries, keys):
        T, S = mask.shape
        tiles = [[mask[i : i + queries, j : j + keys] for j in range(0, S, keys)] for i in range(0, T, queries)]
        kind = np.array([[0 if tile.all() else 1 if tile.any() else 2 for tile in row] for row in tiles])
        return Visits(np.argsort(kind, axis=1, kind="stable"), (kind == 0).sum(1), (kind == 1).sum(1))

    return visits


def draw(P=2, G=1, T=20, S=37, H=8, V=5, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (P, G * T, H), (P, S, H), (P, S, V)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def attend(arrays, pattern=None, *, T=20, machine="cuda", tile=TILE, **options):
    visits = plan(square(pattern, T, arrays[1].shape[1]))
    call = functools.partial(
        flash_attention, query_length=T, plan=visits, visible=pattern, tile=tile, interpret=machine, **options
    )
    return jax.jit(call)(*arrays)


def expected(arrays, pattern=None, *, T=20, scale=1.0, soft_cap=None):
    """Output `[P, R, V]` and every statistic `[P, R]`: the rows are the T queries of each of G heads."""
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    by_head = np.moveaxis(query.reshape(len(query), -1, T, query.shape[-1]), 1, 2)
    mask = square(pattern, T, key.shape[1])
    forward = oracles.attention(
        by_head, key[:, :, None], value[:, :, None], mask=mask, scale=scale, logits_soft_cap=soft_cap
    )
    fields = {name: np.moveaxis(x, 1, 2).reshape(query.shape[:2]) for name, x in oracles.statistics(forward).items()}
    return np.moveaxis(forward.output, 1, 2).reshape(*query.shape[:2], -1), fields


def check(results, oracle, tolerance=2e-6):
    (output, logsumexp, statistics), (expected_output, fields) = results, oracle
    assert output.dtype == logsumexp.dtype == jnp.float32
    np.testing.assert_allclose(output, expected_output, rtol=tolerance, atol=tolerance)
    for name, x in {"logsumexp": logsumexp, **statistics}.items():
        assert x.dtype == (jnp.int32 if name == "visible_keys" else jnp.float32)
        np.testing.assert_allclose(x, fields[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_grouped_heads_and_every_statistic(machine, name):
    arrays = draw(G=3)
    options = {"scale": 1.4, "soft_cap": 2.0} if name == "causal" else {"scale": 0.4}
    results = attend(arrays, PATTERNS[name], machine=machine, statistics=STATISTICS, **options)
    assert set(results[2]) == set(STATISTICS)
    check(results, expected(arrays, PATTERNS[name], **options))


@pytest.mark.parametrize(("machine", "dtype"), [("cuda", jnp.bfloat16), ("cuda", jnp.float16), ("tpu", jnp.bfloat16)])
def test_half_precision_is_summed_in_float32(machine, dtype):
    arrays = draw(T=20, S=600, dtype=dtype)
    output, logsumexp, statistics = attend(
        arrays, oracles.causal, machine=machine, tile=(32, 128), statistics=("sum_p2", "entropy")
    )
    expected_output, fields = expected(arrays, oracles.causal)
    # The logits and their softmax are float32; the weights are rounded before they fetch the values.
    check((jnp.float32(expected_output), logsumexp, statistics), (expected_output, fields), tolerance=5e-6)
    np.testing.assert_allclose(output, expected_output, atol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("T", "S", "tile"), [(1, 1, TILE), (1, 50, (16, 32)), (50, 1, TILE), (32, 64, (32, 16))])
def test_lengths_and_tiles(machine, T, S, tile):
    arrays = draw(T=T, S=S, H=3, V=1)
    check(attend(arrays, T=T, machine=machine, tile=tile), expected(arrays, T=T))


@pytest.mark.parametrize("machine", MACHINES)
def test_logits_that_overflow_a_naive_softmax(machine):
    arrays = draw(S=64)
    # One tile of keys dwarfs the one before it, so that the shift moves every time.
    arrays[1] = arrays[1] * jnp.geomspace(1, 100, 64)[None, :, None]
    oracle = expected(arrays)
    assert oracle[1]["max_logit"].max() > 200
    # A logit of 400 is known to 400 · 2^-24, and so is the exponent of its weight.
    check(attend(arrays, machine=machine, statistics=STATISTICS), oracle, tolerance=5e-5)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_nobody_sees_may_hold_anything(machine):
    """Keys that no query sees, and a query that sees no key: also where padding would see them."""
    arrays = draw(T=20, S=37)

    def pattern(q, k):
        return (k <= q) & (q != 3) & (k != 18)

    oracle = expected(arrays, pattern)
    arrays[0] = arrays[0].at[:, 3].set(jnp.nan)
    arrays[1:] = (x.at[:, 20:].set(jnp.nan).at[:, 18].set(jnp.inf) for x in arrays[1:])
    check(attend(arrays, pattern, machine=machine, statistics=STATISTICS), oracle)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_listed_tiles_are_visited_and_full_ones_without_a_mask(machine):
    arrays = draw(T=48, S=64)
    # Tile 0 of queries: 2 in full, 0 by the mask; 1: 3 in full; 2: none. What stands after them is no tile at all.
    visits = Visits(np.array([[2, 0, -1, 99], [3, -7, 1, 1], [0, 1, 2, 3]]), np.array([1, 1, 0]), np.array([1, 0, 0]))
    options = {"query_length": 48, "plan": lambda queries, keys: visits, "tile": TILE, "interpret": machine}

    def odd(q, k):
        return (k % 2 == 1) & (q >= 0)

    results = flash_attention(*arrays, visible=odd, statistics=["visible_keys"], **options)
    seen = np.zeros((48, 64), bool)
    seen[:16, 32:48] = seen[:16, 1:16:2] = seen[16:32, 48:] = True
    check(results, expected(arrays, lambda q, k: seen, T=48))


def test_visits_in_turn():
    visits = Visits(np.array([[2, 0, 1], [1, 2, 0], [5, 5, 5]]), np.array([2, 0, 0]), np.array([1, 2, 0]))
    whole = in_turn(visits, cut_short=False)
    assert whole.rows.tolist() == [0, 0, 0, 1, 1, 2]
    assert whole.columns.tolist() == [2, 0, 1, 1, 2, 2]
    assert [x.tolist() for x in whole[2:]] == [[0, 3, 5], [2, 0, 0], [1, 2, 0]]
    cut = in_turn(visits, cut_short=True)  # tile 2 needs a mask where it ends
    assert cut.columns.tolist() == [0, 2, 1, 1, 2, 2]
    assert [x.tolist() for x in cut[3:]] == [[1, 0, 0], [2, 2, 0]]
    assert all(x.dtype == np.int32 for x in cut)


def test_on_this_machine_and_under_vmap():
    arrays = draw(P=4)
    expected_results = attend(arrays, oracles.causal, statistics=STATISTICS)
    mapped = jax.vmap(lambda *arrays: attend(arrays, oracles.causal, machine=None, statistics=STATISTICS))
    results = mapped(*(x.reshape(2, 2, *x.shape[1:]) for x in arrays))
    results = jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), results)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), results, expected_results)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [1, 64, 80, 128, 256, 512])
def test_tiles_suit_the_machine(width, itemsize):
    asked = {}
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[itemsize]
    query, key = (jax.ShapeDtypeStruct((1, length, width), dtype) for length in (5000, 300))
    for machine in MACHINES:

        def visits(queries, keys, machine=machine):
            asked[machine] = queries, keys
            return plan(np.ones((5000, 300), bool))(queries, keys)

        call = functools.partial(flash_attention, query_length=5000, plan=visits, interpret=machine)
        jax.eval_shape(call, query, key, key)
    assert all(size >= 16 and size & (size - 1) == 0 for sizes in asked.values() for size in sizes)
    assert asked["tpu"] == (512, 512)
    queries, keys = asked["cuda"]
    # What a GPU of compute capability 8.6 has for one program, which float32 of width 512 exceeds.
    shared = (queries + 2 * 2 * keys) * max(16, 1 << (width - 1).bit_length()) * itemsize
    assert shared <= 99 * 1024 or width * itemsize == 2048


def lowered(machine, arrays, pattern=None, *, T=20, **options):
    call = functools.partial(attend, pattern=pattern, T=T, machine=None, tile=None, **options)
    return jax.jit(lambda *arrays: call(arrays)).trace(*arrays).lower(lowering_platforms=(machine,)).as_text()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [
        (None, jnp.float32),
        (oracles.causal, jnp.float16),
        (PATTERNS["window"], jnp.bfloat16),
        (PATTERNS["bigbird"], jnp.float32),
        (oracles.both(oracles.opposite(oracles.causal), oracles.strided(3)), jnp.bfloat16),
        (lambda q, k: k < jnp.asarray(9).reshape(1, 1), jnp.float32),
    ],
)
def test_it_lowers_for_machines_that_are_not_here(machine, pattern, dtype):
    text = lowered(machine, draw(G=3, H=80, V=48, dtype=dtype), pattern, statistics=STATISTICS, soft_cap=30.0)
    assert {name for name, call in CALLS.items() if re.search(call, text)} == {machine}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_it_lowers_at_every_precision(machine, precision):
    assert re.search(CALLS[machine], lowered(machine, draw(), oracles.causal, precision=precision))


def test_it_lowers_with_64_bit_types(x64):
    arrays = draw()
    for machine in MACHINES:
        assert re.search(CALLS[machine], lowered(machine, arrays, oracles.causal, statistics=STATISTICS))
    jaxpr = jax.make_jaxpr(lambda *arrays: attend(arrays, oracles.causal, machine="tpu"))(*arrays)
    [call] = [eqn for eqn in jaxpr.eqns[0].params["jaxpr"].eqns if eqn.primitive.name == "pallas_call"]
    for block in call.params["grid_mapping"].block_mappings:  # a TPU takes no other index, but says so too late
        assert all(index.dtype == jnp.int32 for index in block.index_map_jaxpr.out_avals)


def test_elsewhere_it_raises():
    with pytest.raises(NotImplementedError, match="rocm"):
        lowered("rocm", draw())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"statistics": ["tail_p2"]}, ValueError, "statistics must be one of 'logsumexp', 'entropy'.*got 'tail_p2'"),
        ({"tile": (8, 16)}, ValueError, r"tile must be two powers of two from 16 on, got \(8, 16\)"),
        ({"tile": (16, 48)}, ValueError, r"tile must be two powers of two from 16 on, got \(16, 48\)"),
        ({"dtype": np.int32}, TypeError, "query must be float32, bfloat16 or float16, got int32"),
    ],
)
def test_what_it_does_not_take(options, error, message):
    arrays = draw(dtype=options.pop("dtype", np.float32))
    with pytest.raises(error, match=message):
        attend(arrays, **options)


@pytest.mark.parametrize("precision", [None, "default", "highest", jax.lax.Precision.HIGHEST])
def test_precision_by_name_and_by_enumeration(precision):
    query, key, value = (x[None] for x in draw(P=4, S=20, V=8))
    output = attn_jax.dot_product_attention(query, key, value, precision=precision, implementation="pallas")
    np.testing.assert_allclose(output, attn_jax.dot_product_attention(query, key, value), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        ("output", {"precision": "high"}, "its precision is None, 'default' or 'highest', got 'high'; 'dense'"),
        ("output", {"scale": np.ones(20, np.float32)}, "it takes a number as scale; 'dense'"),
        ("output", {"mask": np.ones((4, 4), bool)}, "it takes masks of numbers, not of arrays; 'dense'"),
        ("output", {"query_offset": np.array(1)}, "it takes a number as query_offset; 'dense'"),
        ("both", {"statistics": ("tail_p2",)}, "implementation='pallas' has no tail_p2; 'dense', 'blockwise' have"),
        ("statistics", {}, "it needs values; 'dense', 'blockwise' can"),
    ],
)
def test_a_problem_it_does_not_take(call, options, message):
    query, key, value = (x[None] for x in draw(P=4, T=20, S=4, V=8))
    functions = {
        "output": lambda **options: attn_jax.dot_product_attention(query, key, value, **options),
        "both": lambda **options: diagnostics.attention_with_statistics(query, key, value, **options),
        "statistics": lambda **options: diagnostics.attention_statistics(query, key, **options),
    }
    with pytest.raises(ValueError, match=message):
        functions[call](implementation="pallas", **options)


def test_a_long_square_is_looked_at_in_few_tiles(monkeypatch):
    """Whether the kernel could run is asked of every call: not by 67 million tiles of a square of 131,072."""
    looked = []

    def make_plan(square, blocks, *rest):
        sizes = blocks.queries, blocks.keys
        looked.append(math.prod(-(-n // size) for n, size in zip(square.shape[-2:], sizes, strict=True)))
        return tiles.make_plan(square, blocks, *rest)

    monkeypatch.setattr(adapter, "make_plan", make_plan)
    x = jax.ShapeDtypeStruct((131072, 1, 8), jnp.float32)
    jax.eval_shape(lambda x: attn_jax.dot_product_attention(x, x, x, is_causal=True), x)
    assert looked
    assert max(looked) <= 64 * 64
