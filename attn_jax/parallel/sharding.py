"""A training step on a mesh, by `jit` and where its arrays lie."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from attn_jax.parallel.layout import Layout


def shard_train_step(
    step: Callable[..., tuple[Any, Any]], mesh: Mesh, *, shard_parameters: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`step(state, batch)` done by all devices of a mesh, to the same numbers but for the order of sums.

        step = functools.partial(train_step, loss=token_loss)
        step = shard_train_step(step, make_mesh(data=2, heads=2, sequence=2))
        state, metrics = step(state, batch)

    XLA cuts the dense attention by sequences and heads alone. A model whose `attention_fn` is
    `functools.partial(ring_attention, mesh=mesh)` also leaves keys and values where they are along `sequence`.

    Args:
        step: a function of a state and a batch that returns the state after it and what was measured: `train_step`.
        mesh: of `make_mesh`.
        shard_parameters: whether parameters and moments are spread along `data`, or each device has them all.

    Returns:
        The step, compiled. It takes a state and a batch that lie anywhere; the state that it returns lies as `Layout`
        says, and what was measured on every device.

    Raises:
        ValueError: here if the mesh lacks an axis; in a step on a batch or on heads that cannot be cut evenly.

    >>> import numpy as np
    >>> from attn_jax.parallel import make_mesh, shard_train_step
    >>> def step(state, batch):  # goes half the way to the mean of all
    ...     return (state + batch.mean()) / 2, {"mean": batch.mean()}
    >>> run = shard_train_step(step, make_mesh(data=jax.device_count()))
    >>> state, metrics = run(np.float32(0), np.full((jax.device_count(), 4), 3, np.float32))
    >>> float(state), float(metrics["mean"])
    (1.5, 3.0)
    """
    layout = Layout(mesh, shard_parameters)

    @jax.jit
    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        return layout.run(step, state, batch)

    return lambda state, batch: run(layout.place(state), layout.place_batch(batch))
