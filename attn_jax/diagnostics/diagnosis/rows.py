"""What is measured in a layer: numbers per head, from some query rows of what its attention gets.

Means run over the rows of all sequences that see two keys or more and whose visible logits are finite; a head without
such a row reads NaN. Weights are before dropout, and renormalised without a learned sink.

    normalized_entropy              mean of H / ln n over the n visible keys
    normalized_entropy_no_sink      the same without the key at position 0, over rows that see three keys or more and
                                    leave 0.001 of their weight to the others
    max_logit, max_abs_logit        the largest of all rows
    logit_sd                        mean over rows of the standard deviation of the visible logits
    saturated                       share of rows that put more than 0.95 on one key
    sink_mass                       mean weight on the key at position 0
    jacobian_norm                   mean Frobenius norm of the softmax Jacobian
    output_norm                     root mean square of |o|, o the V numbers that the head fetches for a row
    nearest_head                    the head of the layer whose weights overlap most with this one's, Σ sqrt(p p')
    nearest_distance                mean Jensen-Shannon divergence from it, over ln 2: 0 same, 1 disjoint
    nearest_similarity              linear CKA of what the two fetch: 1 where one is a rotation of the other
    all others                      means of the `AttentionStatistics` of that name

A layer of one head has no nearest one: NaN, and -1. What is fetched and what is near is read from 16 rows of each head,
which make wide heads look more alike than they are: unrelated ones of width 64 have a CKA of 0.8.
"""

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax.diagnostics.jacobian import jacobian_norm_from_tails
from attn_jax.diagnostics.statistics import AttentionStatistics, attention_statistics, sample_rows
from attn_jax.exact import dense
from attn_jax.exact.arguments import prepare
from attn_jax.typing import Array, Bool, Float

# Which statistics a measure is made of; those not named here are the statistic of that name.
_MADE_OF = {
    "normalized_entropy_no_sink": ("entropy", "first_key_mass"),
    "logit_sd": ("logit_variance",),
    "saturated": ("max_weight",),
    "sink_mass": ("first_key_mass",),
    "jacobian_norm": ("max_weight", "tail_p2", "tail_p3"),
}
_CHOOSING = ("visible_keys", "max_abs_logit", "logsumexp")
_LARGEST = ("max_logit", "max_abs_logit")
OF_HEADS = ("output_norm", "nearest_head", "nearest_distance", "nearest_similarity")
OF_ROWS = (
    "normalized_entropy", "normalized_entropy_no_sink", "max_logit", "logit_sd", "saturated", "sink_mass",
    "max_abs_logit", "jacobian_norm", "entropy", "logsumexp", "max_weight", "sum_p2", "logit_mean", "mean_distance",
    "diagonal_mass", "sink_share", "visible_keys",
)  # fmt: skip
ALL = (*OF_ROWS, *OF_HEADS)
DEFAULT = (*OF_ROWS[:6], *OF_HEADS)  # what limits look at

SATURATED = 0.95  # a weight above it takes the row
_LEAST_REST = 1e-3  # of the weight, for the others to be measured apart
_COMPARED = 16  # rows of each head that are compared with those of the others


