"""Faulty models whose author never saw what a diagnosis looks for, and healthy ones that look unlike the textbook.

They are what happens to models rather than to functions: checkpoints that were read wrongly, parts left in training,
caches, items that were sorted, a learning rate too high.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from attn_jax.nn import LayerOptions, Transformer, TransformerConfig
from attn_jax.typing import Array
from experiments.benchmarks.planted.functions import attention, fetch, scores, softmax, triangle
from experiments.benchmarks.planted.models import PlantedModel

VOCABULARY = 40
TOKENS = np.random.default_rng(7).integers(0, VOCABULARY, (3, 24))
LENGTHS = np.array([24, 9, 15])
CALLS = itertools.count()


def transformer(kind: type[Transformer] = Transformer, **choices: Any) -> Any:
    """A small one with freshly drawn weights."""
    sizes: dict[str, Any] = {"vocabulary_size": VOCABULARY, "num_layers": 3, "model_width": 32, "num_heads": 4}
    return kind(TransformerConfig(**(sizes | choices)), rngs=nnx.Rngs(0))


def temperature_of_three() -> Transformer:
    """Temperatures of 3, read as their logarithms."""
    model = transformer(learned_temperature=True)
    model.layers.attention.log_temperature[...] = jnp.full_like(model.layers.attention.log_temperature[...], 3.0)
    return model


def output_of_one_layer_missing() -> Transformer:
    """The output projection of one layer was not in the checkpoint, and stayed 0."""
    model = transformer(num_layers=4)
    model.layers.attention.output_weight[...] = model.layers.attention.output_weight[...].at[2].set(0)
    return model


def keys_read_as_values() -> Transformer:
    """A loader's typing error: the keys' weights were read for the values too."""
    model = transformer()
    model.layers.attention.value_weight[...] = model.layers.attention.key_weight[...]
    return model


def half_pruned() -> Transformer:
    """Half of the heads were pruned by zeros, and are still computed."""
    model = transformer(num_heads=8, model_width=64)
    part = model.layers.attention
    for name in ("query_weight", "key_weight", "value_weight"):
        getattr(part, name)[...] = getattr(part, name)[...].at[:, :, 4:].set(0)
    part.output_weight[...] = part.output_weight[...].at[:, 4:].set(0)
    return model


class Sorted(Transformer):
    """Lengths are sorted, longest first, and the items are not."""

    def __call__(self, token_ids: Any, lengths: Any = None, **options: Any) -> Any:
        """As the model, with the lengths in another order."""
        return super().__call__(token_ids, None if lengths is None else -jnp.sort(-jnp.asarray(lengths)), **options)


class LeftInTraining(Transformer):
    """Dropout is on in every call."""

    def __call__(self, token_ids: Any, lengths: Any = None, **options: Any) -> Any:
        """As the model in training."""
        options |= {"deterministic": False, "dropout_rng": jax.random.key(next(CALLS))}
        return super().__call__(token_ids, lengths, **options)


class CountsAnew(Transformer):
    """Each call counts positions from 0, whatever lies in the cache."""

    def embed(self, token_ids: Any, positions: Any = None, token_types: Any = None) -> Any:
        """As the model, at the first positions."""
        return super().embed(token_ids, None, token_types)


class AllAtZero(Transformer):
    """`position_ids` are made by `zeros` where `arange` was due."""

    def __call__(self, token_ids: Any, lengths: Any = None, **options: Any) -> Any:
        """As the model, with every token at position 0."""
        options["positions"] = jnp.zeros(jnp.shape(token_ids)[-1], jnp.int32)
        return super().__call__(token_ids, lengths, **options)


def periodic(rng: np.random.Generator, items: int, length: int) -> np.ndarray:
    """Sequences that repeat eight tokens, which a model learns to copy."""
    return np.tile(rng.integers(0, VOCABULARY, (items, 8)), (1, -(-length // 8)))[:, :length]


def trained(rate: float, steps: int) -> Transformer:
    """A decoder after some steps of Adam on sequences that repeat."""
    model = transformer(num_layers=2)
    rng = np.random.default_rng(0)
    batches = jnp.asarray(np.stack([periodic(rng, 16, 24) for _ in range(steps)]))
    graph, parameters = nnx.split(model)
    optimizer = optax.adam(rate)

    def loss(parameters: Any, ids: Array) -> Array:
        logits = nnx.merge(graph, parameters)(ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def step(state: Any, ids: Array) -> tuple[Any, Array]:
        parameters, memory = state
        value, gradient = jax.value_and_grad(loss)(parameters, ids)
        updates, memory = optimizer.update(gradient, memory, parameters)
        return (optax.apply_updates(parameters, updates), memory), value

    (parameters, _), _ = jax.jit(lambda state: jax.lax.scan(step, state, batches))(
        (parameters, optimizer.init(parameters))
    )
    return nnx.merge(graph, parameters)


class ByHand(nnx.Module):
    """A model as people write one: learned positions, pre-norm attention and MLP, a head."""

    def __init__(
        self, *, causal: bool, attend: Callable[..., Array] = attention, norm: Callable[[Array], Array] | None = None,
        blend: Callable[[Array], Array] = lambda x: x,
    ) -> None:  # fmt: skip
        rngs, width, heads = nnx.Rngs(0), 32, 4
        self.causal, self.attend, self.norm, self.blend = causal, attend, norm or unit, blend
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(64, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, heads, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, token_ids: Array) -> Array:
        """Logits."""
        token_ids = jnp.asarray(token_ids)
        x = self.blend(self.embedding(token_ids) + self.positions(jnp.arange(token_ids.shape[1])))
        for layer in self.layers:
            normal = self.norm(x)
            mixed = self.attend(layer.query(normal), layer.key(normal), layer.value(normal), is_causal=self.causal)
            x = x + layer.out(mixed)
            x = x + layer.down(jax.nn.gelu(layer.up(self.norm(x))))
        return self.head(self.norm(x))


class Layer(nnx.Module):
    """The weights of one."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        shape = (heads, width // heads)
        self.query, self.key, self.value = (nnx.LinearGeneral(width, shape, rngs=rngs) for _ in range(3))
        self.out = nnx.LinearGeneral(shape, width, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)


