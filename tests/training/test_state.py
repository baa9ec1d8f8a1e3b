"""The state: what it holds, how runs begin, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.optimizers import OptimizerConfig
from attn_jax.training.state import init_states, key_for, take_run
from attn_jax.training.step import train_steps
from tests.training import toy

ADAM = OptimizerConfig()


def test_a_run_begins_with_the_same_bits_alone_and_among_others():
    states = init_states(toy.make_transformer, ADAM, seeds=[3, 4], learning_rates=[0.1, 0.2])
    assert states.runs == 4
    for run, (rate, seed) in enumerate([(0.1, 3), (0.1, 4), (0.2, 3), (0.2, 4)]):
        alone = toy.begin(toy.make_transformer, ADAM, seed=seed, learning_rate=rate)
        assert alone.runs is None
        assert toy.bits(take_run(states, run)) == toy.bits(alone)
    assert jax.tree.structure(take_run(states, 0)) == jax.tree.structure(alone)


def test_seeds_differ_and_learning_rates_share_their_parameters():
    states = init_states(toy.make_bigrams, ADAM, seeds=[0, 1], learning_rates=[0.1, 0.2])
    first, second, third, _ = (take_run(states, run) for run in range(4))
    assert toy.bits(first.params) == toy.bits(third.params) != toy.bits(second.params)


def test_the_model_is_that_of_the_state():
    state = toy.begin(toy.make_bigrams, ADAM)
    np.testing.assert_array_equal(state.model.table[...], state.params["table"])


def test_keys_of_purposes_differ():
    key = jax.random.key(0)
    data = [
        jax.random.key_data(k).tolist() for k in (key, *(key_for(key, p) for p in ("parameters", "data", "dropout")))
    ]
    assert len(set(map(tuple, data))) == 4
    with pytest.raises(ValueError, match="purpose must be one of"):
        key_for(key, "noise")


def test_moments_of_narrow_parameters_are_float32():
    config = TransformerConfig(vocabulary_size=3, num_layers=1, model_width=4, num_heads=1, param_dtype="bfloat16")
    state = toy.begin(functools.partial(Transformer, config), ADAM)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = [x for x in jax.tree.leaves(state.optimizer_state) if x.ndim]
    assert {x.dtype for x in moments} == {jnp.dtype("float32")}


class Scaled(nnx.Module):
    """Two parameters are made of Python numbers."""

    def __init__(self, *, rngs):
        self.factor = nnx.Param(jnp.asarray(0.5))
        self.offset = nnx.Param(0.5)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (2,)))


def test_a_step_changes_no_type_so_that_one_program_does_for_all():
    def loss(model, batch, *, key):
        return (model.factor[...] * model.table[...] + model.offset[...]).sum(), {}

    for state in (toy.begin(Scaled, ADAM), init_states(Scaled, ADAM, seeds=[0, 1], learning_rates=[0.1])):
        before = jax.tree.map(jax.typeof, state)
        after, _ = train_steps(jax.tree.map(jnp.copy, state), toy.TASK, loss=loss, batch_size=2, count=1)
        assert jax.tree.map(jax.typeof, after) == before


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (2,)))
        self.calls = nnx.BatchStat(jnp.zeros(()))


def test_a_model_with_other_state_is_refused():
    with pytest.raises(ValueError, match=r"all state of the model must be nnx.Param, got 1 arrays that are not"):
        toy.begin(Counting, ADAM)


def test_the_model_of_many_runs_is_refused():
    states = init_states(toy.make_bigrams, ADAM, seeds=[0, 1], learning_rates=[0.1])
    with pytest.raises(ValueError, match="the state holds 2"):
        _ = states.model


@pytest.mark.parametrize("run", [-1, 2])
def test_a_run_that_is_not_there_is_refused(run):
    with pytest.raises(ValueError, match=f"run must be one of the 2 runs .* got {run}"):
        take_run(init_states(toy.make_bigrams, ADAM, seeds=[0, 1], learning_rates=[0.1]), run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [], "learning_rates": [0.1]}, "seeds and learning_rates must not be empty"),
        ({"seeds": [0], "learning_rates": []}, "seeds and learning_rates must not be empty"),
        ({"seeds": [-1], "learning_rates": [0.1]}, "seeds must be at least 0, got -1"),
        ({"seeds": [0], "learning_rates": [0.0]}, "learning_rates must be positive"),
    ],
)
def test_wrong_runs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        init_states(toy.make_bigrams, ADAM, **options)
