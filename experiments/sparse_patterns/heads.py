"""What sparse patterns keep of the attention of real heads: mass, output, and how many pairs and tiles they take.

Patterns are read off the dense weights of captured queries and keys, in the last half of a document, where a window is
a small part of what is visible. Hashing and clustering bring together more pairs than the window and the first tokens
do, so they are measured beside these. A pretrained head has queries and keys of their own, which lie in cones apart:
both are centred (by means over other documents) before they are hashed or clustered. What is fetched is not.
"""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

import attn_jax
from attn_jax import masks, models, scaling
from attn_jax.nn import Transformer
from attn_jax.routed import draw_centroids, draw_rotations, hash_buckets, update_centroids
from attn_jax.typing import Array, Bool, Float, Int
from experiments import texts
from experiments.artifacts import Row
from experiments.checkpoints import at_random, load
from experiments.harness import InputError
from experiments.sparse_patterns.config import SparseConfig

BIG_BIRD = 2  # random blocks of a row


class Captured(NamedTuple):
    """Of every layer: query `[L, T, N, H]`, key and value `[L, T, K, ·]`, as they meet."""

    query: Array
    key: Array
    value: Array


class Fitted(NamedTuple):
    """Of every layer, from other documents: means `[L, N, H]` and `[L, K, H]`, and centroids `[L, K, clusters, H]`."""

    query_mean: Array
    key_mean: Array
    centroids: Array


def decoder(name: str) -> models.LoadedModel:
    """A checkpoint whose attention is causal."""
    loaded = load(name)
    if not loaded.config.causal:
        raise InputError(f"--model={name}: must be a decoder")
    return loaded


@functools.lru_cache(maxsize=1)
def documents(config: SparseConfig) -> tuple[np.ndarray, np.ndarray]:
    """Token ids to fit and to judge, `[documents, T]`: every so many-th document is fitted to."""
    tokenizer = decoder(config.model).tokenizer
    assert isinstance(tokenizer, Tokenizer)  # `load` has seen to it
    _, text = texts.read(config.text_file)
    count = config.fitted + config.documents
    found = texts.documents(text, tokenizer, count=count, length=config.max_tokens, special=True)
    if len(found) < config.fitted + 1:
        raise InputError(f"the text has {len(found)} documents of {config.max_tokens} tokens, --fitted={config.fitted}")
    chosen = np.linspace(0, len(found) - 1, config.fitted).round().astype(int)
    return found[chosen], np.delete(found, chosen, axis=0)


def _model(config: SparseConfig, arm: str) -> Transformer:
    return decoder(config.model).model if arm == "model" else at_random(config.model, config.seed)


@jax.jit
def capture(model: Transformer, token_ids: Int[Array, " t"]) -> Captured:
    """What meets in the attention of every layer."""

    def take(query: Array, key: Array, value: Array, **options: Any) -> Captured:
        del options
        return Captured(*(x.astype(jnp.float32) for x in (query, key, value)))

    return model(token_ids, observe=take)[1]


@functools.lru_cache(maxsize=1)
def fitted(config: SparseConfig, arm: str) -> Fitted:
    """Means and centroids of an arm; the centroids by k-means from random directions."""
    model = _model(config, arm)
    held = [capture(model, jnp.asarray(token_ids)) for token_ids in documents(config)[0]]
    query, key = (jnp.stack([getattr(x, name) for x in held], axis=1) for name in ("query", "key"))
    return _fit(config, query, key)


@functools.partial(jax.jit, static_argnums=0)
def _fit(config: SparseConfig, query: Float[Array, "l b t n h"], key: Float[Array, "l b t k h"]) -> Fitted:
    means = draw_centroids(_key(config, "centroids"), key.shape[-2], config.clusters, key.shape[-1])

    def one_layer(held: tuple[Array, Array]) -> Fitted:
        query_mean, key_mean = (x.mean(axis=(0, 1)) for x in held)
        query, key = held[0] - query_mean[None, None], held[1] - key_mean[None, None]

        def step(means: Array, _: None) -> tuple[Array, None]:
            return update_centroids(means, query, key, decay=0.0), None

        return Fitted(query_mean, key_mean, jax.lax.scan(step, means, None, length=config.iterations)[0])

    return jax.lax.map(one_layer, (query, key))


def _key(config: SparseConfig, stream: str) -> Array:
    return jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(stream.encode()))


def measure(config: SparseConfig, arm: str, document: int) -> list[Row]:
    """A row for each pattern, measure, layer and head of a document."""
    held = capture(_model(config, arm), jnp.asarray(documents(config)[1][document]))
    found = _of_layers(config, held, fitted(config, arm), _key(config, f"random_{document}"))
    rows = []
    for (pattern, measure), values in found.items():
        for (index, head), value in np.ndenumerate(np.asarray(values, np.float64)):
            at = {"part": "heads", "arm": arm, "seed": document, "pattern": pattern, "measure": measure}
            rows.append({**at, "layer": index, "head": head, "value": float(value)})
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _of_layers(config: SparseConfig, held: Captured, fit: Fitted, key: Array) -> dict[tuple[str, str], Array]:
    heads, width = held.query.shape[-2:]
    rotations = draw_rotations(_key(config, "rotations"), heads, width, config.buckets, num_rounds=config.rounds)
    return jax.lax.map(lambda layer: of_layer(config, rotations, key, *layer), (held, fit))


