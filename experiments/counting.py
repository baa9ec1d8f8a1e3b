"""What attention costs, counted: the counts of `attn_jax.diagnostics.costs`, and how they grow."""

import numpy as np
from numpy.typing import ArrayLike

from attn_jax.diagnostics.costs import (
    DENSE_PRODUCTS,
    PRODUCTS,
    Work,
    dense_flops,
    temporary_bytes,
    tile_loop,
    tile_of,
    touched_share,
    xla_cost,
)
from experiments.estimates import Estimate

__all__ = [
    "DENSE_PRODUCTS",
    "PRODUCTS",
    "Work",
    "counted_exponent",
    "dense_flops",
    "temporary_bytes",
    "tile_loop",
    "tile_of",
    "touched_share",
    "xla_cost",
]


def counted_exponent(x: ArrayLike, y: ArrayLike) -> Estimate:
    """The exponent e of y ∝ x^e, least squares on logarithms; its range over neighbouring points is the interval.

    For counted numbers, which are the same in every run: there is nothing to sample.
    """
    logs_x, logs_y = (np.log(np.asarray(values, dtype=np.float64)) for values in (x, y))
    if logs_x.ndim != 1 or logs_x.shape != logs_y.shape or logs_x.size < 2:
        raise ValueError(f"x and y must be [points], at least two, got shapes {logs_x.shape} and {logs_y.shape}")
    local = np.diff(logs_y) / np.diff(logs_x)
    centred = logs_x - logs_x.mean()
    return Estimate(float(logs_y @ centred / (centred @ centred)), float(local.min()), float(local.max()), None)
