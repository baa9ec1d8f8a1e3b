"""Clustered attention against its definition, token by token, where it must be exact, and what reaches centroids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import dot_product_attention
from attn_jax.routed import draw_centroids, routing_attention, update_centroids
from tests.routed import oracle

B, T, N, H, V, C = 2, 12, 2, 4, 3, 3
route = jax.jit(routing_attention, static_argnames=("window", "is_causal", "learn", "temperature"))
HARD = ("none", "straight_through", "auxiliary")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@functools.cache
def problem(length=T):
    """At T = 12 no token is nearly as near to another centroid: a small step changes no choice."""
    return normal(44, B, length, N, H), normal(308, B, length, N, H), normal(3, B, length, N, V)


@functools.cache
def centroids(clusters=C):
    return draw_centroids(jax.random.key(3), N, clusters, H)


def output_of(*arguments, **options):
    found = route(*arguments, **options)
    return found[0] if options.get("learn") == "auxiliary" else found


# --- the definition


@pytest.mark.parametrize("learn", HARD)
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (True, 2), (False, None), (False, 5)])
def test_queries_meet_keys_of_their_cluster(is_causal, window, learn):
    expected = oracle.routing(*problem(), centroids(), window=window, causal=is_causal)
    found = output_of(*problem(), centroids(), window=window, is_causal=is_causal, learn=learn)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if not is_causal and window is None:
        assert (np.abs(expected).max(axis=-1) == 0).any()  # a token in no cluster gives 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_and_groups_that_do_not_divide_each_other(is_causal):
    expected = oracle.routing(*problem(131), centroids(), window=7, causal=is_causal)
    found = route(*problem(131), centroids(), window=7, is_causal=is_causal)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learn", [*HARD, "soft"])
def test_one_cluster_and_the_whole_window_are_exact_attention(learn, is_causal):
    window = None if learn == "soft" else T
    found = output_of(*problem(), centroids(1), window=window, is_causal=is_causal, learn=learn)
    np.testing.assert_allclose(found, dot_product_attention(*problem(), is_causal=is_causal), atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_soft_weighs_every_pair_by_the_chance_of_a_common_cluster(is_causal):
    expected = oracle.soft_routing(*problem(), centroids(), temperature=0.3, causal=is_causal)
    found = route(*problem(), centroids(), learn="soft", temperature=0.3, is_causal=is_causal)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_soft_comes_to_the_hard_choice_as_it_cools():
    """Except where the choice finds no key: there it gives 0, and soft the keys that are likeliest to be found."""
    hard = oracle.routing(*problem(), centroids(), causal=True)
    finds = np.abs(hard).max(axis=-1) > 0
    assert not finds.all()
    for temperature, most in ((0.02, 0.5), (0.005, 1e-4)):
        soft = route(*problem(), centroids(), learn="soft", temperature=temperature, is_causal=True)
        assert np.abs(soft - hard)[finds].max() < most
    assert np.abs(route(*problem(), centroids(), learn="soft", temperature=0.3, is_causal=True) - hard).max() > 0.5


def test_the_length_of_a_centroid_does_not_matter():
    lengths = jnp.asarray([0.1, 1.0, 7.0])[None, :, None]
    found = route(*problem(), centroids() * lengths, window=2, is_causal=True)
    np.testing.assert_array_equal(found, route(*problem(), centroids(), window=2, is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learn", ["straight_through", "soft"])
def test_grouped_queries_route_by_their_key_head(learn, is_causal):
    query, (_, key, value) = normal(7, B, T, 2 * N, H), problem()
    repeated = [jnp.repeat(x, 2, axis=-2) for x in (key, value)]
    found = output_of(query, key, value, centroids(), learn=learn, is_causal=is_causal)
    expected = output_of(query, *repeated, jnp.repeat(centroids(), 2, axis=0), learn=learn, is_causal=is_causal)
    np.testing.assert_allclose(found, expected, atol=1e-6)


# --- who may not be seen


@pytest.mark.parametrize("learn", [*HARD, "soft"])
def test_the_future_is_not_read_nor_learned_from(learn):
    others = [x.at[:, 7:].set(normal(8, B, T - 7, *x.shape[2:])) for x in problem()]
    window = None if learn == "soft" else 2
    before, after = (
        output_of(*three, centroids(), learn=learn, window=window, is_causal=True) for three in (problem(), others)
    )
    np.testing.assert_allclose(after[:, :7], before[:, :7], atol=1e-6)
    assert np.abs(after[:, 7:] - before[:, 7:]).max() > 0.1

    def early(*three):
        return output_of(*three, centroids(), learn=learn, window=window, is_causal=True)[:, :7].sum()

    for gradient in jax.jit(jax.grad(early, (0, 1, 2)))(*problem()):
        assert (np.asarray(gradient)[:, 7:] == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learn", [*HARD, "soft"])
def test_padding_neither_sees_nor_is_seen(learn, is_causal):
    window, lengths = None if learn == "soft" else 4, jnp.asarray([12, 3])
    broken = [x.at[1, 3:].set(jnp.nan) for x in problem()]

    def loss(*three):
        found = route(
            *three, centroids(), window=window, is_causal=is_causal, learn=learn, key_value_seq_lengths=lengths
        )
        output, extra = found if learn == "auxiliary" else (found, 0.0)
        return (output * normal(4, B, T, N, V)).sum() + extra, output

    (total, output), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*broken)
    if learn != "soft":
        expected = oracle.routing(*problem(), centroids(), window=4, causal=is_causal, lengths=[12, 3])
        np.testing.assert_allclose(output, expected, atol=1e-5)
    alone = output_of(*(x[1:, :3] for x in problem()), centroids(), window=window, is_causal=is_causal, learn=learn)
    np.testing.assert_allclose(output[1:, :3], alone, atol=1e-5)
    assert np.isfinite(total)
    assert (np.asarray(output)[1, 3:] == 0).all()
    for gradient in grads:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[1, 3:] == 0).all()


def test_items_do_not_meet():
    others = [x.at[0].set(50.0) for x in problem()]
    for is_causal in (False, True):
        before, after = (route(*three, centroids(), window=2, is_causal=is_causal) for three in (problem(), others))
        np.testing.assert_array_equal(after[1], before[1])


# --- what reaches the centroids


def task(learn, *, is_causal, window=4, temperature=0.3):
    """A number made of the output (and of the loss, if there is one), and its gradient with respect to centroids."""
    weights = normal(5, B, T, N, V)

    def total(means, query, key):
        output = output_of(
            query, key, problem()[2], means, learn=learn, is_causal=is_causal, temperature=temperature,
            window=None if learn == "soft" else window,
        )  # fmt: skip
        return (output * weights).sum()

    return weights, jax.jit(jax.grad(total, (0, 1, 2)))(centroids(), *problem()[:2])


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_choice_sends_nothing_to_the_centroids(is_causal):
    for learn in ("none", "auxiliary"):
        _, (d_centroids, d_query, _) = task(learn, is_causal=is_causal)
        assert (np.asarray(d_centroids) == 0).all()
        assert np.abs(d_query).max() > 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_straight_through_is_the_slope_of_gates_that_are_one(is_causal):
    weights, grads = task("straight_through", is_causal=is_causal)
    query, key, value = problem()
    start = [np.asarray(x, np.float64) for x in (centroids(), query, key)]
    chosen = [oracle.affinities(x, start[0]) for x in start[1:]]
    at_start = [oracle.probabilities(near, 0.3) for near in chosen]

    def reference(means, query, key):
        moved = [oracle.probabilities(oracle.affinities(x, means), 0.3) for x in (query, key)]
        gates = [1 + p - p0 for p, p0 in zip(moved, at_start, strict=True)]
        output = oracle.routing(
            query, key, value, means, window=4, causal=is_causal, gates=gates, chosen=chosen
        )  # fmt: skip
        return (output * np.asarray(weights, np.float64)).sum()

    _slopes(reference, start, grads)
    assert np.abs(grads[0]).max() > 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
def test_soft_is_differentiable_as_it_is(is_causal):
    weights, grads = task("soft", is_causal=is_causal)
    value = problem()[2]

    def reference(means, query, key):
        output = oracle.soft_routing(query, key, value, means, temperature=0.3, causal=is_causal)
        return (output * np.asarray(weights, np.float64)).sum()

    _slopes(reference, [np.asarray(x, np.float64) for x in (centroids(), *problem()[:2])], grads)
    assert np.abs(grads[0]).max() > 1e-3


def test_the_auxiliary_loss_is_the_distance_to_the_nearest_centroid():
    def loss(means, query, key, lengths=None):
        return route(query, key, problem()[2], means, learn="auxiliary", key_value_seq_lengths=lengths)[1]

    def reference(means, query, key, ends=(T, T)):
        distances = []
        for x in (query, key):
            near = oracle.affinities(x, means).max(axis=-1)
            distances += [2 - 2 * near[b, :end].ravel() for b, end in enumerate(ends)]
        return np.concatenate(distances).mean()

    start = (centroids(), *problem()[:2])
    assert float(loss(*start)) == pytest.approx(reference(*start), rel=1e-5)
    padded = float(loss(*start, jnp.asarray([12, 3])))
    assert padded == pytest.approx(reference(*start, ends=(12, 3)), rel=1e-5)
    _slopes(reference, [np.asarray(x, np.float64) for x in start], jax.jit(jax.grad(loss, (0, 1, 2)))(*start))


def _slopes(reference, start, grads):
    """Every gradient against the slope along a direction of its own."""
    for i, gradient in enumerate(grads):
        along = np.random.default_rng(40 + i).standard_normal(gradient.shape)

        def moved(x, i=i):
            return reference(*start[:i], x, *start[i + 1 :])

        expected = oracle.slope(moved, start[i], along)
        assert float((np.asarray(gradient) * along).sum()) == pytest.approx(expected, rel=2e-3, abs=1e-3)


# --- the moving average


def test_centroids_move_to_the_mean_of_their_tokens():
    query, key, _ = problem()
    means = np.asarray(3 * centroids(8), np.float64)  # some of them without a token
    moved = jax.jit(update_centroids, static_argnames="decay")(
        jnp.asarray(means, jnp.float32), query, key, decay=0.75, key_value_seq_lengths=jnp.asarray([12, 3])
    )
    unit = oracle.unit(means)
    expected = unit.copy()
    for n in range(N):
        members = [[] for _ in range(8)]
        for x in (query, key):
            near, rows = oracle.affinities(x, means), oracle.unit(np.asarray(x, np.float64))
            for b, end in enumerate((12, 3)):
                for t in range(end):
                    members[near[b, t, n].argmax()].append(rows[b, t, n])
        for c, rows in enumerate(members):
            if rows:
                expected[n, c] = 0.75 * unit[n, c] + 0.25 * np.mean(rows, axis=0)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
    assert (np.abs(expected - unit).max(axis=-1) == 0).any()


def test_a_moving_average_brings_centroids_nearer_to_their_tokens():
    def far(means):
        return float(route(*problem(), means, learn="auxiliary")[1])

    update = jax.jit(functools.partial(update_centroids, decay=0.5))
    means, distances = centroids(), []
    for _ in range(4):
        distances.append(far(means))
        means = update(means, *problem()[:2])
    assert distances == sorted(distances, reverse=True)


# --- transforms, dtypes


def test_one_trace_for_equal_options():
    traces = []

    @functools.partial(jax.jit, static_argnames=("window",))
    def counting(means, lengths, *, window):
        traces.append(window)
        return routing_attention(*problem(), means, window=window, key_value_seq_lengths=lengths)

    for seed in range(3):
        counting(draw_centroids(jax.random.key(seed), N, C, H), jnp.asarray([seed, 5]), window=3)
    assert traces == [3]


@pytest.mark.parametrize("is_causal", [False, True])
def test_mapped_over_centroids_and_tokens(is_causal):
    means = jnp.stack([centroids(), draw_centroids(jax.random.key(9), N, C, H)])
    query, key, value = problem()

    def one(query, means):
        return route(query, key[0], value[0], means, window=3, is_causal=is_causal)

    mapped = jax.jit(jax.vmap(one))(query, means)
    for i in range(2):
        np.testing.assert_allclose(mapped[i], one(query[i], means[i]), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision_rounds_only_the_output(dtype, is_causal):
    three = [x.astype(dtype) for x in problem()]
    found = route(*three, centroids(), window=4, is_causal=is_causal)
    assert found.dtype == dtype
    expected = oracle.routing(*(x.astype(jnp.float32) for x in three), centroids(), window=4, causal=is_causal)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("is_causal", [False, True])
def test_float64_is_computed_in_float64(x64, is_causal):
    three = [jnp.asarray(x, jnp.float64) for x in problem()]
    found = route(*three, centroids(), window=4, is_causal=is_causal)
    assert found.dtype == jnp.float64
    expected = oracle.routing(*three, centroids(), window=4, causal=is_causal)
    np.testing.assert_allclose(found, expected, atol=1e-12)


# --- bad input


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": None, "centroids": jnp.ones((N, 5, H))}, ValueError, "clusters do not divide T, got 5 .* T = 12"),
        ({"learn": "soft", "window": 3}, ValueError, "window must be None for learn='soft'"),
        ({"scale": jnp.ones(N)}, ValueError, r"scale must be one number here, got shape \(2,\)"),
        ({"learn": "hard"}, ValueError, "learn must be one of 'none', 'straight_through', 'auxiliary', 'soft'"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0"),
        ({"centroids": jnp.ones((N, C, H + 1))}, ValueError, "centroids must have shape"),
        ({"centroids": jnp.ones((N, 0, H))}, ValueError, "centroids must have shape"),
        ({"centroids": jnp.ones((C, H))}, ValueError, "centroids must have rank 3"),
        ({"centroids": jnp.ones((N, C, H), int)}, TypeError, "centroids must have a floating dtype"),
        ({"key": jnp.ones((B, T + 1, N, H))}, ValueError, "key must have shape"),
        ({"key": jnp.ones((B, T, 3, H)), "value": jnp.ones((B, T, 3, V))}, ValueError, "number of query heads must be"),
        ({"key": jnp.ones((B, T, N, H), jnp.float16)}, TypeError, "key must have the query's dtype"),
        ({"value": jnp.ones((B, T - 1, N, V))}, ValueError, "value must have shape"),
        ({"is_causal": "yes"}, TypeError, "is_causal must be True or False"),
        ({"key_value_seq_lengths": jnp.asarray([1, 13])}, ValueError, "key_value_seq_lengths must lie in 0..12"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, says):
    query, key, value = problem()
    arguments = {"query": query, "key": key, "value": value, "centroids": centroids(), **change}
    with pytest.raises(error, match=says):
        routing_attention(**arguments)


def test_a_decay_lies_below_one():
    with pytest.raises(ValueError, match=r"decay must lie in \[0, 1\), got 1"):
        update_centroids(centroids(), *problem()[:2], decay=1.0)
    with pytest.raises(ValueError, match="num_clusters must be at least 1"):
        draw_centroids(jax.random.key(0), 1, 0, 4)
