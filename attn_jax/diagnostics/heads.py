"""How each head routes, in a dozen numbers: the row statistics averaged over the rows that have a choice."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attn_jax import biases, checks, masks
from attn_jax.diagnostics.spectra import logit_ranks
from attn_jax.diagnostics.statistics import AttentionStatistics, attention_statistics
from attn_jax.exact.arguments import AttentionOptions, only_attention_options
from attn_jax.exact.attention import dot_product_attention
from attn_jax.lazy import Bounds, Grid, Tile
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

_Head = Float[Array, "*b n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """Measures per head, `[*B, N]`.

    Means run over the rows that see two keys or more and whose visible logits are finite; a head without such a row
    reads NaN. "Without the sink" hides the key at position 0.

    Attributes:
        normalized_entropy: mean of H / ln n.
        normalized_entropy_no_sink: the same without the sink, over rows that then see two keys or more.
        logit_sd: mean over rows of the standard deviation of the visible logits.
        max_logit: the largest visible logit of all rows.
        max_weight: mean of the largest weight.
        saturated: share of rows whose largest weight exceeds 0.95.
        sink_mass: mean weight on the key at position 0, over all rows that see a key.
        distance_ratio: mean distance, in units of what uniform weights over the visible keys give.
        distance_ratio_no_sink: the same without the sink.
        score_rank: effective rank of the centred scores q (k - mean k)ᵀ, before bias, cap and mask; at most H. Of the
            finite rows that see a key, and the keys that these see; without such a row NaN.
        non_finite: how many rows have a logit that is not finite among those they may see.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import summarize_heads
    >>> x = jnp.zeros((4, 1, 2))  # equal logits: uniform weights
    >>> summary = jax.jit(summarize_heads, static_argnames="is_causal")(x, x, is_causal=True)
    >>> summary.normalized_entropy.round(3).tolist(), summary.saturated.tolist(), summary.non_finite.tolist()
    ([1.0], [0.0], [0])
    """

    normalized_entropy: _Head
    normalized_entropy_no_sink: _Head
    logit_sd: _Head
    max_logit: _Head
    max_weight: _Head
    saturated: _Head
    sink_mass: _Head
    distance_ratio: _Head
    distance_ratio_no_sink: _Head
    score_rank: _Head
    non_finite: Int[Array, "*b n"]


def summarize_heads(
    query: ArrayLike,
    key: ArrayLike,
    value: Any = None,
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    **options: Unpack[AttentionOptions],
) -> HeadSummary:
    """The summary of each head, from what its attention gets.

    The signature is that of an `observe` function of `attn_jax.nn.Transformer`, so that one forward pass brings the
    summaries of every layer.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: not looked at.
        bias, mask, options: as for `attn_jax.dot_product_attention`.

    Returns:
        `HeadSummary` with fields `[*B, N]`.

    Raises:
        ValueError, TypeError: as `attention_statistics`.

    NaN is a mark here, not a fault. Under `jax_debug_nans` this function does not raise by it, but a `jit` around it
    does: there JAX refuses every NaN that comes out.

    Reference: Zhai et al. 2023 (entropy); Xiao et al. 2023 (sinks).

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import summarize_heads
    >>> query, key = jnp.ones((4, 1, 2)), jnp.zeros((4, 1, 2)).at[0].set(9.0)  # a sink, and nothing else to choose by
    >>> summary = jax.jit(summarize_heads, static_argnames="is_causal")(query, key, is_causal=True)
    >>> summary.sink_mass.round(2).tolist(), summary.normalized_entropy_no_sink.round(2).tolist()
    ([1.0], [1.0])
    """
    fields = (
        "logsumexp", "normalized_entropy", "logit_variance", "max_logit", "max_abs_logit", "max_weight",
        "first_key_mass", "mean_distance", "visible_keys",
    )  # fmt: skip
    options = only_attention_options("summarize_heads", options)
    query, key = checks.floating_array("query", query), checks.floating_array("key", key)
    all_keys = attention_statistics(query, key, bias, mask, statistics=fields, **options)
    hidden = ~masks.Padding(1)
    rest_mask = hidden if mask is None else masks.as_mask("mask", mask) & hidden
    rest_fields = ("logsumexp", "normalized_entropy", "mean_distance", "visible_keys", "max_abs_logit")
    rest = attention_statistics(query, key, bias, rest_mask, statistics=rest_fields, **options)
    # Equal logits are uniform weights over the same keys.
    # The barrier keeps XLA from working them out while it compiles, which takes longer than running them.
    zeros = jax.lax.optimization_barrier((jnp.zeros_like(query[..., :1]), jnp.zeros_like(key[..., :1])))
    blank_query, blank_key = zeros
    no_bias = None if bias is None else _Hiding(biases.as_bias("bias", bias))
    uniform, uniform_rest = (
        attention_statistics(blank_query, blank_key, no_bias, seen, statistics=("mean_distance",), **options)
        for seen in (mask, rest_mask)
    )

    assert all_keys.visible_keys is not None
    assert all_keys.max_abs_logit is not None
    assert all_keys.max_weight is not None
    assert all_keys.logit_variance is not None
    choice, choice_rest = _choosing(all_keys), _choosing(rest)
    seeing, finite = all_keys.visible_keys > 0, _finite(all_keys)
    # Finite logits are not enough: the soft cap makes an ordinary number of an infinite one.
    ranked = seeing & finite & jnp.isfinite(query).all(axis=-1)
    seen = _seen_keys(ranked, key.shape[-3], no_bias, mask, options)
    return HeadSummary(
        normalized_entropy=_mean(all_keys.normalized_entropy, choice),
        normalized_entropy_no_sink=_mean(rest.normalized_entropy, choice_rest),
        logit_sd=_mean(jnp.sqrt(all_keys.logit_variance), choice),
        max_logit=_largest(all_keys.max_logit, choice),
        max_weight=_mean(all_keys.max_weight, choice),
        saturated=_mean((all_keys.max_weight > 0.95).astype(all_keys.max_weight.dtype), choice),
        sink_mass=_mean(all_keys.first_key_mass, seeing & finite),
        distance_ratio=_ratio(all_keys.mean_distance, uniform.mean_distance, choice),
        distance_ratio_no_sink=_ratio(rest.mean_distance, uniform_rest.mean_distance, choice_rest),
        score_rank=_score_rank(query, key, ranked, seen),
        non_finite=(seeing & ~finite).sum(axis=-2),
    )


class _Hiding(biases.Bias):
    """What a bias hides (`-inf`), and nothing else of it."""

    bias: biases.Bias

    def evaluate(self, tile: Tile, dtype: DTypeLike) -> Array:
        return jnp.where(jnp.isneginf(self.bias.evaluate(tile, dtype)), -jnp.inf, 0)

    def bounds(self, grid: Grid) -> Bounds:
        return self.bias.bounds(grid)


def _choosing(statistics: AttentionStatistics) -> Bool[Array, "*b t n"]:
    """Rows that count: two visible keys or more, all their logits finite."""
    assert statistics.visible_keys is not None
    return (statistics.visible_keys > 1) & _finite(statistics)


def _finite(statistics: AttentionStatistics) -> Bool[Array, "*b t n"]:
    """Rows whose visible logits are finite. XLA's maximum of many numbers passes over NaN; their sum does not."""
    assert statistics.max_abs_logit is not None
    assert statistics.logsumexp is not None
    return jnp.isfinite(statistics.max_abs_logit) & ~jnp.isnan(statistics.logsumexp)


