"""Lengths of padded batches: what is accepted, and which entries count."""

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.nn import padding
from attn_jax.positions import NTK, DynamicNTK


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_counts(dtype):
    lengths = padding.check_lengths("lengths", np.array([0, 100], dtype), (2,), 300, NTK(2.0))
    assert lengths.dtype == jnp.int32
    np.testing.assert_array_equal(padding.counts(lengths, 300), np.arange(300) < np.array([[0], [100]]))


def test_one_number_is_for_all_items():
    np.testing.assert_array_equal(padding.check_lengths("lengths", 3, (2, 1), 5, None), [[3], [3]])
    assert padding.check_lengths("lengths", np.array([3]), (), 5, None).shape == ()


def test_without_padding_keeps_the_rest():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 3)), jnp.bfloat16).at[1, 2:].set(jnp.nan)
    cleaned = padding.without_padding(x, jnp.array([4, 2]))
    assert cleaned.dtype == x.dtype
    np.testing.assert_array_equal(cleaned, x.at[1, 2:].set(0))
    assert padding.without_padding(x, None) is x


@pytest.mark.parametrize(
    ("lengths", "scaling", "message"),
    [
        (np.array([3, 6]), None, r"lengths must lie in 0\.\.5, got values in 3\.\.6"),
        (np.array([3, 4, 5]), None, r"lengths must have shape \[\*B\] = \(2,\), got \(3,\)"),
        (np.array([3.0, 4.0]), None, "lengths must have an integer dtype, got float32"),
        (np.array([3, 4]), DynamicNTK(2.0, 4), "lengths must be None with a rotary_scaling of DynamicNTK"),
    ],
)
def test_wrong_lengths(lengths, scaling, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        padding.check_lengths("lengths", lengths, (2,), 5, scaling)
    assert "\n" not in str(raised.value)
