"""The step: by hand, in one call or in many, alone or among others, and where it is not finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import step
from attn_jax.training.objectives import token_loss
from attn_jax.training.optimizers import OptimizerConfig
from attn_jax.training.state import init_states, key_for, take_run
from tests.training import toy

SGD = OptimizerConfig(name="sgd", beta1=0.0, clip_norm=None, warmup_steps=1)
run_steps = functools.partial(step.train_steps, task=toy.TASK, loss=token_loss, batch_size=3)


def copy(state):
    return jax.tree.map(jnp.copy, state)  # `train_steps` consumes its state


def one_step(state, loss):
    return jax.jit(functools.partial(step.train_step, loss=loss))(state, batch(state))


def batch(state, index=0):
    return toy.TASK.batch(key_for(state.key, "data"), index, 3)


def square_loss(model, batch, *, key):
    return jnp.sum(model.table[...] ** 2), {"corner": model.table[0, 0]}


def test_a_step_by_hand():
    state = toy.begin(toy.make_bigrams, SGD, learning_rate=0.5)
    table = np.asarray(state.params["table"], np.float64)
    after, metrics = one_step(state, square_loss)
    rate = 0.5 * 0.5  # half of it in the first of the warm-up
    np.testing.assert_allclose(after.params["table"], table - rate * 2 * table, rtol=1e-5)
    norm = np.linalg.norm(2 * table)
    expected = {"loss": (table**2).sum(), "corner": table[0, 0], "gradient_norm": norm, "update_norm": rate * norm}
    for name, value in {**expected, "learning_rate": rate}.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
    assert after.step == 1
    assert metrics.keys() == {*expected, "learning_rate"}


def test_many_steps_in_one_call_are_as_many_calls():
    state = toy.begin(toy.make_transformer)
    one = jax.jit(functools.partial(step.train_step, loss=token_loss))
    by_hand, losses = state, []
    for index in range(4):
        by_hand, metrics = one(by_hand, batch(state, index))
        losses.append(metrics["loss"])
    scanned, metrics = run_steps(copy(state), count=4)
    assert scanned.step == 4
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), scanned.params, by_hand.params)


def test_the_same_number_of_steps_in_calls_of_the_same_size_gives_the_same_bits():
    state = toy.begin(toy.make_transformer)
    ends = set()
    for _ in range(2):
        now = copy(state)
        for _ in range(2):
            now, _ = run_steps(now, count=4)
        ends.add(toy.bits(now))
    assert len(ends) == 1


def test_many_runs_in_one_call_are_each_as_if_alone():
    rates = [0.01, 0.03]
    states = init_states(toy.make_transformer, toy.OPTIMIZER, seeds=[0, 1], learning_rates=rates)
    together, metrics = run_steps(copy(states), count=4)
    assert metrics["loss"].shape == (4, 4)
    for run in range(4):
        alone, its = run_steps(take_run(states, run), count=4)
        np.testing.assert_allclose(metrics["loss"][run], its["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["learning_rate"][run], its["learning_rate"], rtol=1e-6)
        params = take_run(together, run).params
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), params, alone.params)
    assert len({float(x) for x in metrics["loss"][:, -1]}) == 4


def test_equal_runs_share_one_trace():
    traced = []

    def loss(model, batch, *, key):
        traced.append(key)
        return token_loss(model, batch, key=key)

    options = {"loss": loss, "batch_size": 3, "count": 2}
    for seed in (0, 1):
        # An equal configuration, made anew; the learning rate is data.
        state = toy.begin(toy.make_bigrams, OptimizerConfig(), learning_rate=0.01 * (seed + 1), seed=seed)
        for _ in range(3):
            state, _ = step.train_steps(state, toy.TASK, **options)
    assert len(traced) == 1


def test_keys_of_dropout_are_those_of_the_step():
    seen = []

    def loss(model, batch, *, key):
        jax.debug.callback(lambda data: seen.append(data.tolist()), jax.random.key_data(key), ordered=True)
        return jnp.sum(model.table[...] ** 2), {}

    state = toy.begin(toy.make_bigrams, SGD, seed=5)
    jax.block_until_ready(step.train_steps(copy(state), toy.TASK, loss=loss, batch_size=3, count=3))
    jax.effects_barrier()
    root = key_for(state.key, "dropout")
    assert seen == [jax.random.key_data(jax.random.fold_in(root, index)).tolist() for index in range(3)]


def test_gradients_and_losses_of_narrow_models_are_float32():
    config = TransformerConfig(vocabulary_size=5, num_layers=1, model_width=4, num_heads=1, param_dtype="bfloat16")
    state = toy.begin(functools.partial(Transformer, config), SGD)

    def narrow(model, batch, *, key):
        return token_loss(model, batch, key=key)[0].astype(jnp.bfloat16), {}

    after, metrics = one_step(state, narrow)
    assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("bfloat16")}


@pytest.mark.usefixtures("x64")
def test_float64_stays_float64():
    config = TransformerConfig(vocabulary_size=5, num_layers=1, model_width=4, num_heads=1, param_dtype="float64")
    state = toy.begin(functools.partial(Transformer, config))
    after, metrics = one_step(state, token_loss)
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {jnp.dtype("float64")}
    assert metrics["loss"].dtype == metrics["gradient_norm"].dtype == jnp.dtype("float64")


@pytest.mark.parametrize("broken", ["loss", "gradient", "update"])
def test_a_step_that_is_not_finite_leaves_the_run_as_it_was(broken):
    def loss(model, batch, *, key):
        x = model.table[0, 0]
        value = {"loss": x / 0, "gradient": jnp.sqrt(x - x), "update": x * 1e10}[broken]
        return value, {}

    state = toy.begin(toy.make_bigrams, SGD, learning_rate=3e38)
    after, metrics = step.train_steps(copy(state), toy.TASK, loss=loss, batch_size=3, count=2)
    assert toy.bits(after) == toy.bits(state)
    finite = {name: bool(np.isfinite(metrics[name]).all()) for name in ("loss", "gradient_norm", "update_norm")}
    # The division is not finite from the loss on, the root from the gradient on, the factor in the update alone.
    expected = {"loss": [False] * 3, "gradient": [True, False, False], "update": [True, True, False]}
    assert list(finite.values()) == expected[broken]


def test_a_run_that_breaks_leaves_those_beside_it_alone():
    def loss(model, batch, *, key):
        x = model.table[0, 0]
        return jnp.where(x > 0, jnp.log(x), jnp.nan), {}  # gradient 1 / x

    states = init_states(toy.make_bigrams, SGD, seeds=[0, 1], learning_rates=[0.5])
    tables = states.params["table"].at[:, 0, 0].set(jnp.array([100.0, 0.5]))  # the second steps below 0 at once
    states = dataclasses.replace(states, params={"table": tables})
    after, metrics = step.train_steps(states, toy.TASK, loss=loss, batch_size=3, count=4)
    assert after.step.tolist() == [4, 1]
    assert np.isfinite(metrics["loss"][0]).all()
    assert np.isfinite(metrics["loss"][1]).tolist() == [True, False, False, False]
    assert np.isfinite(after.params["table"]).all()


def test_an_evaluation_is_the_mean_over_all_answers_without_dropout():
    state = toy.begin(toy.make_transformer)
    metrics = step.evaluate(state, toy.TASK, loss=token_loss, batch_size=3, count=4)
    held_out = toy.TASK.evaluation(4, 3)
    together = jax.tree.map(lambda x: x.reshape(12, -1), held_out)
    value, measured = token_loss(state.model, together, key=None)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], measured["accuracy"], rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Batches whose answers do not all count."""

    weights: tuple

    def evaluation(self, num_batches, size):
        weights = jnp.asarray(self.weights, jnp.float32).reshape(num_batches, size, 1)
        tokens = jnp.arange(num_batches * size, dtype=jnp.int32).reshape(num_batches, size, 1)
        return step.Batch(tokens, tokens, weights)


