"""From the measures of layers and heads to findings: the signals of `signals`, and those that need a whole model.

Serious needs two signals that agree, or a share of the heads: healthy models have sharp heads, sinks and large logits.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from attn_jax.diagnostics.diagnosis.findings import SEVERITIES, Finding
from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.signals import SIGNALS, Array, Sight, Signal
from attn_jax.diagnostics.diagnosis.words import WORDS, finding

Measures = Mapping[str, Array]
Places = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
HALF = 0.5
ORDINARY_SD, LARGE_SCALE, SMALL_SCALE = 2.0, 1.5, 0.67
WIDTHS = (32, 128)  # head widths in common use
FEW = 8  # keys or dimensions of which little can be said


def judge(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """All findings that the measures give; those whose measures a subject does not have are left out."""
    for signal in SIGNALS:
        if signal.name in WORDS and signal.limit(limits) is not None and set(signal.needs) <= set(measures):
            yield from _of_signal(signal, measures, limits)
    for needs, rule in _RULES:
        if set(needs) <= set(measures):
            yield from rule(measures, limits)


def _of_signal(signal: Signal, measures: Measures, limits: Limits) -> Iterator[Finding]:
    """One finding of a signal, over all layers."""
    sight = Sight({name: np.where(np.isfinite(x), x, np.nan) for name, x in measures.items()})
    levels, beyond = (x[0] for x in signal.judge(sight, limits))
    if not levels.any():
        return
    level, values = int(levels.max()), signal.values(sight, limits)[0]
    limit = signal.limit(limits, level)
    assert limit is not None
    worst, (layers, heads) = _worst(values, beyond, above=signal.above)
    changes = {}
    if signal.name == "sharp_entropy" and level > 1:
        changes = _why_sharp(measures, layers)
    elif signal.name in ("max_logit", "logit_sd") and _ratio(measures, layers) > LARGE_SCALE:
        changes = {"link": "scale", "cause": "The scale on q·k is larger than 1/√H."}
    elif signal.name == "dead_output" and beyond.all(axis=-1).any():
        changes = {"link": "values", "cause": "No head of a layer fetches anything."}
    evidence = f"{signal.says[:1].upper()}{signal.says[1:]} {worst:.3g} ({where(layers, heads)}), limit {limit:g}."
    yield finding(
        signal.name, evidence, severity=SEVERITIES[level - 1], layers=layers, heads=heads, value=worst, limit=limit,
        **changes,
    )  # fmt: skip


def _why_sharp(measures: Measures, layers: tuple[int, ...]) -> dict[str, str]:
    """Sharp rows of ordinary logits come from the mask; those of large ones from the scale, or from the projections."""
    if np.nanmedian(measures["logit_sd"][list(layers)]) < ORDINARY_SD:
        cause = "Logits are ordinary, so few keys are left to choose from."
        check = "visible keys per row, padding, and the share of the sink."
        return {"link": "mask", "cause": cause, "check": check, "mend": "the mask."}
    return {} if _ratio(measures, layers) > LARGE_SCALE else {"link": "projections"}


def _ratio(measures: Measures, layers: tuple[int, ...]) -> float:
    return float(np.nanmedian(measures["scale_ratio"][list(layers)])) if "scale_ratio" in measures else 1.0


def _scale(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """A scale that was asked for and is not 1/√H: some mean it; large logits say that it is none of them."""
    ratio = measures["scale_ratio"]
    unit = np.abs(measures["query_norm"] - 1) < 0.01  # of vectors of length one: the scale says all
    off = (np.abs(ratio - 1) > 0.01) & ~unit
    if not off.any():
        return
    _, (layers, heads) = _worst(np.abs(np.log(ratio)), off, above=True)
    value, width = float(ratio[heads[0]]), int(measures["head_width"][layers[0]])
    spread = float(np.nanmedian(measures["logit_sd"][list(layers)]))
    taken = float(np.nanmean(measures["saturated"][list(layers)]))
    large = (limits.saturated is not None and taken > limits.saturated) or (
        limits.logit_sd is not None and spread > limits.logit_sd
    )
    evidence = (
        f"The scale is {value:.3g} times 1/√{width} ({where(layers, heads)}); logits have sd {spread:.3g}, and "
        f"{taken:.0%} of the rows put nearly all weight on one key."
    )
    severity = "serious" if value > LARGE_SCALE and large else "notice"
    yield finding("scale_ratio", evidence, severity=severity, layers=layers, heads=heads, value=value, limit=1.0)


def _uniform(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """Rows that are uniform everywhere: queries and keys do not matter yet, or never will."""
    entropy, known = measures["normalized_entropy"], np.isfinite(measures["normalized_entropy"])
    if limits.uniform_entropy is None or limits.small_logit_sd is None:
        return
    flat = np.where(known, entropy > limits.uniform_entropy, True).all(axis=1) & known.any(axis=1)
    if limits.token_cosine is not None and "token_cosine" in measures:
        flat &= ~(measures["token_cosine"] > limits.token_cosine)  # of keys that have become alike
    if not flat.any():
        return
    layers = tuple(np.flatnonzero(flat).tolist())
    spread = np.nanmax(measures["logit_sd"][flat], axis=1)
    notice = spread.min() < limits.small_logit_sd
    norms = [np.nanmedian(measures[name][flat]) for name in ("query_norm", "key_norm")]
    evidence = (
        f"Every head of {where(layers)} spreads its weight evenly: the smallest logit sd is {spread.min():.2g}, the "
        f"median |q| {norms[0]:.2g} and |k| {norms[1]:.2g}."
    )
    changes = {}
    if _ratio(measures, layers) < SMALL_SCALE:
        changes = {"link": "scale", "cause": "The scale is smaller than 1/√H."}
    yield finding(
        "uniform_entropy", evidence, severity="notice" if notice else "information", layers=layers,
        value=float(spread.min()), limit=limits.small_logit_sd, **changes,
    )  # fmt: skip


def _rank(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """Scores of next to no rank: heads that tell but one direction apart."""
    if limits.score_rank is None:
        return
    most = np.minimum(measures["head_width"], measures["key_slots"] - 1)[:, None]
    share = np.where(most > FEW, measures["score_rank"] / np.maximum(most, 1), np.nan)
    low = share < limits.score_rank
    low &= (low.mean(axis=1) >= HALF)[:, None]
    if low.any():
        worst, (layers, heads) = _worst(share, low, above=False)
        evidence = f"Centred scores have an effective rank of {worst:.1%} of the head width ({where(layers, heads)})."
        yield finding(
            "score_rank", evidence, severity="notice", layers=layers, heads=heads, value=worst, limit=limits.score_rank
        )


def _collapse(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """Tokens that become alike with depth."""
    cosine = measures["token_cosine"]
    if limits.token_cosine is None or not (alike := cosine > limits.token_cosine).any():
        return
    layers = tuple(np.flatnonzero(alike).tolist())
    serious = (
        bool(alike[len(alike) // 2 :].all()) and not alike[0] and alike.sum() > 1 and _even(measures, limits, alike)
    )
    value = float(np.nanmax(cosine))
    evidence = f"Values of two tokens have a mean cosine of {value:.3f} ({where(layers)}); in layer 0 {cosine[0]:.3f}."
    changes = {} if serious else {"cause": "The input is of one kind, values have a bias, or tokens become alike."}
    yield finding(
        "token_cosine", evidence, severity="serious" if serious else "notice", layers=layers, value=value,
        limit=limits.token_cosine, **changes,
    )  # fmt: skip


def _even(measures: Measures, limits: Limits, layers: Array) -> bool:
    """Whether weights are even there, as those of equal keys are; late tokens of a healthy model may be alike, too."""
    if "normalized_entropy" not in measures or limits.uniform_entropy is None:
        return False
    return bool(np.nanmedian(measures["normalized_entropy"][layers]) > limits.uniform_entropy)


def _distance(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """Heads that choose, and never by distance."""
    ratio, entropy = measures["distance_ratio_no_sink"], measures["normalized_entropy_no_sink"]
    if limits.distance_change is None or not np.isfinite(ratio).any():
        return
    most = float(np.nanmax(np.abs(ratio - 1)))
    if ratio.size > FEW and most < limits.distance_change and np.nanmedian(entropy) < 0.8:
        evidence = f"No head's mean distance is more than {most:.1%} from that of uniform weights."
        yield finding("distance_ratio", evidence, severity="information", value=most, limit=limits.distance_change)


def _mask(measures: Measures, limits: Limits) -> Iterator[Finding]:
    """What the mask leaves visible."""
    del limits
    ahead, past, own, seen = (measures[name] for name in ("future_keys", "past_share", "own_share", "visible_keys"))
    long = measures["key_slots"] > FEW
    looking = np.isfinite(ahead) & (ahead > 0.5)
    narrow = looking & (ahead <= 2) & (past > 0.99) & long
    among = looking if (ahead == 0).mean() > HALF else narrow
    if among.any():
        layers, value = tuple(np.flatnonzero(among).tolist()), float(ahead[among].max())
        what = "see all keys before them and" if narrow.any() else "of most layers see no key ahead, but these"
        evidence = f"Queries {what} {value:.2g} after ({where(layers)})."
        yield finding("future_keys", evidence, severity="serious", layers=layers, value=value, limit=0.0)
    blind = (own < HALF) & (past > HALF)
    if blind.any():
        layers, value = tuple(np.flatnonzero(blind).tolist()), float(own[blind].min())
        evidence = f"{1 - value:.0%} of the queries do not see their own key ({where(layers)})."
        yield finding("own_share", evidence, severity="notice", layers=layers, value=value, limit=1.0)
    alone = (seen <= 1) & long
    if alone.any():
        layers = tuple(np.flatnonzero(alone).tolist())
        evidence = f"Half of the queries see one key or none ({where(layers)})."
        limit = float(measures["key_slots"][layers[0]])
        yield finding("visible_keys", evidence, severity="notice", layers=layers, value=1.0, limit=limit)


def _widths(measures: Measures, limits: Limits) -> Iterator[Finding]:
    del limits
    width = measures["head_width"]
    odd = (width < WIDTHS[0]) | (width > WIDTHS[1])
    if odd.any():
        layers, value = tuple(np.flatnonzero(odd).tolist()), float(width[odd][0])
        evidence = f"Heads are {value:g} wide; {WIDTHS[0]} to {WIDTHS[1]} are common."
        limit = float(WIDTHS[int(value > WIDTHS[1])])
        yield finding("head_width", evidence, severity="information", layers=layers, value=value, limit=limit)


_RULES = (
    (("scale_ratio", "query_norm", "logit_sd", "saturated", "head_width"), _scale),
    (("normalized_entropy", "logit_sd", "query_norm", "key_norm"), _uniform),
    (("score_rank", "head_width", "key_slots"), _rank),
    (("token_cosine",), _collapse),
    (("distance_ratio_no_sink", "normalized_entropy_no_sink"), _distance),
    (("future_keys", "past_share", "own_share", "visible_keys", "key_slots"), _mask),
    (("head_width",), _widths),
)


def _worst(values: Array, beyond: Array, *, above: bool) -> tuple[float, Places]:
    """The worst value, the layers, and the pairs of layer and head, the worst first; no pairs of values of layers."""
    at = np.argwhere(beyond)
    order = np.argsort([-values[tuple(x)] if above else values[tuple(x)] for x in at], kind="stable")
    pairs = [(int(at[i][0]), int(at[i][1])) for i in order]
    layers = tuple(sorted({layer for layer, _ in pairs}))
    return float(values[pairs[0]]), (layers, tuple(pairs) if values.shape[-1] > 1 else ())


def where(layers: tuple[int, ...], heads: tuple[tuple[int, int], ...] = ()) -> str:
    """`layer 3, head 5; also 7 heads of layers 3, 4`."""
    if not heads:
        return f"layer {layers[0]}" if len(layers) == 1 else f"layers {_list(layers)}"
    (layer, head), others = heads[0], len(heads) - 1
    also = f"; also {others} head{'s' if others > 1 else ''}" if others else ""
    return f"layer {layer}, head {head}{also}" + (f" of layers {_list(layers)}" if len(layers) > 1 else "")


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
