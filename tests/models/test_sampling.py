"""Sampling of tokens: which may be drawn, and how often each is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.models import sampling

P = np.array([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = np.log(P).astype(np.float32)


def kept(**options):
    values, ids = sampling.candidates(LOGITS, **options)
    return set(np.asarray(ids)[~np.isneginf(values)].tolist())


@pytest.mark.parametrize(
    ("k", "expected"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 3, 4}), (5, set(range(5))), (9, set(range(5)))]
)
def test_top_k_keeps_the_k_likeliest(k, expected):
    assert kept(top_k=k) == expected


@pytest.mark.parametrize(
    ("p", "expected"),
    [(1e-6, {1}), (0.39, {1}), (0.41, {1, 3}), (0.64, {1, 3}), (0.66, {1, 3, 4}), (0.84, {1, 3, 4}), (0.97, set(range(5))),
     (1.0, set(range(5)))],
)  # fmt: skip
def test_top_p_keeps_the_fewest_that_have_the_probability(p, expected):
    assert kept(top_p=p) == expected


def test_top_p_is_of_what_top_k_leaves():
    # Of 0.4 and 0.25, the first has 0.615.
    assert kept(top_k=2, top_p=0.6) == {1}
    assert kept(top_k=2, top_p=0.63) == {1, 3}


def test_ties_go_to_the_lower_ids():
    values, ids = sampling.candidates(jnp.zeros((2, 6)), top_k=4, top_p=0.3)  # a quarter each
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(np.isneginf(values), [[False, False, True, True]] * 2)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"temperature": 1.0}, P),
        ({"temperature": 0.5}, P**2),
        ({"temperature": 3.0}, P ** (1 / 3)),
        ({"temperature": 1.0, "top_k": 3}, P * (P >= 0.2)),
        ({"temperature": 1.0, "top_p": 0.7}, P * (P >= 0.2)),
        # At temperature 1/2 the likeliest alone has 0.16 / 0.275 = 0.58, so 0.7 takes one more and not two.
        ({"temperature": 0.5, "top_p": 0.7}, P**2 * (P >= 0.25)),
    ],
)
def test_draws_follow_the_distribution(options, weights):
    count = 20_000
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(lambda keys: sampling.sample(jnp.tile(LOGITS, (count, 1)), keys, **options))(keys)
    share, expected = np.bincount(drawn, minlength=5) / count, weights / weights.sum()
    # Five standard errors; what may not be drawn never is.
    np.testing.assert_array_less(np.abs(share - expected), 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9)
    assert drawn.dtype == jnp.int32


def test_a_tiny_temperature_takes_the_likeliest():
    drawn = sampling.sample(1e4 * LOGITS[None], jax.random.split(jax.random.key(1), 1), temperature=1e-38)
    assert drawn.tolist() == [1]


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_top_p_outside_its_range(p):
    with pytest.raises(ValueError, match="top_p must"):
        sampling.candidates(LOGITS, top_p=p)


def test_top_k_below_one():
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        sampling.candidates(LOGITS, top_k=0)
