"""A small task of structured series: seasons and noise, in a few levels."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.training.tasks import Batch
from attn_jax.training.tasks.base import TaskBase
from attn_jax.typing import Array, Int

PERIODS = (5, 12)  # steps of a season, from and up to
NOISE = 0.3  # standard deviation of what is added to a season, whose amplitude is 1
MEMORY = 0.6  # of the noise, from a step to the next


class Series(TaskBase, data=("training", "held_out")):
    """The next value, asked at every step.

    Attributes:
        training, held_out: int32 `[series, T + 1]`, levels.
        levels: that values are rounded to.
    """

    training: Int[Array, "n t"]
    held_out: Int[Array, "m t"]
    levels: int

    @property
    def vocabulary_size(self) -> int:
        """The levels."""
        return self.levels

    @property
    def length(self) -> int:
        """Steps that are read."""
        return self.training.shape[1] - 1

    @property
    def chance(self) -> None:
        """Not known: levels are not equally frequent."""
        return None

    @property
    def num_held_out(self) -> int:
        """Series that are held out."""
        return self.held_out.shape[0]

    def _train(self, key: Array) -> Batch:
        return _sequence(self.training[jax.random.randint(key, (), 0, self.training.shape[0], jnp.int32)])

    def _evaluate(self, index: Int[Array, ""]) -> Batch:
        return _sequence(self.held_out[index])


def _sequence(series: Int[Array, " t"]) -> Batch:
    return Batch(series[:-1], series[1:], jnp.ones(series.shape[0] - 1, jnp.float32))


def draw_series(seed: int, *, training: int, held_out: int, length: int, levels: int) -> Series:
    """Series of one season each, `sin(2π (t + φ) / P)`, and noise that remembers: `e_t = 0.6 e_{t-1} + …`.

    The period and the phase are drawn for each series, uniformly; levels are equally wide over ± 2, and what is beyond
    is in the last one.
    """
    rng = np.random.default_rng(seed)
    count = training + held_out
    period, phase = rng.uniform(*PERIODS, (count, 1)), rng.uniform(0, 1, (count, 1))
    season = np.sin(2 * np.pi * (np.arange(length + 1) / period + phase))
    noise = NOISE * rng.standard_normal((length + 1, count))
    for t in range(1, length + 1):
        noise[t] = MEMORY * noise[t - 1] + np.sqrt(1 - MEMORY**2) * noise[t]
    values = np.clip((season + noise.T + 2) / 4 * levels, 0, levels - 1).astype(np.int32)
    return Series(jnp.asarray(values[:training]), jnp.asarray(values[training:]), levels)
