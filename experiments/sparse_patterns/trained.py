"""Routing that is trained: one layer that must bring a question and its pair to one cluster, by how centroids learn."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from flax import nnx

import attn_jax
from attn_jax.nn import parameters
from attn_jax.routed import draw_centroids, routing_attention
from attn_jax.training import losses
from attn_jax.training.tasks import Batch
from attn_jax.typing import Array, Float, Int
from experiments.arms import Arm, best_of, train_arm
from experiments.artifacts import Row
from experiments.estimates import Estimate, difference, mean
from experiments.sparse_patterns.config import SparseConfig
from experiments.sparse_patterns.heads import nearest

DENSE = "dense"


class RoutedLookup(nnx.Module):
    """Tokens embedded as keys and values, one head of attention, and logits."""

    def __init__(self, config: SparseConfig, *, rngs: nnx.Rngs) -> None:
        task, width, head = config.task(), config.model_width, config.head_width
        weight = functools.partial(parameters.weight, rngs, parameters.lecun, dtype="float32")
        self.key_embedding = nnx.Param(jax.random.normal(rngs.params(), (task.num_keys + 1, width)))
        self.value_embedding = nnx.Param(jax.random.normal(rngs.params(), (task.num_values + 1, width)))
        self.query_weight, self.key_weight, self.value_weight = (weight((width,), (1, head)) for _ in range(3))
        self.out_weight = weight((1, head), (width,))
        self.logits_weight = weight((width,), (task.vocabulary_size,))
        self.centroids = nnx.Param(draw_centroids(rngs.params(), 1, config.routed, head))
        self.config = config

    def project(self, inputs: Int[Array, "*b t"]) -> tuple[Array, tuple[Array, Array, Array]]:
        """Embedded tokens, and their query, key and value."""
        keys, values = self.config.task().parts(inputs)
        x = self.key_embedding[...][keys] + self.value_embedding[...][values]
        weights = (self.query_weight[...], self.key_weight[...], self.value_weight[...])
        return x, attn_jax.project_qkv(x, *weights)

    def __call__(self, inputs: Int[Array, "*b t"], learn: str) -> tuple[Float[Array, "*b t c"], Array | float]:
        """Logits, and the auxiliary loss, 0 where there is none."""
        x, three = self.project(inputs)
        extra = 0.0
        if learn == DENSE:
            attended = attn_jax.dot_product_attention(*three, is_causal=True)
        else:
            choice: Any = learn
            attended = routing_attention(
                *three, self.centroids[...], learn=choice, is_causal=True, temperature=self.config.temperature
            )
            if learn == "auxiliary":
                attended, extra = attended
        x = x + attn_jax.project_out(attended, self.out_weight[...])
        return x @ self.logits_weight[...], extra

    def met(self, batch: Batch) -> Float[Array, ""]:
        """The share of questions that are in one cluster with the pair they ask for."""
        _, (query, key, _) = self.project(batch.inputs)
        of_queries, of_keys = (jax.vmap(lambda x: nearest(x, self.centroids[...]))(x)[..., 0] for x in (query, key))
        steps = jnp.arange(batch.inputs.shape[-1])[None, :]
        asked = jnp.take_along_axis(of_keys, steps - self.config.task().distances(batch), axis=-1)
        return jnp.sum((of_queries == asked) * batch.weights) / jnp.sum(batch.weights)


def lookup_loss(learn: str, model: RoutedLookup, batch: Batch, *, key: Array | None) -> tuple[Array, dict[str, Array]]:
    """The loss of an arm: in training as it learns, in evaluation by hard routing, whatever it learned by."""
    in_training = key is not None or learn == DENSE
    logits, extra = model(batch.inputs, learn if in_training else "none")
    loss, _ = losses.cross_entropy(logits, batch.targets, batch.weights)
    accuracy, _ = losses.accuracy(logits, batch.targets, batch.weights)
    return loss + model.config.auxiliary * extra, {"accuracy": accuracy, "met": model.met(batch)}


def train(config: SparseConfig, learn: str) -> list[Row]:
    """All seeds of an arm at every rate."""
    arm = Arm(learn, functools.partial(RoutedLookup, config), functools.partial(lookup_loss, learn))
    return [{"part": "lookup", **row} for row in train_arm(arm, config.task(), config.budget())]


def short_of_dense(rows: pd.DataFrame, learn: str) -> Estimate:
    """Accuracy of dense attention − of routing, paired by seed; NaN if an arm is missing or best at an edge."""
    rows = rows.query("part == 'lookup'")
    unknown = mean([float("nan")] * 2)
    if not {DENSE, learn} <= set(rows["arm"]):
        return unknown
    dense, routed = (best_of(rows, arm, measure="accuracy") for arm in (DENSE, learn))
    return difference(dense.values, routed.values) if dense.inside and routed.inside else unknown
