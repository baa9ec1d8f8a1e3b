"""The projections: from the model's stream to queries, keys and values, and back.

A weight keeps its head axis, `[D, N, H]`, so a head is a slice and never a matter of reshaping order. Where a flat
width is given instead, head n owns the columns `n*H .. n*H + H - 1`: the head is the slower axis.
"""

import jax.numpy as jnp
from einops import rearrange
from jax import lax

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float


def split_heads(x: Float[ArrayLike, "*b t nh"], num_heads: int) -> Float[Array, "*b t n h"]:
    """Cuts the last axis into heads: head n is the columns `n*H .. n*H + H - 1`.

    Args:
      x: `[*B, T, N*H]`.
      num_heads: N, which must divide the last axis.

    Returns:
      `[*B, T, N, H]`.

    Raises:
      ValueError: the width is not a multiple of `num_heads`.

    >>> split_heads(jnp.arange(6.0).reshape(1, 6), num_heads=2).tolist()  # one token
    [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]
    """
    x = checks.as_array("x", x)
    checks.minimum_rank("x", x, 2, "[*B, T, N*H]")
    num_heads = checks.positive_int("num_heads", num_heads)
    if x.shape[-1] % num_heads:
        raise ValueError(f"the last axis of x must be a multiple of num_heads = {num_heads}, got shape {x.shape}")
    return rearrange(x, "... (n h) -> ... n h", n=num_heads)


def merge_heads(x: Float[ArrayLike, "*b t n h"]) -> Float[Array, "*b t nh"]:
    """Lays the heads side by side: the inverse of `split_heads`.

    Args:
      x: `[*B, T, N, H]`.

    Returns:
      `[*B, T, N*H]`.

    Raises:
      ValueError: fewer than three axes.

    >>> merge_heads(jnp.array([[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]])).tolist()
    [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    """
    x = checks.as_array("x", x)
    checks.minimum_rank("x", x, 3, "[*B, T, N, H]")
    return rearrange(x, "... n h -> ... (n h)")


def project(
    x: Float[ArrayLike, "*b t d"],
    weight: Float[ArrayLike, "d n h"],
    bias: Float[ArrayLike, "n h"] | None = None,
    *,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*b t n h"]:
    """One linear map into heads: `y[t, n, h] = Σ_d x[t, d] · weight[d, n, h] + bias[n, h]`.

    Args:
      x: `[*B, T, D]`.
      weight: `[D, N, H]`.
      bias: `[N, H]`, or None for no bias.
      precision: as in `jax.numpy.einsum`.

    Returns:
      `[*B, T, N, H]`, summed in float32 or better, in the promoted dtype of the arguments.

    Raises:
      TypeError: an argument is not a floating array.
      ValueError: the shapes do not agree.

    >>> weight = jnp.array([[[1.0, 0.0]], [[0.0, 2.0]]])  # D = 2 to one head of width 2
    >>> project(jnp.array([[3.0, 4.0]]), weight).tolist()
    [[[3.0, 8.0]]]
    """
    return _project(x, weight, bias, "weight", "bias", "x", precision)


def project_qkv(
    x: Float[ArrayLike, "*b t d"],
    query_weight: Float[ArrayLike, "d n h"],
    key_weight: Float[ArrayLike, "e k h"] | None,
    value_weight: Float[ArrayLike, "e k v"],
    query_bias: Float[ArrayLike, "n h"] | None = None,
    key_bias: Float[ArrayLike, "k h"] | None = None,
    value_bias: Float[ArrayLike, "k v"] | None = None,
    *,
    context: Float[ArrayLike, "*b s e"] | None = None,
    precision: lax.PrecisionLike = None,
) -> tuple[Float[Array, "*b t n h"], Float[Array, "*b s k h"], Float[Array, "*b s k v"]]:
    """Queries, keys and values, each by its own matrix: `q = x W_Q + b_Q`, `k = c W_K + b_K`, `v = c W_V + b_V`.

    Args:
      x: `[*B, T, D]`, what the queries are made from.
      query_weight: `[D, N, H]`.
      key_weight: `[D, K, H]`, K dividing N; None ties it to the query's matrix, `W_K = W_Q` (so K = N).
      value_weight: `[D, K, V]`; V is free.
      query_bias: `[N, H]` or None.
      key_bias: `[K, H]` or None; not tied by `key_weight=None`.
      value_bias: `[K, V]` or None.
      context: `[*B, S, E]`, what keys and values are made from (cross-attention); x itself if None. Its width E may
        differ from D, and the key's and value's matrices have E rows then.
      precision: as in `jax.numpy.einsum`.

    Returns:
      query `[*B, T, N, H]`, key `[*B, S, K, H]`, value `[*B, S, K, V]`.

    Raises:
      TypeError: an argument is not a floating array.
      ValueError: widths, head counts or batch axes do not agree.

    Reference: Vaswani et al. 2017, section 3.2.2; grouped key/value heads: Ainslie et al. 2023 (GQA).

    >>> x, eye = jnp.array([[1.0, 2.0]]), jnp.eye(2)[:, None, :]  # one token, one head
    >>> query, key, value = project_qkv(x, eye, 2 * eye, eye[..., :1])
    >>> query.tolist(), key.tolist(), value.tolist()
    ([[[1.0, 2.0]]], [[[2.0, 4.0]]], [[[1.0]]])
    """
    tied = key_weight is None
    key_weight = query_weight if tied else key_weight
    key_name = "query_weight (tied to the key)" if tied else "key_weight"
    source, source_name = (x, "x") if context is None else (context, "context")
    query = _project(x, query_weight, query_bias, "query_weight", "query_bias", "x", precision)
    key = _project(source, key_weight, key_bias, key_name, "key_bias", source_name, precision)
    value = _project(source, value_weight, value_bias, "value_weight", "value_bias", source_name, precision)
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"context must have the batch axes of x, {query.shape[:-3]}, got {key.shape[:-3]}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query_weight and key_weight must have one head width H, got {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"{key_name} and value_weight must have one number of heads K, got {key.shape[-2]} and {value.shape[-2]}"
        )
    checks.grouped_heads(query.shape[-2], key.shape[-2])
    return query, key, value


