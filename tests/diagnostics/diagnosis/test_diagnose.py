"""The whole diagnosis: of transformers, functions, Flax models and captures; what it refuses, and that it says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax import dot_product_attention
from attn_jax.diagnostics import Captures, Limits, diagnose, measure_layer, summarize_heads
from attn_jax.nn import Transformer, TransformerConfig, as_attention_fn

VOCABULARY, LAYERS, HEADS, T = 50, 2, 4, 24
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, T))
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": LAYERS, "model_width": 32, "num_heads": HEADS, "num_kv_heads": 2}


def decoder(**changes):
    return Transformer(TransformerConfig(**{**SIZES, **changes}), rngs=nnx.Rngs(0))


def edited(name, change):
    model = decoder()
    weight = getattr(model.layers.attention, f"{name}_weight")
    weight[...] = jnp.asarray(change(np.array(weight[...])))
    return model


def links(diagnosis):
    return [one.link for one in diagnosis.findings if one.severity != "information"]


def test_a_fresh_decoder_has_nothing_but_narrow_heads():
    model = decoder()
    diagnosis = diagnose(model, TOKENS)
    assert [one.signal for one in diagnosis.findings] == ["head_width"]
    assert diagnosis.ok
    assert diagnosis.skipped == ()
    summary = model(TOKENS, observe=summarize_heads)[1]
    np.testing.assert_allclose(diagnosis.measures["logit_sd"], summary.logit_sd.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(diagnosis.measures["max_logit"], summary.max_logit.max(axis=1), rtol=1e-5)
    assert {x.shape for x in diagnosis.measures.values()} == {(LAYERS, HEADS), (LAYERS,)}


def copy_key(x):
    """Both query heads of a group are one."""
    x[:, :, 1] = x[:, :, 0]
    return x


@pytest.mark.parametrize(
    ("name", "change", "link"),
    [
        ("output", lambda x: 1e-3 * x, "output"),
        ("output", lambda x: np.broadcast_to(np.eye(32).reshape(HEADS, 8, 32), x.shape), "output"),
        ("query", lambda x: 60 * x, "projections"),
        ("query", lambda x: 1e-3 * x, "projections"),
        ("query", copy_key, "heads"),
        ("value", lambda x: np.where(x > 0.3, np.nan, x), "numerics"),
    ],
)
def test_a_fault_in_the_parameters_is_named_first(name, change, link):
    assert links(diagnose(edited(name, change), TOKENS))[0] == link


def test_a_temperature_that_softens_everything_is_a_matter_of_scale():
    model = decoder(learned_temperature=True)
    own = model.layers.attention.log_temperature
    assert links(diagnose(model, TOKENS)) == []
    own[...] = own[...].at[1, 2].set(3.0)
    (found,) = (x for x in diagnose(model, TOKENS).findings if x.severity != "information")
    assert (found.signal, found.link, found.severity, found.heads) == ("temperature", "scale", "notice", ((1, 2),))
    assert "20.1" in found.evidence


@pytest.mark.parametrize("changes", [{"param_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}])
def test_rounding_is_no_alarm(changes):
    diagnosis = diagnose(decoder(**changes), TOKENS)
    assert diagnosis.ok, str(diagnosis)


def test_one_token_and_ids_that_are_none():
    assert diagnose(decoder(), TOKENS[:, :1]).ok
    with pytest.raises(ValueError, match=r"token_ids must lie in 0\.\.\d+, got values in"):
        diagnose(decoder(), np.full((1, 8), 10_000))


def test_the_function_that_is_really_called_is_judged():
    """The configuration says 1/√H and the function does without: attention that small logits do not show."""
    model = decoder(attention_fn=functools.partial(dot_product_attention, scale=1.0))
    diagnosis = diagnose(model, TOKENS)
    found = diagnosis.alarms[0]
    assert (found.signal, found.link, found.layers) == ("attention_function", "scale", (0, 1))
    assert "The effective scale is 1, no scale at all, where 0.3536 was asked for." in found.evidence
    assert len(found.heads) == LAYERS * HEADS
    assert (diagnosis.measures["function_misfit"] > 0.01).all()


class Stock(nnx.Module):
    """Two layers of stock Flax, whose mask may be off by some keys."""

    def __init__(self, offset, *, observe=measure_layer):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCABULARY, 32, rngs=rngs)
        attention = as_attention_fn(observe=observe)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(HEADS, 32, decode=False, attention_fn=attention, rngs=rngs) for _ in range(LAYERS)]
        )
        self.offset = offset

    def __call__(self, token_ids):
        x = self.embed(token_ids)
        mask = jnp.tri(token_ids.shape[1], k=self.offset, dtype=bool)[None, None]
        for layer in self.layers:
            x = x + layer(x, mask=mask, sow_weights=True)
        return x


@pytest.mark.parametrize("offset", [0, 1])
def test_a_flax_model_is_diagnosed_by_what_it_sows_and_does(offset):
    model = Stock(offset)
    diagnosis = diagnose(model, TOKENS, causal=True)
    assert {one.signal for one in diagnosis.alarms} == ({"future", "future_keys"} if offset else set())
    assert diagnosis.measures["normalized_entropy"].shape == (LAYERS, HEADS)
    call = nnx.capture(nnx.Intermediate)(lambda model: model(jnp.asarray(TOKENS)))
    sown = diagnose(call(model)[1])
    assert {one.signal for one in sown.alarms} == ({"future_keys"} if offset else set())
    np.testing.assert_allclose(sown.measures["max_logit"], diagnosis.measures["max_logit"], rtol=1e-6)


def test_the_measures_of_a_flax_layer_are_those_of_its_own_arrays():
    layer = Stock(0).layers[0]
    x = jax.random.normal(jax.random.key(0), (2, 8, 32))
    call = nnx.capture(nnx.Intermediate)(lambda layer: layer(x, sow_weights=True, is_causal=True))
    (sown,) = call(layer)[1]["attention_measures"]
    expected = measure_layer(layer.query(x), layer.key(x), layer.value(x), is_causal=True)
    assert sown.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(sown[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_any_function_is_judged_by_its_calls():
    table = np.random.default_rng(0).standard_normal((VOCABULARY, 8))

    def running_mean(token_ids):
        x = table[np.asarray(token_ids)]
        return np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[:, None]

    assert diagnose(running_mean, TOKENS, causal=True).findings == ()
    looking = diagnose(lambda token_ids: running_mean(token_ids[:, ::-1]), TOKENS, causal=True, name="backwards")
    assert [one.link for one in looking.alarms] == ["mask"]
    assert looking.subject == "backwards"


def test_a_function_that_raises_is_told_of():
    def broken(token_ids):
        raise RuntimeError("no weights\nhere")

    diagnosis = diagnose(broken, TOKENS)
    assert diagnosis.skipped == (("calls", "it raised RuntimeError: no weights here"),)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3,), {}, TypeError, "subject must be a model, Captures, or what .* sowed, got int"),
        ((decoder,), {}, ValueError, "token_ids must be given for a model"),
        (({},), {}, ValueError, "subject must hold attention_measures, .*; got nothing"),
        (
            ({"layer": {"attention_entropy": (1.0,)}},),
            {},
            ValueError,
            "subject must hold attention_measures, .*; got layer",
        ),
        ((len, np.zeros((2, 3))), {}, TypeError, "token_ids must have an integer dtype, got float"),
        ((len, np.zeros((2, 3, 4), int)), {}, ValueError, r"token_ids must .*\[B, T\] or \[T\]"),
        ((len, TOKENS, np.array([1, 2, 3])), {}, ValueError, r"lengths must have shape \[B\] = \(2,\), got \(3,\)"),
        ((len, TOKENS), {"limits": {"max_logit": 3}}, TypeError, "limits must be Limits, got dict"),
        ((len, TOKENS), {"causal": 1}, TypeError, "causal must be True or False"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message) as raised:
        diagnose(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_captures_take_no_tokens():
    rng = np.random.default_rng(0)
    captures = Captures.of({f"layers.0.{name}": rng.standard_normal((12, 4, 16)) for name in ("query", "key", "value")})
    with pytest.raises(ValueError, match="token_ids and lengths go with a model, not with what was captured or sown"):
        diagnose(captures, TOKENS)


def test_limits_move_the_lines():
    sown = {"layer": {"attention_measures": ({"max_logit": np.array([150.0])},)}}
    assert links(diagnose(sown)) == ["projections"]
    assert links(diagnose(sown, limits=Limits(max_logit=200.0))) == []
