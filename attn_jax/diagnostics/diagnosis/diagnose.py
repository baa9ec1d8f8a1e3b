"""The diagnosis: what a model can be asked for, and the findings that come of it."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.diagnosis import behaviour, rules, transformer, weights
from attn_jax.diagnostics.diagnosis.captures import Captures
from attn_jax.diagnostics.diagnosis.findings import Diagnosis, Finding
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.measures import MEASURES, measure_layer
from attn_jax.diagnostics.diagnosis.weights import flax_of
from attn_jax.diagnostics.reference import Array
from attn_jax.typing import ArrayLike

SOWN = "attention_measures"  # the name under which `as_attention_fn(observe=measure_layer)` leaves its measures
Told = Iterator[Finding | tuple[str, str]]


def diagnose(
    subject: Any,
    token_ids: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    *,
    limits: Limits | None = None,
    causal: bool | None = None,
    name: str | None = None,
) -> Diagnosis:
    """Looks at a model's attention, link by link, and says what is not as it should be.

    Args:
        subject: one of

            * a `Transformer` of `attn_jax.nn`, or what `attn_jax.models.load` returns: its calls, layers, weights and
              gradients are looked at, with memory that grows with T for each head;
            * `Captures`: arrays of any framework (`read_captures`);
            * what `as_attention_fn(observe=measure_layer)` sowed: the intermediates of a Flax model;
            * any other function of `token_ids`, or of `token_ids` and `lengths`: its calls; of an `nnx.Module` also its
              weights, found by their names, and what it sows.
        token_ids: int `[B, T]` or `[T]`, an ordinary input; of models alone.
        lengths: int `[B]`, tokens of each row that count.
        limits: lines; None: `Limits()`.
        causal: whether a function without a configuration is meant to look back only; None: not known.
        name: of the subject, for the report.

    Returns:
        A `Diagnosis`: ranked findings, measures, and what could not be looked at.

    Raises:
        TypeError: on a subject that is none of these, or limits that are none.
        ValueError: if a model has no tokens to look at, or something else has.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import Captures
    >>> rng = np.random.default_rng(0)
    >>> arrays = {f"layers.0.{name}": rng.standard_normal((16, 2, 32)) for name in ("query", "key", "value")}
    >>> diagnose(Captures.of(arrays)).ok
    True
    """
    limits = Limits() if limits is None else limits
    if not isinstance(limits, Limits):
        raise TypeError(f"limits must be Limits, got {type(limits).__name__}")
    if causal is not None:
        checks.boolean("causal", causal)
    model = getattr(subject, "model", subject)
    if isinstance(subject, (Captures, Mapping)):
        if token_ids is not None or lengths is not None:
            raise ValueError("token_ids and lengths go with a model, not with what was captured or sown")
        if isinstance(subject, Captures):
            return _of_captures(subject, limits, name or subject.source)
        return _of_measures(sown(subject), limits, name or "sown measures")
    if not callable(model):
        raise TypeError(
            "subject must be a model, Captures, or what as_attention_fn(observe=measure_layer) sowed, "
            f"got {type(subject).__name__}"
        )
    if token_ids is None:
        raise ValueError("token_ids must be given for a model: what it is looked at with")
    tokens, counts = _tokens(token_ids, lengths)
    config = getattr(model, "config", None)
    name = name or str(getattr(subject, "source", "") or type(model).__name__)
    if config is not None and hasattr(config, "layer_attention"):
        counted = np.arange(tokens.shape[1]) < (tokens.shape[1] if counts is None else counts[:, None])
        checks.within("token_ids", np.where(counted, tokens, 0), 0, config.vocabulary_size - 1)
        measures = {}
        if transformer.attends(model):
            measures = transformer.measure(model, tokens, counts)
        return _gathered(name, measures, limits, transformer.examine(model, tokens, counts, limits))
    return _of_function(model, tokens, limits, causal, name)


def _tokens(token_ids: ArrayLike, lengths: ArrayLike | None) -> tuple[Array, Array | None]:
    tokens = np.asarray(checks.integer_array("token_ids", token_ids))
    tokens = tokens[None] if tokens.ndim == 1 else tokens
    checks.rank("token_ids", tokens, 2, "[B, T] or [T]")
    if lengths is None:
        return tokens, None
    counts = np.asarray(checks.integer_array("lengths", lengths)).reshape(-1)
    checks.shape("lengths", counts, tokens.shape[:1], "[B]")
    return tokens, counts


def _gathered(name: str, measures: Mapping[str, Array], limits: Limits, told: Told) -> Diagnosis:
    """The findings of the measures and others."""
    findings, skipped = list(rules.judge(measures, limits)), []
    if "non_finite" in measures:
        findings += _non_finite(measures)
    for one in told:
        if isinstance(one, Finding):
            findings.append(one)
        else:
            skipped.append(one)
    return Diagnosis(name, tuple(findings), measures, tuple(skipped))


def _non_finite(measures: Mapping[str, Array]) -> Iterator[Finding]:
    count = measures["non_finite"]
    if (count > 0).any():
        at = np.argwhere(count > 0)
        layers = tuple(dict.fromkeys(int(layer) for layer, _ in at))
        heads = tuple((int(layer), int(head)) for layer, head in at)
        evidence = f"{int(count.sum())} rows have logits that are not finite, first in layer {layers[0]}."
        yield rules.finding(
            "non_finite", evidence, severity="serious", layers=layers, heads=heads, value=float(count.max()), limit=0.0
        )


def _of_captures(captures: Captures, limits: Limits, name: str) -> Diagnosis:
    """Layer by layer: one mask and one set of shapes is compiled once."""
    arrays = {n: captures.layer_arrays(n) for n in captures.layers}
    rows = []
    for own in arrays.values():
        scale = np.full(own.query.shape[-2], own.query.shape[-1] ** -0.5) if own.scale is None else own.scale
        three = (jnp.asarray(x, jnp.float32) for x in (own.query, own.key, own.value))
        mask = None if own.visible is None else jnp.asarray(own.visible)
        found = _measured(*three, mask=mask, scale=jnp.asarray(scale, jnp.float32))
        rows.append({key: np.asarray(x, np.float64) for key, x in found.items()})
    measures = _stacked(rows)
    skipped = [("captures", problem) for problem in captures.problems]
    told = list(transformer.functions(dict(enumerate(arrays.values()))))
    if list(arrays) != list(range(len(arrays))):
        skipped.append(("layers", f"they are numbered {', '.join(map(str, arrays))} in the file"))
    return _gathered(name, measures, limits, iter([*told, *skipped]))


_measured = jax.jit(measure_layer)


def _stacked(rows: list[dict[str, Array]]) -> dict[str, Array]:
    """`[L, N]`, NaN where a layer has fewer heads."""
    if not rows:
        return {}
    most = max(len(row["max_logit"]) for row in rows)
    stacked = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        padded = [x if x.ndim == 0 else np.pad(x, (0, most - len(x)), constant_values=np.nan) for x in values]
        stacked[key] = np.stack(padded)
    return stacked


def sown(intermediates: Mapping[Any, Any]) -> dict[str, Array]:
    """The measures in what a Flax model sowed, `[L, N]` and `[L]`, layers in the order of their names.

    Raises:
        ValueError: if there are none.
    """
    rows = [row for _, row in sorted(_rows(intermediates), key=lambda pair: pair[0])]
    if not rows:
        raise ValueError(
            f"subject must hold {SOWN}, which as_attention_fn(observe=measure_layer) sows where a module is called "
            f"with sow_weights=True; got {', '.join(map(str, intermediates)) or 'nothing'}"
        )
    return _stacked([one for row in rows for one in _unstacked(row)])


def _rows(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, dict[str, Array]]]:
    for key, branch in tree.items():
        if str(key) == SOWN:
            value = branch.get_value() if hasattr(branch, "get_value") else branch  # of an NNX state
            value = value[-1] if isinstance(value, (tuple, list)) else value  # of several calls the last
            if isinstance(value, Mapping):
                arrays = {name: np.asarray(x, np.float64) for name, x in value.items() if name in MEASURES}
                yield path, arrays
        elif isinstance(branch, Mapping):
            yield from _rows(branch, (*path, _order(key)))


def _order(key: Any) -> tuple[str, int]:
    digits = re.search(r"\d+", str(key))
    return re.sub(r"\d+", "", str(key)), int(digits.group()) if digits else 0


def _unstacked(row: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The layers of a module that runs under a scan, or the one of another."""
    if row["max_logit"].ndim == 1:
        return [dict(row)]
    return [{name: x[layer] for name, x in row.items()} for layer in range(len(row["max_logit"]))]


