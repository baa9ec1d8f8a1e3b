"""What is measured: summaries of every head in every arm, and losses of decoders in a window."""

import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import attn_jax
from attn_jax import masks, models
from attn_jax.diagnostics import (
    Captures,
    Diagnosis,
    HeadSummary,
    Limits,
    LimitsError,
    attention_statistics,
    diagnose,
    entropy_lower_bound,
    read_captures,
    summarize_heads,
)
from attn_jax.models.loading import find
from attn_jax.nn import Transformer
from attn_jax.typing import Array, Float
from experiments import artifacts, texts
from experiments.artifacts import Row
from experiments.checkpoints import at_random, load
from experiments.diagnose.config import CONTROLS, FIRST, INSTALLED, DiagnoseConfig
from experiments.harness import InputError, Unit

WINDOWS = ("all", "window", "window_and_first")


def checkpoints(config: DiagnoseConfig) -> tuple[str, ...]:
    """Those that were named, or all that are installed."""
    return _installed() if config.model == (INSTALLED,) else config.model


@functools.cache
def _installed() -> tuple[str, ...]:
    found = []
    for name in models.CHECKPOINTS:
        try:
            find(name)
        except FileNotFoundError:
            continue
        found.append(name)
    if not found:
        raise InputError("no checkpoint is installed; name a file by --model")
    return tuple(found)


@functools.lru_cache(maxsize=1)
def documents(config: DiagnoseConfig, name: str) -> np.ndarray:
    """Token ids `[documents, T]`, with the special tokens that the checkpoint puts around a text."""
    _, text = texts.read(config.text_file)
    loaded = load(name)
    assert loaded.tokenizer is not None  # `load` has seen to it
    length = min(config.max_tokens, loaded.config.max_length or config.max_tokens)
    return texts.documents(text, loaded.tokenizer, count=config.documents, length=length, special=True)


@functools.lru_cache(maxsize=1)
def captures(path: str) -> Captures:
    """The captured arrays of a file."""
    try:
        return read_captures(path)
    except (ValueError, OSError) as error:
        raise InputError(f"--capture={path}: {error}") from error


@functools.lru_cache(maxsize=1)
def limits(path: str) -> Limits:
    """Those of a file, or the starting values."""
    try:
        return Limits.load(path) if path else Limits()
    except LimitsError as error:
        raise InputError(f"--limits={path}: {error}") from error


def inputs(config: DiagnoseConfig) -> Mapping[str, str]:
    """What is read, and its digests."""
    paths = [pathlib.Path(path) for path in (config.capture, config.limits) if path]
    limits(config.limits)
    if config.capture:
        captures(config.capture)
        return {path.name: artifacts.file_digest(path) for path in paths}
    name, text = texts.read(config.text_file)
    sources = [load(checkpoint).source for checkpoint in checkpoints(config)]
    return {**{path.name: artifacts.file_digest(path) for path in (*sources, *paths)}, name: texts.digest(text)}


def units(config: DiagnoseConfig) -> list[Unit]:
    """Findings first; then a unit for each checkpoint, arm and document."""
    if config.capture:
        return [Unit("capture", lambda: of_capture(config))]
    found = []
    for name in checkpoints(config):
        label = f"{zlib.crc32(name.encode()):08x}" if "/" in name or "." in name else name
        found.append(Unit(f"{label}_findings", lambda name=name: of_checkpoint(config, name)))
        for i in range(len(documents(config, name))):
            for arm in ("model", *CONTROLS):
                found.append(
                    Unit(f"{label}_{arm}_{i}", lambda name=name, arm=arm, i=i: summarize(config, name, arm, i))
                )
            if load(name).config.causal:
                found.append(Unit(f"{label}_windows_{i}", lambda name=name, i=i: losses(config, name, i)))
    return found


def of_checkpoint(config: DiagnoseConfig, name: str) -> list[Row]:
    """The findings on a checkpoint, by its first document."""
    diagnosis = diagnose(load(name), documents(config, name)[:1], limits=limits(config.limits), name=name)
    return list(_told(diagnosis))


def of_capture(config: DiagnoseConfig) -> list[Row]:
    """The findings on captured arrays, and their measures."""
    name = pathlib.Path(config.capture).name
    diagnosis = diagnose(captures(config.capture), limits=limits(config.limits), name=name)
    rows = list(_told(diagnosis))
    at = {"checkpoint": name, "arm": "model", "document": 0}
    for measure, values in diagnosis.measures.items():
        if values.ndim == 2:
            for layer, head in np.ndindex(values.shape):
                value = float(values[layer, head])
                rows.append({**at, "layer": layer, "head": head, "measure": measure, "value": value})
    return rows


def _told(diagnosis: Diagnosis) -> Iterator[Row]:
    """A row for each finding, in their order, and for what could not be looked at."""
    at = {"checkpoint": diagnosis.subject, "arm": "findings"}
    for rank, finding in enumerate(diagnosis.findings):
        record = dataclasses.asdict(finding)
        places = {"layers": json.dumps(record.pop("layers")), "heads": json.dumps(record.pop("heads"))}
        yield {**at, "measure": "finding", "rank": rank, **record, **places}
    for signal, why in diagnosis.skipped:
        yield {**at, "measure": "skipped", "signal": signal, "evidence": why}


