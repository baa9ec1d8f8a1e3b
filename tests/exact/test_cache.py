"""Caches: any cutting of a sequence into calls gives what one call gives, and nothing stored is ever lost or moved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attn_jax
from attn_jax import biases, masks
from attn_jax.exact import cache as caches
from attn_jax.exact.merge import merge_attention
from tests import oracles
from tests.exact.calls import draw

SLOTS, CHUNK, STEPS = 12, 4, 5
dense, blockwise = (
    functools.partial(attn_jax.dot_product_attention, implementation=name) for name in ("dense", "blockwise")
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One compiled call: sizes, what the cache is, and the options of the package and of the oracle."""

    N: int = 2
    K: int = 2
    V: int = 4
    capacity: int = SLOTS
    window: int | None = None
    dtype: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    oracle: dict = dataclasses.field(default_factory=dict)
    sinks: bool = False


TABLE = draw(8, 6, seed=7)
CASES = {
    "heads of their own": Case(V=3, options={"attention_fn": blockwise}),
    "groups, alibi, cap": Case(
        N=6, K=3, sinks=True, options={"bias": biases.Alibi(6), "logits_soft_cap": 2.0},
        oracle={"bias": oracles.alibi(6), "logits_soft_cap": 2.0},
    ),
    "one key head, window, bfloat16": Case(
        N=4, K=1, dtype="bfloat16", options={"local_window_size": (2, 5)}, oracle={"local_window_size": (2, 0)}
    ),
    "ring with room to spare": Case(
        N=6, K=3, V=5, capacity=5, window=4, sinks=True,
        options={"bias": biases.RelativeBuckets(TABLE, bidirectional=False, max_distance=9)},
        oracle={
            "bias": oracles.relative_buckets(TABLE, bidirectional=False, max_distance=9), "local_window_size": (3, 0),
        },
    ),
    "ring smaller than a chunk": Case(
        N=2, K=1, capacity=3, window=3, options={"local_window_size": (1, 0), "scale": 0.3},
        oracle={"local_window_size": (1, 0), "scale": 0.3},
    ),
    "lazy masks": Case(
        options={"mask": masks.Strided(2) | masks.GlobalTokens(2), "attention_fn": blockwise},
        oracle={"mask": oracles.either(oracles.strided(2), oracles.global_tokens(2))},
    ),
}  # fmt: skip


@functools.cache
def step(name):
    """One call: attention to the cache and to `CHUNK` new tokens, of which `counts` count, and the cache after it."""
    case = CASES[name]

    @jax.jit
    def run(query, key, value, cache, counts, sinks):
        extra = {"sinks": sinks} if case.sinks else {}
        output = attn_jax.cached_attention(query, key, value, cache, counts=counts, **extra, **case.options)
        return output, cache.append(key, value, counts)

    return run


def empty(case, batch=(2,), poison=0.0):
    cache = attn_jax.empty_cache(
        batch, case.capacity, case.K, 4, value_width=case.V, dtype=case.dtype, window=case.window
    )
    return dataclasses.replace(cache, key=cache.key + poison, value=cache.value + poison)


