"""The models of `inductive_bias`, trained on few and on many images and series."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.nn import Transformer
from attn_jax.training.tasks import Digits, digits
from experiments.arms import Arm, begin, train_arm
from experiments.artifacts import Row
from experiments.inductive_bias.config import InductiveBiasConfig, count_parameters
from experiments.inductive_bias.series import Series, draw_series


@dataclasses.dataclass(frozen=True)
class Data:
    """All training sets of a part are the first images or series of the largest, repeated to its size.

    So arrays have one shape, and all sets share one compile.
    """

    config: InductiveBiasConfig
    part: str

    @functools.cached_property
    def whole(self) -> Digits | Series:
        """With the largest training set."""
        config = self.config
        if self.part == "digits":
            return digits(jax.random.key(config.seed), num_training=config.images[-1])
        return draw_series(
            config.seed,
            training=config.series[-1],
            held_out=config.held_out,
            length=config.series_length,
            levels=config.levels,
        )

    def of(self, size: int) -> Digits | Series:
        """With the first so many."""
        task = self.whole
        if isinstance(task, Digits):
            rows = jnp.arange(task.training_labels.shape[0]) % size
            return dataclasses.replace(
                task, training_patches=task.training_patches[rows], training_labels=task.training_labels[rows]
            )
        return dataclasses.replace(task, training=task.training[jnp.arange(task.training.shape[0]) % size])


def train(data: Data, name: str) -> list[Row]:
    """The models of an arm on every training set of a part."""
    config, transformer = data.config, data.config.transformer(name, data.part)
    arm = Arm(name, functools.partial(Transformer, transformer))
    begun = begin(arm, config.budget(data.part))
    rows: list[Row] = [
        {"part": data.part, "arm": name, "measure": "parameters", "value": count_parameters(transformer)}
    ]
    for size in config.sizes(data.part):
        found = train_arm(arm, data.of(size), config.budget(data.part), begun=begun)
        rows += [{"part": data.part, "size": size, **row} for row in found]
    return rows


def nearest(data: Data) -> list[Row]:
    """The accuracy of the nearest training image, in pixels, for each training set: what needs no training."""
    task, count = data.whole, data.config.held_out
    assert isinstance(task, Digits)
    known, asked = (
        np.asarray(task.pixels(x), np.float64).reshape(len(x), -1)
        for x in (task.training_patches, task.held_out_patches[:count])
    )
    distances = np.sum(known**2, axis=1)[None] - 2 * asked @ known.T
    rows: list[Row] = []
    for size in data.config.images:
        found = np.asarray(task.training_labels)[distances[:, :size].argmin(axis=1)]
        right = np.mean(found == np.asarray(task.held_out_labels)[:count])
        rows.append({"part": "nearest", "size": size, "measure": "accuracy", "value": float(right)})
    return rows
