"""Divergence between heads and alignment of their outputs, by plain loops in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics import head_similarity, linear_cka, similarity

# Compiled whole: op by op, every new shape would compile a dozen kernels.
measure = jax.jit(similarity.head_similarity)
align = jax.jit(similarity.linear_cka)
CAUSAL = np.tri(7, dtype=bool)


def kl(p, q):
    return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def divergence64(p, q):
    m = (p + q) / 2
    return (kl(p, m) + kl(q, m)) / 2 / np.log(2)


def similarity64(weights, visible=None):
    """By the definition, `[B, N, N]`."""
    weights = np.asarray(weights, np.float64)
    visible = np.broadcast_to(True if visible is None else visible, weights.shape)
    batch, heads, queries, _ = weights.shape
    found = np.full((batch, heads, heads), np.nan)
    for b, n, m in np.ndindex(found.shape):
        rows = []
        for t in range(queries):
            pair = weights[b, n, t], weights[b, m, t]
            choice = min(visible[b, n, t].sum(), visible[b, m, t].sum()) > 1
            if choice and all(p.any() for p in pair):
                rows.append(divergence64(*(p / p.sum() for p in pair)))
        if rows:
            found[b, n, m] = np.mean(rows)
    return found


def patterns(sd, *, visible=CAUSAL, seed=0, shape=(2, 3, 7, 7)):
    logits = np.where(visible, sd * np.random.default_rng(seed).normal(size=shape), -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("sd", [0.01, 1.0, 10.0, 300.0])  # from nearly the same to weights that underflow
def test_definition(sd):
    weights = patterns(sd).astype(np.float32)
    np.testing.assert_allclose(measure(weights, CAUSAL), similarity64(weights, CAUSAL), rtol=2e-4, atol=1e-9)


def test_definition_in_float64(x64):
    for sd in (1e-6, 1.0, 50.0):
        weights = patterns(sd)
        actual = measure(weights, CAUSAL)
        assert actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, similarity64(weights, CAUSAL), rtol=1e-10, atol=1e-15)


def test_the_same_is_zero_and_disjoint_is_one():
    rows = np.zeros((1, 3, 2, 4), np.float32)
    rows[0, :2, :, :2] = [0.75, 0.25]
    rows[0, 2, :, 2:] = [0.5, 0.5]
    np.testing.assert_array_equal(measure(rows)[0, :2, :2], np.zeros((2, 2)))
    np.testing.assert_allclose(measure(rows)[0, 2], [1, 1, 0], rtol=1e-6)
    one_hot = np.eye(4, dtype=np.float32)[None, :, None, :]
    np.testing.assert_allclose(measure(one_hot)[0], 1 - np.eye(4), rtol=1e-6)


def test_known_values():
    # H(¾, ¼) − ½ H(½, ½), in bits
    rows = np.array([[[[1.0, 0.0]], [[0.5, 0.5]]]], np.float32)
    np.testing.assert_allclose(measure(rows)[0, 0, 1], 1.5 - 0.75 * np.log2(3), rtol=1e-6)


def test_it_is_symmetric_within_bounds_and_its_root_is_a_metric():
    found = np.asarray(measure(patterns(2.0, shape=(1, 12, 7, 7)).astype(np.float32), CAUSAL))[0]
    np.testing.assert_allclose(found, found.T, rtol=1e-6)
    np.testing.assert_array_equal(np.diag(found), np.zeros(12))
    assert ((found >= 0) & (found <= 1)).all()
    one_row = np.asarray(measure(patterns(2.0, shape=(1, 12, 1, 7), visible=True).astype(np.float32)))[0]
    distance = np.sqrt(one_row)
    assert (distance[:, None, :] <= distance[:, :, None] + distance[None, :, :] + 1e-6).all()


def test_small_differences_keep_their_digits():
    # JS ≈ Σ (p − q)² / (8 m), far below the resolution of an entropy near ln n
    p = np.full(8, 1 / 8, np.float32)
    shift = np.float32(2**-16) * np.tile([1, -1], 4).astype(np.float32)
    q = p + shift
    exact = np.sum(shift.astype(np.float64) ** 2 / (8 * (p + shift / 2))) / np.log(2)
    assert exact < 1e-8
    np.testing.assert_allclose(measure(np.stack([p, q])[None, :, None])[0, 0, 1], exact, rtol=1e-5)


def test_rows_without_a_choice_are_left_out():
    weights = patterns(1.0).astype(np.float32)
    np.testing.assert_allclose(
        measure(weights, CAUSAL), measure(weights[:, :, 1:], CAUSAL[1:]), rtol=1e-6
    )  # row 0 sees one key
    assert (measure(weights)[:, 0, 1] < measure(weights, CAUSAL)[:, 0, 1]).all()  # there it counts, as 0
    padded = np.concatenate([weights, np.zeros_like(weights[:, :, :2])], axis=2)
    np.testing.assert_allclose(measure(padded)[:, 0, 1], measure(weights)[:, 0, 1], rtol=1e-6)


def test_what_each_head_sees_may_differ():
    visible = np.broadcast_to(CAUSAL, (2, 3, 7, 7)).copy()
    visible[0, 1, :4, 1:] = False
    weights = patterns(1.0, visible=visible).astype(np.float32)
    np.testing.assert_allclose(measure(weights, visible), similarity64(weights, visible), rtol=1e-4)


def test_two_heads_without_a_common_choice_read_nan_and_are_no_fault():
    visible = np.ones((1, 2, 2, 3), bool)
    visible[0, 0, 0, 1:] = visible[0, 1, 1, 1:] = False
    weights = patterns(1.0, visible=visible, shape=(1, 2, 2, 3)).astype(np.float32)
    with jax.debug_nans(True):
        found = head_similarity(weights, visible)
    np.testing.assert_array_equal(np.isnan(np.asarray(found)), [[[False, True], [True, False]]])


def test_a_sink_and_half_precision_are_renormalised():
    weights = patterns(1.0).astype(np.float32)
    np.testing.assert_allclose(measure(0.25 * weights, CAUSAL), measure(weights, CAUSAL), rtol=1e-6)
    half = measure(jnp.bfloat16(weights), CAUSAL)
    assert half.dtype == jnp.float32
    stored = np.asarray(jnp.bfloat16(weights).astype(jnp.float32))
    np.testing.assert_allclose(half, similarity64(stored, CAUSAL), rtol=1e-4, atol=1e-9)


def test_batch_axes_and_no_item():
    weights = patterns(1.0).astype(np.float32)
    alone = measure(weights[1], CAUSAL)
    assert alone.shape == (3, 3)
    np.testing.assert_allclose(measure(weights[:, None], CAUSAL)[1, 0], alone, rtol=1e-6)
    assert measure(weights[:0]).shape == (0, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.ones((2, 3), np.float32),), ValueError, r"weights must have at least 3 axes, \[\*B, N, T, S\]"),
        ((np.ones((2, 3, 0), np.float32),), ValueError, "weights must not be empty along its last 3 axes"),
        ((np.ones((2, 3, 4), int),), TypeError, "weights must have a floating dtype, got int"),
        ((np.ones((2, 3, 4), np.float32), np.ones((3, 4))), TypeError, "visible must be boolean, got float"),
        ((np.ones((2, 3, 4), np.float32), np.ones((4, 3), bool)), ValueError, "visible must broadcast to"),
        ((np.ones((2, 3, 4), np.float32), np.ones((1, 2, 3, 4), bool)), ValueError, "visible must broadcast to"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        head_similarity(*arguments)


def cka64(x, y):
    """By the items: products of all pairs, centred on both sides (equation 1 to 3 of the paper)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    centre = np.eye(len(x)) - 1 / len(x)
    k, l = (centre @ (z @ z.T) @ centre for z in (x, y))
    return (k * l).sum() / np.sqrt((k * k).sum() * (l * l).sum())


