"""Short calls of attention for tests of single faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import attn_jax

LOW_PRECISION = (jnp.bfloat16, jnp.float16)


@functools.cache
def compiled(name, static):
    """One compilation per set of static options: what is an array is passed in."""
    return jax.jit(
        lambda inputs, arrays: attn_jax.dot_product_attention(*inputs, **arrays, **dict(static), implementation=name)
    )


def call(name, *inputs, **options):
    is_static = {key: isinstance(x, (bool, int, float, tuple, type(None))) for key, x in options.items()}
    static = tuple((key, x) for key, x in sorted(options.items()) if is_static[key])
    return compiled(name, static)(inputs, {key: x for key, x in options.items() if not is_static[key]})


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(batch=(1,), T=4, S=4, N=1, K=1, H=2, V=2, dtype=np.float32):
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, V)
    return tuple(draw(*shape, seed=i).astype(dtype) for i, shape in enumerate(shapes))


def pattern(attend, T, S, **options):
    """Weights `[T, S]` of zero logits: uniform over the keys that a query sees."""
    value = np.eye(S, dtype=np.float32)[:, None, :]
    return np.asarray(attend(np.zeros((T, 1, 4), np.float32), np.zeros((S, 1, 4), np.float32), value, **options))[:, 0]


def counts(attend, T, S, **options):
    return (pattern(attend, T, S, **options) > 0).sum(1).tolist()


def ulps(actual, expected, dtype):
    """The largest error in units in the last place of `dtype`."""
    info = jnp.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(expected), float(info.tiny))))
    return np.max(np.abs(np.asarray(actual, np.float64) - expected) / 2.0 ** (exponent - info.nmant))
