"""Attribution to weights: known gradients, completeness, and ranks that agree or do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from attn_jax.diagnostics import gradient_attribution, integrated_gradients, rank_agreement

RNG = np.random.default_rng(0)
WEIGHTS = RNG.dirichlet(np.ones(5), size=(2, 3)).astype(np.float32)  # [N, T, S]
VALUE = RNG.normal(size=(2, 5, 4)).astype(np.float32)
READ = RNG.normal(size=(2, 4)).astype(np.float32)


def output(weights):
    """A loss of the last row's mixture: not linear."""
    mixed = jnp.einsum("ns,nsv->nv", weights[:, -1], jnp.asarray(VALUE, weights.dtype))
    return jnp.tanh(jnp.sum(mixed * jnp.asarray(READ, weights.dtype))) ** 2


def linear(weights):
    return jnp.sum(weights * jnp.asarray(COEFFICIENTS, weights.dtype))


COEFFICIENTS = RNG.normal(size=WEIGHTS.shape)


def test_a_gradient_times_its_weight():
    np.testing.assert_allclose(gradient_attribution(linear, WEIGHTS), WEIGHTS * COEFFICIENTS, rtol=1e-5)
    found = np.asarray(gradient_attribution(output, WEIGHTS))
    np.testing.assert_array_equal(found[:, :-1], 0)  # rows that are not read
    mixed = np.einsum("ns,nsv->nv", np.float64(WEIGHTS[:, -1]), VALUE)
    y = np.tanh((mixed * READ).sum())
    slope = 2 * y * (1 - y**2) * np.einsum("nsv,nv->ns", VALUE, READ)
    np.testing.assert_allclose(found[:, -1], WEIGHTS[:, -1] * slope, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_add_up(x64):
    weights, other = np.float64(WEIGHTS), RNG.dirichlet(np.ones(5), size=(2, 3))
    for baseline in (None, other):
        start = np.zeros_like(weights) if baseline is None else baseline
        found = integrated_gradients(output, weights, baseline=baseline, steps=20)
        change = float(output(jnp.asarray(weights)) - output(jnp.asarray(start)))
        assert abs(change) > 1e-3
        np.testing.assert_allclose(found.change, change, rtol=1e-12)
        np.testing.assert_allclose(found.values.sum(), change, rtol=1e-10)
        np.testing.assert_allclose(found.gap, 0, atol=1e-10 * abs(change))
        # The integral itself, by many small steps.
        at = (np.arange(4000) + 0.5) / 4000
        points = start + at[:, None, None, None] * (weights - start)
        slopes = jax.vmap(jax.grad(output))(jnp.asarray(points)).mean(axis=0)
        np.testing.assert_allclose(found.values, (weights - start) * slopes, rtol=1e-5, atol=1e-9)


def test_the_gap_tells_that_there_were_too_few_steps(x64):
    few, many = (integrated_gradients(lambda w: jnp.sum(w**9), np.full(3, 0.9), steps=n) for n in (1, 8))
    assert abs(few.gap) > 0.5 * abs(few.change)
    assert abs(many.gap) < 1e-12
    np.testing.assert_allclose(few.gap, few.values.sum() - few.change)


def test_where_the_output_is_linear_both_are_the_same():
    np.testing.assert_allclose(
        integrated_gradients(linear, WEIGHTS, steps=2).values,
        gradient_attribution(linear, WEIGHTS),
        rtol=1e-5,
        atol=1e-6,
    )


def accounts(noise, examples=40, items=7, seed=0):
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(examples, items))
    return first, first + noise * rng.normal(size=first.shape)


def test_tau_is_that_of_scipy_with_ties_and_without_what_does_not_count():
    first, second = (np.round(x, 0) for x in accounts(1.0))
    counted = np.random.default_rng(1).uniform(size=first.shape) < 0.8
    found = rank_agreement(first, second, counted, permutations=2)
    expected = [stats.kendalltau(x[at], y[at]).statistic for x, y, at in zip(first, second, counted, strict=True)]
    np.testing.assert_allclose(found.values, expected, rtol=1e-12)
    known = found.values[~np.isnan(found.values)]
    assert found.mean == pytest.approx(known.mean())
    low, high = stats.t.interval(0.95, len(known) - 1, loc=known.mean(), scale=stats.sem(known))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_agreement_beside_its_null():
    same, near, none = (rank_agreement(*accounts(noise)) for noise in (0.0, 1.0, 1e3))
    assert (same.mean, same.low, same.high) == pytest.approx((1, 1, 1))
    assert same.null_high < 0.5 * near.low
    assert near.low < near.mean < near.high < 1
    assert none.null_low < 0 < none.null_high
    assert none.null_low < none.mean < none.null_high
    # Means of 40 examples of 7 items: the spread of τ without an order is known.
    spread = np.sqrt(2 * (2 * 7 + 5) / (9 * 7 * 6) / 40)
    assert none.null_high - none.null_low == pytest.approx(2 * 1.96 * spread, rel=0.3)


def test_an_account_that_tells_nothing_apart_has_no_tau():
    first, second = accounts(0.1, examples=3)
    first[1] = 0.5
    found = rank_agreement(first, second)
    np.testing.assert_array_equal(np.isnan(found.values), [False, True, False])
    assert found.mean == pytest.approx(found.values[[0, 2]].mean())
    nothing = rank_agreement(np.zeros((2, 3)), second[:2, :3])
    assert np.isnan([nothing.mean, nothing.low, nothing.null_high]).all()
    alone = rank_agreement(first[:1], second[:1])
    assert (alone.low, alone.high) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gradient_attribution(lambda w: w, WEIGHTS), ValueError, "the result of output must have rank 0"),
        (lambda: gradient_attribution(output, np.ones(3, int)), TypeError, "weights must have a floating dtype"),
        (lambda: integrated_gradients(output, WEIGHTS, steps=0), ValueError, "steps must be at least 1, got 0"),
        (
            lambda: integrated_gradients(output, WEIGHTS, baseline=WEIGHTS[:1]),
            ValueError,
            r"baseline must have shape of weights = \(2, 3, 5\), got \(1, 3, 5\)",
        ),
        (lambda: rank_agreement(np.ones(3), np.ones(3)), ValueError, r"first must have rank 2, \[E, n\]"),
        (lambda: rank_agreement(np.ones((2, 3)), np.ones((2, 4))), ValueError, r"second must have shape \[E, n\]"),
        (lambda: rank_agreement(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3))), TypeError, "counted must be bool"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
