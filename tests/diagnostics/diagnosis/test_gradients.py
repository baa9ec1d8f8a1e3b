"""Gradients that are no derivatives of the loss, do not arrive or are not finite: each is told, and a sound one not."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.diagnostics import Limits
from attn_jax.diagnostics.diagnosis import gradients

L, WIDTH, VOCABULARY = 2, 6, 11
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 7))


class Attention(nnx.Module):
    """Two layers of one head, small enough to be differentiated in a moment."""

    def __init__(self, *, query=lambda x: x, key=lambda x: x, value=lambda x: x, output=lambda x: x, causal=True):
        rng = np.random.default_rng(1)
        self.embedding = nnx.Param(jnp.asarray(rng.standard_normal((VOCABULARY, WIDTH)), jnp.float32))
        for name in ("query", "key", "value"):
            drawn = rng.standard_normal((L, WIDTH, WIDTH)) / WIDTH**0.5
            setattr(self, f"{name}_weight", nnx.Param(jnp.asarray(drawn, jnp.float32)))
        self.config = types.SimpleNamespace(causal=causal, head="tied" if causal else None)
        self.through = (query, key, value)
        self.output = output

    def __call__(self, tokens):
        x = self.embedding[tokens]
        for layer in range(L):
            weights = (self.query_weight, self.key_weight, self.value_weight)
            query, key, value = (go(x @ w[layer]) for go, w in zip(self.through, weights, strict=True))
            logits = jnp.einsum("bth,bsh->bts", query, key) / WIDTH**0.5
            logits = jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -1e9)
            x = x + jax.nn.softmax(logits) @ value
        return self.output(x @ self.embedding[...].T)


def with_gradient(change):
    """The identity, with another gradient."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, gradient: (change(gradient),))
    return same


def examined(model, limits=None):
    return list(gradients.examine(model, TOKENS, limits or Limits()))


@pytest.mark.parametrize("causal", [True, False])
def test_sound_gradients(causal):
    assert examined(Attention(causal=causal)) == []


@pytest.mark.parametrize(
    ("through", "says"),
    [
        ({"query": with_gradient(lambda x: 3 * x)}, r"Along the gradient of W_Q the loss changes by 0\.[2-4]"),
        ({"value": with_gradient(lambda x: -x)}, r"Along the gradient of W_V the loss changes by -[01]\."),
        ({"key": jax.lax.stop_gradient}, "No gradient reaches W_K, though the loss changes with it"),
        ({"value": with_gradient(lambda x: x * jnp.nan)}, "Gradients of .*W_V are not finite"),
    ],
)
def test_a_gradient_that_is_none(through, says):
    (one,) = [x for x in examined(Attention(**through)) if x.signal == "gradients"]
    assert (one.link, one.severity) == ("gradients", "serious")
    assert re.search(says, one.evidence), one.evidence


def test_queries_and_keys_that_hardly_learn():
    model = Attention(query=lambda x: 1e-4 * x, key=lambda x: 1e-4 * x)
    (one,) = [x for x in examined(model, Limits(gradient_ratio=1e-3)) if x.signal == "gradient_ratio"]
    assert (one.severity, one.layers) == ("notice", (0, 1))
    assert one.value < one.limit == 1e-3
    assert not [x for x in examined(model, Limits(gradient_ratio=None)) if x.signal == "gradient_ratio"]


def test_a_key_that_nothing_depends_on_needs_no_gradient():
    assert not [x for x in examined(Attention(key=jnp.zeros_like)) if x.signal == "gradients"]


def test_a_loss_that_is_not_finite_tells_nothing_of_gradients():
    assert examined(Attention(output=lambda x: x * jnp.nan)) == []


def refuse(x):
    raise NotImplementedError("forward only")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda tokens: tokens, "the model is no NNX module"),
        (Attention(output=refuse), "the model cannot be differentiated (NotImplementedError)"),
    ],
)
def test_why_there_are_none(model, says):
    assert examined(model) == [("gradients", says)]


def test_large_models_are_left_alone(monkeypatch):
    monkeypatch.setattr(gradients, "MOST_PARAMETERS", 100)
    assert examined(Attention()) == [("gradients", "the model has 282 parameters, and 100 is the most")]
