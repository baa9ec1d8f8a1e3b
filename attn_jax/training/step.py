"""One step of training, as a pure function, and many of them in one compiled call.

    gradient = ∂loss/∂parameters;  parameters ← parameters - rate · direction(gradient)

A step whose loss, gradient or update is not finite leaves the run as it was, its count included: what is kept is the
last finite state, the count names the step that failed, and runs beside it go on.

A step is one program however many devices do it: where its arrays lie decides who computes what (`Layout`), and no
number changes. Under `pmap` each device runs the program on its own sequences, and the step adds up over them.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from attn_jax.parallel.collectives import add_up, device_index
from attn_jax.parallel.layout import Layout
from attn_jax.training import optimizers
from attn_jax.training.monitor import AttentionMonitor
from attn_jax.training.state import TrainState, key_for, wide
from attn_jax.training.tasks import Batch, Task
from attn_jax.typing import Array, ArrayLike, Int

Metrics = dict[str, Any]

# Called as loss(model, batch, key=…), with the key of dropout, or with None in evaluation. Returns the loss, a scalar,
# and other numbers to log. It is a part of the trace: a function made anew for each call compiles anew. Where there is
# a monitor it is also given observe=…, hands that on to the model, and returns what comes back as "observed".
Loss = Callable[..., tuple[Array, Mapping[str, Array]]]

# What training measures itself.
OWN = ("loss", "gradient_norm", "update_norm", "learning_rate", "attention")


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    loss: Loss,
    monitor: AttentionMonitor | None = None,
    step: Int[ArrayLike, ""] | None = None,
    axis_name: str | None = None,
) -> tuple[TrainState, Metrics]:
    """One step of one run.

    Args:
        state: before it.
        batch: what `loss` takes.
        loss: called as `loss(model, batch, key=key)`; the key is that of the step's dropout.
        monitor: also measures the attention of the model, a `Transformer`.
        step: by which the monitor counts; None: that of the state. Under `vmap` over runs a number that they share
            lets them skip what is not due.
        axis_name: of `pmap`, whose devices have the same state and each a part of the batch: the step is that of the
            whole batch, in which a part counts by the sum of its weights. Dropout draws anew on each device.

    Returns:
        The state after it, or the same one if the loss, the gradient or the update is not finite; and the loss, what
        else the loss function measured, the norms of gradient (before clipping) and update, and the learning rate.
        What the monitor measured is a mapping "attention"; NaN if the step could not be done.

    Raises:
        ValueError: if the loss is no scalar, or measures something under a name that is ours; or on a monitor beside
            an `axis_name`: what it measures of a part of the batch says nothing of the whole.
        TypeError: if the model cannot be monitored, or the loss does not let it be.

    >>> import functools, jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_state, train_step
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> state = init_state(one, optimizer, learning_rate=0.25)
    >>> def loss(model, batch, *, key):
    ...     return ((model.kernel[...] - batch) ** 2).sum(), {}
    >>> after, metrics = train_step(state, jnp.array(3.0), loss=loss)  # w = 1 - 0.25 · 2 (1 - 3)
    >>> float(metrics["loss"]), int(after.step), after.params["kernel"].tolist()
    (4.0, 1, [[2.0]])
    >>> after, metrics = train_step(state, jnp.array(jnp.nan), loss=loss)  # cannot be done
    >>> float(metrics["loss"]), int(after.step), after.params["kernel"].tolist()
    (nan, 0, [[1.0]])
    """
    if monitor is not None and axis_name is not None:
        raise ValueError(
            f"a monitor needs the whole batch, got axis_name={axis_name!r}: shard_train_step gives it that"
        )
    key, share = jax.random.fold_in(key_for(state.key, "dropout"), state.step), jnp.ones(())
    if axis_name is not None:
        key, share = jax.random.fold_in(key, device_index(axis_name)), _share(batch, axis_name)
    observe = None if monitor is None else monitor.observer(state.step if step is None else step)

    def objective(params: Any) -> tuple[Array, Metrics]:
        model = nnx.merge(state.graphdef, params)
        if monitor is not None:
            monitor.check(model)
        value, measured = _measure(loss, model, batch, key, observe)
        if axis_name is not None:
            value, measured = jax.tree.map(lambda x: share * wide(x), (value, measured))
        return value, measured

    (value, measured), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
    gradient, params = jax.tree.map(wide, (gradient, state.params))
    if axis_name is not None:
        value, measured, gradient = add_up((value, measured, gradient), [axis_name])
    direction, optimizer_state = optimizers.directions(state.optimizer).update(gradient, state.optimizer_state, params)
    rate = state.learning_rate * optimizers.schedule(state.optimizer, state.step)
    update = jax.tree.map(lambda x: rate * x, direction)
    moved = jax.tree.map(lambda old, p, u: (p - u).astype(old.dtype), state.params, params, update)

    norms = {"gradient_norm": optax.tree.norm(gradient), "update_norm": optax.tree.norm(update)}
    finite = jnp.isfinite(value) & jnp.isfinite(norms["gradient_norm"]) & jnp.isfinite(norms["update_norm"])
    before, after = (state.params, state.optimizer_state, state.step), (moved, optimizer_state, state.step + 1)
    params, optimizer_state, count = jax.tree.map(functools.partial(jnp.where, finite), after, before)
    state = dataclasses.replace(state, params=params, optimizer_state=optimizer_state, step=count)
    if monitor is not None:
        seen = {**measured.pop("observed"), **monitor.gradient_norms(gradient)}
        measured["attention"] = {name: jnp.where(finite, x, monitor.unknown(name)) for name, x in seen.items()}
    return state, {"loss": value, **measured, **norms, "learning_rate": rate}


@functools.partial(
    jax.jit, static_argnames=("loss", "batch_size", "count", "monitor", "layout"), donate_argnames="state"
)
def train_steps(
    state: TrainState,
    task: Task,
    *,
    loss: Loss,
    batch_size: int,
    count: int,
    monitor: AttentionMonitor | None = None,
    layout: Layout | None = None,
) -> tuple[TrainState, Metrics]:
    """`count` steps of one run, or of all runs of the state, in one call.

    The state is consumed: its arrays are reused for the result. With a layout it is that of one run and lies as
    `layout.place` puts it, and so do batches and result; the metrics are on every device.

    Args:
        state: before them.
        task: where the batches come from.
        loss, monitor: as in `train_step`.
        batch_size: sequences of a step.
        count: steps.
        layout: of the arrays on the devices of a mesh; None: all on one.

    Returns:
        The state after them, and the metrics of each step, `[count]` or `[runs, count]`.

    >>> import functools, jax
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_state, tasks, train_steps
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> state = init_state(one, optimizer, learning_rate=0.25)
    >>> def loss(model, batch, *, key):  # at a rate of 0.25 each step halves w
    ...     return (model.kernel[...] ** 2).sum(), {}
    >>> state, metrics = train_steps(state, tasks.Copy(), loss=loss, batch_size=1, count=3)
    >>> metrics["loss"].tolist(), state.params["kernel"].tolist()
    ([1.0, 0.25, 0.0625], [[0.125]])
    """

    # Shared by all runs but those that diverged and stay behind, so that `vmap` leaves the monitor's `cond` one.
    numbers = jnp.max(state.step) + jnp.arange(count)

    def run(state: TrainState) -> tuple[TrainState, Metrics]:
        data_key = key_for(state.key, "data")

        def step(state: TrainState, number: Array) -> tuple[TrainState, Metrics]:
            batch = task.batch(data_key, state.step, batch_size)
            one = functools.partial(train_step, loss=loss, monitor=monitor, step=number)
            return one(state, batch) if layout is None else layout.run(one, state, batch)

        return jax.lax.scan(step, state, numbers)

    return run(state) if state.runs is None else jax.vmap(run)(state)


@functools.partial(jax.jit, static_argnames=("loss", "batch_size", "count", "layout"))
def evaluate(
    state: TrainState, task: Task, *, loss: Loss, batch_size: int, count: int, layout: Layout | None = None
) -> Metrics:
    """The mean loss on what the task holds out, and the mean of what else is measured, without dropout.

    A batch counts by the sum of its weights. Every run, whatever its seed, meets the same `count` batches.

    Args:
        state: of one run or of many.
        task: whose held-out sequences are met.
        loss: as in `train_step`.
        batch_size: sequences of a batch.
        count: batches.
        layout: as in `train_steps`.

    Returns:
        Scalars, or `[runs]`.

    >>> import functools, jax
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, evaluate, init_state, tasks
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> state = init_state(one, optimizer, learning_rate=0.25)
    >>> def loss(model, batch, *, key):
    ...     return model.kernel[...].sum(), {"asked": batch.weights.mean()}
    >>> task = tasks.Copy(num_symbols=4, distance=1, length=4)  # which asks for three symbols of four
    >>> {name: float(x) for name, x in evaluate(state, task, loss=loss, batch_size=2, count=3).items()}
    {'asked': 0.75, 'loss': 1.0}
    """
    batches = task.evaluation(count, batch_size)

    def run(state: TrainState) -> Metrics:
        model = nnx.merge(state.graphdef, state.params)

        def measure(batch: Batch) -> Metrics:
            value, measured = _measure(loss, model, batch if layout is None else layout.spread(batch), None)
            return {"loss": value, **measured}

        counts = batches.weights.sum(axis=(1, 2))
        total = jnp.maximum(counts.sum(), 1)
        return jax.tree.map(lambda x: jnp.tensordot(counts, wide(x), 1) / total, jax.lax.map(measure, batches))

    return run(state) if state.runs is None else jax.vmap(run)(state)


def _share(batch: Batch, axis_name: str) -> Array:
    """Of all that counts on the devices along the axis, what lies on this one. Losses are means over what counts."""
    count = wide(batch.weights.sum())
    total = add_up(count, [axis_name])
    return count / jnp.where(total == 0, 1, total)


def _measure(
    loss: Loss, model: nnx.Module, batch: Batch, key: Array | None, observe: Callable[..., Any] | None = None
) -> tuple[Array, Metrics]:
    """The loss, at least float32, and its metrics."""
    if observe is None:
        value, measured = loss(model, batch, key=key)
    else:
        parameters = inspect.signature(loss).parameters.values()
        if not any(p.name == "observe" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise TypeError(f"with a monitor, loss must take observe= and hand it on to the model; {loss!r} does not")
        value, measured = loss(model, batch, key=key, observe=observe)
        if not isinstance(measured.get("observed"), Mapping):
            raise TypeError('with a monitor, loss must return what its model observed as "observed"')
    if jnp.shape(value) != ():
        raise ValueError(f"loss must return one number and a mapping of metrics, got shape {jnp.shape(value)}")
    if taken := [name for name in OWN if name in measured]:
        raise ValueError(f"loss must not measure {', '.join(taken)}: training does")
    return wide(value), dict(measured)