ONE_BY_ONE = [[1, 1]] * STEPS
cuttings = st.lists(st.lists(st.integers(0, CHUNK), min_size=2, max_size=2), min_size=STEPS, max_size=STEPS).filter(
    lambda cutting: max(map(sum, zip(*cutting, strict=True))) <= SLOTS
)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@example(cutting=ONE_BY_ONE, seed=0)
@example(cutting=[[4, 0], [0, 4], [4, 4], [4, 1], [0, 3]], seed=1)
@example(cutting=[[0, 0], [3, 1], [0, 0], [1, 4], [4, 4]], seed=2)
@given(cutting=cuttings, seed=st.integers(0, 2**32 - 1))
def test_any_cutting_gives_what_one_call_gives(name, cutting, seed):
    case, rng = CASES[name], np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    lengths = np.sum(cutting, axis=0)
    shapes = {"query": (case.N, 4), "key": (case.K, 4), "value": (case.K, case.V)}
    whole = {name: rng.standard_normal((2, SLOTS, *shape)).astype(dtype) for name, shape in shapes.items()}
    sinks = rng.standard_normal(case.N).astype(np.float32)

    cache = empty(case, poison=np.nan)  # what no token has filled may hold anything
    outputs, at = np.zeros((2, SLOTS, case.N, case.V), np.float32), np.zeros(2, int)
    for counts in cutting:
        # Past the counts of an item lies what the caller never meant: poison.
        new = {name: np.full((2, CHUNK, *shape), np.nan, dtype) for name, shape in shapes.items()}
        for item, count in enumerate(counts):
            for name_, x in new.items():
                x[item, :count] = whole[name_][item, at[item] : at[item] + count]
        output, cache = step(name)(*new.values(), cache, np.array(counts, np.int32), sinks)
        for item, count in enumerate(counts):
            outputs[item, at[item] : at[item] + count] = output[item, :count]
            assert (output[item, count:] == 0).all()
        at += counts
    np.testing.assert_array_equal(cache.lengths, lengths)
    assert not cache.overflowed.any()

    given_sinks = {"sinks": sinks} if case.sinks else {}
    expected = oracles.attention(*whole.values(), is_causal=True, **given_sinks, **case.oracle).output
    counted = np.arange(SLOTS) < lengths[:, None]
    # Two parts, each rounded to the dtype of the query, and their mean once more.
    tolerance = 1e-5 if case.dtype == "float32" else 2**-7 * np.abs(whole["value"].astype(np.float32)).max()
    np.testing.assert_allclose(outputs[counted], expected[counted], rtol=0, atol=tolerance)

    # The slots that hold tokens hold the right ones.
    positions = np.asarray(cache.positions)
    for item, length in enumerate(lengths):
        kept = range(max(0, length - case.capacity), length)
        assert sorted(positions[item][positions[item] >= 0]) == list(kept)
        for slot, position in enumerate(positions[item]):
            if position >= 0:
                np.testing.assert_array_equal(cache.key[item, :, slot], whole["key"][item, position])
                np.testing.assert_array_equal(cache.value[item, :, slot], whole["value"][item, position])


def test_a_prefill_and_many_steps_are_two_traces_and_a_scan():
    """Lengths are data: neither the place of a step nor the tokens stored before it compile anything anew."""
    traces = []

    @jax.jit
    def extend(cache, x):
        traces.append(x.shape)
        return cache.append(x, x), attn_jax.cached_attention(x, x, x, cache)

    whole = draw(2, 24, 2, 4)
    cache, first = extend(attn_jax.empty_cache(2, 24, 2, 4), whole[:, :8])
    prefilled, outputs = cache, [first]
    for i in range(8, 24):
        cache, output = extend(cache, whole[:, i : i + 1])
        outputs.append(output)
    assert traces == [(2, 8, 2, 4), (2, 1, 2, 4)]
    expected = oracles.attention(whole, whole, whole, is_causal=True).output
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, atol=1e-6)

    scanned, steps = jax.lax.scan(extend, prefilled, np.moveaxis(whole[:, 8:, None], 1, 0))
    jax.tree.map(np.testing.assert_array_equal, scanned, cache)
    np.testing.assert_allclose(np.moveaxis(steps[:, :, 0], 0, 1), expected[:, 8:], atol=1e-6)


def seen(cache, length, **options):
    """How many keys each of `length` single steps sees: the query is 0, so a key's share is 1 / their number."""

    def step(cache, value):
        zero = jnp.zeros((1, 1, 4))
        output = attn_jax.cached_attention(zero, zero, value, cache, **options)
        return cache.append(zero, value), output[0, 0]

    _, outputs = jax.jit(functools.partial(jax.lax.scan, step))(cache, jnp.eye(length)[:, None, None])
    counts = (np.asarray(outputs) > 0).sum(axis=1)
    np.testing.assert_allclose(outputs, np.where(outputs > 0, 1 / counts[:, None], 0), rtol=1e-6)
    return counts.tolist()


