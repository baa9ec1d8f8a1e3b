"""Steps two to five: what is measured of the model with the chosen heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import attn_jax
from attn_jax.audit import Expectation, audit_module
from attn_jax.diagnostics import (
    HeadSummary,
    effective_scale,
    head_clusters,
    head_similarity,
    linear_cka,
    name_scale,
    summarize_heads,
)
from attn_jax.nn import Transformer, interventions
from attn_jax.training import losses
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array
from experiments.artifacts import Row
from experiments.tune.config import TuneConfig
from experiments.tune.widths import chosen_width, train

ITEMS = 8  # sequences that are looked at
ALIKE = 0.3  # heads of one cluster: the root of the divergence, which is a metric
MEASURES = ("normalized_entropy", "normalized_entropy_no_sink", "max_logit", "sink_mass")


def _model(config: TuneConfig) -> Transformer:
    return train(config, chosen_width(config)).model


def _batch(config: TuneConfig) -> Batch:
    return jax.tree.map(lambda x: x[0], config.make_task().evaluation(1, ITEMS))


def scale(config: TuneConfig) -> list[Row]:
    """Step two: the scale of every head, read off its output, and the audit of every layer's attention."""
    model, batch = _model(config), _batch(config)
    attention_fn = model.config.attention_fn

    def fitted(query: Array, key: Array, value: Array, **options: Any) -> Array:
        output = attention_fn(query, key, value, **options)
        return effective_scale(query, key, value, output, **{k: x for k, x in options.items() if k != "scale"})

    _, scales = jax.jit(lambda model, ids: model(ids, observe=fitted))(model, batch.inputs)
    head_width = model.config.head_width
    assert head_width is not None
    rows: list[Row] = []
    for layer, head in np.ndindex(scales.shape):
        found = float(scales[layer, head])
        rule = name_scale(found, head_width, model.config.model_width).rule if np.isfinite(found) else "not identified"
        rows.append({"layer": layer, "head": head, "measure": "scale", "value": found, "note": rule})
    expect = Expectation(causal=True, positions="rotary")
    for layer in range(config.layers):
        attention = model.layer(layer).attention
        assert attention is not None  # no layer has another mixer
        report = audit_module(attention, width=config.width, expect=expect)
        told = "; ".join(f"{x.link}: {x.evidence}" for x in report.faults) or "no fault"
        rows.append({"layer": layer, "measure": "faults", "value": float(len(report.faults)), "note": told})
    return rows


def entropy(config: TuneConfig) -> list[Row]:
    """Step three: the summary of every head, a mean over sequences."""
    _, summary = jax.jit(lambda model, ids: model(ids, observe=summarize_heads))(_model(config), _batch(config).inputs)
    assert isinstance(summary, HeadSummary)
    rows: list[Row] = []
    for measure in MEASURES:
        values = np.asarray(getattr(summary, measure), np.float64)  # [L, B, N]
        values = np.nanmax(values, axis=1) if measure == "max_logit" else np.nanmean(values, axis=1)
        for layer, head in np.ndindex(values.shape):
            rows.append({"layer": layer, "head": head, "measure": measure, "value": float(values[layer, head])})
    return rows


def redundancy(config: TuneConfig) -> list[Row]:
    """Step four: how alike the heads of a layer are, their clusters, and the loss with each of them at its mean."""
    model, batch = _model(config), _batch(config)
    layers, heads = model.config.num_layers, model.config.num_heads
    _, (divergence, likeness, means) = jax.jit(lambda model, ids: model(ids, observe=_alike))(model, batch.inputs)
    cost = _removal_costs(model, batch, means)
    rows: list[Row] = []
    for layer in range(layers):
        apart = np.sqrt(np.clip(np.asarray(divergence[layer], np.float64), 0, 1))
        np.fill_diagonal(apart, 0)
        cluster = head_clusters((apart + apart.T) / 2, threshold=ALIKE)
        for head in range(heads):
            others = [other for other in range(heads) if other != head]
            nearest = min(others, key=lambda other: apart[head, other]) if others else head
            at = {"layer": layer, "head": head}
            found = {
                "cluster": float(cluster[head]),
                "nearest_distance": float(divergence[layer, head, nearest]) if others else np.nan,
                "nearest_likeness": float(likeness[layer, head, nearest]) if others else np.nan,
                "removal_cost": float(cost[layer, head]),
            }
            rows += [{**at, "measure": name, "value": value, "note": str(nearest)} for name, value in found.items()]
    return rows


