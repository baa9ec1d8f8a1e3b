"""Scikit-learn's bundled digits, read as sequences of patches."""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.training.tasks.base import Batch, TaskBase
from attn_jax.typing import Array, ArrayLike, Int

NUM_HELD_OUT = 360  # a fifth of the 1797
SIDE, PATCH = 8, 2
LENGTH = (SIDE // PATCH) ** 2


class Digits(TaskBase, data=("training_patches", "training_labels", "held_out_patches", "held_out_labels")):
    """Classification: 16 patches of an image of 8 × 8, row by row; its class is asked once, at the last patch.

    A patch is 2 × 2 pixels, a token its pixels as digits of a number in base `levels`. The ten classes are the last
    tokens of the vocabulary. Made by `digits`.

    Attributes:
        training_patches, held_out_patches: int32 `[images, 16]`, tokens.
        training_labels, held_out_labels: int32 `[images]`, 0..9.
        levels: of grey.
        chance: the share of the commonest class.

    >>> import jax.numpy as jnp
    >>> from attn_jax.training.tasks import Digits
    >>> patches, labels = jnp.full((2, 16), 5), jnp.array([7, 3])
    >>> task = Digits(patches, labels, patches, labels, levels=3, chance=0.1)
    >>> batch = task.evaluation(1, 2)
    >>> batch.targets[0, :, -1].tolist(), task.vocabulary_size  # the ten classes are the last of 3⁴ + 10 tokens
    ([88, 84], 91)
    >>> task.pixels(patches)[0, :2, :2].tolist()  # 5 = 2 · 1 + 1 · 3
    [[2, 1], [0, 0]]
    """

    training_patches: Int[Array, "n t"]
    training_labels: Int[Array, " n"]
    held_out_patches: Int[Array, "m t"]
    held_out_labels: Int[Array, " m"]
    levels: int
    chance: float

    @property
    def vocabulary_size(self) -> int:
        """Patches and classes."""
        return self.levels ** (PATCH * PATCH) + 10

    @property
    def length(self) -> int:
        """Patches of an image."""
        return LENGTH

    @property
    def num_held_out(self) -> int:
        """Images that are held out."""
        return self.held_out_labels.shape[0]

    def pixels(self, inputs: Int[ArrayLike, "*b t"]) -> Int[Array, "*b y x"]:
        """The image behind the patches, `[*B, 8, 8]`, each pixel in 0..levels-1: what a convolution reads."""
        tokens = checks.integer_array("inputs", inputs)
        checks.shape("inputs", tokens, (*tokens.shape[:-1], LENGTH), "[*B, 16]")
        batch, across = tokens.shape[:-1], SIDE // PATCH
        powers = jnp.asarray(_powers(self.levels)).reshape((1,) * tokens.ndim + (-1,))
        patches = (tokens[..., None] // powers % self.levels).reshape(*batch, across, across, PATCH, PATCH)
        return jnp.swapaxes(patches, -3, -2).reshape(*batch, SIDE, SIDE)

    def _train(self, key: Array) -> Batch:
        index = jax.random.randint(key, (), 0, self.training_labels.shape[0], jnp.int32)
        return self._sequence(self.training_patches[index], self.training_labels[index])

    def _evaluate(self, index: Int[Array, ""]) -> Batch:
        return self._sequence(self.held_out_patches[index], self.held_out_labels[index])

    def _sequence(self, patches: Int[Array, " t"], label: Int[Array, ""]) -> Batch:
        last = jnp.arange(LENGTH) == LENGTH - 1
        target = self.vocabulary_size - 10 + label
        return Batch(patches, jnp.where(last, target, 0).astype(jnp.int32), last.astype(jnp.float32))


def digits(key: Array, *, num_training: int | None = None, levels: int = 3) -> Digits:
    """The 1797 handwritten digits as a task. 360 of them, chosen by the key, are held out.

    Args:
        key: `jax.random.key(seed)`, which splits the images; those held out are the same whatever `num_training`.
        num_training: how many of the other images to train on, 1..1437; None for all.
        levels: of grey, 2..17 (17 are in the data); with 3, there are 81 patches, and the nearest neighbour still
            names 97 of 100 digits.

    Raises:
        ValueError, TypeError: a number out of range or no integer, or something that is no key.

    Reference: Alpaydin & Kaynak 1998 (UCI, optical recognition of handwritten digits); Dosovitskiy et al. 2021 (ViT).

    >>> import jax
    >>> from attn_jax.training.tasks import digits
    >>> task = digits(jax.random.key(0), num_training=1000)
    >>> task.training_labels.shape, task.num_held_out, round(task.chance, 3)
    ((1000,), 360, 0.102)
    """
    from sklearn.datasets import load_digits  # takes two seconds to import, and only this task needs it

    key = checks.prng_key("key", key)
    levels = checks.positive_int("levels", levels, least=2)
    if levels > 17:
        raise ValueError(f"levels must be at most 17, as many as the data has, got {levels}")
    images, classes = (np.asarray(x, np.int32) for x in load_digits(return_X_y=True))
    most = len(classes) - NUM_HELD_OUT
    count = most if num_training is None else checks.positive_int("num_training", num_training)
    if count > most:
        raise ValueError(f"num_training must be at most {most}, the images not held out, got {count}")

    grey, across = images * levels // 17, SIDE // PATCH
    patches = grey.reshape(-1, across, PATCH, across, PATCH).swapaxes(2, 3).reshape(-1, LENGTH, PATCH * PATCH)
    tokens, labels = jnp.asarray(patches @ _powers(levels)), jnp.asarray(classes)
    order = jax.random.permutation(key, len(labels))
    held_out, training = order[:NUM_HELD_OUT], order[NUM_HELD_OUT : NUM_HELD_OUT + count]
    commonest = float(np.bincount(classes).max() / len(classes))
    return Digits(tokens[training], labels[training], tokens[held_out], labels[held_out], levels, commonest)


def _powers(levels: int) -> np.ndarray:
    return np.array([levels**place for place in range(PATCH * PATCH)], np.int32)
