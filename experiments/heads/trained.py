"""The arms of `heads`: language models that differ in their heads or in W_O, and how alike their heads look."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from flax import nnx

import attn_jax
from attn_jax.diagnostics import head_similarity, normalized_entropy
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import TrainState
from attn_jax.training.tasks import LanguageModel
from attn_jax.typing import Array, Float
from experiments.arms import Arm, Constrained, begin, best_of, train_arm, train_from
from experiments.artifacts import Row
from experiments.claims.trained_heads import MIXINGS, SETTINGS
from experiments.heads.config import LAYERS, HeadsConfig
from experiments.sampling import rows_of

WHEN = ("before", "after")


def split_name(heads: int, width: int) -> str:
    """Of the arm of h heads of width d_k."""
    return f"h{heads}_d{width}"


def output_arms(config: HeadsConfig) -> dict[str, tuple[str, str]]:
    """W_O and MLP ("mlp": with it, "alone": without) of the arms that differ in these from the base, (h, D / h)."""
    return {
        output_name(config, mixing, setting): (mixing, setting)
        for mixing in ("trained", *MIXINGS)
        for setting in SETTINGS
    }


def output_name(config: HeadsConfig, mixing: str, setting: str) -> str:
    """Of the arm with that W_O and MLP: the base, with both as usual, is one of the splits."""
    return split_name(*config.base) if (mixing, setting) == ("trained", "mlp") else f"{mixing}_{setting}"


def names(config: HeadsConfig) -> list[str]:
    """Of all arms."""
    return list(dict.fromkeys([*(split_name(*split) for split in config.arms), *output_arms(config)]))


def make_arm(config: HeadsConfig, name: str, vocabulary_size: int) -> Arm:
    """How the models of an arm are made; those that differ in W_O or MLP begin as the base does."""
    splits = {split_name(*split): split for split in config.arms}
    heads, width = splits.get(name, config.base)
    sizes = TransformerConfig(
        vocabulary_size=vocabulary_size,
        num_layers=LAYERS,
        model_width=config.model_width,
        num_heads=heads,
        head_width=width,
        mlp_width=2 * config.model_width,
    )
    if name in output_arms(config):
        return Arm(name, functools.partial(ArrangedTransformer, sizes), arranged_loss)
    return Arm(name, functools.partial(Transformer, sizes))


def begin_pairs(config: HeadsConfig, arm: Arm) -> TrainState:
    """The runs of an arm before the first step and, after them, as many others to compare their heads with."""
    return begin(arm, dataclasses.replace(config.budget, seeds=2 * config.seeds))


class ArrangedTransformer(Transformer):
    """A transformer with N·V = D whose W_O is `learned · W_O + fixed` and whose MLPs may be without effect.

    The arrays that say so are among its parameters, so that arms that differ in nothing else share one program. It
    begins as any transformer; `rearrange` changes a state that has begun.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        shape = self.layers.attention.output_weight.shape
        self.output_learned = nnx.Param(jnp.ones(shape))
        self.output_fixed = nnx.Param(jnp.zeros(shape))
        self.mlp_share = nnx.Param(jnp.ones((1, 1, 1)))


def arrange(params: dict[str, Any]) -> None:
    """W_O and MLP obey the arrays, which no gradient reaches."""
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    learned, fixed, share = (
        jax.lax.stop_gradient(params[name]) for name in ("output_learned", "output_fixed", "mlp_share")
    )
    attention["output_weight"] = learned * attention["output_weight"] + fixed
    mlp["down_weight"] = share * mlp["down_weight"]


arranged_loss = Constrained(arrange)


