"""How a sequence lies on the devices of a ring.

In order, device d of D holds the d-th part of the sequence. Under a causal mask the first device would then be done at
once, and the last one would still be at work. So the sequence is cut into 2 · D chunks, and device d holds the chunks
d and 2 · D - 1 - d, an early one and a late one:

    D = 4    device 0: 0 7    device 1: 1 6    device 2: 2 5    device 3: 3 4

What the late chunk sees more, the early one sees less: every device has the same work.

Reference: Brandon et al. 2023 (striped attention) for the imbalance; Llama Team 2024, section 3.3.2, for the ring.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from attn_jax.parallel import collectives
from attn_jax.parallel.meshes import axis_size, check_divides
from attn_jax.typing import Array


@dataclasses.dataclass(frozen=True)
class Ring:
    """Which mesh axes share a sequence, the batch and the heads, and in which order the sequence lies there.

    Attributes:
        mesh: the devices.
        axis_name, batch_axis, head_axis: one of its axes each, or None.
        pieces: the chunks that a device holds: 1, in order, or 2, in zig-zag.

    Raises:
        ValueError, TypeError: a mesh that is none, or an axis that it does not have.
    """

    mesh: Mesh
    axis_name: str | None = None
    batch_axis: str | None = None
    head_axis: str | None = None
    pieces: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
            raise ValueError(f"mesh must have automatic axes, as make_mesh makes them, got {self.mesh.axis_types}")
        for axis in self.axes:
            axis_size(self.mesh, axis)
        if len(set(self.axes)) < len(self.axes):
            raise ValueError(f"axis_name, batch_axis and head_axis must be different axes, got {self.axes}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that are in use."""
        return tuple(axis for axis in (self.axis_name, self.batch_axis, self.head_axis) if axis is not None)

    @property
    def devices(self) -> int:
        """D, the devices of the ring."""
        return 1 if self.axis_name is None else axis_size(self.mesh, self.axis_name)

    @property
    def chunks(self) -> int:
        """How many chunks a sequence has."""
        return self.devices * self.pieces

    def check_shares(self, query: Array, key: Array) -> None:
        """Raises unless the devices along each axis can have equal shares of `[*B, T, N, H]` and `[*B, S, K, H]`."""
        if self.batch_axis is not None:
            if query.ndim == 3:
                raise ValueError(f"query must have a batch axis for batch_axis={self.batch_axis!r}, got {query.shape}")
            check_divides("the first batch axis", query.shape[0], self.mesh, self.batch_axis)
        if self.head_axis is not None:
            check_divides("the number of key/value heads", key.shape[-2], self.mesh, self.head_axis)

    def chunk(self, device: Array | int, piece: Array | int) -> Array:
        """Which chunk of the sequence is the `piece`-th of a device."""
        return jnp.where(jnp.asarray(piece) == 0, device, 2 * self.devices - 1 - device)

    def spec(self, letters: PartitionSpec) -> PartitionSpec:
        """The mesh axes that share an array, whose axes are spelled as in `parts.py`."""
        axes = {"b": self.batch_axis, "n": self.head_axis, "t": self.axis_name, "k": self.axis_name}
        return PartitionSpec(*(axes.get(letter) for letter in letters))


def to_zigzag(tree: Any, letters: Any, ring: Ring) -> Any:
    """Arrays that lie in order, moved to where the ring wants their axes `t` and `k`."""
    return _moved(_to_zigzag, tree, letters, ring)


def from_zigzag(tree: Any, letters: Any, ring: Ring) -> Any:
    """The inverse of `to_zigzag`."""
    return _moved(_from_zigzag, tree, letters, ring)


def _moved(move: Any, tree: Any, letters: Any, ring: Ring) -> Any:
    if ring.pieces == 1:
        return tree

    def one(x: Array, spelling: PartitionSpec) -> Array:
        axis = next((axis for axis, letter in enumerate(spelling) if letter in ("t", "k")), None)
        if axis is None:
            return x
        spec = ring.spec(spelling)
        return jax.shard_map(lambda x: move(x, axis, ring), mesh=ring.mesh, in_specs=spec, out_specs=spec)(x)

    return jax.tree.map(one, tree, letters)


def _to_zigzag(x: Array, axis: int, ring: Ring) -> Array:
    """Of each device, two neighbouring chunks along `axis`, as the two that it holds in zig-zag."""
    first, second = jnp.split(x, 2, axis)
    first = collectives.send(first, ring.axis_name, _targets(ring.devices, 0))
    second = collectives.send(second, ring.axis_name, _targets(ring.devices, 1))
    return jnp.concatenate(_swapped_on_odd(first, second, ring), axis)


def _from_zigzag(x: Array, axis: int, ring: Ring) -> Array:
    first, second = jnp.split(x, 2, axis)
    first, second = _swapped_on_odd(first, second, ring)
    first = collectives.send(first, ring.axis_name, np.argsort(_targets(ring.devices, 0)))
    second = collectives.send(second, ring.axis_name, np.argsort(_targets(ring.devices, 1)))
    return jnp.concatenate([first, second], axis)


def _targets(devices: int, half: int) -> list[int]:
    """Where the first or the second half of each device's part goes: no two to one device."""
    chunks = [2 * device + half for device in range(devices)]
    return [min(chunk, 2 * devices - 1 - chunk) for chunk in chunks]


def _swapped_on_odd(x: Array, y: Array, ring: Ring) -> tuple[Array, Array]:
    """The early chunk of device d is chunk d: the first half of a part where d is even, else the second."""
    odd = collectives.device_index(ring.axis_name) % 2 == 1
    return jnp.where(odd, y, x), jnp.where(odd, x, y)
