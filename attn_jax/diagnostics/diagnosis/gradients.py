"""The gradients of W_Q, W_K and W_V: whether they are derivatives of the loss, and how they compare."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics.diagnosis.findings import Finding
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.rules import where
from attn_jax.diagnostics.diagnosis.weights import flax_of
from attn_jax.diagnostics.diagnosis.words import finding
from attn_jax.diagnostics.reference import Array

NAMES = ("query", "key", "value")
MOST_PARAMETERS = 2 * 10**7  # of models whose gradients are taken
OFF = 0.25  # relative, of a derivative by differences in float32
STEP = 0.01  # what a difference changes of the loss, at most
LEAST = 1e-5  # gradients below it drown in rounding


def examine(model: Any, token_ids: Array, limits: Limits) -> Iterator[Finding | tuple[str, str]]:
    """Findings on the gradients of a short text, or why there are none."""
    nnx = flax_of(model)
    if nnx is None:
        yield "gradients", "the model is no NNX module"
        return
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    if count > MOST_PARAMETERS:
        yield "gradients", f"the model has {count:,} parameters, and {MOST_PARAMETERS:,} is the most"
        return
    causal = model.config.causal and model.config.head is not None
    tokens = jnp.asarray(token_ids)

    @jax.jit
    @jax.value_and_grad
    def differentiated(params: Any) -> Any:
        outputs = nnx.merge(graph, params, rest)(tokens).astype(jnp.float32)
        if not causal:
            direction = jax.random.normal(jax.random.key(0), outputs.shape)
            return (outputs * direction).sum() / math.sqrt(outputs.size)
        logits = jax.nn.log_softmax(outputs[:, :-1])
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()

    try:
        value, gradient = differentiated(params)
    except (TypeError, ValueError, NotImplementedError) as error:  # JAX's and kernels' words for it
        yield "gradients", f"the model cannot be differentiated ({type(error).__name__})"
        return
    if not np.isfinite(value):
        return
    flat = dict(nnx.to_flat_state(gradient))
    paths = {name: [path for path in flat if path[-1] == f"{name}_weight"] for name in NAMES}
    parts = {name: [_raw(flat[path]) for path in found] for name, found in paths.items() if found}
    broken = [name for name, part in parts.items() if not all(np.isfinite(x).all() for x in part)]
    if broken:
        evidence = f"Gradients of W_{', W_'.join(name[0].upper() for name in broken)} are not finite."
        yield finding("gradients", evidence, severity="serious", check="masked rows, and roots of 0.")
        return
    for name, part in parts.items():
        yield from _derivative(nnx, differentiated, params, float(value), paths[name], part, name)
    if len(parts) >= 2 and "value" in parts and limits.gradient_ratio is not None:
        yield from _ratio(parts, limits.gradient_ratio)


def _derivative(
    nnx: Any, differentiated: Any, params: Any, value: float, paths: list[Any], part: list[Array], name: str
) -> Iterator[Finding]:
    """The derivative along the gradient, or along any direction where there is none, against a difference."""
    norm = math.sqrt(sum(float((x**2).sum()) for x in part))
    size = math.sqrt(sum(float((_raw(x) ** 2).sum()) for path, x in nnx.to_flat_state(params) if path in paths))
    rng = np.random.default_rng(0)
    direction = part if norm > 0 else [rng.standard_normal(x.shape) for x in part]
    length = math.sqrt(sum(float((x**2).sum()) for x in direction))
    if size == 0 or length == 0 or 0 < norm < LEAST * max(abs(value), 1.0):
        return
    direction = [x / length for x in direction]
    reach = 0.05 * size if norm == 0 else min(0.05 * size, STEP * max(abs(value), 1.0) / norm)
    found = []
    for step in (reach, reach / 4):
        ends = [float(differentiated(_moved(nnx, params, paths, direction, sign * step))[0]) for sign in (1, -1)]
        found.append((ends[0] - ends[1]) / (2 * step))
    if abs(found[0] - found[1]) > OFF * abs(found[1]):
        return  # the loss is no straight line here: of saturated rows nothing can be said
    link = f"W_{name[0].upper()}"
    if norm == 0:
        if min(abs(x) * reach for x in found) > 1e-4 * max(abs(value), 1.0):
            evidence = f"No gradient reaches {link}, though the loss changes with it."
            yield finding("gradients", evidence, severity="serious", value=0.0, limit=abs(found[0]))
        return
    off = min(abs(x / norm - 1) for x in found)
    if off > OFF:
        evidence = f"Along the gradient of {link} the loss changes by {found[1] / norm:.3g} of what the gradient says."
        yield finding("gradients", evidence, severity="serious", value=off, limit=OFF)


def _raw(variable: Any) -> Array:
    """The numbers as they are kept: a gradient, a step and a weight then have one order."""
    return np.asarray(variable.get_raw_value(), np.float64)


def _moved(nnx: Any, params: Any, paths: list[Any], direction: list[Array], step: float) -> Any:
    """The parameters a step along a direction."""
    flat = dict(nnx.to_flat_state(params))
    for path, x in zip(paths, direction, strict=True):
        kept = flat[path]
        flat[path] = kept.replace(kept.get_raw_value() + jnp.asarray(step * x, kept.get_raw_value().dtype))
    return nnx.from_flat_state(flat)


def _ratio(parts: dict[str, list[Array]], limit: float) -> Iterator[Finding]:
    """|∇W_Q, ∇W_K| / |∇W_V| of each layer."""
    norms = {
        name: np.sqrt(np.concatenate([(x**2).reshape(len(x), -1).sum(axis=1) for x in part]))
        for name, part in parts.items()
    }
    both = np.hypot(norms["query"], norms.get("key", np.zeros_like(norms["query"])))
    ratio = np.where(norms["value"] > 0, both / np.where(norms["value"] > 0, norms["value"], 1), np.nan)
    small = ratio < limit
    if small.any():
        layers = tuple(np.flatnonzero(small).tolist())
        value = float(np.nanmin(ratio))
        evidence = f"Gradients of W_Q and W_K are {value:.2g} of that of W_V ({where(layers)}), limit {limit:g}."
        yield finding("gradient_ratio", evidence, severity="notice", layers=layers, value=value, limit=limit)
