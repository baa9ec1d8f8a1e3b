"""What the benchmark times: patterns of attention at a size, each as every library can be asked for it."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from attn_jax import masks
from attn_jax.masks import Mask
from attn_jax.typing import Array, Bool, Float

DIRECTIONS = ("forward", "forward_backward")
BLOCK = 64  # of BigBird


def window_width(length: int) -> int:
    """Keys in the window, the query's own included: 512, less where that is more than a quarter of them."""
    return min(512, max(length // 4, 1))


def bigbird(length: int) -> Mask:
    """A block on either side of the query, two global ones, three at random (Zaheer et al. 2020, appendix E)."""
    return masks.bigbird(BLOCK, 2 * BLOCK, per_row=3, block=BLOCK)


@dataclasses.dataclass(frozen=True)
class Case:
    """A pattern of attention.

    Attributes:
        name: of the pattern.
        causal: no key from the future.
        windowed: the last `window_width` keys only.
        mask: what needs a mask because no library has a word for it, from the length.
        biased: adds an array `[1, 1, T, S]` to the logits.
        groups: query heads that share a key/value head.
    """

    name: str
    causal: bool = False
    windowed: bool = False
    mask: Callable[[int], Mask] | None = None
    biased: bool = False
    groups: int = 1

    def pattern(self, length: int) -> Mask | None:
        """All that the case hides, as one mask."""
        if self.windowed:
            return masks.SlidingWindow(window_width(length))
        if self.causal:
            return masks.Causal()
        return None if self.mask is None else self.mask(length)


CASES = {
    case.name: case
    for case in (
        Case("full"),
        Case("causal", causal=True),
        Case("window", causal=True, windowed=True),
        Case("bigbird", mask=bigbird),
        Case("bias", biased=True),
        Case("gqa", groups=4),
    )
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case at a size, with its arrays: float32, normal, the same for all sides.

    Attributes:
        case: the pattern.
        length: n, queries and keys.
        heads: query heads.
        width: of a head.
        seed: of the arrays.
    """

    case: Case
    length: int
    heads: int
    width: int
    seed: int = 0

    @property
    def window(self) -> tuple[int, int] | None:
        """The window as `local_window_size`."""
        return (window_width(self.length) - 1, 0) if self.case.windowed else None

    @property
    def mask(self) -> Mask | None:
        """What has to be said by a mask."""
        return None if self.case.mask is None else self.case.mask(self.length)

    @functools.cached_property
    def inputs(self) -> tuple[Float[Array, "1 n h d"], Float[Array, "1 n k d"], Float[Array, "1 n k d"]]:
        """Query, key and value."""
        kv_heads = max(self.heads // self.case.groups, 1)
        return self._normal(0, self.heads), self._normal(1, kv_heads), self._normal(2, kv_heads)

    @functools.cached_property
    def cotangent(self) -> Float[Array, "1 n h d"]:
        """The gradient that arrives at the output."""
        return self._normal(3, self.heads)

    @functools.cached_property
    def bias(self) -> Float[Array, "1 1 n n"] | None:
        """The additive bias, if there is one."""
        return jax.random.normal(self._key(4), (1, 1, self.length, self.length)) if self.case.biased else None

    @functools.cached_property
    def visible(self) -> Bool[Array, "1 1 n n"] | None:
        """All that the case hides as a boolean array, for those who know neither the pattern nor lazy masks."""
        pattern = self.case.pattern(self.length)
        return None if pattern is None else masks.materialize(pattern, self.length)[None, None]

    def _normal(self, stream: int, heads: int) -> Array:
        return jax.random.normal(self._key(stream), (1, self.length, heads, self.width))

    def _key(self, stream: int) -> Array:
        return jax.random.fold_in(jax.random.key(self.seed), stream)


def largest_difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest entry of the differences, over the largest entry of what is expected, worst of all arrays.

    What is not a number is infinitely far off.
    """
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"results must have the same shape, got {one.shape} and {other.shape}")
        difference, largest = (float(np.abs(x).max()) for x in (np.subtract(one, other), other))
        if difference != 0:
            worst = max(worst, difference / largest if np.isfinite(difference) and largest > 0 else np.inf)
    return worst
