"""What `projections` simulates of values: planted retrieval, in which one query looks for one key among many."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax.typing import Array, Float
from experiments.artifacts import Row
from experiments.projections.config import DROPOUT, ProjectionsConfig
from experiments.sampling import each_seed, rows_of

MATCH = 4.0  # logit of a match above ln n: about 0.95 of the weight
SINK = 2.0  # logit of the sink above ln n: more than all keys that do not match, less than one that does
HARD, RICH, POOR = 0.1, 100.0, 0.01  # a key's length, and values', of their own
TOKENS = {"easy": (1.0, 1.0), "easy, poor": (1.0, POOR), "hard": (HARD, 1.0), "hard, rich": (HARD, RICH)}

lecun = jax.nn.initializers.lecun_normal()


def planted(config: ProjectionsConfig) -> list[Row]:
    """What moves when keys or values are swapped, and what a token is found and read by."""
    n, width = config.tokens, config.head_width

    def measure(key: Array) -> dict[str, Array]:
        for_keys, for_values = jax.random.split(key)
        keys, values = jax.random.normal(for_keys, (n, width)), jax.random.normal(for_values, (n, width))

        def look_for(target: Array) -> dict[str, Array]:
            query = _matching(keys[target], n)
            pair = jnp.stack([target, target + n // 2])

            def read(keys: Array, values: Array) -> tuple[Array, Array]:
                given = query[None, None], keys[:, None]
                weights, output = (
                    attn_jax.attention_weights(*given),
                    attn_jax.dot_product_attention(*given, values[:, None]),
                )
                return weights[0, 0], output[0, 0]

            weights, output = read(keys, values)
            key_swap, by_keys = read(keys.at[pair].set(keys[pair[::-1]]), values)
            value_swap, by_values = read(keys, values.at[pair].set(values[pair[::-1]]))
            found = {
                "key swap, weights": jnp.abs(key_swap - weights).sum() / 2,
                "value swap, weights": jnp.abs(value_swap - weights).sum() / 2,
                "value swap, output": _relative(by_values - output, output),
                "either swap, output": _relative(by_keys - by_values, by_values),
            }
            for name, (length, worth) in TOKENS.items():
                changed = keys.at[target].multiply(length), values.at[target].multiply(worth)
                weights, _ = read(*changed)
                reads = weights * jnp.linalg.norm(changed[1], axis=-1)
                found |= {f"{name}, weight": weights[target], f"{name}, read": reads[target] / reads.sum()}
            for name, (length, worth) in TOKENS.items():
                both = keys.at[target].multiply(length * worth)
                found[f"{name}, weight, one vector"] = read(both, both)[0][target]
            return found

        return jax.tree.map(jnp.mean, jax.vmap(look_for)(jnp.arange(n // 2)))

    values = each_seed(measure, config.seed, config.seeds, stream="planted")
    return [row for name, x in values.items() for row in rows_of(x, {}, part="planted", measure=name)]


def determined(config: ProjectionsConfig) -> list[Row]:
    """The variance of values that keys determine, where both are random projections of one white stream."""
    width = config.stream_width

    def share(key_weight: Float[Array, "d k"], value_weight: Float[Array, "d v"]) -> Array:
        """Of the regression of v = x W_V on k = x W_K: ‖the part of W_V in the span of W_K‖² / ‖W_V‖²."""
        crossed = key_weight.T @ value_weight
        return jnp.sum(crossed * jnp.linalg.solve(key_weight.T @ key_weight, crossed)) / jnp.sum(value_weight**2)

    def measure(key: Array) -> dict[str, Array]:
        key_weight, value_weight = (lecun(k, (width, width)) for k in jax.random.split(key))
        head = slice(config.head_width)
        return {
            "one head": share(key_weight[:, head], value_weight[:, head]),
            "all heads": share(key_weight, value_weight),
        }

    with jax.enable_x64(True):  # square matrices are nearly singular now and then
        values = each_seed(measure, config.seed, config.seeds, stream="determined")
    return [row for name, x in values.items() for row in rows_of(x, {}, part="determined", measure=name)]


def budget(config: ProjectionsConfig) -> list[Row]:
    """What rows sum to, with a match and without, by softmax, beside a sink, under dropout, by sigmoid."""
    n, width, rows = config.tokens, config.head_width, config.rows
    sinks = jnp.full(1, math.log(n) + SINK)

    def sigmoid(query: Array, keys: Array) -> Float[Array, "t s"]:
        return jax.nn.sigmoid(query @ keys.T / math.sqrt(width) - math.log(n))

    def softmax(query: Array, keys: Array) -> Float[Array, "t s"]:
        return attn_jax.attention_weights(query[:, None], keys[:, None])[0]

    def measure(key: Array) -> dict[str, dict[str, Array]]:
        for_keys, for_values, for_query, for_dropout = jax.random.split(key, 4)
        keys, values = jax.random.normal(for_keys, (n, width)), jax.random.normal(for_values, (n, width))
        queries = {
            "match": jax.vmap(lambda wanted: _matching(wanted, n))(keys[:rows]),
            "none": jax.random.normal(for_query, (rows, width)),
        }

        def fetch(query: Array, values: Array, **options: Any) -> Float[Array, "t v"]:
            return attn_jax.dot_product_attention(query[:, None], keys[:, None], values[:, None], **options)[:, 0]

        def measured(query: Array) -> dict[str, Array]:
            ones, plain = jnp.ones((n, 1)), fetch(query, values)
            beside, dropout = fetch(query, ones, sinks=sinks), {"dropout_rate": DROPOUT, "dropout_rng": for_dropout}
            return {
                "softmax error": jnp.abs(softmax(query, keys).sum(axis=-1) - 1).max(),
                "softmax, keys": jnp.mean(1 / jnp.sum(softmax(query, keys) ** 2, axis=-1)),
                "beside a sink": jnp.mean(beside),
                "sink error": _relative(fetch(query, values, sinks=sinks) - beside * plain, plain),
                "dropout": jnp.mean(fetch(query, ones, **dropout)),
                "dropout spread": jnp.std(fetch(query, ones, **dropout), ddof=1),
                "sigmoid": jnp.mean(jnp.sum(sigmoid(query, keys), axis=-1)),
                "sigmoid spread": jnp.std(jnp.sum(sigmoid(query, keys), axis=-1), ddof=1),
            }

        def beside_twin(target: Array) -> dict[str, Array]:
            query, more = queries["match"][target][None], jnp.concatenate([keys, keys[target][None]])
            return {
                f"twin, {name}": weigh(query, more)[0, target] / weigh(query, keys)[0, target]
                for name, weigh in {"softmax": softmax, "sigmoid": sigmoid}.items()
            }

        found = {name: measured(query) for name, query in queries.items()}
        found["match"] |= jax.tree.map(jnp.mean, jax.vmap(beside_twin)(jnp.arange(rows)))
        return found

    values = each_seed(measure, config.seed, config.seeds, stream="budget")
    return [
        row
        for arm, measured in values.items()
        for name, x in measured.items()
        for row in rows_of(x, {}, part="budget", arm=arm, measure=name)
    ]


def _matching(key: Float[Array, " h"], n: int) -> Float[Array, " h"]:
    """The query whose scaled logit at `key` is MATCH above ln n."""
    return (math.log(n) + MATCH) * math.sqrt(key.shape[-1]) * key / jnp.sum(key**2)


def _relative(difference: Array, whole: Array) -> Array:
    return jnp.linalg.norm(difference) / jnp.linalg.norm(whole)
