"""What the measurements of `softmax_saturation` say: verdicts, tables and the figure."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.progress import Table, cells
from experiments.softmax_saturation.config import SATURATION, SCALES, SaturationConfig
from experiments.verdicts import Outcome


def judge(config: SaturationConfig, measurements: pd.DataFrame) -> list[Outcome]:
    longest, n, widths = max(config.lengths), config.gradient_length, config.widths
    common, widest = widths.index(config.common), -1
    fixed: dict[str, Any] = {"seeds": config.seeds, "rows": config.rows}

    weight = {scale: by_width(measurements, "rows", scale, "max_weight", longest) for scale in SCALES}
    entropy = by_width(measurements, "rows", "none", "normalized_entropy", longest)
    fourth = claims.judge(
        "S4",
        {
            "weight_common": estimates.mean(weight["none"][:, common]),
            "weight_wide": estimates.mean(weight["none"][:, widest]),
            "entropy_wide": estimates.mean(entropy[:, widest]),
            "rise": estimates.difference(weight["none"][:, widest], weight["none"][:, 0]),
            "scaled_rise": estimates.difference(weight["inverse_sqrt"][:, widest], weight["inverse_sqrt"][:, 0]),
            "onset_exponent": onset_exponent(config, measurements),
            "gaussian_end": estimates.mean(gaussian_end(config, measurements)),
        },
        widths=", ".join(map(str, widths)),
        lengths=", ".join(map(str, sorted(config.lengths))),
        **fixed,
    )

    def share_of_scaled(measure: str) -> estimates.Estimate:
        unscaled, scaled = (by_width(measurements, "rows", scale, measure, n)[:, widest] for scale in SCALES)
        return estimates.mean(unscaled / scaled)

    def dead(measure: str) -> estimates.Estimate:
        return estimates.mean(by_width(measurements, "rows", "none", measure, n)[:, widest])

    reaching = [
        by_width(measurements, "projections", scale, "query_weight")
        / by_width(measurements, "projections", scale, "value_weight")
        for scale in SCALES
    ]
    fifth = claims.judge(
        "S5",
        {
            "logit_median_ratio": share_of_scaled("logits_median"),
            "query_median_ratio": share_of_scaled("query_median"),
            "logit_mean_ratio": share_of_scaled("logits_mean"),
            "query_mean_ratio": share_of_scaled("query_mean"),
            "dead_share": dead("logits_dead"),
            "query_dead_share": dead("query_dead"),
            "weight_ratio": estimates.mean(reaching[0][:, widest] / reaching[1][:, widest]),
        },
        width=widths[widest],
        length=n,
        **fixed,
    )

    def jacobian(measure: str, scale: str = "none") -> estimates.Estimate:
        return estimates.mean(by_width(measurements, "jacobian", scale, measure)[:, common])

    jacobian_claim = claims.judge(
        "S5b",
        {
            "off_share_sharp": jacobian("off_diagonal_share"),
            "off_share_uniform": jacobian("off_diagonal_share", "inverse_sqrt"),
            "diagonal_only_error": jacobian("diagonal_only_error"),
            "diagonal_error": jacobian("diagonal_error"),
            "row_sum": jacobian("row_sum"),
        },
        length=config.jacobian_length,
        width=config.common,
        seeds=config.seeds,
    )
    head = max(width for width in config.projected if width <= max(64, config.projected[0]))

    def reading(rule: str, measure: str = "variance") -> estimates.Estimate:
        return estimates.mean(by_width(measurements, "readings", rule, measure)[:, config.projected.index(head)])

    seventh = claims.judge(
        "S7",
        {
            "model": reading("inverse_sqrt_model"),
            "half": reading("half_inverse"),
            "head": reading("inverse_sqrt"),
            "entropy_model": reading("inverse_sqrt_model", "normalized_entropy"),
            "entropy_half": reading("half_inverse", "normalized_entropy"),
        },
        model_width=config.model_width,
        head_width=head,
        length=n,
        seeds=config.seeds,
    )
    return [fourth, fifth, jacobian_claim, seventh]


def tables(config: SaturationConfig, measurements: pd.DataFrame) -> list[Table]:
    """Largest weight and entropy against d_k, scaled and not, at every n; and what the gradient keeps."""
    lengths, found = sorted(config.lengths), []
    names = {"max_weight": "Mean largest weight", "normalized_entropy": "Mean normalised entropy"}
    for measure, title in names.items():
        columns = {}
        for scale, spelled in zip(SCALES, ("unscaled", "scaled"), strict=True):
            for n in lengths:
                columns[f"n={n} {spelled}"] = by_width(measurements, "rows", scale, measure, n).mean(axis=0)
        rows = [(w, *(round(float(x[i]), 3) for x in columns.values())) for i, w in enumerate(config.widths)]
        found.append(Table(f"{title} against d_k", ("d_k", *columns), cells(rows)))
    ratios = {}
    for measure in ("logits_mean", "logits_median", "query_mean", "query_median"):
        unscaled, scaled = (by_width(measurements, "rows", s, measure, config.gradient_length) for s in SCALES)
        ratios[measure.replace("_", ", ")] = (unscaled / scaled).mean(axis=0)
    for where in ("logits", "query"):
        dead = by_width(measurements, "rows", "none", f"{where}_dead", config.gradient_length)
        ratios[f"{where}, rows < 1%"] = dead.mean(axis=0)
    rows = [(w, *(float(x[i]) for x in ratios.values())) for i, w in enumerate(config.widths)]
    title = f"Gradient unscaled / scaled at n = {config.gradient_length}"
    return [*found, Table(title, ("d_k", *ratios), cells(rows))]


def by_width(measurements: pd.DataFrame, part: str, arm: str, measure: str, length: int | None = None) -> np.ndarray:
    """`[seeds, widths]`."""
    chosen = measurements.query("part == @part and arm == @arm and measure == @measure")
    return estimates.by_run(chosen if length is None else chosen.query("length == @length"), "head_dim")


def onset(config: SaturationConfig, measurements: pd.DataFrame, length: int) -> np.ndarray:
    """`[seeds]`: the d_k at which the mean largest unscaled weight passes 1/2; NaN if the sweep does not reach it."""
    logs = np.log(config.widths)
    found = []
    for weights in by_width(measurements, "rows", "none", "max_weight", length):
        after = int(np.argmax(weights >= 0.5))
        if weights[after] < 0.5 or after == 0:
            found.append(np.nan)
            continue
        low, high = weights[after - 1], weights[after]
        found.append(math.exp(logs[after - 1] + (0.5 - low) / (high - low) * (logs[after] - logs[after - 1])))
    return np.asarray(found)


def onset_exponent(config: SaturationConfig, measurements: pd.DataFrame) -> estimates.Estimate:
    """Slope of ln d_k at the onset on ln ln n, over the lengths whose onset lies inside the sweep."""
    onsets = {n: onset(config, measurements, n) for n in sorted(config.lengths)}
    reached = [n for n, values in onsets.items() if np.isfinite(values).all()]
    if len(reached) < 2:
        return estimates.Estimate(np.nan, np.nan, np.nan, config.seeds)
    return estimates.slope(np.log(np.log(reached)), np.log(np.stack([onsets[n] for n in reached], axis=1)))


def gaussian_end(config: SaturationConfig, measurements: pd.DataFrame) -> np.ndarray:
    """`[seeds]`: the r at which the entropy is first 0.1 nats away from ln n − v/2, at the gradients' n."""
    chosen = measurements.query("part == 'small_variance' and length == @config.gradient_length")
    errors = np.abs(estimates.by_run(chosen, "ratio"))
    after = np.argmax(errors > 0.1, axis=1)
    before, ratios = np.maximum(after - 1, 0), np.asarray(SATURATION)
    low, high = (np.take_along_axis(errors, index[:, None], axis=1)[:, 0] for index in (before, after))
    return ratios[before] + (0.1 - low) / np.where(high == low, 1.0, high - low) * (ratios[after] - ratios[before])