def _of_measures(measures: Mapping[str, Array], limits: Limits, name: str) -> Diagnosis:
    return _gathered(name, measures, limits, iter(()))


def _of_function(model: Callable[..., Any], tokens: Array, limits: Limits, causal: bool | None, name: str) -> Diagnosis:
    """A model that only has calls; an NNX module has weights, and perhaps sows."""
    takes_lengths = _takes_lengths(model)
    few, others = transformer.probes(tokens, max(int(tokens.max()) + 1, 2))
    most = tokens.shape[1]
    few, others = few[:, :most], others[:, :most]

    nnx = flax_of(model)
    call: Any = lambda model, *given: (model(*given), {})  # noqa: E731  a module's call is one that may sow
    if nnx is not None:
        call = nnx.capture(nnx.Intermediate)(lambda model, *given: model(*given))

    def run(token_ids: Array, lengths: Array | None) -> Array:
        given = (jnp.asarray(token_ids),) if lengths is None else (jnp.asarray(token_ids), jnp.asarray(lengths))
        output, _ = call(model, *given)
        return np.asarray(output[0] if isinstance(output, (tuple, list)) else output, np.float64)

    calls = behaviour.Calls(run, few, others, causal, takes_lengths, None)
    told: list[Any] = []
    measures: Mapping[str, Array] = {}
    try:
        told += behaviour.examine(calls)
    except Exception as error:  # somebody's function
        told.append(("calls", f"it raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"))
    if nnx is not None:
        told += weights.examine(weights.of_parameters(model), limits)
        _, left = call(model, jnp.asarray(tokens))
        if any(True for _ in _rows(left)):
            measures = sown(left)
        else:
            told.append(("layers", "it sows no measures: build it with as_attention_fn(observe=measure_layer)"))
    return _gathered(name, measures, limits, iter(told))


def _takes_lengths(model: Callable[..., Any]) -> bool:
    try:
        return "lengths" in inspect.signature(model).parameters
    except (TypeError, ValueError):
        return False
