"""The trained models of `associative_recall`: one layer that looks pairs up, and models of multi-query recall."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.tasks import Lookup, Recall
from attn_jax.typing import ArrayLike, Int
from experiments.arms import Arm, train_arm
from experiments.artifacts import Row
from experiments.associative_recall.config import LAYERS, MIXERS, RecallConfig


class PairTransformer(Transformer):
    """A transformer that embeds the key and the value of a token apart and adds them, so that it learns no pairs."""

    def __init__(self, config: TransformerConfig, task: Lookup, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        self.parts = task.parts

    def __call__(self, token_ids: Int[ArrayLike, "*b t"], *arguments: Any, **options: Any) -> Any:
        """As a `Transformer` of the keys, with the values as token types."""
        keys, values = self.parts(jnp.asarray(token_ids))
        return super().__call__(keys, *arguments, token_types=values, **options)


def one_layer(config: RecallConfig, arm: str, pairs: int) -> list[Row]:
    """One layer on sequences of so many pairs and as many fillers and questions."""
    task = Lookup(num_pairs=pairs, num_keys=2 * pairs, num_values=2 * pairs, length=2 * pairs)
    heads = {"num_heads": config.num_heads, "head_width": config.head_width}
    sizes = _sizes(config, arm, 1, 1 + task.num_keys + task.num_values, num_token_types=1 + task.num_values, **heads)
    make = functools.partial(PairTransformer, sizes, task)
    return _rows(config, arm, make, task, "one_layer", pairs)


def multi_query(config: RecallConfig, arm: str) -> list[Row]:
    """Two layers on sequences whose keys and values are tokens of their own."""
    pairs = config.query_pairs
    task = Recall(num_pairs=pairs, num_keys=2 * pairs, num_values=2 * pairs, length=config.query_length)
    make = functools.partial(
        Transformer, _sizes(config, arm, LAYERS, task.vocabulary_size, num_heads=config.query_heads)
    )
    return _rows(config, arm, make, task, "multi_query", pairs)


def _sizes(config: RecallConfig, arm: str, layers: int, vocabulary_size: int, **more: Any) -> TransformerConfig:
    words = MIXERS[arm][0]
    return TransformerConfig(
        vocabulary_size=vocabulary_size,
        num_layers=layers,
        model_width=config.model_width,
        mlp_width=2 * config.model_width,
        mixer=tuple(words[i % len(words)] for i in range(layers)),
        mixer_options=config.options(arm),
        **more,
    )


def _rows(
    config: RecallConfig, arm: str, make: Callable[..., Transformer], task: Lookup | Recall, part: str, pairs: int
) -> list[Row]:
    return [{"part": part, "pairs": pairs, **row} for row in train_arm(Arm(arm, make), task, config.budget(part))]