def measure_rows(
    query: Array,
    key: Array,
    value: Array,
    bias: Any = None,
    mask: Any = None,
    *,
    names: Collection[str],
    count: int | None,
    rng: Array,
    **options: Any,
) -> dict[str, Array]:
    """The measures `names` of one layer, `[N]` each.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, V]`.
        bias, mask, options: as for `attn_jax.dot_product_attention`.
        names: of `ALL`.
        count: how many rows of each head are looked at, as many of every sequence (rounded up); None: all.
        rng: the key that draws them.

    Raises:
        ValueError: if there are not so many rows.
    """
    sequences, length = max(1, math.prod(query.shape[:-3])), query.shape[-3]
    if count is not None and count > sequences * length:
        raise ValueError(
            f"rows must be at most the {sequences * length} of a batch, {sequences} sequences of T = {length}, "
            f"got {count}; None measures all"
        )

    def draw(most: int) -> Array:
        return sample_rows(rng, length, min(length, -(-most // sequences)))

    measured = {}
    if set(names) & set(OF_ROWS):
        rows = None if count is None else draw(count)
        measured |= _average_rows(query, key, bias, mask, names=names, rows=rows, **options)
    if set(names) & set(OF_HEADS):
        rows = draw(_COMPARED if count is None else min(count, _COMPARED))
        measured |= compare_heads(query, key, value, bias, mask, rows=rows, **options)
    return {name: measured[name] for name in names}


def _average_rows(
    query: Array, key: Array, bias: Any, mask: Any, *, names: Collection[str], **options: Any
) -> dict[str, Array]:
    """The measures that are a mean, or the largest, over rows."""
    fields = {field for name in names if name in OF_ROWS for field in _MADE_OF.get(name, (name,))} | set(_CHOOSING)
    of = attention_statistics(query, key, bias, mask, statistics=sorted(fields), **options)
    choosing, measured = _choosing(of), {}
    for name in OF_ROWS:
        if name in names:
            values, counted = _per_row(name, of)
            counted = choosing if counted is None else choosing & counted
            measured[name] = (_largest if name in _LARGEST else _mean)(_flat(values), _flat(counted))
    return measured


def _per_row(name: str, of: AttentionStatistics) -> tuple[Array, Array | None]:
    """What is averaged, and the rows that it is known for; None: all."""
    if name == "normalized_entropy_no_sink":
        return _entropy_without(_there(of.entropy), _there(of.first_key_mass), _there(of.visible_keys))
    if name == "logit_sd":
        return jnp.sqrt(_there(of.logit_variance)), None
    if name == "saturated":
        largest = _there(of.max_weight)
        return (largest > SATURATED).astype(largest.dtype), None
    if name == "jacobian_norm":
        largest = _there(of.max_weight)
        return jacobian_norm_from_tails(largest, 1 - largest, _there(of.tail_p2), _there(of.tail_p3)), None
    return getattr(of, _MADE_OF.get(name, (name,))[0]), None


def _entropy_without(entropy: Array, first: Array, visible_keys: Array) -> tuple[Array, Array]:
    """The normalized entropy of the other keys, once the first has its weight: H = h(p) + (1 - p) H', h of two.

    Known where the others are two or more, and have weight enough that the difference has digits.
    """
    rest = 1 - first
    known = (visible_keys > 2) & (rest > _LEAST_REST)
    rest = jnp.where(known, rest, 1)
    between = -jax.scipy.special.xlogy(rest, rest) - jax.scipy.special.xlogy(first, first)
    others = jnp.where(known, visible_keys - (first > 0), 2).astype(entropy.dtype)
    return jnp.clip((entropy - between) / rest / jnp.log(others), 0, 1), known


def compare_heads(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, **options: Any
) -> dict[str, Float[Array, " n"]]:
    """What heads fetch, and which is the nearest of each."""
    problem = prepare(query, key, value, bias, mask, **options)
    logits = dense.compute_logits(problem)
    exponentials = dense.exponentiate(logits)
    output = dense.fetch(problem, logits, exponentials, dense.share(problem, exponentials))  # [*B, R, N, V]
    seen = jnp.broadcast_to(True if logits.visible is None else logits.visible, logits.values.shape)
    choosing = (seen.sum(axis=-1) > 1) & jnp.isfinite(logits.values).all(axis=-1)  # [*B, N, R]

    def by_head(x: Array) -> Array:
        """`[N, samples, ...]` of `[*B, N, R, ...]`; a sample is a row of a sequence."""
        x = jnp.moveaxis(x, query.ndim - 3, 0)
        return x.reshape(x.shape[0], -1, *x.shape[query.ndim - 1 :])

    counted = by_head(choosing)
    weights = jnp.where(counted[..., None], by_head(exponentials.values / exponentials.total), 0)
    output = jnp.where(counted[..., None], by_head(jnp.swapaxes(output, -2, -3)).astype(weights.dtype), 0)
    measured = {"output_norm": jnp.sqrt(_mean((output**2).sum(axis=-1), counted, axis=1))}
    num_heads = counted.shape[0]
    if num_heads == 1:
        nothing = jnp.full((1,), jnp.nan, weights.dtype)
        return {**measured, **dict.fromkeys(OF_HEADS[1:], nothing), "nearest_head": jnp.full((1,), -1)}

    root, itself = jnp.sqrt(weights), jnp.eye(num_heads, dtype=bool)
    overlap = jnp.einsum("nrs,mrs->nm", root, root, precision="highest")
    nearest = jnp.argmax(jnp.where(itself, -1, overlap), axis=-1)
    both, entropies = counted & counted[nearest], _entropy(weights)
    divergence = _entropy((weights + weights[nearest]) / 2) - (entropies + entropies[nearest]) / 2
    return {
        **measured,
        "nearest_head": jnp.where(both.any(axis=1), nearest, -1),
        "nearest_distance": jnp.maximum(_mean(divergence / np.log(2), both, axis=1), 0),
        "nearest_similarity": _alignment(output, output[nearest], both),
    }


def _entropy(p: Float[Array, "*b s"]) -> Float[Array, "*b"]:
    return -(p * jnp.log(jnp.where(p > 0, p, 1))).sum(axis=-1)


def _alignment(x: Array, y: Array, counted: Bool[Array, "n r"]) -> Float[Array, " n"]:
    """Linear CKA, |XᵀY|² / |XᵀX| |YᵀY| of centred samples `[N, R, V]`; NaN where either does not vary."""
    count = jnp.maximum(counted.sum(axis=1), 1)[:, None, None]

    def centred(z: Array) -> Array:
        z = jnp.where(counted[..., None], z, 0)
        z = jnp.where(counted[..., None], z - z.sum(axis=1, keepdims=True) / count, 0)
        return z / jnp.maximum(jnp.abs(z).max(axis=(1, 2), keepdims=True), jnp.finfo(z.dtype).tiny)

    def product(a: Array, b: Array) -> Array:
        return (jnp.einsum("nrv,nrw->nvw", a, b, precision="highest") ** 2).sum(axis=(1, 2))

    x, y = centred(x), centred(y)
    norms = jnp.sqrt(product(x, x)) * jnp.sqrt(product(y, y))
    return jnp.where(norms > 0, product(x, y) / jnp.where(norms > 0, norms, 1), jnp.nan)


def _choosing(statistics: AttentionStatistics) -> Bool[Array, "*b r n"]:
    """Rows that count. A sum is needed to see a NaN: on CPUs the maximum of a long row passes over it."""
    finite = jnp.isfinite(_there(statistics.max_abs_logit)) & jnp.isfinite(_there(statistics.logsumexp))
    return (_there(statistics.visible_keys) > 1) & finite


def _flat(x: Array) -> Array:
    """`[rows of all sequences, N]`."""
    return x.reshape(-1, x.shape[-1])


def _mean(x: Array, counted: Array, *, axis: int = 0) -> Float[Array, " n"]:
    mean = jnp.where(counted, x, 0).sum(axis=axis) / jnp.maximum(counted.sum(axis=axis), 1)
    return jnp.where(counted.any(axis=axis), mean, jnp.nan)


def _largest(x: Array, counted: Bool[Array, "r n"]) -> Float[Array, " n"]:
    return jnp.where(counted.any(axis=0), jnp.where(counted, x, -jnp.inf).max(axis=0), jnp.nan)


def _there(field: Array | None) -> Array:
    assert field is not None
    return field
