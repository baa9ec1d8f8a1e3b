"""Meshes: devices on a grid whose axes say what each of them holds.

    data        sequences of a batch, and parameters where they are spread too
    heads       heads of attention, and the inner width of the MLP
    sequence    tokens of a sequence, whose keys and values go round a ring

The devices of a process follow each other, so that `data`, which talks least, is what crosses machines.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from attn_jax import checks

AXES = ("data", "heads", "sequence")


def make_mesh(*, data: int = 1, heads: int = 1, sequence: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data · heads · sequence` devices, with automatic axes.

    Args:
        data, heads, sequence: devices along each axis.
        devices: those of the mesh; None: all there are, of all processes.

    Raises:
        ValueError: if there are more or fewer devices than that.
        TypeError: on a size that is no integer.

    >>> from attn_jax.parallel import make_mesh
    >>> make_mesh(data=jax.device_count()).axis_names
    ('data', 'heads', 'sequence')
    >>> make_mesh(data=2, heads=4, devices=jax.devices()[:1])
    Traceback (most recent call last):
    ValueError: a mesh of data 2 · heads 4 · sequence 1 takes 8 devices, got 1
    """
    sizes = [checks.positive_int(name, n) for name, n in zip(AXES, (data, heads, sequence), strict=True)]
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) != math.prod(sizes):
        asked = " · ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(f"a mesh of {asked} takes {math.prod(sizes)} devices, got {len(devices)}")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def axis_size(mesh: Mesh, name: str) -> int:
    """How many devices lie along an axis. Raises ValueError if the mesh has none of that name."""
    if name not in mesh.shape:
        raise ValueError(f"the mesh has no axis {name!r}, only {', '.join(map(repr, mesh.axis_names))}")
    return mesh.shape[name]


def check_divides(what: str, size: int, mesh: Mesh, axis: str) -> None:
    """Raises ValueError unless `size`, of what `what` says, can be cut evenly along an axis of the mesh."""
    devices = axis_size(mesh, axis)
    if size % devices:
        raise ValueError(f"{what} must be a multiple of the {devices} devices along {axis!r}, got {size}")
