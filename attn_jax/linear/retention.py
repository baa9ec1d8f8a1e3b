"""Retention: linear attention without normaliser or feature map, whose memory fades at a fixed rate per head."""

from typing import Literal, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax import checks
from attn_jax.linear.recurrence import LinearState, RecurrenceOptions, check_inputs, counted_steps, linear_recurrence
from attn_jax.typing import Array, ArrayLike, Float, Int


@overload
def retention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_state: Literal[False] = False, **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def retention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    return_state: Literal[True], **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def retention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b t k h"],
    value: Float[ArrayLike, "*b t k v"],
    *,
    decay: Float[ArrayLike, " n"] | None = None,
    form: str = "chunkwise",
    chunk_size: int | None = None,
    lengths: Int[ArrayLike, "*b"] | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, LinearState]:
    """Retention: what a query reads of a key fades by a constant factor a step.

        output = (Q Kᵀ ⊙ D) V,   D_ts = decay^(t−s) for s ≤ t, else 0

    Exactly this: no scale, no rotation, no norm.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, T, K, H]`; query head n reads key/value head `n // (N // K)`.
        value: `[*B, T, K, V]`.
        decay: `[N]` in (0, 1], or `[K]` for groups that share theirs; None for `1 − 2^(−5−n)`.
        form: "chunkwise", "recurrent" or "parallel", see `linear_recurrence`.
        chunk_size: steps of a chunk; None to choose.
        lengths: int `[*B]`; steps past it give 0, and change nothing in the state.
        initial_state: of an earlier call, to be continued.
        return_state: also return the state after the last step.
        precision: of matrix products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_state` also the `LinearState`.

    Raises:
        ValueError: a wrong shape or value.
        TypeError: a wrong type or dtype.

    Reference: Sun et al. 2023 (RetNet), equations 5 to 7.

    >>> ones = jnp.ones((3, 1, 1))
    >>> retention(ones, ones, ones, decay=jnp.array([0.5]))[:, 0, 0].tolist()
    [1.0, 1.5, 1.75]
    """
    query, key, value = check_inputs(query, key, value, is_causal=True)
    query, counted = without_padding(query, lengths)
    return linear_recurrence(
        query, key, value, _log_decay(decay, query, key), form=form, chunk_size=chunk_size, key_mask=counted,
        initial_state=initial_state, return_state=return_state, precision=precision,
    )  # fmt: skip


def without_padding(query: Array, lengths: ArrayLike | None) -> tuple[Array, Array | None]:
    """The query with zeros past the lengths, whose outputs are 0 then, and which steps count."""
    counted = counted_steps("lengths", lengths, query.shape[:-2])
    return (query if counted is None else jnp.where(counted[..., None, None], query, 0)), counted


def _log_decay(decay: ArrayLike | None, query: Array, key: Array) -> Array:
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    if decay is None:
        heads = np.arange(query.shape[-2], dtype=np.float64)
        return jnp.asarray(np.log1p(-(2.0 ** (-5 - heads))), dtype)
    decay = checks.floating_array("decay", decay)
    checks.rank("decay", decay, 1, "[N] or [K]")
    if decay.shape[0] not in (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"decay must have shape [N] = ({query.shape[-2]},) or [K] = ({key.shape[-2]},), got {decay.shape}"
        )
    if checks.is_concrete(decay):
        values = np.asarray(decay)
        if not ((values > 0) & (values <= 1)).all():
            raise ValueError(f"decay must lie in (0, 1], got values in {values.min()}..{values.max()}")
    return jnp.log(decay.astype(dtype))
