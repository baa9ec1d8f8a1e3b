"""What may depend on what: a function of NumPy in which one thing depends on another that it must not."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from scipy.special import softmax

from attn_jax.audit import audit_attention
from attn_jax.diagnostics import reference


def attention(query, key, value, *, axis=-1, repeat=np.repeat):
    """Softmax attention, grouped heads and all."""
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    groups = q.shape[2] // k.shape[2]
    k, v = (repeat(x, groups, axis=2) for x in (k, v))
    weights = softmax(reference.scores(q, k) / q.shape[-1] ** 0.5, axis=axis)
    return np.einsum("bnts,bsnv->btnv", weights, v)


def tile(x, count, axis):
    return np.concatenate([x] * count, axis=axis)


def keys_tiled_values_repeated(query, key, value):
    groups = query.shape[2] // key.shape[2]
    return attention(query, tile(key, groups, 2), np.repeat(value, groups, axis=2))


def writes(query, key, value):
    query *= 1.0
    query += 1e-3
    return attention(query - 1e-3, key, value)


def with_state():
    calls = itertools.count()
    return lambda query, key, value: attention(query, key, value) + 1e-3 * next(calls)


def by_batch_size(query, key, value):
    return attention(query, key, value) * (1 + 0.1 * (len(query) == 1))


def mean_over_the_batch(query, key, value):
    return attention(query, key - np.mean(key, axis=0, keepdims=True) * (len(key) > 1), value)


def batch_overflow(query, key, value):
    scores = np.exp(np.clip(reference.scores(query, key).max(), None, 1e4) / 4)  # inf where one item is large
    return attention(query, key, value) * (scores / scores)


def divided_by_size(query, key, value):
    return attention(query, key, value / np.abs(value).max(axis=(1, 2, 3), keepdims=True))


def normalised_after(query, key, value):
    found = attention(query, key, value)
    return found / (np.abs(found).mean(axis=-1, keepdims=True) + 1e-30)


def in_bfloat16(query, key, value):
    return attention(query, key, np.asarray(value).astype(ml_dtypes.bfloat16))


def rolled(query, key, value):
    """Head n reads the queries, keys and values of the next head."""
    return attention(*(np.roll(np.asarray(x), -1, axis=2) for x in (query, key, value)))


def by_heads(query, key, value):
    """A softmax over heads."""
    return attention(query, key, value, axis=1)


def reshaped(query, key, value):
    """Heads read out of [B, T, N H] by a reshape without a transpose."""
    b, t, n, h = query.shape
    split = [np.swapaxes(np.asarray(x).reshape(b, n, -1, h), 1, 2) for x in (query, key, value)]
    return np.swapaxes(attention(*split), 1, 2).reshape(b, t, n, h)


MISTAKES = {
    "not finite": (lambda q, k, v: np.full(q.shape, np.nan), "runs", "softmax", "100% of an ordinary output"),
    "of another shape": (lambda q, k, v: attention(q, k, v)[:, :1], "runs", "output", "it returned"),
    "raises": (lambda q, k: None, "runs", "output", "Called with float32 query, key and value"),
    "writes to its input": (writes, "inputs stay", "numerics", "It changed the query"),
    "keeps a state": (with_state(), "same twice", "dropout", "Equal calls differ"),
    "by the size of the batch": (by_batch_size, "items apart", "batch", "when it comes alone"),
    "a mean over the batch": (mean_over_the_batch, "items apart", "batch", "when item 1 changes"),
    "overflows beside another": (batch_overflow, "items apart", "softmax", "Beside an item with scores of some thou"),
    "no queries": (lambda q, k, v: attention(0 * q, k, v), "inputs are read", "projections", "with the query"),
    "values by their size": (divided_by_size, "linear in values", "values", "Values of 0 do not come out finite"),
    "no values": (lambda q, k, v: attention(q, k, np.ones_like(v)), "inputs are read", "values", "with the value"),
    "a residual": (lambda q, k, v: attention(q, k, v) + q, "linear in values", "output", "that was not fetched"),
    "values in bfloat16": (in_bfloat16, "linear in values", "numerics", "rounded on the way"),
    "normalised afterwards": (normalised_after, "linear in values", "output", "the same for v and 2v"),
    "values squared": (lambda q, k, v: attention(q, k, v * abs(v)), "linear in values", "values", "is not 2 o"),
    "values mixed": (
        lambda q, k, v: attention(q, k, v + np.roll(v, 1, axis=-1)), "linear in values", "values", "reaches channels"
    ),
    "values centred": (
        lambda q, k, v: attention(q, k, v - v.mean(axis=1, keepdims=True)), "linear in values", "values",
        "does not come out",
    ),
    "the next head": (rolled, "heads apart", "heads", "reaches token 2, head 0"),
    "keys of head 0": (
        lambda q, k, v: attention(q, np.repeat(k[:, :, :1], k.shape[2], axis=2), v), "heads apart", "heads",
        "does not read its own key, but another head's",
    ),
    "a softmax over heads": (by_heads, "heads apart", "softmax", "weights of other heads change"),
    "heads by reshape": (reshaped, "heads apart", "heads", "reaches token"),
    "groups tiled": (
        lambda q, k, v: attention(q, k, v, repeat=tile), "groups in order", "heads", r"value head 0 reaches .*\[0, 2\]"
    ),
    "keys tiled": (keys_tiled_values_repeated, "groups in order", "heads", r"Key head 0 reaches query heads \[0, 2\]"),
}  # fmt: skip


def test_a_healthy_function():
    report = audit_attention(lambda query, key, value: attention(query, key, value).astype(query.dtype))
    assert report.ok, report


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
def test_what_must_not_matter_is_told(name):
    function, check, link, says = MISTAKES[name]

    def cast(*arrays):
        found = function(*arrays)
        return None if found is None else np.asarray(found, np.float32)

    told = audit_attention(cast).faults[0]
    assert (told.check, told.link) == (check, link), told
    assert re.search(says, told.evidence), told