def _alike(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array, Array]:
    """Of each pair of heads the divergence of patterns and the likeness of outputs, `[N, N]`; mean outputs `[N, V]`."""
    weights = attn_jax.attention_weights(query, key, **options)
    visible = interventions.visible_pairs(query, key, **options)
    output = attn_jax.dot_product_attention(query, key, value, **options)
    rows = jnp.moveaxis(output.reshape(-1, *output.shape[-2:]), 1, 0)  # [N, B T, V]
    likeness = jax.vmap(lambda one: jax.vmap(lambda other: linear_cka(one, other))(rows))(rows)
    divergence = jnp.nanmean(head_similarity(weights, visible), axis=0)
    return divergence, likeness, jnp.mean(rows, axis=1)


def _removal_costs(model: Transformer, batch: Batch, means: Array) -> np.ndarray:
    """What the loss gains when a head brings its mean instead, `[L, N]`; one compiled program for all heads."""
    layers, heads = means.shape[:2]

    @jax.jit
    def loss(keep: Array) -> Array:
        ablation = interventions.Ablation(keep=keep, mean=means)
        logits = model(batch.inputs, intervene=interventions.ablate_heads, interventions=ablation)
        return losses.cross_entropy(logits, batch.targets, batch.weights)[0]

    whole = loss(jnp.ones((layers, heads)))
    cost = np.zeros((layers, heads))
    for layer, head in np.ndindex(cost.shape):
        cost[layer, head] = loss(jnp.ones((layers, heads)).at[layer, head].set(0.0)) - whole
    return cost


def tiles(config: TuneConfig) -> list[Row]:
    """Step five: loss and gradients on a long sequence, dense and by tiles, and the memory that each takes."""
    model = _model(config)
    ids = jax.random.randint(jax.random.key(config.seed), (1, config.long + 1), 0, model.config.vocabulary_size)
    graphdef, parameters = nnx.split(model)

    def attend(own: None, *arrays: Array, implementation: str, **options: Any) -> Array:
        return attn_jax.dot_product_attention(*arrays, implementation=implementation, **options)

    def measure(implementation: str) -> tuple[Array, Any, int]:
        intervene = functools.partial(attend, implementation=implementation)

        def loss(parameters: Any, ids: Array) -> Array:
            logits = nnx.merge(graphdef, parameters)(ids[:, :-1], intervene=intervene)
            return losses.cross_entropy(logits, ids[:, 1:])[0]

        compiled = jax.jit(jax.value_and_grad(loss)).lower(parameters, ids).compile()
        memory = compiled.memory_analysis()
        assert memory is not None  # XLA has one for CPU, GPU and TPU
        return *compiled(parameters, ids), memory.temp_size_in_bytes

    (loss_dense, dense, memory_dense), (loss_tiled, tiled, memory_tiled) = map(measure, ("dense", "blockwise"))
    apart = jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(a), 1e-30), dense, tiled)
    return [
        {"measure": "loss_apart", "value": float(abs(loss_dense - loss_tiled) / loss_dense)},
        {"measure": "gradient_apart", "value": float(max(map(float, jax.tree.leaves(apart))))},
        {"measure": "memory_dense", "value": float(memory_dense)},
        {"measure": "memory_tiled", "value": float(memory_tiled)},
    ]
