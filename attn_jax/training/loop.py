"""The loop around the step: evaluation, log, checkpoints, signals, and the end of a run that diverged.

    state = init_state(functools.partial(Transformer, config), OptimizerConfig(), learning_rate=1e-3, seed=0)
    result = train(state, task, config=LoopConfig(steps=1000), directory="results/run")

The same call continues an interrupted run, and ends in the same bits as if it had not been interrupted; on GPUs that
takes `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, without which no two runs are the same.

With a `Layout` the arrays of the run lie on a mesh of devices, of one process or of several that all make this call. A
run may be continued on other devices: the sums are then made in another order, and the last digits differ.
"""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax import checks
from attn_jax.parallel import distributed
from attn_jax.parallel.layout import Layout
from attn_jax.parallel.meshes import check_divides
from attn_jax.training.checkpoints import Checkpoints
from attn_jax.training.divergence import DivergedError, Divergence, locate
from attn_jax.training.files import RunError, holding
from attn_jax.training.identity import describe
from attn_jax.training.monitor import AttentionMonitor, Watch, explain
from attn_jax.training.objectives import SpreadLoss, token_loss
from attn_jax.training.progress import Progress, Reporter, Silent, Speed
from attn_jax.training.run_log import Row, RunLog
from attn_jax.training.signals import Pending, waiting
from attn_jax.training.state import TrainState, take_run
from attn_jax.training.step import Loss, evaluate, train_steps
from attn_jax.training.tasks import Task


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """How long a run is, and how often it does what.

    Attributes:
        steps: in all.
        batch_size: sequences of a step.
        steps_per_call: steps in one compiled call. Signals wait for its end.
        evaluate_every: steps between evaluations, which are also made before the first step and after the last; None:
            no evaluation.
        evaluation_batches: of an evaluation, as large as those of training.
        checkpoint_every: steps between checkpoints; the last step always leaves one.
        keep: how many checkpoints are kept.

    Raises:
        ValueError, TypeError: on sizes out of range, or that `steps_per_call` does not divide.

    >>> from attn_jax.training import LoopConfig
    >>> LoopConfig(steps=25)
    Traceback (most recent call last):
    ValueError: steps must be a multiple of steps_per_call = 10, got 25
    >>> LoopConfig(steps=30).checkpoint_every
    100
    """

    steps: int
    batch_size: int = 16
    steps_per_call: int = 10
    evaluate_every: int | None = 100
    evaluation_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "evaluate_every" or value is not None:
                least = 2 if field.name == "keep" else 1
                object.__setattr__(self, field.name, checks.positive_int(field.name, value, least=least))
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if (getattr(self, name) or 0) % self.steps_per_call:
                raise ValueError(
                    f"{name} must be a multiple of steps_per_call = {self.steps_per_call}, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class Trained:
    """What `train` returns.

    Attributes:
        state: after the last step; a run that diverged is at its last finite state.
        rows: of the log, also those from before an interruption: {"step": …, "kind": "train", "evaluation" or
            "divergence", "loss": …, …}; a measured value is a number, or a list of one a run; null is not finite.
            With a monitor also of kind "attention", lists of heads in lists of layers, and "finding".
        diverged: the runs that did, of many.

    >>> import functools, jax
    >>> from flax import nnx
    >>> from attn_jax.training import LoopConfig, OptimizerConfig, init_state, tasks, train
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> state = init_state(one, optimizer, learning_rate=0.25)
    >>> def loss(model, batch, *, key):  # at a rate of 0.25 each step halves w
    ...     return (model.kernel[...] ** 2).sum(), {}
    >>> config = LoopConfig(steps=3, steps_per_call=1, evaluate_every=None)
    >>> trained = train(state, tasks.Copy(), config=config, loss=loss)
    >>> [row["loss"] for row in trained.rows if row["kind"] == "train"], trained.state.params["kernel"].tolist()
    ([1.0, 0.25, 0.0625], [[0.125]])
    """

    state: TrainState
    rows: list[Row]
    diverged: tuple[Divergence, ...]


def train(
    state: TrainState,
    task: Task,
    *,
    config: LoopConfig,
    loss: Loss = token_loss,
    directory: str | os.PathLike[str] | None = None,
    monitor: AttentionMonitor | None = None,
    record: Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
    layout: Layout | None = None,
) -> Trained:
    """Trains one run, or the many of a state at once, from where it was interrupted if it was.

    With a directory, a first SIGTERM or Ctrl-C waits until the call under way is done and saved. Of many runs those
    that diverge are left behind, and training ends when none is left.

    Args:
        state: before the first step. It stays as it is.
        task: where the batches come from.
        config: how long, and how often what.
        loss: called as `loss(model, batch, key=…)`.
        directory: of checkpoints and log; None: nothing is kept.
        monitor: measures the attention of the model, a `Transformer`, and tells what goes beyond its limits.
        record: what else makes this run what it is, as JSON holds it: a checkpoint of another record is refused.
        reporter: who is told, of the first process; None: nobody.
        layout: of the arrays on the devices of a mesh; None: all on one. For one run, not for many.

    Raises:
        DivergedError: if the one run does; what was saved before is kept.
        RunError: in one line, if the directory cannot be used or holds another run.
        TypeError: if the model cannot be monitored, or the loss does not let it be.
        ValueError: if `state` has been trained already, the directory holds more steps than `config.steps`, the mesh
            cannot share batches or heads evenly, or several processes have no layout.

    >>> import functools, tempfile, jax
    >>> from flax import nnx
    >>> from attn_jax.training import LoopConfig, OptimizerConfig, init_state, tasks, train
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> state = init_state(one, optimizer, learning_rate=0.25)
    >>> def loss(model, batch, *, key):  # at a rate of 0.25 each step halves w
    ...     return (model.kernel[...] ** 2).sum(), {}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     for steps in (2, 4):  # the second call continues the first
    ...         config = LoopConfig(steps=steps, steps_per_call=1, evaluate_every=None)
    ...         trained = train(state, tasks.Copy(), config=config, loss=loss, directory=directory)
    >>> [row["loss"] for row in trained.rows]
    [1.0, 0.25, 0.0625, 0.015625]
    """
    if (begun := int(jnp.max(state.step))) != 0:
        raise ValueError(f"state must be one before the first step, got one after {begun}: train continues by itself")
    if monitor is not None:
        monitor.check(nnx.merge(state.graphdef, state.params))
    state, task = _place(state, task, config, layout)
    with contextlib.ExitStack() as stack:
        path, checkpoints, restored, pending = None, None, None, Pending()
        if directory is not None:
            path = distributed.in_first(lambda: stack.enter_context(holding(directory)))
            checkpoints = Checkpoints(
                path / "checkpoints", run=_describe_run(state, task, config, loss, record or {}), keep=config.keep
            )
            restored = checkpoints.restore(state)
            pending = stack.enter_context(waiting())
        done = 0 if restored is None else restored.step
        if done > config.steps:
            raise ValueError(f"steps must be at least {done}, which {directory} holds, got {config.steps}")
        log = stack.enter_context(contextlib.closing(RunLog(path, step=restored.step if restored else None)))
        reporter = Silent() if reporter is None or not distributed.is_first() else reporter
        log.event("resumed" if restored else "begun", step=done)
        for note in [*restored.notes, *log.notes, f"continuing from step {done}"] if restored else log.notes:
            log.event("note", text=note)
            reporter.note(note)
        # A call consumes its state, and this one is the caller's.
        state = restored.state if restored else jax.tree.map(jnp.copy, state)
        loop = _Loop(state, done, task, config, loss, monitor, checkpoints, log, reporter, pending, layout)
        loop.run()
        return Trained(loop.state, log.rows, tuple(loop.diverged))


@dataclasses.dataclass
class _Loop:
    """What changes, `state` and `done` (steps, whether or not all runs could do them), and what it is done with."""

    state: TrainState
    done: int
    task: Task
    config: LoopConfig
    loss: Loss
    monitor: AttentionMonitor | None
    checkpoints: Checkpoints | None
    log: RunLog
    reporter: Reporter
    pending: Pending
    layout: Layout | None

    def __post_init__(self) -> None:
        found = [row for row in self.log.rows if row["kind"] == "divergence"]
        self.diverged = [Divergence(row["run"], row["step"], row["where"]) for row in found]
        self.watch = None if self.monitor is None else Watch(self.monitor.limits, self.log.rows)
        self.spread_loss = self.loss if self.layout is None else SpreadLoss(self.loss, self.layout.mesh)
        self.speed = Speed(self.config.batch_size * self.task.length * (self.state.runs or 1))

    def run(self) -> None:
        every, steps = self.config.evaluate_every, self.config.steps
        if every and self.done == 0:
            self._evaluate()
        while self.done < steps and len(self.diverged) < (self.state.runs or 1):
            rows = self._train()
            last = [row for row in rows if row["kind"] == "train"][-1]
            self._look_for_divergence(rows)
            self.log.write(rows)
            if every and (self.done % every == 0 or self.done == steps):
                self._evaluate()
            # Read once: a signal that comes later is not yet saved for. All processes stop where one is told to.
            stopping = distributed.largest(self.pending.number or 0)
            if self.done % self.config.checkpoint_every == 0 or self.done == steps or stopping:
                self._save()
            self.reporter.progress(Progress(self.done, steps, _measured(last), self.speed.tokens_per_second))
            if stopping:
                self._interrupt(signal.Signals(stopping))

    def _train(self) -> list[Row]:
        """One call; a row for each of its steps, and for what the monitor saw and found in them."""
        count, begun = self.config.steps_per_call, time.perf_counter()
        self.state, metrics = train_steps(
            self.state,
            self.task,
            loss=self.spread_loss,
            batch_size=self.config.batch_size,
            count=count,
            monitor=self.monitor,
            layout=self.layout,
        )
        steps = 0 if self.state.runs is None else 1  # the axis of the steps, after that of the runs
        names = sorted(metrics, key=lambda name: name != "loss")  # `jit` sorted them; the loss comes first
        values = {name: jax.tree.map(lambda x: np.moveaxis(np.asarray(x), steps, 0), metrics[name]) for name in names}
        self.speed.add(count, time.perf_counter() - begun)
        attention, rows = values.pop("attention", None), []
        for i in range(count):
            self.done += 1
            rows.append({"step": self.done, "kind": "train", **{name: x[i] for name, x in values.items()}})
            if attention is not None:
                rows += self._watch({name: x[i] for name, x in attention.items()})
        return rows

    def _watch(self, attention: dict[str, np.ndarray]) -> list[Row]:
        """Rows of what was measured in this step, if it was due, and of what was found; the reporter is told."""
        assert self.monitor is not None
        assert self.watch is not None
        if not self.monitor.is_due(self.done):
            return []
        row = self.monitor.row(self.done, attention)
        found = self.watch.look(row)
        for line in explain(found):
            self.reporter.note(line)
        return [row, *(finding.row for finding in found)]

    def _evaluate(self) -> None:
        size, count = self.config.batch_size, self.config.evaluation_batches
        metrics = evaluate(
            self.state, self.task, loss=self.spread_loss, batch_size=size, count=count, layout=self.layout
        )
        self.log.write([{"step": self.done, "kind": "evaluation", **metrics}])

    def _look_for_divergence(self, rows: list[Row]) -> None:
        """A run that diverged did not do all steps. One that is alone ends here, in the log too; others are noted."""
        steps, known = np.atleast_1d(self.state.step), {found.run for found in self.diverged}
        for run in np.flatnonzero(steps < self.done).tolist():
            if run in known:
                continue
            state = self.state if self.state.runs is None else take_run(self.state, run)
            state, task = (state, self.task) if self.layout is None else self.layout.fetch((state, self.task))
            where = locate(state, task, loss=self.loss, batch_size=self.config.batch_size)
            found = Divergence(run, int(steps[run]) + 1, where)
            self.diverged.append(found)
            row = {"kind": "divergence", **dataclasses.asdict(found)}
            if self.state.runs is None:
                self.log.write([*(row for row in rows if row["step"] <= found.step), row])
                self.log.event("diverged", step=found.step)
                raise DivergedError(found, self._kept())
            rows.append(row)
            self.reporter.note(f"run {run} diverged at step {found.step}: not finite from {where} on")

    def _save(self) -> None:
        if self.checkpoints is not None:
            self.log.sync()
            self.checkpoints.save(self.done, self.state)
            self.log.event("saved", step=self.done, tokens_per_second=self.speed.tokens_per_second)

    def _interrupt(self, number: signal.Signals) -> None:
        """Saved; now the signal may do what it does."""
        name = number.name
        self.log.event("stopped", signal=name, step=self.done)
        self.reporter.note(f"{name}: saved step {self.done}, the same call continues")
        self.pending.deliver(number)
        raise RunError(f"stopped by {name} at step {self.done}, which is saved")  # whoever handled it let us go on

    def _kept(self) -> str:
        steps = [] if self.checkpoints is None else self.checkpoints.steps()
        return f"the last checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint"


def _place(state: TrainState, task: Task, config: LoopConfig, layout: Layout | None) -> tuple[TrainState, Task]:
    """State and task where the layout has them."""
    if layout is None:
        if jax.process_count() > 1:
            raise ValueError(f"layout must say how the {jax.process_count()} processes share the run, got None")
        return state, task
    if state.runs is not None:
        raise ValueError(f"layout spreads one run over devices, and the state holds {state.runs}")
    check_divides("batch_size", config.batch_size, layout.mesh, "data")
    return layout.place(state), layout.copy_to_all(task)


def _measured(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("step", "kind")}


def _describe_run(
    state: TrainState, task: Task, config: LoopConfig, loss: Loss, record: Mapping[str, Any]
) -> dict[str, Any]:
    """What makes the bits of a run, besides its model."""
    return {
        **{f"optimizer.{name}": value for name, value in dataclasses.asdict(state.optimizer).items()},
        "batch_size": config.batch_size,
        "steps_per_call": config.steps_per_call,
        "task": describe(task),
        "loss": describe(loss),
        **record,
    }
