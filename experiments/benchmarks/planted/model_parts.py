"""Small models, and the faults that are planted in them: functions, parameters, blocks, calls, captures."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import attn_jax
from attn_jax.nn import MultiHeadAttention, Transformer, TransformerBlock, TransformerConfig
from attn_jax.typing import Array
from experiments.benchmarks.planted import functions as wrong

VOCABULARY, LAYERS, WIDTH, HEADS, TOKENS = 64, 3, 64, 4, 24


def tokens(seed: int = 0, *, items: int = 2, length: int = TOKENS) -> np.ndarray:
    """Token ids `[items, length]`."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (items, length)).astype(np.int32)


def model(seed: int = 0, **changes: Any) -> Transformer:
    """A small decoder at its initial weights."""
    sizes = {"vocabulary_size": VOCABULARY, "num_layers": LAYERS, "model_width": WIDTH, "num_heads": HEADS}
    return Transformer(TransformerConfig(**{**sizes, **changes}), rngs=nnx.Rngs(seed))


ENCODER: Mapping[str, Any] = {
    "causal": False, "head": None, "norm": "layer", "norm_position": "post", "embedding_norm": True, "mlp": "plain",
    "activation": "gelu", "use_bias": True, "positions": "learned", "max_length": 64,
}  # fmt: skip


def edited(change: Callable[[Any], None], **changes: Any) -> Transformer:
    """A small decoder whose stacked attention `change` has edited."""
    made = model(**changes)
    change(made.layers.attention)
    return made


def with_function(function: Callable[..., Array], **changes: Any) -> Callable[[], Transformer]:
    """Builds a small model that calls another attention function."""
    return functools.partial(model, attention_fn=function, **changes)


# Attention functions with the keywords that a `Transformer` hands over.


def textbook(function: Callable[..., Array]) -> Callable[..., Array]:
    """A faulty function of `functions`, with the mask that the options say made for it."""

    def run(query: Array, key: Array, value: Array, *, bias: Any = None, scale: Any = None, **options: Any) -> Array:
        del bias, scale, options
        return function(query, key, value)

    return run


def masked(query: Array, options: Mapping[str, Any]) -> Array:
    length = query.shape[-3]
    seen = jnp.tri(length, dtype=bool) if options.get("is_causal") else jnp.ones((length, length), bool)
    seen = jnp.broadcast_to(seen, (*query.shape[:-3], 1, length, length))
    lengths = options.get("key_value_seq_lengths")
    return seen if lengths is None else seen & (jnp.arange(length)[None] < lengths[:, None])[:, None, None, :]


