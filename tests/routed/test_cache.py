"""The cache of groups: any cutting of a sequence into calls gives what one call gives, in memory that does not grow."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.routed import (
    draw_centroids,
    draw_rotations,
    empty_group_cache,
    extend_lsh,
    extend_routing,
    lsh_attention,
    routing_attention,
)

B, T, K, H, V, GROUPS, WINDOW, ROUNDS = 2, 12, 2, 4, 3, 4, 3, 2
PIECE = 4  # tokens of every call: counts say how many of them count


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


class Hashed:
    """One query/key vector, two rounds."""

    tokens = (normal(1, B, T, K, H), normal(2, B, T, K, V))
    state = draw_rotations(jax.random.key(0), K, H, GROUPS, num_rounds=ROUNDS)
    rounds = ROUNDS
    extend = staticmethod(jax.jit(extend_lsh))
    whole = staticmethod(jax.jit(functools.partial(lsh_attention, window=WINDOW, is_causal=True)))


class Routed:
    """Two query heads for each key head."""

    tokens = (normal(3, B, T, 2 * K, H), normal(4, B, T, K, H), normal(5, B, T, K, V))
    state = draw_centroids(jax.random.key(1), K, GROUPS, H)
    rounds = 1
    extend = staticmethod(jax.jit(extend_routing))
    whole = staticmethod(jax.jit(functools.partial(routing_attention, window=WINDOW, is_causal=True)))


def empty(kind, **options):
    return empty_group_cache(B, K, GROUPS, WINDOW, H, value_width=V, num_rounds=kind.rounds, **options)


def pieces(kind, cuts):
    """Calls of `PIECE` tokens, of which an item has as many as its cuts say; the others hold NaN."""
    starts = np.zeros(B, int)
    for counts in cuts:
        ends = np.minimum(starts[:, None] + np.arange(PIECE), T - 1)
        there = np.arange(PIECE) < np.asarray(counts)[:, None]
        yield (
            [
                jnp.where(
                    there[..., None, None], jnp.take_along_axis(x, jnp.asarray(ends)[..., None, None], axis=1), jnp.nan
                )
                for x in kind.tokens
            ],
            jnp.asarray(counts),
        )
        starts = starts + counts


@pytest.mark.parametrize("kind", [Hashed, Routed])
@pytest.mark.parametrize(
    "cuts",
    [
        [(4, 4), (4, 4), (4, 4)],
        [(1, 4), (3, 0), (4, 1), (0, 3), (4, 4)],
        [(0, 0), (2, 1), (2, 3), (4, 4), (1, 1), (3, 3)],
    ],
)
def test_any_cutting_gives_what_one_call_gives(kind, cuts):
    expected = np.asarray(kind.whole(*kind.tokens, kind.state))
    cache, found = empty(kind), [[] for _ in range(B)]
    for tokens, counts in pieces(kind, cuts):
        output, cache = kind.extend(*tokens, kind.state, cache, counts=counts)
        for b in range(B):
            found[b].append(np.asarray(output)[b, : counts[b]])
            assert (np.asarray(output)[b, int(counts[b]) :] == 0).all()
    for b in range(B):
        np.testing.assert_allclose(np.concatenate(found[b]), expected[b], atol=1e-5)
    assert cache.lengths.tolist() == [T, T]


@pytest.mark.parametrize("kind", [Hashed, Routed])
def test_all_at_once_and_one_by_one_under_scan(kind):
    expected = kind.whole(*kind.tokens, kind.state)
    once, after = kind.extend(*kind.tokens, kind.state, empty(kind))
    np.testing.assert_allclose(once, expected, atol=1e-5)

    @jax.jit
    def one_by_one(cache):
        def step(cache, tokens):
            output, cache = kind.extend(*(x[:, None] for x in tokens), kind.state, cache)
            return cache, output[:, 0]

        return jax.lax.scan(step, cache, [jnp.moveaxis(x, 1, 0) for x in kind.tokens])

    cache, outputs = one_by_one(empty(kind))
    np.testing.assert_allclose(jnp.moveaxis(outputs, 0, 1), expected, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, cache, after)  # the same state, however it was filled


@pytest.mark.parametrize("kind", [Hashed, Routed])
def test_a_cache_has_one_size_and_one_trace(kind):
    cache, traces = empty(kind), []

    @jax.jit
    def step(tokens, cache):
        traces.append(1)
        return kind.extend(*tokens, kind.state, cache)

    sizes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    for t in range(6):
        _, cache = step([x[:, t : t + 1] for x in kind.tokens], cache)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), cache) == sizes
    assert len(traces) == 1
    assert cache.lengths.tolist() == [6, 6]
    assert cache.counts.sum(axis=-1).tolist() == np.full((B, K, kind.rounds), 6).tolist()


@pytest.mark.parametrize("kind", [Hashed, Routed])
def test_what_does_not_count_leaves_no_trace(kind):
    _, cache = kind.extend(*(x[:, :PIECE] for x in kind.tokens), kind.state, empty(kind))
    output, after = kind.extend(
        *(jnp.full_like(x[:, :PIECE], jnp.nan) for x in kind.tokens), kind.state, cache, counts=jnp.zeros(B, int)
    )
    jax.tree.map(np.testing.assert_array_equal, after, cache)
    assert (np.asarray(output) == 0).all()


def test_a_ring_holds_the_last_of_each_group():
    tokens = [x[:, :1] for x in Routed.tokens]
    cache = empty(Routed)
    for i in range(5):
        marked = [*tokens[:2], jnp.full_like(tokens[2], float(i))]  # one direction: one group
        _, cache = Routed.extend(*marked, Routed.state, cache)
    counts = np.asarray(cache.counts)[..., 0, :]  # [B, K, groups]
    assert sorted(counts[0, 0].tolist()) == [0, 0, 0, 5]
    group = counts[0, 0].argmax()
    assert np.asarray(cache.value)[0, 0, 0, group, :, 0].tolist() == [3, 4, 2]
    ranks = np.asarray(cache.members.ranks)[0, 0, 0].reshape(GROUPS, WINDOW)
    assert ranks[group].tolist() == [3, 4, 2]
    assert (np.delete(ranks, group, axis=0) == -1).all()


@pytest.mark.parametrize("kind", [Hashed, Routed])
def test_a_half_precision_cache_keeps_its_dtype(kind):
    cache = empty(kind, dtype=jnp.bfloat16)
    output, cache = kind.extend(*kind.tokens, kind.state, cache)
    assert (output.dtype, cache.key.dtype, cache.value.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"cache": None}, TypeError, "cache must be a GroupCache"),
        ({"cache": empty(Hashed)}, ValueError, r"cache.counts must have shape"),
        ({"cache": empty_group_cache(B, K, GROUPS, WINDOW, H)}, ValueError, "cache.value must have shape"),
        ({"cache": empty_group_cache(B, K, GROUPS, WINDOW, 8, value_width=V)}, ValueError, "cache.key must have shape"),
        ({"counts": jnp.asarray([0, PIECE + 1])}, ValueError, "counts must lie in 0..4"),
    ],
)  # fmt: skip
def test_a_cache_for_something_else_is_refused(change, error, says):
    arguments = {"cache": empty(Routed), "counts": None, **change}
    with pytest.raises(error, match=says):
        extend_routing(
            *(x[:, :PIECE] for x in Routed.tokens), Routed.state, arguments["cache"], counts=arguments["counts"]
        )


@pytest.mark.parametrize("name", ["num_heads", "num_groups", "window", "head_width", "value_width", "num_rounds"])
def test_sizes_are_positive(name):
    sizes = {"num_heads": 1, "num_groups": 2, "window": 3, "head_width": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        empty_group_cache(1, **sizes)
    with pytest.raises(TypeError, match="dtype must be a floating dtype"):
        empty_group_cache(1, 1, 1, 1, 1, dtype=jnp.int32)


def test_no_tokens_are_no_output_and_change_nothing():
    nothing, centroids = jnp.zeros((2, 0, 2, 4)), draw_centroids(jax.random.key(0), 2, 2, 4)
    for options in ({"is_causal": True}, {"window": 2}, {"learn": "soft"}):
        assert routing_attention(nothing, nothing, nothing, centroids, **options).shape == nothing.shape
    output, loss = routing_attention(nothing, nothing, nothing, centroids, learn="auxiliary", is_causal=True)
    assert (output.shape, float(loss)) == (nothing.shape, 0.0)
    rotations = draw_rotations(jax.random.key(0), 2, 4, num_buckets=4)
    for extend, given, groups in (
        (extend_routing, (nothing, nothing, nothing, centroids), 2),
        (extend_lsh, (nothing, nothing, rotations), 4),
    ):
        cache = empty_group_cache(2, 2, groups, window=3, head_width=4)
        output, after = extend(*given, cache)
        assert output.shape == nothing.shape
        chex.assert_trees_all_equal(after, cache)
