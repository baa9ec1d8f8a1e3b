"""Dropout: which calls have it, and with which key."""

import jax
import jax.numpy as jnp

from attn_jax import checks


def dropout_key(deterministic: bool, dropout_rng: jax.Array | None, rate: float) -> jax.Array | None:
    """The key of a call that drops at `rate`, or None of one that drops nothing.

    Raises:
        ValueError, TypeError: if it drops and `dropout_rng` is no key, or `deterministic` is no boolean.
    """
    if checks.boolean("deterministic", deterministic) or rate == 0.0:
        return None
    if dropout_rng is None:
        raise ValueError(f"dropout_rng must be a key where dropout is on (rate {rate}), got None")
    return checks.prng_key("dropout_rng", dropout_rng)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x / (1 - rate)` where kept, else 0; `x` itself without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0.0)