def changed(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Callable[..., Array]:
    """Our attention of queries, keys and values that are changed before."""

    def run(query: Array, key: Array, value: Array, **options: Any) -> Array:
        return attn_jax.dot_product_attention(*change(query, key, value), **options)

    return run


def reweighted(change: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Weights that come of logits and mask in another way."""

    def run(query: Array, key: Array, value: Array, **options: Any) -> Array:
        logits = wrong.scores(query, key) * query.shape[-1] ** -0.5
        return wrong.fetch(change(logits, masked(query, options)), value).astype(query.dtype)

    return run


def over_queries(logits: Array, seen: Array) -> Array:
    return jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-2) * seen


def one_more(logits: Array, seen: Array) -> Array:
    raised = jnp.where(seen, jnp.exp(logits), 0)
    return raised / (1 + raised.sum(axis=-1, keepdims=True))


def too_wide(query: Array, key: Array, value: Array, *, is_causal: bool = False, **options: Any) -> Array:
    mask = jnp.tri(query.shape[-3], key.shape[-3], 1, dtype=bool) if is_causal else None
    return attn_jax.dot_product_attention(query, key, value, mask=mask, **options)


def padding_read(query: Array, key: Array, value: Array, *, key_value_seq_lengths: Any = None, **options: Any) -> Array:
    del key_value_seq_lengths
    return attn_jax.dot_product_attention(query, key, value, **options)


def bias_subtracted(query: Array, key: Array, value: Array, *, bias: Any = None, **options: Any) -> Array:
    square = (query.shape[-2], query.shape[-3], key.shape[-3])
    slopes = attn_jax.biases.alibi_slopes(square[0])
    distance = jnp.abs(jnp.arange(square[1])[:, None] - jnp.arange(square[2])[None])
    array = jnp.asarray(slopes, jnp.float32)[:, None, None] * distance[None]
    array = jnp.broadcast_to(array, (*query.shape[:-3], *square))
    return attn_jax.dot_product_attention(query, key, value, None if bias is None else array, **options)


def doubled(query: Array, key: Array, value: Array, **options: Any) -> Array:
    return 2 * attn_jax.dot_product_attention(query, key, value, **options)


def half_precision(query: Array, key: Array, value: Array, **options: Any) -> Array:
    half = (x.astype(jnp.bfloat16) for x in (query, key, value))
    return attn_jax.dot_product_attention(*half, **options).astype(query.dtype)


def tiled(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.tile(x, (1,) * (x.ndim - 2) + (group, 1)) for x in (key, value))
    return query, key, value


def values_turned(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    return query, key, attn_jax.positions.apply_rotary(value, jnp.arange(value.shape[-3]))


def reshaped(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    def cut(x: Array) -> Array:
        return jnp.swapaxes(x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]), 1, 2)

    return cut(query), cut(key), cut(value)


def batch_centred(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    return query, key - key.mean(axis=0, keepdims=True), value


# Parameters.


def tie(attention: Any) -> None:
    attention.key_weight[...] = attention.query_weight[...]


def identity(attention: Any) -> None:
    shape = attention.output_weight.shape
    eye = jnp.eye(shape[-1]).reshape(shape[1:])
    attention.output_weight[...] = jnp.broadcast_to(eye, shape)


def blocks(attention: Any) -> None:
    out = attention.output_weight[...]
    heads, width = out.shape[1], out.shape[2]
    own = jnp.repeat(jnp.eye(heads), width, axis=1)[None, :, None]
    attention.output_weight[...] = out * own


def times(factor: float, *names: str) -> Callable[[Any], None]:
    def change(attention: Any) -> None:
        for name in names:
            weight = getattr(attention, f"{name}_weight")
            weight[...] = factor * weight[...]

    return change


def copy_heads(attention: Any) -> None:
    for name in ("query", "key", "value"):
        weight = getattr(attention, f"{name}_weight")
        weight[...] = weight[...].at[:, :, 1].set(weight[...][:, :, 0])
    out = attention.output_weight
    out[...] = out[...].at[:, 1].set(out[...][:, 0])


def prune(attention: Any) -> None:
    attention.value_weight[...] = attention.value_weight[...].at[1, :, 2].set(0.0)


def nan(attention: Any) -> None:
    attention.value_weight[...] = attention.value_weight[...].at[1, 0, 0, 0].set(jnp.nan)


def rank_one(attention: Any) -> None:
    out = attention.output_weight[...]
    attention.output_weight[...] = out[..., :1] * jnp.linspace(0.5, 1.5, out.shape[-1])[None, None, None]


# Blocks and calls.


class NoSkip(TransformerBlock):
    """A block without its residual paths."""

    def _branches(self, x: Any, attend: Any, keys: Any = (None, None)) -> tuple[Any, list[Any]]:
        attended = attend(self.attention_norm(x))
        attended, *extras = attended if isinstance(attended, tuple) else (attended,)
        return self.mlp(self.mlp_norm(attended)), extras


def with_blocks(kind: type[TransformerBlock], **changes: Any) -> Transformer:
    """A model whose blocks are of another class, with the same parameters."""
    made = model(**changes)
    config = made.config

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def draw(rngs: nnx.Rngs) -> TransformerBlock:
        return kind(config, rngs=rngs)

    made.layers = draw(nnx.Rngs(0))
    return made


class CutByReshape(MultiHeadAttention):
    """Heads cut by a reshape that gives a head some of the tokens."""

    def project(self, x: Any, context: Any) -> tuple[Any, Any, Any]:
        return reshaped(*super().project(x, context))


class MergedWrong(MultiHeadAttention):
    """Heads merged without exchanging tokens and heads."""

    def _merge(self, output: Any) -> Any:
        return super()._merge(jnp.swapaxes(output, 1, 2).reshape(output.shape))


def with_attention(kind: type[MultiHeadAttention], **changes: Any) -> Transformer:
    """A model whose attention is of another class."""

    class Block(TransformerBlock):
        def __init__(self, config: TransformerConfig, **options: Any) -> None:
            super().__init__(config, **options)
            own = config.layer_attention[0]
            assert own is not None
            self.attention = kind(
                config.model_width, config.num_heads, rngs=options["rngs"], **{**own.options(), "dropout_rate": 0.0}
            )

    return with_blocks(Block, **changes)


class AtZero(Transformer):
    """Every token sits at position 0."""

    def __call__(self, token_ids: Any, lengths: Any = None, **options: Any) -> Any:
        at = jnp.zeros(token_ids.shape[-1], jnp.int32)
        return super().__call__(token_ids, lengths, **{**options, "positions": at})


class Forgetful(Transformer):
    """Every piece of a sequence begins with an empty cache."""

    def extend(self, token_ids: Any, caches: Any, lengths: Any = None, **options: Any) -> Any:
        return super().extend(token_ids, self.empty_cache(token_ids.shape[0], TOKENS), lengths, **options)


def of_class(kind: type[Transformer]) -> Transformer:
    return kind(model().config, rngs=nnx.Rngs(0))


def zero_table() -> Transformer:
    made = model(**ENCODER)
    table = made.position_embedding
    assert table is not None
    table[...] = jnp.zeros_like(table[...])
    return made


def restless() -> Callable[[Any], Array]:
    made, calls = model(), iter(range(10**6))

    def call(token_ids: Any) -> Array:
        logits = made(token_ids)
        return logits + 0.1 * jax.random.normal(jax.random.key(next(calls)), logits.shape)

    return call


def leaking() -> Callable[[Any], Array]:
    made = model(attention_fn=too_wide)
    return lambda token_ids: made(token_ids)


def centring() -> Callable[[Any], Array]:
    made = model()

    def call(token_ids: Any) -> Array:
        logits = made(token_ids)
        return logits - logits.mean(axis=0, keepdims=True)

    return call
