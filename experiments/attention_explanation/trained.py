"""The models of `attention_explanation`: what they learn with weights of their own and with uniform ones."""

import functools

import numpy as np
import pandas as pd

from attn_jax.nn import Transformer
from attn_jax.training import Trained
from experiments.arms import Arm, best_of, train_arm
from experiments.artifacts import Row
from experiments.attention_explanation import changed
from experiments.attention_explanation.config import ExplanationConfig


def accuracy_rows(config: ExplanationConfig, arm: str, *, uniform: bool) -> tuple[list[Row], Trained]:
    """What evaluation measured, and the models at their best rate."""
    name = f"{arm}_uniform" if uniform else arm
    made = Arm(name, functools.partial(Transformer, config.transformer(arm, uniform=uniform)))
    by_rate: dict[float, Trained] = {}
    rows = train_arm(made, config.task(arm), config.budget(), trained=by_rate)
    best = best_of(pd.DataFrame(rows), name).rate
    return [{"part": "training", **row} for row in rows], by_rate[best if np.isfinite(best) else config.rates[0]]


def train(config: ExplanationConfig, arm: str) -> list[Row]:
    """The models of an arm, and what becomes of their answers as weights are changed."""
    rows, trained = accuracy_rows(config, arm, uniform=False)
    return rows + [{"part": "changed", **row} for row in changed.measure(config, arm, trained)]


def train_uniform(config: ExplanationConfig, arm: str) -> list[Row]:
    """The same with uniform attention."""
    return accuracy_rows(config, arm, uniform=True)[0]
