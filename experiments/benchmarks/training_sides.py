"""Who trains: our loop's own step, the same model on Flax's attention, PyTorch, and our step while it is watched.

All begin with the same parameters and see the same batch, so that their losses have to agree, step by step.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import OptimizerConfig, TrainState, init_state, token_loss, train_step
from attn_jax.training.monitor import ALL, AttentionMonitor
from attn_jax.training.optimizers import decayed
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array
from experiments.benchmarks.sides import Contestant

CHECKED_STEPS = 3  # whose losses are compared
WATCHED_CALLS = 2  # one with a look at everything, one without
OPTIMIZER = OptimizerConfig(weight_decay=0.1)
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Problem:
    """A decoder and a batch to train it on.

    Attributes:
        model: its sizes; rotary positions.
        length, batch_size: of the batch.
        steps_per_call: that our loop does in one compiled call, and others one by one.
        rows: that the monitor samples of each head and sequence.
        seed: of parameters and tokens.
    """

    model: TransformerConfig
    length: int
    batch_size: int
    steps_per_call: int
    rows: int
    seed: int

    @functools.cached_property
    def batch(self) -> Batch:
        """Random tokens, of which the next is asked for."""
        shape = self.batch_size, self.length + 1
        tokens = jax.random.randint(jax.random.key(self.seed), shape, 0, self.model.vocabulary_size, jnp.int32)
        return Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((self.batch_size, self.length)))

    @functools.cached_property
    def state(self) -> TrainState:
        """Our model before its first step, with rotary positions."""
        return _begin(functools.partial(Transformer, self.model), self.seed)

    @functools.cached_property
    def sinusoidal(self) -> TrainState:
        """The same parameters in a model whose positions are added to the embeddings."""
        config = dataclasses.replace(self.model, positions="sinusoidal")
        return dataclasses.replace(_begin(functools.partial(Transformer, config), self.seed), params=self.state.params)

    @property
    def flops(self) -> int:
        """What a step asks for in matrix products, forward and twice as much backward; of the square what is seen."""
        width = self.model.num_heads * (self.model.head_width or 0)
        params = self.state.params  # gains, which do not decay, are no matrices
        weights = sum(jax.tree.leaves(jax.tree.map(lambda x, is_matrix: x.size * is_matrix, params, decayed(params))))
        pairs = self.length * (self.length + 1) // 2
        forward = 2 * weights * self.length + 2 * 2 * pairs * width * self.model.num_layers
        return 3 * self.batch_size * forward


@dataclasses.dataclass(frozen=True)
class Side:
    """A row of the table.

    Attributes:
        packages: what has to be installed.
        build: makes the contestant; its result are the losses of the first steps, and how many numbers it trains.
        base: the side whose time it is compared with, which has the same losses.
        calls: of a reading.
        sought: of its time over that of `base`.
    """

    packages: tuple[str, ...]
    build: Callable[[Problem], Contestant]
    base: str = "ours"
    calls: int = 1
    sought: str = ""


class FlaxAttention(nnx.Module):
    """`flax.nnx.MultiHeadAttention` as Flax ships it, called as our block calls its attention."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        width, heads = config.model_width, config.num_heads
        self.inner = nnx.MultiHeadAttention(heads, width, use_bias=False, decode=False, keep_rngs=False, rngs=rngs)

    def __call__(self, x: Array, **options: Any) -> Array:
        """Causal self-attention of `x` `[*B, T, D]`."""
        return self.inner(x, is_causal=True)


def flax_state(problem: Problem) -> TrainState:
    """Our model with Flax's attention in every block, and with our parameters."""
    config = problem.sinusoidal.model.config

    def make_model(*, rngs: nnx.Rngs) -> Transformer:
        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> FlaxAttention:
            return FlaxAttention(config, rngs=rngs)

        model = Transformer(config, rngs=rngs)
        setattr(model.layers, "attention", stack(rngs))  # noqa: B010 - of another type than ours
        return model

    state = _begin(make_model, problem.seed)
    params = dict(problem.state.params)
    ours = params["layers"]["attention"]
    names = {"query": "query_weight", "key": "key_weight", "value": "value_weight", "out": "output_weight"}
    theirs = {"inner": {name: {"kernel": ours[weight]} for name, weight in names.items()}}
    params["layers"] = {**params["layers"], "attention": theirs}
    same = jax.tree.map(lambda x, y: x.shape == y.shape, state.params, params)
    assert all(jax.tree.leaves(same)), same
    return dataclasses.replace(state, params=params)


def count_parameters(state: TrainState) -> int:
    """Numbers that are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


def _begin(make_model: Callable[..., nnx.Module], seed: int) -> TrainState:
    return init_state(make_model, OPTIMIZER, learning_rate=LEARNING_RATE, seed=seed)


def _in_jax(
    begin: Callable[[Problem], TrainState], watched: Callable[[Problem], AttentionMonitor] | None = None, calls: int = 1
) -> Callable[[Problem], Contestant]:
    """Our step on the state that `begin` makes, so many in one compiled call, as our loop does them."""

    def build(problem: Problem) -> Contestant:
        monitor = None if watched is None else watched(problem)
        state = jax.tree.map(jnp.copy, begin(problem))

        @functools.partial(jax.jit, donate_argnames="state")
        def several(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
            def step(state: TrainState, _: None) -> tuple[TrainState, Any]:
                return train_step(state, batch, loss=token_loss, monitor=monitor)

            return jax.lax.scan(step, state, length=problem.steps_per_call)

        compiled = several.lower(state, problem.batch).compile()
        analysis = compiled.memory_analysis()

        def once() -> Any:
            nonlocal state
            state, metrics = jax.block_until_ready(compiled(state, problem.batch))
            return metrics

        def run() -> None:
            for _ in range(calls):
                once()

        def result() -> list[np.ndarray]:
            losses = np.asarray(once()["loss"], np.float64)[:CHECKED_STEPS]
            return [losses, np.array(count_parameters(state))]

        return Contestant(run, result, None if analysis is None else int(analysis.temp_size_in_bytes))

    return build


def _torch(problem: Problem) -> Contestant:
    module = importlib.import_module("experiments.benchmarks.torch_training")  # imports PyTorch
    return module.contestant(problem)


def _sampled(problem: Problem) -> AttentionMonitor:
    return AttentionMonitor(every=1, rows=problem.rows)


def _everything(problem: Problem) -> AttentionMonitor:
    return AttentionMonitor(every=WATCHED_CALLS * problem.steps_per_call, rows=None, measures=ALL)


SIDES = {
    "ours": Side(("attn_jax",), _in_jax(lambda problem: problem.state)),
    "torch": Side(("torch", "transformers"), _torch, sought="at least 0.9, better 1.1"),
    "sinusoidal": Side(("attn_jax",), _in_jax(lambda problem: problem.sinusoidal), base="sinusoidal"),
    "flax.nnx": Side(("flax",), _in_jax(flax_state), base="sinusoidal", sought="at least 1.5"),
    "monitor_rows": Side(("attn_jax",), _in_jax(lambda problem: problem.state, _sampled), sought="at most 1.05"),
    "monitor_all": Side(
        ("attn_jax",),
        _in_jax(lambda problem: problem.state, _everything, WATCHED_CALLS),
        calls=WATCHED_CALLS,
        sought="at most 1.10",
    ),
}
