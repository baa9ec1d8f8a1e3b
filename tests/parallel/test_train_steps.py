"""A step on eight devices is the step of one, however they share it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.parallel import make_mesh, pmap_train_step, shard_train_step
from attn_jax.training import AttentionMonitor, OptimizerConfig, init_state, token_loss, train_step
from attn_jax.training.objectives import SpreadLoss
from attn_jax.training.tasks import Batch

VOCABULARY, STEPS = 16, 20
CONFIG = TransformerConfig(
    vocabulary_size=VOCABULARY, num_layers=2, model_width=32, num_heads=4, num_kv_heads=2, mlp_width=48
)
OPTIMIZER = OptimizerConfig(clip_norm=None, weight_decay=0.1)
STEP = functools.partial(train_step, loss=token_loss)


def begin():
    return init_state(functools.partial(Transformer, CONFIG), OPTIMIZER, learning_rate=3e-3)


def draw(step, length=32):
    """Sequences of which other numbers of tokens count, and of one none: a mean of means is another number."""
    ids, kept = (jax.random.fold_in(jax.random.key(7), 2 * step + i) for i in range(2))
    inputs = jax.random.randint(ids, (8, length), 0, VOCABULARY)
    weights = jax.random.uniform(kept, (8, length)) < jnp.arange(8.0)[:, None] / 8
    return Batch(inputs, jnp.roll(inputs, 3, axis=1), weights.astype(jnp.float32))


def gradient(state):
    """That of the one step which was done: the first moment of Adam is a tenth of it."""
    return jax.tree.map(lambda m: np.asarray(m) / (1 - OPTIMIZER.beta1), state.optimizer_state[1].mu)


def run(step, length=32):
    """The gradient of the first step, and what all steps measured."""
    state, metrics = step(begin(), draw(0, length))
    first, rows = gradient(state), [metrics]
    for i in range(1, STEPS):
        state, metrics = step(state, draw(i, length))
        rows.append(metrics)
    return first, {name: np.array([row[name] for row in rows]) for name in rows[0]}


@functools.cache
def alone(length=32):
    return run(jax.jit(STEP), length)


def on_mesh(*, shard_parameters=False, **sizes):
    mesh = make_mesh(**sizes)
    return shard_train_step(
        functools.partial(train_step, loss=SpreadLoss(token_loss, mesh)), mesh, shard_parameters=shard_parameters
    )


def check(step, length=32):
    first, rows = run(step, length)
    expected_first, expected = alone(length)
    for path, leaf in jax.tree.leaves_with_path(expected_first):
        found = functools.reduce(lambda tree, key: tree[key.key], path, first)
        np.testing.assert_allclose(found, leaf, rtol=0, atol=1e-5 * np.abs(leaf).max(), err_msg=str(path))
    for name in ("loss", "accuracy", "gradient_norm"):
        np.testing.assert_allclose(rows[name][0], expected[name][0], rtol=1e-5)
    np.testing.assert_allclose(rows["loss"], expected["loss"], rtol=1e-4)
    assert expected["loss"][-1] < 0.95 * expected["loss"][0]  # it learned, so the steps were taken


def test_pmap():
    check(pmap_train_step(STEP))


def test_a_mesh_of_all_axes_with_parameters_spread():
    check(on_mesh(data=2, heads=2, sequence=2, shard_parameters=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ({"data": 8}, 32),
        ({"data": 8, "shard_parameters": True}, 32),
        ({"sequence": 8}, 32),
        ({"heads": 2, "sequence": 4}, 32),
        ({"data": 4, "heads": 2, "shard_parameters": True}, 32),
        ({"data": 4, "sequence": 2, "shard_parameters": True}, 32),
        ({"sequence": 8}, 24),  # a length that the devices divide, and twice as many do not
        ({"data": 2, "sequence": 4}, 30),  # one that they do not divide
    ],
)
def test_any_mesh(sizes, length):
    check(on_mesh(**sizes), length)


def test_every_device_keeps_its_keys_and_values():
    """The attention of a spread loss goes round the ring; that of the plain one is XLA's to cut, and gathers them."""
    mesh = make_mesh(sequence=8)
    state, batch = begin(), draw(0)

    def sends(loss):
        step = shard_train_step(functools.partial(train_step, loss=loss), mesh)
        return str(jax.make_jaxpr(step)(state, batch)).count("ppermute")

    assert sends(SpreadLoss(token_loss, mesh)) > 0
    assert sends(token_loss) == 0


def test_dropout_differs_between_devices():
    """Eight equal sequences, one on each device: with one key for all, every device would drop the same."""
    config = TransformerConfig(vocabulary_size=VOCABULARY, num_layers=1, model_width=8, num_heads=1, dropout_rate=0.5)
    state = init_state(functools.partial(Transformer, config), OPTIMIZER, learning_rate=1e-3)
    seen = []

    def loss(model, batch, *, key):
        value, measured = token_loss(model, batch, key=key)
        position = jax.nn.one_hot(jax.lax.axis_index("data"), 8) * 8 * value  # the mean over devices takes it apart
        return value, {**measured, "each": position}

    one = jax.tree.map(lambda x: jnp.broadcast_to(x[7:], x.shape), draw(0))
    _, metrics = pmap_train_step(functools.partial(train_step, loss=loss))(state, one)
    seen = np.asarray(metrics["each"])
    assert len(np.unique(seen)) == 8
    np.testing.assert_allclose(seen.mean(), metrics["loss"], rtol=1e-6)


def test_a_step_that_is_not_finite_leaves_all_devices_as_they_were():
    def loss(model, batch, *, key):
        value, measured = token_loss(model, batch, key=key)
        return jnp.where(jax.lax.axis_index("data") == 3, jnp.nan, value), measured

    state = begin()
    after, metrics = pmap_train_step(functools.partial(train_step, loss=loss))(state, draw(0))
    assert np.isnan(metrics["loss"])
    assert after.step == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)


def test_bad_input():
    batch = jax.tree.map(lambda x: x[:6], draw(0))
    with pytest.raises(ValueError, match=re.escape("must be a multiple of the 8 devices, got 6")):
        pmap_train_step(STEP)(begin(), batch)
    with pytest.raises(ValueError, match="multiple of the 4 devices along 'data', got 6"):
        shard_train_step(STEP, make_mesh(data=4, sequence=2))(begin(), batch)
    watched = functools.partial(STEP, monitor=AttentionMonitor())
    with pytest.raises(ValueError, match="a monitor needs the whole batch, got axis_name='data'"):
        pmap_train_step(watched)(begin(), draw(0))
