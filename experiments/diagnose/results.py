"""From the measurements to verdicts and tables."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from attn_jax.diagnostics.diagnosis import Finding
from experiments import claims, estimates, texts
from experiments.claims.diagnosis import D1_FIELDS, D6_FIELDS, MOST_CHECKPOINTS, slot
from experiments.diagnose.config import CONTROLS, MEASURES, SINK_LINE, DiagnoseConfig
from experiments.diagnose.measured import WINDOWS
from experiments.estimates import Estimate
from experiments.progress import Table
from experiments.verdicts import Outcome

_ROUNDING = 1e-4  # nats by which an entropy in float32 may lie below its bound
_ABSENT = Estimate(np.nan, np.nan, np.nan, None)  # of a checkpoint fewer, or of an encoder's loss


def names(measurements: pd.DataFrame) -> list[str]:
    """The checkpoints, in the order in which they were measured."""
    return list(dict.fromkeys(measurements["checkpoint"]))


def cube(measurements: pd.DataFrame, checkpoint: str, arm: str, measure: str) -> np.ndarray:
    """One measure of an arm, `[documents, L, N]`."""
    chosen = measurements.query("checkpoint == @checkpoint and arm == @arm and measure == @measure")
    chosen = chosen.sort_values(["document", "layer", "head"])
    shape = [len(chosen[axis].unique()) for axis in ("document", "layer", "head")]
    return chosen["value"].to_numpy(np.float64).reshape(shape)


def of_documents(measurements: pd.DataFrame, checkpoint: str, arm: str, measure: str) -> np.ndarray:
    """One number a document, `[documents]`; empty where it was not measured."""
    chosen = measurements.query("checkpoint == @checkpoint and arm == @arm and measure == @measure")
    return chosen.sort_values("document")["value"].to_numpy(np.float64)


def finite_mean(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Mean over the heads that were measured; NaN where none was."""
    counted = np.isfinite(values)
    total = counted.sum(axis=axis)
    return np.where(total > 0, np.where(counted, values, 0).sum(axis=axis) / np.maximum(total, 1), np.nan)


def judge(config: DiagnoseConfig, measurements: pd.DataFrame) -> list[Outcome]:
    """D1 and D6, of all checkpoints together; arrays that were captured judge nothing."""
    if config.capture:
        return []
    found = names(measurements)
    d1 = {slot(field, i): _ABSENT for field in D1_FIELDS for i in range(MOST_CHECKPOINTS)}
    d6 = {slot(field, i): _ABSENT for field in D6_FIELDS for i in range(MOST_CHECKPOINTS)}
    for i, name in enumerate(found):
        d1 |= {slot(field, i): estimate for field, estimate in _falls(measurements, name).items()}
        d6 |= {slot(field, i): estimate for field, estimate in _parks(measurements, name).items()}
    count = len(cube(measurements, found[0], "model", "sink_mass"))
    name, _ = texts.read(config.text_file)
    scope = {"models": ", ".join(found), "documents": count, "tokens": config.max_tokens, "text": name}
    return [claims.judge("D1", d1, **scope), claims.judge("D6", d6, **scope)]


def _falls(measurements: pd.DataFrame, name: str) -> dict[str, Estimate]:
    fields = {
        "spearman": ("model", "normalized_entropy"),
        "spearman_no_sink": ("model", "normalized_entropy_no_sink"),
        "spearman_random": ("random_weights", "normalized_entropy"),
    }
    return {field: estimates.mean(_with_depth(cube(measurements, name, *of))) for field, of in fields.items()}


def _parks(measurements: pd.DataFrame, name: str) -> dict[str, Estimate]:
    sinks = {arm: cube(measurements, name, arm, "sink_mass") for arm in ("model", *CONTROLS)}
    mass = {arm: finite_mean(values, (1, 2)) for arm, values in sinks.items()}
    loss = {window: of_documents(measurements, name, window, "loss") for window in WINDOWS}
    decoder = loss["all"].size > 0
    return {
        "excess": estimates.difference(mass["model"], mass["random_weights"]),
        "sink_mass": estimates.mean(mass["model"]),
        "sink_heads": estimates.mean((sinks["model"] > SINK_LINE).mean(axis=(1, 2))),
        "excess_other_token": estimates.difference(mass["other_first_token"], mass["random_weights"]),
        "window_cost": estimates.difference(loss["window"], loss["window_and_first"]) if decoder else _ABSENT,
    }


def _with_depth(values: np.ndarray) -> np.ndarray:
    """Rank correlation of a layer's mean with its depth, per document; 0 where the layers do not differ."""
    layers = finite_mean(values, 2)  # [documents, L]
    depth = np.arange(layers.shape[1])
    constant = np.ptp(layers, axis=1) == 0
    ranks = stats.rankdata(layers, axis=1)
    return np.array([0.0 if c else np.corrcoef(depth, x)[0, 1] for c, x in zip(constant, ranks, strict=True)])


def tables(config: DiagnoseConfig, measurements: pd.DataFrame) -> list[Table]:
    """The findings; what is not finite, if anything; each checkpoint's layers, its controls, the losses of decoders."""
    del config
    found = [_findings_table(measurements, name) for name in names(measurements)]
    for name in names(measurements):
        broken = _broken_table(measurements, name)
        found += [broken] if broken.rows else []
        found.append(_layers_table(measurements, name))
        if CONTROLS[0] in set(measurements["arm"]):
            found.append(_controls_table(measurements, name))
    return [*found, *(table for table in (_bound_table(measurements), _losses_table(measurements)) if table.rows)]


