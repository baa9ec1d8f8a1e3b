"""Sink, distance and diagonal of patterns, by plain loops in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics import patterns

# Compiled whole: op by op, every new shape would compile a dozen kernels.
sink_mass, diagonal_mass, previous_token_mass, mean_distance, distance_ratio = (
    jax.jit(f, static_argnames=static)
    for f, static in (
        (patterns.sink_mass, "key"),
        (patterns.diagonal_mass, ("back", "without")),
        (patterns.previous_token_mass, "without"),
        (patterns.mean_distance, "without"),
        (patterns.distance_ratio, "without"),
    )
)
FUNCTIONS = (sink_mass, diagonal_mass, previous_token_mass, mean_distance)


def causal_uniform(n):
    return np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]


def random_causal(*batch, n=12, sd=1.0, seed=0):
    logits = sd * np.random.default_rng(seed).normal(size=(*batch, n, n))
    p = np.tril(np.exp(logits))
    return p / p.sum(-1, keepdims=True)


def without64(p, k):
    p = p.copy()
    p[..., k] = 0
    total = p.sum(-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def rows64(p):
    """Of one pattern `[T, S]`: the rows that see something."""
    return [i for i in range(len(p)) if p[i].any()]


def distance64(p):
    return np.mean([sum(p[i, j] * abs(i - j) for j in range(p.shape[1])) for i in rows64(p)])


def diagonal64(p, back=0):
    return np.mean([p[i, i - back] for i in rows64(p) if 0 <= i - back < p.shape[1]])


def sink64(p, k=0):
    return np.mean([p[i, k] for i in rows64(p) if i >= k])


def single(p):
    return jnp.asarray(p[None], jnp.float32)  # one head


def test_baselines_of_uniform_causal_weights():
    n = 512
    harmonic = (1 / np.arange(1, n + 1)).sum()
    uniform = single(causal_uniform(n))
    np.testing.assert_allclose(sink_mass(uniform), harmonic / n, rtol=1e-5)
    np.testing.assert_allclose(sink_mass(uniform), 0.013, atol=5e-4)
    np.testing.assert_allclose(diagonal_mass(uniform), harmonic / n, rtol=1e-5)
    np.testing.assert_allclose(mean_distance(uniform), (n - 1) / 4, rtol=1e-5)
    np.testing.assert_allclose(distance_ratio(uniform, np.tril(np.ones((n, n), bool))), 1, rtol=1e-5)


def test_against_loops():
    p = random_causal(2, 3)
    p[1, :, 9:] = 0  # padding of the second item
    p32 = p.astype(np.float32)
    expected = {
        sink_mass: sink64,
        diagonal_mass: diagonal64,
        previous_token_mass: lambda q: diagonal64(q, 1),
        mean_distance: distance64,
    }
    for f, reference in expected.items():
        loops = [[reference(p[b, n]) for n in range(3)] for b in range(2)]
        np.testing.assert_allclose(f(p32), loops, rtol=1e-5)
    np.testing.assert_allclose(sink_mass(p32, key=4)[0, 1], sink64(p[0, 1], 4), rtol=1e-5)
    np.testing.assert_allclose(diagonal_mass(p32, back=3)[0, 1], diagonal64(p[0, 1], 3), rtol=1e-5)
    rest = without64(p, 0)
    for f, reference in list(expected.items())[1:]:
        np.testing.assert_allclose(f(p32, without=0)[1, 2], reference(rest[1, 2]), rtol=1e-5)


def test_planted_patterns():
    n = 10
    previous = np.eye(n, k=-1)
    previous[0, 0] = 1
    heads = jnp.asarray(np.stack([np.eye(n), previous, np.eye(n)[:1].repeat(n, 0)]), jnp.float32)
    np.testing.assert_allclose(diagonal_mass(heads), [1, 0.1, 0.1], atol=1e-6)
    np.testing.assert_allclose(previous_token_mass(heads), [0, 1, 1 / 9], atol=1e-6)
    np.testing.assert_allclose(sink_mass(heads), [0.1, 0.2, 1], atol=1e-6)
    np.testing.assert_allclose(mean_distance(heads), [0, 0.9, 4.5], atol=1e-6)


def test_a_sink_hides_a_local_head():
    n = 64
    local = np.eye(n, k=-1)
    local[:2, :] = np.eye(n)[:2]
    sink = 0.95 * np.eye(n)[:1] + 0.05 * local
    mask = np.tril(np.ones((n, n), bool))
    assert distance_ratio(single(sink), mask) > 1.5
    rest = distance_ratio(single(sink), mask, without=0)
    expected = without64(sink, 0)
    uniform = without64(causal_uniform(n), 0)
    rows = range(2, n)  # those that still have a choice
    ratio = np.mean([expected[i] @ abs(i - np.arange(n)) for i in rows])
    ratio /= np.mean([uniform[i] @ abs(i - np.arange(n)) for i in rows])
    np.testing.assert_allclose(rest, ratio, rtol=1e-5)
    assert rest < 0.1


def test_visible_keys_with_no_weight_left_still_count():
    n = 8
    ratio = distance_ratio(single(np.eye(n)), jnp.ones((1, n, n), bool))
    np.testing.assert_array_equal(ratio, [0])
    uniform_two_way = jnp.full((2, 1, n, n), 1 / n)
    np.testing.assert_allclose(distance_ratio(uniform_two_way, jnp.ones((1, 1, 1, n), bool)), 1, rtol=1e-5)


def test_positions_say_where_a_row_sits():
    p = random_causal(2, 3)
    tail = p[..., 8:, :].astype(np.float32)  # the last four queries of a cache
    for f in FUNCTIONS:
        plain = f(tail, query_positions=jnp.arange(8, 12))
        each = f(tail, query_positions=jnp.broadcast_to(jnp.arange(8, 12), (2, 4)))
        np.testing.assert_allclose(plain, each, rtol=1e-6)
    rows = range(8, 12)
    expected = np.mean([p[1, 2, i] @ abs(i - np.arange(12)) for i in rows])
    np.testing.assert_allclose(mean_distance(tail, query_positions=jnp.arange(8, 12))[1, 2], expected, rtol=1e-5)
    np.testing.assert_allclose(
        previous_token_mass(tail, query_positions=jnp.arange(8, 12))[1, 2],
        np.mean([p[1, 2, i, i - 1] for i in rows]),
        rtol=1e-5,
    )


def test_order_of_slots_and_empty_ones_change_nothing():
    p = random_causal(2, 3).astype(np.float32)
    order = np.random.default_rng(1).permutation(12)
    slots = np.concatenate([p[..., order], np.zeros((2, 3, 12, 3), np.float32)], axis=-1)
    positions = np.concatenate([order, [-1, -1, -1]])
    first = int(np.flatnonzero(positions == 0)[0])
    np.testing.assert_allclose(sink_mass(slots, key=first, key_positions=positions), sink_mass(p), rtol=1e-6)
    for f in FUNCTIONS[1:]:
        np.testing.assert_allclose(f(slots, key_positions=positions), f(p), rtol=1e-6)
        np.testing.assert_allclose(f(slots, without=first, key_positions=positions), f(p, without=0), rtol=1e-5)


def test_rows_of_zeros_only():
    empty = jnp.zeros((2, 4, 4))
    for f in FUNCTIONS:
        np.testing.assert_array_equal(f(empty), [0, 0])
        assert np.isfinite(jax.grad(lambda w, f=f: f(w).sum())(empty)).all()
    np.testing.assert_array_equal(distance_ratio(empty, jnp.zeros((4, 4), bool)), [0, 0])


def test_half_precision_and_float64(x64):
    p = random_causal(3)
    for f in FUNCTIONS:
        assert f(jnp.asarray(p)).dtype == jnp.float64
        half = f(jnp.asarray(p, jnp.bfloat16))
        assert half.dtype == jnp.float32
        np.testing.assert_allclose(half, f(jnp.asarray(p)), rtol=5e-3)


def test_same_under_jit_and_vmap():
    p = jnp.asarray(random_causal(2, 3), jnp.float32)
    mask = jnp.tril(jnp.ones((12, 12), bool))
    for f in (*FUNCTIONS, lambda w: distance_ratio(w, mask, without=0)):
        with jax.disable_jit():
            np.testing.assert_allclose(f(p), jax.jit(f)(p), rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(f)(p), f(p), rtol=1e-5)


W = jnp.ones((2, 3, 4, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sink_mass(W.astype(int)), TypeError, "weights must have a floating dtype"),
        (lambda: sink_mass(W[0, 0]), ValueError, r"weights must have at least 3 axes, \[\*B, N, T, S\]"),
        (lambda: sink_mass(W, key=4), ValueError, "key must be an index below S = 4, got 4"),
        (lambda: diagonal_mass(W, back=-1), ValueError, "back must be at least 0"),
        (lambda: mean_distance(W, without=4), ValueError, "key must be an index below S = 4"),
        (lambda: mean_distance(W, query_positions=jnp.arange(3)), ValueError, "query_positions must have shape"),
        (lambda: mean_distance(W, key_positions=jnp.ones((3, 4), int)), ValueError, "key_positions must have shape"),
        (lambda: mean_distance(W, key_positions=jnp.ones(4)), TypeError, "key_positions must have an integer dtype"),
        (lambda: distance_ratio(W, jnp.ones((4, 4))), TypeError, "visible must be boolean, got float32"),
        (lambda: distance_ratio(W, jnp.ones((3, 4, 4), bool)), ValueError, "visible must broadcast"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
