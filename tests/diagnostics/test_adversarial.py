"""Other weights: ε is kept, known optima are found, permutations permute."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.diagnostics import adversarial_attention, permute_weights, permuted_attention, total_variation

EPSILON = 0.02


def js(p, q):
    """Nats."""
    m = (np.float64(p) + q) / 2
    return sum((a * np.log(a / b) for x in (p, q) for a, b in zip(x, m, strict=True) if a > 0)) / 2


def found_for(predict, p, data, **options):
    """Of all examples, `predict(data, weights)`."""
    options = {"epsilon": EPSILON, "steps": 150, **options}

    def search(p, data, key):
        return adversarial_attention(functools.partial(predict, data), p, key, **options)

    keys = jax.random.split(jax.random.key(0), len(p))
    return jax.jit(jax.vmap(search))(np.float32(p), np.float32(data), keys)


def two_classes(slopes, weights):
    """Of one row `[S]`."""
    y = jax.nn.sigmoid(jnp.sum(slopes * weights))
    return jnp.stack([y, 1 - y])


def best_of_slab(slopes, p):
    """The divergence is convex, so its maximum is at a corner: a key, or a point on an edge where ε is reached."""
    y = 1 / (1 + np.exp(-slopes @ p))
    ends = [np.log(z / (1 - z)) for z in (max(y - EPSILON, 1e-12), min(y + EPSILON, 1 - 1e-12))]
    eye, corners = np.eye(len(p)), []
    for i, j in np.ndindex(len(p), len(p)):
        if ends[0] <= slopes[i] <= ends[1]:
            corners.append(eye[i])
        for end in ends if slopes[i] != slopes[j] else ():
            share = (end - slopes[j]) / (slopes[i] - slopes[j])
            if 0 <= share <= 1:
                corners.append(share * eye[i] + (1 - share) * eye[j])
    return max(js(p, q) for q in corners)


def test_the_largest_divergence_is_nearly_found_and_epsilon_kept():
    rng = np.random.default_rng(0)
    p, slopes = rng.dirichlet(np.ones(6), 16), 3 * rng.normal(size=(16, 6))
    found = found_for(two_classes, p, slopes)
    best = np.array([best_of_slab(*one) for one in zip(slopes, p, strict=True)])
    ratio = found.divergence / best
    assert ratio.mean() > 0.85
    assert (ratio < 1 + 1e-4).all()
    assert (np.asarray(found.total_variation) <= EPSILON).all()
    for k in range(16):  # and it is what it says
        q = np.asarray(found.weights[k])
        assert (q >= 0).all()
        np.testing.assert_allclose(q.sum(), 1, rtol=1e-5)
        np.testing.assert_allclose(found.divergence[k], js(p[k], q / q.sum()), rtol=1e-3)
        moved = np.abs(two_classes(slopes[k], q) - two_classes(slopes[k], p[k].astype(np.float32))).sum() / 2
        np.testing.assert_allclose(found.total_variation[k], moved, atol=1e-6)


def test_a_prediction_of_the_weights_themselves_leaves_an_interval():
    p = np.array([[0.9, 0.1], [0.5, 0.5], [0.7, 0.3]])
    found = found_for(lambda _, weights: weights, p, np.zeros(3))
    best = [max(js(one, one + shift) for shift in ([EPSILON, -EPSILON], [-EPSILON, EPSILON])) for one in p]
    np.testing.assert_allclose(found.divergence, best, rtol=2e-2)


def test_keys_of_equal_values_change_places_and_a_blind_model_lets_all_go():
    def mixture(value, weights):
        y = jnp.sum(value * weights)
        return jnp.stack([y, 1 - y])

    p = np.array([[0.7, 0.0, 0.3, 0.0], [0.7, 0.1, 0.1, 0.1]])
    found = found_for(mixture, p, [[0.2, 0.2, 0.9, 0.9], [0.5, 0.5, 0.5, 0.5]])
    assert found.divergence[0] > 0.98 * math.log(2)  # the same mixture, no key in common
    np.testing.assert_allclose(found.divergence[1], js(p[1], [0, 1, 0, 0]), rtol=1e-3)


def test_only_rows_with_a_choice_among_visible_keys_change_and_count():
    p = np.zeros((1, 4, 4), np.float32)
    p[0, 0, 0] = 1  # one visible key
    p[0, 1, :2] = [0.25, 0.75]
    p[0, 2, :2] = [0.1, 0.3]  # beside a sink of 0.6; row 3 is padding
    visible = np.tri(4, dtype=bool) & (np.arange(4) < 2)
    found = found_for(lambda _, weights: jnp.ones(2) / 2 + 0 * jnp.sum(weights), p, np.zeros(1), visible=visible)
    q = np.asarray(found.weights[0])
    np.testing.assert_allclose(q, [[1, 0, 0, 0], [1, 0, 0, 0], [0.4, 0, 0, 0], [0, 0, 0, 0]], atol=1e-3)
    np.testing.assert_allclose(found.divergence, js([0.25, 0.75], [1, 0]), rtol=1e-3)


def test_of_several_predictions_the_most_changed_one_keeps_to_epsilon():
    def rows(slopes, weights):
        return jax.vmap(two_classes)(slopes, weights)

    rng = np.random.default_rng(1)
    p, slopes = rng.dirichlet(np.ones(5), (3, 2)), 3 * rng.normal(size=(3, 2, 5))
    found = found_for(rows, p, slopes)
    moved = [
        np.abs(rows(slopes[k], found.weights[k]) - rows(slopes[k], p[k].astype(np.float32))).sum(-1) / 2
        for k in range(3)
    ]
    np.testing.assert_allclose(found.total_variation, np.max(moved, axis=-1), atol=1e-6)
    assert (np.max(moved, axis=-1) <= EPSILON + 1e-6).all()
    assert (np.asarray(found.divergence) > 0.1).all()


def test_epsilon_of_zero_may_leave_nothing_but_the_weights():
    p = np.array([[0.6, 0.3, 0.1]], np.float32)
    found = found_for(lambda _, weights: weights, p, np.zeros(1), epsilon=0.0)
    np.testing.assert_allclose(found.weights, p, atol=1e-6)
    np.testing.assert_allclose(found.divergence, [0], atol=1e-9)
    np.testing.assert_array_equal(found.total_variation, [0])


def test_weights_and_logits_that_underflow_are_no_fault():
    p = np.array([[1.0, 0.0, 0.0]], np.float32)
    with jax.debug_nans(True):
        found = found_for(two_classes, p, [[0.0, 300.0, -300.0]], steps=400)
    assert np.isfinite(found.weights).all()
    assert found.total_variation[0] <= EPSILON


def test_permutations_stay_among_visible_keys_and_are_drawn_evenly():
    visible = np.array([[True, True, True, False], [False, True, False, True]])
    weights = np.array([[0.5, 0.3, 0.2, 0.0], [0.9, 0.6, 0.05, 0.4]], np.float32)
    permute = jax.jit(jax.vmap(lambda key: permute_weights(key, weights, visible)))
    found = np.asarray(permute(jax.random.split(jax.random.key(0), 600)))
    np.testing.assert_array_equal(found[:, ~visible], np.tile(weights[~visible], (600, 1)))
    for row, seen in enumerate(visible):
        drawn = found[:, row, seen]
        np.testing.assert_array_equal(np.sort(drawn), np.tile(np.sort(weights[row, seen]), (600, 1)))
        orders, counts = np.unique(drawn, axis=0, return_counts=True)
        assert len(orders) == math.factorial(seen.sum())
        assert abs(counts * len(orders) / 600 - 1).max() < 0.4
    both = np.unique(found[:, :, 1], axis=0)  # rows move on their own
    assert len(both) == 6
    moved = np.asarray(permute(jax.random.split(jax.random.key(0), 600)))
    np.testing.assert_array_equal(moved, found)


def test_the_change_under_permutations():
    p = np.array([0.8, 0.2, 0.0], np.float32)
    found = np.asarray(permuted_attention(lambda weights: weights, p, jax.random.key(0), permutations=40))
    assert found.shape == (40,)
    np.testing.assert_allclose(np.unique(np.round(found, 5)), [0, 0.2, 0.6, 0.8])
    same = permuted_attention(lambda weights: jnp.sort(weights), p, jax.random.key(0), permutations=3)
    np.testing.assert_array_equal(same, np.zeros(3))


def test_total_variation():
    np.testing.assert_allclose(total_variation([[0.5, 0.5], [1.0, 0.0]], [[0.25, 0.75], [0.0, 1.0]]), [0.25, 1.0])


P = np.full(3, 1 / 3, np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epsilon": -0.1}, ValueError, "epsilon must be at least 0, got -0.1"),
        ({"epsilon": 1.5}, ValueError, r"epsilon must lie in \[0, 1\], got 1.5"),
        ({"visible": np.ones(4, bool)}, ValueError, r"visible must broadcast to the shape of weights = \(3,\)"),
        ({"visible": np.ones(3)}, TypeError, "visible must be boolean"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"starts": 0}, ValueError, "starts must be at least 1, got 0"),
        ({"weights": np.ones(3, int)}, TypeError, "weights must have a floating dtype"),
        ({"key": 0}, TypeError, "key must be one key"),
        ({"permutations": 0}, ValueError, "permutations must be at least 1, got 0"),
    ],
)
def test_errors(arguments, error, message):
    given = {"weights": P, "key": jax.random.key(0), "epsilon": 0.1, **arguments}
    function = adversarial_attention
    if "permutations" in given:
        function = permuted_attention
        del given["epsilon"]
    weights, key = given.pop("weights"), given.pop("key")
    with pytest.raises(error, match=message):
        function(lambda weights: weights, weights, key, **given)


def test_errors_of_total_variation():
    with pytest.raises(ValueError, match=r"q must have shape of p = \(2,\), got \(3,\)"):
        total_variation(np.ones(2), np.ones(3))
