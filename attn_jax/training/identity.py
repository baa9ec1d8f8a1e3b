"""What a run is, in words that are the same in every process: what a checkpoint is compared by before it is used."""

import dataclasses
import functools
import hashlib
import sys
from importlib import metadata
from typing import Any

import jax
import numpy as np
from flax import nnx

from attn_jax.training.state import TrainState

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def identity(state: TrainState) -> dict[str, dict[str, Any]]:
    """The versions of the libraries and the architecture of the model."""
    return {"versions": versions(), "architecture": architecture(state)}


def difference(then: Any, now: Any) -> str:
    """What differs between two records, the first few fields, or an empty text."""
    then = then if isinstance(then, dict) else {}
    names = [name for name in {**now, **then} if then.get(name) != now.get(name)]
    shown = [f"{name} is {then.get(name, 'absent')} there, {now.get(name, 'absent')} here" for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def device() -> str:
    """What computes: the same bits are promised on the same devices alone."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}"


def versions() -> dict[str, str]:
    """Of what decides the bits of a run, and how they are stored."""
    own = sys.modules["attn_jax"].__version__  # the package is there, but on a floor above: nothing is imported from it
    return {"attn_jax": own, **{name: metadata.version(name) for name in LIBRARIES}}


def architecture(state: TrainState) -> dict[str, Any]:
    """What the model is, by name: its class, the fields of its `config` if it has one, and its parameters' shapes."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[state.step.ndim :], x.dtype), state.params)
    model = nnx.merge(state.graphdef, abstract)
    config = getattr(model, "config", None)
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        **{field.name: describe(getattr(config, field.name)) for field in fields},
    }


def describe(value: Any) -> str:
    """A value as text that is the same in every process: functions by name, arrays by what they hold."""
    if isinstance(value, functools.partial):
        options = [f"{name}={describe(x)}" for name, x in sorted(value.keywords.items())]
        return f"partial({', '.join([describe(value.func), *map(describe, value.args), *options])})"
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(fields)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
