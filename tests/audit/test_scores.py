"""Other scores than scaled q·k are told apart, in functions of NumPy: an audit needs no compiler to call them."""

import re

import numpy as np
import pytest
from scipy.special import expit, softmax

from attn_jax.audit import Expectation, audit_attention
from attn_jax.diagnostics import reference


def attention(scores=None, *, weigh=lambda logits: softmax(logits, axis=-1), fetched=lambda value: value):
    """Softmax attention of full heads, by other scores `[B, N, T, S]`, another softmax, or other values."""

    def function(query, key, value):
        q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
        logits = reference.scores(q, k) / q.shape[-1] ** 0.5 if scores is None else scores(q, k)
        return np.einsum("bnts,bsnv->btnv", weigh(logits), fetched(v)).astype(np.float32)

    return function


def root(q):
    return q.shape[-1] ** 0.5


def unit(x):
    return x / (np.linalg.norm(x, axis=-1, keepdims=True) + 1e-9)


def turned(x, **options):
    return reference.rotate(x, **{"base": 1e4, "interleaved": False} | options)


def distance(q, k):
    return -((q[:, :, None] - k[:, None]) ** 2).sum(-1).transpose(0, 3, 1, 2) / 2


def behind(q, k):
    """A bias by distance, as ALiBi's."""
    t, s = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None, :]
    return reference.scores(q, k) / root(q) - 0.2 * np.abs(t - s)


def by_head(q, k):
    return reference.scores(q, k) / root(q) * np.arange(1, q.shape[2] + 1)[:, None, None]


def rounded(weights):
    """To three digits, and normalised again."""
    kept = np.round(softmax(weights, axis=-1), 3)
    return kept / kept.sum(axis=-1, keepdims=True)


ROTARY = Expectation(positions="rotary")
MISTAKES = {
    "q·q": (attention(lambda q, k: reference.scores(q, q) / root(q)), None, "projections", "does not change with the key"),
    "k·k": (attention(lambda q, k: reference.scores(k, k) / root(q)), None, "projections", "does not change with the query"),
    "exchanged": (
        attention(lambda q, k: reference.scores(k, q) / root(q)), None, "projections", "a change to key 2 its own row alone"
    ),
    "unit vectors": (attention(lambda q, k: reference.scores(unit(q), unit(k))), None, "scale", "of unit vectors"),
    "squared distance": (attention(distance), None, "scale", "minus squared distances"),
    "large keys": (
        attention(lambda q, k: reference.scores(q, k) / root(q) + (k**2).sum(-1).swapaxes(1, 2)[:, :, None] / 4), None,
        "projections", "by key",
    ),
    "rotary, unasked": (
        attention(lambda q, k: reference.scores(turned(q), turned(k)) / root(q)), None, "positions",
        r"after rotary positions \(rotary, base 10,000\)",
    ),
    "rotary of neighbours, unasked": (
        attention(lambda q, k: reference.scores(turned(q, interleaved=True), turned(k, interleaved=True)) / root(q)),
        None, "positions", "rotary_interleaved",
    ),
    "queries alone turned": (
        attention(lambda q, k: reference.scores(turned(q), k) / root(q)), None, "positions", "to the queries alone"
    ),
    "keys alone turned": (
        attention(lambda q, k: reference.scores(q, turned(k)) / root(q)), None, "positions", "to the keys alone"
    ),
    "positions forgotten": (attention(), ROTARY, "positions", "positions that were expected are not applied"),
    "another base": (
        attention(lambda q, k: reference.scores(turned(q, base=50.0), turned(k, base=50.0)) / root(q)), ROTARY,
        "positions", "leave .* of the spread of log-weights",
    ),
    "a bias by distance": (attention(behind), None, "positions", "by position"),
    "the value before": (
        attention(fetched=lambda v: np.roll(v, 1, axis=1)), None, "values", "fetches the value of the token 1"
    ),
    "the value after": (
        attention(fetched=lambda v: np.roll(v, -1, axis=1)), None, "values", "fetches the value of the token 1"
    ),
    "the scores of the next head": (
        attention(lambda q, k: np.roll(reference.scores(q, k), 1, axis=1) / root(q)), None, "heads", "head 1 reaches token 2, head 2"
    ),
    "a temperature for each head": (attention(by_head), None, "scale", "differs between heads"),
    "one number for all widths": (
        attention(lambda q, k: 0.3 * reference.scores(q, k)), None, "scale", "one number for both widths"
    ),
    "no scale": (attention(reference.scores), None, "scale", "no scale at all"),
    "cubed": (attention(lambda q, k: (reference.scores(q, k) / root(q)) ** 3), None, "softmax", "No scale times q·k"),
    "the sine of scores": (
        attention(lambda q, k: np.sin(5 * reference.scores(q, k))), None, "projections", "No scale times q·k"
    ),
    "sigmoid": (attention(weigh=lambda x: expit(x)), None, "softmax", "do not sum to 1"),
    "twice as much": (attention(weigh=lambda x: 2 * softmax(x, axis=-1)), None, "output", "come out as 2 everywhere"),
    "weights of three digits": (
        attention(weigh=lambda x: np.round(softmax(x, axis=-1), 3)), None, "numerics", "weights are rounded"
    ),
    "rounded before they are normalised": (attention(weigh=rounded), None, "numerics", "of the spread of their log"),
    "over queries": (attention(weigh=lambda x: softmax(x, axis=-2)), None, "softmax", ""),
    "sees the last key never": (
        attention(weigh=lambda x: softmax(np.where(np.arange(x.shape[-1]) < x.shape[-1] - 1, x, -1e30), axis=-1)),
        None, "mask", r"misses keys \[7\]",
    ),
    "causal, unasked": (
        attention(weigh=lambda x: softmax(np.where(np.tri(*x.shape[-2:], dtype=bool), x, -1e30), axis=-1)), None,
        "mask", "misses keys",
    ),
    "not causal": (attention(), Expectation(causal=True), "mask", "sees keys .* that it must not"),
}  # fmt: skip


def test_a_healthy_function():
    report = audit_attention(attention())
    assert report.ok, report


@pytest.mark.parametrize("name", MISTAKES)
def test_the_scores_are_told_apart(name):
    function, expect, link, says = MISTAKES[name]
    report = audit_attention(function, expect=expect or Expectation())
    assert report.faults, report
    assert report.faults[0].link == link, report
    assert re.search(says, report.faults[0].evidence), report