def rearrange(begun: TrainState, mixing: str, setting: str, seed: int) -> TrainState:
    """Runs of an `ArrangedTransformer` with another W_O, and with their MLPs ("mlp") or without ("alone").

    Args:
        begun: before the first step, `[runs]`.
        mixing: "trained", "identity" (no W_O), "blocks" (head n writes to its own D/N dimensions, by a trained matrix)
            or "orthogonal" (one drawn for each run and layer, which stays).
        setting: of `SETTINGS`.
        seed: of what is drawn.
    """
    runs, layers, heads, value, width = shape = begun.params["output_fixed"].shape
    head, dimension = np.arange(heads)[:, None, None], np.arange(width)
    drawn = np.linalg.qr(np.random.default_rng(seed).standard_normal((runs, layers, width, width)))[0]
    learned, fixed = {
        "trained": (1, 0),
        "identity": (0, np.eye(width).reshape(heads, value, width)),
        "blocks": (dimension // value == head, 0),
        "orthogonal": (0, drawn.reshape(shape)),
    }[mixing]
    arrays = {
        "output_learned": np.broadcast_to(learned, shape),
        "output_fixed": np.broadcast_to(fixed, shape),
        "mlp_share": np.full((runs, 1, 1, 1), setting == "mlp"),
    }
    params = begun.params | {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return dataclasses.replace(begun, params=params)


def train(config: HeadsConfig, task: LanguageModel, name: str, base: Callable[[], TrainState]) -> list[Row]:
    """One arm at every rate; where heads are compared, also their patterns at the best one.

    Args:
        config: of the experiment.
        task: what is trained on.
        name: of the arm.
        base: gives the `begin_pairs` of the base arm.
    """
    arm = make_arm(config, name, task.vocabulary_size)
    outputs = output_arms(config)
    states = rearrange(base(), *outputs[name], config.seed) if name in outputs else begin_pairs(config, arm)
    parts = slice(config.seeds), slice(config.seeds, None)
    begun = [jax.tree.map(lambda x, part=part: x[part], states) for part in parts]
    rows = [{"part": "trained", **row} for row in train_arm(arm, task, config.budget, begun=begun[0])]
    for heads in config.compared:
        if name == split_name(heads, config.model_width // heads):
            rate = best_of(pd.DataFrame(rows), name).rate
            rows += patterns(config, arm, task, begun, rate if np.isfinite(rate) else config.rates[0], heads)
    return rows


def patterns(
    config: HeadsConfig, arm: Arm, task: LanguageModel, begun: Sequence[TrainState], rate: float, heads: int
) -> list[Row]:
    """Divergence between heads of one model and of two, before and after training, beside that of shuffled rows.

    The models of a pair, one of each of `begun`, differ in seed alone, and no model is in two pairs.
    """
    trained = [train_from(states, arm, task, config.budget, rate) for states in begun]
    token_ids = task.evaluation(1, config.sequences).inputs[0]
    failed = [found.run for one in trained for found in one.diverged]
    rows = []
    for when, both in zip(WHEN, (begun, [one.state for one in trained]), strict=True):
        found = _compare(*(_attend(states, token_ids) for states in both), jax.random.key(config.seed))
        for (pair, measure), values in found.items():
            known = np.array(values)
            known[failed if when == "after" else []] = np.nan
            where = {"part": "patterns", "arm": arm.name, "heads": heads, "when": when, "pair": pair}
            rows += rows_of(known, {"layer": range(LAYERS)}, measure=measure, **where)
    return rows


@jax.jit
def _attend(state: TrainState, token_ids: Array) -> Float[Array, "r l b n t s"]:
    """The weights of every run, layer and head."""

    def run(params: Any) -> Array:
        return nnx.merge(state.graphdef, params)(token_ids, observe=_weights)[1]

    return jax.vmap(run)(state.params)


def _weights(query: Array, key: Array, value: Array, **options: Any) -> Array:
    return attn_jax.attention_weights(query, key, **options)


@jax.jit
def _compare(
    one: Float[Array, "r l b n t s"], other: Float[Array, "r l b n t s"], key: Array
) -> dict[tuple[str, str], Float[Array, "r l"]]:
    """Means over sequences and pairs of heads, of causal weights."""
    heads, length = one.shape[-3], one.shape[-1]
    weights, visible = jnp.concatenate([one, other], axis=-3), jnp.tri(length, dtype=bool)
    divergence = head_similarity(jnp.stack([weights, shuffle(key, weights)]), visible)  # [2, R, L, B, 2 N, 2 N]
    model = jnp.repeat(jnp.arange(2), heads)
    same = model[:, None] == model[None, :]
    chosen = {"within": same & ~jnp.eye(2 * heads, dtype=bool), "between": ~same}
    found = {}
    for pair, which in chosen.items():
        mean = jnp.mean(divergence, axis=(-2, -1), where=which[None, None, None, None]).mean(axis=-1)
        found |= {(pair, "divergence"): mean[0], (pair, "shuffled"): mean[1]}
    entropy = normalized_entropy(weights, visible_keys=jnp.arange(1, length + 1))
    return {**found, ("within", "entropy"): entropy[..., 1:].mean(axis=(-3, -2, -1))}


def shuffle(key: Array, weights: Float[Array, "*b t s"]) -> Float[Array, "*b t s"]:
    """Causal weights in an order drawn for each row among the keys it sees: the same entropies, unrelated patterns."""
    visible = jnp.tri(*weights.shape[-2:], dtype=bool)
    drawn = jax.random.uniform(key, weights.shape)
    order = jnp.argsort(jnp.where(visible.reshape((1,) * (weights.ndim - 2) + visible.shape), drawn, 2.0), axis=-1)
    return jnp.take_along_axis(weights, order, axis=-1)
