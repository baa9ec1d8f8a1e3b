"""What `low_rank` makes of its rows: the verdict, tables and the figure."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from experiments import claims, estimates, figures, texts
from experiments.claims.low_rank import ERROR_LINE
from experiments.estimates import Estimate
from experiments.low_rank.config import ARMS, MEASURES, MECHANISMS, LowRankConfig, Sizes
from experiments.progress import Table
from experiments.verdicts import Outcome

LABELS = {
    "linformer": "Linformer, fitted",
    "linformer_pooled": "Linformer, means",
    "nystrom": "Nyström",
    "performer": "Performer",
    "uniform": "mean of the values",
}
SETTINGS = {"own": "as the model masks", "two_way": "without a mask"}


def chosen(measurements: pd.DataFrame, **where: object) -> pd.DataFrame:
    """The rows where some columns are so."""
    found = np.ones(len(measurements), bool)
    for column, wanted in where.items():
        found &= (measurements[column] == wanted).to_numpy()
    return measurements.loc[found]


def heads_of(measurements: pd.DataFrame, **where: object) -> np.ndarray:
    """The values where some columns are so, `[documents, heads]`: heads of all measured layers."""
    table = chosen(measurements, **where).pivot_table(index="document", columns=["layer", "head"], values="value")
    return table.to_numpy(np.float64)


def over(measurements: pd.DataFrame, column: str, **where: object) -> tuple[np.ndarray, np.ndarray]:
    """The levels of a column, ascending, and all values at each, `[levels, ·]`."""
    rows = chosen(measurements, **where)
    at, values = rows[column].to_numpy(), rows["value"].to_numpy(np.float64)
    levels = np.unique(at)
    return levels, np.stack([values[at == level] for level in levels])


def mean(measurements: pd.DataFrame, **where: object) -> Estimate:
    """Over heads, then over documents with its interval."""
    return estimates.mean(heads_of(measurements, **where).mean(axis=1))


def settings(measurements: pd.DataFrame) -> list[str]:
    """The masks that were measured; the model's own is the first."""
    return [setting for setting in SETTINGS if setting in set(measurements["setting"])]


def quarter(sizes: Sizes) -> int:
    """The rank that the spectra are read at."""
    return sizes.length // 4


def errors(measurements: pd.DataFrame) -> dict[str, np.ndarray]:
    """Output errors of the three at their rank for the budget, no mask, `[documents]` each."""
    where = {"setting": "two_way", "measure": "output_error"}
    return {name: heads_of(measurements, mechanism=name, **where).mean(axis=1) for name in MECHANISMS}


def judge(config: LowRankConfig, measurements: pd.DataFrame, sizes: Sizes) -> list[Outcome]:
    own = settings(measurements)[0]
    at = {"setting": own, "rank": quarter(sizes)}
    found = errors(measurements)
    report = {"measure": "output_error"}
    evidence = {
        "share": mean(measurements, arm="model", measure="share", **at),
        "share_random": mean(measurements, arm="random_weights", measure="share", **at),
        "rank_error": mean(measurements, arm="model", measure="rank_error", **at),
        "error": estimates.mean(np.min(list(found.values()), axis=0)),
        **{name: estimates.mean(values) for name, values in found.items()},
        "performer_own": mean(measurements, setting=own, mechanism="performer", **report),
        "uniform": mean(measurements, setting="two_way", mechanism="uniform", **report),
    }
    name, _ = texts.read(config.text_file)
    scope = {
        "model": config.model, "documents": config.documents, "tokens": sizes.length, "text": name,
        "layers": ", ".join(map(str, over(measurements, "layer", measure="share")[0])),
        "budget": f"{config.budget:g}", "draws": config.draws,
        "ranks": ", ".join(f"{mechanism} {sizes.affordable(mechanism, config.budget)}" for mechanism in MECHANISMS),
    }  # fmt: skip
    return [claims.judge("L2", evidence, **scope)]


def tables(config: LowRankConfig, measurements: pd.DataFrame, sizes: Sizes) -> list[Table]:
    return [_mechanisms(config, measurements, sizes), _spectra(measurements, sizes), _heads(measurements, sizes)]


