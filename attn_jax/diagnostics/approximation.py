"""How good an approximation of attention is: its output and the weights that it implies, against the exact ones."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from attn_jax import biases, checks, masks
from attn_jax.diagnostics.costs import Work
from attn_jax.diagnostics.numerics import divide, root
from attn_jax.exact import dot_product_attention
from attn_jax.exact.arguments import AttentionOptions, only_attention_options
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

_Head = Float[Array, "*b n"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An approximation that is to be measured.

    Attributes:
        function: query `[*B, T, N, H]`, key and value `[*B, S, K, ·]` to the output `[*B, T, N, V]`, for any V: linear
            in the value, as attention is. If random, it gets a PRNG key as a fourth argument.
        random: whether it draws.
        cost: what it costs, as counted by `attn_jax.diagnostics.costs`; carried into the report.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import Candidate, Work, approximation_report
    >>> x, value = jnp.zeros((4, 1, 2)), jnp.arange(4.0).reshape(4, 1, 1)
    >>> any_key = lambda query, key, value, rng: jnp.broadcast_to(jax.random.choice(rng, value), value.shape)
    >>> candidate = Candidate(any_key, random=True, cost=Work(flops=0, bytes=4))  # the value of a key that is drawn
    >>> found = approximation_report(x, x, value, {"any key": candidate}, top_k=1)["any key"]
    >>> bool(found.variance[0] > 0), found.mass_kept.tolist(), found.cost.bytes
    (True, [0.25], 4)
    """

    function: Callable[..., Array]
    random: bool = False
    cost: Work | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Approximation:
    """Measures of one candidate, each `[*B, N]`; of a random one, means over its draws.

    p are the exact weights of a row, p̂ those that the candidate implies; they may be negative and may not sum to 1.
    Means run over the rows that see a key; a head without such a row, or whose exact output is 0, reads NaN.

    Attributes:
        output_error: ‖ô − o‖ / ‖o‖, over all rows of a head.
        mass_kept: mean of Σ_j min(p_j, max(p̂_j, 0)): of exact attention over some of the keys, the weight of these.
        top_k_recall: mean share of a row's k largest weights (of all, where it sees fewer) that are among the k
            largest implied ones, those above 0; of equal ones the first.
        entropy_shift: mean of H(p̂₊ / Σ p̂₊) − H(p), in nats, with p̂₊ = max(p̂, 0).
        negative_mass: mean of Σ_j max(−p̂_j, 0).
        variance: mean over draws of ‖ô − mean ô‖² / ‖o‖², with D − 1 in place of D; 0 if nothing is drawn.
        cost: as the candidate said.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import approximation_report
    >>> x, value = jnp.zeros((4, 1, 2)), jnp.arange(4.0).reshape(4, 1, 1)  # four keys of weight 1/4 each
    >>> first = lambda query, key, value: jnp.broadcast_to(value[:1], value.shape)  # the first key alone
    >>> found = approximation_report(x, x, value, {"first": first}, top_k=1)["first"]
    >>> found.mass_kept.tolist(), found.output_error.tolist()
    ([0.25], [1.0])
    >>> bool(jnp.allclose(found.entropy_shift, -jnp.log(4)))
    True
    """

    output_error: _Head
    mass_kept: _Head
    top_k_recall: _Head
    entropy_shift: _Head
    negative_mass: _Head
    variance: _Head
    cost: Work | None = dataclasses.field(metadata={"static": True})


