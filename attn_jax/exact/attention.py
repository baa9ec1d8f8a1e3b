"""The one entry to exact softmax attention, and the choice of who computes it.

Every implementation has one semantics. One that cannot honour an argument says so and names those that can; nothing
falls back in silence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, Unpack, cast, overload

import jax
import jax.numpy as jnp

from attn_jax import biases, checks, masks
from attn_jax.exact import blockwise, dense
from attn_jax.exact.arguments import AttentionOptions, Problem, only_attention_options, prepare
from attn_jax.exact.kernels import adapter
from attn_jax.exact.tiles import Blockwise
from attn_jax.typing import Array, ArrayLike, Float

Mask = masks.Mask | ArrayLike | None
Bias = biases.Bias | ArrayLike | None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation runs, why, and why each other one could not.

    Attributes:
        implementation: its name, as `dot_product_attention` takes it.
        reason: why this one.
        refused: per implementation that cannot do the problem, what stands in its way.

    >>> import jax.numpy as jnp
    >>> from attn_jax import choose_implementation
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> choice = choose_implementation(x, x, x, is_causal=True)
    >>> choice.implementation, choice.reason
    ('dense', '4 queries by 4 keys are few: one pass will do')
    >>> choice.refused["cudnn"]
    'it takes float16 and bfloat16, got float32'
    """

    implementation: str
    reason: str
    refused: dict[str, str]


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Bias = None, mask: Mask = None, *,
    dropout_rate: float = 0.0, dropout_rng: ArrayLike | None = None, implementation: str | Blockwise | None = None,
    return_residual: Literal[False] = False, **options: Unpack[AttentionOptions],
) -> Array: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: Bias = None, mask: Mask = None, *,
    dropout_rate: float = 0.0, dropout_rng: ArrayLike | None = None, implementation: str | Blockwise | None = None,
    return_residual: Literal[True], **options: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...  # fmt: skip


