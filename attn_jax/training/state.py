"""The whole state of a run, as one pytree: whoever has it continues to the same bits.

Everything random is drawn from the run's key and the number of the step, so the state holds no stream that was read up
to some place, and a resumed run draws what an uninterrupted one would have drawn.

Many runs at once, of other seeds and learning rates, are one state whose arrays have a leading axis `[runs]`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax import checks
from attn_jax.training import optimizers
from attn_jax.training.optimizers import OptimizerConfig
from attn_jax.typing import Array, Float, Int

# Called as make_model(rngs=…): `functools.partial(Transformer, config)`.
MakeModel = Callable[..., nnx.Module]

PURPOSES = ("parameters", "data", "dropout")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A run between two steps.

    Attributes:
        params: the arrays of the model's parameters, nested by name.
        optimizer_state: of optax, at least float32.
        step: steps done; also the position in the data. A run that diverged stays at its last finite state, and so at
            the step that it could not do.
        key: of the run; `key_for` gives the keys of its purposes.
        learning_rate: the largest one, which the schedule multiplies.
        graphdef: what the model is besides its arrays (static).
        optimizer: what `optimizer_state` belongs to (static).

    >>> import functools, jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_state
    >>> ones = functools.partial(nnx.Linear, 2, 1, kernel_init=jax.nn.initializers.ones)
    >>> state = init_state(ones, OptimizerConfig(), learning_rate=0.25)
    >>> int(state.step), float(state.learning_rate), state.model(jnp.array([3.0, 4.0])).tolist()
    (0, 0.25, [7.0])
    """

    params: Any
    optimizer_state: Any
    step: Int[Array, "*runs"]
    key: Array
    learning_rate: Float[Array, "*runs"]
    graphdef: Any = dataclasses.field(metadata={"static": True})
    optimizer: OptimizerConfig = dataclasses.field(metadata={"static": True})

    @property
    def runs(self) -> int | None:
        """How many runs the state holds, or None where it is that of one run, without the axis."""
        return self.step.shape[0] if self.step.ndim else None

    @property
    def model(self) -> Any:
        """The model with its parameters. One run only: see `take_run`."""
        if self.runs is not None:
            raise ValueError(f"a model is that of one run, and the state holds {self.runs}: take_run(state, i).model")
        return nnx.merge(self.graphdef, self.params)


def key_for(key: Array, purpose: str) -> Array:
    """The key of one purpose: "parameters", "data" or "dropout"."""
    checks.one_of("purpose", purpose, PURPOSES)
    return jax.random.fold_in(key, PURPOSES.index(purpose))


def init_state(make_model: MakeModel, optimizer: OptimizerConfig, *, learning_rate: float, seed: int = 0) -> TrainState:
    """The state of one run before its first step.

    Args:
        make_model: called as `make_model(rngs=…)` under `jit`: `functools.partial(Transformer, config)`.
        optimizer: by which it is trained.
        learning_rate: the largest one, which the schedule of `optimizer` multiplies.
        seed: of the parameters, the data and the dropout.

    Raises:
        ValueError: if the model has state besides `nnx.Param`, which no step would carry on.

    >>> import functools
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_state
    >>> linear = functools.partial(nnx.Linear, 2, 1)
    >>> states = [init_state(linear, OptimizerConfig(), learning_rate=0.25, seed=seed) for seed in (0, 1)]
    >>> [bool((state.params["kernel"] == states[0].params["kernel"]).all()) for state in states]
    [True, False]
    """
    return take_run(init_states(make_model, optimizer, learning_rates=[learning_rate], seeds=[seed]), 0)


def init_states(
    make_model: MakeModel, optimizer: OptimizerConfig, *, learning_rates: Sequence[float], seeds: Sequence[int]
) -> TrainState:
    """The state of every learning rate with every seed, `[rates · seeds]`, the seeds of the first rate first.

    Runs of one seed have the same parameters, data and dropout, whatever their learning rate.

    Args:
        make_model, optimizer: as in `init_state`.
        learning_rates, seeds: of the runs.

    Raises:
        ValueError: if there are none, or the model has state besides `nnx.Param`.

    >>> import functools
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_states
    >>> linear = functools.partial(nnx.Linear, 2, 1)
    >>> states = init_states(linear, OptimizerConfig(), learning_rates=[0.25, 0.5], seeds=[0, 1])
    >>> states.learning_rate.tolist(), states.params["kernel"].shape
    ([0.25, 0.25, 0.5, 0.5], (4, 2, 1))
    >>> bool((states.params["kernel"][:2] == states.params["kernel"][2:]).all())  # the same seeds
    True
    """
    if not len(seeds) or not len(learning_rates):
        raise ValueError(f"seeds and learning_rates must not be empty, got {seeds!r} and {learning_rates!r}")
    seeds = [checks.positive_int("seeds", seed, least=0) for seed in seeds]
    rates = [checks.finite_number("learning_rates", rate, positive=True) for rate in learning_rates]

    @jax.jit
    def build(key: Array, learning_rate: Array) -> TrainState:
        model = make_model(rngs=nnx.Rngs(params=key_for(key, "parameters")))
        graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)
        if others := jax.tree.leaves(rest):
            raise ValueError(f"all state of the model must be nnx.Param, got {len(others)} arrays that are not: {rest}")
        # A parameter made of a Python number is weakly typed and a trained one is not: two programs where one will do.
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), nnx.to_pure_dict(parameters))
        optimizer_state = optimizers.directions(optimizer).init(jax.tree.map(wide, params))
        return TrainState(params, optimizer_state, jnp.zeros((), jnp.int32), key, learning_rate, graphdef, optimizer)

    # One after another by one program, not vmapped: a run begins with the same bits alone and among others.
    states = [build(jax.random.key(seed), jnp.asarray(rate, jnp.float32)) for rate in rates for seed in seeds]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


def take_run(states: TrainState, run: int) -> TrainState:
    """One run of many.

    Args:
        states: of `init_states`, or after their training.
        run: which, from 0 on.

    Raises:
        ValueError: if it is none of them, or the state is that of one run.

    >>> import functools
    >>> from flax import nnx
    >>> from attn_jax.training import OptimizerConfig, init_states, take_run
    >>> linear = functools.partial(nnx.Linear, 2, 1)
    >>> states = init_states(linear, OptimizerConfig(), learning_rates=[0.25, 0.5], seeds=[0, 1])
    >>> run = take_run(states, 2)
    >>> run.runs, float(run.learning_rate)
    (None, 0.5)
    >>> take_run(states, 4)
    Traceback (most recent call last):
    ValueError: run must be one of the 4 runs of a state that holds many, got 4
    """
    runs = states.runs
    if runs is None or not 0 <= run < runs:
        raise ValueError(f"run must be one of the {runs or 0} runs of a state that holds many, got {run}")
    return jax.tree.map(lambda leaf: leaf[run], states)


def wide(x: Array) -> Array:
    """`x` in float32 or better: what gradients, losses and moments are kept in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
