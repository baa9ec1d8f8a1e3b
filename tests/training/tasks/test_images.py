"""Digits: patches, split, and that they can be told apart."""

import jax
import numpy as np
import pytest
from sklearn.datasets import load_digits

from attn_jax.training.tasks import digits

DATA = load_digits()


def images(task):
    """All images of a task, `(training, held out)`: pixels and labels."""
    parts = (task.training_patches, task.training_labels), (task.held_out_patches, task.held_out_labels)
    return [(np.asarray(task.pixels(patches)), np.asarray(labels)) for patches, labels in parts]


def test_a_patch_is_four_pixels():
    task = digits(jax.random.key(0), levels=17)
    (training, labels), (held_out, held_out_labels) = images(task)
    drawn = {(i.tobytes(), int(label)) for i, label in zip(training, labels, strict=True)}
    drawn |= {(i.tobytes(), int(label)) for i, label in zip(held_out, held_out_labels, strict=True)}
    true = {(i.astype(np.int32).tobytes(), int(label)) for i, label in zip(DATA.images, DATA.target, strict=True)}
    assert drawn == true
    image = DATA.images[0].astype(int)
    row = next(i for i, pixels in enumerate(training) if (pixels == image).all())
    by_hand = [
        sum(int(image[y + dy, x + dx]) * 17 ** (2 * dy + dx) for dy in range(2) for dx in range(2))
        for y in range(0, 8, 2)
        for x in range(0, 8, 2)
    ]
    assert task.training_patches[row].tolist() == by_hand


def test_the_class_is_asked_at_the_last_patch():
    task = digits(jax.random.key(0))
    for batch in (task.batch(jax.random.key(1), 0, 200), jax.tree.map(lambda x: x[0], task.evaluation(1, 200))):
        assert batch.weights.sum(1).tolist() == [1] * 200
        assert (batch.weights[:, -1] == 1).all()
        assert (batch.targets[:, :-1] == 0).all()
        assert set(np.asarray(batch.targets[:, -1] - 81).tolist()) == set(range(10))
        assert batch.inputs.max() < 81
    assert task.vocabulary_size == 91
    assert task.chance == np.bincount(DATA.target).max() / 1797


def test_told_apart_by_the_nearest_neighbour():
    (training, labels), (held_out, truth) = images(digits(jax.random.key(0)))
    training, held_out = training.reshape(-1, 64), held_out.reshape(-1, 64)
    distances = (held_out**2).sum(1)[:, None] + (training**2).sum(1) - 2 * held_out @ training.T
    assert (labels[distances.argmin(1)] == truth).mean() > 0.95


def test_split_by_the_key():
    small, large = digits(jax.random.key(0), num_training=50), digits(jax.random.key(0))
    other = digits(jax.random.key(1))
    assert (small.held_out_patches == large.held_out_patches).all()
    assert (small.training_patches == large.training_patches[:50]).all()
    assert large.training_labels.shape == (1437,)
    assert large.num_held_out == 360
    assert not (large.held_out_labels == other.held_out_labels).all()
    training, held_out = (
        {tuple(row) for row in np.asarray(x).tolist()}
        for x in (
            digits(jax.random.key(0), levels=17).training_patches,
            digits(jax.random.key(0), levels=17).held_out_patches,
        )
    )
    assert not training & held_out


def test_training_comes_to_every_image():
    task = digits(jax.random.key(0), num_training=20)
    counts = np.zeros(20)
    known = {tuple(row): i for i, row in enumerate(task.training_patches.tolist())}
    for row in task.batch(jax.random.key(0), 0, 2000).inputs.tolist():
        counts[known[tuple(row)]] += 1
    assert np.abs(counts - 100).max() < 50


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"levels": 1}, ValueError, "levels must be at least 2, got 1"),
        ({"levels": 18}, ValueError, "levels must be at most 17, as many as the data has, got 18"),
        ({"num_training": 0}, ValueError, "num_training must be at least 1, got 0"),
        ({"num_training": 1438}, ValueError, "num_training must be at most 1437, the images not held out, got 1438"),
        ({"num_training": 0.5}, TypeError, "num_training must be an integer"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        digits(jax.random.key(0), **options)
    with pytest.raises(TypeError, match="key must be one key"):
        digits(0)
    with pytest.raises(ValueError, match=r"inputs must have shape \[\*B, 16\]"):
        digits(jax.random.key(0), num_training=1).pixels(np.zeros((2, 15), int))