def dot_product_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    bias: Bias = None,
    mask: Mask = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: int | ArrayLike = 0,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | Blockwise | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Softmax attention: each query fetches the values of the keys that it matches.

        output = softmax(cap(scale · q·k + bias), over the keys the mask allows) · value

    A superset of `jax.nn.dot_product_attention`. Masks, `is_causal`, windows and lengths combine by AND. A query
    that sees nothing gets output 0. A key that nobody may see reaches neither outputs nor gradients, whatever it
    holds. Logits, softmax and sums are at least float32.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; query head n reads key/value head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        bias: added to the scaled logits: `[T, S]`, or of full rank and broadcastable to `[*B, N, T, S]`, or one of
            `attn_jax.biases`. `-inf` means masked.
        mask: True = may attend: boolean, shaped like a bias, or one of `attn_jax.masks`.
        scale: a number, or one per head `[N]`; None for `1/sqrt(H)`.
        is_causal: no key behind the query's position.
        query_seq_lengths: int `[*B]`; queries past it give 0.
        key_value_seq_lengths: int `[*B]`; keys past it are not seen.
        local_window_size: `(left, right)`, both ends included; an int is both.
        query_offset: int, or int `[*B]`: query i sits at position `query_offset + i`.
        query_positions: int `[T]` or `[*B, T]`, instead of an offset; -1 is an empty slot.
        key_positions: int `[S]` or `[*B, S]`; None for 0..S-1; -1 is an empty slot.
        logits_soft_cap: c in `c · tanh(x / c)`, positive and finite.
        sinks: `[N]`, per query head a logit that joins the denominator and fetches nothing.
        dropout_rate: of weights, in [0, 1); kept ones are divided by `1 - rate`.
        dropout_rng: the key of dropout, needed where the rate is positive.
        precision: of the two matrix products, as in `jax.lax.dot_general`.
        implementation: "dense", "blockwise", "pallas", "xla", "cudnn", `Blockwise(queries=..., keys=...)` for tiles
            of a chosen size, or None to choose (see `choose_implementation`).
        return_residual: also return the log-sum-exp of the logits.

    Returns:
        `[*B, T, N, V]` in the query's dtype; with `return_residual` also the log-sum-exp `[*B, T, N]`: natural
        logarithm, without the sink, at least float32, differentiable, `-inf` where nothing is seen.

    Raises:
        ValueError: a wrong shape or value, or an argument that the implementation asked for cannot honour.
        TypeError: a wrong type or dtype.

    Reference: Vaswani et al. 2017, equation 1; grouped queries: Ainslie et al. 2023; soft cap: Gemma Team 2024.

    >>> import jax.numpy as jnp
    >>> key, value = 20 * jnp.eye(2)[:, None, :], jnp.array([[[1.0]], [[2.0]]])  # two tokens, one head
    >>> dot_product_attention(key[::-1], key, value)[:, 0, 0].tolist()  # a query like a key fetches its value
    [2.0, 1.0]
    >>> dot_product_attention(key[::-1], key, value, is_causal=True)[:, 0, 0].tolist()  # the first sees only the first
    [1.0, 1.0]
    """
    problem = prepare(
        query, key, _required("value", value), bias, mask,
        scale=scale, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size, query_offset=query_offset,
        query_positions=query_positions, key_positions=key_positions, logits_soft_cap=logits_soft_cap, sinks=sinks,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng, precision=precision,
    )  # fmt: skip
    choice = _choose(problem, implementation, checks.boolean("return_residual", return_residual))
    if isinstance(implementation, Blockwise):
        output, logsumexp = blockwise.attention(problem, implementation)
    else:
        output, logsumexp = IMPLEMENTATIONS[choice.implementation].run(problem)
    if not return_residual:
        return output
    assert logsumexp is not None  # those that have none have refused
    return output, logsumexp


def choose_implementation(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Bias = None,
    mask: Mask = None,
    *,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    implementation: str | Blockwise | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> Choice:
    """Which implementation `dot_product_attention` would run for these arguments, why, and why not the others.

    None chooses between the two that honour every argument, on every platform: "dense" for fewer than 64 × 64 logits
    a head, "blockwise" from there on. The latter has reverse-mode gradients only: for forward mode, and for second
    derivatives, ask for "dense". "pallas", "xla" and "cudnn" run only when asked for: the first has not been timed on
    a machine that it is for, the others hand over to `jax.nn` what is the same there.

    Args:
        query, key, value, ...: as for `dot_product_attention`.

    Returns:
        The `Choice`.

    Raises:
        ValueError: also where the implementation asked for cannot do the problem.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> choose_implementation(x, x, x, logits_soft_cap=30.0).refused["xla"]
    'it does not take logits_soft_cap'
    """
    problem = prepare(
        query, key, _required("value", value), bias, mask,
        dropout_rate=dropout_rate, dropout_rng=dropout_rng,
        **only_attention_options("choose_implementation", options),
    )  # fmt: skip
    return _choose(problem, implementation, checks.boolean("return_residual", return_residual))


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: Bias = None,
    mask: Mask = None,
    **options: Unpack[AttentionOptions],
) -> Float[Array, "*b n t s"]:
    """The weights by which `dot_product_attention` would fetch, before dropout.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        bias, mask, ...: as for `dot_product_attention`.

    Returns:
        `[*B, N, T, S]`, at least float32. A row sums to 1, to `1 - sink share` with sinks, to 0 where nothing is seen.

    Raises:
        ValueError, TypeError: as `dot_product_attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.zeros((3, 1, 4))
    >>> attention_weights(x, x, is_causal=True)[0, 1].tolist()
    [0.5, 0.5, 0.0]
    """
    problem = prepare(query, key, None, bias, mask, **only_attention_options("attention_weights", options))
    return dense.weights(problem)


@dataclasses.dataclass(frozen=True)
class _Runner:
    """How to run an implementation, and what it says when it cannot: `refuse` returns the reason, or None."""

    run: Callable[[Problem], tuple[Array, Array | None]]
    refuse: Callable[[Problem, bool], str | None]
    measures: bool = False


# The tile loop is as fast as a dense pass from 64 queries by 64 keys on (`experiments/benchmarks/attention.py`); below,
# time is not the matter, and dense has derivatives of every order and mode.
_FEW_LOGITS = 64 * 64


def _choose(problem: Problem, implementation: str | Blockwise | None, return_residual: bool) -> Choice:
    if isinstance(implementation, Blockwise):
        implementation = "blockwise"
    checks.one_of("implementation", implementation, [*IMPLEMENTATIONS, None])
    refusals = {name: runner.refuse(problem, return_residual) for name, runner in IMPLEMENTATIONS.items()}
    refused = {name: reason for name, reason in refusals.items() if reason is not None}
    if implementation is None:
        return Choice(*_default(problem), refused)
    if implementation in refused:
        able = ", ".join(repr(name) for name in IMPLEMENTATIONS if name not in refused)
        raise ValueError(f"implementation={implementation!r} cannot do this: {refused[implementation]}; {able} can")
    return Choice(implementation, "asked for", refused)


def _default(problem: Problem) -> tuple[str, str]:
    """What None chooses, and why."""
    *_, queries, keys = problem.square.kept
    if queries * keys < _FEW_LOGITS:
        return "dense", f"{queries} queries by {keys} keys are few: one pass will do"
    return "blockwise", f"{queries} queries by {keys} keys: tile by tile is faster and takes O(T + S) memory"


def choose_measured(problem: Problem, implementation: str | Blockwise | None) -> str:
    """Which implementation measures the weights of a problem: only some have statistics."""
    if isinstance(implementation, Blockwise):
        return "blockwise"
    checks.one_of("implementation", implementation, [*IMPLEMENTATIONS, None])
    if implementation is None:
        return _default(problem)[0]
    able = [name for name, runner in IMPLEMENTATIONS.items() if runner.measures]
    if problem.value is not None:
        _choose(problem, implementation, return_residual=implementation in able)  # raises as without statistics
    if implementation not in able:
        raise ValueError(f"implementation={implementation!r} has no statistics; {', '.join(map(repr, able))} have")
    reason = IMPLEMENTATIONS[implementation].refuse(problem, True)
    if reason is not None:
        raise ValueError(f"implementation={implementation!r} cannot do this: {reason}; 'dense', 'blockwise' can")
    return implementation


def _jax_nn(name: Literal["xla", "cudnn"]) -> Callable[[Problem], tuple[Array, None]]:
    def run(problem: Problem) -> tuple[Array, None]:
        assert problem.value is not None
        query, key, value = (
            x.reshape(-1, *x.shape[-3:]) for x in (problem.query, problem.key, problem.value)
        )  # jax.nn takes one batch axis
        output = jax.nn.dot_product_attention(
            query, key, value,
            scale=cast(float, problem.scale),  # a scalar array serves as well
            is_causal=problem.is_causal, local_window_size=problem.window, implementation=name,
        )  # fmt: skip
        return output.reshape(problem.query.shape[:-1] + value.shape[-1:]), None

    return run


def _refuse_xla(problem: Problem, return_residual: bool) -> str | None:
    """Why the problem is not provably the same in `jax.nn`, which takes it as it is if None."""
    assert problem.value is not None
    foreign = sorted(problem.given - {"is_causal", "local_window_size"})
    if foreign:
        return f"it does not take {', '.join(foreign)}"
    if return_residual:
        return "its residual has no gradient"
    if jnp.ndim(problem.scale):
        return "it takes one scale for all heads"
    if problem.query.shape[-1] != problem.value.shape[-1]:
        return f"it needs V = H, got V = {problem.value.shape[-1]} and H = {problem.query.shape[-1]}"
    if problem.query.dtype == jnp.float64:
        return "its softmax is float32 for float64 inputs"
    if 0 in problem.query.shape + problem.key.shape:
        return "it does not take arrays without entries"
    *_, query_length, key_length = problem.square.shape
    left, right = problem.window or (math.inf, math.inf)
    right = 0 if problem.is_causal else right
    if query_length - 1 - left > key_length - 1:
        return "a query would see nothing, where it gives the mean of the values"
    if query_length - 1 + right < key_length - 1:
        return "a key that no query sees would reach the output if it held NaN"
    return None


def _refuse_cudnn(problem: Problem, return_residual: bool) -> str | None:
    reason = _refuse_xla(problem, return_residual)
    if reason is not None:
        return reason
    if problem.query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it takes float16 and bfloat16, got {problem.query.dtype}"
    if problem.window is not None and not problem.is_causal:
        return "its window has no right end without is_causal"
    *_, query_length, key_length = problem.square.shape
    if problem.is_causal and query_length != key_length:
        return f"its causal mask is aligned with ours only where T = S, got {query_length} and {key_length}"
    return None


IMPLEMENTATIONS = {
    "dense": _Runner(dense.attention, lambda problem, return_residual: None, measures=True),
    "blockwise": _Runner(blockwise.attention, lambda problem, return_residual: None, measures=True),
    "pallas": _Runner(
        functools.partial(blockwise.attention, kernel=True), lambda problem, _: adapter.refuse(problem), measures=True
    ),
    "xla": _Runner(_jax_nn("xla"), _refuse_xla),
    "cudnn": _Runner(_jax_nn("cudnn"), _refuse_cudnn),
}


def _required(name: str, x: ArrayLike) -> ArrayLike:
    if x is None:
        raise TypeError(f"{name} must be an array, got None")
    return x