def summarize(config: DiagnoseConfig, name: str, arm: str, document: int) -> list[Row]:
    """One document through one arm: a row for each layer, head and measure."""
    token_ids = documents(config, name)[document]
    rng = np.random.default_rng([config.seed, document])
    model = load(name).model
    if arm == "random_weights":
        model = at_random(name, config.seed)
    elif arm == "shuffled_tokens":
        token_ids = rng.permutation(token_ids)
    elif arm == "other_first_token":
        others = np.setdiff1d(np.arange(model.config.vocabulary_size), token_ids[:1])
        token_ids = np.concatenate([[rng.choice(others)], token_ids[1:]]).astype(np.int32)
    rows = []
    for measure, measured in _measures(model, token_ids).items():
        values = np.asarray(measured, np.float64)  # [L, N]
        for layer, head in np.ndindex(values.shape):
            at = {"checkpoint": name, "arm": arm, "document": document, "layer": layer, "head": head}
            rows.append({**at, "measure": measure, "value": float(values[layer, head])})
    return rows


@jax.jit
def _measures(model: Transformer, token_ids: Array) -> dict[str, Float[Array, "l n"]]:
    def observe(query: Array, key: Array, value: Array, **options: Any) -> dict[str, Array]:
        summary = summarize_heads(query, key, value, **options)
        fields = {field.name: getattr(summary, field.name) for field in dataclasses.fields(HeadSummary)}
        return {**fields, **entropy_margins(query, key, **options)}

    return model(token_ids, observe=observe)[1]  # under jit, so that nobody computes the logits


def entropy_margins(query: Array, key: Array, **options: Any) -> dict[str, Float[Array, " n"]]:
    """How far the entropy of rows with a choice lies above the least that their logits allow, in nats: least and mean.

    Zhai et al. 2023, theorem 3.1. Below 0 it would be a fault of the measurement.
    """
    fields = ("entropy", "logit_variance", "visible_keys")
    rows = attention_statistics(query, key, statistics=fields, **options)  # [T, N] each
    assert rows.entropy is not None
    assert rows.logit_variance is not None
    assert rows.visible_keys is not None
    margin = rows.entropy - entropy_lower_bound(rows.logit_variance, rows.visible_keys)
    counted = (rows.visible_keys > 1) & jnp.isfinite(margin)
    mean = jnp.where(counted, margin, 0).sum(axis=-2) / jnp.maximum(counted.sum(axis=-2), 1)
    return {
        "entropy_margin_least": jnp.where(counted, margin, jnp.inf).min(axis=-2),
        "entropy_margin_mean": mean,
    }


def losses(config: DiagnoseConfig, name: str, document: int) -> list[Row]:
    """The loss of the last half of a document under each window, in nats a token; and the first token's value norm."""
    model, token_ids = load(name).model, documents(config, name)[document]
    at = {"checkpoint": name, "document": document}
    rows: list[Row] = []
    for window in WINDOWS:
        attention = _attention(None if window == "all" else config.window, window == "window_and_first")
        loss = float(_loss(_with_attention(model, attention), token_ids))
        rows.append({**at, "arm": window, "measure": "loss", "value": loss})
    ratios = np.asarray(_value_ratios(model, token_ids), np.float64)  # [L, K]
    return [*rows, {**at, "arm": "model", "measure": "first_value_ratio", "value": float(np.median(ratios))}]


@functools.cache  # one function for one window: a configuration that holds it is then equal to the last one
def _attention(window: int | None, first: bool) -> Callable[..., Any]:
    if window is None:
        return attn_jax.dot_product_attention
    mask = masks.SlidingWindow(window)
    return functools.partial(attn_jax.dot_product_attention, mask=mask | masks.GlobalTokens(FIRST) if first else mask)


def _with_attention(model: Transformer, attention: Callable[..., Any]) -> Transformer:
    """The same parameters in a model whose attention is another."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(
        dataclasses.replace(model.config, attention_fn=attention), rngs=nnx.Rngs(0)
    )))  # fmt: skip
    del state
    return nnx.merge(graph, nnx.state(model))


@jax.jit
def _loss(model: Transformer, token_ids: Array) -> Array:
    half = token_ids.shape[0] // 2
    logits = model(token_ids)[half - 1 : -1]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), token_ids[half:, None], axis=-1)
    return -chosen.mean()


@jax.jit
def _value_ratios(model: Transformer, token_ids: Array) -> Float[Array, "l k"]:
    """The norm of the first token's value over the median of the others', of each key/value head."""

    def ratio(query: Array, key: Array, value: Array, **options: Any) -> Float[Array, " k"]:
        del query, key, options
        norms = jnp.linalg.norm(value.astype(jnp.float32), axis=-1)  # [T, K]
        return norms[0] / jnp.median(norms[1:], axis=0)

    return model(token_ids, observe=ratio)[1]
