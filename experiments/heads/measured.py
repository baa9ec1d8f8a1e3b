"""The measurements of `heads`, by what is asked of them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments import estimates
from experiments.arms import Best, best_of
from experiments.claims.heads import FITS
from experiments.heads.config import HeadsConfig
from experiments.heads.trained import output_name, split_name

COUNTED = ("parameters", "products", "operations", "memory")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements, by what is asked of them."""

    config: HeadsConfig
    rows: pd.DataFrame

    def cost(self, measure: str) -> np.ndarray:
        """`[numbers of heads]`."""
        found = self.rows.query("part == 'cost' and measure == @measure")
        return found.sort_values(by="heads")["value"].to_numpy()

    def seconds(self) -> np.ndarray:
        """`[rounds, numbers of heads]`."""
        timed = self.rows.query("part == 'cost' and seconds.notna()")
        return timed.pivot(index="round", columns="heads", values="seconds").to_numpy()

    def fit(self, measure: str, pattern: str, length: int) -> np.ndarray:
        """`[seeds, head widths]`."""
        found = self.rows.query("part == 'fit' and measure == @measure and arm == @pattern and length == @length")
        return estimates.by_run(found, "head_dim")

    def narrowest_fit(self, pattern: str, length: int) -> np.ndarray:
        """`[seeds]`: the smallest head width whose fit leaves less than 5%; n, which always suffices, if none does."""
        fits = self.fit("left", pattern, length) < FITS
        widths = np.asarray(sorted(self.config.fit_dims))
        return np.where(fits.any(axis=1), widths[np.argmax(fits, axis=1)], length)

    def seen(self, measure: str) -> np.ndarray:
        """`[seeds]`."""
        return estimates.by_run(self.rows.query("part == 'seen' and measure == @measure"))

    def best(self, arm: str) -> Best:
        """An arm at its best rate."""
        return best_of(self.rows.query("part == 'trained'"), arm)

    def loss(self, arm: str) -> np.ndarray:
        """`[seeds]`, at the best rate; NaN if that is not inside its grid."""
        best = self.best(arm)
        return best.values if best.inside else np.full_like(best.values, np.nan)

    def losses(self, arms: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Of some (h, d_k), each `[seeds]`."""
        return [self.loss(split_name(*arm)) for arm in arms]

    def without(self, mixing: str, setting: str) -> np.ndarray:
        """`[seeds]`: loss minus that of a trained W_O."""
        other, trained = (output_name(self.config, name, setting) for name in (mixing, "trained"))
        return self.loss(other) - self.loss(trained)

    def pattern(self, heads: int, when: str, pair: str, measure: str) -> np.ndarray:
        """`[seeds, layers]`; NaN if the arm's best rate is not inside its grid."""
        found = self.rows.query(
            "part == 'patterns' and heads == @heads and when == @when and pair == @pair and measure == @measure"
        )
        values = np.asarray(found.pivot_table(index="seed", columns="layer", values="value", dropna=False))
        arm = split_name(heads, self.config.model_width // heads)
        return values if when == "before" or self.best(arm).inside else np.full_like(values, np.nan)

    def difference(self, heads: int, when: str, pair: str) -> np.ndarray:
        """`[seeds]`: divergence of heads as a share of that of shuffled rows, mean over layers."""
        divergence, shuffled = (self.pattern(heads, when, pair, name) for name in ("divergence", "shuffled"))
        return (divergence / shuffled).mean(axis=1)