def _mean(rows: Float[Array, "*b t n"] | None, counted: Bool[Array, "*b t n"]) -> _Head:
    """Mean over the rows that count; NaN if there is none."""
    return _known(_sum(rows, counted) / jnp.maximum(counted.sum(axis=-2), 1), counted.any(axis=-2))


def _ratio(
    rows: Float[Array, "*b t n"] | None, unit: Float[Array, "*b t n"] | None, counted: Bool[Array, "*b t n"]
) -> _Head:
    """Ratio of two means over the rows that count; NaN if the unit is 0, as without such rows."""
    units = _sum(unit, counted)
    return _known(_sum(rows, counted) / jnp.where(units > 0, units, 1), units > 0)


def _largest(rows: Float[Array, "*b t n"] | None, counted: Bool[Array, "*b t n"]) -> _Head:
    assert rows is not None
    return _known(jnp.where(counted, rows, -jnp.inf).max(axis=-2, initial=-jnp.inf), counted.any(axis=-2))


def _sum(rows: Float[Array, "*b t n"] | None, counted: Bool[Array, "*b t n"]) -> _Head:
    assert rows is not None
    return jnp.where(counted, rows, 0).sum(axis=-2)


def _seen_keys(
    counted: Bool[Array, "*b t n"],
    num_keys: int,
    bias: biases.Bias | None,
    mask: masks.Mask | ArrayLike | None,
    options: AttentionOptions,
) -> Bool[Array, "*b s n"]:
    """The keys that some row that counts sees: those to which uniform weights send something back from it."""
    *batch, length, num_heads = counted.shape
    query, key = (jnp.zeros((*batch, size, num_heads, 1)) for size in (length, num_keys))
    only_mask: AttentionOptions = {**options, "scale": None, "logits_soft_cap": None, "sinks": None}
    _, send_back = jax.vjp(lambda value: dot_product_attention(query, key, value, bias, mask, **only_mask), key)
    (received,) = send_back(counted[..., None].astype(query.dtype))
    return received[..., 0] > 0


def _score_rank(query: Array, key: Array, counted: Bool[Array, "*b t n"], seen: Bool[Array, "*b s n"]) -> _Head:
    """Effective rank of the centred scores between the rows that count and the keys that these see."""
    *batch, _, num_heads = counted.shape
    if counted.size == 0 or seen.size == 0:
        return _known(jnp.zeros((*batch, num_heads), jnp.promote_types(query.dtype, jnp.float32)), counted.any(axis=-2))
    seen &= jnp.repeat(jnp.isfinite(key).all(axis=-1), num_heads // key.shape[-2], axis=-1)
    return _known(logit_ranks(query, key, query_mask=counted, key_mask=seen).effective, counted.any(axis=-2))


def _known(values: _Head, known: Bool[Array, "*b n"]) -> _Head:
    """The values, and NaN for heads where they are not known: a mark, which `jax_debug_nans` would take for a fault."""
    with jax.debug_nans(False):
        return jnp.where(known, values, jnp.nan)
