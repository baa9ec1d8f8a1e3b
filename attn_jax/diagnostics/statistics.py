"""Statistics of each row of attention weights: how sharp it is, where it looks, how large its logits are."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import biases, checks, masks
from attn_jax.exact import Blockwise, blockwise, dense
from attn_jax.exact.arguments import AttentionOptions, Problem, only_attention_options, prepare
from attn_jax.exact.attention import choose_measured
from attn_jax.exact.kernels.pallas import STATISTICS
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

_Rows = Float[Array, "*b t n"] | None
_Counts = Int[Array, "*b t n"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """Statistics per query row and head, `[*B, T, N]` (`[*B, R, N]` for chosen rows); None where not asked for.

    s are the final logits (scale, bias and soft cap applied), p the weights over the visible keys: before dropout and
    renormalised without the sink. In a row that sees nothing, the log-sum-exp and `max_logit` are `-inf`,
    `argmax_key` is -1, the sink (if there is one) has share 1, and all else is 0.

    Attributes:
        logsumexp: ln Σ exp s, nats.
        entropy: -Σ p ln p, nats.
        normalized_entropy: entropy / ln(visible keys), in [0, 1]; 1 where one key is visible.
        max_logit: max s, signed.
        max_abs_logit: max |s|.
        max_weight: max p.
        argmax_key: index of the first key with the largest logit.
        sum_p2: Σ p²; its inverse is the participation, its complement the trace of the softmax Jacobian.
        tail_p2, tail_p3: Σ p² and Σ p³ over the keys other than `argmax_key`, for the Jacobian's norm.
        logit_mean, logit_variance: of s over the visible keys (divided by their number).
        mean_distance: Σ p |q - k| in positions.
        first_key_mass: p of the key at position 0.
        diagonal_mass: p of the key at the query's own position.
        sink_share: the share of the sink in the denominator; 0 without sinks.
        visible_keys: how many keys the row sees.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import attention_statistics
    >>> x = jnp.zeros((4, 1, 8))  # equal logits: uniform weights
    >>> found = attention_statistics(x, x, is_causal=True, statistics=("visible_keys", "mean_distance"))
    >>> found.visible_keys[:, 0].tolist(), found.mean_distance[:, 0].tolist(), found.entropy
    ([1, 2, 3, 4], [0.0, 0.5, 1.0, 1.5], None)
    """

    logsumexp: _Rows = None
    entropy: _Rows = None
    normalized_entropy: _Rows = None
    max_logit: _Rows = None
    max_abs_logit: _Rows = None
    max_weight: _Rows = None
    argmax_key: _Counts = None
    sum_p2: _Rows = None
    tail_p2: _Rows = None
    tail_p3: _Rows = None
    logit_mean: _Rows = None
    logit_variance: _Rows = None
    mean_distance: _Rows = None
    first_key_mass: _Rows = None
    diagonal_mass: _Rows = None
    sink_share: _Rows = None
    visible_keys: _Counts = None


ALL = tuple(field.name for field in dataclasses.fields(AttentionStatistics))
DIFFERENTIABLE = ("logsumexp", "entropy", "normalized_entropy")
DEFAULT = ("logsumexp", "entropy", "normalized_entropy", "max_logit", "max_weight", "sum_p2", "visible_keys")


def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    *,
    statistics: Sequence[str] = DEFAULT,
    rows: ArrayLike | None = None,
    implementation: str | Blockwise | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionStatistics:
    """Statistics of the weights by which `dot_product_attention` would fetch.

    Tile by tile they take memory that grows with T + S, and one pass. Gradients flow through the log-sum-exp and the
    entropies; to a gradient the other fields are constants.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        bias, mask, options: as for `attn_jax.dot_product_attention`.
        statistics: names of fields of `AttentionStatistics`; `ALL` for every one.
        rows: int `[R]`, the queries to measure; None for all. A traced row that is not there reads NaN, and -1 in the
            counts. `sample_rows` draws some.
        implementation: "dense", "blockwise", `Blockwise(...)`, or None to choose as `dot_product_attention` does.

    Returns:
        The fields asked for, `[*B, T, N]` (`[*B, R, N]`), at least float32.

    Raises:
        ValueError: an unknown statistic, a row that is not there, an implementation that has no statistics, or as
            `dot_product_attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.zeros((4, 1, 8))
    >>> attention_statistics(x, x, is_causal=True).normalized_entropy[:, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    names, options = _names(statistics), only_attention_options("attention_statistics", options)
    problem = prepare(query, key, None, bias, mask, rows=rows, **options)
    _, statistics_of_rows = _run(problem, names, implementation)
    if rows is None or checks.is_concrete(rows):  # concrete ones were checked
        return statistics_of_rows
    there = (jnp.asarray(rows) >= 0) & (jnp.asarray(rows) < problem.square.shape[-2])

    def mark(field: Array) -> Array:
        nothing = jnp.nan if jnp.issubdtype(field.dtype, jnp.floating) else -1
        return jnp.where(there.reshape((1,) * (field.ndim - 2) + (-1, 1)), field, nothing)

    return jax.tree.map(mark, statistics_of_rows)


def attention_with_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    *,
    statistics: Sequence[str] = DEFAULT,
    rows: ArrayLike | None = None,
    implementation: str | Blockwise | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Float[Array, "*b t n v"], AttentionStatistics]:
    """The output of `dot_product_attention` and the statistics of its weights, in one pass.

    Args:
        query, key, value, ...: as for `attn_jax.dot_product_attention`.
        statistics, rows, implementation: as for `attention_statistics`; the output is of every row all the same.

    Returns:
        The output `[*B, T, N, V]`, and the statistics.

    Raises:
        ValueError, TypeError: as `attention_statistics`.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import attention_with_statistics
    >>> x, value = jnp.zeros((4, 1, 8)), jnp.arange(4.0).reshape(4, 1, 1)
    >>> output, found = attention_with_statistics(x, x, value, is_causal=True, statistics=("visible_keys",))
    >>> output[:, 0, 0].tolist(), found.visible_keys[:, 0].tolist()  # the mean of the values so far
    ([0.0, 0.5, 1.0, 1.5], [1, 2, 3, 4])
    """
    names, options = _names(statistics), only_attention_options("attention_with_statistics", options)
    if value is None:
        raise TypeError("value must be an array, got None")
    problem = prepare(query, key, value, bias, mask, dropout_rate=dropout_rate, dropout_rng=dropout_rng, **options)
    if rows is None:
        output, measured = _run(problem, names, implementation)
        assert output is not None
        return output, measured
    output, _ = _run(problem, (), implementation)
    assert output is not None
    measured = attention_statistics(
        query, key, bias, mask, statistics=names, rows=rows, implementation=implementation, **options
    )
    return output, measured


def sample_rows(key: ArrayLike, length: int, count: int) -> Int[Array, " r"]:
    """`count` of `length` rows, one drawn from each of as many equal stretches: a cheap look at every region.

    Args:
        key: of `jax.random`; fold in the step to look elsewhere each time.
        length: T.
        count: R, at most T.

    Returns:
        int32 `[R]`, increasing, for `rows=`.

    Raises:
        ValueError: a count above the length.

    >>> sample_rows(jax.random.key(0), 1024, 4).shape
    (4,)
    """
    key = checks.prng_key("key", key)
    length, count = checks.positive_int("length", length), checks.positive_int("count", count)
    if count > length:
        raise ValueError(f"count must be at most the length {length}, got {count}")
    ends = np.arange(count + 1) * length // count
    return jax.random.randint(key, (count,), ends[:-1], ends[1:], jnp.int32)


def _run(
    problem: Problem, names: tuple[str, ...], implementation: str | Blockwise | None
) -> tuple[Array | None, AttentionStatistics]:
    """Output (None without values) and statistics, in one pass."""
    chosen = choose_measured(problem, implementation)
    if chosen == "dense":
        output, measured = _dense(problem, names)
    else:
        wanted = implementation if isinstance(implementation, Blockwise) else Blockwise()
        needed = dict.fromkeys([*names, *(("entropy", "visible_keys") if "normalized_entropy" in names else ())])
        kept = tuple(name for name in needed if name not in ("logsumexp", "normalized_entropy"))
        lacking = [name for name in kept if name not in (*STATISTICS, "sink_share")] if chosen == "pallas" else []
        if lacking:
            raise ValueError(f"implementation='pallas' has no {', '.join(lacking)}; 'dense', 'blockwise' have")
        results = blockwise.attend(problem, kept, wanted, kernel=chosen == "pallas")
        output, measured = results.output, results.statistics | {"logsumexp": results.logsumexp}
        if "normalized_entropy" in names:
            measured["normalized_entropy"] = _normalized(measured["entropy"], measured["visible_keys"])
    for name in measured.keys() - set(DIFFERENTIABLE):
        measured[name] = jax.lax.stop_gradient(measured[name])
    return output, AttentionStatistics(**{name: measured[name] for name in names})


@functools.partial(jax.jit, static_argnums=1)
def _dense(problem: Problem, names: tuple[str, ...]) -> tuple[Array | None, dict[str, Array]]:
    """Output and statistics of the whole square. `jit` drops what they share and none of them needs."""
    logits = dense.compute_logits(problem)
    output = None
    if problem.value is not None:
        exponentials = dense.exponentiate(logits)
        output = dense.fetch(problem, logits, exponentials, dense.share(problem, exponentials))
    return output, _measure(problem, logits, names)


def _normalized(entropy: Array, count: Array) -> Array:
    most = jnp.log(jnp.maximum(count, 2).astype(entropy.dtype))
    return jnp.where(count > 1, entropy / most, (count == 1).astype(entropy.dtype))


def _names(statistics: Sequence[str]) -> tuple[str, ...]:
    if isinstance(statistics, str) or not isinstance(statistics, Sequence):
        kind = "the string " if isinstance(statistics, str) else ""
        raise TypeError(f"statistics must be a sequence of names, got {kind}{statistics!r}")
    for name in statistics:
        checks.one_of("statistics", name, ALL)
    return tuple(statistics)


def _measure(problem: Problem, logits: dense.Logits, names: tuple[str, ...]) -> dict[str, Array]:
    """The fields `names`. What they share is written once."""
    values, visible = logits
    exponentials, total, shift, empty = dense.exponentiate(logits)
    shares = dense.share(problem, dense.Exponentials(exponentials, total, shift, empty))
    count = jnp.asarray(values.shape[-1]) if visible is None else _count(visible, values.shape)
    count = jnp.broadcast_to(count, values.shape[:-1])

    def over_visible(x: Array) -> Array:
        return x if visible is None else jnp.where(visible, x, 0)

    def mean(x: Array) -> Array:
        return over_visible(x).sum(axis=-1) / jnp.maximum(count, 1)

    def expectation(x: Array) -> Array:
        return (exponentials * x).sum(axis=-1) / total.squeeze(-1)

    def entropy() -> Array:
        return (jnp.log(total).squeeze(-1) - expectation(values - shift)) * ~empty.squeeze(-1)

    def largest(x: Array, least: float) -> Array:
        return (x if visible is None else jnp.where(visible, x, least)).max(axis=-1, initial=least)

    def argmax_key() -> Array:
        shown = values if visible is None else jnp.where(visible, values, -jnp.inf)
        if values.shape[-1] == 0:
            return jnp.full(values.shape[:-1], -1)
        return jnp.where(empty.squeeze(-1), -1, jnp.argmax(shown, axis=-1))

    def tail(power: int) -> Array:
        others = jnp.arange(values.shape[-1]).reshape((1,) * (values.ndim - 1) + (-1,)) != argmax_key()[..., None]
        return jnp.where(others, (exponentials / total) ** power, 0).sum(axis=-1)

    def logit_variance() -> Array:
        return mean((values - mean(values)[..., None]) ** 2)

    queries, keys = problem.tile.query_positions, problem.tile.key_positions
    measures = {
        "logsumexp": lambda: shares.logsumexp.squeeze(-1),
        "entropy": entropy,
        "normalized_entropy": lambda: _normalized(entropy(), count),
        "max_logit": lambda: largest(values, -jnp.inf),
        "max_abs_logit": lambda: largest(jnp.abs(values), 0.0),
        "max_weight": lambda: largest(exponentials, 0.0) / total.squeeze(-1),
        "argmax_key": argmax_key,
        "sum_p2": lambda: ((exponentials / total) ** 2).sum(axis=-1),
        "tail_p2": lambda: tail(2),
        "tail_p3": lambda: tail(3),
        "logit_mean": lambda: mean(values),
        "logit_variance": logit_variance,
        "mean_distance": lambda: expectation(jnp.abs(queries - keys).astype(values.dtype)),
        "first_key_mass": lambda: expectation((keys == 0).astype(values.dtype)),
        "diagonal_mass": lambda: expectation((keys == queries).astype(values.dtype)),
        "sink_share": lambda: shares.sink.squeeze(-1),
        "visible_keys": lambda: count,
    }
    return {name: jnp.swapaxes(measures[name](), -1, -2) for name in names}


def _count(visible: Bool[Array, "*b n t s"], shape: tuple[int, ...]) -> Int[Array, "*b n t"]:
    return jnp.broadcast_to(visible, (*visible.shape[:-1], shape[-1])).sum(axis=-1)