def fixed(config: SparseConfig) -> dict[str, masks.Mask]:
    """The patterns that read positions alone."""
    first = masks.GlobalTokens(config.first)
    found: dict[str, masks.Mask] = {"window": masks.SlidingWindow(config.window)}
    for window in config.windows:
        name = "window_global" if window == config.window else f"window_global_{window}"
        found[name] = masks.SlidingWindow(window) | first
    blocks = masks.RandomBlocks(config.seed, per_row=BIG_BIRD, block=config.tile)
    found["bigbird"] = masks.SlidingWindow(config.window) | first | blocks
    return found


def of_layer(
    config: SparseConfig, rotations: Array, key: Array, held: Captured, fit: Fitted
) -> dict[tuple[str, str], Float[Array, " n"]]:
    """Every pattern in the heads of one layer: `{(pattern, measure): [N]}`."""
    length, heads, _ = held.query.shape
    half, group = length // 2, heads // held.key.shape[-2]
    weights = attn_jax.attention_weights(held.query[half:], held.key, is_causal=True, query_offset=half)  # [N, T/2, T]
    causal = (jnp.arange(length)[None, :] <= jnp.arange(half, length)[:, None])[None]
    places = jnp.arange(half, length)[:, None], jnp.arange(length)[:, None]  # of queries and keys, in each head
    seen = {name: _dense(mask, length)[half:][None] & causal for name, mask in fixed(config).items()}
    tiles = {name: _tiles(found, *places, config.tile) for name, found in seen.items()}
    base = seen["window_global"]

    query, keys = (held.query - fit.query_mean[None])[half:], held.key - fit.key_mean[None]
    keys, centroids = (jnp.repeat(x, group, axis=axis) for x, axis in ((keys, 1), (fit.centroids, 0)))
    hashed = [hash_buckets(x, rotations) for x in (query, keys)]
    near = [nearest(x, centroids)[..., None] for x in (query, keys)]
    for name, (of_queries, of_keys) in {"hashing": hashed, "clustering": near}.items():
        seen[name], tiles[name] = base, tiles["window_global"]
        for r in range(of_queries.shape[-1]):
            groups = of_queries[..., r], of_keys[..., r]
            met = (groups[0].T[:, :, None] == groups[1].T[:, None, :]) & causal
            seen[name] = seen[name] | met
            sorted_queries, sorted_keys = (_place_when_sorted(x) for x in groups)
            tiles[name] = tiles[name] + _tiles(met, sorted_queries, sorted_keys, config.tile)

    # As many keys of a row as hashing takes beside the window: by chance, and those of the largest weights.
    extra = (seen["hashing"] & ~base).sum(axis=-1, keepdims=True)
    outside = causal & ~base
    for name, order in {"random": jax.random.uniform(key, weights.shape), "best": weights}.items():
        order = jnp.where(outside, order, -1)
        ascending = jnp.sort(order, axis=-1)
        least = jnp.take_along_axis(ascending, jnp.maximum(length - extra, 0) % length, axis=-1)
        seen[name] = base | ((order >= least) & outside & (extra > 0))

    every = {}
    value = jnp.repeat(held.value, group, axis=1)
    outputs = jnp.einsum("nts,snv->ntv", weights, value)
    for name, found in seen.items():
        for what, measured in _judge(weights, outputs, jnp.broadcast_to(found, weights.shape), value).items():
            every[name, what] = measured
        every[name, "pairs"] = jnp.broadcast_to(found.sum(axis=(1, 2)) / causal.sum(), (heads,))
        if name in tiles:
            every[name, "tiles"] = jnp.broadcast_to(tiles[name] / _tiles(causal, *places, config.tile), (heads,))
    return every


def nearest(x: Float[Array, "t n h"], centroids: Float[Array, "n c h"]) -> Int[Array, "t n"]:
    """The centroid of the highest cosine."""
    unit = scaling.l2_norm(centroids, epsilon=0.0)
    return jnp.einsum("tnh,nch->tnc", x, unit).argmax(axis=-1)


def _dense(mask: masks.Mask, length: int) -> Bool[Array, "t t"]:
    return jnp.asarray(masks.materialize(mask, length))


def _place_when_sorted(groups: Int[Array, "t n"]) -> Int[Array, "t n"]:
    """Where each token stands once tokens are sorted by group."""
    return jnp.argsort(jnp.argsort(groups, axis=0), axis=0)


def _tiles(
    found: Bool[Array, "#n t s"], of_queries: Int[Array, "t #n"], of_keys: Int[Array, "s #n"], tile: int
) -> Float[Array, "#n"]:
    """How many tiles hold a pair, with queries and keys in these places; the first tile begins at the first query."""
    rows, columns = (
        jax.nn.one_hot((x - x.min()) // tile, -(-x.shape[0] // tile), axis=1) for x in (of_queries, of_keys)
    )  # [T, tiles, N]
    pairs = jnp.einsum("nts,tin->nis", found.astype(jnp.float32), jnp.broadcast_to(rows, (*rows.shape[:2], len(found))))
    pairs = jnp.einsum("nis,sjn->nij", pairs, jnp.broadcast_to(columns, (*columns.shape[:2], len(found))))
    return (pairs > 0.5).sum(axis=(1, 2))


def _judge(
    weights: Float[Array, "n t s"], outputs: Float[Array, "n t v"], found: Bool[Array, "n t s"], value: Array
) -> dict[str, Float[Array, " n"]]:
    """Of one pattern: the share of the mass, and the error of the output, with weights renormalised, over its size."""
    kept = jnp.where(found, weights, 0)
    total = kept.sum(axis=-1, keepdims=True)
    sparse = jnp.einsum("nts,snv->ntv", kept / jnp.where(total == 0, 1, total), value)
    return {
        "mass": total[..., 0].mean(axis=-1),
        "error": jnp.linalg.norm(sparse - outputs, axis=(1, 2)) / jnp.linalg.norm(outputs, axis=(1, 2)),
    }
