"""The recurrence that linear attention, retention and state spaces share, in three forms that agree.

    S_t = a_t ⊙ S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t

S is a memory of fixed size `[R, V]`: features of a key by the width of a value. Decays a_t come as logarithms, and
only differences of their running sums are exponentiated, from a later step to an earlier one: never above 0, so that
no power overflows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_jax import checks
from attn_jax.linear.forms import FORMS, Form, Steps
from attn_jax.typing import Array, ArrayLike, Bool, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearState:
    """What is left of the tokens so far, all that decoding needs: its size does not depend on how many there were.

    Attributes:
        memory: `[*B, K, R, V]`, the decayed sum of k vᵀ; N heads instead of K where each query head has its decay.
        normalizer: `[*B, K, R]`, the same sum of k; None where outputs are not normalised.
        shift: `[*B, K]`, the largest log-feature of a key so far, which `memory` is relative to; None but for
            features that are exponentials (see `linear_attention`).

    >>> from attn_jax.linear import linear_recurrence
    >>> ones = jnp.ones((2, 1, 1))
    >>> _, state = linear_recurrence(ones, ones, ones, return_state=True)
    >>> state.memory.tolist()
    [[[2.0]]]
    >>> linear_recurrence(ones, ones, ones, initial_state=state)[:, 0, 0].tolist()
    [3.0, 4.0]
    """

    memory: Float[Array, "*b k r v"]
    normalizer: Float[Array, "*b k r"] | None = None
    shift: Float[Array, "*b k"] | None = None

    @classmethod
    def empty(
        cls,
        batch: tuple[int, ...],
        num_heads: int,
        num_features: int,
        value_width: int,
        *,
        normalize: bool = False,
        shifted: bool = False,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> "LinearState":
        """The state before the first token: zeros; `shifted` for features that are exponentials."""
        shape = (*batch, num_heads, num_features)
        return cls(
            jnp.zeros((*shape, value_width), dtype),
            jnp.zeros(shape, dtype) if normalize else None,
            jnp.full(shape[:-1], jnp.finfo(dtype).min, dtype) if shifted else None,
        )


class RecurrenceOptions(TypedDict, total=False):
    """Options that all functions on the recurrence have."""

    form: str
    chunk_size: int | None
    initial_state: LinearState | None
    precision: lax.PrecisionLike


@overload
def linear_recurrence(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike | None = None, *, is_causal: bool = True,
    normalize: bool = False, key_mask: ArrayLike | None = None, return_state: Literal[False] = False,
    **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def linear_recurrence(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike | None = None, *, is_causal: bool = True,
    normalize: bool = False, key_mask: ArrayLike | None = None, return_state: Literal[True],
    **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def linear_recurrence(
    query: Float[ArrayLike, "*b t n r"],
    key: Float[ArrayLike, "*b s k r"],
    value: Float[ArrayLike, "*b s k v"],
    log_decay: ArrayLike | None = None,
    *,
    is_causal: bool = True,
    form: str = "chunkwise",
    chunk_size: int | None = None,
    normalize: bool = False,
    key_mask: Bool[ArrayLike, "*b s"] | None = None,
    initial_state: LinearState | None = None,
    return_state: bool = False,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, LinearState]:
    """Reads a decaying memory of keys and values, each query the one that its own key was just written to.

        output_t = Σ_{s≤t} (q_t · (k_s ⊙ Π_{s<r≤t} a_r)) v_s,   normalised: over the same sum without v_s

    Without causality every query reads the sum over all keys. Sums are at least float32. A query whose denominator
    is 0 gets output 0 and passes no gradient; no epsilon is added to any other. A masked key adds nothing, may hold
    anything, and its step does not decay. A sequence cut anywhere, its state carried, gives what one call gives.

    Args:
        query: `[*B, T, N, R]`.
        key: `[*B, S, K, R]`, S = T if causal; query head n reads key/value head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        log_decay: ln a, at most 0 and finite: `[N]`, `[*B, T, N]` or, per feature, `[*B, T, N, R]`; K heads instead of
            N if query heads of a group share it, and the memory. None for no decay. Causal only.
        is_causal: no key behind the query's position.
        form: "chunkwise" (products within chunks, a loop over them: time linear in T), "recurrent" (token by token)
            or "parallel" (every pair at once).
        chunk_size: steps of a chunk; None to choose. The other forms do not read it.
        normalize: divide by the sum of the weights; meant for features that are not negative.
        key_mask: boolean `[*B, S]`, True = counts.
        initial_state: of an earlier call, to be continued.
        return_state: also return the state after the last step.
        precision: of matrix products, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_state` also the `LinearState`.

    Raises:
        ValueError: a wrong shape or value, or a decay without causality.
        TypeError: a wrong type or dtype.

    Reference: Katharopoulos et al. 2020, section 3; with decays and chunks: Yang et al. 2024 (gated linear attention),
    section 3; Dao & Gu 2024, section 6.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((4, 1, 1))
    >>> linear_recurrence(ones, ones, ones, jnp.log(jnp.array([0.5])))[:, 0, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    query, key, value = check_inputs(query, key, value, is_causal=is_causal)
    if log_decay is not None:
        log_decay = check_decay(log_decay, query.shape, key.shape[-2], is_causal=is_causal)
    counted = counted_steps("key_mask", None, key.shape[:-2], key_mask)
    output, state = recur(
        query, key, value, log_decay, counted, initial_state, is_causal=is_causal, form=form, chunk_size=chunk_size,
        normalize=normalize, precision=precision,
    )  # fmt: skip
    return (output, state) if checks.boolean("return_state", return_state) else output


def recur(
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array | None,
    counted: Bool[Array, "*b s"] | None,
    state: LinearState | None,
    *,
    is_causal: bool,
    form: str,
    chunk_size: int | None,
    normalize: bool,
    precision: lax.PrecisionLike,
    features: Callable[[Array], Array] | None = None,
) -> tuple[Array, LinearState]:
    """`linear_recurrence` on inputs that were checked; `features` makes features of queries and keys on the way."""
    checks.one_of("form", form, FORMS)
    chunk_size = None if chunk_size is None else checks.positive_int("chunk_size", chunk_size)
    normalize = checks.boolean("normalize", normalize)
    dtype = jnp.promote_types(jnp.result_type(query, key, value), jnp.float32)
    batch, length, rank = query.shape[:-3], key.shape[-3], query.ndim
    if log_decay is not None:
        log_decay = log_decay.astype(dtype)
        if log_decay.ndim == 1:
            log_decay = jnp.broadcast_to(log_decay, (*batch, length, *log_decay.shape))
        if log_decay.shape[rank - 2] != key.shape[-2]:  # each query head has a memory of its own
            key, value = (jnp.repeat(x, query.shape[-2] // key.shape[-2], axis=-2) for x in (key, value))
    if counted is not None:
        key, value = (jnp.where(counted[..., None, None], x, 0) for x in (key, value))
        if log_decay is not None:
            log_decay = jnp.where(counted.reshape(*counted.shape, *(1,) * (log_decay.ndim - rank + 2)), log_decay, 0)
    num_features = query.shape[-1] if features is None else jax.eval_shape(features, key).shape[-1]
    shape = (*batch, key.shape[-2], num_features, value.shape[-1])
    if state is None:
        state = LinearState.empty(batch, *shape[-3:], normalize=normalize, dtype=dtype)
    memory = _joined(state, shape, normalize=normalize).astype(dtype)

    def flat(x: Array) -> Array:
        """The batch as one axis."""
        return x.reshape(math.prod(batch), *x.shape[len(batch) :])

    if features is not None and counted is None:
        counted = jnp.ones((*batch, length), bool)  # what fills the last chunk does not
    steps = Steps(query, key, value, log_decay, None if features is None else counted)
    computed = Form(form, chunk_size, normalize, precision, features)
    run = computed.causal if is_causal else computed.two_way
    after, output = run(jax.tree.map(flat, steps), flat(memory))
    output, after = output.reshape(*query.shape[:-1], shape[-1]), after.reshape(memory.shape)
    if not normalize:
        return output, LinearState(after)
    return output, LinearState(after[..., :-1], after[..., -1])


def check_inputs(query: ArrayLike, key: ArrayLike, value: ArrayLike, *, is_causal: bool) -> tuple[Array, Array, Array]:
    """The three as floating arrays of shapes that go together, or an error that names the one that does not."""
    query, key, value = (
        checks.floating_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    checks.minimum_rank("query", query, 3, "[*B, T, N, H]")
    batch, length, width = query.shape[:-3], query.shape[-3], query.shape[-1]
    checks.rank("key", key, query.ndim, "[*B, S, K, H]")
    checks.shape("key", key, (*batch, *key.shape[-3:-1], width), "[*B, S, K, H]")
    checks.rank("value", value, query.ndim, "[*B, S, K, V]")
    checks.shape("value", value, (*key.shape[:-1], value.shape[-1]), "[*B, S, K, V]")
    checks.grouped_heads(query.shape[-2], key.shape[-2])
    if checks.boolean("is_causal", is_causal) and key.shape[-3] != length:
        raise ValueError(
            f"key must have as many steps as query where is_causal is True, got {key.shape[-3]} for {length}"
        )
    return query, key, value


def counted_steps(
    name: str, lengths: ArrayLike | None, shape: tuple[int, ...], mask: ArrayLike | None = None
) -> Bool[Array, "*b s"] | None:
    """Which steps `[*B, S]` count, by lengths `[*B]` and by `key_mask`; None if all do."""
    if mask is not None:
        mask = checks.as_array("key_mask", mask)
        if mask.dtype != bool:
            raise TypeError(f"key_mask must have dtype bool, got {mask.dtype}")
        checks.shape("key_mask", mask, shape, "[*B, S]")
    if lengths is None:
        return mask
    lengths = checks.wide_integers(name, lengths)
    if lengths.ndim:
        checks.shape(name, lengths, shape[:-1], "[] or [*B]")
    checks.within(name, lengths, 0, shape[-1])
    steps = lax.broadcasted_iota(lengths.dtype, shape, len(shape) - 1)
    counted = steps < jnp.broadcast_to(lengths, shape[:-1])[..., None]
    return counted if mask is None else counted & mask


def check_decay(log_decay: ArrayLike, query: tuple[int, ...], num_kv_heads: int, *, is_causal: bool) -> Array:
    """`log_decay` of one of its shapes, never positive."""
    log_decay = checks.floating_array("log_decay", log_decay)
    if not is_causal:
        raise ValueError("log_decay must be None where is_causal is False: without an order of steps nothing is older")
    *front, num_heads, width = query
    ranks = {1: ((), ()), len(query) - 1: (front, ()), len(query): (front, (width,))}
    allowed = [(*before, n, *after) for before, after in ranks.values() for n in (num_heads, num_kv_heads)]
    if log_decay.shape not in allowed:
        expected = " or ".join(str(shape) for shape in dict.fromkeys(allowed))
        raise ValueError(
            f"log_decay must have shape [N], [*B, T, N] or [*B, T, N, R], with N or K heads, {expected}; "
            f"got {log_decay.shape}"
        )
    if checks.is_concrete(log_decay) and log_decay.size:
        values = np.asarray(log_decay)
        if not (np.isfinite(values).all() and values.max() <= 0):
            raise ValueError(
                f"log_decay must be finite and at most 0, for decays in (0, 1], "
                f"got values in {values.min()}..{values.max()}"
            )
    return log_decay


def _joined(state: LinearState, shape: tuple[int, ...], *, normalize: bool) -> Array:
    """Memory and normaliser in one, `[*B, K, R, V + 1]`, or an error that says which of the two does not fit."""
    if not isinstance(state, LinearState):
        raise TypeError(f"initial_state must be a LinearState, got {type(state).__name__}")
    if (state.normalizer is not None) != normalize:
        given = "None" if state.normalizer is None else "an array"
        raise ValueError(
            f"initial_state.normalizer must be {'an array' if normalize else 'None'} where normalize is {normalize}, "
            f"got {given}"
        )
    if state.shift is not None:
        raise ValueError("initial_state.shift must be None where features are not exponentials, got an array")
    checks.shape("initial_state.memory", state.memory, shape, "[*B, K, R, V]")
    if state.normalizer is None:
        return state.memory
    checks.shape("initial_state.normalizer", state.normalizer, shape[:-1], "[*B, K, R]")
    return jnp.concatenate([state.memory, state.normalizer[..., None].astype(state.memory.dtype)], axis=-1)
