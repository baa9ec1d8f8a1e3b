"""How counts grow, and that experiments count as the diagnostics do."""

import numpy as np
import pytest

from attn_jax.diagnostics import costs
from experiments import counting


def test_counts_are_those_of_the_diagnostics():
    for name in set(counting.__all__) - {"counted_exponent"}:
        assert getattr(counting, name) is getattr(costs, name)


def test_counted_exponents():
    sizes = np.array([2, 4, 16])
    found = counting.counted_exponent(sizes, 3.0 * sizes**1.5)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found.count is None
    bent = counting.counted_exponent([1, 2, 4], [1, 2, 8])
    assert (bent.low, bent.high) == pytest.approx((1, 2))
    with pytest.raises(ValueError, match=r"at least two, got shapes \(1,\) and \(1,\)"):
        counting.counted_exponent([1], [1])
