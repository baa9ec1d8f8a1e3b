"""Small models with one fault each, by the link that is broken, and healthy ones, to measure the diagnosis by.

A fault is planted in the attention function that a model calls, in its parameters, in a block, in how the model is
called, or in what was captured of one. Nothing is loaded or trained before a model is built.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attn_jax
from attn_jax import models
from attn_jax.models.loading import find
from attn_jax.typing import ArrayLike
from experiments import texts
from experiments.benchmarks.planted.model_others import (
    captured,
    causal,
    collapsed,
    gpt2,
    intermediates,
    late_values,
    stock,
    stock_edited,
    tie_stock,
    trained,
    unscaled,
)
from experiments.benchmarks.planted.model_parts import (
    ENCODER,
    WIDTH,
    AtZero,
    CutByReshape,
    Forgetful,
    MergedWrong,
    NoSkip,
    batch_centred,
    bias_subtracted,
    blocks,
    centring,
    changed,
    copy_heads,
    doubled,
    edited,
    half_precision,
    identity,
    leaking,
    model,
    nan,
    of_class,
    one_more,
    over_queries,
    padding_read,
    prune,
    rank_one,
    reshaped,
    restless,
    reweighted,
    tie,
    tiled,
    times,
    tokens,
    too_wide,
    values_turned,
    with_attention,
    with_blocks,
    with_function,
    zero_table,
)


@dataclasses.dataclass(frozen=True)
class PlantedModel:
    """A model with a fault, or a healthy one.

    Attributes:
        build: makes what `diagnose` takes.
        link: that is broken; several where a symptom is filed under several; none of a healthy one.
        token_ids, lengths: what it is looked at with; None for captures and for what was sown.
        options: further keywords of `diagnose`.
    """

    build: Callable[[], Any]
    link: str | tuple[str, ...] = ()
    token_ids: ArrayLike | None = None
    lengths: ArrayLike | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def links(self) -> tuple[str, ...]:
        """All of them."""
        return (self.link,) if isinstance(self.link, str) else self.link


def _on(build: Callable[[], Any], link: str | tuple[str, ...] = (), **options: Any) -> PlantedModel:
    return PlantedModel(build, link, tokens(), options=options)


_dot = attn_jax.dot_product_attention

FAULTS: Mapping[str, PlantedModel] = {
    "no scale": _on(with_function(functools.partial(_dot, scale=1.0)), "scale"),
    "1/H": _on(with_function(functools.partial(_dot, scale=1 / 16)), "scale"),
    "1/sqrt(D)": _on(with_function(functools.partial(_dot, scale=WIDTH**-0.5)), "scale"),
    "scale rule of 1": _on(functools.partial(model, scale_rule="none"), "scale"),
    "softmax over queries": _on(with_function(reweighted(over_queries)), "softmax"),
    "one more in the denominator": _on(with_function(reweighted(one_more)), "softmax"),
    "causal one too wide": _on(with_function(too_wide), "mask"),
    "padding read": _on(with_function(padding_read, **ENCODER), "mask"),
    "key heads tiled": _on(with_function(changed(tiled), num_kv_heads=2), "heads"),
    "heads by reshape": _on(with_function(changed(reshaped)), "heads"),
    "values turned": _on(with_function(changed(values_turned)), "values"),
    "values of the token before": _on(
        with_function(changed(lambda q, k, v: (q, k, jnp.roll(v, 1, axis=-3)))), "values"
    ),
    "output doubled": _on(with_function(doubled), "output"),
    "keys centred by the batch": _on(with_function(changed(batch_centred)), "batch"),
    "bias subtracted": _on(with_function(bias_subtracted, positions="alibi"), "bias"),
    "keys are queries": _on(with_function(changed(lambda q, k, v: (q, q, v))), "projections"),
    "no gradient to keys": _on(
        with_function(changed(lambda q, k, v: (q, jax.lax.stop_gradient(k), v))), "gradients"
    ),
    "bfloat16 inside": _on(with_function(half_precision), "numerics"),
    "tied by configuration": _on(functools.partial(model, tie_query_key=True), "projections"),
    "W_K = W_Q": _on(functools.partial(edited, tie), "projections"),
    "W_O identity": _on(functools.partial(edited, identity), "output"),
    "W_O in blocks": _on(functools.partial(edited, blocks), "output"),
    "W_O tiny": _on(functools.partial(edited, times(1e-3, "output")), "output"),
    "W_O of rank one": _on(functools.partial(edited, rank_one), "output"),
    "heads copied": _on(functools.partial(edited, copy_heads), "heads"),
    "a head pruned": _on(functools.partial(edited, prune), "heads"),
    "W_Q and W_K huge": _on(functools.partial(edited, times(12.0, "query", "key")), "projections"),
    "W_Q and W_K tiny": _on(functools.partial(edited, times(0.03, "query", "key")), ("projections", "scale")),
    "NaN in W_V": _on(functools.partial(edited, nan), "numerics"),
    "no skips": _on(functools.partial(with_blocks, NoSkip, num_layers=6), "softmax"),
    "projections cut by reshape": _on(functools.partial(with_attention, CutByReshape), "heads"),
    "merged without a transpose": _on(functools.partial(with_attention, MergedWrong), ("output", "heads")),
    "no positions": _on(functools.partial(model, positions=None), "positions"),
    "all at position 0": _on(functools.partial(of_class, AtZero), ("positions", "mask")),
    "position table of zeros": _on(zero_table, "positions"),
    "a cache that forgets": _on(functools.partial(of_class, Forgetful), "cache"),
    "noise in evaluation": _on(restless, "dropout"),
    "a function that leaks": _on(leaking, "mask", causal=True),
    "a function that centres": _on(centring, "batch", causal=True),
    "stock Flax, one too wide": PlantedModel(functools.partial(intermediates, 1), "mask"),
    "stock Flax, tied": _on(functools.partial(stock_edited, tie_stock), "projections", causal=True),
    "captured without scale": PlantedModel(functools.partial(captured, unscaled), "scale"),
    "captured values one late": PlantedModel(functools.partial(captured, late_values), "values"),
    "captured collapse": PlantedModel(collapsed, "softmax"),
    "captured huge queries": PlantedModel(functools.partial(captured, causal, grow=300.0), "projections"),
}  # fmt: skip


def _ids(name: str) -> np.ndarray:
    """A page as a checkpoint cuts it into tokens."""
    loaded = models.load(name)
    assert loaded.tokenizer is not None
    _, text = texts.read("")
    return texts.documents(text, loaded.tokenizer, count=1, length=128, special=True)


HEALTHY: Mapping[str, PlantedModel] = {
    "decoder": _on(model),
    "encoder": _on(functools.partial(model, **ENCODER)),
    "grouped heads, ALiBi, QK-norm": _on(functools.partial(model, num_kv_heads=2, positions="alibi", qk_norm="rms")),
    "sinusoidal, untied head": _on(functools.partial(model, positions="sinusoidal", head="untied")),
    "window, soft cap, sinks": _on(
        functools.partial(model, local_window_size=(7, 0), logits_soft_cap=30.0, use_sinks=True)
    ),
    "T5 buckets, encoder": _on(functools.partial(model, causal=False, positions="relative")),
    "N(0, 0.02²)": _on(gpt2),
    "wide values, norms on both sides": _on(functools.partial(model, value_width=24, norm_position="both")),
    "a hybrid": _on(functools.partial(model, num_layers=4, mixer=("linear", "softmax") * 2)),
    "trained": _on(trained),
    "trained, two heads": _on(functools.partial(trained, num_heads=2, num_layers=2)),
    "stock Flax": _on(stock, causal=True),
    "stock Flax, sown": PlantedModel(intermediates),
    "captured": PlantedModel(functools.partial(captured, causal)),
}


def checkpoints() -> Mapping[str, PlantedModel]:
    """The published checkpoints that are installed, on a page of English."""
    found = {}
    for name in models.CHECKPOINTS:
        try:
            find(name)
        except FileNotFoundError:
            continue
        found[name] = PlantedModel(functools.partial(models.load, name), (), _ids(name))
    return found
