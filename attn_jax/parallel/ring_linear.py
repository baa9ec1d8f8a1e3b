"""Linear mechanisms over a sequence that is spread over devices: what goes along the ring is their state.

A stretch of the sequence lets the state before it fade by a factor and adds a term of its own, and two stretches in a
row do the same. So each device works out what its own stretch does, from an empty state; a scan over the devices tells
it the state before its stretch; and it starts again from there. The size of a state does not depend on any length.

    1  factor, term = of the own stretch                     each device by itself
    2  before       = the stretches before, joined           log2(D) messages
    3  output       = of the own stretch, from `before` on   each device by itself

Without causality every query reads the sum of all terms.

Reference: Blelloch 1990 (the scan); Martin & Cundy 2018, section 2 (of linear recurrences).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from attn_jax import checks
from attn_jax.linear import FeatureMap, LinearState, RandomFeatures, linear_attention, linear_recurrence
from attn_jax.linear.recurrence import RecurrenceOptions, check_decay, check_inputs, counted_steps
from attn_jax.parallel import collectives
from attn_jax.parallel.parts import pad
from attn_jax.parallel.zigzag import Ring
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


@overload
def ring_recurrence(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike | None = None, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    is_causal: bool = True, normalize: bool = False, key_mask: ArrayLike | None = None,
    return_state: Literal[False] = False, **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def ring_recurrence(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, log_decay: ArrayLike | None = None, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    is_causal: bool = True, normalize: bool = False, key_mask: ArrayLike | None = None,
    return_state: Literal[True], **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def ring_recurrence(
    query: Float[ArrayLike, "*b t n r"],
    key: Float[ArrayLike, "*b s k r"],
    value: Float[ArrayLike, "*b s k v"],
    log_decay: ArrayLike | None = None,
    *,
    mesh: Mesh,
    axis_name: str | None,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    is_causal: bool = True,
    normalize: bool = False,
    key_mask: Bool[ArrayLike, "*b s"] | None = None,
    return_state: bool = False,
    **options: Unpack[RecurrenceOptions],
) -> Array | tuple[Array, LinearState]:
    """`attn_jax.linear_recurrence` on a mesh: the sequence along one axis, batch and heads along others.

    The same semantics for the same global arrays. Retention is this with the logarithm of its decay, a state space
    model with the decay that its input selects.

    Args:
        query: `[*B, T, N, R]`.
        key: `[*B, S, K, R]`.
        value: `[*B, S, K, V]`.
        log_decay, is_causal, normalize, key_mask, return_state, ...: as for `linear_recurrence`.
        mesh, axis_name, batch_axis, head_axis: as for `ring_attention`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_state` also the `LinearState`.

    Raises:
        ValueError, TypeError: as `linear_recurrence`; also for a mesh that the arrays do not fit.

    Reference: Martin & Cundy 2018, section 2.

    >>> from attn_jax.parallel import make_mesh
    >>> ones, mesh = jnp.ones((4, 1, 1)), make_mesh(sequence=jax.device_count())
    >>> decay = jnp.log(jnp.array([0.5]))
    >>> output = ring_recurrence(ones, ones, ones, decay, mesh=mesh, axis_name="sequence")
    >>> output[:, 0, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    query, key, value = check_inputs(query, key, value, is_causal=is_causal)
    if log_decay is not None:
        log_decay = check_decay(log_decay, query.shape, key.shape[-2], is_causal=is_causal)
    counted = counted_steps("key_mask", None, key.shape[:-2], key_mask)
    ring = Ring(mesh, axis_name, batch_axis, head_axis)
    steps = _Steps(query, key, value, log_decay, counted)
    output, state = _check_and_run(ring, linear_recurrence, steps, options, is_causal=is_causal, normalize=normalize)
    return (output, state) if checks.boolean("return_state", return_state) else output


@overload
def ring_linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    feature_map: str | FeatureMap | RandomFeatures = "elu", is_causal: bool = False, normalize: bool = True,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    key_mask: ArrayLike | None = None, return_state: Literal[False] = False, **options: Unpack[RecurrenceOptions],
) -> Array: ...  # fmt: skip


@overload
def ring_linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *,
    mesh: Mesh, axis_name: str | None, batch_axis: str | None = None, head_axis: str | None = None,
    feature_map: str | FeatureMap | RandomFeatures = "elu", is_causal: bool = False, normalize: bool = True,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    key_mask: ArrayLike | None = None, return_state: Literal[True], **options: Unpack[RecurrenceOptions],
) -> tuple[Array, LinearState]: ...  # fmt: skip


def ring_linear_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    *,
    mesh: Mesh,
    axis_name: str | None,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    feature_map: str | FeatureMap | RandomFeatures = "elu",
    is_causal: bool = False,
    normalize: bool = True,
    query_seq_lengths: Int[ArrayLike, "*b"] | None = None,
    key_value_seq_lengths: Int[ArrayLike, "*b"] | None = None,
    key_mask: Bool[ArrayLike, "*b s"] | None = None,
    return_state: bool = False,
    **options: Unpack[RecurrenceOptions],
) -> Array | tuple[Array, LinearState]:
    """`attn_jax.linear_attention` on a mesh: the sequence along one axis, batch and heads along others.

    The same semantics for the same global arrays.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        feature_map, is_causal, normalize, query_seq_lengths, return_state, ...: as for `linear_attention`.
        mesh, axis_name, batch_axis, head_axis: as for `ring_attention`.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_state` also the `LinearState`.

    Raises:
        ValueError, TypeError: as `linear_attention`; also for a mesh that the arrays do not fit.

    Reference: Katharopoulos et al. 2020, equation 9, for the state.

    >>> from attn_jax.parallel import make_mesh
    >>> x, mesh = jnp.zeros((4, 1, 1)), make_mesh(sequence=jax.device_count())  # all weights of a row are equal
    >>> value = jnp.array([1.0, 3.0, 5.0, 7.0])[:, None, None]
    >>> output = ring_linear_attention(x, x, value, mesh=mesh, axis_name="sequence", is_causal=True)
    >>> output[:, 0, 0].round(4).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """
    query, key, value = check_inputs(query, key, value, is_causal=is_causal)
    queries = counted_steps("query_seq_lengths", query_seq_lengths, query.shape[:-2])
    counted = counted_steps("key_value_seq_lengths", key_value_seq_lengths, key.shape[:-2], key_mask)
    if queries is not None:  # what they hold must reach no gradient
        query = jnp.where(queries[..., None, None], query, 0)
    drawn = feature_map if isinstance(feature_map, RandomFeatures) else None
    given = options if drawn is not None else {**options, "feature_map": feature_map}
    ring = Ring(mesh, axis_name, batch_axis, head_axis)
    steps = _Steps(query, key, value, None, counted, drawn)
    output, state = _check_and_run(ring, linear_attention, steps, given, is_causal=is_causal, normalize=normalize)
    if queries is not None:
        output = jnp.where(queries[..., None, None], output, 0)
    return (output, state) if checks.boolean("return_state", return_state) else output


class _Steps(NamedTuple):
    """The arrays of a call, or of the stretch that a device has of it."""

    query: Array
    key: Array
    value: Array
    log_decay: Array | None
    counted: Array | None
    feature_map: RandomFeatures | None = None


@dataclasses.dataclass(frozen=True)
class _Mechanism:
    """A linear mechanism with its options, which are static."""

    function: Callable[..., Any]
    is_causal: bool
    options: tuple[tuple[str, Any], ...]

    def __call__(self, steps: _Steps, state: LinearState | None) -> tuple[Array, LinearState]:
        query, key, value, log_decay, counted, feature_map = steps
        given = {"log_decay": log_decay, "feature_map": feature_map}
        given = {name: x for name, x in given.items() if x is not None} | dict(self.options)
        return self.function(
            query, key, value, key_mask=counted, initial_state=state, is_causal=self.is_causal, return_state=True,
            **given,
        )  # fmt: skip


def _check_and_run(
    ring: Ring, function: Callable[..., Any], steps: _Steps, options: Any, *, is_causal: bool, normalize: bool
) -> tuple[Array, LinearState]:
    options = {**options, "normalize": normalize}
    initial = options.pop("initial_state", None)
    static = ((name, tuple(x) if isinstance(x, list) else x) for name, x in sorted(options.items()))  # to be hashed
    mechanism = _Mechanism(function, is_causal, tuple(static))
    jax.eval_shape(mechanism, steps, initial)  # says what is wrong with a shape or an option
    ring.check_shares(steps.query, steps.key)
    return _run(ring, mechanism, steps, initial)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(ring: Ring, mechanism: _Mechanism, steps: _Steps, initial: LinearState | None) -> tuple[Array, LinearState]:
    """Fills up the sequence until all stretches are equal; the steps that are added do not count."""
    *batch, queries, _, _ = steps.query.shape
    keys = steps.key.shape[-3]
    all_queries, all_keys = (ring.devices * max(-(-length // ring.devices), 1) for length in (queries, keys))
    if all_keys != keys and steps.counted is None:
        steps = steps._replace(counted=jnp.ones((*batch, keys), bool))
    letters = _letters(steps, len(batch))
    lengths = {"t": all_queries, "k": all_keys}
    steps = jax.tree.map(lambda x, spelling: pad(x, spelling, lengths), steps, letters)
    of_state = _batch_letters(len(batch), "n")
    after = jax.eval_shape(mechanism, steps, None)[1]
    takes = letters, jax.tree.map(lambda _: of_state, initial)
    gives = letters.query, jax.tree.map(lambda _: of_state, after)
    run = jax.shard_map(
        lambda steps, initial: _on_device(ring, mechanism, steps, initial),
        mesh=ring.mesh,
        in_specs=jax.tree.map(ring.spec, takes),
        out_specs=jax.tree.map(ring.spec, gives),
        check_vma=False,  # the loops of a mechanism start from zeros that are the same everywhere
    )
    output, state = run(steps, initial)
    return jax.lax.slice_in_dim(output, 0, queries, axis=len(batch)), state


def _batch_letters(axes: int, *others: str) -> PartitionSpec:
    return PartitionSpec(*["b", *[None] * axes][:axes], *others)


def _letters(steps: _Steps, axes: int) -> Any:
    """Which axes the arrays have, spelled as in `parts.py`."""
    key, log_decay = _batch_letters(axes, "k", "n"), steps.log_decay
    by_name = {
        "query": _batch_letters(axes, "t", "n"),
        "key": key,
        "value": key,
        "log_decay": None if log_decay is None else PartitionSpec("n") if log_decay.ndim == 1 else key,
        "counted": None if steps.counted is None else _batch_letters(axes, "k"),
        "feature_map": jax.tree.map(lambda _: PartitionSpec(), steps.feature_map),
    }
    return _Steps(**by_name)


def _on_device(
    ring: Ring, mechanism: _Mechanism, steps: _Steps, initial: LinearState | None
) -> tuple[Array, LinearState]:
    """The outputs of this device's stretch, and the state after all of them."""
    if ring.devices == 1:
        return mechanism(steps, initial)
    me = collectives.device_index(ring.axis_name)
    start = _empty(jax.eval_shape(mechanism, steps, None)[1])
    if initial is not None:
        start = _where(me == 0, initial, start)
    _, own = mechanism(steps, start)  # whose outputs nobody reads: the compiler leaves them out
    if mechanism.is_causal:
        before = _before(ring, _Stretch(_fading(steps), own))
        output, after = mechanism(steps, _where(me == 0, start, before))
        last = me == ring.devices - 1
        return output, collectives.add_up(jax.tree.map(lambda x: jnp.where(last, x, 0), after), [ring.axis_name])
    after = _total(ring, own)
    nobody = steps._replace(key=steps.key[..., :0, :, :], value=steps.value[..., :0, :, :], counted=None)
    return mechanism(nobody, after)[0], after


