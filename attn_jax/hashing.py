"""A counter-based hash: random bits that depend on where an entry sits, not on the order in which it is visited."""

import jax.numpy as jnp

from attn_jax.typing import Array


def mix(x: Array) -> Array:
    """Scrambles uint32 values, a bijection in which every input bit flips about half of the output bits.

    Reference: the 32-bit finaliser of MurmurHash3 (Appleby, 2011).
    """
    x = x.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def combine(seed: Array, *counters: Array) -> Array:
    """One uint32 per combination of the counters, which broadcast against each other and the seed."""
    state = mix(seed)
    for counter in counters:
        # The odd constant keeps counter 0 from leaving the state as it was.
        state = mix(state ^ (counter.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.uint32(0x7F4A7C15)))
    return state
