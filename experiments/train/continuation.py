"""A text written on by a model, one token after the other. Nothing is cached: the whole window is read again."""

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax.typing import Array, Float, Int


def continue_tokens(
    model: nnx.Module, window: Int[Array, " t"], *, count: int, temperature: float, key: Array
) -> Int[Array, " count"]:
    """The `count` tokens that follow a window, each drawn from softmax(logits / temperature).

    The window moves along, so that no token sees more than T of those before it.

    Args:
        model: called as `Transformer` is, with a head.
        window: int `[T]`, what stands before.
        count: how many tokens.
        temperature: 0 takes the likeliest token.
        key: of the draws.
    """
    graphdef, parameters = nnx.split(model)

    @jax.jit
    def run(parameters: nnx.State, window: Array, key: Array) -> Array:
        model = nnx.merge(graphdef, parameters)

        def step(window: Array, key: Array) -> tuple[Array, Array]:
            logits: Float[Array, " vocabulary"] = model(window)[-1]
            if temperature:
                token = jax.random.categorical(key, logits / temperature)
            else:
                token = jnp.argmax(logits)
            token = token.astype(window.dtype)
            return jnp.concatenate([window[1:], token[None]]), token

        return jax.lax.scan(step, window, jax.random.split(key, count))[1]

    return run(parameters, window, key)