class _Stretch(NamedTuple):
    """What some steps in a row do to a state: `state * exp(fading) + own`.

    Attributes:
        fading: `[*B, K, R or 1]`, the logarithm of what is left of the state before; None where all is.
        own: the state that they leave behind an empty one. With a shift, states fade by how it grows instead.
    """

    fading: Array | None
    own: LinearState


def _fading(steps: _Steps) -> Array | None:
    """The sum of the decays of the steps that count."""
    log_decay, counted, axes = steps.log_decay, steps.counted, steps.key.ndim - 3
    if log_decay is None:
        return None
    log_decay = log_decay.astype(jnp.promote_types(log_decay.dtype, jnp.float32))
    if log_decay.ndim == 1:
        log_decay = jnp.broadcast_to(log_decay, (*steps.key.shape[:-2], *log_decay.shape))
    if log_decay.ndim < steps.key.ndim:
        log_decay = log_decay[..., None]
    return log_decay.sum(axis=axes, where=None if counted is None else counted[..., None, None])


def _join(earlier: _Stretch, later: _Stretch) -> _Stretch:
    """Both in a row."""
    before, own, fading = earlier.own, later.own, later.fading
    if own.shift is not None:
        assert before.shift is not None
        shift = jnp.maximum(before.shift, own.shift)
        return _Stretch(None, _add(_moved(before, shift), _moved(own, shift)))
    if fading is None or earlier.fading is None:
        return _Stretch(None, _add(before, own))
    return _Stretch(earlier.fading + fading, _add(_scaled(before, jnp.exp(fading)), own))


