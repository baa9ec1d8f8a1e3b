"""What the measurements of `sparse_patterns` say: the verdict, tables and figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.arms import best_of
from experiments.claims.sparse import LEARNED, MOST
from experiments.progress import Table, cells
from experiments.sparse_patterns.config import ARMS, SparseConfig
from experiments.sparse_patterns.trained import DENSE, short_of_dense
from experiments.texts import DEFAULT_NAME
from experiments.verdicts import Outcome

BASE = "window_global"
NAMES = {
    "window": "window",
    BASE: "window and first tokens",
    "bigbird": "these and random blocks",
    "random": "these and keys by chance, as many as hashing",
    "hashing": "these and hashing",
    "clustering": "these and clustering",
    "best": "these and the largest, as many as hashing",
}


def by_document(measurements: pd.DataFrame, arm: str, pattern: str, measure: str) -> np.ndarray:
    """`[documents]`, mean over layers and heads."""
    rows = measurements.query("part == 'heads' and arm == @arm and pattern == @pattern and measure == @measure")
    return estimates.by_run(rows)


def found(measurements: pd.DataFrame, pattern: str, measure: str, arm: str = "model") -> np.ndarray:
    """`[documents]`: of what is outside the window and the first tokens, the share that a pattern adds."""
    base, more = (by_document(measurements, arm, name, measure) for name in (BASE, pattern))
    return (more - base) / (1 - base)


def judge(config: SparseConfig, measurements: pd.DataFrame) -> list[Outcome]:
    values = {
        "kept": by_document(measurements, "model", BASE, "mass"),
        "kept_pairs": by_document(measurements, "model", BASE, "pairs"),
        "kept_window": by_document(measurements, "model", "window", "mass"),
        "kept_random": by_document(measurements, "random_weights", BASE, "mass"),
    }
    for pattern in ("hashing", "clustering"):
        values[f"found_{pattern}"] = found(measurements, pattern, "mass")
        values[f"pairs_{pattern}"] = found(measurements, pattern, "pairs")
    evidence = {name: estimates.mean(x) for name, x in values.items()}
    evidence |= {f"short_{learn}": short_of_dense(measurements, learn) for learn in LEARNED}
    outcome = claims.judge(
        "L3",
        evidence,
        model=config.model,
        documents=len(values["kept"]),
        tokens=config.max_tokens,
        text=config.text_file or DEFAULT_NAME,
        window=config.window,
        first=config.first,
        rounds=config.rounds,
        buckets=config.buckets,
        clusters=config.clusters,
        fitted=config.fitted,
        pairs=config.pairs,
        routed=config.routed,
        steps=config.steps,
        seeds=config.seeds,
    )
    return [outcome]


def tables(config: SparseConfig, measurements: pd.DataFrame) -> list[Table]:
    rows = []
    for pattern, name in NAMES.items():
        means = [by_document(measurements, "model", pattern, m).mean() for m in ("pairs", "mass", "error")]
        tiles = measurements.query("pattern == @pattern and measure == 'tiles' and arm == 'model'")["value"]
        control = by_document(measurements, "random_weights", pattern, "mass").mean()
        rest = found(measurements, pattern, "mass").mean() if pattern not in ("window", BASE) else np.nan
        numbers = (means[0], tiles.mean() if len(tiles) else np.nan, *means[1:], rest, control)
        rows.append((name, *("" if np.isnan(x) else f"{x:.2f}" for x in numbers)))
    columns = ("pattern", "pairs", "tiles", "mass", "error of outputs", "of the rest", "mass at random weights")
    trained = []
    lookup = measurements.query("part == 'lookup'")
    for learn in (DENSE, *config.learn):
        best, accuracy, met = (best_of(lookup, learn, measure=m) for m in ("loss", "accuracy", "met"))
        rate = f"{best.rate:.3g}" + ("" if best.inside else " (edge)")
        name = LEARNED.get(learn, "dense attention")
        trained.append(
            (name, rate, str(estimates.mean(accuracy.values)), "" if learn == DENSE else f"{met.values.mean():.2f}")
        )
    names = ("centroids learn by", "best rate", "accuracy by hard routing", "questions that meet their pair")
    return [
        Table(f"{config.model}: what patterns keep, as shares of what is visible", columns, cells(rows)),
        Table(f"Look-up of one of {config.pairs} pairs, {config.routed} clusters", names, cells(trained)),
    ]


ALT = (
    "Four panels. The mass that patterns keep against the share of pairs they take: windows with the first tokens as a "
    "curve, for the model and at random weights, and the other patterns as points. The error of outputs against the "
    "share of tiles that are touched. By layer, the share of the mass outside the window and the first tokens that "
    "hashing, clustering and chance find. The accuracy of look-up by how centroids learn, one point a seed."
)


def figure(config: SparseConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 4)
    against, errors, layers, accuracy = axes[0]
    _against(config, measurements, against, "pairs", "mass")
    _against(config, measurements, errors, "tiles", "error")
    _by_layer(measurements, layers)
    _accuracy(config, measurements, accuracy)
    for one in (against, errors, layers):
        one.legend(fontsize=7)
    return drawn


def _against(config: SparseConfig, measurements: pd.DataFrame, axes: Axes, x: str, y: str) -> None:
    names = [BASE if w == config.window else f"{BASE}_{w}" for w in config.windows]
    for index, arm in enumerate(ARMS):
        means = [[by_document(measurements, arm, name, m).mean() for name in names] for m in (x, y)]
        figures.curve(axes, index, means[0], means[1], f"window and first tokens, {arm.replace('_', ' ')}")
    for index, pattern in enumerate(name for name in NAMES if name != BASE):
        means = [by_document(measurements, "model", pattern, m) for m in (x, y)]
        if all(len(values) for values in means):
            look = {"marker": "*", "color": "#888888", "markersize": 8} if pattern == "best" else {}
            figures.curve(axes, index + 2, means[0].mean(), means[1].mean(), NAMES[pattern], linestyle="", **look)
    axes.set_xlabel({"pairs": "share of visible pairs", "tiles": "share of tiles"}[x])
    axes.set_ylabel({"mass": "share of the mass", "error": "error of outputs / their size"}[y])
    axes.set_ylim(bottom=0)


def _by_layer(measurements: pd.DataFrame, axes: Axes) -> None:
    rows = measurements.query("part == 'heads' and arm == 'model' and measure == 'mass'")
    means = rows.pivot_table(index="layer", columns="pattern", values="value")
    for index, pattern in enumerate(("hashing", "clustering", "random", "best")):
        share = (means[pattern] - means[BASE]) / (1 - means[BASE])
        figures.curve(axes, index, means.index, share, NAMES[pattern].removeprefix("these and "))
    axes.axhline(MOST, color="#888888", linestyle="--", linewidth=1)
    axes.set_xlabel("layer")
    axes.set_ylabel("found, of the mass outside")


def _accuracy(config: SparseConfig, measurements: pd.DataFrame, axes: Axes) -> None:
    lookup = measurements.query("part == 'lookup'")
    arms = (DENSE, *config.learn)
    for index, arm in enumerate(arms):
        values = best_of(lookup, arm, measure="accuracy").values
        figures.curve(axes, index, np.full(len(values), index), values, arm, linestyle="", alpha=0.6)
    axes.axhline(config.task().chance, color="#888888", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(arms)), [arm.replace("_", "\n") for arm in arms], fontsize=7)
    axes.set_ylabel("accuracy of look-up")
    axes.set_ylim(0, 1.05)
