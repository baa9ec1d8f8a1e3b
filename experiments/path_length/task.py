"""The task of `path_length`: a symbol is asked for, a distance after it stood."""

import jax.numpy as jnp
import numpy as np

from attn_jax.training.tasks import Batch, Copy
from attn_jax.training.tasks.base import Generated
from attn_jax.typing import Array, Bool, Int


class Reach(Generated, data=("distance", "marked")):
    """Copying at a distance, or holding one marked symbol over it; both are data, and so share a compile.

    Copying: say at each token what stood t before, as `Copy` asks it. Holding: of random symbols the one t before the
    last token is marked (a token of its own); the last token asks for it, whose distance need not be known. Symbols are
    split between training and evaluation as `Copy` splits them.
    """

    distance: Int[Array, ""]
    marked: Bool[Array, ""]
    num_symbols: int
    length: int

    @classmethod
    def of(cls, kind: str, distance: int, *, num_symbols: int, length: int) -> "Reach":
        """Of a kind, "copy" or "hold"."""
        Copy(num_symbols, distance, length)  # sizes that do not go together raise here
        return cls(np.int32(distance), np.bool_(kind == "hold"), num_symbols, length)  # pyright: ignore[reportArgumentType]

    @property
    def vocabulary_size(self) -> int:
        """The symbols, plain and marked."""
        return 2 * self.num_symbols

    @property
    def chance(self) -> float:
        """A blind guess."""
        return 1 / self.num_symbols

    def draw(self, key: Array, *, held_out: bool) -> Batch:
        """One sequence, `[T]`."""
        symbols = Copy(self.num_symbols, 1, self.length).draw(key, held_out=held_out).inputs
        at = jnp.arange(self.length)
        behind = self.length - 1 - self.distance  # where the marked symbol stands
        inputs = jnp.where(self.marked & (at == behind), symbols + self.num_symbols, symbols)
        asked = jnp.where(self.marked, at == self.length - 1, at >= self.distance)
        targets = jnp.where(asked, jnp.take(symbols, at - self.distance, mode="clip"), 0)
        return Batch(inputs, targets, asked.astype(jnp.float32))
