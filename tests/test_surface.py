"""What a user finds: every public name is explained and shown."""

import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import attn_jax
from attn_jax import biases, masks, positions
from attn_jax.nn.mixers.base import Mixer, MixerState
from attn_jax.training.tasks.base import Generated, TaskBase

PACKAGES = [
    "attn_jax",
    *(found.name for found in pkgutil.walk_packages(attn_jax.__path__, "attn_jax.") if found.ispkg),
]


def public(package):
    """The functions and classes that a package lists."""
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return {name: thing for name, thing in found.items() if callable(thing)}


def test_the_packages_that_users_import_from_list_their_names():
    assert len([package for package in PACKAGES if public(package)]) >= 12


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring_with_an_example(package):
    """The examples are run by `pytest --doctest-modules attn_jax`."""
    bare = [name for name, thing in public(package).items() if ">>>" not in (inspect.getdoc(thing) or "")]
    assert bare == []


X, KEY = jnp.zeros((2, 3, 1, 4)), jax.random.key(0)
LEFT_OUT = {
    "mask": (masks.Mask, (), lambda one: attn_jax.attention_weights(X, X, mask=one), r"evaluate\(tile\)"),
    "bias": (biases.Bias, (), lambda one: attn_jax.attention_weights(X, X, bias=one), r"evaluate\(tile, dtype\)"),
    "scaling": (
        positions.Scaling, (), lambda one: positions.apply_rotary(X, jnp.arange(3), scaling=one), r"frequencies\(width, base, length\)",
    ),
    "mixer": (Mixer, (4,), lambda one: one(jnp.zeros((2, 3, 4))), r"_mix\(x, lengths, state\)"),
    "state": (Mixer, (4,), lambda one: one.empty_state(2), r"_empty\(batch, dtype\)"),
    "training": (TaskBase, (), lambda one: one.batch(KEY, 0, 2), r"_train\(key\)"),
    "evaluation": (TaskBase, (), lambda one: one.evaluation(1, 2), r"_evaluate\(index\)"),
    "draw": (Generated, (), lambda one: one.batch(KEY, 0, 2), r"draw\(key, \*, held_out\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_class_of_ones_own_leaves_out_is_named(name):
    base, sizes, use, method = LEFT_OUT[name]

    class Mine(base):
        state_type = MixerState

    options = {"is_causal": True, "dtype": None, "precision": None} if base is Mixer else {}
    one = Mine(*sizes, **options)
    with pytest.raises(NotImplementedError, match=f"^Mine must define {method}"):
        use(one)