def project_qkv_fused(
    x: Float[ArrayLike, "*b t d"],
    weight: Float[ArrayLike, "d nh_kh_kv"],
    bias: Float[ArrayLike, " nh_kh_kv"] | None = None,
    *,
    num_heads: int,
    head_width: int,
    num_kv_heads: int | None = None,
    value_width: int | None = None,
    precision: lax.PrecisionLike = None,
) -> tuple[Float[Array, "*b t n h"], Float[Array, "*b t k h"], Float[Array, "*b t k v"]]:
    """Queries, keys and values by one matrix product, cut on the output axis into `q | k | v` and then into heads.

    Args:
      x: `[*B, T, D]`.
      weight: `[D, N*H + K*H + K*V]`.
      bias: `[N*H + K*H + K*V]` or None.
      num_heads: N.
      head_width: H.
      num_kv_heads: K, dividing N; N if None.
      value_width: V; H if None.
      precision: as in `jax.numpy.einsum`.

    Returns:
      query `[*B, T, N, H]`, key `[*B, T, K, H]`, value `[*B, T, K, V]`: equal to `project_qkv` with the three parts.

    Raises:
      TypeError: an array is not floating, a count is not an integer.
      ValueError: the width of `weight` is not `N*H + K*H + K*V`, or K does not divide N.

    >>> x, eye = jnp.array([[1.0, 2.0]]), jnp.eye(2)
    >>> weight = jnp.concatenate([eye, 2 * eye, eye[:, :1]], axis=1)  # [D, H + H + V]
    >>> query, key, value = project_qkv_fused(x, weight, num_heads=1, head_width=2, value_width=1)
    >>> query.tolist(), key.tolist(), value.tolist()
    ([[[1.0, 2.0]]], [[[2.0, 4.0]]], [[[1.0]]])
    """
    num_heads = checks.positive_int("num_heads", num_heads)
    head_width = checks.positive_int("head_width", head_width)
    num_kv_heads = num_heads if num_kv_heads is None else checks.positive_int("num_kv_heads", num_kv_heads)
    value_width = head_width if value_width is None else checks.positive_int("value_width", value_width)
    checks.grouped_heads(num_heads, num_kv_heads)
    weight = checks.floating_array("weight", weight)
    checks.rank("weight", weight, 2, "[D, N*H + K*H + K*V]")
    query_end = num_heads * head_width
    key_end = query_end + num_kv_heads * head_width
    width = key_end + num_kv_heads * value_width
    checks.shape("weight", weight, (weight.shape[0], width), "[D, N*H + K*H + K*V]")
    if bias is not None:
        bias = checks.floating_array("bias", bias)
        checks.shape("bias", bias, (width,), "[N*H + K*H + K*V]")
        bias = bias[None, :]
    # one product of one wide "head", then three cuts
    joint = merge_heads(_project(x, weight[:, None, :], bias, "weight", "bias", "x", precision))
    query, key, value = jnp.split(joint, [query_end, key_end], axis=-1)
    return split_heads(query, num_heads), split_heads(key, num_kv_heads), split_heads(value, num_kv_heads)


