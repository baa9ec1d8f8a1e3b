"""How many pairs a mechanism holds that was not trained: random keys and values stored, one of the keys asked for.

Keys and values have independent standard normal components, and a query is a stored key. It is answered if, of all
stored values, the right one points most nearly where the output does.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import attn_jax
from attn_jax.typing import Array, Float
from experiments.artifacts import Row
from experiments.associative_recall.config import RecallConfig
from experiments.sampling import each_seed, rows_of

# From randomness, queries `[q, h]`, keys and values `[n, h]` and how many of these are stored, to outputs `[q, h]`.
Read = Callable[[Array, Array, Array, Array, Array], Array]


def capacity(config: RecallConfig, store: str) -> list[Row]:
    """The share of queries answered, of every width and number of pairs."""
    rows = []
    for width in config.widths:
        measure = functools.partial(_answered, config, store, width)
        found = each_seed(measure, config.seed, config.simulations, stream=f"capacity-{width}")
        rows += rows_of(found, {"pairs": config.stored}, part="capacity", arm=store, width=width, measure="accuracy")
    return rows


def _answered(config: RecallConfig, store: str, width: int, key: Array) -> Float[Array, "pairs"]:
    """Every mechanism meets the same pairs and queries, and the first so many of the pairs are stored."""
    for_keys, for_values, for_queries, for_store = jax.random.split(key, 4)
    keys, values = (jax.random.normal(k, (config.most_pairs, width)) for k in (for_keys, for_values))
    uniform = jax.random.uniform(for_queries, (config.queries,))
    directions = values / jnp.linalg.norm(values, axis=-1, keepdims=True)

    def answered(count: Array) -> Array:
        asked = jnp.floor(uniform * count).astype(jnp.int32)
        output = read(config, store)(for_store, keys[asked], keys, values, count)
        alike = jnp.where(jnp.arange(config.most_pairs)[None, :] < count, output @ directions.T, -jnp.inf)
        return jnp.mean(jnp.argmax(alike, axis=-1) == asked)

    return jax.lax.map(answered, jnp.array(config.stored))


def read(config: RecallConfig, store: str) -> Read:
    """How a mechanism reads: in a head of its own, after the pairs were stored in their order."""

    def run(rng: Array, queries: Array, keys: Array, values: Array, count: Array) -> Array:
        query, key, value = (x[:, None, :] for x in (queries, keys, values))
        if store in ("softmax", "window"):
            last = jnp.arange(len(keys)) >= (count - config.window if store == "window" else 0)
            mask = jnp.broadcast_to(last, (len(queries), len(keys)))
            output = attn_jax.dot_product_attention(query, key, value, mask=mask, key_value_seq_lengths=count)
        elif store == "retention":
            # At the rate of the slowest of eight heads of RetNet.
            slowest = np.array([1 - 2.0**-12])
            _, state = attn_jax.retention(key, key, value, decay=slowest, lengths=count, return_state=True)
            output = jnp.einsum("qnr,nrv->qnv", query, state.memory)
        else:
            features = store
            if store == "random_features":
                features = attn_jax.linear.draw_features(rng, queries.shape[-1], config.features)
            output = attn_jax.linear_attention(
                query, key, value, feature_map=features, normalize=store != "identity", key_value_seq_lengths=count
            )
        return output[:, 0, :]

    return run


def state_size(config: RecallConfig, store: str, width: int, pairs: int) -> int:
    """Numbers that a mechanism keeps of so many pairs: keys and values, or a memory and its normaliser."""
    if store in ("softmax", "window"):
        return 2 * width * (pairs if store == "softmax" else min(pairs, config.window))
    rows = config.features if store == "random_features" else width
    return rows * (width + (store not in ("identity", "retention")))


def held(accuracy: Float[np.ndarray, "seeds pairs"], stored: tuple[int, ...], line: float) -> np.ndarray:
    """`[seeds]`: the most pairs up to which all accuracies reach the line, between two numbers on a log scale.

    Half the least number if not even that is held, and the most if all are: then it is a bound.
    """
    counts = np.log(np.array([stored[0] / 2, *stored]))
    curve = np.concatenate([np.ones((len(accuracy), 1)), accuracy], axis=1)
    found = np.empty(len(accuracy))
    for seed, values in enumerate(curve):
        below = np.flatnonzero(values < line)
        if not below.size:
            found[seed] = counts[-1]
            continue
        after = below[0]
        share = (values[after - 1] - line) / (values[after - 1] - values[after])
        found[seed] = counts[after - 1] + share * (counts[after] - counts[after - 1])
    return np.exp(found)
