"""Other subjects of a diagnosis: trained models, stock Flax, what it sows, and captured arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from attn_jax.diagnostics import Captures, measure_layer
from attn_jax.nn import Transformer, TransformerConfig, as_attention_fn
from attn_jax.typing import Array
from experiments.benchmarks.planted import functions as wrong
from experiments.benchmarks.planted.model_parts import HEADS, LAYERS, TOKENS, VOCABULARY, WIDTH, model, tokens


def captured(function: Callable[..., Array], *, layers: int = 3, mask: Any = None, grow: float = 1.0) -> Captures:
    """Arrays of a model of another framework, whose attention is `function`."""
    rng = np.random.default_rng(0)
    arrays = {}
    for n in range(layers):
        query, key, value = (rng.standard_normal((2, TOKENS, 4, 16)).astype(np.float32) for _ in range(3))
        query = query * np.float32(grow)
        output = function(*(jnp.asarray(x) for x in (query, key, value)))
        named = {"query": query, "key": key, "value": value, "output": np.asarray(output)}
        arrays |= {f"layers.{n}.{name}": x for name, x in named.items()}
        if mask is not None:
            arrays[f"layers.{n}.mask"] = np.asarray(mask)
    return Captures.of(arrays)


def collapsed() -> Captures:
    """Tokens that become alike, layer by layer."""
    rng = np.random.default_rng(0)
    arrays = {}
    for n, alike in enumerate((0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)):
        for name in ("query", "key", "value"):
            x = rng.standard_normal((1, TOKENS, 4, 16))
            arrays[f"layers.{n}.{name}"] = ((1 - alike) * x + 3 * alike * x.mean(axis=1, keepdims=True)).astype(
                np.float32
            )
    return Captures.of(arrays)


class Stock(nnx.Module):
    """A decoder of stock Flax modules, whose attention is ours."""

    def __init__(self, *, offset: int = 0, rngs: nnx.Rngs) -> None:
        attention = as_attention_fn(observe=measure_layer)
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(64, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            [
                nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=attention, rngs=rngs)
                for _ in range(LAYERS)
            ]
        )
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.offset = offset

    def __call__(self, token_ids: Any) -> Array:
        """Logits `[B, T, vocabulary]`."""
        length = token_ids.shape[-1]
        x = self.embed(token_ids) + self.places(jnp.arange(length))[None]
        mask = jnp.tri(length, length, self.offset, dtype=bool)[None, None]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask=mask, sow_weights=True)
        return self.embed.attend(x)


def stock(offset: int = 0) -> Stock:
    return Stock(offset=offset, rngs=nnx.Rngs(0))


def intermediates(offset: int = 0) -> Any:
    call: Any = nnx.capture(nnx.Intermediate)(lambda module, token_ids: module(token_ids))
    return call(stock(offset), jnp.asarray(tokens()))[1]


def stock_edited(change: Callable[[nnx.MultiHeadAttention], None]) -> Stock:
    made = stock()
    for layer in made.layers:
        change(layer)
    return made


def tie_stock(layer: nnx.MultiHeadAttention) -> None:
    layer.key.kernel[...] = layer.query.kernel[...]


def trained(steps: int = 60, **changes: Any) -> Transformer:
    """A small decoder that has learned to repeat a short text."""
    made = model(**changes)
    optimizer = nnx.Optimizer(made, optax.adam(3e-3), wrt=nnx.Param)

    def loss(made: Transformer, batch: Array) -> Array:
        logits = jax.nn.log_softmax(made(batch)[:, :-1])
        return -jnp.take_along_axis(logits, batch[:, 1:, None], axis=-1).mean()

    @nnx.jit
    def step(made: Transformer, optimizer: nnx.Optimizer, batch: Array) -> None:
        optimizer.update(made, nnx.grad(loss)(made, batch))

    rng = np.random.default_rng(1)
    for _ in range(steps):
        half = rng.integers(0, VOCABULARY, (8, TOKENS // 2))
        step(made, optimizer, jnp.asarray(np.concatenate([half, half], axis=1)))
    return made


def small_normal(key: Any, shape: Any, dtype: Any) -> Array:
    """N(0, 0.02²), as GPT-2 begins."""
    return 0.02 * jax.random.normal(key, shape, dtype)


def gpt2() -> Transformer:
    config = TransformerConfig(VOCABULARY, LAYERS, 128, HEADS, norm="layer", mlp="plain", activation="gelu_tanh",
                               use_bias=True, positions="learned", max_length=64)  # fmt: skip
    return Transformer(config, kernel_init=small_normal, rngs=nnx.Rngs(0))


def unscaled(query: Array, key: Array, value: Array) -> Array:
    return wrong.attention(query, key, value, is_causal=True, scale=1.0)


def causal(query: Array, key: Array, value: Array) -> Array:
    return wrong.attention(query, key, value, is_causal=True)


def late_values(query: Array, key: Array, value: Array) -> Array:
    return causal(query, key, jnp.roll(value, 1, axis=1))
