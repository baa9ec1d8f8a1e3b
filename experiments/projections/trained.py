"""What `projections` trains: a language model and the directed relation, with projections tied and not.

Every arm has all the matrices, and the loss ties those that should be one: seeds begin with the same numbers in every
arm. In the language model each tie widens the perceptron by as many parameters as it frees.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import attn_jax
from attn_jax import masks
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import token_loss
from attn_jax.training.step import Loss
from attn_jax.training.tasks import Batch, LanguageModel, language_model, read_text
from attn_jax.typing import Array
from experiments.arms import Arm, Constrained, train_arm
from experiments.artifacts import Row
from experiments.projections.config import LENGTH, MLP_WIDTH, MODEL_WIDTH, NUM_HEADS, RELATION, ProjectionsConfig

Params = dict[str, Any]
_SIZES: dict[str, Any] = {"model_width": MODEL_WIDTH, "num_heads": NUM_HEADS, "mlp": "plain", "activation": "relu"}

# All but the token itself; the first has no other (Kitaev et al. 2020, section 2).
OTHERS = functools.partial(attn_jax.dot_product_attention, mask=~masks.LocalWindow(0, 0) | masks.GlobalTokens(1))


def query_is_key(params: Params) -> None:
    """W_K = W_Q."""
    attention = params["layers"]["attention"]
    attention["key_weight"] = attention["query_weight"]


def query_is_key_but_for_signs(params: Params) -> None:
    """W_K = W_Q with the sign of every other column turned: q·k is symmetric, and may be negative of a token itself."""
    attention = params["layers"]["attention"]
    query_weight = attention["query_weight"]
    signs = 1.0 - 2.0 * (jnp.arange(query_weight.shape[-1]) % 2)
    attention["key_weight"] = query_weight * signs.reshape((1,) * (query_weight.ndim - 1) + (-1,))


def key_is_value(params: Params) -> None:
    """W_V = W_K."""
    attention = params["layers"]["attention"]
    attention["value_weight"] = attention["key_weight"]


def all_are_one(params: Params) -> None:
    """W_V = W_K = W_Q."""
    query_is_key(params)
    key_is_value(params)


def only_qkv_biases(params: Params) -> None:
    """No bias but those of Q, K and V."""
    layers = params["layers"]
    for part, names in (("attention", ("output_bias",)), ("mlp", ("up_bias", "down_bias"))):
        for name in names:
            layers[part][name] = jnp.zeros_like(layers[part][name])


def loss_and_diagonal(model: nnx.Module, batch: Batch, *, key: Array | None) -> tuple[Array, dict[str, Array]]:
    """`token_loss`; evaluation also tells the mean weight of a token on itself, from the second on."""
    loss, measured = token_loss(model, batch, key=key)
    if key is not None:
        return loss, measured
    _, statistics = model(batch.inputs, return_statistics=("diagonal_mass",))
    diagonal = jnp.stack([of_layer.diagonal_mass[:, 1:] for of_layer in statistics])
    return loss, {**measured, "diagonal": jnp.mean(diagonal)}


Tie = Callable[[Params], None]
LANGUAGE_TIES: dict[str, tuple[Tie, int]] = {  # what an arm ties, and how many matrices that frees
    "qk": (query_is_key, 1),
    "qk_masked": (query_is_key, 1),
    "kv": (key_is_value, 1),
    "qkv": (all_are_one, 2),
    "biases": (only_qkv_biases, 0),
}
RELATION_TIES: dict[str, Tie] = {
    "qk": query_is_key,
    "qk_signed": query_is_key_but_for_signs,
    "qk_rotary": query_is_key,
    "kv": key_is_value,
}
OBSERVED = ("separate", "qk")  # arms whose diagonal is asked for: it takes a second pass


def language_arm(name: str, layers: int, vocabulary_size: int) -> Arm:
    """An arm of the language model, all of one number of parameters but the one with biases."""
    tie, freed = LANGUAGE_TIES.get(name, (None, 0))
    config = TransformerConfig(
        vocabulary_size=vocabulary_size,
        num_layers=layers,
        # A matrix of D × D is as large as D / 2 units of a plain perceptron.
        mlp_width=MLP_WIDTH + freed * MODEL_WIDTH // 2,
        use_bias=name == "biases",
        attention_fn=OTHERS if name.endswith("masked") else attn_jax.dot_product_attention,
        **_SIZES,
    )
    return _arm(name, config, tie, loss_and_diagonal if name in OBSERVED else token_loss)


def relation_arm(name: str) -> Arm:
    """An arm of the relation task: one causal layer; without positions unless it says so."""
    config = TransformerConfig(
        vocabulary_size=RELATION.vocabulary_size,
        num_layers=1,
        mlp_width=MLP_WIDTH,
        positions="rotary" if name.endswith("rotary") else None,
        **_SIZES,
    )
    return _arm(name, config, RELATION_TIES.get(name), token_loss)


def _arm(name: str, config: TransformerConfig, tie: Tie | None, loss: Loss) -> Arm:
    return Arm(name, functools.partial(Transformer, config), loss if tie is None else Constrained(tie, loss=loss))


def free_parameters(arm: Arm) -> int:
    """The parameters that training moves: no copy of another matrix, no bias that is held at 0."""
    counts = []

    def count() -> None:
        params = nnx.to_pure_dict(nnx.state(arm.make_model(rngs=nnx.Rngs(0)), nnx.Param))
        drawn = jax.tree.leaves(params)
        if isinstance(arm.loss, Constrained):
            arm.loss.constrain(params)
        used = {id(leaf) for leaf in jax.tree.leaves(params)}
        counts.append(sum(leaf.size for leaf in drawn if id(leaf) in used))

    jax.eval_shape(count)  # by shapes alone: nothing is drawn
    return counts[0]


@functools.cache
def text_task() -> LanguageModel:
    """Characters of the prose that comes with Python."""
    return language_model(read_text(), length=LENGTH)[0]


def train_language(config: ProjectionsConfig, name: str) -> list[Row]:
    task = text_task()
    rows = train_arm(language_arm(name, config.layers, task.vocabulary_size), task, config.budget("language"))
    return [{"part": "language", **row} for row in rows]


def train_relation(config: ProjectionsConfig, name: str) -> list[Row]:
    rows = train_arm(relation_arm(name), RELATION, config.budget("relation"))
    return [{"part": "relation", **row} for row in rows]
