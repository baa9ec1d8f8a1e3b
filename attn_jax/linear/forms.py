"""The three forms of the recurrence, as bodies of one loop over chunks.

A body takes the memory before a chunk to the outputs in it and the memory after it. The loop computes each chunk
again in the backward pass, so that only the memories between chunks are kept.

    chunkwise    the pairs within a chunk, as products of matrices
    recurrent    token by token
    parallel     the chunkwise body on one chunk, the whole sequence

Where outputs are normalised, the denominator is one more column of the memory: the sum over values of 1.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_jax.linear import decays
from attn_jax.typing import Array, Bool, Float

FORMS = ("chunkwise", "recurrent", "parallel")
RECURRENT_STEPS = 128  # between memories that the backward pass of the recurrent form keeps


class Steps(NamedTuple):
    """What the steps of a chunk, or of a whole sequence, read. Of those that do not count, all but the query is 0.

    Attributes:
        query: `[B, C, N, H]`.
        key: `[B, C, K, H]`, K the heads that have a memory.
        value: `[B, C, K, V]`.
        log_decay: `[B, C, K]`, per feature `[B, C, K, R]`, or None.
        counted: boolean `[B, C]`, or None where the features of 0 are 0.
    """

    query: Float[Array, "b c n h"]
    key: Float[Array, "b c k h"]
    value: Float[Array, "b c k v"]
    log_decay: Array | None
    counted: Bool[Array, "b c"] | None


Memory = Float[Array, "b k r w"]  # W = V, or V + 1 if normalised
Body = Callable[[Memory, Steps], tuple[Memory, Array]]


@dataclasses.dataclass(frozen=True)
class Form:
    """How the recurrence is computed.

    Attributes:
        name: one of `FORMS`.
        chunk: steps of a chunk of the chunkwise form; None to choose.
        normalize: whether outputs are divided by the sum of the weights.
        precision: of matrix products.
        features: what makes features of queries and keys, chunk by chunk; None where they are features already.
    """

    name: str
    chunk: int | None
    normalize: bool
    precision: lax.PrecisionLike
    features: Callable[[Array], Array] | None = None

    def causal(self, steps: Steps, memory: Memory) -> tuple[Memory, Float[Array, "b t n v"]]:
        """The memory after the last step, and the outputs, each over the steps up to its own."""
        length, width = steps.query.shape[1], memory.shape[-2:]
        chosen = choose_chunk(*width) if self.chunk is None else self.chunk
        size = {"chunkwise": chosen, "recurrent": RECURRENT_STEPS, "parallel": length}[self.name]
        body = self._token_by_token if self.name == "recurrent" else self._by_pairs
        return _over_chunks(body, steps, memory, max(min(size, length), 1))

    def two_way(self, steps: Steps, memory: Memory) -> tuple[Memory, Float[Array, "b t n v"]]:
        """The same without causality: every query reads all keys, of which there may be another number."""
        query, key, value = self._prepared(steps, memory)
        before = _merged(memory)
        if self.name == "recurrent":
            nobody = jnp.zeros((*steps.key.shape[:2], 0, steps.key.shape[3]), steps.key.dtype)
            after = _merged(self.causal(steps._replace(query=nobody), memory)[0])
        else:
            after = before + self._product("msr,msv->mrv", key, value)
        if self.name == "parallel":
            weights = self._product("mir,mjr->mij", query, key)
            output = self._product("mij,mjv->miv", weights, value) + self._product("mir,mrv->miv", query, before)
        else:
            output = self._product("mir,mrv->miv", query, after)
        return after.reshape(memory.shape), self._finished(output, steps)

    def _by_pairs(self, memory: Memory, steps: Steps) -> tuple[Memory, Array]:
        """A chunk by products: what its steps read of each other, what they read of the memory, what they add to it."""
        query, key, value = self._prepared(steps, memory)
        before = _merged(memory)
        length = key.shape[1]
        kept = before
        if steps.log_decay is None:
            weights = decays.lower(self._product("mir,mjr->mij", query, key))
        else:
            sums = decays.sums(_heads_first(steps.log_decay))
            if sums.rest.ndim == 2:
                weights = self._product("mir,mjr->mij", query, key) * decays.between(sums, query.shape[1])
            else:
                weights = decays.featurewise_pairs(query, key, sums, self.precision)
            since_start, until_end, through = decays.edges(sums)
            query = query * jnp.tile(since_start, (1, query.shape[1] // max(length, 1), 1))
            key, kept = key * until_end, before * through
        output = self._product("mij,mjv->miv", weights, value) + self._product("mir,mrv->miv", query, before)
        after = kept + self._product("mjr,mjv->mrv", key, value)
        return after.reshape(memory.shape), self._finished(output, steps)

    def _token_by_token(self, memory: Memory, steps: Steps) -> tuple[Memory, Array]:
        """A chunk by the definition."""

        def step(memory: Array, token: tuple[Array, Array, Array, Array | None]) -> tuple[Array, Array]:
            query, key, value, log_decay = token
            if log_decay is not None:
                memory = memory * jnp.exp(log_decay)
            memory = memory + key[:, :, None] * value[:, None, :]
            return memory, self._product("mgr,mrv->mgv", query, memory)

        query, key, value = self._prepared(steps, memory)
        query = query.reshape(key.shape[0], query.shape[1] // max(key.shape[1], 1), *key.shape[1:])
        log_decay = None if steps.log_decay is None else _heads_first(steps.log_decay)
        if log_decay is not None:
            by_feature = log_decay if log_decay.ndim == 3 else log_decay[..., None]
            log_decay = jnp.moveaxis(by_feature, 1, 0)[..., None]
        tokens = (jnp.moveaxis(query, 2, 0), jnp.moveaxis(key, 1, 0), jnp.moveaxis(value, 1, 0), log_decay)
        after, outputs = lax.scan(step, _merged(memory), tokens)
        return after.reshape(memory.shape), self._finished(jnp.moveaxis(outputs, 0, 2), steps)

    def _product(self, subscripts: str, *arrays: Array) -> Array:
        return jnp.einsum(subscripts, *arrays, precision=self.precision)

    def _prepared(self, steps: Steps, memory: Memory) -> tuple[Array, Array, Array]:
        """Query `[M, G · C, R]`, key `[M, C, R]` and value `[M, C, V]` in the memory's dtype; M: items and heads."""
        query, key, value = (x.astype(memory.dtype) for x in steps[:3])
        if self.features is not None:
            query, key = self.features(query), self.features(key)
        if steps.counted is not None:
            key = jnp.where(steps.counted[..., None, None], key, 0)
        query, key, value = map(_heads_first, (query, key, value))
        group = steps.query.shape[2] // max(steps.key.shape[2], 1)
        query = query.reshape(key.shape[0], group * query.shape[1], query.shape[2])
        if self.normalize:
            value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
        return query, key, value

    def _finished(self, output: Array, steps: Steps) -> Float[Array, "b c n v"]:
        """Outputs `[M, G · C, V]` or `[M, G, C, V]` with the axes of the query; normalised, and in its dtype."""
        if self.normalize:
            weight = output[..., -1:]
            empty = weight == 0
            output = jnp.where(empty, 0, output[..., :-1] / jnp.where(empty, 1, weight))
        batch, length, heads = steps.query.shape[:3]
        output = output.reshape(batch, heads, length, output.shape[-1])
        return jnp.swapaxes(output, 1, 2).astype(steps.query.dtype)


