"""What is measured: spectra of real heads, and how far each approximation is from them."""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import attn_jax
from attn_jax import linear, lowrank
from attn_jax.diagnostics import Candidate, approximation_report, attention_spectrum
from attn_jax.nn import Transformer
from attn_jax.typing import Array, Float
from experiments import artifacts, texts
from experiments.artifacts import Row
from experiments.checkpoints import at_random, load
from experiments.harness import InputError, Unit
from experiments.low_rank.config import ARMS, MEASURES, MECHANISMS, LowRankConfig, Sizes

RATE = 3e-4  # of Adam, in the fit of the projections: chosen, with the steps, on documents set aside for the fit


class Heads(NamedTuple):
    """Queries, keys and values of some layers, the scale in the query: logits are q·k / √H."""

    query: Float[Array, "l t n h"]
    key: Float[Array, "l s k h"]
    value: Float[Array, "l s k v"]


def inputs(config: LowRankConfig) -> Mapping[str, str]:
    """What is read, and its digests."""
    name, text = texts.read(config.text_file)
    source = load(config.model).source
    sizes(config)  # refuses a model whose attention is more than queries, keys and a mask
    return {source.name: artifacts.file_digest(source), name: texts.digest(text)}


@functools.lru_cache(maxsize=1)
def documents(config: LowRankConfig) -> tuple[np.ndarray, np.ndarray]:
    """Documents to measure and documents to fit to, int `[documents, T]` each."""
    _, text = texts.read(config.text_file)
    loaded = load(config.model)
    assert loaded.tokenizer is not None  # `load` has seen to it
    length = min(config.max_tokens, loaded.config.max_length or config.max_tokens)
    count = config.documents + config.fit_documents
    found = texts.documents(text, loaded.tokenizer, count=count, length=length, special=True)
    if len(found) < count:
        raise InputError(f"the text must have {count} documents of {length} tokens, got {len(found)}")
    order = np.random.default_rng(config.seed).permutation(count)
    return found[np.sort(order[: config.documents])], found[np.sort(order[config.documents :])]


def layers(config: LowRankConfig) -> list[int]:
    """Which layers are measured."""
    depth = load(config.model).config.num_layers
    return sorted(set(np.linspace(0, depth - 1, min(config.layers, depth)).round().astype(int).tolist()))


@functools.lru_cache(maxsize=1)
def sizes(config: LowRankConfig) -> Sizes:
    """Of the heads that are measured."""
    try:
        one = jax.eval_shape(_captured, load(config.model).model, documents(config)[0][0])
    except InputError as error:
        raise InputError(f"--model={config.model}: {error}") from error
    _, length, heads, width = one.query.shape
    return Sizes(length, heads, one.key.shape[-2], width)


def units(config: LowRankConfig) -> list[Unit]:
    """A unit for each arm and document, and one for the curve of errors over ranks."""
    found = []
    for i in range(len(documents(config)[0])):
        found += [Unit(f"spectra_{arm}_{i}", functools.partial(spectra, config, arm, i)) for arm in ARMS]
        found.append(Unit(f"report_{i}", functools.partial(report, config, i)))
        found.append(Unit(f"ranks_{i}", functools.partial(by_rank, config, i)))
    return found


def capture(config: LowRankConfig, arm: str, token_ids: np.ndarray) -> Heads:
    """What attention gets in the layers that are measured."""
    model = load(config.model).model if arm == "model" else at_random(config.model, config.seed)
    chosen = np.array(layers(config))
    return Heads(*(x[chosen] for x in _captured(model, token_ids)))


@jax.jit
def _captured(model: Transformer, token_ids: Array) -> Heads:
    def observe(query: Array, key: Array, value: Array, **options: Any) -> Heads:
        others = set(options) - {"is_causal", "scale"}
        if others:
            raise InputError(f"its attention must be plain, and has {', '.join(sorted(others))}")
        scale = options.get("scale")
        if scale is not None:  # one, or one a head
            query = query * (jnp.asarray(scale) * query.shape[-1] ** 0.5).reshape(1, -1, 1)
        return Heads(query, key, value)

    return model(token_ids, observe=observe)[1]


def settings(config: LowRankConfig) -> dict[str, bool]:
    """Whether attention is causal: as the model has it, if it has a mask, and without one."""
    return {"own": True, "two_way": False} if load(config.model).config.causal else {"two_way": False}