def approximation_report(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    candidates: Mapping[str, Candidate | Callable[..., Array]],
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    *,
    top_k: int = 8,
    rng_key: ArrayLike | None = None,
    draws: int = 8,
    columns: int = 128,
    **options: Unpack[AttentionOptions],
) -> dict[str, Approximation]:
    """Measures candidates against `dot_product_attention` on the same queries, keys and values.

    The weights that a candidate implies are its outputs for the columns of an identity as values, some columns at a
    time: memory is O(T (columns + k)) for each candidate and draw, and time S / columns runs of each.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        candidates: by name; a function stands for `Candidate(function)`.
        bias, mask, options: of the exact attention, as for `attn_jax.dot_product_attention`. Candidates bring their
            own.
        top_k: how many of the largest weights of a row are looked for; at most S.
        rng_key: of `jax.random`, for the draws; None for `jax.random.key(0)`.
        draws: how often a random candidate is drawn, at least 2.
        columns: how many columns of weights are read at a time.

    Returns:
        For each candidate an `Approximation`, float32 or better.

    Raises:
        ValueError: no candidates, a number that does not fit, an output of a wrong shape, or as
            `dot_product_attention`.
        TypeError: a candidate that is no function, or as `dot_product_attention`.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (6, 1, 4))
    >>> window = lambda query, key, value: dot_product_attention(query, key, value, local_window_size=2)
    >>> found = approximation_report(x, x, x, {"window": window}, top_k=1)["window"]
    >>> found.top_k_recall.round(2).tolist(), bool(found.mass_kept[0] < 1)
    ([1.0], True)
    """
    options = only_attention_options("approximation_report", options)
    query, key, value = (
        checks.floating_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    top_k, columns = checks.positive_int("top_k", top_k), checks.positive_int("columns", columns)
    draws = checks.positive_int("draws", draws, least=2)
    checked = _candidates(candidates)
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    def attend(value: Array) -> Float[Array, "*b t n v"]:
        """Exact attention, in float32 or better."""
        wide = value.astype(dtype)
        return dot_product_attention(query.astype(dtype), key.astype(dtype), wide, bias, mask, **options)

    output = attend(value)
    *batch, length, heads, _ = output.shape
    keys, key_heads = key.shape[-3:-1]
    if top_k > keys:
        raise ValueError(f"top_k must be at most the number of keys S = {keys}, got {top_k}")
    rng_keys = jax.random.split(checks.prng_key("rng_key", jax.random.key(0) if rng_key is None else rng_key), draws)

    def run(name: str, value: Array) -> Float[Array, "draws *b t n v"]:
        """Outputs of a candidate, one for each draw."""
        candidate = checked[name]
        if candidate.random:
            found = jax.lax.map(lambda rng: candidate.function(query, key, value, rng), rng_keys)
        else:
            found = candidate.function(query, key, value)[None]
        checks.shape(f"output of {name!r}", found[0], (*batch, length, heads, value.shape[-1]), "[*B, T, N, V]")
        return found.astype(dtype)

    def read(rows: dict[str, _Rows], start: Array) -> tuple[dict[str, _Rows], None]:
        """The weights on `columns` keys from `start` on."""
        one_hot = jnp.arange(keys)[:, None] == start + jnp.arange(columns)[None, :]
        value = jnp.broadcast_to(one_hot[:, None, :], (*batch, keys, key_heads, columns)).astype(query.dtype)
        exact = attend(value)[None]
        implied = {name: run(name, value) for name in checked}
        after = {name: rows[name].add(implied[name], exact, start) for name in checked}
        return after | {_EXACT: rows[_EXACT].add(exact, exact, start)}, None

    outputs = {name: run(name, value) for name in checked}
    counts = {_EXACT: 1} | {name: draws if x.random else 1 for name, x in checked.items()}
    empty = {name: _Rows.empty((count, *batch, length, heads), top_k, dtype) for name, count in counts.items()}
    rows, _ = jax.lax.scan(read, empty, jnp.arange(0, keys, columns))
    exact = rows.pop(_EXACT)
    return {name: _compare(rows[name], exact, outputs[name], output, x.cost) for name, x in checked.items()}


_EXACT = ""  # among the names of candidates, which are not empty


class _Rows(NamedTuple):
    """What is kept of the weights of each row while columns pass by, `[draws, *B, T, N]`.

    Attributes:
        total, negative: sums of the positive and of the negative weights.
        logs: Σ p ln p of the positive ones.
        kept: Σ min(p, p̂).
        largest, at: the k largest weights so far, descending, and their keys, `[draws, *B, T, N, k]`.
    """

    total: Float[Array, "d *b t n"]
    negative: Float[Array, "d *b t n"]
    logs: Float[Array, "d *b t n"]
    kept: Float[Array, "d *b t n"]
    largest: Float[Array, "d *b t n k"]
    at: Int[Array, "d *b t n k"]

    @classmethod
    def empty(cls, shape: tuple[int, ...], top_k: int, dtype: jnp.dtype) -> "_Rows":
        zeros = jnp.zeros(shape, dtype)
        return cls(zeros, zeros, zeros, zeros, jnp.zeros((*shape, top_k), dtype), jnp.full((*shape, top_k), -1))

    def add(self, weights: Float[Array, "d *b t n c"], exact: Float[Array, "1 *b t n c"], start: Array) -> "_Rows":
        """With the weights on the keys from `start` on; past the last key they are 0."""
        positive = jnp.maximum(weights, 0)
        top_k, columns = self.at.shape[-1], weights.shape[-1]
        here = jnp.broadcast_to(start + jnp.arange(columns).reshape((1,) * (weights.ndim - 1) + (-1,)), weights.shape)
        # what was found before stands first: of equal weights the earlier key stays
        largest, chosen = jax.lax.top_k(jnp.concatenate([self.largest, positive], axis=-1), top_k)
        at = jnp.take_along_axis(jnp.concatenate([self.at, here.astype(self.at.dtype)], axis=-1), chosen, axis=-1)
        return _Rows(
            self.total + positive.sum(axis=-1),
            self.negative + jnp.maximum(-weights, 0).sum(axis=-1),
            self.logs + xlogy(positive, positive).sum(axis=-1),
            self.kept + jnp.minimum(positive, exact).sum(axis=-1),
            largest,
            at,
        )

    @property
    def entropy(self) -> Float[Array, "d *b t n"]:
        """Of the positive weights over their sum."""
        return jnp.log(jnp.where(self.total > 0, self.total, 1)) - divide(self.logs, self.total)

    @property
    def found(self) -> Bool[Array, "d *b t n k"]:
        """Which of the k largest are weights at all."""
        return self.largest > 0


def _compare(
    rows: _Rows,
    exact: _Rows,
    outputs: Float[Array, "d *b t n v"],
    output: Float[Array, "*b t n v"],
    cost: Work | None,
) -> Approximation:
    counted = exact.total[0] > 0
    among = (exact.at[..., :, None] == rows.at[..., None, :]) & rows.found[..., None, :]
    recalled = jnp.sum(exact.found & among.any(axis=-1), axis=-1)

    def mean(x: Array) -> _Head:
        """Over draws and over the rows that count."""
        return divide(jnp.where(counted, x.mean(axis=0), 0).sum(axis=-2), counted.sum(axis=-2).astype(x.dtype))

    def square(x: Array) -> _Head:
        return jnp.sum(jnp.square(x), axis=(-3, -1))

    size, draws = square(output), len(outputs)
    errors = root(divide(square(outputs - output[None]), size[None]))
    variance = divide(square(outputs - outputs.mean(axis=0, keepdims=True)).sum(axis=0), size) / max(draws - 1, 1)
    largest = jnp.maximum(exact.found.sum(axis=-1), 1).astype(size.dtype)
    measured = {
        "output_error": errors.mean(axis=0),
        "mass_kept": mean(rows.kept),
        "top_k_recall": mean(recalled / largest),
        "entropy_shift": mean(rows.entropy - exact.entropy),
        "negative_mass": mean(rows.negative),
        "variance": variance,
    }
    known = counted.any(axis=-2) & (size > 0)
    with jax.debug_nans(False):  # a mark, not a fault
        return Approximation(**{name: jnp.where(known, x, jnp.nan) for name, x in measured.items()}, cost=cost)


def _candidates(candidates: Any) -> dict[str, Candidate]:
    if not isinstance(candidates, Mapping) or not candidates:
        raise ValueError(f"candidates must map names to functions, at least one, got {candidates!r}")
    found = {}
    for name, candidate in candidates.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"candidates must have names that are non-empty texts, got {name!r}")
        candidate = candidate if isinstance(candidate, Candidate) else Candidate(candidate)
        if not callable(candidate.function):
            raise TypeError(f"candidates[{name!r}] must be a function or a Candidate, got {candidate.function!r}")
        found[name] = candidate
    return found