@pytest.mark.parametrize(("window", "expected"), [(1, [1] * 5), (3, [1, 2, 3, 3, 3]), (5, [1, 2, 3, 4, 5])])
def test_a_ring_sees_its_window_and_no_more(window, expected):
    for capacity in (window, window + 2):
        cache = attn_jax.empty_cache((), capacity, 1, 4, value_width=5, window=window)
        assert seen(cache, 5) == expected
    full = attn_jax.empty_cache((), 5, 1, 4, value_width=5)
    assert seen(full, 5, mask=masks.SlidingWindow(window)) == expected


def test_queries_after_a_prefix_see_it_all():
    zero = np.zeros((5, 1, 4), np.float32)
    cache = attn_jax.empty_cache((), 8, 1, 4, value_width=5).append(zero[:3], np.eye(5, dtype=np.float32)[:3, None])
    output = attn_jax.cached_attention(zero[3:], zero[3:], np.eye(5, dtype=np.float32)[3:, None], cache)
    np.testing.assert_allclose(output[:, 0], [[0.25] * 4 + [0], [0.2] * 5], rtol=1e-6)


# No room


@pytest.mark.parametrize("chunks", [[1] * 5, [6], [2, 3]])
def test_a_full_cache_refuses_what_it_has_no_slot_for(chunks):
    cache = attn_jax.empty_cache(2, 4, 1, 4)
    x = draw(2, 6, 1, 4)
    for length in chunks[:-1]:
        cache = cache.append(x[:, :length], x[:, :length])
    with pytest.raises(ValueError, match=r"room.*capacity is 4.*would have [56]"):
        cache.append(x[:, : chunks[-1]], x[:, : chunks[-1]])
    with pytest.raises(ValueError, match="room"):
        cache.check_room(chunks[-1])


def test_a_cache_takes_exactly_its_capacity_and_counts_item_by_item():
    x = draw(2, 4, 1, 4)
    cache = attn_jax.empty_cache(2, 4, 1, 4).append(x[:, :3], x[:, :3], np.array([3, 1]))
    cache.check_room(3, np.array([1, 3]))
    cache = cache.append(x[:, :3], x[:, :3], np.array([1, 3]))
    np.testing.assert_array_equal(cache.lengths, [4, 4])
    np.testing.assert_array_equal(cache.key[0, 0], np.concatenate([x[0, :3, 0], x[0, :1, 0]]))
    np.testing.assert_array_equal(cache.key[1, 0], np.concatenate([x[1, :1, 0], x[1, :3, 0]]))
    with pytest.raises(ValueError, match="room"):
        cache.check_room(1, np.array([0, 1]))


@pytest.mark.parametrize("chunks", [[1] * 5, [6], [2, 3]])
def test_under_jit_an_overflow_is_marked_and_moves_nothing(chunks):
    x, append = draw(2, 6, 1, 4), jax.jit(caches.KVCache.append)
    cache, at = attn_jax.empty_cache(2, 4, 1, 4), 0
    for length in chunks:
        # Item 0 is given every token, item 1 one token of the first call only.
        counts = np.array([length, int(at == 0)])
        cache = append(cache, x[:, at : at + length], x[:, at : at + length], counts)
        at += length
    np.testing.assert_array_equal(cache.lengths, [4, 1])
    np.testing.assert_array_equal(cache.overflowed, [True, False])
    np.testing.assert_array_equal(cache.key[0, 0], x[0, :4, 0])
    np.testing.assert_array_equal(cache.value[1, 0], np.concatenate([x[1, :1, 0], np.zeros((3, 4))]))
    again = append(cache, x[:, :1], x[:, :1], np.array([1, 1]))
    np.testing.assert_array_equal(again.key[0], cache.key[0])
    np.testing.assert_array_equal(again.overflowed, [True, False])


# Layout, dtype, gradients


