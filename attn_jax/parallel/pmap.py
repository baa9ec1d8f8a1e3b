"""Data parallel training the classic way: every device runs the same program on its own sequences."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attn_jax import checks

AXIS = "data"


def pmap_train_step(
    step: Callable[..., tuple[Any, Any]], *, devices: Sequence[Any] | None = None
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`step(state, batch)` by `jax.pmap`: each device takes a part of the sequences, and gradients are added up.

        step = pmap_train_step(functools.partial(train_step, loss=token_loss))
        state, metrics = step(state, batch)

    Parts count by the sum of their weights: the mean of the devices' means would be another number.

    Args:
        step: called as `step(state, batch, axis_name="data")` on each device: `train_step`.
        devices: those that share the work; None: all of this process.

    Returns:
        The step, compiled. State and metrics come back on every device, as one.

    Raises:
        ValueError: in a step, if the devices cannot share the sequences of a batch.

    >>> from attn_jax.parallel import pmap_train_step
    >>> def step(state, batch, *, axis_name):  # goes half the way to the mean of all
    ...     mean = jax.lax.pmean(batch.mean(), axis_name)
    ...     return (state + mean) / 2, {"mean": mean}
    >>> run = pmap_train_step(step, devices=jax.local_devices()[:1])
    >>> state, metrics = run(np.float32(0), np.array([2, 4], np.float32))
    >>> float(state), float(metrics["mean"])
    (1.5, 3.0)
    """
    devices = jax.local_devices() if devices is None else list(devices)
    count = len(devices)
    run = jax.pmap(
        functools.partial(step, axis_name=AXIS), AXIS, in_axes=(None, 0), out_axes=(None, None), devices=devices
    )

    everywhere = NamedSharding(Mesh(np.asarray(devices), (AXIS,)), PartitionSpec())

    def part(x: Any) -> Any:
        checks.minimum_rank("batch", x, 1, "[B, ...]")
        if np.shape(x)[0] % count:
            raise ValueError(f"the sequences of a batch must be a multiple of the {count} devices, got {len(x)}")
        return x.reshape(count, -1, *x.shape[1:])

    # Where the step leaves a state, so that the first one compiles for all.
    return lambda state, batch: run(jax.device_put(state, everywhere), jax.tree.map(part, batch))
