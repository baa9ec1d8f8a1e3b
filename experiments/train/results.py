"""What a training run leaves for people: tidy measurements, small tables, curves, and a text that it wrote."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from attn_jax.training import Divergence, TrainState, take_run
from attn_jax.training.tasks import Digits, LanguageModel, Task
from experiments import figures
from experiments.progress import Table, cells
from experiments.train.config import TrainConfig
from experiments.train.continuation import continue_tokens

LEADING = ("kind", "step", "seed", "layer", "head")  # where a measurement belongs
SIGNALS = {  # of the monitor, in the figure: a measure and how its heads make one line a layer
    "normalized_entropy": ("mean", "entropy / ln n, mean of the heads"),
    "max_logit": ("max", "largest logit of the heads"),
}
PROMPT = 80  # characters that are shown of what a sample continues
FINDINGS = 10  # rows of their table


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as its log tells it.

    Attributes:
        config: its flags.
        task: what was learned.
        tokenizer: of a text.
        rows: of the log.
        diverged: the runs that did, of many.
    """

    config: TrainConfig
    task: Task
    tokenizer: Tokenizer | None
    rows: Sequence[Mapping[str, Any]]
    diverged: Sequence[Divergence]

    @functools.cached_property
    def measurements(self) -> pd.DataFrame:
        """One measurement a row: kind, step, seed, layer and head where there are any, measure, value."""
        seeds = self.config.run_seeds
        found = []
        for row in self.rows:
            if row["kind"] in ("train", "evaluation", "attention"):
                for measure in (name for name in row if name not in ("step", "kind")):
                    values = np.asarray(row[measure], np.float64)  # null becomes NaN
                    values = values if self.config.seeds > 1 else values[None]
                    for (run, *place), value in np.ndenumerate(values):
                        where = {"kind": row["kind"], "step": row["step"], "seed": seeds[run]}
                        where |= dict(zip(("layer", "head"), place, strict=False))
                        found.append({**where, "measure": measure, "value": value})
        table = pd.DataFrame(found, columns=[*LEADING, "measure", "value"])
        return table.astype({"layer": "Int64", "head": "Int64"})

    @property
    def survivors(self) -> list[int]:
        """The runs that did not diverge."""
        return sorted(set(range(self.config.seeds)) - {found.run for found in self.diverged})

    @functools.cached_property
    def baseline(self) -> tuple[float, float]:
        """Loss and accuracy of who does not look, and knows how often each answer comes."""
        if isinstance(self.task, LanguageModel | Digits):
            answers = self.task.training if isinstance(self.task, LanguageModel) else self.task.training_labels
            shares = np.bincount(np.asarray(answers)) / answers.shape[0]
            shares = shares[shares > 0]
            return float(-(shares * np.log(shares)).sum()), float(shares.max())
        assert self.task.chance is not None
        return -math.log(self.task.chance), self.task.chance  # one of so many, all alike

    def tables(self, tokens_per_second: float | None) -> Iterator[Table]:
        """What is held out, before the first step and after the last, and what the monitor found."""
        loss, accuracy = self.baseline
        columns = ("", "before", "after", "without looking")
        rows = [self._row("loss, nats", "loss", loss)]
        if isinstance(self.task, LanguageModel):
            rows.append(self._row("bits per token", "loss", loss, factor=1 / math.log(2)))
            if self.config.vocabulary_size and self.tokenizer is not None:  # what compares vocabularies
                tokens = np.asarray(self.task.held_out).tolist()
                factor = len(tokens) / len(self.tokenizer.decode(tokens)) / math.log(2)
                rows.append(self._row("bits per character", "loss", loss, factor=factor))
        rows.append(self._row("accuracy", "accuracy", accuracy))
        speed = "–" if tokens_per_second is None else f"{tokens_per_second:,.0f}"
        rows.append(("tokens per second of training", "", speed, ""))
        seeds = self.config.run_seeds
        rows += [(f"seed {seeds[one.run]}", "", f"diverged at step {one.step}", "") for one in self.diverged]
        runs = "" if self.config.seeds == 1 else f", mean and range of {len(self.survivors)} runs"
        title = f"{self.config.task}: held out, before training and after {self.config.steps} steps{runs}"
        yield Table(title, columns, tuple(rows))
        yield from self._findings()

    def _row(self, label: str, measure: str, beside: float, *, factor: float = 1.0) -> tuple[str, ...]:
        seeds = [self.config.run_seeds[run] for run in self.survivors]
        rows = self.measurements
        judged = rows[(rows["kind"] == "evaluation") & (rows["measure"] == measure) & rows["seed"].isin(seeds)]
        steps = judged["step"]
        ends = [_spell(factor * judged.loc[steps == step, "value"].to_numpy()) for step in (steps.min(), steps.max())]
        return (label, *ends, f"{factor * beside:.3f}")

    def _findings(self) -> Iterator[Table]:
        found = [row for row in self.rows if row["kind"] == "finding" and row["severity"] in ("notice", "serious")]
        if found:
            more = f", the first {FINDINGS} of {len(found)}" if len(found) > FINDINGS else ""
            columns = ("step", "severity", "signal", "seed", "layer", "heads", "value", "limit")
            seeds = self.config.run_seeds
            rows = [
                (
                    row["step"], row["severity"], row["signal"], seeds[row["run"] or 0], row["layer"],
                    ", ".join(map(str, row["heads"] or ())) or "–", row["value"], row["limit"],
                )
                for row in found[:FINDINGS]
            ]  # fmt: skip
            yield Table(f"What the monitor found{more}", columns, cells(rows))

    def figure(self) -> Figure:
        """Loss and accuracy, and where attention went if it was watched."""
        watched = [name for name in SIGNALS if name in set(self.measurements["measure"])]
        drawn, axes = figures.panels(2 if watched else 1, 2, width=5.0, height=3.4)
        for one, measure, beside, label in zip(
            axes[0], ("loss", "accuracy"), self.baseline, ("loss, nats", "accuracy"), strict=False
        ):
            self._curves(one, measure, beside)
            one.set(ylabel=label, xlabel="step")
        axes[0, 0].legend(fontsize=8)
        for one, measure in zip(axes[1:].flat, watched, strict=False):
            self._layers(one, measure)
        return drawn

    def _curves(self, axes: Axes, measure: str, beside: float) -> None:
        """Training and evaluation, a line a seed."""
        rows = self.measurements[self.measurements["measure"] == measure]
        for index, (_, of_seed) in enumerate(rows.groupby("seed")):
            train, judged = (of_seed[of_seed["kind"] == kind] for kind in ("train", "evaluation"))
            labels = ("training", "held out") if index == 0 else ("", "")
            look = {"marker": "", "linewidth": 0.7, "alpha": 0.5}
            figures.curve(axes, index, train["step"], train["value"], labels[0], **look)
            figures.curve(axes, index, judged["step"], judged["value"], labels[1], linewidth=1.4)
        axes.axhline(beside, color="black", linestyle=":", linewidth=1, label="without looking")

    def _layers(self, axes: Axes, measure: str) -> None:
        """One signal of the monitor, a line a layer: over heads, and the mean of the seeds."""
        how, label = SIGNALS[measure]
        for layer in range(self.config.num_layers):
            of_layer = self.measurements.query("measure == @measure and layer == @layer")
            heads = of_layer.pivot_table(index="step", columns="seed", values="value", aggfunc=how)
            figures.curve(axes, layer, heads.index, heads.mean(axis="columns"), f"layer {layer}", marker="")
        axes.set(ylabel=label, xlabel="step")
        axes.legend(fontsize=8)


def _spell(values: np.ndarray) -> str:
    """The mean, and the range where there are several."""
    if not values.size:
        return "–"
    text = f"{values.mean():.3f}"
    return text if values.size == 1 else f"{text} ({values.min():.3f} to {values.max():.3f})"


def sample(
    config: TrainConfig, state: TrainState, task: LanguageModel, tokenizer: Tokenizer, run: int
) -> tuple[str, str]:
    """The end of a held-out passage, and how a run writes on."""
    model = state.model if state.runs is None else take_run(state, run).model
    window = task.held_out[: task.length]
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
    written = continue_tokens(model, window, count=config.sample, temperature=config.temperature, key=key)
    before, after = (tokenizer.decode(np.asarray(part).tolist()) for part in (window, written))
    return before[-PROMPT:], after
