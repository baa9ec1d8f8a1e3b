"""Dropout of weights: its rate, its independence of tiling, its key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import dot_product_attention
from attn_jax.exact.arguments import Dropout
from attn_jax.exact.dropout import keep_mask
from tests.squares import whole

SQUARE = (3, 4, 64, 128)


def draw(rate=0.3, key=None, rows=None, square=SQUARE):
    tile = whole(square, jnp.arange(square[-2]), jnp.arange(square[-1]), query_indices=rows)
    return np.asarray(keep_mask(Dropout(rate, jax.random.key(0) if key is None else key), tile))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_rate(rate):
    kept = draw(rate)
    assert kept.shape == SQUARE
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation
    for axis in range(4):  # no row, column, head or item is favoured
        others = tuple(i for i in range(4) if i != axis)
        means = kept.mean(others)
        assert (abs(means - (1 - rate)) < 6 * deviation * np.sqrt(len(means))).all()


def test_entries_are_uncorrelated():
    dropped = 1.0 - draw(0.5) - 0.5
    size = dropped.size
    for axis in range(4):
        for shift in (1, 2):
            correlation = 4 * (dropped * np.roll(dropped, shift, axis)).mean()
            assert abs(correlation) < 5 / np.sqrt(size)
    rectangle = dropped * np.roll(dropped, 1, 2) * np.roll(dropped, 1, 3) * np.roll(dropped, (1, 1), (2, 3))
    assert abs(16 * rectangle.mean()) < 5 / np.sqrt(size)


def test_bits_do_not_depend_on_the_tile():
    rows = np.array([60, 3, 17])
    np.testing.assert_array_equal(draw(rows=jnp.asarray(rows)), draw()[:, :, rows])


def test_a_rate_just_below_one():
    assert not draw(1 - 1e-12).any()


def test_keys_draw_differently():
    draws = [draw(key=jax.random.key(seed)) for seed in range(4)]
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert abs((one == other).mean() - (0.7**2 + 0.3**2)) < 0.01
    np.testing.assert_array_equal(draw(key=jax.random.PRNGKey(1)), draws[1])  # the older kind of key
    draw(key=jax.random.key(0, impl="rbg"))


def test_attention_uses_exactly_this_mask():
    rng = np.random.default_rng(0)
    query, key = (
        rng.standard_normal((2, *SQUARE[2:3], 4, 8), np.float32),
        rng.standard_normal((2, 128, 2, 8), np.float32),
    )
    value = np.broadcast_to(np.eye(128, dtype=np.float32)[:, None], (2, 128, 2, 128))
    dropped = dot_product_attention(query, key, value, dropout_rate=0.3, dropout_rng=jax.random.key(5))
    weights = dot_product_attention(query, key, value)
    kept = draw(key=jax.random.key(5), square=(2, *SQUARE[1:]))
    np.testing.assert_allclose(dropped, np.moveaxis(kept, 1, 2) * weights / 0.7, rtol=1e-5)
    assert (dot_product_attention(query, key, value, dropout_rate=0.0) == weights).all()


@pytest.mark.parametrize(
    ("rate", "key", "message"),
    [
        (-0.1, jax.random.key(0), r"dropout_rate must lie in \[0, 1\), got -0.1"),
        (1.0, jax.random.key(0), r"dropout_rate must lie in \[0, 1\), got 1.0"),
        (float("nan"), jax.random.key(0), r"dropout_rate must lie in \[0, 1\), got nan"),
        (0.5, None, "dropout_rng must be a key where dropout_rate > 0, got None"),
        ("0.5", jax.random.key(0), "dropout_rate must be one number, got str '0.5'"),
        (b"0.5", jax.random.key(0), "dropout_rate must be one number, got bytes"),
        (0.5, np.zeros(3, np.uint32), "dropout_rng must be one key, .* got uint32 of shape"),
        (0.5, 7, "dropout_rng must be one key, as made by jax.random.key"),
        (0.5, jax.random.split(jax.random.key(0), 3), "dropout_rng must be one key"),
    ],
)
def test_bad_arguments(rate, key, message):
    x = np.zeros((2, 1, 4), np.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        dot_product_attention(x, x, x, dropout_rate=rate, dropout_rng=key)
