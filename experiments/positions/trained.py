"""The models of `positions`: language models and look-up models by their positions, read past the trained length."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import Trained, TrainState, losses
from attn_jax.training.tasks import Batch, LanguageModel, Lookup
from attn_jax.typing import Array, Bool, Float
from experiments.arms import Arm, begin, best_of, train_arm, train_from
from experiments.artifacts import Row
from experiments.positions.config import ALIKE, PositionsConfig
from experiments.positions.simulated import projections, shifted
from experiments.sampling import rows_of

RIDGE = 1e-3  # of a probe, times the number of rows


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of one part: of the language model ("language") or of the recall task ("lookup", one layer)."""

    config: PositionsConfig
    part: str
    task: LanguageModel | Lookup

    def of(self, arm: str) -> TransformerConfig:
        """Of an arm: a kind of positions, or rotary ones with a scaling."""
        config, scaling = self.config, self.config.scaling(arm)
        kind = arm if scaling is None else "rotary"
        return TransformerConfig(
            vocabulary_size=self.task.vocabulary_size,
            num_layers=config.layers if self.part == "language" else 1,
            model_width=config.model_width,
            num_heads=config.num_heads,
            head_width=config.head_width,
            mlp_width=2 * config.model_width,
            positions=None if kind == "none" else kind,
            rotary_scaling=scaling,
            # Training reads the first L rows; a table of L rows refuses to be read further.
            max_length=config.farthest if kind == "learned" else None,
            scale_embedding=kind == "sinusoidal",  # as its paper does, lest positions outweigh tokens
        )

    def arm(self, kind: str) -> Arm:
        """How the models of a kind of positions are made."""
        return Arm(kind, functools.partial(Transformer, self.of(kind)))

    def read_as(self, state: TrainState, arm: str) -> TrainState:
        """The same parameters under the configuration of another arm, which has the same ones."""
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: Transformer(self.of(arm), rngs=nnx.Rngs(0))), nnx.Param)
        return dataclasses.replace(state, graphdef=graphdef)

    @functools.cached_property
    def rotary(self) -> TrainState:
        """All seeds of the rotary models before the first step."""
        return begin(self.arm("rotary"), self.config.budget(self.part))

    @functools.cached_property
    def within(self) -> Batch:
        """Held-out sequences of the trained length."""
        language = self.part == "language"
        return self._held_out(self.config.length, 2 * self.config.probed if language else self.config.lookup_sequences)

    @functools.cached_property
    def beyond(self) -> Batch:
        """Longer ones."""
        language = self.part == "language"
        return self._held_out(self.config.farthest, self.config.sequences if language else self.config.lookup_sequences)

    def _held_out(self, length: int, count: int) -> Batch:
        task = dataclasses.replace(self.task, length=length)
        return jax.tree.map(
            lambda x: x[0], jax.jit(lambda: task.evaluation(1, count))()
        )  # one call, not one an operation

    def begun(self, kind: str) -> TrainState:
        """All seeds of a kind before the first step, with the parameters of the rotary ones wherever both have them."""
        if kind in ALIKE:
            return self.read_as(self.rotary, kind)
        own = begin(self.arm(kind), self.config.budget(self.part))
        # A table of positions is drawn before the layers, which would begin otherwise; one of buckets is not drawn.
        return dataclasses.replace(own, params=own.params | self.rotary.params) if kind == "learned" else own


def train_language(models: Models, kind: str) -> list[Row]:
    """The language models of a kind at every rate; those of the best one are read past L, and their values probed."""
    config, task, arm = models.config, models.task, models.arm(kind)
    budget, begun = config.budget("language"), models.begun(kind)
    by_rate: dict[float, Trained] = {}
    rows = [{"part": "language", **row} for row in train_arm(arm, task, budget, begun=begun, trained=by_rate)]
    best = best_of(pd.DataFrame(rows), kind).rate
    trained = by_rate[best if np.isfinite(best) else config.rates[0]]

    text = models.beyond
    last = last_tokens(trained.state, text, length=config.length, every=config.every)
    rows += _by_place(config, trained, last, kind, "last")
    for name in config.arms(kind):
        found = all_tokens(models.read_as(trained.state, name), text, every=config.every)
        rows += _by_place(config, trained, found, name, "all")

    tokens = models.within.inputs
    # Untrained sinusoidal models are rotary ones read otherwise: they need no training of their own.
    for name in {"rotary": ("rotary", "sinusoidal"), "sinusoidal": ()}.get(kind, (kind,)):
        rows += shifted(config, name, models.read_as(begun, name), tokens)
    looks = [(kind, "before", begun), (kind, "after", trained.state)]
    if kind == "rotary" and "none" not in config.kinds:  # with the same parameters, so it needs no training either
        looks.append(("none", "before", models.read_as(begun, "none")))
    for name, when, state in looks:
        values = projections(state, tokens, jnp.arange(config.length))[2]
        for measure, probe in {"values": told_of_position, "squares": told_with_squares}.items():
            told = np.array([[probe(layer) for layer in run] for run in np.asarray(values, np.float64)])
            told[_failed(trained) if when == "after" else []] = np.nan
            where = {"part": "probe", "arm": name, "when": when, "measure": measure}
            rows += rows_of(told, {"layer": range(config.layers)}, **where)
    return rows


