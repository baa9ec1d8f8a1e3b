"""Everything that can be looked at in a transformer of `attn_jax.nn`: its layers, blocks, calls, weights, gradients."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics.diagnosis import behaviour, blocks, gradients, weights
from attn_jax.diagnostics.diagnosis.explanation import OFF, explain
from attn_jax.diagnostics.diagnosis.findings import Finding
from attn_jax.diagnostics.diagnosis.layer_arrays import LayerArrays, capture_layer, layers_of
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.measures import measure_layer
from attn_jax.diagnostics.diagnosis.rules import where
from attn_jax.diagnostics.diagnosis.words import finding
from attn_jax.diagnostics.reference import Array

PROBE = (2, 24)  # items and tokens of what is looked at closely
PIECES = 4  # of a sequence that is decoded
MOST_LOGITS = 5 * 10**7  # that are made at once for a loss
EIGHTHS, LEAST = 8, 64  # parts of a sequence, and tokens in each, for a loss by position
ALWAYS = ("two_calls", "outputs")  # what calls show whatever else is wrong
ACTS = 1e-4  # of the logits, what positions change at least
TEMPERATURE = 8.0  # or its inverse: beyond it a learned temperature is told of


@dataclasses.dataclass(frozen=True)
class Observer:
    """Calls `function` with the attention function of a layer: equal ones share a trace."""

    function: Callable[..., Any]
    attention_fn: Callable[..., Any]

    def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return self.function(query, key, value, attention_fn=self.attention_fn, **options)


def probes(token_ids: Any, vocabulary: int) -> tuple[Any, Any]:
    """A few of the tokens, two items at least, and others that differ from them everywhere."""
    rng, (items, length) = np.random.default_rng(0), PROBE
    few = token_ids.reshape(-1, token_ids.shape[-1])[:items, :length]
    if len(few) < items:
        few = np.concatenate([few, rng.permutation(few[0])[None]])
    if few.shape[1] < length:
        more = rng.integers(0, vocabulary, (items, length - few.shape[1]))
        few = np.concatenate([few, more], axis=1)
    others = (few + rng.integers(1, max(vocabulary, 2), few.shape)) % vocabulary
    return few.astype(np.int32), others.astype(np.int32)


def measure(model: Any, token_ids: Any, lengths: Any) -> dict[str, Array]:
    """The measures of all layers, `[L, N]` or `[L]`, float64."""
    found = _measure(model, jnp.asarray(token_ids), None if lengths is None else jnp.asarray(lengths))
    return {name: np.asarray(x, np.float64) for name, x in found.items()}


@jax.jit
def _measure(model: Any, token_ids: Any, lengths: Any) -> dict[str, Any]:
    observer = Observer(measure_layer, model.config.attention_fn)
    return model(token_ids, lengths, observe=observer)[1]  # under jit, so that nobody computes the logits


def attends(model: Any) -> bool:
    """Whether every layer has attention, so that all can be observed."""
    return None not in model.config.layer_attention


def examine(model: Any, token_ids: Any, lengths: Any, limits: Limits) -> Iterator[Finding | tuple[str, str]]:
    """Findings, and what could not be looked at with the reason."""
    config = model.config
    few, others = probes(token_ids, config.vocabulary_size)
    if config.max_length is not None:
        few, others = few[:, : config.max_length], others[:, : config.max_length]
    found: list[Finding] = []
    if attends(model):
        for part in (_layers, _no_positions, _temperatures):
            try:
                found += part(model, few, limits)
            except (ValueError, TypeError, AttributeError, NotImplementedError) as error:  # of parts that are not ours
                yield part.__name__.strip("_"), _line(error)
    else:
        yield "layers", "some have another mixer than attention"
    yield from found
    layers = weights.of_transformer(model)
    yield from weights.examine(layers, limits, tied=config.tie_query_key)
    explained = {one.signal for one in found if one.severity == "serious"}
    calls = behaviour.Calls(
        run=lambda token_ids, lengths: _outputs(model, token_ids, lengths),
        token_ids=few,
        others=others,
        causal=config.causal,
        takes_lengths=not explained,
        meant_to_order=config.positions is not None and "no_positions" not in {one.signal for one in found},
        decode=_decoder(model) if config.causal and not explained else None,
        rounding=float(jnp.finfo(config.dtype or config.param_dtype).eps),
    )
    try:
        seen = list(behaviour.examine(calls))
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:  # of parts that are not ours
        yield "calls", _line(error)
        seen = []
    # What a wrong function, projection or position explains is not told of again.
    told = {"order"} if "no_positions" in {one.signal for one in found} else set()
    yield from (one for one in seen if one.signal not in told and (not explained or one.signal in ALWAYS))
    if not explained and not any(one.severity == "serious" for one in seen):
        yield from gradients.examine(model, few, limits)
    yield from _loss_by_position(model, token_ids, lengths, limits)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _outputs(model: Any, token_ids: Any, lengths: Any) -> Array:
    lengths = None if lengths is None else jnp.asarray(lengths)
    return np.asarray(model(jnp.asarray(token_ids), lengths), np.float64)


def _decoder(model: Any) -> Callable[[Array], Array]:
    """The outputs of tokens that come in pieces."""

    def decode(token_ids: Array) -> Array:
        items, length = token_ids.shape
        caches, pieces = model.empty_cache(items, length), []
        for piece in np.split(token_ids, PIECES, axis=1):
            outputs, caches = model.extend(jnp.asarray(piece), caches)
            pieces.append(np.asarray(outputs, np.float64))
        return np.concatenate(pieces, axis=1)

    return decode


def _capture(model: Any, token_ids: Any, lengths: Any) -> list[LayerArrays]:
    lengths = None if lengths is None else jnp.asarray(lengths)
    return layers_of(_captured(model, jnp.asarray(token_ids), lengths))


@jax.jit
def _captured(model: Any, token_ids: Any, lengths: Any) -> dict[str, Any]:
    return model(token_ids, lengths, observe=Observer(capture_layer, model.config.attention_fn))[1]


def _layers(model: Any, few: Any, limits: Limits) -> Iterator[Finding]:
    """Attention functions and blocks, with padding in the second item."""
    items, length = few.shape
    lengths: Any = np.array([length] + [length - length // 3] * (items - 1))
    try:
        called = _capture(model, few, lengths)
    except (TypeError, ValueError):  # an attention function that has no lengths
        lengths = np.full(items, length)
        called = _capture(model, few, None)
    yield from functions(dict(enumerate(called)))
    padded = (lengths < length).any()
    steps = blocks.walk(model, jnp.asarray(few), jnp.asarray(lengths) if padded else None)
    yield from blocks.examine(steps, called, np.arange(length) < lengths[:, None], limits)


def functions(layers: dict[int, LayerArrays]) -> Iterator[Finding]:
    """What attention functions return beside what was asked for; one finding for all layers that have one mistake."""
    told: dict[tuple[str, str, str], dict[int, Array]] = {}
    for n, arrays in layers.items():
        if arrays.output is None:
            continue
        finite = np.isfinite(arrays.query).all() and np.isfinite(arrays.key).all() and np.isfinite(arrays.value).all()
        if finite and not np.isfinite(arrays.output).all():
            share = 1 - float(np.isfinite(arrays.output).mean())
            evidence = f"{share:.1%} of what attention returns is not finite where q, k and v are (layer {n})."
            yield finding("outputs", evidence, severity="serious", layers=(n,), value=share, limit=0.0)
        if (one := explain(arrays)) is not None:
            told.setdefault((one.link, one.says, one.mend), {})[n] = one.misfit
    for (link, says, mend), misfits in told.items():
        pairs = [(n, int(head)) for n, misfit in misfits.items() for head in np.argsort(-misfit) if misfit[head] > OFF]
        worst = max(float(misfit.max()) for misfit in misfits.values())
        evidence = f"{says} ({where(tuple(misfits))}; attention as asked for leaves {worst:.2g} of the output over.)"
        severity = "notice" if link == "numerics" else "serious"
        yield finding(
            "attention_function", evidence, severity=severity, link=link, mend=mend, layers=tuple(misfits),
            heads=tuple(pairs), value=worst, limit=OFF,
        )  # fmt: skip


def _no_positions(model: Any, few: Any, limits: Limits) -> Iterator[Finding]:
    """One token again and again: whether scores tell its places apart, in any layer."""
    del limits
    same = np.broadcast_to(few[:1, :1], few.shape)
    try:
        captured = _capture(model, same, np.full(len(same), same.shape[1]))
    except (TypeError, ValueError):  # an attention function that has no lengths
        captured = _capture(model, same, None)
    for arrays in captured:
        group = arrays.query.shape[2] // arrays.key.shape[2]
        key = np.repeat(arrays.key, group, axis=2)
        scale = np.ones(1) if arrays.scale is None else arrays.scale
        logits = scale[:, None, None] * np.einsum("btnh,bsnh->bnts", arrays.query, key)
        logits = logits if arrays.bias is None else logits + arrays.bias
        norms = [np.linalg.norm(x, axis=-1).max() for x in (arrays.query, key)]
        size = np.abs(scale).max() * norms[0] * norms[1]
        if size == 0 or not np.isfinite(logits).all() or np.ptp(logits, axis=-1).max() > ACTS * size:
            return
    meant = model.config.positions
    severity = {None: "notice", "relative": "information"}.get(meant, "serious")
    said = "the configuration has none" if meant is None else f"the configuration says {meant}"
    evidence = f"Scores of one token at {few.shape[1]} places are all alike in every layer; {said}."
    yield finding("no_positions", evidence, severity=severity, value=0.0, limit=ACTS)


def _temperatures(model: Any, few: Any, limits: Limits) -> Iterator[Finding]:
    """Learned temperatures that soften or sharpen the softmax many times over."""
    del few, limits
    if not model.config.learned_temperature:
        return
    logs = np.stack([np.asarray(model.layer(n).attention.log_temperature[...]) for n in range(model.config.num_layers)])
    far = np.argwhere(np.abs(logs) > math.log(TEMPERATURE))
    if not len(far):
        return
    layers, heads = tuple(dict.fromkeys(int(n) for n, _ in far)), tuple((int(n), int(head)) for n, head in far)
    worst = float(np.exp(logs.flat[np.abs(logs).argmax()]))
    evidence = f"Logits are divided by temperatures of up to {worst:.3g} ({where(layers, heads)})."
    yield finding(
        "temperature", evidence, severity="notice", layers=layers, heads=heads, value=worst, limit=TEMPERATURE
    )


def _loss_by_position(model: Any, token_ids: Any, lengths: Any, limits: Limits) -> Iterator[Finding | tuple[str, str]]:
    """Of decoders the loss of each eighth of the positions."""
    config, token_ids = model.config, token_ids.reshape(-1, token_ids.shape[-1])
    items, length = token_ids.shape
    part = (length - 1) // EIGHTHS
    logits = token_ids.size * config.vocabulary_size
    if limits.loss_cliff is None or not config.causal or config.head is None or lengths is not None:
        return
    if logits > MOST_LOGITS:
        yield "loss by position", f"it would take {logits:,} logits at once, and {MOST_LOGITS:,} is the most"
        return
    if part * items < LEAST:
        return
    loss = np.asarray(_losses(model, jnp.asarray(token_ids)), np.float64).mean(axis=0)
    means = loss[: part * EIGHTHS].reshape(EIGHTHS, part).mean(axis=1)
    rise = means - np.minimum.accumulate(means)
    if np.isfinite(means).all() and rise.max() > limits.loss_cliff:
        at = int(rise.argmax())
        evidence = (
            f"The loss of positions {at * part} to {(at + 1) * part} is {means[at]:.2f} nats, {rise.max():.2f} above "
            "that of earlier ones."
        )
        yield finding("loss_cliff", evidence, severity="notice", value=float(rise.max()), limit=limits.loss_cliff)


@jax.jit
def _losses(model: Any, token_ids: Any) -> Any:
    logits = jax.nn.log_softmax(model(token_ids)[:, :-1])
    return -jnp.take_along_axis(logits, token_ids[:, 1:, None], axis=-1)[..., 0]