def records(config: DiagnoseConfig, measurements: pd.DataFrame) -> Mapping[str, Any]:
    """The findings as JSON, and what could not be looked at."""
    del config
    told = {}
    for name in names(measurements):
        own = measurements.query("checkpoint == @name and arm == 'findings'")
        findings = own.query("measure == 'finding'")
        findings = findings.sort_values("rank") if len(findings) else findings  # without any there are no ranks
        told[name] = {
            "findings": [_record(row) for _, row in findings.iterrows()],
            "skipped": own.query("measure == 'skipped'").reindex(columns=["signal", "evidence"]).to_numpy().tolist(),
        }
    return {"findings.json": told}


def _record(row: Any) -> dict[str, Any]:
    """A finding as it was."""
    record = {field.name: row[field.name] for field in dataclasses.fields(Finding)}
    numbers = {name: None if pd.isna(row[name]) else float(row[name]) for name in ("value", "limit")}
    return {**record, **numbers, "layers": json.loads(row["layers"]), "heads": json.loads(row["heads"])}


def _findings_table(measurements: pd.DataFrame, name: str) -> Table:
    """The worst first."""
    own = measurements.query("checkpoint == @name and arm == 'findings'")
    if "rank" in own:
        own = own.sort_values("rank", na_position="last")
    rows = []
    for row in own.to_dict("records"):
        if row["measure"] == "finding":
            rows.append((row["severity"], row["link"], row["evidence"], f"{row['cause']} {row['mend']}"))
        else:
            rows.append(("not looked at", row["signal"], row["evidence"], ""))
    return Table(f"{name}: findings, the worst first", ("severity", "link", "evidence", "cause and mend"), tuple(rows))


def _layers_table(measurements: pd.DataFrame, name: str) -> Table:
    by_layer = {field: finite_mean(cube(measurements, name, "model", field), (0, 2)) for field in MEASURES}
    sinks = (cube(measurements, name, "model", "sink_mass").mean(axis=0) > SINK_LINE).sum(axis=1)
    rows = tuple(
        (str(layer), *(_spell(by_layer[field][layer]) for field in MEASURES), str(sinks[layer]))
        for layer in range(len(sinks))
    )
    labels = (label for label, _ in MEASURES.values())
    return Table(f"{name}: means over heads", ("layer", *labels, "sink heads"), rows)


def _controls_table(measurements: pd.DataFrame, name: str) -> Table:
    fields = ("normalized_entropy", "normalized_entropy_no_sink", "sink_mass", "logit_sd", "distance_ratio")
    means = {
        arm: [_spell(finite_mean(cube(measurements, name, arm, field), (0, 1, 2))) for field in fields]
        for arm in ("model", *CONTROLS)
    }
    rows = tuple((arm.replace("_", " "), *cells) for arm, cells in means.items())
    columns = ("arm", *(MEASURES[field][0] for field in fields))
    return Table(f"{name} and controls: means over layers and heads", columns, rows)


def _broken_table(measurements: pd.DataFrame, name: str) -> Table:
    """Where logits are not finite: such rows are in no mean."""
    counts = cube(measurements, name, "model", "non_finite").sum(axis=0)
    rows = tuple((str(layer), str(head), f"{counts[layer, head]:.0f}") for layer, head in np.argwhere(counts > 0))
    title = f"NOT FINITE: logits of these heads of {name}, left out of every mean"
    return Table(title, ("layer", "head", "rows"), rows)


def _bound_table(measurements: pd.DataFrame) -> Table:
    """Whether every head keeps the entropy that its logits leave it at least."""
    rows = []
    for name in names(measurements):
        for arm in ("model", CONTROLS[0]):
            least = cube(measurements, name, arm, "entropy_margin_least")
            mean = cube(measurements, name, arm, "entropy_margin_mean")
            if least.size:
                below = int((least < -_ROUNDING).sum())
                cells = (f"{below} of {least.size:,}", f"{least.min():.1g}", f"{mean.min():.3g}", f"{mean.mean():.3g}")
                rows.append((name, arm.replace("_", " "), *cells))
    columns = (
        "checkpoint", "arm", "heads below it, over documents", "least above it, nats", "mean of the closest head",
        "mean",
    )  # fmt: skip
    return Table("Entropy above the least that the logits allow (Zhai et al. 2023, theorem 3.1)", columns, tuple(rows))


def _losses_table(measurements: pd.DataFrame) -> Table:
    """Nats a token in the last half of a document, and how long the first token's value is."""
    rows = []
    for name in names(measurements):
        if of_documents(measurements, name, "all", "loss").size:
            losses = (_spell(of_documents(measurements, name, window, "loss").mean()) for window in WINDOWS)
            ratio = _spell(np.median(of_documents(measurements, name, "model", "first_value_ratio")))
            rows.append((name, *losses, ratio))
    columns = (
        "checkpoint", "loss, all in sight", "in a window", "with the first 4 as well",
        "first value's norm over the others'",
    )  # fmt: skip
    return Table("What the first tokens are good for", columns, tuple(rows))


def _spell(value: float | np.ndarray) -> str:
    return "–" if not np.isfinite(value) else f"{float(value):.3g}"
