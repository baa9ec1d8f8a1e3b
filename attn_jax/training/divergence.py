"""Where a run broke: the first thing in the order of computation that is not finite."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.nn import Transformer, TransformerBlock
from attn_jax.training.files import RunError
from attn_jax.training.state import TrainState, key_for
from attn_jax.training.step import Loss
from attn_jax.training.tasks import Batch, Task


@dataclasses.dataclass(frozen=True)
class Divergence:
    """A run whose loss, gradient or update stopped being finite.

    Attributes:
        run: which of many; 0 if there is one.
        step: the one that could not be done, counted from 1.
        where: the first thing that is not finite: "layer 1, keys".

    >>> import functools, jax
    >>> from flax import nnx
    >>> from attn_jax.training import LoopConfig, OptimizerConfig, init_states, tasks, train
    >>> one = functools.partial(nnx.Linear, 1, 1, use_bias=False, kernel_init=jax.nn.initializers.ones)
    >>> optimizer = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None)
    >>> states = init_states(one, optimizer, learning_rates=[0.25, 1e30], seeds=[0])
    >>> def loss(model, batch, *, key):
    ...     return (model.kernel[...] ** 2).sum(), {}
    >>> config = LoopConfig(steps=2, steps_per_call=1, evaluate_every=None)
    >>> train(states, tasks.Copy(), config=config, loss=loss).diverged
    (Divergence(run=1, step=2, where='the loss'),)
    """

    run: int
    step: int
    where: str


class DivergedError(RunError):
    """A run diverged; `divergence` says where.

    >>> import functools, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.training import DivergedError, LoopConfig, OptimizerConfig, init_state, tasks, train
    >>> state = init_state(functools.partial(nnx.Linear, 1, 1), OptimizerConfig(), learning_rate=0.25)
    >>> def loss(model, batch, *, key):
    ...     return jnp.log(-1 - model.kernel[...] ** 2).sum(), {}
    >>> config = LoopConfig(steps=1, steps_per_call=1, evaluate_every=None)
    >>> try:
    ...     train(state, tasks.Copy(), config=config, loss=loss)
    ... except DivergedError as error:
    ...     print(error)
    diverged at step 1: not finite from the loss on; there is no checkpoint
    """

    def __init__(self, divergence: Divergence, kept: str) -> None:
        super().__init__(f"diverged at step {divergence.step}: not finite from {divergence.where} on; {kept}")
        self.divergence = divergence


def locate(state: TrainState, task: Task, *, loss: Loss, batch_size: int) -> str:
    """The first thing that is not finite in the step that `state`, of one run, could not do.

    Looked at in this order: the parameters; for a `Transformer` the embeddings, each layer's queries, keys, values and
    output, and the model's output; the loss; the gradients, from the last layer to the first.
    """
    batch = task.batch(key_for(state.key, "data"), state.step, batch_size)
    model = state.model
    for name, array in _by_layer(state.params):
        if not _finite(array):
            return name
    if isinstance(model, Transformer):
        for name, array in _forward(model, batch):
            if not _finite(array):
                return name
    key = jax.random.fold_in(key_for(state.key, "dropout"), state.step)

    def objective(params: Any) -> jax.Array:
        return loss(nnx.merge(state.graphdef, params), batch, key=key)[0]

    value, gradient = jax.jit(jax.value_and_grad(objective))(state.params)
    if not _finite(value):
        return "the loss"
    for name, array in reversed(list(_by_layer(gradient))):
        if not _finite(array):
            return f"the gradient of {name}"
    return "the norm of the gradient or the update, every part of which is finite"


def _forward(model: Transformer, batch: Batch) -> Iterator[tuple[str, jax.Array]]:
    """What the model computes, in order, without dropout."""
    x = _embed(model, batch.inputs)
    yield "the embeddings", x
    for index in range(model.config.num_layers):
        x, projected = _apply(model.layer(index), x)
        for name, array in zip(("queries", "keys", "values"), projected, strict=False):
            yield f"layer {index}, {name}", array
        yield f"layer {index}, output", x
    yield "the model's output", model(batch.inputs)


_embed = jax.jit(Transformer.embed)


@jax.jit
def _apply(layer: TransformerBlock, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The output of a layer, and its queries, keys and values if it has attention."""
    if layer.attention is None:
        return layer(x), ()
    return layer(x, observe=lambda query, key, value, **options: (query, key, value))


def _by_layer(params: Any) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter by name, in the order of computation: embeddings, the stacked layers one by one, the rest."""
    named = {jax.tree_util.keystr(p, simple=True, separator="."): x for p, x in jax.tree.leaves_with_path(params)}
    first = [name for name in named if "embedding" in name]
    stacked = [name for name in named if name.startswith("layers.")]
    kinds: dict[str, list[str]] = {}  # of layers with different mixers, each kind has a stack of its own
    for name in stacked:
        word = name.split(".")[1]
        kinds.setdefault(word if word.isdigit() else "", []).append(name)
    yield from ((name, named[name]) for name in first)
    for index in range(sum(named[names[0]].shape[0] for names in kinds.values())):
        at, kind = divmod(index, len(kinds))
        yield from ((f"{name}, layer {index}", named[name][at]) for name in list(kinds.values())[kind])
    yield from ((name, x) for name, x in named.items() if name not in first + stacked)


def _finite(x: jax.Array) -> bool:
    return bool(np.isfinite(np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32)))).all())