def choose_chunk(num_features: int, value_width: int) -> int:
    """The power of 2 for which pairs within a chunk cost about what its reading and writing of the memory costs."""
    balanced = 2 * num_features * value_width / max(num_features + value_width, 1)
    return 2 ** min(max(round(math.log2(max(balanced, 1))), 4), 8)


def _merged(memory: Memory) -> Float[Array, "m r w"]:
    return memory.reshape(memory.shape[0] * memory.shape[1], *memory.shape[2:])


def _heads_first(x: Float[Array, "b c k ..."]) -> Float[Array, "m c ..."]:
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1], *x.shape[3:])


def _over_chunks(body: Body, steps: Steps, memory: Memory, chunk: int) -> tuple[Memory, Array]:
    batch, length = steps.query.shape[:2]
    count = -(-length // chunk)
    alone = batch == 1  # then chunks already lie one after the other: a transpose would be a copy of all

    def cut(x: Array) -> Array:
        """`[B, T, ...]` to `[chunks, B, chunk, ...]`; zeros past the end add nothing and do not decay."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        if alone:
            return x.reshape(count, chunk, *x.shape[2:])
        return jnp.swapaxes(x.reshape(batch, count, chunk, *x.shape[2:]), 0, 1)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # a loop keeps the two passes apart
    def step(memory: Memory, chunk: Steps) -> tuple[Memory, Array]:
        memory, output = body(memory, jax.tree.map(lambda x: x[None], chunk) if alone else chunk)
        return memory, output[0] if alone else output

    memory, outputs = lax.scan(step, memory, jax.tree.map(cut, steps))
    outputs = outputs if alone else jnp.swapaxes(outputs, 0, 1)
    return memory, outputs.reshape(batch, count * chunk, *outputs.shape[-2:])[:, :length]
