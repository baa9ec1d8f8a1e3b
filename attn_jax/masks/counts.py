"""Numbers that masks take, and sums of positions with them: exact wherever positions are int32."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.lazy import Square, Tile

FIRST, LAST = -(2**31), 2**31 - 1  # what a position may be at most


def shift(positions: Any, by: int) -> Any:
    """`positions + by`, held within int32: a NumPy range of int64 and an array of int32 then compare alike."""
    by = max(FIRST - LAST, min(by, LAST - FIRST))
    while by:  # in steps that int32 holds
        step = max(-LAST, min(by, LAST))
        positions = positions.clip(max(FIRST, FIRST - step), min(LAST, LAST - step)) + step
        by -= step
    return positions


def block_of(positions: Any, block: int) -> Any:
    """`positions // block`, also where no position reaches the size of a block."""
    return positions // block if block <= LAST else -(positions < 0).astype(positions.dtype)


def before(positions: Any, n: Any) -> Any:
    """`positions < n`, also for a number that int32 does not hold."""
    return positions <= min(n - 1, LAST) if isinstance(n, int) else positions < n


def per_item(part: Square | Tile, name: str, x: Any) -> Any:
    """A number as it is, an int array `[*B]` as `[*B, 1, 1, 1]`."""
    return x if isinstance(x, int) else part.per_item(name, jnp.asarray(x))


def count_or_array(name: str, x: Any) -> Any:
    """A number from 0 on, or an array of them."""
    return checks.positive_int(name, x, least=0) if isinstance(x, numbers.Integral) else counts(name, x)


def counts(name: str, x: Any) -> jax.Array:
    """An array of numbers from 0 on."""
    array = checks.wide_integers(name, x)
    checks.within(name, array, 0)
    return array
