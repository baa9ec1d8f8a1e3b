"""Retention and state spaces: three forms, one answer, and exactly the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.linear import LinearState, retention, state_space
from tests import oracles
from tests.linear.problems import Geometry, assert_near, cast, draw

FORMS = ("chunkwise", "recurrent", "parallel")


def default_decay(num_heads):
    return 1 - 2.0 ** (-5 - np.arange(num_heads))


def by_formula(arrays, decay):
    """(Q Kᵀ ⊙ D) V."""
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    T, N = query.shape[-3:-1]
    key, value = (np.repeat(x, N // x.shape[-2], -2) for x in (key, value))
    distance = np.arange(T)[:, None] - np.arange(T)
    powers = np.where(distance >= 0, np.asarray(decay)[:, None, None] ** np.maximum(distance, 0), 0)
    return np.einsum("...nts,...snv->...tnv", np.einsum("...tnh,...snh->...nts", query, key) * powers, value)


@pytest.mark.parametrize("form", FORMS)
def test_the_sum_of_powers(form):
    """γ = 0.9 and ones: (1 − γ^(t+1)) / (1 − γ)."""
    ones = jnp.ones((6, 1, 1))
    for chunk in (1, 2, 4, 6, 7):
        output = retention(ones, ones, ones, decay=jnp.array([0.9]), form=form, chunk_size=chunk)
        np.testing.assert_allclose(output[:, 0, 0], [1, 1.9, 2.71, 3.439, 4.0951, 4.68559], rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_the_formula(form):
    geometry = Geometry((2,), 13)
    arrays = cast(draw(0, geometry), np.float32)
    given = np.array([1.0, 0.5, 0.9, 1e-30], np.float32)
    for chunk in (1, 4, 7, 20) if form == "chunkwise" else (None,):

        @jax.jit
        def both(arrays, decay, chunk=chunk):
            options = {"form": form, "chunk_size": chunk}
            return retention(**arrays, **options), retention(**arrays, decay=decay, **options)

        usual, found = both(arrays, given)
        assert_near(usual, by_formula(arrays, default_decay(4)), 1e-6)
        assert_near(found, by_formula(arrays, given.astype(np.float64)), 1e-6)


def test_decays_reach_gradients():
    arrays = draw(0, Geometry((), 9, 2, 2, 3, 2))
    decay = np.array([0.9, 0.5])
    slope = jax.grad(lambda decay: retention(**cast(arrays, np.float32), decay=decay, chunk_size=4).sum())
    step = 1e-6
    for head in range(2):
        moved = [by_formula(arrays, decay + sign * step * np.eye(2)[head]).sum() for sign in (1, -1)]
        np.testing.assert_allclose(
            slope(jnp.asarray(decay, jnp.float32))[head], (moved[0] - moved[1]) / (2 * step), rtol=1e-4
        )


def test_strong_decays_over_long_sequences_stay_finite():
    arrays = cast(draw(0, Geometry((), 4096, 2, 2, 4, 3)), np.float32)
    for form in ("chunkwise", "recurrent"):
        output = retention(**arrays, decay=jnp.array([0.5, 1.0]), form=form)
        assert np.isfinite(output).all()
        recent = {name: x[-200:] for name, x in arrays.items()}  # 2^-200 is nothing beside 1
        assert_near(output[-1, 0], by_formula(recent, [0.5, 1.0])[-1, 0], 1e-6)


@pytest.mark.parametrize("function", ["retention", "state_space"])
def test_lengths_stop_the_state(function):
    """Steps past the length give 0, change nothing, and may hold NaN: what follows goes on from the length."""
    arrays = cast(draw(0, Geometry((2,), 8), "per step", levels=[-0.1, -1.0]), np.float32)
    log_decay = arrays.pop("log_decay")

    @jax.jit
    def attend(arrays, log_decay, lengths, state):
        options = {"lengths": lengths, "initial_state": state, "return_state": True, "chunk_size": 3}
        if function == "retention":
            return retention(**arrays, **options)
        return state_space(**arrays, log_decay=log_decay, **options)

    empty = LinearState.empty((2,), 4, 5, 3)
    whole, last = attend(arrays, log_decay, jnp.array([8, 8]), empty)
    lengths = np.array([3, 5])
    counted = np.arange(8) < lengths[:, None]
    spoiled = {name: np.where(counted[..., None, None], x, np.nan) for name, x in arrays.items()}
    first, middle = attend(spoiled, np.where(counted[..., None], log_decay, np.nan), lengths, empty)
    assert_near(first, np.where(counted[..., None, None], whole, 0), 1e-6)
    rest = {name: np.stack([np.roll(x[i], -lengths[i], 0) for i in (0, 1)]) for name, x in arrays.items()}
    turned = np.stack([np.roll(log_decay[i], -lengths[i], 0) for i in (0, 1)])
    second, after = attend(rest, turned, 8 - lengths, middle)
    for i in (0, 1):
        assert_near(second[i, : 8 - lengths[i]], np.asarray(whole)[i, lengths[i] :], 1e-6)
    assert_near(after.memory, np.asarray(last.memory), 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_state_spaces_are_the_recurrence(form):
    arrays = draw(0, Geometry((2,), 11), "per step", levels=[0.0, -1e-2, -1.0, -50.0])
    found = jax.jit(lambda arrays: state_space(**arrays, form=form, chunk_size=4))(cast(arrays, np.float32))
    assert_near(found, oracles.recurrence(**arrays).output, 1e-6)


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (np.array([0.5, 0.5, 0.5, 1.1]), r"decay must lie in \(0, 1\], got values in 0.5..1.1"),
        (np.array([0.5, 0.5, 0.5, 0.0]), r"decay must lie in \(0, 1\]"),
        (np.array([0.5, 0.5, 0.5, np.nan]), r"decay must lie in \(0, 1\]"),
        (np.full(3, 0.5), r"decay must have shape \[N\] = \(4,\) or \[K\] = \(2,\), got \(3,\)"),
        (np.full((1, 4), 0.5), "decay must have rank 1"),
    ],
)
def test_a_decay_that_is_none_is_refused(decay, message):
    with pytest.raises(ValueError, match=message):
        retention(**draw(0, Geometry()), decay=decay)


def test_wrong_arguments_are_named():
    arrays = draw(0, Geometry())
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.13"):
        retention(**arrays, lengths=np.array([1, 14]))
    with pytest.raises(ValueError, match="log_decay must be finite and at most 0"):
        state_space(**arrays, log_decay=np.ones((2, 13, 4)))
    with pytest.raises(ValueError, match="key must have as many steps as query"):
        retention(arrays["query"][:, :3], arrays["key"], arrays["value"])
