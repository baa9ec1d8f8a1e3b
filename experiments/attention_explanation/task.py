"""A task that uniform attention can solve: say which keyword stands somewhere among fillers."""

import jax
import jax.numpy as jnp

from attn_jax.training.tasks import Batch
from attn_jax.training.tasks.base import Generated
from attn_jax.typing import Array


class Keyword(Generated):
    """One keyword among fillers, asked for at the last token: a small likeness of sentences and their sentiment.

    The sum of fillers and keyword is odd in training and even in evaluation.

    Tokens: 0 the question, then the keywords, then the fillers. Targets are the keywords.
    """

    num_classes: int = 8
    length: int = 16

    def __post_init__(self) -> None:
        self._check_sizes(num_classes=2, length=3)
        if self.num_classes % 2:
            raise ValueError(f"num_classes must be even, got {self.num_classes}")

    @property
    def vocabulary_size(self) -> int:
        """The question, the keywords and as many fillers."""
        return 1 + 2 * self.num_classes

    @property
    def chance(self) -> float:
        """A blind guess."""
        return 1 / self.num_classes

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        of_class, of_place, of_fillers = jax.random.split(key, 3)
        which = jax.random.randint(of_class, (), 0, self.num_classes)
        place = jax.random.randint(of_place, (), 0, self.length - 1)
        fillers = jax.random.randint(of_fillers, (self.length - 1,), 0, self.num_classes)
        at = jnp.arange(self.length - 1)
        odd = (which + jnp.sum(jnp.where(at == place, 0, fillers))) % 2 == 1
        beside = at == (place + 1) % (self.length - 1)
        fillers = jnp.where(
            beside & (odd == held_out), fillers ^ 1, fillers
        )  # one filler makes the sum what it must be
        tokens = jnp.where(at == place, 1 + which, 1 + self.num_classes + fillers)
        nothing = jnp.zeros(self.length - 1, jnp.int32)
        return Batch(
            inputs=jnp.append(tokens, 0).astype(jnp.int32),
            targets=jnp.append(nothing, 1 + which).astype(jnp.int32),
            weights=jnp.append(nothing, 1).astype(jnp.float32),
        )
