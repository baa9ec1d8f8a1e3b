"""Known mistakes of an attention function, each as the output that it would give: one link changed, all else right."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from attn_jax.biases import alibi_slopes
from attn_jax.diagnostics import reference
from attn_jax.diagnostics.diagnosis.layer_arrays import Context
from attn_jax.diagnostics.reference import Array, Mask

OFF = 1e-3  # relative difference of numbers that are not the same


class Mistake(NamedTuple):
    """A mistake: the link, what it does in a sentence, what to do about it, and the output that it gives."""

    link: str
    says: str
    mend: str
    make: Callable[[], Array]


def mistakes(of: Context) -> Iterator[Mistake]:
    """Those that can be told apart from attention as it should be, the likely ones first."""
    for group in (_masks, _biases, _heads, _values, _softmaxes, _projections, _positions, _items, _outputs):
        yield from group(of)


def _attended(of: Context, link: str, mend: str, changes: Mapping[str, Mapping[str, Any]]) -> Iterator[Mistake]:
    """Attention with some of its arrays changed."""
    for says, changed in changes.items():
        yield Mistake(link, says, mend, lambda changed=changed: of.attend(**changed))


def _fetched(of: Context, link: str, mend: str, weights: Mapping[str, Array]) -> Iterator[Mistake]:
    """The values, by other weights."""
    for says, one in weights.items():
        yield Mistake(link, says, mend, lambda one=one: reference.outputs(one, of.value))


def _shifted(x: Mask, by: int) -> Mask:
    """Moved along the keys; nothing comes in."""
    moved = np.zeros_like(x)
    if by > 0:
        moved[..., by:] = x[..., :-by]
    else:
        moved[..., :by] = x[..., -by:]
    return moved


def _masks(of: Context) -> Iterator[Mistake]:
    seen, (_, _, length, keys) = of.visible, of.arrays.square
    query_at, key_at = np.arange(length)[:, None], np.arange(keys)
    back = np.broadcast_to(key_at <= query_at, seen.shape)
    dead = np.broadcast_to(~seen.any(axis=(1, 2), keepdims=True), seen.shape)  # keys that nobody sees: padding
    reach = seen | True if (seen & ~back).any() else back
    others = {"The mask is not applied: every key is seen.": seen | True}
    if dead.any():
        others |= {
            "Padding is read: keys past the lengths are seen.": seen | (dead & reach),
            "One padded key is seen.": seen | (dead & _shifted(~dead, 1) & reach),
            "The lengths are read, and the rest of the mask is not.": ~dead,
        }
    others |= {
        "Queries see one key too far ahead.": seen | _shifted(seen, 1),
        "Queries see one key too far back.": seen | (_shifted(seen, -1) & ~dead),
        "Queries see two keys too far ahead.": seen | _shifted(seen, 1) | _shifted(seen, 2),
        "Queries miss the last key that they may see.": seen & _shifted(seen, -1),
        "Queries miss the first key that they may see.": seen & _shifted(seen, 1),
        "Queries miss their own key.": seen & (key_at != query_at),
        "A causal mask is applied that was not asked for.": seen & back,
        "The window is not applied, the causal mask is.": back & ~dead,
        "Later keys are seen, and earlier ones are not.": np.broadcast_to(key_at >= query_at, seen.shape) & ~dead,
        "The mask is inverted.": ~seen,
        "One head's mask serves all.": np.broadcast_to(seen[:, :1], seen.shape),
        "One item's mask serves the batch.": np.broadcast_to(seen[:1], seen.shape),
    }
    ahead = key_at - query_at
    left, right = -np.where(seen, ahead, length).min(), np.where(seen, ahead, -keys).max()
    others |= {
        f"The window is {left - 1} to the left, not {left}.": seen & (ahead > -left),
        f"The window is {right - 1} to the right, not {right}.": seen & (ahead < right),
        f"The window is ({right}, {left}), not ({left}, {right}).": (-ahead <= right) & (ahead <= left) & ~dead,
    }
    if length == keys:
        others["Queries and keys are exchanged in the mask."] = np.swapaxes(seen, -1, -2)
    edges = "Count which keys the first, a middle and the last query see."
    yield from _attended(of, "mask", edges, {says: {"visible": one} for says, one in others.items()})

    logits = of.logits(of.query, of.key)
    late = {"Masked weights are set to 0 after the softmax.": of.weights(logits, seen | True) * seen}
    for low in (0.0, -1.0, -5.0, -10.0):
        hidden = of.weights(np.where(seen, logits, low), seen | True)
        late[f"Masked logits become {low:g}, which does not hide them."] = hidden
    if of.arrays.cap is not None:
        late["The soft cap comes after the mask."] = of.weights(np.where(seen, logits, -1e9), seen | True)
    yield from _fetched(of, "mask", "Make masked logits −∞, after the cap and before the softmax.", late)


def _biases(of: Context) -> Iterator[Mistake]:
    bias, mend = of.arrays.bias, "Add the bias to the scaled scores, before cap, mask and softmax."
    if bias is None:
        return
    others: dict[str, Array | None] = {
        "The bias is not applied.": None,
        "The bias is subtracted.": -bias,
        "The bias is multiplied by the scale.": bias * of.scale[:, None, None],
        "The bias of head 0 serves all.": np.broadcast_to(bias[:, :1], bias.shape),
        "The bias has its heads in the opposite order.": bias[:, ::-1],
        "The bias is added twice.": 2 * bias,
    }
    if bias.shape[-1] == bias.shape[-2]:
        others["The bias has queries and keys exchanged."] = np.swapaxes(bias, -1, -2)
    yield from _attended(of, "bias", mend, {says: {"bias": one} for says, one in others.items()})
    after = of.weights(of.logits(of.query, of.key, bias=None)) + bias
    yield from _fetched(of, "bias", mend, {"The bias is added to the weights.": after})


def _heads(of: Context) -> Iterator[Mistake]:
    query, key, value = of.query, of.key, of.value
    heads, kv_heads = query.shape[2], of.arrays.key.shape[2]
    if heads > kv_heads:
        k, v = (np.tile(x, (1, 1, heads // kv_heads, 1)) for x in (of.arrays.key, of.arrays.value))
        tiled = {
            "Key/value heads are tiled 0, 1, 0, 1 where 0, 0, 1, 1 is due.": {"key": k, "value": v},
            "Key heads are tiled, value heads are not.": {"key": k},
            "Value heads are tiled, key heads are not.": {"value": v},
        }
        yield from _attended(of, "heads", "Query head n reads key/value head n // (N // K).", tiled)
    if heads == 1:
        return
    q0, k0, v0 = (np.broadcast_to(x[:, :, :1], x.shape) for x in (query, key, value))
    back = {name: x[:, :, ::-1] for name, x in (("query", query), ("key", key), ("value", value))}
    changes: dict[str, Mapping[str, Any]] = {
        "All heads use the keys of head 0.": {"key": k0},
        "All heads use the queries of head 0.": {"query": q0},
        "All heads use the values of head 0.": {"value": v0},
        "All heads use the keys and values of head 0.": {"key": k0, "value": v0},
        "Query heads are in the opposite order.": {"query": back["query"]},
        "Key/value heads are in the opposite order.": {"key": back["key"], "value": back["value"]},
        "Key heads are in the opposite order.": {"key": back["key"]},
        "Value heads are in the opposite order.": {"value": back["value"]},
    }
    for by in dict.fromkeys((1, -1, heads // 2)):
        for name, x in (("query", query), ("key", key), ("value", value)):
            changes[f"Heads read the {name} of another head, {by} before them."] = {name: np.roll(x, by, axis=2)}
    keep = "Keep the axis of heads, in order."
    yield from _attended(of, "heads", keep, changes)

    def cut(x: Any) -> Any:
        """A reshape to [B, N, T, H] in place of a transpose."""
        return np.swapaxes(x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3]), 1, 2)

    def merged(x: Array) -> Array:
        return np.swapaxes(x, 1, 2).reshape(x.shape)

    def permuted() -> Array:
        """Each head as the one whose output it has."""
        plain, found = of.attend(), np.asarray(of.arrays.output)
        off = [[np.nansum((found[:, :, n] - plain[:, :, m]) ** 2) for m in range(heads)] for n in range(heads)]
        return plain[:, :, np.argmin(off, axis=1)]

    def averaged() -> Array:
        output = of.attend()
        return np.broadcast_to(output.mean(axis=2, keepdims=True), output.shape)

    def with_dead() -> Array:
        return np.where(np.any(np.asarray(of.arrays.output) != 0, axis=(0, 1, 3))[:, None], of.attend(), 0)

    split = "Reshape to [B, T, N, H], then exchange the two axes."
    group = heads // kv_heads
    pieces = [cut(query), *(np.repeat(cut(x), group, axis=2) for x in (of.arrays.key, of.arrays.value))]
    reshaped = "Heads are cut by a reshape that gives a head some of the tokens."
    yield Mistake("heads", reshaped, split, lambda: of.attend(*pieces))
    yield Mistake("heads", reshaped, split, lambda: merged(of.attend(*pieces)))
    yield Mistake("heads", "Heads are merged without exchanging tokens and heads.", split, lambda: merged(of.attend()))
    yield Mistake("heads", "Heads come out in another order, or one in place of another.", keep, permuted)
    yield Mistake("heads", "Every head gives the mean of all.", keep, averaged)
    yield Mistake("heads", "Some heads give nothing.", "Were they pruned?", with_dead)


def _values(of: Context) -> Iterator[Mistake]:
    value = of.value
    size = np.linalg.norm(value, axis=-1, keepdims=True)
    unit = value / np.where(size == 0, 1, size)
    late = np.concatenate([np.zeros_like(value[:, :1]), value[:, :-1]], axis=1)
    others = {
        "Each key fetches the value of the token before it.": np.roll(value, 1, axis=1),
        "Each key fetches the value of the token after it.": np.roll(value, -1, axis=1),
        "Values are one token late.": late,
        "Values are in the opposite order of tokens.": value[:, ::-1],
        "Values are unit vectors.": unit,
        "Values are normalised.": unit * np.sqrt(value.shape[-1]),
        "Values lose their negative parts.": np.maximum(value, 0),
        "Values go through tanh.": np.tanh(value),
        "Absolute values are fetched.": np.abs(value),
        "Values lose their mean over the tokens.": value - value.mean(axis=1, keepdims=True),
        "The numbers of values are in the opposite order.": value[..., ::-1],
    }
    if value.shape == of.key.shape:
        others["Keys are fetched in place of values."] = of.key
    if value.shape == of.query.shape:
        others["Queries are fetched in place of values."] = of.query
    for interleaved in (False, True) if value.shape[-1] % 2 == 0 else ():
        turned = reference.rotate(value, base=10000.0, interleaved=interleaved)
        others[f"Rotary positions turn the values, too{', interleaved' if interleaved else ''}."] = turned
    own = "Values of the tokens are fetched as they are, by the keys of the same tokens."
    yield from _attended(of, "values", own, {says: {"value": one} for says, one in others.items()})


def _softmaxes(of: Context) -> Iterator[Mistake]:
    raw, seen, cap = of.logits(of.query, of.key), of.visible, of.arrays.cap
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    hidden = np.where(seen, logits, -np.inf)
    top = np.where(seen.any(axis=-1, keepdims=True), hidden.max(axis=-1, keepdims=True), 0)
    raised, shifted = np.where(seen, np.exp(np.clip(logits, -80, 80)), 0), np.exp(hidden - top)
    scores, count = np.where(seen, logits, 0), np.maximum(seen.sum(axis=-1, keepdims=True), 1)
    weights = of.weights(raw)

    def normalised(x: Array, axis: int = -1) -> Array:
        total = x.sum(axis=axis, keepdims=True)
        return x / np.where(total == 0, 1, total)

    others = {
        "The weights of a key sum to 1 over the queries.": normalised(raised, -2),
        "Heads compete for a key: the softmax runs over heads.": normalised(raised, 1),
        "1 is added to the denominator.": raised / (1 + raised.sum(axis=-1, keepdims=True)),
        "1 is added to the shifted denominator.": shifted / (1 + shifted.sum(axis=-1, keepdims=True)),
        "Weights are a sigmoid of each logit.": np.where(seen, 1 / (1 + np.exp(-np.clip(logits, -80, 80))), 0),
        "Weights are exp(s), without the sum.": raised,
        "The scores themselves are the weights.": scores,
        "The scores over their sum are the weights.": normalised(scores),
        "The scores over the number of keys are the weights.": scores / count,
        "Weights are the positive parts of the scores.": normalised(np.where(seen, np.maximum(logits, 0) + 1e-6, 0)),
        "Weights are the squares of the positive parts.": normalised(np.maximum(scores, 0) ** 2),
        "Weights are all alike: the scores are not used.": normalised(seen.astype(float)),
        "All weight goes to the largest score.": normalised(((hidden == top) & seen).astype(float)),
        "Weights are squared.": weights**2,
        "The softmax is taken twice.": of.weights(weights),
    }
    for most in (1.0, 2.0, 5.0, 10.0):
        others[f"Logits are clipped to ± {most:g}."] = of.weights(np.clip(logits, -most, most))
    if of.arrays.sinks is not None:
        others["The sinks are left out of the denominator."] = reference.weights(logits, seen)
    mend = "Softmax over the last axis of [B, N, T, S], the keys that are seen: exp(s − max) over its sum."
    yield from _fetched(of, "softmax", mend, others)
    if cap is not None:
        capped = {
            "The soft cap is not applied.": reference.weights(raw, seen),
            "The soft cap is c·tanh(x).": reference.weights(cap * np.tanh(raw), seen),
        }
        yield from _fetched(of, "scale", "The cap is c·tanh(x/c), after scale and bias.", capped)


def _projections(of: Context) -> Iterator[Mistake]:
    query, key = of.query, of.key
    if query.shape == key.shape:
        others = {
            "Scores are q·q: keys are not used.": {"key": query},
            "Scores are k·k: queries are not used.": {"query": key},
            "Queries and keys are exchanged.": {"query": key, "key": query},
            "Scores have the opposite sign.": {"query": -query},
        }
        yield from _attended(of, "projections", "Scores are q·k of the queries' and keys' own projections.", others)
    own = 0 if of.arrays.bias is None else of.arrays.bias
    size = [np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key)]
    cosines = reference.scores(*(x / np.where(s == 0, 1, s) for x, s in zip((query, key), size, strict=True)))
    apart = ((query[:, :, None] - key[:, None]) ** 2).sum(axis=-1).transpose(0, 3, 1, 2)
    width = query.shape[-1]
    weights = {
        f"Queries and keys are normalised inside, with a factor of {factor:.4g}.": of.weights(factor * cosines + own)
        for factor in (1.0, width**-0.5, width**0.5, float(width), 10.0)
    }
    for factor in (1.0, 0.5):
        says = f"Scores are minus {factor:g} squared distances of q and k."
        weights[says] = of.weights(-factor * apart * of.scale[:, None, None] + own)
    yield from _fetched(of, "scale", "Scores are q·k; a QK-norm belongs to the module.", weights)


def _positions(of: Context) -> Iterator[Mistake]:
    query, key, (_, heads, length, keys) = of.query, of.key, of.arrays.square
    others: dict[str, Mapping[str, Any]] = {}
    for interleaved in (False, True) if query.shape[-1] % 2 == 0 else ():
        for base in (10000.0, 1e6):
            q, k = (reference.rotate(x, base=base, interleaved=interleaved) for x in (query, key))
            kind = f"rotary positions inside, base {base:g}{', interleaved' if interleaved else ''}"
            others |= {
                f"Queries and keys are turned by {kind}.": {"query": q, "key": k},
                f"Queries alone are turned by {kind}.": {"query": q},
                f"Keys alone are turned by {kind}.": {"key": k},
            }
    for by in (1, -1):
        others[f"Keys are those of the token {by} before."] = {"key": np.roll(key, by, axis=1)}
        others[f"Queries are those of the token {by} before."] = {"query": np.roll(query, by, axis=1)}
    distance = np.abs(np.arange(length)[:, None] - np.arange(keys))
    slopes = [
        np.asarray(alibi_slopes(heads), np.float64)[:, None, None],
        *np.reshape([1, 0.5, 0.25, 0.1], (4, 1, 1, 1)),
    ]
    own = 0 if of.arrays.bias is None else of.arrays.bias
    for i, slope in enumerate(slopes):
        name = "ALiBi's slopes" if i == 0 else f"slope {slope.item():g}"
        for sign, way in ((-1, "falls"), (1, "rises")):
            bias = np.broadcast_to(own + sign * slope * distance, of.arrays.square)
            others[f"A bias is added that {way} with the distance, by {name}."] = {"bias": bias}
    once = "Turn queries and keys once, by the positions of their tokens; a position bias is an argument."
    yield from _attended(of, "positions", once, others)


def _items(of: Context) -> Iterator[Mistake]:
    if of.query.shape[0] == 1:
        return
    arrays = {"query": of.query, "key": of.key, "value": of.value}
    apart = "Nothing runs over the batch axis."
    others: dict[str, Mapping[str, Any]] = {}
    for names in (("key",), ("value",), ("query",), ("key", "value")):
        what = " and ".join(names)
        first = {name: np.broadcast_to(arrays[name][:1], arrays[name].shape) for name in names}
        others[f"The {what} of item 0 serves all."] = first
        others[f"The {what} is that of another item."] = {name: np.roll(arrays[name], 1, axis=0) for name in names}
        for axes, over in ((0, "the batch"), ((0, 1), "batch and tokens")):
            centred = {name: arrays[name] - arrays[name].mean(axis=axes, keepdims=True) for name in names}
            others[f"The {what} loses its mean over {over}."] = centred
    yield from _attended(of, "batch", apart, others)
    plain, found = of.attend(), np.nan_to_num(np.asarray(of.arrays.output))
    axes = (1, 2, 3)
    each = (plain * found).sum(axis=axes, keepdims=True) / np.maximum((plain**2).sum(axis=axes, keepdims=True), 1e-30)
    if np.ptp(each) > OFF:
        yield Mistake("batch", "Items are multiplied by numbers of their own.", apart, lambda: each * plain)


def _outputs(of: Context) -> Iterator[Mistake]:
    plain, found = of.attend(), np.asarray(of.arrays.output)
    counted = np.swapaxes(of.known, 1, 2)[..., None]
    x, y = np.where(counted, plain, 0), np.where(counted, found, 0)
    factor = float((x * y).sum() / max((x * x).sum(), 1e-30))
    each = (x * y).sum(axis=(0, 1, 3)) / np.maximum((x * x).sum(axis=(0, 1, 3)), 1e-30)
    size = np.linalg.norm(plain, axis=-1, keepdims=True)
    unit = plain / np.where(size == 0, 1, size)
    rest = (y - x).sum(axis=(0, 1)) / np.maximum(counted.sum(axis=(0, 1)), 1)
    others = {
        f"The output is {factor:.4g} times that of attention.": factor * plain,
        "The output of each head is multiplied by a number of its own.": each[:, None] * plain,
        "Outputs are unit vectors.": unit,
        "Outputs are normalised.": unit * np.sqrt(plain.shape[-1]),
        "The mean over the tokens is taken away from the output.": plain - plain.mean(axis=1, keepdims=True),
        "One vector is added to every output.": plain + rest,
        "Outputs are those of the token before.": np.roll(plain, 1, axis=1),
        "Outputs go through tanh.": np.tanh(plain),
        "Outputs lose their negative parts.": np.maximum(plain, 0),
    }
    for name, added in (("query", of.query), ("key", of.key), ("value", of.value)):
        if added.shape == plain.shape:
            others[f"The {name} is added to the output."] = plain + added
    for says, one in others.items():
        yield Mistake("output", says, "Nothing follows the sum of values; W_O is the module's.", lambda one=one: one)
