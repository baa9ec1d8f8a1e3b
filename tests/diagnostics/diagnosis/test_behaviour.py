"""What calls show, of toy models in NumPy: each fault moves an output that it must not, and healthy ones are silent."""

import dataclasses

import numpy as np
import pytest

from attn_jax.diagnostics.diagnosis.behaviour import Calls, examine

B, T, VOCABULARY, D = 2, 12, 20, 6
NUMBERS = np.random.default_rng(0)
TABLE, PLACES = NUMBERS.standard_normal((VOCABULARY, D)), NUMBERS.standard_normal((T, D))
TOKENS = NUMBERS.integers(0, VOCABULARY, (B, T))
OTHERS = (TOKENS + NUMBERS.integers(1, VOCABULARY, (B, T))) % VOCABULARY


def attend(token_ids, lengths=None, *, offset=0, causal=True, places=True, layers=2, read_padding=False):
    """Two layers of attention with a residual path."""
    x = TABLE[token_ids] + (PLACES[: token_ids.shape[1]] if places else 0)
    length = token_ids.shape[1]
    seen = np.tri(length, length, offset, dtype=bool) if causal else np.ones((length, length), bool)
    seen = np.broadcast_to(seen, (len(token_ids), length, length))
    if lengths is not None and not read_padding:
        seen = seen & (np.arange(length) < lengths[:, None])[:, None]
    for _ in range(layers):
        raised = np.where(seen, np.exp(x @ np.swapaxes(x, 1, 2) / D), 0)
        x = x + raised / raised.sum(axis=-1, keepdims=True) @ x
    return x


def encoder(token_ids, lengths=None, **options):
    return attend(token_ids, lengths, causal=False, **options)


def calls(run, **changes):
    given = Calls(run, TOKENS, OTHERS, causal=True, takes_lengths=False, meant_to_order=True)
    return dataclasses.replace(given, **changes)


HEALTHY = {
    "decoder": calls(attend, decode=attend),
    "decoder with lengths": calls(attend, takes_lengths=True),
    "encoder": calls(encoder, causal=False, takes_lengths=True),
    "decoder of which nothing is known": calls(attend, causal=None, meant_to_order=None),
    "encoder of which nothing is known": calls(encoder, causal=None, meant_to_order=None),
    "decoder without positions": calls(lambda t, n: attend(t, n, places=False), meant_to_order=False),
    "tokens apart": calls(lambda t, n: TABLE[t], causal=False),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_are_silent(name):
    assert list(examine(HEALTHY[name])) == []


def noisy(token_ids, lengths):
    return attend(token_ids) + 1e-3 * NUMBERS.standard_normal((*token_ids.shape, D))


def centred(token_ids, lengths):
    x = attend(token_ids)
    return x - x.mean(axis=0)


def forgetting(token_ids):
    return np.concatenate([attend(token_ids[:, :6]), attend(token_ids[:, 6:])], axis=1)


FAULTY = {
    # name: (calls, signal, link, severity, words of the evidence)
    "NaN": (calls(lambda t, n: np.where(t[..., None] == TOKENS[0, 3], np.nan, attend(t))), "outputs", "softmax", "serious", "not finite"),
    "noise": (calls(noisy), "two_calls", "dropout", "serious", "Equal calls differ"),
    "a mean over the batch": (calls(centred), "batch_items", "batch", "serious", "Item 0 moves"),
    "one too wide": (calls(lambda t, n: attend(t, offset=1)), "future", "mask", "serious", "outputs 4 to 5 before them"),
    "not causal": (calls(lambda t, n: encoder(t)), "future", "mask", "serious", "outputs 0 to 5 before them"),
    "one too wide, nothing known": (
        calls(lambda t, n: attend(t, offset=1), causal=None), "future", "mask", "serious", "outputs 4 to 5 before them",
    ),
    "padding read": (
        calls(lambda t, n: encoder(t, n, read_padding=True), causal=False, takes_lengths=True), "padding", "mask", "serious",
        "Outputs of 8 tokens with 4 of padding",
    ),
    "lengths sorted, the longest first": (
        calls(lambda t, n: encoder(t, None if n is None else -np.sort(-n)), causal=False, takes_lengths=True), "padding", "mask", "serious",
        "of padding",
    ),
    "lengths sorted, the shortest first": (
        calls(lambda t, n: encoder(t, None if n is None else np.sort(n)), causal=False, takes_lengths=True), "padding", "mask", "serious",
        "of padding",
    ),
    "no order": (calls(lambda t, n: encoder(t, places=False), causal=False), "order", "positions", "serious", "In another order"),
    "no order that was meant": (
        calls(lambda t, n: encoder(t, places=False), causal=False, meant_to_order=False), "order", "positions", "notice", "In another order",
    ),
    "a cache that forgets": (calls(attend, decode=forgetting), "decoding", "cache", "serious", "outputs 6 to 11 are off"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named(name):
    given, signal, link, severity, words = FAULTY[name]
    (found,) = examine(given)
    assert (found.signal, found.link, found.severity) == (signal, link, severity)
    assert words in found.evidence
