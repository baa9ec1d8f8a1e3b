"""Attention, its gradients, its masks and its statistics in NumPy float64: what every implementation is held to.

Nothing here knows `attn_jax` or JAX. Shapes and letters are the package's: query `[*B, T, N, H]`, key `[*B, S, K, H]`,
value `[*B, S, K, V]`, everything square `[*B, N, T, S]`.

A lazy mask or bias is here a plain function of positions: it is called with query positions `[*B, 1, T, 1]` and key
positions `[*B, 1, 1, S]` and returns what broadcasts to `[*B, N, T, S]`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Lazy = Callable[[np.ndarray, np.ndarray], Any]


@dataclasses.dataclass(frozen=True)
class Attention:
    """One forward pass with all that lies on the way."""

    output: np.ndarray  # [*B, T, N, V]
    weights: np.ndarray  # [*B, N, T, S], before dropout, the sink in the denominator
    logsumexp: np.ndarray  # [*B, T, N], without the sink
    raw_logits: np.ndarray  # [*B, N, T, S], scale and bias applied, before the cap; 0 where not visible
    logits: np.ndarray  # [*B, N, T, S], after the cap; -inf where not visible
    visible: np.ndarray  # [*B, N, T, S]
    key_weights: np.ndarray  # [*B, N, T, S], renormalised over the visible keys, that is without the sink
    sink_share: np.ndarray  # [*B, N, T]
    query_positions: np.ndarray  # [*B, T]
    key_positions: np.ndarray  # [*B, S]
    query: np.ndarray  # what nobody may see set to 0
    key: np.ndarray
    value: np.ndarray
    scale: np.ndarray  # [N]
    soft_cap: float | None
    kept: np.ndarray  # [*B, N, T, S], 0 for a dropped weight, 1 / (1 - rate) for a kept one


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_offset=0,
    query_positions=None,
    key_positions=None,
    logits_soft_cap=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_keep=None,
) -> Attention:
    """Softmax attention by its definition."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, T, N, H = query.shape
    S, K = key.shape[-3:-1]
    batch, square = tuple(batch), (*batch, N, T, S)
    scale = np.broadcast_to(1 / math.sqrt(H) if scale is None else np.asarray(scale, np.float64), (N,))

    q_pos = _positions(batch, T, query_offset, query_positions)
    k_pos = _positions(batch, S, 0, key_positions)
    at_query, at_key = q_pos[..., None, :, None], k_pos[..., None, None, :]
    visible = np.ones(square, bool)
    if query_positions is not None:
        visible &= at_query >= 0
    if key_positions is not None:
        visible &= at_key >= 0
    if is_causal:
        visible &= causal(at_query, at_key)
    if local_window_size is not None:
        sides = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
        visible &= local_window(*sides)(at_query, at_key)
    if query_seq_lengths is not None:
        visible &= (np.arange(T) < np.broadcast_to(query_seq_lengths, batch)[..., None])[..., None, :, None]
    if key_value_seq_lengths is not None:
        visible &= (np.arange(S) < np.broadcast_to(key_value_seq_lengths, batch)[..., None])[..., None, None, :]
    if mask is not None:
        visible &= np.broadcast_to(_evaluate(mask, at_query, at_key), square).astype(bool)
    added = np.zeros(square)
    if bias is not None:
        added = added + np.asarray(_evaluate(bias, at_query, at_key), np.float64)
        visible &= added != -np.inf  # before the cap, which would make it finite

    # A key that no query of its group may see, and a query that sees no key, may hold anything.
    by_group = visible.reshape(*batch, K, N // K, T, S)
    seen = np.moveaxis(by_group.any((-3, -2)), -1, -2)  # [*B, S, K]
    alive = np.moveaxis(visible.any(-1), -1, -2)  # [*B, T, N]
    key, value = np.where(seen[..., None], key, 0), np.where(seen[..., None], value, 0)
    query = np.where(alive[..., None], query, 0)

    raw = scale[:, None, None] * np.einsum("...tnh,...snh->...nts", query, _per_query_head(key, N))
    raw = np.where(visible, raw + np.where(visible, added, 0), 0)
    capped = raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
    logits = np.where(visible, capped, -np.inf)

    sink = np.full(N, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = np.broadcast_to(sink[:, None], square[:-1])  # [*B, N, T]
    logsumexp = _logsumexp(logits)
    total = np.logaddexp(logsumexp, sink)
    weights = np.where(visible, np.exp(logits - _finite(total)[..., None]), 0)
    key_weights = np.where(visible, np.exp(logits - _finite(logsumexp)[..., None]), 0)
    sink_share = np.where(np.isinf(sink), 0, np.exp(sink - _finite(total)))

    kept = np.ones(square)
    if dropout_keep is not None:
        kept = np.broadcast_to(dropout_keep, square) / (1 - dropout_rate)
    output = np.einsum("...nts,...snv->...tnv", weights * kept, _per_query_head(value, N))
    return Attention(
        output, weights, np.moveaxis(logsumexp, -1, -2), raw, logits, visible, key_weights, sink_share, q_pos, k_pos,
        query, key, value, scale, logits_soft_cap, kept,
    )  # fmt: skip


def gradients(forward: Attention, d_output, d_logsumexp=None, *, absolute=False) -> dict[str, np.ndarray]:
    """Pulls cotangents of output `[*B, T, N, V]` and log-sum-exp `[*B, T, N]` back to every input.

    Query, key and value come in their own shapes, sinks and scale as `[N]`, the bias in full as `[*B, N, T, S]`
    (`sum_to` reduces it). With `absolute` every sum runs over the absolute values of its terms: what the gradient
    would be if nothing cancelled, to which rounding errors are relative.
    """
    size, minus = (np.abs, 1) if absolute else (np.asarray, -1)
    N, K = forward.query.shape[-2], forward.key.shape[-2]
    query, scale = size(forward.query), size(forward.scale)
    key, value = (size(_per_query_head(x, N)) for x in (forward.key, forward.value))
    d_output = size(np.asarray(d_output, np.float64))
    d_lse = np.zeros(d_output.shape[:-1]) if d_logsumexp is None else size(np.asarray(d_logsumexp, np.float64))
    d_lse = np.moveaxis(d_lse, -1, -2)[..., None]  # [*B, N, T, 1]

    p, kept = forward.weights, forward.kept
    d_weights = kept * np.einsum("...tnv,...snv->...nts", d_output, value)
    mean = np.sum(p * d_weights, -1, keepdims=True)  # the sink fetches 0, so it adds nothing here
    d_logits = p * (d_weights + minus * mean) + d_lse * forward.key_weights
    d_raw = d_logits
    if forward.soft_cap is not None:
        decay = np.exp(-2 * np.abs(forward.raw_logits / forward.soft_cap))
        d_raw = d_logits * 4 * decay / (1 + decay) ** 2  # 1 - tanh^2, which would cancel where the cap saturates
    d_matches = d_raw * scale[:, None, None]
    return {
        "query": np.einsum("...nts,...snh->...tnh", d_matches, key),
        "key": _sum_groups(np.einsum("...nts,...tnh->...snh", d_matches, query), K),
        "value": _sum_groups(np.einsum("...nts,...tnv->...snv", p * kept, d_output), K),
        "bias": d_raw,
        "sinks": _per_head_sum(minus * forward.sink_share * mean[..., 0]),
        "scale": _per_head_sum(np.einsum("...nts,...tnh,...snh->...nt", d_raw, query, key)),
    }


def sum_to(full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums a full-size cotangent over the axes along which an array of `shape` was broadcast."""
    full = full.sum(tuple(range(full.ndim - len(shape))))
    return full.sum(tuple(i for i, size in enumerate(shape) if size == 1 and full.shape[i] != 1), keepdims=True)


# Masks and biases, as functions of positions.


def causal(q, k):
    return k <= q


def local_window(left: int, right: int) -> Lazy:
    return lambda q, k: (q - left <= k) & (k <= q + right)


def sliding_window(width: int) -> Lazy:
    """`width` keys, the query's own included, none ahead."""
    return local_window(width - 1, 0)


def prefix_lm(n) -> Lazy:
    """Causal, but the first `n` keys are seen by all; `n` may differ by batch item."""
    return lambda q, k: (k <= q) | (k < _per_item(n))


def global_tokens(n: int) -> Lazy:
    return lambda q, k: (k < n) | (q < n)


def strided(stride: int) -> Lazy:
    return lambda q, k: (q - k) % stride == 0


def dilated(left: int, right: int, dilation: int) -> Lazy:
    offsets = [o * dilation for o in range(-left, right + 1)]
    return lambda q, k: np.isin(k - q, offsets)


def block_diagonal(block: int) -> Lazy:
    return lambda q, k: q // block == k // block


def padding(lengths) -> Lazy:
    return lambda q, k: k < _per_item(lengths)


def segments(query_ids, key_ids) -> Lazy:
    """Ids belong to entries, not to positions."""
    return lambda q, k: np.asarray(query_ids)[..., None, :, None] == np.asarray(key_ids)[..., None, None, :]


def both(one: Lazy, other: Lazy) -> Lazy:
    return lambda q, k: one(q, k) & other(q, k)


def either(one: Lazy, other: Lazy) -> Lazy:
    return lambda q, k: one(q, k) | other(q, k)


def opposite(mask: Lazy) -> Lazy:
    return lambda q, k: ~mask(q, k)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Press et al. 2022: 2^(-8 i / n); between powers of two, every other slope of the next power fills the rest."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return np.array(slopes)


def alibi(num_heads: int) -> Lazy:
    return lambda q, k: -alibi_slopes(num_heads)[:, None, None] * np.abs(q - k)


def relative_bucket(q, k, *, buckets: int, bidirectional: bool, max_distance: int) -> np.ndarray:
    """Raffel et al. 2020: exact buckets for near keys, geometric ones up to `max_distance`, the last one beyond."""

    def one(distance):  # key position - query position
        distance, start, count = int(distance), 0, buckets
        if bidirectional:
            count //= 2
            start = count if distance > 0 else 0
            distance = abs(distance)
        else:
            distance = max(-distance, 0)
        exact = count // 2
        if distance < exact:
            return start + distance
        # floor((count - exact) * log(distance / exact) / log(max_distance / exact)) in integers, so without rounding
        n = count - exact
        passed = [j for j in range(1, n) if distance**n * exact**j >= max_distance**j * exact**n]
        return start + exact + len(passed)

    return np.vectorize(one, otypes=[int])(k - q)


def relative_buckets(table, *, bidirectional: bool, max_distance: int) -> Lazy:
    """The learned bias `table[bucket, head]`."""
    table = np.asarray(table, np.float64)

    def bias(q, k):
        bucket = relative_bucket(q, k, buckets=len(table), bidirectional=bidirectional, max_distance=max_distance)
        return np.moveaxis(table[bucket[..., 0, :, :]], -1, -3)

    return bias


# Statistics of the weights.

# What a row that sees no key reports: nothing was attended to.
EMPTY_ROW = {
    "logsumexp": -np.inf, "entropy": 0.0, "normalized_entropy": 0.0, "max_logit": -np.inf, "max_abs_logit": 0.0,
    "max_weight": 0.0, "argmax_key": -1, "sum_p2": 0.0, "tail_p2": 0.0, "tail_p3": 0.0, "logit_mean": 0.0,
    "logit_variance": 0.0, "mean_distance": 0.0, "first_key_mass": 0.0, "diagonal_mass": 0.0, "visible_keys": 0,
}  # fmt: skip


def statistics(forward: Attention) -> dict[str, np.ndarray]:
    """Every field of the attention statistics, `[*B, T, N]`, over the renormalised visible keys, row by row."""
    *batch, N, T, _ = forward.visible.shape
    fields: dict[str, np.ndarray] = {name: np.full((*batch, T, N), empty) for name, empty in EMPTY_ROW.items()}
    fields["sink_share"] = np.moveaxis(forward.sink_share, -1, -2).copy()
    for *item, n, t in np.ndindex(*batch, N, T):
        at, item = (*item, t, n), tuple(item)
        keys = np.flatnonzero(forward.visible[(*item, n, t)])
        if not keys.size:
            continue
        s = forward.logits[(*item, n, t)][keys]
        distance = np.abs(forward.key_positions[item][keys] - forward.query_positions[item][t])
        l = np.exp(s - s.max()).sum()
        p = np.exp(s - s.max()) / l
        others = np.delete(p, p.argmax())
        row = {
            "logsumexp": s.max() + np.log(l),
            "entropy": np.log(l) - (p * (s - s.max())).sum(),
            "max_logit": s.max(),
            "max_abs_logit": np.abs(s).max(),
            "max_weight": p.max(),
            "argmax_key": keys[p.argmax()],
            "sum_p2": (p**2).sum(),
            "tail_p2": (others**2).sum(),
            "tail_p3": (others**3).sum(),
            "logit_mean": s.mean(),
            "logit_variance": s.var(),
            "mean_distance": (p * distance).sum(),
            "first_key_mass": p[forward.key_positions[item][keys] == 0].sum(),
            "diagonal_mass": p[distance == 0].sum(),
            "visible_keys": keys.size,
        }
        # One visible key is no choice at all: as uniform as it can be.
        row["normalized_entropy"] = row["entropy"] / np.log(keys.size) if keys.size > 1 else 1.0
        for name, measured in row.items():
            fields[name][at] = measured
    return fields


# Recurrences.


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One pass of S_t = a_t ⊙ S_{t-1} + k_t v_tᵀ, o_t = q_t S_t, token by token, with all that lies on the way."""

    output: np.ndarray  # [*B, T, N, V]
    memories: np.ndarray  # [S + 1, *B, N, R, V], the one before the first token first; one column more if normalised
    query: np.ndarray  # [*B, T, N, R]
    key: np.ndarray  # [*B, S, N, R], of the query heads; 0 where it does not count, like its value
    value: np.ndarray  # [*B, S, N, V], with a column of ones if normalised
    decay: np.ndarray  # [*B, S, N, R], 1 where the step does not count
    normalize: bool
    is_causal: bool
    num_kv_heads: int


def recurrence(
    query, key, value, log_decay=None, *, normalize=False, is_causal=True, counted=None, memory=None
) -> Recurrence:
    """The linear recurrence by its definition; `log_decay` `[N]`, `[*B, T, N]` or `[*B, T, N, R]`, `counted` `[*B, S]`.

    `memory` is what there is before, `[*B, N, R, V]`, its last column the normaliser if there is one.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (*batch, _, N, R), (S, K) = query.shape, key.shape[-3:-1]
    counted = np.ones((*batch, S), bool) if counted is None else np.asarray(counted)
    key, value = (np.where(counted[..., None, None], x, 0) for x in (key, value))
    if normalize:
        value = np.concatenate([value, np.where(counted[..., None, None], np.ones_like(value[..., :1]), 0)], -1)
    key, value = _per_query_head(key, N), _per_query_head(value, N)
    decay = np.exp(np.asarray(0.0 if log_decay is None else log_decay, np.float64))
    if decay.ndim < query.ndim:
        decay = decay[..., None]
    decay = np.where(counted[..., None, None], np.broadcast_to(decay, (*batch, S, N, R)), 1)
    memories = [np.zeros((*batch, N, R, value.shape[-1])) if memory is None else np.asarray(memory, np.float64)]
    for t in range(S):
        added = key[..., t, :, :, None] * value[..., t, :, None, :]
        memories.append(decay[..., t, :, :, None] * memories[-1] + added)
    memories = np.stack(memories)
    read = np.moveaxis(memories[1:], 0, -4) if is_causal else memories[-1][..., None, :, :, :]
    output = np.einsum("...r,...rv->...v", query, np.broadcast_to(read, (*query.shape, value.shape[-1])))
    if normalize:
        weight = output[..., -1:]
        output = np.where(weight == 0, 0, output[..., :-1] / np.where(weight == 0, 1, weight))
    return Recurrence(output, memories, query, key, value, decay, normalize, is_causal, K)


def recurrence_gradients(forward: Recurrence, d_output) -> dict[str, np.ndarray]:
    """Pulls a cotangent of the output back, token by token, to query, key, value, initial memory and every log-decay."""
    d_output = np.asarray(d_output, np.float64)
    query, key, value, decay, memories = (getattr(forward, x) for x in ("query", "key", "value", "decay", "memories"))
    S = key.shape[-3]
    read = np.moveaxis(memories[1:], 0, -4) if forward.is_causal else memories[-1][..., None, :, :, :]
    if forward.normalize:  # o = n / w: dn = do / w, dw = -Σ do o / w
        weight = np.einsum("...r,...r->...", query, np.broadcast_to(read[..., -1], query.shape))[..., None]
        scaled = np.where(weight == 0, 0, d_output / np.where(weight == 0, 1, weight))
        d_output = np.concatenate([scaled, -(scaled * forward.output).sum(-1, keepdims=True)], -1)
    d_query = np.einsum("...v,...rv->...r", d_output, np.broadcast_to(read, (*query.shape, value.shape[-1])))
    by_query = query[..., :, None] * d_output[..., None, :]  # [*B, T, N, R, V], what each query says of the memory
    d_memory = np.zeros(memories.shape[1:]) if forward.is_causal else by_query.sum(-4)
    d_key, d_value, d_log = np.zeros_like(key), np.zeros_like(value), np.zeros_like(decay)
    for t in reversed(range(S)):
        if forward.is_causal:
            d_memory = d_memory + by_query[..., t, :, :, :]
        d_key[..., t, :, :] = np.einsum("...rv,...v->...r", d_memory, value[..., t, :, :])
        d_value[..., t, :, :] = np.einsum("...rv,...r->...v", d_memory, key[..., t, :, :])
        d_log[..., t, :, :] = decay[..., t, :, :] * (d_memory * memories[t]).sum(-1)
        d_memory = decay[..., t, :, :, None] * d_memory
    K = forward.num_kv_heads
    d_value = d_value[..., :-1] if forward.normalize else d_value
    return {
        "query": d_query, "key": _sum_groups(d_key, K), "value": _sum_groups(d_value, K), "log_decay": d_log,
        "memory": d_memory,
    }  # fmt: skip


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _positions(batch, length, offset, explicit) -> np.ndarray:
    if explicit is not None:
        return np.broadcast_to(np.asarray(explicit, np.int64), (*batch, length))
    return np.broadcast_to(np.asarray(offset, np.int64)[..., None] + np.arange(length), (*batch, length))


def _evaluate(x, at_query, at_key):
    return x(at_query, at_key) if callable(x) else np.asarray(x)


def _per_item(x) -> np.ndarray:
    """`[*B]` -> `[*B, 1, 1, 1]`."""
    return np.asarray(x)[..., None, None, None]


def _per_query_head(x: np.ndarray, num_heads: int) -> np.ndarray:
    """Query head n reads key/value head n // G."""
    return np.repeat(x, num_heads // x.shape[-2], axis=-2)


def _sum_groups(x: np.ndarray, num_kv_heads: int) -> np.ndarray:
    *front, N, width = x.shape
    return x.reshape(*front, num_kv_heads, N // num_kv_heads, width).sum(-2)


def _per_head_sum(x: np.ndarray) -> np.ndarray:
    """`[*B, N, T]` -> `[N]`."""
    return np.moveaxis(x, -2, -1).reshape(-1, x.shape[-2]).sum(0)


def _logsumexp(x: np.ndarray) -> np.ndarray:
    largest = _finite(np.max(x, -1, initial=-np.inf))
    with np.errstate(divide="ignore"):
        return largest + np.log(np.exp(x - largest[..., None]).sum(-1))


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isinf(x), 0, x)
