"""A transformer of `attn_jax.nn`, block by block on a few tokens: what each link gives, and what its parameters say.

`walk` runs the model's own blocks one after another. Of each it keeps the input, queries, keys, values and output of
its attention, and what leaves it; and computes beside them what the parameters, positions and residual paths should
give. What differs is named: by an explanation, where one fits.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import positions, scaling
from attn_jax.diagnostics import reference
from attn_jax.diagnostics.diagnosis.findings import Finding
from attn_jax.diagnostics.diagnosis.layer_arrays import LayerArrays, capture_layer, layers_of
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.rules import where
from attn_jax.diagnostics.diagnosis.words import finding
from attn_jax.diagnostics.reference import Array, Mask
from attn_jax.projections import project_out, project_qkv

OFF = 2e-3  # relative, of float32 sums in another order
BRANCHES = {
    "": (1.0, 1.0),
    "The block does not add the input of attention": (0.0, 1.0),
    "The block does not add the input of the MLP": (1.0, 0.0),
    "The block adds neither input": (0.0, 0.0),
}


class Step(NamedTuple):
    """A layer on the way.

    Attributes:
        layer: its index.
        arrays: what its attention got and gave.
        expected: "query", "key", "value" and "attended" (after W_O), by its parameters, and "raw_query", "raw_key",
            before positions act.
        given: "x", what entered; "attended" and "out", what left attention and the block.
        branches: by the sentence that says so, what leaves a block whose inputs are added so.
    """

    layer: int
    arrays: LayerArrays
    expected: Mapping[str, Array]
    given: Mapping[str, Array]
    branches: Mapping[str, Array]


def walk(model: Any, token_ids: Any, lengths: Any) -> list[Step]:
    """The layers that have attention, on `[B, T]` tokens."""
    x, steps = model.embed(token_ids), []
    pattern = model.config.layer_attention
    for layer in range(model.config.num_layers):
        block, own = model.layer(layer), pattern[layer % len(pattern)]
        if own is None:
            x = block(x, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
            continue
        captured, expected, given, branches = _step(block, x, lengths, own.attention_fn)
        (arrays,) = layers_of({name: one[None] for name, one in captured.items()})
        numbers = [{name: np.asarray(one, np.float64) for name, one in x.items()} for x in (expected, given, branches)]
        steps.append(Step(layer, arrays, *numbers))
        x = given["out"]
    return steps


@functools.partial(jax.jit, static_argnames="attention_fn")
def _step(block: Any, x: Any, lengths: Any, attention_fn: Any) -> tuple[dict[str, Any], ...]:
    before, after = block.norm_position != "post", block.norm_position == "post"
    options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    normed = block.attention_norm(x) if before else x
    observe = functools.partial(capture_layer, attention_fn=attention_fn)
    attended, captured = block.attention(normed, observe=observe, **options)
    branch = attended if block.attention_output_norm is None else block.attention_output_norm(attended)
    branches = {}
    for says, (first, second) in BRANCHES.items():
        middle = first * x + branch
        middle = block.attention_norm(middle) if after else middle
        added = block.mlp(block.mlp_norm(middle) if before else middle)
        added = added if block.mlp_output_norm is None else block.mlp_output_norm(added)
        left = second * middle + added
        branches[says] = block.mlp_norm(left) if after else left
    expected = _expected(block.attention, normed)
    expected["attended"] = project_out(
        captured["output"], block.attention.output_weight[...], _value(block.attention.output_bias), precision="highest"
    )
    given = {"x": x, "branch": branch, "attended": attended, "out": block(x, **options)}
    return captured, expected, given, branches


def _value(parameter: Any) -> Any:
    return None if parameter is None else parameter[...]


def _expected(attention: Any, x: Any) -> dict[str, Any]:
    """Queries, keys and values by the parameters: projected, normalised, turned."""
    config = attention.config
    tied = attention.key_weight is None
    weights = [_value(getattr(attention, f"{name}_weight")) for name in ("query", "key", "value")]
    offsets = [_value(getattr(attention, f"{name}_bias")) for name in ("query", "query" if tied else "key", "value")]
    query, key, value = project_qkv(x, *weights, *offsets, precision="highest")
    if config.qk_norm == "l2":
        query, key = (scaling.l2_norm(y, epsilon=config.qk_norm_epsilon) for y in (query, key))
    elif config.qk_norm == "rms":
        own = [_value(attention.query_norm_weight), _value(attention.key_norm_weight)]
        scales = (own[0], own[0] if own[1] is None else own[1])
        query, key = (
            scaling.rms_norm(y, s, epsilon=config.qk_norm_epsilon) for y, s in zip((query, key), scales, strict=True)
        )
    found = {"raw_query": query, "raw_key": key, "value": value}
    if config.positions == "rotary":
        turn = functools.partial(
            positions.apply_rotary, positions=jnp.arange(x.shape[-2]), base=config.rotary_base,
            scaling=config.rotary_scaling, length=x.shape[-2], interleaved=config.rotary_interleaved,
        )  # fmt: skip
        query, key = turn(query), turn(key)
    if attention.log_temperature is not None:
        query = scaling.temperature(query, attention.log_temperature[...])
    return {**found, "query": query, "key": key}


def examine(steps: list[Step], called: list[LayerArrays], counted: Mask, limits: Limits) -> Iterator[Finding]:
    """What differs, link by link.

    Args:
        steps: of `walk`.
        called: the layers as the call of the model itself had them, on the same tokens.
        counted: tokens that are no padding, `[B, T]`.
        limits: lines.
    """
    named: dict[tuple[str, str], tuple[list[int], float]] = {}
    for step in steps:
        of_call = called[step.layer] if step.layer == 0 else None  # deeper layers get what the first ones made
        for one in filter(None, (step.arrays, of_call)):
            for role in ("query", "key", "value"):
                found, expected = getattr(one, role), step.expected[role]
                off = _off(found, expected, counted)
                if off > max(OFF, 16 * one.rounding):
                    says = _explain(role, found, step.expected, counted)
                    layers, worst = named.setdefault((f"layer_{role}", says), ([], 0.0))
                    layers += [step.layer] * (step.layer not in layers)
                    named[f"layer_{role}", says] = layers, max(worst, off)
    told = set()
    for (signal, says), (layers, off) in named.items():
        link, _, sentence = says.partition(": ")
        if says in told:
            continue
        told.add(says)
        evidence = f"{sentence} ({where(tuple(layers))}; {off:.2g} of it is off)."
        yield finding(signal, evidence, severity="serious", link=link, layers=tuple(layers), value=off, limit=OFF)
    yield from _merging(steps, counted)
    if not named:
        yield from _wiring(steps, counted)
    yield from _updates(steps, counted, limits)


def _off(found: Array, expected: Array, counted: Mask) -> float:
    """‖found − expected‖ / ‖expected‖ over the tokens that count."""
    if found.shape != expected.shape:
        return float("inf")
    if not np.isfinite(expected[counted]).all():
        return 0.0  # what went before is at fault
    with np.errstate(all="ignore"):
        rest = ((found - expected)[counted] ** 2).sum() / max(float((expected[counted] ** 2).sum()), 1e-30)
    return float(np.sqrt(rest)) if np.isfinite(rest) else float("inf")


def _explain(role: str, found: Array, expected: Mapping[str, Array], counted: Mask) -> str:
    """`link: sentence` of what queries, keys or values are, where they are not what they should be."""
    plain = expected[role]
    raw = expected["value" if role == "value" else f"raw_{role}"]
    name = {"query": "Queries", "key": "Keys", "value": "Values"}[role]
    length, position = found.shape[1], "values" if role == "value" else "positions"
    tries: dict[str, Array] = {} if role == "value" else {f"positions: {name} are not turned by positions": raw}
    if raw.shape[-1] % 2 == 0:
        for interleaved in (False, True):
            for base in (100.0, 1e3, 1e4, 1e5, 5e5, 1e6):
                pairs = "neighbours" if interleaved else "halves"
                turned = reference.rotate(raw, base=base, interleaved=interleaved)
                tries[f"{position}: {name} are turned by rotary positions of base {base:g}, pairs of {pairs}"] = turned
    if role != "value":
        turned, heads = plain, plain.shape[2]
        for what, at in {
            "from the end": np.arange(length)[::-1], "one too far": np.arange(length) + 1,
            "one too near": np.arange(length) - 1, "halved": np.arange(length) // 2, "doubled": 2 * np.arange(length),
        }.items():  # fmt: skip
            for interleaved in (False, True) if raw.shape[-1] % 2 == 0 else ():
                moved = reference.rotate(raw, base=1e4, interleaved=interleaved, at=at)
                tries[f"positions: {name} are turned by positions counted {what}, pairs {interleaved:d}"] = moved
        other = expected["key" if role == "query" else "query"]
        tries[f"projections: {name} are made by W_{'K' if role == 'query' else 'Q'}"] = other
    else:
        tries[f"projections: {name} are the keys"] = expected["raw_key"]
        heads = plain.shape[2]
        for by in (1, -1):
            tries[f"values: {name} are those of the token {by} before"] = np.roll(plain, by, axis=1)
    kept = np.where(counted[..., None, None], raw, 0)  # the module sets padding to 0
    reshaped = np.swapaxes(kept.reshape(len(raw), heads, length, raw.shape[3]), 1, 2)
    cut = f"heads: {name} are cut by a reshape that gives a head some of the tokens"
    tries[cut] = reshaped
    for base, interleaved in (
        ((1e4, False), (1e4, True), (1e6, False)) if role != "value" and raw.shape[-1] % 2 == 0 else ()
    ):
        turned = reference.rotate(reshaped, base=base, interleaved=interleaved)
        tries[f"{cut}, and turned by base {base:g}{', neighbours' if interleaved else ''}"] = turned
    tries[f"heads: {name} have their heads in the opposite order"] = plain[:, :, ::-1]
    for by in (1, -1):
        tries[f"heads: {name} are those of another head"] = np.roll(plain, by, axis=2)
    for says, one in tries.items():
        if one.shape == found.shape and _off(found, one, counted) < OFF:
            return says
    if found.shape == plain.shape and np.isfinite(found[counted]).all():
        factor = float((found[counted] * plain[counted]).sum() / max(float((plain[counted] ** 2).sum()), 1e-30))
        if _off(found, factor * plain, counted) < OFF:
            link = "values" if role == "value" else "scale"
            return f"{link}: {name} are {factor:.3g} times what the parameters give"
    return f"{'values' if role == 'value' else 'projections'}: {name} are not what the parameters give"


def _merging(steps: list[Step], counted: Mask) -> Iterator[Finding]:
    off = {step.layer: _off(step.given["attended"], step.expected["attended"], counted) for step in steps}
    wrong = tuple(layer for layer, x in off.items() if x > max(OFF, 16 * steps[0].arrays.rounding))
    if wrong:
        value = max(off[layer] for layer in wrong)
        evidence = (
            f"What leaves attention is not W_O of what the heads fetched: {value:.0%} of it is off ({where(wrong)})."
        )
        yield finding("layer_output", evidence, severity="serious", layers=wrong, value=value, limit=OFF)


def _wiring(steps: list[Step], counted: Mask) -> Iterator[Finding]:
    """The residual paths."""
    cut: dict[str, list[int]] = {}
    worst = 0.0
    for step in steps:
        off = {says: _off(step.given["out"], one, counted) for says, one in step.branches.items()}
        if off[""] < max(OFF, 16 * step.arrays.rounding):
            continue
        worst = max(worst, off[""])
        fits = [says for says, x in off.items() if x < OFF]
        cut.setdefault(fits[0] if fits else "What leaves the block is not its input and its branches", []).append(
            step.layer
        )
    for says, layers in cut.items():
        signal = "skip" if says in BRANCHES else "block"
        evidence = f"{says} ({where(tuple(layers))}); {worst:.2g} of what leaves it is off."
        yield finding(signal, evidence, severity="serious", layers=tuple(layers), value=worst, limit=OFF)


def _updates(steps: list[Step], counted: Mask, limits: Limits) -> Iterator[Finding]:
    """What attention adds to the stream, beside it."""
    if limits.update_ratio is None or not steps:
        return
    sizes = {
        step.layer: [float(np.sqrt((step.given[name][counted] ** 2).mean())) for name in ("branch", "x")]
        for step in steps
    }
    ratios = {layer: update / max(stream, 1e-30) for layer, (update, stream) in sizes.items()}
    small = tuple(layer for layer, ratio in ratios.items() if ratio < limits.update_ratio)
    if small:
        value = min(ratios[layer] for layer in small)
        evidence = (
            f"RMS(update) / RMS(stream) of attention is {value:.2g} ({where(small)}), limit {limits.update_ratio:g}."
        )
        yield finding("output_size", evidence, severity="notice", layers=small, value=value, limit=limits.update_ratio)
