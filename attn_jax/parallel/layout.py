"""Where the arrays of a training run lie on a mesh.

    batch        sequences along `data`, tokens along `sequence` (a length that does not divide: on all of it)
    parameters   a head's own along `heads`, and a part of the MLP's inner width with them; all else on every device,
                 or spread along `data` (each gathered where it is used), and the optimizer's moments as they are

Only this is said: XLA finds out who computes what, and adds up where devices hold parts of a sum.

Reference: Shoeybi et al. 2019 (Megatron: heads and MLP); Rajbhandari et al. 2020 (ZeRO: parameters along `data`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attn_jax import checks
from attn_jax.parallel.meshes import AXES, axis_size, check_divides

# Which axis of a parameter, counted from its last, is that of the heads or of the MLP's inner width.
MLP = {"gate_weight": 1, "up_weight": 1, "down_weight": 2, "gate_bias": 1, "up_bias": 1}
HEAD_AXES = {
    **MLP,
    "query_weight": 2, "key_weight": 2, "value_weight": 2, "output_weight": 3,
    "query_bias": 2, "key_bias": 2, "value_bias": 2, "log_temperature": 1, "relative_table": 1, "sinks": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and whether parameters are spread along `data`.

    Attributes:
        mesh: of the axes `data`, `heads` and `sequence`, as `make_mesh` makes it.
        shard_parameters: False: a copy for each device along `data`; True: each has a part.

    Raises:
        ValueError: if the mesh lacks an axis.
        TypeError: on a mesh that is none.

    >>> from attn_jax.parallel import Layout, make_mesh
    >>> layout = Layout(make_mesh(data=jax.device_count()))
    >>> batch = layout.place_batch(np.zeros((jax.device_count(), 16), np.int32))
    >>> tuple(batch.sharding.spec)
    ('data', 'sequence')
    >>> Layout(jax.make_mesh((1,), ("data",)))
    Traceback (most recent call last):
    ValueError: the mesh has no axis 'heads', only 'data'
    """

    mesh: Mesh
    shard_parameters: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh must be a Mesh, as make_mesh makes it, got {type(self.mesh).__name__}")
        checks.boolean("shard_parameters", self.shard_parameters)
        for name in AXES:
            axis_size(self.mesh, name)

    def state_shardings(self, state: Any) -> Any:
        """A `NamedSharding` for every array of a training state, by the name of the parameter that it belongs to."""

        def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path[-1:], simple=True)
            return NamedSharding(self.mesh, self._parameter_spec(name, np.shape(leaf)))

        return jax.tree_util.tree_map_with_path(sharding, state)

    def batch_shardings(self, batch: Any) -> Any:
        """A `NamedSharding` for every array `[B, T, ...]` of a batch.

        Raises:
            ValueError: if the devices along `data` cannot share the sequences.
        """

        def sharding(leaf: Any) -> NamedSharding:
            checks.minimum_rank("batch", leaf, 2, "[B, T, ...]")
            size, length = np.shape(leaf)[:2]
            check_divides("the sequences of a batch", size, self.mesh, "data")
            whole = length % axis_size(self.mesh, "sequence")
            return NamedSharding(self.mesh, PartitionSpec("data", None if whole else "sequence"))

        return jax.tree.map(sharding, batch)

    def place(self, state: Any) -> Any:
        """The state with its arrays where they belong. Those that lie there already stay."""
        return _put(state, self.state_shardings(state))

    def place_batch(self, batch: Any) -> Any:
        """A batch with its arrays where they belong."""
        return _put(batch, self.batch_shardings(batch))

    def copy_to_all(self, tree: Any) -> Any:
        """Every array on every device as a whole. Of several processes all call this, and can then read its values."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(_same, out_shardings=everywhere)(tree)

    def fetch(self, tree: Any) -> Any:
        """Every array as a whole on one device of this process. Of several processes all call this."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data, self.copy_to_all(tree))

    def spread(self, batch: Any) -> Any:
        """Inside `jit`: a batch whose arrays lie where they belong."""
        return jax.lax.with_sharding_constraint(batch, self.batch_shardings(batch))

    def run(self, step: Callable[..., tuple[Any, Any]], state: Any, batch: Any) -> tuple[Any, Any]:
        """Inside `jit`: `step(state, batch)`, what goes in and the state that comes out where they belong."""
        shardings = self.state_shardings(state)
        state = jax.lax.with_sharding_constraint(state, shardings)
        state, metrics = step(state, self.spread(batch))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return (
            jax.lax.with_sharding_constraint(state, shardings),
            jax.lax.with_sharding_constraint(metrics, everywhere),
        )

    def _parameter_spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec: list[str | None] = [None] * len(shape)
        heads, data = axis_size(self.mesh, "heads"), axis_size(self.mesh, "data")
        from_last = HEAD_AXES.get(name, 0)
        if heads > 1 and 0 < from_last <= len(shape):
            axis = len(shape) - from_last
            what = "inner width" if name in MLP else "heads"
            check_divides(f"the {what} of {name}", shape[axis], self.mesh, "heads")
            spec[axis] = "heads"
        if self.shard_parameters and data > 1:
            free = [i for i, taken in enumerate(spec) if taken is None and shape[i] % data == 0]
            if free:
                spec[max(free, key=lambda i: (shape[i], i))] = "data"
        return PartitionSpec(*spec)


def _same(tree: Any) -> Any:
    return tree


def _put(tree: Any, shardings: Any) -> Any:
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.jit(_same, out_shardings=shardings)(tree)  # what every process has, as one array of all