def _failed(trained: Trained) -> list[int]:
    return [found.run for found in trained.diverged]


def _by_place(config: PositionsConfig, trained: Trained, values: Array, arm: str, measure: str) -> list[Row]:
    known = np.array(values)
    known[_failed(trained)] = np.nan
    places = config.places[-known.shape[1] :]
    return rows_of(known, {"position": places}, part="length", arm=arm, measure=measure)


@functools.partial(jax.jit, static_argnames="every")
def all_tokens(state: TrainState, text: Batch, *, every: int) -> Float[Array, "r p"]:
    """The loss of every so many-th token given all that came before, mean over sequences."""

    def run(params: Any) -> Array:
        logits = nnx.merge(state.graphdef, params)(text.inputs)
        return losses.token_losses(logits[:, every - 1 :: every], text.targets[:, every - 1 :: every]).mean(axis=0)

    return jax.lax.map(run, state.params)


@functools.partial(jax.jit, static_argnames=("length", "every"))
def last_tokens(state: TrainState, text: Batch, *, length: int, every: int) -> Float[Array, "r p"]:
    """The same from L − 1 on given the last L tokens alone, as if the text began there."""
    ends = np.arange(length - 1, text.inputs.shape[1], every)
    windows = text.inputs[:, ends[:, None] + np.arange(1 - length, 1)]  # [B, P, L]

    def run(params: Any) -> Array:
        logits = nnx.merge(state.graphdef, params)(windows)[:, :, -1]
        return losses.token_losses(logits, text.targets[:, ends]).mean(axis=0)

    return jax.lax.map(run, state.params)


def told_of_position(values: Float[np.ndarray, "b t n v"]) -> float:
    """How much of the variance of the position a ridge regression on values tells, of sequences it was not fitted to.

    The first half of the sequences fits it.
    """
    batch, length = values.shape[:2]
    at = np.tile(np.arange(length) - (length - 1) / 2, batch // 2)
    fitted, judged = values.reshape(2, batch // 2 * length, -1)
    mean, spread = fitted.mean(axis=0), fitted.std(axis=0) + 1e-12
    x, y = (fitted - mean) / spread, (judged - mean) / spread
    weights = np.linalg.solve(x.T @ x + RIDGE * len(x) * np.eye(x.shape[1]), x.T @ at)
    return float(1 - np.sum((at - y @ weights) ** 2) / np.sum(at**2))


def told_with_squares(values: Float[np.ndarray, "b t n v"]) -> float:
    """The same of values and their squares, which tell of how many tokens a value is the mean."""
    return told_of_position(np.concatenate([values, values**2], axis=-1))


def train_lookup(models: Models, kind: str) -> list[Row]:
    """Models of one layer that look up pairs within L, and what they find at that length and further back."""
    config, short, long = models.config, models.within, models.beyond
    trained = train_from(models.begun(kind), models.arm(kind), models.task, config.budget("lookup"), config.lookup_rate)

    def rows(right: Array, batch: Batch, name: str, measure: str, least: int, most: int) -> list[Row]:
        distances = np.asarray(Lookup().distances(batch))
        share = np.array(right, np.float64)[:, (least <= distances) & (distances <= most)].mean(axis=1)
        share[_failed(trained)] = np.nan
        return rows_of(share, {}, part="lookup", arm=name, measure=measure, least=least, most=most)

    half, found = config.length // 2, rows(answered(trained.state, short), short, kind, "within", 1, config.length)
    for name in config.arms(kind):
        right = answered(models.read_as(trained.state, name), long)
        found += rows(right, long, name, "beyond", config.length + 1, config.farthest)
        for least in range(1, config.farthest, half):
            found += rows(right, long, name, "found", least, least + half - 1)
    return found


@jax.jit
def answered(state: TrainState, batch: Batch) -> Bool[Array, "r b t"]:
    """Whether each run's largest logit is the target's."""

    def run(params: Any) -> Array:
        return jnp.argmax(nnx.merge(state.graphdef, params)(batch.inputs), axis=-1) == batch.targets

    return jax.lax.map(run, state.params)
