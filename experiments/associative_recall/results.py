"""What the measurements of `associative_recall` say: the verdicts, tables and figure."""

import dataclasses

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import best_of
from experiments.associative_recall.capacity import held, state_size
from experiments.associative_recall.config import MIXERS, RecallConfig
from experiments.claims.recall import ALONE, HYBRIDS, SOLVED, SPLIT, WIDTHS
from experiments.estimates import Estimate
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

ALT = (
    "Three panels. The share of queries answered against the number of pairs stored, per mechanism: softmax holds to "
    "the end, memories of fixed size fall early. The pairs held against the head width, on logarithmic axes. The "
    "accuracy of each trained run, by mixer."
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements, by what is asked of them. What was not measured is NaN."""

    config: RecallConfig
    rows: pd.DataFrame

    def answered(self, store: str, width: int) -> np.ndarray:
        """`[seeds, numbers of pairs]`: the share of queries answered."""
        found = self.rows.query("part == 'capacity' and arm == @store and width == @width")
        return estimates.by_run(found, "pairs")

    def held(self, store: str, width: int) -> np.ndarray:
        """`[seeds]`: the capacity."""
        config = self.config
        if "capacity" not in config.parts or store not in config.stores or width not in config.widths:
            return np.full(config.simulations, np.nan)
        return held(self.answered(store, width), config.stored, SOLVED)

    def accuracy(self, part: str, arm: str, pairs: int) -> np.ndarray:
        """`[seeds]`, of an arm at its best rate."""
        if part not in self.config.parts:
            return np.full(self.config.seeds, np.nan)
        found = self.rows.query("part == @part and pairs == @pairs")
        if arm not in set(found["arm"]):
            return np.full(self.config.seeds, np.nan)
        return best_of(found, arm, measure="accuracy").values

    def solve(self, part: str, arm: str, pairs: int) -> Estimate:
        """The share of runs that solve it; not known if it was not trained or a run diverged."""
        values = self.accuracy(part, arm, pairs)
        if np.isnan(values).any():
            return Estimate(np.nan, np.nan, np.nan, len(values))
        return estimates.share(values > SOLVED)


def judge(config: RecallConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = Measured(config, measurements)
    return [_l1a(found), _l1b(found), _l1c(found)]


def _l1a(found: Measured) -> Outcome:
    config, widest = found.config, WIDTHS[-1]
    softmax = found.held("softmax", widest)
    evidence = {
        f"ratio_{width}": estimates.ratio(found.held("softmax", width), found.held("elu", width)) for width in WIDTHS
    }
    evidence |= {f"held_{name}": estimates.mean(found.held(name, widest)) for name in ("softmax", "elu", *SPLIT)}
    evidence["bounded"] = estimates.mean(np.where(np.isnan(softmax), np.nan, softmax >= 0.999 * config.most_pairs))
    return claims.judge(
        "L1a",
        evidence,
        random_features=config.features,
        window=config.window,
        simulations=config.simulations,
        queries=config.queries,
        most_pairs=f"{config.most_pairs:,}",
    )


def _l1b(found: Measured) -> Outcome:
    config, most = found.config, found.config.pairs[-1]
    evidence = {arm: found.solve("one_layer", arm, most) for arm in ("softmax", "linear", *ALONE)}
    evidence["pairs"] = estimates.counted(most)
    scope = _scope(config, config.num_heads, config.head_width)
    return claims.judge("L1b", evidence, pairs=most, steps=config.steps, rate=config.rate, **scope)


def _l1c(found: Measured) -> Outcome:
    config = found.config
    arms = ("linear_softmax", "softmax", "linear", *ALONE, *HYBRIDS)
    return claims.judge(
        "L1c",
        {arm: found.solve("multi_query", arm, config.query_pairs) for arm in arms},
        query_pairs=config.query_pairs,
        query_length=config.query_length,
        query_steps=config.query_steps,
        rates=len(config.query_rates),
        **_scope(config, config.query_heads, config.model_width // config.query_heads),
    )


def _scope(config: RecallConfig, heads: int, head_width: int) -> dict[str, object]:
    return {
        "width": config.model_width,
        "heads": heads,
        "head_width": head_width,
        "batch": config.batch_size,
        "seeds": config.seeds,
    }


def tables(config: RecallConfig, measurements: pd.DataFrame) -> list[Table]:
    found, made = Measured(config, measurements), []
    if "capacity" in config.parts:
        rows = []
        for store in config.stores:
            kept = state_size(config, store, config.widths[-1], config.most_pairs)
            capacities = [np.exp(np.log(found.held(store, width)).mean()) for width in config.widths]
            told = [f"{'≥ ' if held >= 0.999 * config.most_pairs else ''}{held:,.0f}" for held in capacities]
            rows.append((store, *told, f"{kept:,}"))
        names = ("mechanism", *(f"d_k = {width}" for width in config.widths), "numbers kept")
        made.append(Table("Pairs held without training", names, cells(rows)))
    for part, arms, counts in _trained(config):
        rows = []
        for arm in arms:
            shares = [found.solve(part, arm, count) for count in counts]
            means = [found.accuracy(part, arm, count).mean() for count in counts]
            rows.append((arm, *(f"{m:.2f}, {s.value:.0%}" for m, s in zip(means, shares, strict=True))))
        names = ("mixers", *(f"{count} pairs" for count in counts))
        made.append(Table(f"{part}: accuracy, share of runs that solve it", names, cells(rows)))
    return made


def _trained(config: RecallConfig) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    parts = [("one_layer", config.arms, config.pairs), ("multi_query", config.query_arms, (config.query_pairs,))]
    return [one for one in parts if one[0] in config.parts]


def figure(config: RecallConfig, measurements: pd.DataFrame) -> Figure:
    found = Measured(config, measurements)
    drawn, axes = figures.panels(1, 3)
    answered, capacity, trained = axes[0]
    if "capacity" in config.parts:
        _capacity(found, answered, capacity)
    _runs(found, trained)
    return drawn


def _capacity(found: Measured, answered: Axes, capacity: Axes) -> None:
    config, widest = found.config, found.config.widths[-1]
    for index, store in enumerate(config.stores):
        figures.curve(answered, index, config.stored, found.answered(store, widest).mean(axis=0), store)
        values = [np.exp(np.log(found.held(store, width)).mean()) for width in config.widths]
        figures.curve(capacity, index, config.widths, values, store)
    answered.axhline(SOLVED, color="black", linewidth=1, linestyle="--", label="90%")
    answered.set(title=f"Without training, d_k = {widest}", xlabel="pairs stored", ylabel="queries answered")
    answered.set_xscale("log", base=2)
    capacity.set(title="Pairs held", ylabel="pairs up to which 90% are answered", xlabel="head width d_k", yscale="log")
    figures.powers(capacity, config.widths)
    answered.legend(fontsize=7)


def _runs(found: Measured, axes: Axes) -> None:
    names = []
    for part, arms, counts in _trained(found.config):
        for arm in arms:
            values = found.accuracy(part, arm, counts[-1])
            at = np.full(len(values), len(names)) + np.linspace(-0.2, 0.2, len(values))
            index = list(MIXERS).index(arm)
            figures.curve(axes, index, np.sort(values), at, "", linestyle="none")
            names.append(f"{arm}, {'one layer' if part == 'one_layer' else 'multi-query'}, {counts[-1]} pairs")
    axes.axvline(SOLVED, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set(title="Trained, one point a run", xlabel="accuracy", xlim=(-0.02, 1.02))
