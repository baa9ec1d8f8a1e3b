"""Selective state spaces with a scalar decay per step and head, in the words of attention (SSD, Mamba-2)."""

from typing import Literal, Unpack, overload

from jax import lax

from attn_jax.linear.recurrence import LinearState, RecurrenceOptions, check_inputs, linear_recurrence
from attn_jax.linear.retention import without_padding
from attn_jax.typing import Array, ArrayLike, Float, Int


@overload
def state_space(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike, *,
    lengths: ArrayLike | None = None,
    return_state: Literal[False] = False, **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def state_space(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike, *,
    lengths: ArrayLike | None = None,
    return_state: Literal[True], **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def state_space(
    query: Float[ArrayLike, "*b t n r"],
    key: Float[ArrayLike, "*b t k r"],
    value: Float[ArrayLike, "*b t k v"],
    log_decay: Float[ArrayLike, "*b t n"],
    *,
    form: str = "chunkwise",
    chunk_size: int | None = None,
    lengths: Int[ArrayLike, "*b"] | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, LinearState]:
    """The state space model h_t = a_t h_{t−1} + Δ_t B_t x_tᵀ, y_t = C_tᵀ h_t, whose decay the input selects.

        output_t = Σ_{s≤t} (q_t·k_s) exp(Σ_{s<r≤t} log_decay_r) v_s

    with query = C, key = B, value = Δ x and log_decay = Δ A. The skip D x, the short convolution and the gate belong
    to the module around it.

    Args:
        query: C, `[*B, T, N, R]`, R the width of the state.
        key: B, `[*B, T, K, R]`; query head n reads key/value head `n // (N // K)`.
        value: Δ x, `[*B, T, K, V]`.
        log_decay: `[*B, T, N]`, finite and at most 0; K heads for groups that share theirs.
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

    Reference: Dao & Gu 2024 (state space duality), sections 2 and 6; Gu & Dao 2023.

    >>> import jax.numpy as jnp
    >>> ones, decay = jnp.ones((4, 1, 1)), jnp.array([[1.0], [1.0], [0.25], [1.0]])  # the third forgets
    >>> state_space(ones, ones, ones, jnp.log(decay))[:, 0, 0].round(4).tolist()
    [1.0, 2.0, 1.5, 2.5]
    """
    query, key, value = check_inputs(query, key, value, is_causal=True)
    query, counted = without_padding(query, lengths)
    return linear_recurrence(
        query, key, value, log_decay, form=form, chunk_size=chunk_size, key_mask=counted,
        initial_state=initial_state, return_state=return_state, precision=precision,
    )  # fmt: skip
