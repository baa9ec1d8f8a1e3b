"""Multi-query associative recall: can a model look up one of many stored pairs?"""

import jax
import jax.numpy as jnp

from attn_jax.training.tasks.base import Batch, Generated, is_odd, shuffled, swap_last
from attn_jax.typing import Array


class Recall(Generated):
    """Key–value pairs, then each key once more: say its value.

        k₁ v₁ k₂ v₂ … kₙ vₙ  · k₂ · · kₙ · k₁ …      asked at the second k's

    Keys differ from each other, and so do values. The queries stand in random order at random places of what is left of
    the sequence (Arora et al. draw the gaps from a power law), a filler token in all others. An answer is not shown, so
    it does not narrow down later ones.

    The map from keys to values, read as a permutation, is odd in training and even in evaluation: any n − 2 of the
    values are uniform, and no map is in both.

    Tokens: 0 the filler, then the keys, then the values.

    Args:
        num_pairs: n, at least 3.
        num_keys, num_values: how many there are to choose from, at least n.
        length: T, at least 3 n; one of exactly 3 n has no filler.

    Raises:
        ValueError, TypeError: a size out of range or no integer.

    Reference: Arora et al. 2023, "Zoology: measuring and improving recall in efficient language models", section 3.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> batch = tasks.Recall(num_pairs=3, num_keys=4, num_values=5, length=9).batch(jax.random.key(0), step=0, size=1)
    >>> batch.inputs[0].tolist(), batch.targets[0, 6:].tolist()  # keys are 1..4, values 5..9
    ([1, 6, 3, 7, 2, 9, 1, 3, 2], [6, 7, 9])
    """

    num_pairs: int = 8
    num_keys: int = 32
    num_values: int = 32
    length: int = 64

    def __post_init__(self) -> None:
        self._check_sizes(num_pairs=3, num_keys=1, num_values=1, length=1)
        for name, factor in (("num_keys", 1), ("num_values", 1), ("length", 3)):
            if getattr(self, name) < factor * self.num_pairs:
                times = f"{factor} · " if factor > 1 else ""
                raise ValueError(
                    f"{name} must be at least {times}num_pairs = {factor * self.num_pairs}, got {getattr(self, name)}"
                )

    @property
    def vocabulary_size(self) -> int:
        """Filler, keys and values."""
        return 1 + self.num_keys + self.num_values

    @property
    def chance(self) -> float:
        """One of the values that are there, of whichever key."""
        return 1 / self.num_pairs

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        rest = self.length - 2 * self.num_pairs
        bits = jax.random.bits(key, (self.num_keys + self.num_values + rest,), jnp.uint32)
        for_keys, for_values, for_places = jnp.split(bits, [self.num_keys, self.num_keys + self.num_values])
        keys, values = shuffled(for_keys)[: self.num_pairs], shuffled(for_values)[: self.num_pairs]
        # The sign of the map is the product of both: in whatever order the pairs stand, it is the same.
        odd = is_odd(keys) ^ is_odd(values)
        values = swap_last(values, odd if held_out else ~odd)
        keys, values = 1 + keys, 1 + self.num_keys + values

        pairs = jnp.stack([keys, values], axis=-1).reshape(-1)
        asked = shuffled(for_places)  # the pair that each place asks for, if there is one of that number
        is_query, asked = asked < self.num_pairs, jnp.minimum(asked, self.num_pairs - 1)
        nothing = jnp.zeros_like(pairs)
        return Batch(
            inputs=jnp.concatenate([pairs, jnp.where(is_query, keys[asked], 0)]),
            targets=jnp.concatenate([nothing, jnp.where(is_query, values[asked], 0)]),
            weights=jnp.concatenate([nothing, is_query]).astype(jnp.float32),
        )
