"""How does a real model route, layer by layer and head by head?

Claims: D1, D6 (one checkpoint of three).
Command: python -m experiments.diagnose --model=smollm2 --text_file=README.md --max_tokens=512
Time: smoke 20 s, quick 2 min, full 8 min on two cores.

Every head of every layer on documents of real text, next to three controls: the same architecture at random weights,
the same tokens shuffled, and the same documents with another first token.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping

import jax
import numpy as np
import pandas as pd
from flax import nnx
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy import stats

from attn_jax import models
from attn_jax.diagnostics import HeadSummary, summarize_heads
from attn_jax.nn import Transformer
from experiments import artifacts, claims, estimates, figures, harness, texts
from experiments.artifacts import Row
from experiments.config import Config, option
from experiments.harness import Experiment, InputError, Result, Unit
from experiments.progress import Table
from experiments.verdicts import Outcome

CONTROLS = ("random_weights", "shuffled_tokens", "other_first_token")
MEASURES = {  # and how a heat map is scaled
    "normalized_entropy": ("entropy / ln n", (0, 1)),
    "normalized_entropy_no_sink": ("entropy / ln n, without the sink", (0, 1)),
    "sink_mass": ("mass on the first token", (0, 1)),
    "max_weight": ("mean largest weight", (0, 1)),
    "logit_sd": ("standard deviation of the logits", (0, None)),
    "max_logit": ("largest logit", (None, None)),
    "distance_ratio": ("distance / that of uniform weights", (0, None)),
    "score_rank": ("effective rank of the centred scores", (0, None)),
}
SINK_LINE = 0.3  # a head that gives more to the first token is a sink head


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(Config):
    """Flags of this experiment."""

    model: str = option("smollm2", f"a checkpoint ({', '.join(models.CHECKPOINTS)}) or the path of a GGUF file")
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    max_tokens: int = option(512, "tokens of a document", least=2, most=8192)
    documents: int = option(8, "documents, evenly spread over the text", least=1, most=256)


@functools.lru_cache(maxsize=1)
def _load(model: str) -> models.LoadedModel:
    try:
        return models.load(model)
    except (ValueError, OSError) as error:
        raise InputError(f"--model={model}: {error}") from error


@functools.lru_cache(maxsize=1)
def _documents(config: DiagnoseConfig) -> tuple[str, np.ndarray]:
    name, text = texts.read(config.text_file)
    tokenizer = _load(config.model).tokenizer
    return name, texts.documents(text, tokenizer, count=config.documents, length=config.max_tokens)


def inputs(config: DiagnoseConfig) -> Mapping[str, str]:
    name, text = texts.read(config.text_file)
    source = _load(config.model).source
    return {source.name: artifacts.file_digest(source), name: texts.digest(text)}


def units(config: DiagnoseConfig) -> list[Unit]:
    _, documents = _documents(config)
    return [
        Unit(f"{arm}_{i}", lambda arm=arm, i=i: measure(config, arm, i))
        for arm in ("model", *CONTROLS)
        for i in range(len(documents))
    ]


def measure(config: DiagnoseConfig, arm: str, document: int) -> list[Row]:
    """One document through one arm: a row per layer, head and measure."""
    token_ids = _documents(config)[1][document]
    rng = np.random.default_rng([config.seed, document])
    model = _load(config.model).model
    if arm == "random_weights":
        model = _at_random(config.model, config.seed)
    elif arm == "shuffled_tokens":
        token_ids = rng.permutation(token_ids)
    elif arm == "other_first_token":
        others = np.setdiff1d(np.arange(model.config.vocabulary_size), token_ids[:1])
        token_ids = np.concatenate([[rng.choice(others)], token_ids[1:]]).astype(np.int32)
    _, summary = model(token_ids, observe=summarize_heads)
    fields = [field.name for field in dataclasses.fields(HeadSummary)]
    rows = []
    for name in fields:
        values = np.asarray(getattr(summary, name), np.float64)  # [L, N]
        for layer, head in np.ndindex(values.shape):
            at = {"arm": arm, "document": document, "layer": layer, "head": head}
            rows.append({**at, "measure": name, "value": float(values[layer, head])})
    return rows


@functools.lru_cache(maxsize=1)
def _at_random(model: str, seed: int) -> Transformer:
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"random weights"))
    return Transformer(_load(model).config, rngs=nnx.Rngs(params=key))


def cube(measurements: pd.DataFrame, arm: str, measure: str) -> np.ndarray:
    """One measure of an arm, `[documents, L, N]`."""
    chosen = measurements.query("arm == @arm and measure == @measure").sort_values(["document", "layer", "head"])
    shape = [len(chosen[axis].unique()) for axis in ("document", "layer", "head")]
    return chosen["value"].to_numpy(np.float64).reshape(shape)


def judge(config: DiagnoseConfig, measurements: pd.DataFrame) -> list[Outcome]:
    name, documents = _documents(config)
    scope = {"model": config.model, "documents": len(documents), "tokens": documents.shape[1], "text": name}
    sinks = {arm: cube(measurements, arm, "sink_mass") for arm in ("model", *CONTROLS)}
    mass = {arm: _finite_mean(values, (1, 2)) for arm, values in sinks.items()}
    falls = {
        "spearman": ("model", "normalized_entropy"),
        "spearman_no_sink": ("model", "normalized_entropy_no_sink"),
        "spearman_random": ("random_weights", "normalized_entropy"),
    }
    d1 = {field: estimates.mean(_with_depth(cube(measurements, *of))) for field, of in falls.items()}
    d6 = {
        "excess": estimates.difference(mass["model"], mass["random_weights"]),
        "sink_mass": estimates.mean(mass["model"]),
        "sink_heads": estimates.mean((sinks["model"] > SINK_LINE).mean(axis=(1, 2))),
        "excess_other_token": estimates.difference(mass["other_first_token"], mass["random_weights"]),
    }
    return [claims.judge("D1", d1, **scope), claims.judge("D6", d6, **scope)]


def _with_depth(values: np.ndarray) -> np.ndarray:
    """Rank correlation of a layer's mean with its depth, per document; 0 where the layers do not differ."""
    layers = _finite_mean(values, 2)  # [documents, L]
    depth = np.arange(layers.shape[1])
    constant = np.ptp(layers, axis=1) == 0
    ranks = stats.rankdata(layers, axis=1)
    return np.array([0.0 if c else np.corrcoef(depth, x)[0, 1] for c, x in zip(constant, ranks, strict=True)])