jax.tree_util.register_static(Uneven)


def test_batches_count_by_their_weights():
    def loss(model, batch, *, key):
        weights = batch.weights
        return jnp.sum(weights * batch.inputs) / jnp.maximum(weights.sum(), 1), {}

    state = toy.begin(toy.make_bigrams, SGD)
    mean = step.evaluate(state, Uneven((1, 1, 0, 1, 0, 0)), loss=loss, batch_size=2, count=3)["loss"]
    np.testing.assert_allclose(mean, (0 + 1 + 3) / 3, rtol=1e-6)
    nothing = step.evaluate(state, Uneven((0, 0)), loss=loss, batch_size=2, count=1)["loss"]
    assert nothing == 0


def test_many_runs_are_evaluated_at_once():
    states = init_states(toy.make_bigrams, SGD, seeds=[0, 1], learning_rates=[0.5])
    metrics = step.evaluate(states, toy.TASK, loss=token_loss, batch_size=3, count=2)
    alone = [
        step.evaluate(take_run(states, i), toy.TASK, loss=token_loss, batch_size=3, count=2)["loss"] for i in (0, 1)
    ]
    np.testing.assert_allclose(metrics["loss"], alone, rtol=1e-6)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: (x, {}), r"loss must return one number .* got shape \(5, 5\)"),
        (lambda x: (x.sum(), {"gradient_norm": x.sum()}), "loss must not measure gradient_norm: training does"),
    ],
)
def test_a_loss_that_is_none_is_refused(returned, message):
    state = toy.begin(toy.make_bigrams, SGD)
    with pytest.raises(ValueError, match=message):
        step.train_step(state, batch(state), loss=lambda model, batch, *, key: returned(model.table[...]))
