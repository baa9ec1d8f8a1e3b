"""What devices say to each other: every collective of this package, by the name of what it does.

They are called inside `shard_map`. A mesh axis of None has one device, which has nobody to talk to.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from attn_jax.typing import Array


def device_index(axis_name: str | None) -> Array | int:
    """Which device along a mesh axis this one is."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def send(tree: Any, axis_name: str | None, to: Sequence[int] | np.ndarray) -> Any:
    """Every array of device d to device `to[d]`, if there is one; who gets nothing has zeros."""
    if axis_name is None:
        return tree
    pairs = [(device, int(target)) for device, target in enumerate(to) if target in range(len(to))]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), tree)


def pass_on(tree: Any, axis_name: str | None, devices: int) -> Any:
    """Every array to the next device of the ring."""
    return send(tree, axis_name if devices > 1 else None, [(device + 1) % devices for device in range(devices)])


def add_up(tree: Any, axis_names: Sequence[str | None]) -> Any:
    """The sum of every array over the devices along these axes, on each of them."""
    axes = tuple(axis for axis in axis_names if axis is not None)
    return lax.psum(tree, axes) if axes else tree


def largest(tree: Any, axis_name: str | None) -> Any:
    """The largest of every entry over the devices along an axis, on each of them."""
    return tree if axis_name is None else lax.pmax(tree, axis_name)
