"""What attention should give, in float64 NumPy: the whole matrix of weights, written for reading, not for speed."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def visible(length: int, keys: int, *, causal: bool, window: tuple[int, int] | None, offset: int = 0) -> Mask:
    """Which key each query may see, `[T, S]`; query i sits at `offset + i`."""
    query, key = np.arange(length)[:, None] + offset, np.arange(keys)[None, :]
    seen = np.ones((length, keys), bool)
    if causal:
        seen &= key <= query
    if window is not None:
        seen &= (query - window[0] <= key) & (key <= query + window[1])
    return seen


def rotate(
    x: Array, *, base: float, interleaved: bool, offset: int = 0, at: NDArray[np.integer] | None = None
) -> Array:
    """`x` `[B, T, N, H]` turned by rotary positions: those of `at`, or `offset` and the following."""
    width = x.shape[-1]
    at = np.arange(x.shape[1]) + offset if at is None else at
    angles = at[:, None] * base ** (-np.arange(0, width, 2) / width)
    cos, sin = (f(angles)[None, :, None, :] for f in (np.cos, np.sin))
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : width // 2], x[..., width // 2 :])
    turned = first * cos - second * sin, first * sin + second * cos
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def scores(query: Array, key: Array) -> Array:
    """q·k of every head, `[B, N, T, S]`; query head n reads key head n // (N // K)."""
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return np.einsum("btnh,bsnh->bnts", query, key)


def weights(logits: Array, mask: Mask, *, cap: float | None = None, sinks: Array | None = None) -> Array:
    """Softmax of logits `[B, N, T, S]` over the keys that are seen; rows that see nothing are 0."""
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    logits = np.where(mask, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    top = np.where(np.isfinite(top), top, 0.0)
    raised = np.exp(logits - top)
    total = raised.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return raised / np.where(total == 0, 1, total)


def outputs(weights: Array, value: Array) -> Array:
    """`[B, T, N, V]` of weights `[B, N, T, S]` and values `[B, S, K, V]`."""
    value = np.repeat(value, weights.shape[1] // value.shape[2], axis=2)
    return np.einsum("bnts,bsnv->btnv", weights, value)
