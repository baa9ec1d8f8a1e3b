"""What the measurements of `entropy_and_importance` say: the verdict, tables and figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from attn_jax.typing import Float
from experiments import claims, estimates, figures
from experiments.claims.diagnosis import MOST_CHECKPOINTS, slot
from experiments.claims.removal import D2A_FIELDS, ENDS, MARGIN, SINKS
from experiments.entropy_and_importance.config import ImportanceConfig
from experiments.estimates import Estimate
from experiments.head_removal import ABSENT, by_document, heads_removed, measured_checkpoints, scope
from experiments.progress import Table
from experiments.verdicts import Outcome

MICHEL = "Michel et al. 2019, section 3.2: of 96 heads 8 changed the score, 4 of them for the better"
NEAR = 0.05  # of 0, or of 1
BY_DOCUMENT = ("importance", "cost")


def cube(measurements: pd.DataFrame, checkpoint: str, measure: str) -> Float[np.ndarray, "... l n"]:
    """Of every head, `[L, N]` or `[documents, L, N]`; NaN where a head was not removed."""
    heads = measurements.query("part == 'heads' and checkpoint == @checkpoint")
    rows = heads.query("measure == @measure")
    layer, head, document = (np.asarray(rows[axis].fillna(0), int) for axis in ("layer", "head", "document"))
    layers, number = (int(np.max(heads[axis])) + 1 for axis in ("layer", "head"))
    found = np.full((document.max() + 1, layers, number), np.nan)
    found[document, layer, head] = rows["value"]
    return found if measure in BY_DOCUMENT else found[0]


def within_layers(first: Float[np.ndarray, "*b l n"], second: Float[np.ndarray, "*#b l n"]) -> Float[np.ndarray, "*b"]:
    """Rank correlation over the heads of all layers, each ranked within its layer; 0 where nothing differs."""
    a, b = (stats.rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (first, second))
    size = np.sqrt((a**2).sum(axis=(-2, -1)) * (b**2).sum(axis=(-2, -1)))
    return (a * b).sum(axis=(-2, -1)) / np.where(size == 0, 1, size)


def agreement(measurements: pd.DataFrame, checkpoint: str) -> Float[np.ndarray, " documents"]:
    """Rank correlation of importance by gradient and |cost| over the heads that were removed one by one.

    Empty where the importance is no gradient but the cost itself.
    """
    if "gradient" not in set(measurements.query("checkpoint == @checkpoint")["by"]):
        return np.zeros(0)
    cost = np.abs(cube(measurements, checkpoint, "cost"))
    removed = ~np.isnan(cost[0])
    return within_layers(*(x[:, None, removed] for x in (cube(measurements, checkpoint, "importance"), cost)))


def difference(measurements: pd.DataFrame, **where: object) -> Float[np.ndarray, " documents"]:
    """The cost of an end − of matched heads, mean over draws."""
    pairs = measurements.query("part == 'pairs'")
    chosen, matched = (by_document(pairs, set=name, **where) for name in ("chosen", "matched"))
    return chosen - matched


def _evidence(measurements: pd.DataFrame, name: str) -> dict[str, Estimate]:
    model = {"checkpoint": name, "arm": "model"}
    matters = cube(measurements, name, "importance")
    values = {
        f"{end}{sink}": difference(measurements, end=f"{end}{sink}", **model) for end in ENDS for sink, _ in SINKS
    }
    for end in ENDS:
        values[f"{end}_random"] = difference(measurements, end=end, checkpoint=name, arm="random_weights")
    for sink, _ in SINKS:
        values[f"spearman{sink}"] = within_layers(cube(measurements, name, f"normalized_entropy{sink}"), matters)
    agree = agreement(measurements, name)
    return {
        **{field: estimates.mean(x) for field, x in values.items()},
        "agreement": estimates.mean(agree) if len(agree) else ABSENT,
    }


def judge(config: ImportanceConfig, measurements: pd.DataFrame) -> list[Outcome]:
    evidence = {slot(field, i): ABSENT for field in D2A_FIELDS for i in range(MOST_CHECKPOINTS)}
    for i, name in enumerate(measured_checkpoints(measurements)):
        evidence |= {slot(field, i): estimate for field, estimate in _evidence(measurements, name).items()}
    return [claims.judge("D2a", evidence, **scope(config, measurements))]


def tables(config: ImportanceConfig, measurements: pd.DataFrame) -> list[Table]:
    pairs = measurements.query("part == 'pairs'")
    rows, singles = [], []
    for name in measured_checkpoints(measurements):
        for arm, sink, told in (*(("model", *one) for one in SINKS), ("random_weights", "", ", at random weights")):
            for end, what in ENDS.items():
                where = {"checkpoint": name, "arm": arm, "end": f"{end}{sink}"}
                costs = [estimates.mean(by_document(pairs, set=which, **where)) for which in ("chosen", "matched")]
                found = (*costs, estimates.mean(difference(measurements, **where)))
                rows.append((name, f"{what}{told}", f"{heads_removed(pairs, **where):.1f}", *map(_three, found)))
        entropy, cost = (cube(measurements, name, measure) for measure in ("normalized_entropy", "cost"))
        changed = changes(cost[:, ~np.isnan(cost[0])])
        count = f"{(entropy < NEAR).sum()} and {(entropy > 1 - NEAR).sum()} of {entropy.size}"
        singles.append((name, count, *map(str, (changed.size, (changed != 0).sum(), (changed < 0).sum()))))
    return [
        Table(
            f"The {config.share:.0%} of the heads at each end beside matched ones between (nats a token; of an "
            "encoder 1 − cosine)",
            ("checkpoint", "which go", "removed", "cost", "cost of matched", "difference"),
            tuple(rows),
        ),
        Table(
            f"Heads removed one by one ({MICHEL})",
            (
                "checkpoint",
                f"entropy < {NEAR} and > {1 - NEAR}",
                "removed",
                "of them change the cost",
                "for the better",
            ),
            tuple(singles),
        ),
    ]


def changes(cost: Float[np.ndarray, "documents n"]) -> Float[np.ndarray, " n"]:
    """Of each head the sign of its cost, 0 where the interval over documents holds 0."""
    found = [estimates.mean(x) for x in cost.T]
    return np.array([np.sign(x.value) if x.low > 0 or x.high < 0 else 0 for x in found])


def _three(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


ALT = (
    "Four panels. For each checkpoint the importance of every head, in units of its layer's mean, against its entropy. "
    "The same against the entropy without the first token. The cost of heads removed one by one against importance. "
    "The cost of removing the sharpest and the most diffuse heads less that of matched heads, with the "
    "sink in the entropy, without, and at random weights, one point a document."
)


def figure(config: ImportanceConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 4)
    for sink, one in zip(("", "_no_sink"), axes[0], strict=False):
        _against_entropy(measurements, one, sink)
    _against_cost(measurements, axes[0, 2])
    _by_end(measurements, axes[0, 3])
    for one in axes[0]:
        one.legend(fontsize=7)
    return drawn


def _against_entropy(measurements: pd.DataFrame, axes: Axes, sink: str) -> None:
    for index, name in enumerate(measured_checkpoints(measurements)):
        entropy = cube(measurements, name, f"normalized_entropy{sink}")
        matters = cube(measurements, name, "importance").mean(axis=0)
        matters = matters / matters.mean(axis=-1, keepdims=True)
        look = {"linestyle": "", "alpha": 0.6, "markersize": 3}
        figures.curve(axes, index, entropy.ravel(), matters.ravel(), name, **look)
    axes.set_yscale("log", base=2)
    axes.set(title="Every head", ylabel="importance / mean of the layer")
    axes.set_xlabel(f"entropy / ln n{', without the first token' if sink else ''}")


def _against_cost(measurements: pd.DataFrame, axes: Axes) -> None:
    for index, name in enumerate(measured_checkpoints(measurements)):
        cost = cube(measurements, name, "cost").mean(axis=0)
        matters, removed = cube(measurements, name, "importance").mean(axis=0), ~np.isnan(cost)
        figures.curve(axes, index, matters[removed], cost[removed], name, linestyle="", alpha=0.7)
    axes.axhline(0, color="#888888", linewidth=1)
    axes.set(xscale="log", title="Heads removed one by one", xlabel="importance, by gradient (of an encoder: the cost)")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_ylabel("cost: nats a token, or 1 − cosine")


def _by_end(measurements: pd.DataFrame, axes: Axes) -> None:
    ticks = []
    groups = [("model", f"{end}{sink}") for sink, _ in SINKS for end in ENDS] + [
        ("random_weights", end) for end in ENDS
    ]
    for arm, end in groups:
        for index, name in enumerate(measured_checkpoints(measurements)):
            values = difference(measurements, checkpoint=name, arm=arm, end=end)
            x = len(ticks) + 0.2 * (index - 1)
            label = "_nolegend_" if ticks else name
            figures.curve(axes, index, np.full(len(values), x), values, label, linestyle="", alpha=0.5)
            axes.plot([x - 0.08, x + 0.08], [values.mean()] * 2, color="black", linewidth=1.5)
        told = end.replace("_no_sink", "\nwithout sink") + ("\nrandom" if arm == "random_weights" else "")
        ticks.append(told)
    axes.set_xticks(range(len(ticks)), ticks, fontsize=7)
    for line in (-MARGIN, MARGIN):
        axes.axhline(line, color="#888888", linestyle="--", linewidth=1)
    axes.set(title="The ends, a point a document", ylabel="cost less that of matched heads")
