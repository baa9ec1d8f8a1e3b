"""jit, vmap, grad and jvp of attention; how often it is traced; with and without 64-bit types; weak types."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import biases, masks
from tests import oracles
from tests.exact.conformance import GENERAL

B, T, S, N, K, H, V = 2, 4, 5, 4, 2, 4, 3
rng = np.random.default_rng(0)
ARRAYS = {
    "query": rng.standard_normal((B, T, N, H), np.float32),
    "key": rng.standard_normal((B, S, K, H), np.float32),
    "value": rng.standard_normal((B, S, K, V), np.float32),
    "bias": rng.standard_normal((B, 1, T, S), np.float32),
    "mask": rng.random((B, N, T, S)) < 0.7,
    "sinks": rng.standard_normal(N).astype(np.float32),
    "query_seq_lengths": np.array([3, 4], np.int32),
    "key_value_seq_lengths": np.array([5, 2], np.int32),
    "query_offset": np.array([1, 0], np.int32),
    "scale": np.array([0.5, 1.0, -0.3, 0.7], np.float32),
}
STATIC = {"is_causal": True, "logits_soft_cap": 3.0, "local_window_size": (3, 0)}
D_OUTPUT = rng.standard_normal((B, T, N, V), np.float32)


@pytest.fixture(params=[implementation.name for implementation in GENERAL])
def attend(request):
    return functools.partial(attn_jax.dot_product_attention, implementation=request.param)


def varied(name, copies=3):
    """`copies` versions of an array, stacked on a new leading axis."""
    x = ARRAYS[name]
    if x.dtype == bool:
        return np.stack([np.roll(x, i, axis=-1) for i in range(copies)])
    if x.dtype == np.int32:
        return np.stack([np.maximum(x - i, 0) for i in range(copies)])
    return np.stack([x * (1 + i) for i in range(copies)])


class TestCompiledOrNot(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_same_result(self):
        attend = self.variant(functools.partial(attn_jax.dot_product_attention, **STATIC, return_residual=True))
        output, logsumexp = attend(**ARRAYS)
        expected = oracles.attention(**ARRAYS, **STATIC)
        np.testing.assert_allclose(output, expected.output, atol=1e-5)
        np.testing.assert_allclose(logsumexp, expected.logsumexp, atol=1e-5)


# vmap: each operand alone is batched, as in `vmap(f, in_axes=(None, 0, ...))`


@pytest.mark.parametrize("name", ARRAYS)
def test_vmap_over_one_operand(attend, name):
    many = varied(name)

    def one(x):
        return attend(**(ARRAYS | {name: x}), **STATIC, return_residual=True)

    def gradients(x):
        def total(query, key, value, bias):
            changed = {"query": query, "key": key, "value": value, "bias": bias}
            return (attend(**(ARRAYS | changed | {name: changed.get(name, x)}), **STATIC) * D_OUTPUT).sum()

        first = [x if n == name else ARRAYS[n] for n in ("query", "key", "value", "bias")]
        return jax.grad(total, (0, 1, 2, 3))(*first)

    alone = jax.jit(lambda x: (one(x), gradients(x)))
    mapped = jax.jit(jax.vmap(lambda x: (one(x), gradients(x))))(many)
    expected = jax.tree.map(lambda *x: np.stack(x), *[alone(x) for x in many])
    chex.assert_trees_all_close(mapped, expected, atol=2e-5)


def test_vmap_of_some_operands_nested(attend):
    """Queries vary over two axes, keys over one, values over the other."""
    query, key = (
        np.stack([varied("query")] * 2) + np.arange(2, dtype=np.float32)[:, None, None, None, None, None],
        varied("key"),
    )
    value = varied("value", 2)
    inner = jax.vmap(lambda q, k, v: attend(q, k, v, is_causal=True), in_axes=(0, 0, None))
    mapped = jax.jit(jax.vmap(inner, in_axes=(0, None, 0)))(query, key, value)
    for i, j in np.ndindex(2, 3):
        expected = oracles.attention(query[i, j], key[j], value[i], is_causal=True)
        np.testing.assert_allclose(mapped[i, j], expected.output, atol=1e-5 * 3)


def test_vmap_keeps_poison_away(attend):
    """What `vmap` turns into a select must not compute with what is hidden."""
    lengths = np.array([[5, 2], [1, 4], [0, 3]], np.int32)
    key, value = (np.stack([ARRAYS[name]] * 3) for name in ("key", "value"))
    hidden = np.arange(S) >= lengths[..., None]
    key[hidden], value[hidden] = np.nan, np.nan

    def total(key, value, lengths):
        return (attend(ARRAYS["query"], key, value, key_value_seq_lengths=lengths) * D_OUTPUT).sum()

    results = jax.jit(jax.vmap(jax.value_and_grad(total, (0, 1))))(key, value, lengths)
    chex.assert_tree_all_finite(results)
    assert (results[1][1][hidden] == 0).all()


def test_leading_axes_are_a_vmap(attend):
    query, key, value = varied("query"), varied("key"), varied("value")
    mapped = jax.vmap(lambda *x: attend(*x, is_causal=True))(query, key, value)
    np.testing.assert_allclose(attend(query, key, value, is_causal=True), mapped, atol=1e-6)


def test_scan_and_checkpoint(attend):
    """A stack of layers: scanned, and rematerialised on the way back."""

    def layer(x, scale):
        return x + attend(x, x[:, :, :K], x[:, :, :K], is_causal=True, scale=scale), None

    def loss(x, layer):
        return (jax.lax.scan(layer, x, ARRAYS["scale"][:2])[0] ** 2).sum()

    plain = jax.jit(jax.value_and_grad(functools.partial(loss, layer=layer)))(ARRAYS["query"])
    spared = jax.jit(jax.value_and_grad(functools.partial(loss, layer=jax.checkpoint(layer))))(ARRAYS["query"])
    chex.assert_tree_all_finite(plain)
    chex.assert_trees_all_close(plain, spared, rtol=1e-5)


# Forward mode, on the dense form

FLOATS = ("query", "key", "value", "bias", "sinks", "scale")
CLOSED = {name: x for name, x in ARRAYS.items() if name not in FLOATS}


def dense(floats):
    return attn_jax.dot_product_attention(**floats, **CLOSED, **STATIC, implementation="dense", return_residual=True)


def test_jvp_matches_finite_differences(x64):
    floats = {name: ARRAYS[name].astype(np.float64) for name in FLOATS}
    floats["bias"][0, 0, 1, 2] = -np.inf
    tangents = {name: np.random.default_rng(i).standard_normal(x.shape) for i, (name, x) in enumerate(floats.items())}
    (output, _), (d_output, d_logsumexp) = jax.jit(lambda x, t: jax.jvp(dense, (x,), (t,)))(floats, tangents)

    def moved(step):
        return oracles.attention(**{name: x + step * tangents[name] for name, x in floats.items()}, **CLOSED, **STATIC)

    ahead, behind, here = moved(1e-6), moved(-1e-6), moved(0)
    np.testing.assert_allclose(output, here.output, atol=1e-12)
    np.testing.assert_allclose(d_output, (ahead.output - behind.output) / 2e-6, atol=1e-8)
    seeing = np.isfinite(here.logsumexp)
    assert not seeing.all()
    difference = (ahead.logsumexp[seeing] - behind.logsumexp[seeing]) / 2e-6
    np.testing.assert_allclose(d_logsumexp[seeing], difference, atol=1e-8)
    assert (d_logsumexp[~seeing] == 0).all()


def test_second_derivatives_match_finite_differences(x64):
    """A Hessian-vector product, forward over reverse."""
    floats = {name: ARRAYS[name].astype(np.float64) for name in FLOATS}

    def d_query(query):
        return jax.grad(lambda q: (dense(floats | {"query": q})[0] * D_OUTPUT).sum())(query)

    direction = np.random.default_rng(1).standard_normal(floats["query"].shape)
    _, product = jax.jit(lambda q: jax.jvp(d_query, (q,), (direction,)))(floats["query"])

    def exact(step):
        moved = oracles.attention(**(floats | {"query": floats["query"] + step * direction}), **CLOSED, **STATIC)
        return oracles.gradients(moved, D_OUTPUT)["query"]

    np.testing.assert_allclose(product, (exact(1e-6) - exact(-1e-6)) / 2e-6, atol=1e-8)


# Traces


def count_traces(attend, calls):
    traces = 0

    @jax.jit
    def counted(arrays):
        nonlocal traces
        traces += 1
        return attend(**arrays)

    for arrays in calls:
        counted({name: ARRAYS[name] for name in ("query", "key", "value")} | arrays)
    return traces


FRESHLY_BUILT = {
    "static numbers": lambda i: {"mask": masks.Causal() & masks.LocalWindow(2, None) | ~masks.Strided(3)},
    "random blocks": lambda i: {"mask": masks.RandomBlocks(7, per_row=1, block=2)},
    "numbers of another type": lambda i: {"mask": masks.SlidingWindow([3, np.int64(3), np.int32(3)][i])},
    "lengths": lambda i: {"mask": masks.Padding(np.array([i, 2], np.int32)) & masks.Causal()},
    "segments": lambda i: {"mask": masks.Segments(np.full((B, T), i, np.int32), np.full(S, 1, np.int32))},
    "arrays": lambda i: {"mask": masks.Array(np.roll(ARRAYS["mask"], i)) | masks.GlobalTokens(1)},
    "prefix per item": lambda i: {"mask": masks.PrefixLM(np.array([i, 1], np.int32))},
    "biases": lambda i: {"bias": biases.Alibi(N) + ARRAYS["bias"] * i},
    "tables": lambda i: {"bias": biases.RelativeBuckets(np.full((8, N), i, np.float32), max_distance=16)},
    "offsets": lambda i: {"query_offset": np.int32(i)},
    "positions": lambda i: {"query_positions": np.arange(T, dtype=np.int32) + i},
    "keys of dropout": lambda i: {"dropout_rng": jax.random.key(i)},
}


@pytest.mark.parametrize("what", FRESHLY_BUILT)
def test_equal_objects_and_new_data_share_one_trace(attend, what):
    options = {"dropout_rate": 0.5} if what == "keys of dropout" else {}
    calls = [FRESHLY_BUILT[what](i) for i in range(3)]
    assert count_traces(functools.partial(attend, is_causal=True, **options), calls) == 1


def test_other_numbers_trace_again(attend):
    calls = [{"mask": masks.LocalWindow(left, 0)} for left in (1, 2, 1)]
    assert count_traces(attend, calls) == 2


# Dtypes


def test_float32_stays_float32_where_64_bits_are_on(attend):
    def evaluate(arrays):
        def total(query):
            results = attend(**(arrays | {"query": query}), **STATIC, return_residual=True)
            return (results[0] * D_OUTPUT).sum(), results

        gradient, results = jax.grad(total, has_aux=True)(arrays["query"])
        return (gradient, *results, attn_jax.attention_weights(arrays["query"], arrays["key"]))

    narrow = jax.jit(evaluate)(ARRAYS)
    with jax.enable_x64(True):
        wide = jax.jit(evaluate)(ARRAYS)
    assert [x.dtype for x in wide] == [jnp.float32] * 4
    chex.assert_trees_all_close(narrow, tuple(np.asarray(x) for x in wide), atol=1e-6)


@pytest.mark.parametrize("kind", ["numpy float64", "python lists"])
def test_wide_inputs_follow_the_width_in_force(attend, kind):
    wide = [ARRAYS[name].astype(np.float64) for name in ("query", "key", "value")]
    given = wide if kind == "numpy float64" else [x.tolist() for x in wide]
    expected = oracles.attention(*wide, is_causal=True).output
    assert attend(*given, is_causal=True).dtype == jnp.float32
    with jax.enable_x64(True):
        output = attend(*given, is_causal=True)
        assert output.dtype == jnp.float64
        np.testing.assert_allclose(output, expected, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64])
def test_positions_of_any_integer_type(attend, dtype, x64):
    """Narrow and unsigned positions must not wrap around when a window or a distance is taken from them."""
    inputs = [ARRAYS[name] for name in ("query", "key", "value")]
    positions = {"query_positions": np.arange(T, dtype=dtype) + dtype(1), "key_positions": np.arange(S, dtype=dtype)}
    lazy = masks.Dilated(60, 60, 3) | masks.GlobalTokens(1)
    oracle = oracles.either(oracles.dilated(60, 60, 3), oracles.global_tokens(1))
    for options in ({}, {"is_causal": True, "local_window_size": (200, 200)}):
        output = attend(*inputs, bias=biases.Alibi(N), mask=lazy, **positions, **options)
        expected = oracles.attention(*inputs, bias=oracles.alibi(N), mask=oracle, **positions, **options)
        np.testing.assert_allclose(output, expected.output, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
@pytest.mark.parametrize("name", ["query_offset", "key_value_seq_lengths", "query_seq_lengths"])
def test_lengths_and_offsets_of_any_integer_type(attend, name, dtype, x64):
    """The axis may be longer than the type of a length can count."""
    length = 300
    x = np.random.default_rng(0).standard_normal((1, length, 1, 2)).astype(np.float32)
    options = {"is_causal": True, name: np.array([100], dtype)}
    expected = oracles.attention(x, x, x, **options).output
    np.testing.assert_allclose(attend(x, x, x, **options), expected, atol=1e-5)


def test_weak_types_do_not_leak(attend):
    """Python numbers and weakly typed arrays neither widen the output nor trace a second time."""
    weak = jnp.broadcast_to(jnp.asarray(1.0), (T, K, H))
    assert weak.weak_type
    output, logsumexp = attend(weak, weak, weak, return_residual=True)
    assert (output.weak_type, logsumexp.weak_type) == (False, False)
    half = [ARRAYS[name].astype(jnp.bfloat16) for name in ("query", "key", "value")]
    for scale in (2, 2.0, np.float32(2), np.float64(2), jnp.float32(2), jnp.asarray(2.0)):
        assert attend(*half, scale=scale).dtype == jnp.bfloat16
