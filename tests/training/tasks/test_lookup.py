"""Look-up where a pair is one token."""

import jax
import numpy as np
import pytest

from attn_jax.training.tasks import Lookup


@pytest.mark.parametrize("length", [8, 32])
def test_look_up_asks_for_pairs_that_it_shows(length):
    task = Lookup(length=length)
    drawn = jax.jit(lambda key: task.batch(key, step=0, size=16))(jax.random.key(0))
    batch, distances = jax.tree.map(np.asarray, drawn), np.asarray(task.distances(drawn))
    assert batch.inputs.max() < task.vocabulary_size
    assert (batch.weights.sum(axis=1) == task.num_pairs).all()
    for b, t in zip(*np.nonzero(batch.weights), strict=True):
        key, value = batch.inputs[b, t] - 1, batch.targets[b, t] - 1 - task.num_keys
        shown = batch.inputs[b, t - distances[b, t]]
        assert shown == 1 + task.num_keys + task.num_values + key * task.num_values + value
    assert (distances[batch.weights == 0] == 0).all()
    assert (batch.inputs[:, task.num_pairs :][batch.weights[:, task.num_pairs :] == 0] == 0).all()
    keys, values = task.parts(batch.inputs)
    asked = batch.weights > 0
    for b in range(len(keys)):  # each question has the key of one pair, whose value is the target
        shown = dict(zip(keys[b, : task.num_pairs].tolist(), values[b, : task.num_pairs].tolist(), strict=True))
        answers = [shown[key] + task.num_keys for key in keys[b, asked[b]].tolist()]
        assert answers == batch.targets[b, asked[b]].tolist()
    assert (values[:, task.num_pairs :] == 0).all()
    assert set(batch.inputs[:, : task.num_pairs].ravel()) & set(range(1 + task.num_keys + task.num_values)) == set()


def test_look_up_holds_out_half_of_the_maps():
    def is_odd(row):
        pairs = [divmod(x - 17, 8) for x in row[:4]]
        below = [(a, b) for i, a in enumerate(pairs) for b in pairs[i + 1 :]]
        return sum((a[0] > b[0]) != (a[1] > b[1]) for a, b in below) % 2

    task = Lookup(length=8)
    trained = np.asarray(jax.jit(lambda key: task.batch(key, step=0, size=64).inputs)(jax.random.key(1)))
    held_out = np.asarray(jax.jit(lambda: task.evaluation(1, 64).inputs[0])())
    assert {is_odd(row) for row in trained} == {1}
    assert {is_odd(row) for row in held_out} == {0}
    with pytest.raises(ValueError, match="length must be at least 8, got 7"):
        Lookup(length=7)