def test_a_stack_of_layers_is_one_more_batch_axis():
    keys, values = draw(3, 2, 4, 2, 4), draw(3, 2, 4, 2, 5, seed=1)
    stack = attn_jax.empty_cache((3, 2), 6, 2, 4, value_width=5).append(keys, values, np.array([4, 2]))
    for layer in range(3):
        alone = attn_jax.empty_cache(2, 6, 2, 4, value_width=5)
        alone = alone.append(keys[layer], values[layer], np.array([4, 2]))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf, i=layer: leaf[i], stack), alone)


def test_a_cache_of_lower_precision_rounds_what_it_stores():
    x = draw(1, 3, 1, 4)
    cache = attn_jax.empty_cache(1, 4, 1, 4, dtype=jnp.bfloat16).append(x, x)
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16))
    np.testing.assert_array_equal(cache.key[0, 0, :3], rounded[0, :, 0])
    output = attn_jax.cached_attention(x[:, :1], x[:, :1], x[:, :1], cache)
    assert output.dtype == jnp.float32
    keys = np.concatenate([rounded.astype(np.float32), x[:, :1]], axis=1)
    np.testing.assert_allclose(output, oracles.attention(x[:, :1], keys, keys).output, atol=1e-6)


def test_gradients_are_those_of_one_call_and_poison_passes_none():
    inputs = draw(1, 7, 4, 4), draw(1, 7, 2, 4, seed=1), draw(1, 7, 2, 4, seed=2)
    sinks, weight = draw(4, seed=3), draw(1, 7, 4, 4, seed=4)
    cache = attn_jax.empty_cache(1, 6, 2, 4)
    cache = dataclasses.replace(cache, key=cache.key + np.nan, value=cache.value - np.inf)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1, 2, 3))
    def gradients(query, key, value, sinks):
        stored = cache.append(key[:, :4], value[:, :4])
        output = attn_jax.cached_attention(query[:, 4:], key[:, 4:], value[:, 4:], stored, sinks=sinks)
        return (output * weight[:, 4:]).sum()

    forward = oracles.attention(*inputs, is_causal=True, sinks=sinks)
    expected = oracles.gradients(forward, np.where(np.arange(7)[:, None, None] >= 4, weight, 0))
    actual = dict(zip(("query", "key", "value", "sinks"), gradients(*inputs, sinks), strict=True))
    for name, gradient in actual.items():
        np.testing.assert_allclose(gradient, expected[name], atol=2e-6, err_msg=name)


# Merging


@pytest.mark.parametrize("sink", [None, 0.0, 150.0, -150.0])
def test_parts_merge_to_the_whole(sink):
    query, key, value = draw(2, 3, 4, 8), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 5, seed=2)
    mask = np.random.default_rng(3).random((2, 1, 3, 9)) < 0.6
    mask[1, :, 2] = False  # a query that sees nothing
    sinks = None if sink is None else np.asarray(sink + draw(4, seed=4), np.float32)
    parts = [
        attn_jax.dot_product_attention(
            query, key[:, part], value[:, part], mask=mask[..., part], return_residual=True, implementation="dense"
        )
        for part in (slice(0, 4), slice(4, 4), slice(4, 9))
    ]
    output, logsumexp = merge_attention(*zip(*parts, strict=True), sinks=sinks)
    expected = oracles.attention(query, key, value, mask=mask, sinks=sinks)
    np.testing.assert_allclose(output, expected.output, atol=1e-6)
    np.testing.assert_allclose(logsumexp, expected.logsumexp, atol=1e-6)
    assert (output[1, 2] == 0).all()


def test_a_part_is_itself_and_far_logits_do_not_overflow():
    output, logsumexp = draw(2, 3, 4), np.full((2, 3), 300.0, np.float32)
    merged, total = merge_attention([output], [logsumexp])
    np.testing.assert_array_equal(merged, output)
    np.testing.assert_array_equal(total, logsumexp)
    merged, total = merge_attention([output, -output], [logsumexp, -logsumexp])
    np.testing.assert_array_equal(merged, output)
    np.testing.assert_array_equal(total, logsumexp)


