"""Copy at a distance: how far back can a model reach?"""

import jax
import jax.numpy as jnp

from attn_jax.training.tasks.base import Batch, Generated
from attn_jax.typing import Array


class Copy(Generated):
    """Say at each token what stood `distance` tokens before: `target_i = input_{i−t}`, asked from i = t on.

    The symbols are independent and uniform, but that their sum modulo `num_symbols` is 0 in evaluation and not 0 in
    training: any of them but one are independent, and no sequence is in both.

    Args:
        num_symbols: which is the vocabulary; at least 2.
        distance: t, at least 1.
        length: T, more than `distance`.

    Raises:
        ValueError, TypeError: a size out of range or no integer.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> batch = tasks.Copy(num_symbols=5, distance=2, length=6).batch(jax.random.key(0), step=0, size=1)
    >>> bool((batch.targets[:, 2:] == batch.inputs[:, :-2]).all()), batch.weights[0].tolist()
    (True, [0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    """

    num_symbols: int = 16
    distance: int = 16
    length: int = 64

    def __post_init__(self) -> None:
        self._check_sizes(num_symbols=2, distance=1, length=1)
        if self.length <= self.distance:
            raise ValueError(f"length must be more than distance = {self.distance}, got {self.length}")
        if self.length * self.num_symbols >= 2**31:  # the sum below
            raise ValueError(f"length · num_symbols must be below 2³¹, got {self.length} · {self.num_symbols}")

    @property
    def vocabulary_size(self) -> int:
        """The symbols."""
        return self.num_symbols

    @property
    def chance(self) -> float:
        """A blind guess."""
        return 1 / self.num_symbols

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        all_but_one, total = jax.random.split(key)
        first = jax.random.randint(all_but_one, (self.length - 1,), 0, self.num_symbols, jnp.int32)
        remainder = 0 if held_out else jax.random.randint(total, (), 1, self.num_symbols, jnp.int32)
        last = (remainder - jnp.sum(first, dtype=jnp.int32)) % self.num_symbols
        symbols = jnp.concatenate([first, last[None]])
        targets = jnp.concatenate([jnp.zeros(self.distance, jnp.int32), symbols[: -self.distance]])
        return Batch(symbols, targets, (jnp.arange(self.length) >= self.distance).astype(jnp.float32))
