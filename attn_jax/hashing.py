"""A counter-based hash: random bits that depend on where an entry sits, not on the order in which it is visited."""

from typing import Any

import numpy as np

from attn_jax.typing import Array


def mix(x: Array | np.ndarray) -> Any:
    """Scrambles uint32 values (NumPy or JAX), a bijection in which every input bit flips about half of the output bits.

    Reference: the 32-bit finaliser of MurmurHash3 (Appleby, 2011).
    """
    x = x.astype(np.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def combine(seed: Array | np.ndarray, *counters: Array | np.ndarray) -> Any:
    """One uint32 per combination of the counters, which broadcast against each other and the seed."""
    state = mix(seed)
    for counter in counters:
        # The odd constant keeps counter 0 from leaving the state as it was.
        state = mix(state ^ (counter.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)))
    return state
