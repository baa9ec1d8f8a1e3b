"""What may stand in the place of a layer's attention, to learn what it was for: gates, ablations, other weights.

Each function here is an `intervene` of `Transformer`, which every layer calls as `intervene(own, query, key, value,
**options)`; `own` is the layer's part of `interventions`, whose leaves are `[L, ...]`. Every one has a value of `own`
that changes nothing, so that one layer, or one head, is reached by changing that one's part.

    gates = jnp.ones((L, N)).at[3, 2].set(0)                                      # without head 2 of layer 3
    logits = model(token_ids, intervene=interventions.gate_heads, interventions=gates)

They act before the output projection. Attention itself is `attn_jax.dot_product_attention`, whatever `attention_fn` the
model has; functions that change weights write out the whole `[*B, N, T, S]` and take no dropout.
"""

from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp

from attn_jax import biases, checks, masks
from attn_jax.diagnostics import adversarial
from attn_jax.diagnostics.statistics import attention_with_statistics
from attn_jax.exact import dense
from attn_jax.exact.arguments import AttentionOptions, only_attention_options, prepare
from attn_jax.exact.attention import attention_weights, dot_product_attention
from attn_jax.typing import Array, ArrayLike, Bool, Float


class Ablation(NamedTuple):
    """Which heads are kept, and what the others bring instead.

    Attributes:
        keep: `[N]`, 1 for a head as it is, 0 for its mean; between them, a mixture.
        mean: `[N, V]`, as from `output_means`; zeros to remove a head without putting anything in its place.
    """

    keep: Array
    mean: Array


class Replacement(NamedTuple):
    """Weights that are given, for some heads.

    Attributes:
        replaced: `[N]`, 1 for a head with given weights, 0 for one with its own.
        weights: `[*B, N, T, S]`.
    """

    replaced: Array
    weights: Array


class Permutation(NamedTuple):
    """Which heads have the weights of each row permuted among the keys that it sees, and the key that draws how.

    Attributes:
        permuted: `[N]`, 1 for a head with permuted weights, 0 for one with its own.
        key: of `jax.random.key`; of all layers, `jax.random.split(key, L)`.
    """

    permuted: Array
    key: Array


def gate_heads(own: Float[Array, " n"], query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Each head's output times its gate, `own` `[N]`: 1 changes nothing, 0 removes the head."""
    output = dot_product_attention(query, key, value, **options)
    return (output * _per_head("own", own, output, -2)).astype(output.dtype)


def ablate_heads(own: Ablation, query: Array, key: Array, value: Array, **options: Any) -> Array:
    """`keep · output + (1 − keep) · mean` of each head: keep 1 changes nothing, 0 leaves what it brings on average."""
    output = dot_product_attention(query, key, value, **options)
    keep, mean = _per_head("keep", own.keep, output, -2), jnp.asarray(own.mean)
    checks.shape("mean", mean, output.shape[-2:], "[N, V]")
    mean = mean.reshape((1,) * (output.ndim - 2) + mean.shape)
    return (keep * output + (1 - keep) * mean).astype(output.dtype)


def output_means(query: Array, key: Array, value: Array, **options: Any) -> Float[Array, "*b n v"]:
    """What each head brings on average, over the rows that see a key: an `observe` function, `[*B, N, V]`."""
    output, statistics = attention_with_statistics(query, key, value, statistics=("visible_keys",), **options)
    assert statistics.visible_keys is not None
    rows = jnp.sum(statistics.visible_keys > 0, axis=-2)  # output is 0 in the others
    return jnp.sum(output, axis=-3) / jnp.maximum(rows, 1)[..., None].astype(output.dtype)


def flatten_weights(own: Float[Array, " n"], query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Uniform weights over the keys that a row sees, in the share `own` `[N]` of each head: 0 changes nothing."""
    weights, visible = attention_weights(query, key, **options), visible_pairs(query, key, **options)
    keys = jnp.sum(visible, axis=-1, keepdims=True, dtype=weights.dtype)
    uniform = jnp.where(visible, 1 / jnp.maximum(keys, 1), 0)
    share = _per_head("own", own, weights, -3)
    return fetch((1 - share) * weights + share * uniform, value)


def shift_weights(own: Float[Array, "*b n t s"], query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Weights plus `own` `[*B, N, T, S]`: a gradient with respect to the weights is that with respect to `own` at 0."""
    weights, shift = attention_weights(query, key, **options), jnp.asarray(own)
    checks.shape("own", shift, weights.shape, "[*B, N, T, S]")
    return fetch(weights + shift, value)


def replace_weights(own: Replacement, query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Given weights for the heads that are replaced, their own for the others: replaced = 0 changes nothing."""
    weights, given = attention_weights(query, key, **options), jnp.asarray(own.weights)
    checks.shape("weights", given, weights.shape, "[*B, N, T, S]")
    replaced = _per_head("replaced", own.replaced, weights, -3)
    return fetch(jnp.where(replaced != 0, given, weights), value)


def permute_weights(own: Permutation, query: Array, key: Array, value: Array, **options: Any) -> Array:
    """The weights of each row permuted among the keys that it sees, in some heads: permuted = 0 changes nothing."""
    weights, visible = attention_weights(query, key, **options), visible_pairs(query, key, **options)
    permuted = _per_head("permuted", own.permuted, weights, -3)
    return fetch(jnp.where(permuted != 0, adversarial.permute_weights(own.key, weights, visible), weights), value)


def visible_pairs(
    query: ArrayLike,
    key: ArrayLike,
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> Bool[Array, "*b n t s"]:
    """Which keys each query may see, with the arguments of `attn_jax.attention_weights`: `[*B, N, T, S]`."""
    problem = prepare(query, key, None, bias, mask, **only_attention_options("visible_pairs", options))
    visible = dense.compute_logits(problem).visible
    return jnp.broadcast_to(jnp.ones((), bool) if visible is None else visible, problem.square.shape)


def fetch(weights: Float[Array, "*b n t s"], value: Float[Array, "*b s k v"]) -> Float[Array, "*b t n v"]:
    """The values by given weights, in the dtype of the values; head n reads the values of head n // G."""
    *batch, heads, queries, keys = weights.shape
    kv_heads = value.shape[-2]
    group = checks.grouped_heads(heads, kv_heads)
    grouped = weights.reshape(*batch, kv_heads, group, queries, keys)
    output = jnp.einsum("...kgts,...skv->...tkgv", grouped, value.astype(weights.dtype))
    return output.reshape(*batch, queries, heads, value.shape[-1]).astype(value.dtype)


def _per_head(name: str, x: ArrayLike, like: Array, axis: int) -> Array:
    """`x` `[N]` as numbers that broadcast to `like`, whose heads are at `axis`."""
    array = jnp.asarray(x)
    checks.shape(name, array, (like.shape[axis],), "[N]")
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return jnp.expand_dims(array, [i for i in range(like.ndim) if i != axis % like.ndim])