def test_no_gradient_of_an_empty_merge_is_nan():
    def loss(output, logsumexp, sinks):
        return merge_attention([output, output], [logsumexp, logsumexp], sinks=sinks)[0].sum()

    gradients = jax.grad(loss, (0, 1, 2))(draw(1, 2, 4), jnp.full((1, 2), -jnp.inf), jnp.zeros(2))
    assert all((gradient == 0).all() for gradient in gradients)


# What is refused

X = np.zeros((2, 3, 2, 4), np.float32)
REFUSED_CALLS = {
    "no cache": (lambda: attn_jax.cached_attention(X, X, X, {"key": X}), TypeError, "cache must be a KVCache"),
    "heads": (
        lambda: attn_jax.cached_attention(X, X[:, :, :1], X[:, :, :1], cache()),
        ValueError,
        "key must have shape",
    ),
    "width": (lambda: attn_jax.cached_attention(X, X, X[..., :3], cache()), ValueError, "value must have shape"),
    "batch": (lambda: attn_jax.cached_attention(X[:1], X[:1], X[:1], cache()), ValueError, "key must have shape"),
    "rank": (lambda: cache().append(X[0, 0], X), ValueError, "key must have at least 3 axes"),
    "lengths of query and key": (lambda: attn_jax.cached_attention(X[:, :2], X, X, cache()), ValueError, "query must"),
    "integers": (lambda: cache().append(X.astype(int), X), TypeError, "key must have a floating dtype"),
    "not causal": (lambda: attend(is_causal=False), ValueError, "is_causal must be True"),
    "dropout": (lambda: attend(dropout_rate=0.1), ValueError, "dropout_rate must be 0 with a cache, got 0.1"),
    "array bias": (lambda: attend(bias=np.zeros((3, 3), np.float32)), TypeError, "bias must be lazy"),
    "wrapped array": (lambda: attend(bias=biases.Alibi(2) + np.zeros((3, 3), np.float32)), ValueError, "reads entries"),
    "array mask": (lambda: attend(mask=np.ones((3, 3), bool)), TypeError, "mask must be lazy"),
    "segments": (lambda: attend(mask=~masks.Segments(np.zeros(3, int))), ValueError, "got Segments"),
    "too many": (lambda: attend(counts=np.array([4, 0])), ValueError, "counts must lie in 0..3"),
    "negative": (lambda: cache().append(X, X, np.array([0, -1])), ValueError, "counts must lie in 0..3"),
    "counts of another batch": (lambda: attend(counts=np.array([1, 1, 1])), ValueError, "counts must broadcast"),
    "ring too short": (lambda: attend(window=2, local_window_size=(2, 0)), ValueError, "must reach at most 1 back"),
    "window": (lambda: attn_jax.empty_cache(1, 4, 1, 4, window=0), ValueError, "window must be at least 1, got 0"),
    "negative window": (lambda: attn_jax.empty_cache(1, 4, 1, 4, window=-1), ValueError, "window must be at least 1"),
    "wide window": (lambda: attn_jax.empty_cache(1, 4, 1, 4, window=5), ValueError, "window must be at most"),
    "capacity": (lambda: attn_jax.empty_cache(1, 0, 1, 4), ValueError, "capacity must be at least 1, got 0"),
    "dtype": (lambda: attn_jax.empty_cache(1, 4, 1, 4, dtype=jnp.int32), TypeError, "dtype must be a floating dtype"),
    "merge of none": (lambda: merge_attention([], []), ValueError, "outputs must have one logsumexps each"),
    "merge of shapes": (lambda: merge_attention([X, X], [X[..., 0], X]), ValueError, "logsumexps must have shape"),
}


def cache(window=None):
    return attn_jax.empty_cache(2, 4, 2, 4, window=window)


def attend(window=None, **options):
    return attn_jax.cached_attention(X, X, X, cache(window), **options)


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_wrong_call_says_what_was_expected(name):
    call, kind, message = REFUSED_CALLS[name]
    with pytest.raises(kind, match=message):
        call()