def spectra(config: LowRankConfig, arm: str, document: int) -> list[Row]:
    """Of each head: shares of the leading singular values in the sum and in the sum of squares, and what the best
    matrix of each rank misses of the output."""
    heads = capture(config, arm, documents(config)[0][document])
    ranks = _ranks(config)
    rows: list[Row] = []
    for setting, is_causal in settings(config).items():
        found = _spectra(*heads, is_causal=is_causal, ranks=ranks)
        for measure, values in found.items():  # [L, N, ranks]
            rows += _rows(config, values, ranks, arm=arm, document=document, setting=setting, measure=measure)
    return rows


def _ranks(config: LowRankConfig) -> tuple[int, ...]:
    """Those of the curve, and a quarter of the length."""
    length = documents(config)[0].shape[1]
    return tuple(sorted({length // 4, *(rank for rank in config.ranks if rank <= length)}))


@functools.partial(jax.jit, static_argnames=("is_causal", "ranks"))
def _spectra(query: Array, key: Array, value: Array, *, is_causal: bool, ranks: tuple[int, ...]) -> dict[str, Array]:
    group = query.shape[-2] // key.shape[-2]

    def of_layer(heads: Heads) -> dict[str, Array]:
        length = heads.query.shape[0]
        found = attention_spectrum(heads.query, heads.key, is_causal=is_causal, k=length, implementation="dense")
        at = np.array(ranks) - 1
        shares = {
            "share": jnp.cumsum(found.values, axis=-1) / found.values.sum(axis=-1, keepdims=True),
            "energy": jnp.cumsum(found.values**2, axis=-1) / jnp.sum(found.values**2, axis=-1, keepdims=True),
        }
        value = jnp.repeat(heads.value, group, axis=-2)
        fetched = jnp.einsum("snr,snv->nrv", found.right, value) * found.values[..., None]  # of each direction
        # left is orthonormal: what the directions beyond a rank fetch is what that rank misses
        squares = jnp.sum(fetched**2, axis=-1)
        missed = jnp.cumsum(squares[..., ::-1], axis=-1)[..., ::-1] - squares
        shares["rank_error"] = jnp.sqrt(missed / squares.sum(axis=-1, keepdims=True))
        return {name: x[..., at] for name, x in shares.items()}

    return jax.lax.map(of_layer, Heads(query, key, value))


def attend(mechanism: str, rank: int, *, is_causal: bool = False) -> Callable[..., Array]:
    """A mechanism of one rank, as a candidate: query, key, value and whatever it draws from, or its projections."""
    if mechanism == "nystrom":
        return functools.partial(lowrank.nystrom_attention, landmarks=rank)
    if mechanism == "performer":

        def performer(query: Array, key: Array, value: Array, rng: Array) -> Array:
            features = linear.draw_features(rng, query.shape[-1], rank)
            return linear.linear_attention(query, key, value, feature_map=features, is_causal=is_causal)

        return performer
    return lowrank.linformer_attention


def uniform(query: Array, key: Array, value: Array) -> Array:
    """The mean of all values, whatever is asked."""
    return attn_jax.dot_product_attention(jnp.zeros_like(query), jnp.zeros_like(key), value)


def pooled(rank: int, length: int) -> Float[np.ndarray, "r s"]:
    """The projection that averages consecutive keys, as evenly as can be."""
    segment = np.arange(length) * rank // length
    member = segment[None, :] == np.arange(rank)[:, None]
    return (member / member.sum(axis=1, keepdims=True)).astype(np.float32)


@functools.lru_cache(maxsize=1)
def fitted(config: LowRankConfig) -> tuple[Float[Array, "l k r s"], Float[Array, "l k r s"]]:
    """Linformer's projections, fitted to the outputs of exact attention on other documents; from pooled ones on."""
    rank = sizes(config).affordable("linformer", config.budget)
    each = [capture(config, "model", token_ids) for token_ids in documents(config)[1]]
    heads = Heads(*(jnp.stack(x, axis=1) for x in zip(*each, strict=True)))  # [L, documents, ...]
    start = jnp.broadcast_to(pooled(rank, heads.key.shape[2]), (heads.key.shape[3], rank, heads.key.shape[2]))
    return _fit(heads, start, config.fit_steps)


@functools.partial(jax.jit, static_argnames="steps")
def _fit(heads: Heads, start: Array, steps: int) -> tuple[Array, Array]:
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def of_layer(heads: Heads) -> tuple[Array, Array]:
        exact = attn_jax.dot_product_attention(*heads)
        size = jnp.sum(exact**2, axis=(0, 1, 3))  # of each head

        def loss(projections: tuple[Array, Array]) -> Array:
            error = jnp.sum((lowrank.linformer_attention(*heads, *projections) - exact) ** 2, axis=(0, 1, 3))
            return jnp.sum(error / size)

        def step(state: Any, _: None) -> tuple[Any, None]:
            projections, moments = state
            updates, moments = optimizer.update(jax.grad(loss)(projections), moments)
            return (optax.apply_updates(projections, updates), moments), None

        projections = (start, start)
        (projections, _), _ = jax.lax.scan(step, (projections, optimizer.init(projections)), None, length=steps)
        return projections

    return jax.lax.map(of_layer, heads)


def report(config: LowRankConfig, document: int) -> list[Row]:
    """The approximation report of each mechanism at its rank for the budget; and of what knows nothing."""
    heads, of = capture(config, "model", documents(config)[0][document]), sizes(config)
    ranks = tuple(of.affordable(mechanism, config.budget) for mechanism in MECHANISMS)
    rng = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(b"draws") + document)
    rows: list[Row] = []
    for setting, is_causal in settings(config).items():
        found = _report(*heads, fitted(config), rng, is_causal=is_causal, ranks=ranks, draws=config.draws)
        for mechanism, measures in found.items():
            rank = dict(zip(MECHANISMS, ranks, strict=True)).get(mechanism, 1)
            for measure, values in measures.items():
                at = {"arm": "model", "document": document, "setting": setting, "mechanism": mechanism}
                rows += _rows(config, values[..., None], (rank,), measure=measure, **at)
    return rows


@functools.partial(jax.jit, static_argnames=("is_causal", "ranks", "draws"))
def _report(
    query: Array,
    key: Array,
    value: Array,
    projections: tuple[Array, Array],
    rng: Array,
    *,
    is_causal: bool,
    ranks: tuple[int, ...],
    draws: int,
) -> dict[str, dict[str, Array]]:
    rank = dict(zip(MECHANISMS, ranks, strict=True))

    def of_layer(layer: tuple[Heads, tuple[Array, Array]]) -> dict[str, dict[str, Array]]:
        heads, (for_keys, for_values) = layer
        performer = Candidate(attend("performer", rank["performer"], is_causal=is_causal), random=True)
        candidates: dict[str, Any] = {"performer": performer}
        if not is_causal:
            start = jnp.asarray(pooled(rank["linformer"], heads.key.shape[0]))
            candidates |= {
                "linformer": lambda q, k, v: lowrank.linformer_attention(q, k, v, for_keys, for_values),
                "linformer_pooled": lambda q, k, v: lowrank.linformer_attention(q, k, v, start),
                "nystrom": attend("nystrom", rank["nystrom"]),
                "uniform": uniform,
            }
        found = approximation_report(*heads, candidates, is_causal=is_causal, rng_key=rng, draws=draws)
        return {name: {measure: getattr(x, measure) for measure in MEASURES} for name, x in found.items()}

    return jax.lax.map(of_layer, (Heads(query, key, value), projections))


def by_rank(config: LowRankConfig, document: int) -> list[Row]:
    """Output errors over ranks, without a mask; Linformer with pooled projections, which need no fit."""
    heads, of = capture(config, "model", documents(config)[0][document]), sizes(config)
    rng = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(b"ranks") + document)
    rows: list[Row] = []
    for mechanism in MECHANISMS:
        for rank in (rank for rank in config.ranks if rank <= of.length):
            extra = {"performer": rng, "linformer": pooled(rank, of.length)}.get(mechanism)
            errors = _errors(*heads, extra, mechanism=mechanism, rank=rank)
            at = {"arm": "model", "document": document, "setting": "two_way", "mechanism": mechanism}
            rows += _rows(config, errors[..., None], (rank,), measure="error_by_rank", **at)
    return rows


@functools.partial(jax.jit, static_argnames=("mechanism", "rank"))
def _errors(query: Array, key: Array, value: Array, extra: Any, *, mechanism: str, rank: int) -> Float[Array, "l n"]:
    run = attend(mechanism, rank)

    def of_layer(heads: Heads) -> Float[Array, " n"]:
        exact = attn_jax.dot_product_attention(*heads)
        output = run(*heads) if extra is None else run(*heads, extra)
        return jnp.linalg.norm(output - exact, axis=(0, 2)) / jnp.linalg.norm(exact, axis=(0, 2))

    return jax.lax.map(of_layer, Heads(query, key, value))


def _rows(config: LowRankConfig, values: Array, ranks: tuple[int, ...], **where: Any) -> list[Row]:
    """`[L, N, ranks]` as rows."""
    of_layers = layers(config)
    return [
        {**where, "layer": of_layers[layer], "head": head, "rank": ranks[i], "value": float(value)}
        for (layer, head, i), value in np.ndenumerate(np.asarray(values, np.float64))
    ]
