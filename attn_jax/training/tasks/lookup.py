"""Look-up by content alone: a pair is one token, and one layer of attention suffices."""

import jax
import jax.numpy as jnp

from attn_jax.training.tasks.base import Batch, Generated, is_odd, shuffled, swap_last
from attn_jax.typing import Array, Int


class Lookup(Generated):
    """Recall where a pair is one token: pairs at the start, questions anywhere after.

        (k₁v₁) (k₂v₂) … (kₙvₙ)  · k₂ · · · kₙ · k₁ …      asked at the k's, answered by the v's

    Keys differ from each other, and so do values. The map from keys to values, read as a permutation, is odd in
    training and even in evaluation, as in `attn_jax.training.tasks.Recall`, where a pair is two tokens.

    Tokens: 0 the filler, then the keys, then the values, then the pairs.

    Args:
        num_pairs: n, at least 2.
        num_keys, num_values: how many there are to choose from, at least n.
        length: T, at least 2 n.

    Raises:
        ValueError, TypeError: a size out of range or no integer.

    >>> import jax
    >>> from attn_jax.training import tasks
    >>> batch = tasks.Lookup(num_pairs=2, num_keys=2, num_values=2, length=4).batch(jax.random.key(0), step=0, size=1)
    >>> batch.inputs[0].tolist(), batch.targets[0].tolist()  # keys 1, 2; values 3, 4; pairs 5..8
    ([6, 7, 2, 1], [0, 0, 3, 4])
    """

    num_pairs: int = 4
    num_keys: int = 8
    num_values: int = 8
    length: int = 32

    def __post_init__(self) -> None:
        self._check_sizes(num_pairs=2, num_keys=self.num_pairs, num_values=self.num_pairs, length=2 * self.num_pairs)

    @property
    def vocabulary_size(self) -> int:
        """Filler, keys, values and pairs."""
        return 1 + self.num_keys + self.num_values + self.num_keys * self.num_values

    @property
    def chance(self) -> float:
        """One of the values that are there, of whichever key."""
        return 1 / self.num_pairs

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        rest = self.length - self.num_pairs
        bits = jax.random.bits(key, (self.num_keys + self.num_values + rest,), jnp.uint32)
        for_keys, for_values, for_places = jnp.split(bits, [self.num_keys, self.num_keys + self.num_values])
        keys, values = shuffled(for_keys)[: self.num_pairs], shuffled(for_values)[: self.num_pairs]
        odd = is_odd(keys) ^ is_odd(values)
        values = swap_last(values, odd if held_out else ~odd)
        pairs = 1 + self.num_keys + self.num_values + keys * self.num_values + values

        asked = shuffled(for_places)  # the pair that each place asks for, if there is one of that number
        is_question, asked = asked < self.num_pairs, jnp.minimum(asked, self.num_pairs - 1)
        nothing = jnp.zeros_like(pairs)
        return Batch(
            inputs=jnp.concatenate([pairs, jnp.where(is_question, 1 + keys[asked], 0)]),
            targets=jnp.concatenate([nothing, jnp.where(is_question, 1 + self.num_keys + values[asked], 0)]),
            weights=jnp.concatenate([nothing, is_question]).astype(jnp.float32),
        )

    def parts(self, inputs: Int[Array, "*b t"]) -> tuple[Int[Array, "*b t"], Int[Array, "*b t"]]:
        """Each token in two parts: the key, 1.. (0 for a filler), and the value beside it, 1.. (0 where there is none).

        A model that embeds them apart and adds them learns keys and values, not pairs of them.
        """
        pair = inputs - 1 - self.num_keys - self.num_values
        is_pair = pair >= 0
        return jnp.where(is_pair, 1 + pair // self.num_values, inputs), jnp.where(
            is_pair, 1 + pair % self.num_values, 0
        )

    def distances(self, batch: Batch) -> Int[Array, "*b t"]:
        """How far back the pair stands that each question asks for; 0 where nothing is asked."""
        inputs = batch.inputs
        keys, _ = self.parts(inputs[..., : self.num_pairs])
        at = jnp.argmax(keys[..., None, :] == inputs[..., :, None], axis=-1)
        back = jnp.arange(inputs.shape[-1]).reshape((1,) * (at.ndim - 1) + (-1,)) - at
        return jnp.where(batch.weights > 0, back, 0)
