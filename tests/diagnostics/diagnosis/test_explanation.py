"""Explanations: every mistake, planted in the output of one layer, is named by its link; the rest is left alone."""

import dataclasses

import numpy as np
import pytest

from attn_jax.biases import alibi_slopes
from attn_jax.diagnostics import reference
from attn_jax.diagnostics.diagnosis.explanation import UNKNOWN, explain
from attn_jax.diagnostics.diagnosis.layer_arrays import LayerArrays, contexts
from attn_jax.diagnostics.diagnosis.mistakes import mistakes
from tests import oracles

B, T, N, K, H = 2, 16, 4, 2, 8
NUMBERS = np.random.default_rng(0)


def draw(*shape):
    return NUMBERS.standard_normal(shape)


def causal(length=T):
    return np.broadcast_to(np.tri(length, dtype=bool), (B, N, length, length)).copy()


def padded():
    seen = np.ones((B, N, T, T), bool)
    seen[1, :, :, T - 5 :] = False
    seen[1, :, T - 5 :] = False
    return seen


def window():
    at = np.arange(T)
    return causal() & (at[:, None] - at < 4)


Q, KEY, VALUE = draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, H)
FULL = draw(B, T, N, H), draw(B, T, N, H), draw(B, T, N, H)


def layer(query, key, value, visible, **options):
    arrays = LayerArrays(query, key, value, visible=visible, scale=np.full(N, H**-0.5), **options)
    return dataclasses.replace(arrays, output=right(arrays))


def right(arrays):
    """The output as it should be, by the tests' own oracle."""
    return oracles.attention(
        arrays.query, arrays.key, arrays.value, bias=arrays.bias, mask=arrays.visible, logits_soft_cap=arrays.cap,
        sinks=arrays.sinks,
    ).output  # fmt: skip


LAYERS = {
    "causal, grouped": layer(Q, KEY, VALUE, causal()),
    "causal": layer(*FULL, causal()),
    "padded": layer(*FULL, padded()),
    "window": layer(*FULL, window()),
    "bias": layer(*FULL, causal(), bias=draw(B, N, T, T)),
    "cap and sinks": layer(*FULL, causal(), cap=2.0, sinks=draw(N)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_as_asked_for_needs_no_explanation(name):
    assert explain(LAYERS[name]) is None


@pytest.mark.parametrize(("name", "part"), [("causal, grouped", 0), ("padded", 1), ("bias", 2)])
def test_every_mistake_is_named_at_its_link(name, part):
    """Or at that of another mistake that gives the very same output here."""
    (of,) = contexts(LAYERS[name])
    rows = of.known.any(axis=1)

    def relative(output, expected):
        return np.linalg.norm((output - expected)[rows]) / max(np.linalg.norm(expected[rows]), 1e-9)

    with np.errstate(all="ignore"):
        outputs = [(one.link, one.make()) for one in mistakes(of)]
    plain, asked = of.attend(), 0
    for link, output in outputs[part::3]:
        if not np.isfinite(output).all() or relative(output, plain) < 0.05 or not output.any():
            continue
        found = explain(dataclasses.replace(LAYERS[name], output=output))
        twins = {other for other, same in outputs if np.isfinite(same).all() and relative(same, output) < 0.02}
        assert found.link in twins, (link, found)
        assert link in twins
        asked += twins == {link}
    assert asked > 10


def other(name, **changes):
    return dataclasses.replace(LAYERS[name], output=right(dataclasses.replace(LAYERS[name], **changes)))


def with_scale(c):
    logits = c * reference.scores(FULL[0], FULL[1])
    output = reference.outputs(reference.weights(logits, causal()), FULL[2])
    return dataclasses.replace(LAYERS["causal"], output=output)


PLANTED = {
    "no scale": (with_scale(1.0), "scale", "The effective scale is 1, no scale at all, where 0.3536 was asked for."),
    "scale twice": (with_scale(1 / H), "scale", "The effective scale is 0.125, 1/H, where 0.3536 was asked for."),
    "one too wide": (
        other("causal", visible=np.broadcast_to(np.tri(T, T, 1, dtype=bool), (B, N, T, T))), "mask", "Queries see one key too far ahead.",
    ),
    "padding": (other("padded", visible=np.ones((B, N, T, T), bool)), "mask", None),
    "tiled": (
        dataclasses.replace(
            LAYERS["causal, grouped"],
            output=right(layer(Q, np.tile(KEY, (1, 1, 2, 1)), np.tile(VALUE, (1, 1, 2, 1)), causal())),
        ), "heads", "Key/value heads are tiled 0, 1, 0, 1 where 0, 0, 1, 1 is due.",
    ),
    "values turned": (
        other("causal", value=reference.rotate(FULL[2], base=10000.0, interleaved=False)), "values", "Rotary positions turn the values, too.",
    ),
    "bias subtracted": (other("bias", bias=-LAYERS["bias"].bias), "bias", "The bias is subtracted."),
    "ALiBi": (
        other("causal", bias=np.broadcast_to(
            -np.asarray(alibi_slopes(N))[:, None, None] * np.abs(np.arange(T)[:, None] - np.arange(T)), (B, N, T, T)
        )), "positions", "A bias is added that falls with the distance, by ALiBi's slopes.",
    ),
    "heads permuted": (
        dataclasses.replace(LAYERS["causal"], output=LAYERS["causal"].output[:, :, [2, 0, 3, 1]]), "heads", None,
    ),
    "doubled": (dataclasses.replace(LAYERS["causal"], output=2 * LAYERS["causal"].output), "output", "The output is 2 times that of attention."),
    "rounded": (
        dataclasses.replace(LAYERS["causal"], output=LAYERS["causal"].output.astype(np.float16) * (1 + 4e-3 * draw(B, T, N, H))), "numerics", None,
    ),
    "another function": (dataclasses.replace(LAYERS["causal"], output=draw(B, T, N, H)), "softmax", UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(name):
    arrays, link, says = PLANTED[name]
    found = explain(arrays)
    assert found is not None
    assert (found.link, says or found.says) == (link, found.says)


def test_only_the_heads_that_are_wrong_are_explained():
    output = LAYERS["causal"].output.copy()
    output[:, :, 2] *= 3
    found = explain(dataclasses.replace(LAYERS["causal"], output=output))
    assert found.link == "output"
    assert (found.misfit > 1e-3).tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", ["causal", "padded"])
def test_a_mask_that_is_not_known_is_found_among_the_usual(name):
    """Causal, or none: padding is none of these, and its layer cannot be judged."""
    found = explain(dataclasses.replace(LAYERS[name], visible=None))
    assert (found is None) == (name == "causal")


def test_a_long_layer_that_looks_back_is_cut():
    long = 100
    query, key, value = (draw(B, long, N, H) for _ in range(3))
    arrays = layer(query, key, value, causal(long))
    assert explain(arrays) is None
    wide = np.broadcast_to(np.tri(long, long, 1, dtype=bool), (B, N, long, long))
    wrong = dataclasses.replace(arrays, output=right(dataclasses.replace(arrays, visible=wide)))
    assert explain(wrong).says == "Queries see one key too far ahead."