def _mechanisms(config: LowRankConfig, measurements: pd.DataFrame, sizes: Sizes) -> Table:
    """Each at its rank for the budget, without a mask; Performer and the exact cost beside."""
    exact, rows = sizes.exact, []
    for name, label in LABELS.items():
        at = {"setting": "two_way", "mechanism": name}
        found = [str(mean(measurements, measure="output_error", **at))]
        found += [
            f"{mean(measurements, measure=measure, **at).value:.3f}"
            for measure in MEASURES
            if measure != "output_error"
        ]
        kind = name.split("_")[0]
        cost, rank = ("", ""), "1"
        if kind in MECHANISMS:
            rank = str(sizes.affordable(kind, config.budget))
            work = sizes.work(kind, int(rank))
            cost = (f"{work.flops / exact.flops:.2f}", f"{work.bytes / exact.bytes:.2f}")
        rows.append((label, rank, *cost, *found))
    columns = ("mechanism", "rank", "FLOPs / exact", "bytes / exact", "output error", "mass kept", "recall of 8 keys")
    title = f"{config.model}: approximations for {config.budget:g} of the FLOPs, no mask"
    return Table(title, (*columns, "entropy shift, nats", "variance"), tuple(rows))


def _spectra(measurements: pd.DataFrame, sizes: Sizes) -> Table:
    rows = []
    for setting in settings(measurements):
        for arm in ARMS:
            at = {"arm": arm, "setting": setting, "rank": quarter(sizes)}
            found = [str(mean(measurements, measure=measure, **at)) for measure in ("share", "energy", "rank_error")]
            rows.append((arm.replace("_", " "), SETTINGS[setting], *found))
    columns = ("weights", "mask", "share of Σσ", "share of Σσ²", "output error of the best of that rank")
    return Table(f"The first {quarter(sizes)} of {sizes.length} singular values", columns, tuple(rows))


def _heads(measurements: pd.DataFrame, sizes: Sizes) -> Table:
    """Whether a head of low rank is one that is approximated well: rank correlation over heads, per document."""
    at = {"arm": "model", "setting": "two_way"}
    share = heads_of(measurements, measure="share", rank=quarter(sizes), **at)
    rows = []
    for name in (*MECHANISMS, "uniform"):
        error = heads_of(measurements, measure="output_error", mechanism=name, **at)
        found = [np.corrcoef(stats.rankdata(a), stats.rankdata(b))[0, 1] for a, b in zip(share, error, strict=True)]
        rows.append((LABELS[name], str(estimates.mean(found)), f"{np.mean(error < ERROR_LINE):.2f}"))
    columns = ("mechanism", "Spearman of error and share of Σσ", f"heads with an error below {ERROR_LINE:g}")
    return Table("Over heads, without a mask", columns, tuple(rows))


def figure(config: LowRankConfig, measurements: pd.DataFrame, sizes: Sizes) -> Figure:
    drawn, axes = figures.panels(1, 3, width=5.4)
    spectrum, by_layer, by_cost = axes[0]
    for index, (setting, arm) in enumerate((setting, arm) for setting in settings(measurements) for arm in ARMS):
        where = {"measure": "share", "arm": arm, "setting": setting}
        label = f"{arm.replace('_', ' ')}, {SETTINGS[setting]}"
        ranks, values = over(measurements, "rank", **where)
        figures.curve(spectrum, index, ranks, values.mean(axis=1), label)
        if arm == "model":
            low, high = np.quantile(values, (0.1, 0.9), axis=1)
            spectrum.fill_between(ranks, low, high, color=figures.COLOURS[index], alpha=0.15)
        layers, values = over(measurements, "layer", rank=quarter(sizes), **where)
        figures.curve(by_layer, index, layers, values.mean(axis=1), label)
    spectrum.axvline(quarter(sizes), color="black", linewidth=1, linestyle="--")
    figures.powers(spectrum, over(measurements, "rank", measure="share")[0])
    spectrum.set(title=f"Spectra, n = {sizes.length}: mean, and 80% of heads", xlabel="singular values", ylim=(0, 1.02))
    spectrum.set_ylabel("share of their sum")
    by_layer.set(title=f"The first {quarter(sizes)} singular values", xlabel="layer", ylim=(0, 1.02))
    by_layer.set_ylabel("share of the sum")
    for index, name in enumerate(MECHANISMS):
        ranks, values = over(measurements, "rank", measure="error_by_rank", mechanism=name)
        cost = [sizes.work(name, int(rank)).flops / sizes.exact.flops for rank in ranks]
        label = LABELS["linformer_pooled" if name == "linformer" else name]
        figures.curve(by_cost, index, cost, values.mean(axis=1), label)
    for name, marker in (("linformer", "*"), ("uniform", "_")):
        value = mean(measurements, setting="two_way", mechanism=name, measure="output_error").value
        by_cost.plot([config.budget], [value], marker, color="black", markersize=11, label=LABELS[name])
    by_cost.axhline(ERROR_LINE, color="black", linewidth=1, linestyle="--")
    by_cost.set(title="Output error without a mask", xlabel="FLOPs / exact", xscale="log", yscale="log")
    by_cost.set_ylabel("relative error, mean over heads")
    for one in axes[0]:
        one.legend(fontsize=7)
    return drawn