def _before(ring: Ring, stretch: _Stretch) -> LinearState:
    """The state before this device's stretch: each round joins twice as many of those that end with it."""
    me, devices = collectives.device_index(ring.axis_name), range(ring.devices)

    def from_earlier(stretch: Any, hops: int) -> Any:
        return collectives.send(stretch, ring.axis_name, [device + hops for device in devices])

    hops = 1
    while hops < ring.devices:
        stretch = _where(me >= hops, _join(from_earlier(stretch, hops), stretch), stretch)
        hops *= 2
    return from_earlier(stretch.own, 1)


def _total(ring: Ring, own: LinearState) -> LinearState:
    """The sum of the states of all devices, on each of them."""
    if own.shift is not None:
        own = _moved(own, collectives.largest(jax.lax.stop_gradient(own.shift), ring.axis_name))
    summed = collectives.add_up(dataclasses.replace(own, shift=None), [ring.axis_name])
    return dataclasses.replace(summed, shift=own.shift)


def _moved(state: LinearState, shift: Array) -> LinearState:
    """The same state, relative to another shift."""
    assert state.shift is not None
    return dataclasses.replace(_scaled(state, jnp.exp(state.shift - shift)[..., None]), shift=shift)


def _scaled(state: LinearState, factor: Array) -> LinearState:
    normalizer = None if state.normalizer is None else state.normalizer * factor
    return dataclasses.replace(state, memory=state.memory * factor[..., None], normalizer=normalizer)


def _add(state: LinearState, other: LinearState) -> LinearState:
    """The sum of two states of one shift."""
    sums = jax.tree.map(jnp.add, dataclasses.replace(state, shift=None), dataclasses.replace(other, shift=None))
    return dataclasses.replace(sums, shift=state.shift)


def _empty(like: LinearState) -> LinearState:
    """The state before the first token, in the shapes of another."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    if zeros.shift is None:
        return zeros
    return dataclasses.replace(zeros, shift=jnp.full_like(zeros.shift, jnp.finfo(zeros.shift.dtype).min))


def _where(condition: Array | bool, tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)