def representations(n=9, p=4, q=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) + 5
    return x, 0.7 * x[:, :q] + rng.normal(size=(n, q)) - 2


@pytest.mark.parametrize("sizes", [(9, 4, 3), (4, 6, 9)])  # more items than features, and fewer
def test_alignment_is_that_of_the_products_of_items(sizes):
    for seed in range(3):
        x, y = representations(sizes[0], max(sizes), min(sizes), seed)
        np.testing.assert_allclose(align(x.astype(np.float32), y.astype(np.float32)), cka64(x, y), rtol=1e-4)


def test_alignment_does_not_see_rotations_factors_and_shifts():
    x, y = representations()
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))
    np.testing.assert_allclose(align(np.float32(x), np.float32(1e4 * x @ turn + 3)), 1, rtol=1e-5)
    np.testing.assert_allclose(align(np.float32(1e-20 * x), np.float32(1e20 * y)), cka64(x, y), rtol=1e-4)
    stretched = x * [1, 1, 1, 10]
    assert align(np.float32(x), np.float32(stretched)) < 0.9  # it does see these


def test_alignment_of_uncorrelated_features_is_zero_and_of_few_items_is_not():
    signs = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], np.float32).T
    np.testing.assert_allclose(align(signs[:, 1:2], signs[:, 2:]), 0, atol=1e-12)
    rng = np.random.default_rng(0)
    for n, p in ((40, 20), (2000, 20)):
        found = [align(*rng.normal(size=(2, n, p)).astype(np.float32)) for _ in range(5)]
        np.testing.assert_allclose(np.mean(found), p / (n + p), rtol=0.1)


def test_alignment_of_what_does_not_vary_is_not_known_and_no_fault():
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    with jax.debug_nans(True):
        for constant in (np.zeros((5, 2)), np.full((5, 2), 0.1), np.tile([0.1, 1e5], (5, 1))):
            assert np.isnan(np.asarray(linear_cka(x, constant.astype(np.float32))))
            assert np.isnan(np.asarray(linear_cka(constant.astype(np.float32), x)))


def test_alignment_over_batch_axes_and_all_pairs():
    heads = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    pairs = jax.jit(lambda h: jax.vmap(lambda x: jax.vmap(lambda y: linear_cka(x, y))(h))(h))(heads)
    np.testing.assert_allclose(pairs, [[cka64(x, y) for y in heads] for x in heads], rtol=1e-4)
    np.testing.assert_allclose(align(heads, heads[::-1]), np.diag(np.asarray(pairs)[:, ::-1]), rtol=1e-5)
    assert align(jnp.bfloat16(heads), jnp.bfloat16(heads)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (np.ones(3, np.float32), np.ones((3, 1), np.float32)),
            ValueError,
            r"x must have at least 2 axes, \[\*B, n, p\]",
        ),
        ((np.ones((3, 1), np.float32), np.ones((4, 1), np.float32)), ValueError, r"y must have shape \[\*B, n, q\]"),
        ((np.ones((3, 0), np.float32), np.ones((3, 1), np.float32)), ValueError, "x must not be empty"),
        ((np.ones((3, 1), np.float32), np.ones((3, 1), int)), TypeError, "y must have a floating dtype"),
    ],
)
def test_errors_of_alignment(arguments, error, message):
    with pytest.raises(error, match=message):
        linear_cka(*arguments)