def _finite_mean(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Mean over the heads that were measured; NaN where none was."""
    counted = np.isfinite(values)
    total = counted.sum(axis=axis)
    return np.where(total > 0, np.where(counted, values, 0).sum(axis=axis) / np.maximum(total, 1), np.nan)


def tables(config: DiagnoseConfig, measurements: pd.DataFrame) -> list[Table]:
    found = [_layers_table(config, measurements), _controls_table(measurements)]
    broken = _broken_table(measurements)
    return [broken, *found] if broken.rows else found


def _layers_table(config: DiagnoseConfig, measurements: pd.DataFrame) -> Table:
    by_layer = {name: _finite_mean(cube(measurements, "model", name), (0, 2)) for name in MEASURES}
    sinks = (cube(measurements, "model", "sink_mass").mean(axis=0) > SINK_LINE).sum(axis=1)
    rows = tuple(
        (str(layer), *(_spell(by_layer[name][layer]) for name in MEASURES), str(sinks[layer]))
        for layer in range(len(sinks))
    )
    labels = (label for label, _ in MEASURES.values())
    return Table(f"{config.model}: means over heads", ("layer", *labels, "sink heads"), rows)


def _controls_table(measurements: pd.DataFrame) -> Table:
    names = ("normalized_entropy", "normalized_entropy_no_sink", "sink_mass", "logit_sd", "distance_ratio")
    rows = tuple(
        (arm.replace("_", " "), *(_spell(_finite_mean(cube(measurements, arm, name), (0, 1, 2))) for name in names))
        for arm in ("model", *CONTROLS)
    )
    return Table("Model and controls: means over layers and heads", ("arm", *(MEASURES[n][0] for n in names)), rows)


def _broken_table(measurements: pd.DataFrame) -> Table:
    """Where logits are not finite: such rows are in no mean."""
    counts = cube(measurements, "model", "non_finite").sum(axis=0)
    rows = tuple((str(layer), str(head), f"{counts[layer, head]:.0f}") for layer, head in np.argwhere(counts > 0))
    return Table("NOT FINITE: logits of these heads, left out of every mean", ("layer", "head", "rows"), rows)


def _spell(value: float | np.ndarray) -> str:
    return "–" if not np.isfinite(value) else f"{float(value):.3g}"


def figure(config: DiagnoseConfig, measurements: pd.DataFrame) -> Figure:
    """Heat maps layers × heads, means over documents."""
    drawn, axes = figures.panels(2, 4, width=3.3, height=4.6)
    colour_map = colormaps["viridis"].with_extremes(bad=figures.COLOURS[1])  # where nothing is finite
    for axis, (name, (label, (low, high))) in zip(axes.flat, MEASURES.items(), strict=True):
        axis.grid(visible=False)
        values = _finite_mean(cube(measurements, "model", name), 0)
        colours = axis.imshow(values, aspect="auto", cmap=colour_map, vmin=low, vmax=high)
        axis.set_title(label, fontsize=9)
        drawn.colorbar(colours, ax=axis)
    for axis in axes[:, 0]:
        axis.set_ylabel("layer")
    for axis in axes[-1]:
        axis.set_xlabel("head")
    return drawn


EXPERIMENT = Experiment(
    name="diagnose",
    question="How does a real model route, layer by layer and head by head?",
    config=DiagnoseConfig,
    presets={
        "smoke": {"documents": 2, "max_tokens": 64},
        "quick": {},
        "full": {"documents": 32},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Eight heat maps, layers downwards and heads across: normalised entropy with and without the first token, the "
    "mass on the first token, the largest weight, spread and maximum of the logits, distance, and score rank.",
    tables=tables,
    inputs=inputs,
    documentation=__doc__ or "",
)


def run(config: DiagnoseConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
