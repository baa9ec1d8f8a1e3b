"""The measurements of `positions`, by what is asked of them."""

import dataclasses

import numpy as np
import pandas as pd

from experiments import estimates
from experiments.arms import Best, best_of
from experiments.claims.positions import FOUND, SOLVED
from experiments.estimates import Estimate
from experiments.positions.config import SCALED, PositionsConfig


def kind_of(arm: str) -> str:
    """The positions of the models that are read as an arm."""
    return "rotary" if arm in SCALED else arm


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements, by what is asked of them. Of models that were not trained everything is NaN."""

    config: PositionsConfig
    rows: pd.DataFrame

    def scores(self, arm: str) -> np.ndarray:
        """`[seeds, positions]`: errors as a share of the scores' standard deviation."""
        return estimates.by_run(self.rows.query("part == 'scores' and arm == @arm"), "position")

    def shift(self, kind: str, of: str, layer: int, measure: str = "change") -> np.ndarray:
        """`[seeds]`: relative change of queries, keys or values."""
        if kind not in self.config.shifted:
            return np.full(self.config.seeds, np.nan)
        found = self.rows.query("part == 'shift' and arm == @kind and of == @of and layer == @layer")
        return estimates.by_run(found.query("measure == @measure"))

    def best(self, kind: str) -> Best:
        """The language models of a kind at their best rate."""
        return best_of(self.rows.query("part == 'language'"), kind)

    def probe(self, kind: str, layer: int, when: str = "after", measure: str = "values") -> np.ndarray:
        """`[seeds]`: share of the position's variance that values tell; NaN if the best rate is at an edge."""
        if when == "after" and not self._known(kind):
            return np.full(self.config.seeds, np.nan)
        found = self.rows.query("part == 'probe' and arm == @kind and layer == @layer and measure == @measure")
        return _in_order(found.query("`when` == @when"))

    def excess(self, arm: str) -> np.ndarray:
        """`[seeds, places past L]`: loss given all tokens − given the last L; NaN if the best rate is at an edge."""
        past = [place for place in self.config.places if place >= self.config.length]
        if not self.read(arm) or not self._known(kind_of(arm)):
            return np.full((self.config.seeds, len(past)), np.nan)
        rows = self.rows.query("part == 'length' and position in @past")
        every, last = (
            rows.query(f"measure == {m!r} and arm == {a!r}") for m, a in (("all", arm), ("last", kind_of(arm)))
        )
        table = [x.pivot_table(index="seed", columns="position", values="value", dropna=False) for x in (every, last)]
        return np.asarray(table[0], np.float64) - np.asarray(table[1], np.float64)

    def harm(self, arm: str, *, up_to: int | None = None) -> Estimate:
        """The mean of `excess` over places: all, or those before a multiple of L."""
        count = None if up_to is None else (up_to - 1) * self.config.length // self.config.every
        return estimates.mean(self.excess(arm)[:, :count].mean(axis=1))

    def accuracy(self, arm: str, measure: str) -> np.ndarray:
        """`[seeds]` of the recall task: "within" the trained length, or "beyond"."""
        if not self.looked_up(arm):
            return np.full(self.config.lookup_seeds, np.nan)
        return _in_order(self.rows.query("part == 'lookup' and arm == @arm and measure == @measure"))

    def found(self, arm: str) -> np.ndarray:
        """`[distances]`: accuracy by how far back a pair stands, mean over seeds."""
        rows = self.rows.query("part == 'lookup' and arm == @arm and measure == 'found'")
        return np.asarray(rows.groupby("least")["value"].mean())

    def recalls(self, arm: str) -> Estimate:
        """The share of runs that find what is further back than L."""
        return _share(self.accuracy(arm, "beyond"), FOUND)

    def solves(self, arm: str) -> Estimate:
        """The share of runs that find what is not."""
        return _share(self.accuracy(kind_of(arm), "within"), SOLVED)

    def read(self, arm: str) -> bool:
        """Whether language models were read as an arm."""
        return any(arm in self.config.arms(kind) for kind in self.config.kinds)

    def looked_up(self, arm: str) -> bool:
        """Whether models of the recall task were."""
        return any(arm in self.config.arms(kind) for kind in self.config.lookup_kinds)

    def _known(self, kind: str) -> bool:
        return kind in self.config.kinds and self.best(kind).inside


def _in_order(rows: pd.DataFrame) -> np.ndarray:
    return rows.sort_values(by="seed")["value"].to_numpy(np.float64)


def _share(values: np.ndarray, line: float) -> Estimate:
    """Of yes-or-no outcomes fewer than ten settle nothing; neither does a run that diverged."""
    if len(values) < 10 or np.isnan(values).any():
        return Estimate(np.nan, np.nan, np.nan, len(values))
    return estimates.share(values > line)
