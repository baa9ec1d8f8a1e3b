"""What a user finds: every public name is explained and shown."""

import importlib
import inspect
import pkgutil

import pytest

import attn_jax

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
