"""What the measurements of `head_redundancy` say: the verdict, tables and figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.claims.diagnosis import MOST_CHECKPOINTS, slot
from experiments.claims.removal import H5_FIELDS, MARGIN, REDUNDANT
from experiments.estimates import Estimate
from experiments.head_redundancy.config import ORDERS, RedundancyConfig
from experiments.head_removal import ABSENT, ARMS, by_document, heads_removed, measured_checkpoints, scope
from experiments.progress import Table
from experiments.verdicts import Outcome

MICHEL = {"translation": 0.2, "BERT": 0.4}  # shares of heads that went without harm: Michel et al. 2019, section 4.2


def gain(measurements: pd.DataFrame, **where: object) -> np.ndarray:
    """`[documents]`: the cost of matched heads − of the chosen ones, mean over draws."""
    pairs = measurements.query("part == 'pairs'")
    matched, chosen = (by_document(pairs, set=name, **where) for name in ("matched", "chosen"))
    return matched - chosen


def redundant(measurements: pd.DataFrame, checkpoint: str, arm: str) -> float:
    """The share of heads that redundant pairs leave over."""
    rows = measurements.query("part == 'redundant' and checkpoint == @checkpoint and arm == @arm")
    return float(np.mean(rows["value"]))


def judge(config: RedundancyConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = measured_checkpoints(measurements)
    evidence = {slot(field, i): ABSENT for field in H5_FIELDS for i in range(MOST_CHECKPOINTS)}
    pairs = measurements.query("part == 'pairs'")
    for i, name in enumerate(found):
        model = {"checkpoint": name, "arm": "model"}
        values = {
            "cost": estimates.mean(by_document(pairs, set="chosen", **model)),
            "removed": estimates.counted(heads_removed(pairs, **model)),
        }
        for arm, ending in zip(ARMS, ("", "_random", "_shuffled"), strict=True):
            values[f"gain{ending}"] = estimates.mean(gain(measurements, checkpoint=name, arm=arm))
            values[f"redundant{ending}"] = estimates.counted(redundant(measurements, name, arm))
        evidence |= {slot(field, i): estimate for field, estimate in values.items()}
    return [claims.judge("H5", evidence, **scope(config, measurements))]


def tables(config: RedundancyConfig, measurements: pd.DataFrame) -> list[Table]:
    pairs, more = (measurements.query("part == @part") for part in ("pairs", "more"))
    rows, shares = [], []
    for name in measured_checkpoints(measurements):
        for arm in ARMS:
            where = {"checkpoint": name, "arm": arm}
            costs = [estimates.mean(by_document(pairs, set=which, **where)) for which in ("chosen", "matched")]
            heads = heads_removed(pairs, **where)
            over = f"{redundant(measurements, name, arm):.0%}"
            difference = estimates.mean(gain(measurements, **where))
            rows.append((name, arm.replace("_", " "), over, f"{heads:.1f}", *map(_three, (*costs, difference))))
        for order, told in ORDERS.items():
            costs = [f"{by_document(more, checkpoint=name, order=order, share=s).mean():.3f}" for s in config.shares]
            shares.append((name, told, *costs))
    return [
        Table(
            f"The most similar {config.share:.0%} of the heads beside matched ones (nats a token; of an encoder 1 − "
            "cosine)",
            ("checkpoint", "arm", "redundant pairs leave over", "removed", "cost", "cost of matched", "difference"),
            tuple(rows),
        ),
        Table(
            f"Cost of removing a share of all heads (Michel et al. 2019: {MICHEL['translation']:.0%} of a translation "
            f"model and {MICHEL['BERT']:.0%} of BERT by importance, without harm)",
            ("checkpoint", "which go", *(f"{share:.0%}" for share in config.shares)),
            tuple(shares),
        ),
    ]


def _three(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


ALT = (
    "Three panels. For each checkpoint and arm the cost of removing the most similar heads and that of matched ones, a "
    "point a document. The cost against the share of heads that are removed, by similarity, by importance and by "
    "chance, with the shares of Michel et al. 2019. Of every head and the one most like it, the divergence of the "
    "patterns against that of the outputs, in the model and in the controls, with the lines of a redundant pair."
)


def figure(config: RedundancyConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 3, width=5.5)
    beside, growing, nearest = axes[0]
    _beside(measurements, beside)
    _growing(config, measurements, growing)
    _nearest(measurements, nearest)
    for one in axes[0]:
        one.legend(fontsize=7)
    return drawn


def _beside(measurements: pd.DataFrame, axes: Axes) -> None:
    pairs, ticks = measurements.query("part == 'pairs'"), []
    for name in measured_checkpoints(measurements):
        for arm in ARMS:
            for index, which in enumerate(("chosen", "matched")):
                values = by_document(pairs, checkpoint=name, arm=arm, set=which)
                x = len(ticks) + 0.3 * (index - 0.5)
                label = {"chosen": "the most similar", "matched": "matched"}[which] if not ticks else "_nolegend_"
                figures.curve(axes, index, np.full(len(values), x), values, label, linestyle="", alpha=0.5)
                axes.plot([x - 0.12, x + 0.12], [values.mean()] * 2, color="black", linewidth=1.5)
            ticks.append(f"{name}\n{arm.replace('_', ' ')}")
    axes.set_xticks(range(len(ticks)), ticks, rotation=60, fontsize=7)
    axes.axhline(MARGIN, color="#888888", linestyle="--", linewidth=1)
    axes.set(title="A point a document, bars: means", ylabel="cost: nats a token, or 1 − cosine")


def _growing(config: RedundancyConfig, measurements: pd.DataFrame, axes: Axes) -> None:
    more = measurements.query("part == 'more'")
    for index, name in enumerate(measured_checkpoints(measurements)):
        for order, line in zip(ORDERS, ("-", "--", ":"), strict=True):
            means = [by_document(more, checkpoint=name, order=order, share=s).mean() for s in config.shares]
            figures.curve(axes, index, config.shares, means, f"{name}, {ORDERS[order]}", linestyle=line)
    for which, share in MICHEL.items():
        axes.axvline(share, color="#888888", linewidth=1)
        above = {"ha": "center", "va": "bottom", "fontsize": 7, "transform": axes.get_xaxis_transform()}
        axes.text(share, 1.0, f"Michel: {which}", **above)
    axes.axhline(MARGIN, color="#888888", linestyle="--", linewidth=1)
    axes.set_yscale("symlog", linthresh=MARGIN)
    axes.set_ylim(bottom=-MARGIN)
    axes.set(xlabel="share of all heads", ylabel="cost: nats a token, or 1 − cosine")
    axes.set_title("As more heads go", pad=14)


def _nearest(measurements: pd.DataFrame, axes: Axes) -> None:
    rows = measurements.query("part == 'nearest'")
    for index, arm in enumerate(ARMS):
        at = rows.query("arm == @arm").sort_values(["checkpoint", "layer", "head"])
        x, y = (at.query("measure == @measure")["value"].to_numpy() for measure in ("divergence", "cka"))
        look = {"linestyle": "", "alpha": 0.5, "markersize": 3}
        figures.curve(axes, index, x, np.clip(1 - y, 1e-4, 1), arm.replace("_", " "), **look)
    axes.axvline(REDUNDANT["divergence"], color="#888888", linestyle="--", linewidth=1)
    axes.axhline(1 - REDUNDANT["cka"], color="#888888", linestyle="--", linewidth=1)
    axes.set(yscale="log", title="Each head and the one most like it")
    axes.set(xlabel="divergence of the patterns, JS / ln 2", ylabel="of the outputs, 1 − CKA")