def figure(config: SaturationConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(2, 3)
    widths, lengths, n = config.widths, sorted(config.lengths), config.gradient_length
    sharp, entropies, onsets, gradients, validity, jacobian = axes.flat
    for index, length in enumerate(lengths):
        for scale, line in zip(SCALES, ("-", ":"), strict=True):
            label = f"n = {length}" if scale == "none" else "_nolegend_"
            for one, measure in ((sharp, "max_weight"), (entropies, "normalized_entropy")):
                values = by_width(measurements, "rows", scale, measure, length).mean(axis=0)
                figures.curve(one, index, widths, values, label, linestyle=line)
        errors = measurements.query("part == 'small_variance' and length == @length")
        values = estimates.by_run(errors, "ratio").mean(axis=0)
        figures.curve(validity, index, SATURATION, values, f"n = {length}")
    sharp.set(title="Largest weight (dotted: scaled)", xlabel="head width d_k", ylabel="mean largest weight")
    entropies.set(title="Entropy (dotted: scaled)", xlabel="head width d_k", ylabel="entropy / ln n")
    validity.axhline(0.1, color="black", linewidth=1, linestyle="--", label="0.1 nats")
    validity.set(title="Where H ≈ ln n − v/2 ends", xlabel="r = sd / √(2 ln n)", ylabel="H − (ln n − v/2), nats")
    validity.set(xlim=(0, 1.3), ylim=(-0.05, 1))

    reached = [(length, onset(config, measurements, length)) for length in lengths]
    inside = [(math.log(length), values) for length, values in reached if np.isfinite(values).all()]
    if inside:
        found = [estimates.mean(values) for _, values in inside]
        errors = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
        onsets.errorbar([x for x, _ in inside], [e.value for e in found], yerr=errors, fmt="o", label="measured, 95%")
    line = np.linspace(math.log(lengths[0]), math.log(lengths[-1]), 2)
    onsets.plot(line, 8 * line, color="black", linestyle="--", linewidth=1, label="r = 2: d_k = 8 ln n")
    onsets.plot(line, 2 * line, color="black", linestyle=":", linewidth=1, label="r = 1: d_k = 2 ln n")
    onsets.set(title="Where the largest weight passes 1/2, unscaled", xlabel="ln n", ylabel="head width d_k")

    measures = ("logits_mean", "logits_median", "query_mean", "query_median")
    labels = ("logits, mean", "logits, median", "q, mean", "q, median")
    for index, (measure, label) in enumerate(zip(measures, labels, strict=True)):
        unscaled, scaled = (by_width(measurements, "rows", scale, measure, n) for scale in SCALES)
        figures.curve(gradients, index, widths, (unscaled / scaled).mean(axis=0), label)
    gradients.axhline(1, color="black", linewidth=1, linestyle="--")
    gradients.set(
        title=f"Gradient over rows, n = {n}", xlabel="head width d_k", ylabel="unscaled / scaled", yscale="log"
    )

    index = 0
    for scale, spelled in zip(SCALES, ("unscaled", "scaled"), strict=True):
        for measure, label in (("trace", "trace 1 − Σp²"), ("off_diagonal_share", "off-diagonal share of ‖J‖²")):
            values = by_width(measurements, "jacobian", scale, measure).mean(axis=0)
            figures.curve(jacobian, index, widths, values, f"{label}, {spelled}")
            index += 1
    jacobian.set(
        title=f"The softmax Jacobian, n = {config.jacobian_length}", xlabel="head width d_k", ylim=(-0.02, 1.45)
    )
    for one in (sharp, entropies, gradients, jacobian):
        figures.powers(one, widths)
    for one in axes.flat:
        one.legend(fontsize=8)
    jacobian.legend(fontsize=8, loc="upper right")
    return drawn