def unit(x: Array) -> Array:
    """Layer normalisation without weights."""
    return jax.nn.standardize(x, axis=-1, epsilon=1e-6)


def batch_norm(x: Array) -> Array:
    """Batch normalisation, left in training: by the statistics of the batch at hand."""
    return jax.nn.standardize(x, axis=(0, 1), epsilon=1e-6)


def padded_on_both_sides(x: Array) -> Array:
    """A convolution of three tokens before the first layer, padded "same" where "causal" was due."""
    before, after = (jnp.pad(x, [(0, 0), side, (0, 0)]) for side in ((1, 0), (0, 1)))
    return 0.5 * x + 0.25 * before[:, :-1] + 0.25 * after[:, 1:]


def padded_before(x: Array) -> Array:
    """A convolution of three tokens before the first layer, padded as a causal one must be."""
    padded = jnp.pad(x, [(0, 0), (2, 0), (0, 0)])
    return 0.5 * x + 0.25 * padded[:, 1:-1] + 0.25 * padded[:, :-2]


def detached(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Weights were detached to log them, and the detached ones went on."""
    logits = scores(query, key) * query.shape[-1] ** -0.5
    seen = triangle(*logits.shape[-2:]) if is_causal else None
    return fetch(jax.lax.stop_gradient(softmax(logits, seen)), value)


def scale_in_weights() -> Transformer:
    """T5's way: no scale, queries drawn smaller by √H, and relative positions."""
    model = transformer(causal=False, head=None, positions="relative", scale_rule=1.0, mlp="plain", activation="relu")
    part = model.layers.attention
    part.query_weight[...] = part.query_weight[...] * model.config.head_width**-0.5
    table = part.relative_table
    table[...] = 0.5 * jax.random.normal(jax.random.key(1), table.shape)
    return model


ENCODER = {"causal": False, "head": None}

UNSEEN_MODELS: Mapping[str, PlantedModel] = {
    "temperature read as its logarithm": PlantedModel(temperature_of_three, "scale", TOKENS),
    "output of one layer missing": PlantedModel(output_of_one_layer_missing, "output", TOKENS),
    "keys read as values": PlantedModel(keys_read_as_values, "values", TOKENS),
    "half of the heads pruned": PlantedModel(half_pruned, "heads", TOKENS),
    "lengths sorted": PlantedModel(functools.partial(transformer, Sorted, **ENCODER), "mask", TOKENS, LENGTHS),
    "convolution padded on both sides": PlantedModel(
        functools.partial(ByHand, causal=True, blend=padded_on_both_sides), "mask", TOKENS, options={"causal": True}
    ),
    "batch norm in training": PlantedModel(functools.partial(ByHand, causal=False, norm=batch_norm), "batch", TOKENS),
    "dropout at evaluation": PlantedModel(
        functools.partial(transformer, LeftInTraining, dropout_rate=0.1), "dropout", TOKENS
    ),
    "positions anew after a cache": PlantedModel(
        functools.partial(transformer, CountsAnew, positions="sinusoidal", scale_embedding=True), "cache", TOKENS
    ),
    "learning rate too high": PlantedModel(functools.partial(trained, 0.1, 60), "projections", TOKENS),
    "all at position 0": PlantedModel(functools.partial(transformer, AllAtZero, **ENCODER), "positions", TOKENS),
    "weights detached": PlantedModel(
        functools.partial(ByHand, causal=True, attend=detached), "gradients", TOKENS, options={"causal": True}
    ),
}

FIRST_MEASURED = "8 of 12, 67%"  # before the diagnosis was changed for some of them

UNSEEN_HEALTHY_MODELS: Mapping[str, PlantedModel] = {
    "scale in the weights": PlantedModel(scale_in_weights, (), TOKENS, LENGTHS),
    "windows by turns, sinks, cap, norms on both sides": PlantedModel(
        functools.partial(
            transformer, num_layers=4, num_kv_heads=2, qk_norm="rms", norm_position="both", use_sinks=True,
            logits_soft_cap=30.0, layer_pattern=(LayerOptions(local_window_size=(7, 0)), LayerOptions()),
        ),
        (), TOKENS, LENGTHS,
    ),
    "trained": PlantedModel(
        functools.partial(trained, 0.002, 200), (), periodic(np.random.default_rng(1), 4, 24)
    ),
    "by hand, a causal convolution before": PlantedModel(
        functools.partial(ByHand, causal=True, blend=padded_before), (), TOKENS, options={"causal": True}
    ),
}  # fmt: skip