def project_out(
    x: Float[ArrayLike, "*b t n v"],
    weight: Float[ArrayLike, "n v d"],
    bias: Float[ArrayLike, " d"] | None = None,
    *,
    precision: lax.PrecisionLike = None,
) -> Float[Array, "*b t d"]:
    """The output projection, a sum over heads: `y[t, d] = Σ_n Σ_v x[t, n, v] · weight[n, v, d] + bias[d]`.

    Args:
      x: `[*B, T, N, V]`, the output of every head.
      weight: `[N, V, D]`.
      bias: `[D]` or None.
      precision: as in `jax.numpy.einsum`.

    Returns:
      `[*B, T, D]`, summed in float32 or better, in the promoted dtype of the arguments.

    Raises:
      TypeError: an argument is not a floating array.
      ValueError: the shapes do not agree.

    >>> heads, weight = jnp.array([[[1.0], [10.0]]]), jnp.array([[[1.0]], [[3.0]]])  # one token, two heads
    >>> project_out(heads, weight).tolist()  # 1 · 1 + 10 · 3
    [[31.0]]
    """
    x, weight = checks.floating_array("x", x), checks.floating_array("weight", weight)
    checks.minimum_rank("x", x, 3, "[*B, T, N, V]")
    checks.rank("weight", weight, 3, "[N, V, D]")
    if x.shape[-2:] != weight.shape[:2]:
        raise ValueError(
            f"weight must have shape [N, V, D] with N, V = {x.shape[-2:]} as in x {x.shape}, got {weight.shape}"
        )
    x, weight = merge_heads(x), weight.reshape(-1, weight.shape[-1])
    return _linear(x, weight, (weight.shape[-1],), bias, "bias", "[D]", precision)


def _project(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    weight_name: str,
    bias_name: str,
    x_name: str,
    precision: lax.PrecisionLike,
) -> Array:
    """`project` with the caller's names for its errors."""
    x, weight = checks.floating_array(x_name, x), checks.floating_array(weight_name, weight)
    checks.minimum_rank(x_name, x, 2, "[*B, T, D]")
    checks.rank(weight_name, weight, 3, "[D, heads, width]")
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"{weight_name} must have shape [D, heads, width] with D = {x.shape[-1]} as in {x_name} {x.shape}, "
            f"got {weight.shape}"
        )
    flat, heads = weight.reshape(weight.shape[0], -1), weight.shape[1:]
    return _linear(x, flat, heads, bias, bias_name, "[heads, width]", precision)


def _linear(
    x: Array,
    weight: Array,
    shape: tuple[int, ...],
    bias: ArrayLike | None,
    bias_name: str,
    bias_axes: str,
    precision: lax.PrecisionLike,
) -> Array:
    """`x weight` `[*B, T, *shape]`, plus the bias; summed in float32 or better and rounded once."""
    dtype = jnp.result_type(x, weight)
    wide = jnp.promote_types(dtype, jnp.float32)
    y = jnp.einsum("...td,do->...to", x, weight, precision=precision, preferred_element_type=wide)
    y = y.reshape(x.shape[:-1] + shape)
    if bias is not None:
        bias = checks.floating_array(bias_name, bias)
        bias_rank = len(bias_axes.split(","))
        checks.shape(bias_name, bias, y.shape[y.ndim - bias_rank :], bias_axes)
        dtype = jnp.result_type(dtype, bias)
        y = y + bias.reshape((1,) * (y.ndim - bias_rank) + bias.shape)
    return y.astype(dtype)
