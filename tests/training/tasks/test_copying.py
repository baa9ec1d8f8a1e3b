"""Copy at a distance: the rule, the split, the distribution."""

import functools

import jax
import numpy as np

from attn_jax.training.tasks import Copy

TASK = Copy(num_symbols=4, distance=2, length=5)


@functools.cache
def drawn(task, count=2000):
    """A training batch and an evaluation batch, as NumPy."""
    training = jax.jit(lambda: task.batch(jax.random.key(0), 0, count))()
    held_out = jax.jit(lambda: jax.tree.map(lambda x: x[0], task.evaluation(1, count)))()
    return [jax.tree.map(np.asarray, batch) for batch in (training, held_out)]


def test_solved_by_reading_back():
    for inputs, targets, weights in drawn(TASK):
        answers = np.roll(inputs, TASK.distance, axis=1)
        assert (answers == targets)[weights == 1].all()
        np.testing.assert_array_equal(weights, np.broadcast_to(np.arange(5) >= 2, weights.shape))
        assert (targets[weights == 0] == 0).all()


def test_every_sequence_is_in_one_of_both():
    """All 3³ of a small space: those whose sum is a multiple of 3 in evaluation, the others in training."""
    training, held_out = ({tuple(row.tolist()) for row in batch.inputs} for batch in drawn(Copy(3, 1, 3)))
    assert len(training) == 18
    assert len(held_out) == 9
    assert all(sum(row) % 3 == 0 for row in held_out)
    assert not training & held_out


def test_symbols_are_uniform_and_independent():
    for inputs, targets, weights in drawn(TASK):
        deviation = 5 * np.sqrt(len(inputs) / 16)
        for i in range(5):
            for j in range(i):
                pairs = np.bincount(4 * inputs[:, i] + inputs[:, j], minlength=16)
                assert np.abs(pairs - len(inputs) / 16).max() < deviation
        guess = (targets[weights == 1] == 0).mean()
        assert abs(guess - TASK.chance) < 5 * np.sqrt(0.25 * 0.75 / weights.sum())


def test_the_farthest_and_the_nearest():
    for task in (Copy(2, 1, 2), Copy(16, 7, 8)):
        inputs, targets, weights = drawn(task)[0]
        np.testing.assert_array_equal(targets[:, task.distance :], inputs[:, : -task.distance])
        assert (weights.sum(1) == task.length - task.distance).all()
