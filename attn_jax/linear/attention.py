"""Linear attention: features of queries and keys in place of the softmax, at a cost linear in length."""

import dataclasses
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax.numpy as jnp
from jax import lax

from attn_jax import checks
from attn_jax.linear.feature_maps import FeatureMap, RandomFeatures, get_feature_map
from attn_jax.linear.recurrence import LinearState, RecurrenceOptions, check_inputs, counted_steps, recur
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, feature_map: str | FeatureMap | RandomFeatures = "elu",
    is_causal: bool = False, normalize: bool = True, query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None, key_mask: ArrayLike | None = None,
    return_state: Literal[False] = False, **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, feature_map: str | FeatureMap | RandomFeatures = "elu",
    is_causal: bool = False, normalize: bool = True, query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None, key_mask: ArrayLike | None = None,
    return_state: Literal[True], **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def linear_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    *,
    feature_map: str | FeatureMap | RandomFeatures = "elu",
    is_causal: bool = False,
    normalize: bool = True,
    form: str = "chunkwise",
    chunk_size: int | None = None,
    query_seq_lengths: Int[ArrayLike, "*b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "*b"] | None = None,
    key_mask: Bool[ArrayLike, "*b s"] | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, LinearState]:
    """Attention whose weights are φ(q)·φ(k) for a feature map φ, so that no weight is ever needed by itself.

        output_t = Σ_s (φ(q_t)·φ(k_s)) v_s / Σ_s φ(q_t)·φ(k_s),   s ≤ t if causal

    No scale is applied, but for `RandomFeatures`, which estimate exp(q·k / √H). A query whose denominator is 0 (all its
    features are, or all keys') gets output 0 and no gradient; no epsilon shrinks the others. Features that are
    exponentials are shifted, queries by their own largest, which cancels; keys by the largest so far of their item and
    head (of all counted keys if not causal), as a decay of what came before. So neither other items nor later keys
    change an output.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`, S = T if causal; query head n reads key/value head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        feature_map: "elu" (elu(x) + 1), "relu", "exp", "squared", "identity" (which cannot be normalised),
            `RandomFeatures` (see `draw_features`), or a `FeatureMap`.
        is_causal: no key behind the query's position.
        normalize: divide by the sum of the weights.
        form: "chunkwise", "recurrent" or "parallel", see `linear_recurrence`.
        chunk_size: steps of a chunk; None to choose.
        query_seq_lengths: int `[*B]`; queries past it give 0.
        key_value_seq_lengths: int `[*B]`; keys past it are not seen.
        key_mask: boolean `[*B, S]`, True = counts; combined with the lengths by AND.
        initial_state: of an earlier call, to be continued.
        return_state: also return the state after the last step.
        precision: of matrix products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_state` also the `LinearState`.

    Raises:
        ValueError: a wrong shape or value, or a feature map that is not positive with a normaliser.
        TypeError: a wrong type or dtype.

    Reference: Katharopoulos et al. 2020, equations 5 and 9; Choromanski et al. 2021 (random features).

    >>> x = jnp.zeros((4, 1, 1))
    >>> linear_attention(x, x, jnp.array([1.0, 3.0, 5.0, 7.0])[:, None, None], is_causal=True)[:, 0, 0].tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    query, key, value = check_inputs(query, key, value, is_causal=is_causal)
    normalize = checks.boolean("normalize", normalize)
    features = get_feature_map(feature_map, query.shape[-1], normalize=normalize)
    queries = counted_steps("query_seq_lengths", query_seq_lengths, query.shape[:-2])
    keys = counted_steps("key_value_seq_lengths", key_value_seq_lengths, key.shape[:-2], key_mask)
    if queries is not None:
        query = jnp.where(queries[..., None, None], query, 0)
    if keys is not None:
        key = jnp.where(keys[..., None, None], key, 0)
    options = {
        "is_causal": is_causal, "form": form, "chunk_size": chunk_size, "normalize": normalize, "precision": precision,
    }  # fmt: skip
    if isinstance(features, FeatureMap):
        output, state = recur(query, key, value, None, keys, initial_state, **options, features=features.function)
    else:
        given = _shift(initial_state, (*key.shape[:-3], key.shape[-2]), feature_map)
        dtype = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
        by_query, by_key = (features.logarithm(x.astype(dtype)) for x in (query, key))
        mapped = shifted(by_query, by_key, keys, given, is_causal=is_causal)
        if initial_state is not None:
            initial_state = mapped.rescaled(initial_state)
        output, state = recur(mapped.query, mapped.key, value, mapped.log_decay, keys, initial_state, **options)
        if not normalize:
            output = output * jnp.exp(mapped.log_scale)
        state = dataclasses.replace(state, shift=mapped.shift)
    if queries is not None:
        output = jnp.where(queries[..., None, None], output, 0)
    output = output.astype(query.dtype)
    return (output, state) if checks.boolean("return_state", return_state) else output


def _shift(state: LinearState | None, shape: tuple[int, ...], feature_map: Any) -> Array | None:
    """The shift of a state before, if there is one, or an error."""
    if state is None:
        return None
    if not isinstance(state, LinearState):
        raise TypeError(f"initial_state must be a LinearState, got {type(state).__name__}")
    if state.shift is None:
        name = feature_map if isinstance(feature_map, str) else type(feature_map).__name__
        raise ValueError(f"initial_state.shift must be an array for the exponentials of {name}, got None")
    checks.shape("initial_state.shift", state.shift, shape, "[*B, K]")
    checks.shape("initial_state.memory", state.memory, (*shape, *state.memory.shape[-2:]), "[*B, K, R, V]")
    return state.shift


class Mapped(NamedTuple):
    """Features that are exponentials, and what was taken out of them.

    Attributes:
        query: `[*B, T, N, R]`.
        key: `[*B, S, K, R]`.
        log_decay: `[*B, S, K]`, how the largest key so far grew, as a decay of what came before; None if not causal.
        log_scale: `[*B, T, N, 1]`, the logarithm of what outputs without a normaliser are to be multiplied by.
        before: `[*B, K]`, what the state before is to be multiplied by: 1 where the decays do it.
        shift: `[*B, K]`, of the state after.
    """

    query: Array
    key: Array
    log_decay: Array | None
    log_scale: Array
    before: Array
    shift: Array

    def rescaled(self, state: LinearState) -> LinearState:
        """The state before, relative to the same shift as the keys."""
        normalizer = None if state.normalizer is None else state.normalizer * self.before[..., None]
        return LinearState(state.memory * self.before[..., None, None], normalizer)


def shifted(
    query: Float[Array, "*b t n r"],
    key: Float[Array, "*b s k r"],
    keys: Bool[Array, "*b s"] | None,
    start: Float[Array, "*b k"] | None,
    *,
    is_causal: bool,
) -> Mapped:
    """Exponentials of log-features, each query relative to its own largest, keys to the largest counted so far."""
    lowest = jnp.finfo(key.dtype).min
    if keys is not None:
        key = jnp.where(keys[..., None, None], key, -jnp.inf)
    by_query = lax.stop_gradient(jnp.max(query, axis=-1, keepdims=True))
    by_key = jnp.maximum(lax.stop_gradient(jnp.max(key, axis=-1)), lowest)  # [*B, S, K]
    start = jnp.full((*key.shape[:-3], key.shape[-2]), lowest, key.dtype) if start is None else start
    start = lax.stop_gradient(start)
    group = query.shape[-2] // key.shape[-2]
    if not is_causal:
        shift = jnp.maximum(jnp.max(by_key, axis=-2, initial=lowest), start)
        log_scale = by_query + jnp.repeat(shift, group, axis=-1)[..., None, :, None]
        key = jnp.exp(key - shift[..., None, :, None])
        return Mapped(jnp.exp(query - by_query), key, None, log_scale, jnp.exp(start - shift), shift)
    largest = lax.cummax(jnp.concatenate([start[..., None, :], by_key], axis=-2), axis=key.ndim - 3)
    shift = largest[..., 1:, :]
    log_scale = by_query + jnp.repeat(shift, group, axis=-1)[..., None]
    return Mapped(
        jnp.exp(query - by_query),
        jnp.exp(key - shift[..., None]),
        largest[..., :-1, :] - shift,
        log_scale,
        jnp.ones_like(start),
        largest[..., -1, :],
    )
