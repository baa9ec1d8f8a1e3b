"""Known faults of attention libraries: masks, softmax, causality and windows.

Each test is one kind of fault, on every implementation that takes all arguments. With query 0 and the identity as
value, the output *is* the weights: who is seen can be read off.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import biases, masks
from tests import oracles
from tests.exact.calls import LOW_PRECISION, counts, draw, pattern, qkv, ulps

# Rows that see nothing

BLIND_ROW_1 = np.ones((4, 4), bool)
BLIND_ROW_1[1] = False
BLINDING = {
    "mask": ({"mask": BLIND_ROW_1}, [1]),
    "mask of full rank": ({"mask": BLIND_ROW_1[None, None]}, [1]),
    "lazy mask": ({"mask": ~masks.Array(np.arange(4)[:, None] * np.ones(4, int) == 1)}, [1]),
    "bias": ({"bias": np.where(BLIND_ROW_1, 0, -np.inf).astype(np.float32)}, [1]),
    "bias under a cap": ({"bias": np.where(BLIND_ROW_1, 0, -np.inf).astype(np.float32), "logits_soft_cap": 1.0}, [1]),
    "causal and left padding": ({"is_causal": True, "mask": np.array([[[[False, True, True, True]]]])}, [0]),
    "causal before the first key": ({"is_causal": True, "query_offset": -2}, [0, 1]),
    "window beyond the last key": ({"local_window_size": 1, "query_offset": 3}, [2, 3]),
    "query length": ({"query_seq_lengths": np.array([2])}, [2, 3]),
    "key length": ({"key_value_seq_lengths": np.array([0])}, [0, 1, 2, 3]),
    "empty query slot": ({"query_positions": np.array([0, -1, 2, 3])}, [1]),
    "empty key slots": ({"key_positions": np.array([-1, -1, -1, -1])}, [0, 1, 2, 3]),
    "sinks": ({"mask": BLIND_ROW_1, "sinks": np.array([0.5], np.float32)}, [1]),
    "dropout": ({"mask": BLIND_ROW_1, "dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, [1]),
}


@pytest.mark.parametrize("how", BLINDING)
def test_a_row_that_sees_nothing_is_zero_and_passes_no_gradient(attend, how):
    options, blind = BLINDING[how]
    inputs = qkv()

    @jax.jit
    def evaluate(*inputs):
        def forward(*inputs):
            output, logsumexp = attend(*inputs, **options, return_residual=True)
            return output.sum(), (output, logsumexp)

        shaping = {name: x for name, x in options.items() if "dropout" not in name}
        weights = attn_jax.attention_weights(*inputs[:2], **shaping)
        return weights, jax.value_and_grad(forward, (0, 1, 2), has_aux=True)(*inputs)

    weights, ((_, (output, logsumexp)), gradients) = evaluate(*inputs)
    assert (output[0, blind] == 0).all()
    assert (logsumexp[0, blind] == -np.inf).all()
    assert (weights[0, 0, blind] == 0).all()
    if how != "dropout":
        expected = oracles.attention(*inputs, **(options | {"mask": BLIND_ROW_1} if how == "lazy mask" else options))
        np.testing.assert_allclose(output, expected.output, atol=1e-6)
        np.testing.assert_allclose(logsumexp, expected.logsumexp, atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert (gradients[0][0, blind] == 0).all()


def test_a_model_does_not_die_of_one_blind_row(attend):
    """The gradient of what comes after: the output enters a residual stream and a norm."""
    query, key, value = qkv(T=4, V=2)

    def loss(query):
        stream = query + attend(query, key, value, mask=BLIND_ROW_1)
        return (stream / jnp.sqrt((stream**2).mean(-1, keepdims=True) + 1e-6)).sum()

    assert np.isfinite(jax.grad(loss)(query)).all()


# Gradients through the mask


@pytest.mark.parametrize("hidden", [100.0, 1e30, np.inf, np.nan])
def test_a_large_logit_behind_the_mask_has_no_gradient(attend, hidden):
    logits, allowed = np.array([[1, 1, hidden]], np.float32), np.array([[True, True, False]])
    zeros = np.zeros((1, 1, 1), np.float32), np.zeros((3, 1, 1), np.float32)
    value = np.eye(3, dtype=np.float32)[:, None, :]

    def first(logits):
        return attend(*zeros, value, bias=logits, mask=allowed)[0, 0, 0]

    np.testing.assert_allclose(first(logits), 0.5, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(first)(logits), [[0.25, -0.25, 0]], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.log(first(x)))(logits), [[0.5, -0.5, 0]], rtol=1e-6)


def test_a_product_that_overflows_behind_the_mask_has_no_gradient(attend):
    query = np.array([1e30, 1e-30], np.float32).reshape(2, 1, 1)
    key = np.array([1e-30, 0, 1e30], np.float32).reshape(3, 1, 1)  # query 0 · key 2 = inf, which only query 1 sees
    value = draw(3, 1, 2)
    allowed = np.array([[True, True, False], [True, True, True]])
    output, pull = jax.vjp(lambda *x: attend(*x, mask=allowed, scale=1.0), query, key, value)
    expected = oracles.attention(query, key, value, mask=allowed, scale=1.0)
    np.testing.assert_allclose(output, expected.output, rtol=1e-5)
    exact = oracles.gradients(expected, np.ones_like(output))
    for gradient, name in zip(pull(jnp.ones_like(output)), ("query", "key", "value"), strict=True):
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=1e-6 * np.abs(exact[name]).max())


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_that_nobody_sees_reaches_nothing(attend, poison):
    query, key, value = qkv((2,), T=3, S=5, N=4, K=2)
    options = {"query_seq_lengths": np.array([2, 3]), "key_value_seq_lengths": np.array([4, 2])}
    spoilt = [x.copy() for x in (query, key, value)]
    spoilt[0][0, 2] = spoilt[1][0, 4:] = spoilt[1][1, 2:] = spoilt[2][0, 4:] = spoilt[2][1, 2:] = poison

    def loss(*x):
        output, logsumexp = attend(*x, **options, return_residual=True)
        return (output**2).sum() + jnp.where(jnp.isinf(logsumexp), 0, logsumexp).sum()

    clean, dirty = (jax.value_and_grad(loss, (0, 1, 2))(*x) for x in ((query, key, value), spoilt))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_a_key_that_one_group_sees_stays_hidden_from_the_others(attend):
    query, key, value = qkv((1,), T=2, S=3, N=4, K=2)
    allowed = np.ones((1, 4, 2, 3), bool)
    allowed[:, 2:, :, 1] = False  # only the first group sees key 1
    spoilt = value.copy()
    spoilt[0, 1, 1] = np.nan
    np.testing.assert_array_equal(attend(query, key, spoilt, mask=allowed), attend(query, key, value, mask=allowed))


# Minimum values as masks


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_two_masks_do_not_add_up_to_minus_infinity(attend, dtype):
    query, key, value = qkv(T=3, S=3, H=4, dtype=dtype)
    padding = np.array([False, True, True])
    output = np.asarray(attend(query, key, value, mask=padding[None, None, None], is_causal=True), np.float32)
    assert (output[0, 0] == 0).all()
    np.testing.assert_array_equal(output[0, 1], value[0, 1].astype(np.float32))
    expected = oracles.attention(query, key, value, mask=padding[None, None, None], is_causal=True).output
    assert ulps(output, expected, dtype) <= 2


@pytest.mark.parametrize("dtype", [np.float32, *LOW_PRECISION])
def test_a_finite_minimum_is_an_ordinary_number(attend, dtype):
    query, key, value = qkv(T=3, S=3, H=4, dtype=dtype)
    lowest = jnp.finfo(dtype).min
    some = np.where(np.array([[0, 1, 1], [1, 0, 1], [1, 1, 1]], bool), 0, lowest).astype(dtype)
    expected = oracles.attention(query, key, value, bias=some)
    assert ulps(attend(query, key, value, bias=some), expected.output, dtype) <= (8 if dtype == np.float32 else 2)
    # A whole row of it hides nothing: beside it the logits round to steps of 1/256 (float16), or to nothing at all.
    everywhere = np.full((3, 3), lowest, dtype)
    output = np.asarray(attend(query, key, value, bias=everywhere), np.float32)
    if dtype == jnp.float16:
        np.testing.assert_allclose(output, oracles.attention(query, key, value, bias=everywhere).output, atol=0.02)
    else:
        mean = np.asarray(value, np.float32).mean(1, keepdims=True)
        np.testing.assert_allclose(output, np.broadcast_to(mean, output.shape), rtol=1e-2, atol=1e-2)
    doubled = biases.Array(some) + some
    assert np.isfinite(np.asarray(attend(query, key, value, bias=doubled), np.float32)).all()


def test_a_minimum_that_rounds_to_minus_infinity_means_masked(attend):
    lowest = np.array(np.finfo(np.float32).min).astype(jnp.bfloat16)
    assert np.isneginf(lowest)
    query, key, value = qkv(T=2, S=2, dtype=jnp.bfloat16)
    output = attend(query, key, value, bias=np.array([[0, lowest], [lowest, lowest]], jnp.bfloat16))
    np.testing.assert_array_equal(output[0], np.stack([value[0, 0], np.zeros_like(value[0, 0])]))


# Broadcasting of masks and biases


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
def test_each_item_of_a_batch_keeps_its_own_mask(attend, heads):
    """Batch size, query heads and key/value heads are equal in turn, so that a wrong broadcast would fit."""
    N, K = heads
    query, key, value = qkv((2,), T=3, S=3, N=N, K=K, H=4, V=4)
    causal = np.tril(np.ones((3, 3), bool))
    per_item = np.stack([causal, causal & np.array([False, True, True])])[:, None]
    per_head = np.random.default_rng(1).random((1, N, 3, 3)) < 0.7
    for mask in (per_item, np.broadcast_to(per_item, (2, N, 3, 3)), causal[None, None], causal, per_head):
        spellings = [{"mask": mask}]
        if mask is per_item or mask is causal:
            spellings.append({"bias": np.where(mask, 0, -np.inf).astype(np.float32)})
        for options in spellings:
            together = attend(query, key, value, **options)
            for b in range(2):
                own = mask if mask.ndim == 2 else np.broadcast_to(mask, (2, *mask.shape[1:]))[b]
                alone = oracles.attention(query[b], key[b], value[b], mask=own).output
                np.testing.assert_allclose(together[b], alone, atol=1e-6)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_an_ambiguous_rank_raises(attend, batch, name):
    query, key, value = qkv(batch, T=3, S=3, N=2, K=2)
    for rank in set(range(7)) - {2, len(batch) + 3}:
        square = np.ones((2,) * max(rank - 2, 0) + (3, 3)[:rank], bool if name == "mask" else np.float32)
        with pytest.raises(ValueError, match=rf"{name} must have rank 2 or {len(batch) + 3}"):
            attend(query, key, value, **{name: square})


# Causality and windows


@pytest.mark.parametrize(
    ("T", "S", "offset", "seen"),
    [
        (2, 5, 3, [4, 5]), (5, 2, -3, [0, 0, 0, 1, 2]), (1, 7, 6, [7]), (3, 3, 0, [1, 2, 3]),
        (2, 5, 0, [1, 2]), (5, 2, 0, [1, 2, 2, 2, 2]), (1, 7, 0, [1]), (2, 3, 90, [3, 3]),
    ],
)  # fmt: skip
def test_causal_alignment_when_lengths_differ(attend, T, S, offset, seen):
    assert counts(attend, T, S, is_causal=True, query_offset=offset) == seen
    assert counts(attend, T, S, is_causal=True, query_offset=jnp.asarray(offset)) == seen
    if offset >= 0:
        assert counts(attend, T, S, is_causal=True, query_positions=offset + np.arange(T)) == seen


def test_the_last_rows_of_a_sequence_are_the_call_with_an_offset(attend):
    query, key, value = qkv((2,), T=7, S=7, N=2, K=1)
    whole = attend(query, key, value, is_causal=True)
    for T in (1, 2, 5):
        part = attend(query[:, 7 - T :], key, value, is_causal=True, query_offset=7 - T)
        np.testing.assert_allclose(part, whole[:, 7 - T :], atol=1e-6)
    # Each item of a batch at a place of its own.
    starts = np.array([1, 4])
    rows = np.stack([query[b, start : start + 3] for b, start in enumerate(starts)])
    part = attend(rows, key, value, is_causal=True, query_offset=starts)
    for b, start in enumerate(starts):
        np.testing.assert_allclose(part[b], whole[b, start : start + 3], atol=1e-6)


def test_a_rolling_cache_reads_positions_not_slots(attend):
    query, key, value = qkv((2,), T=2, S=6, N=2, K=2)
    options = {"is_causal": True, "local_window_size": (3, 0)}
    straight = attend(query, key, value, query_offset=4, **options)
    order = np.array([4, 5, 0, 1, 2, 3])  # slot i holds position order[i]
    rolled = attend(
        query, key[:, order], value[:, order], query_positions=np.array([4, 5]), key_positions=order, **options
    )
    np.testing.assert_allclose(rolled, straight, atol=1e-6)


FUTURE_PATHS = list(
    itertools.product([0.0, 0.1], [False, True], [None, "all", "padding"], ["3-D", "4-D"], ["groups", "heads"])
)


@pytest.mark.parametrize(("rate", "residual", "mask", "rank", "heads"), FUTURE_PATHS)
def test_no_path_sees_the_future(attend, rate, residual, mask, rank, heads):
    batch = (2,) if rank == "4-D" else ()
    query, key, value = qkv(batch, T=5, S=5, N=4, K=2 if heads == "groups" else 4, H=4, V=4)
    allowed = {None: None, "all": np.ones((5, 5), bool), "padding": np.arange(5) * np.ones((5, 1)) < 4}[mask]
    options = {"is_causal": True, "mask": allowed, "return_residual": residual, "dropout_rate": rate}
    options["dropout_rng"] = jax.random.key(3) if rate else None
    now = 2
    later = np.arange(5)[:, None, None] > now
    before = attend(query, key, value, **options)
    after = attend(query, np.where(later, 7, key), np.where(later, -9, value), **options)
    if residual:
        np.testing.assert_array_equal(before[1][..., : now + 1, :], after[1][..., : now + 1, :])
        before, after = before[0], after[0]
    np.testing.assert_array_equal(before[..., : now + 1, :, :], after[..., : now + 1, :, :])
    assert (before[..., now + 1 :, :, :] != after[..., now + 1 :, :, :]).any()


WINDOWS = {(1, 0): [1, 2, 2, 2, 2, 2], (0, 1): [2, 2, 2, 2, 2, 1], (0, 0): [1] * 6, (2, 1): [2, 3, 4, 4, 4, 3]}


@pytest.mark.parametrize(("window", "seen"), WINDOWS.items(), ids=str)
def test_a_window_holds_on_both_sides_without_a_mask(attend, window, seen):
    left, right = window
    assert counts(attend, 6, 6, local_window_size=window) == seen
    for T, S in ((6, 6), (6, 9), (9, 4)):
        q, k = np.arange(T)[:, None], np.arange(S)
        inside = (q - left <= k) & (k <= q + right)
        weights = pattern(attend, T, S, local_window_size=window)
        np.testing.assert_array_equal(weights > 0, inside)
    trivial = pattern(attend, 6, 9, local_window_size=window, mask=np.ones((6, 9), bool))
    np.testing.assert_array_equal(trivial, pattern(attend, 6, 9, local_window_size=window))
    np.testing.assert_array_equal(trivial, pattern(attend, 6, 9, mask=masks.LocalWindow(*window)))


def test_a_one_number_window_is_the_same_on_both_sides(attend):
    for w in (0, 1, 4):
        np.testing.assert_array_equal(
            pattern(attend, 6, 7, local_window_size=w), pattern(attend, 6, 7, local_window_size=(w, w))
        )


@pytest.mark.parametrize("width", [1, 3, 5, 8])
def test_a_sliding_window_counts_its_own_key(attend, width):
    sliding = pattern(attend, 5, 5, mask=masks.SlidingWindow(width))
    assert (sliding > 0).sum(1).tolist() == [min(i + 1, width) for i in range(5)]
    np.testing.assert_array_equal(sliding, pattern(attend, 5, 5, local_window_size=(width - 1, 0)))
    if width == 1:
        np.testing.assert_array_equal(sliding, np.eye(5))
    if width >= 5:
        np.testing.assert_array_equal(sliding, pattern(attend, 5, 5, is_causal=True))


@pytest.mark.parametrize("width", [0, -1])
def test_a_window_of_no_width_raises(attend, width):
    with pytest.raises(ValueError, match="width must be at least 1"):
        masks.SlidingWindow(width)
    if width < 0:
        with pytest.raises(ValueError, match="local_window_size must be at least 0"):
            counts(attend, 5, 5, local_window_size=width)
