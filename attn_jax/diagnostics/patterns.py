"""What shape a head's pattern has: mass on a sink, on the diagonal, on the previous token, and how far it looks.

Each number is a mean over the queries of a head, `[*B, N, T, S]` to `[*B, N]`; batch means come later, so that no head
hides in an average. A query whose row is all 0 (it sees nothing, or is padding) is left out of every mean, and a head
without any query reads 0. Positions default to indices: query i at i, key j at j.

A sink makes every distance about i: `without=0` leaves the first key out of the pattern and renormalises the rest.
"""

import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, key_index, measured, without_key
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


def sink_mass(
    weights: Float[ArrayLike, "*b n t s"],
    *,
    key: int = 0,
    query_positions: Int[ArrayLike, "..."] | None = None,
    key_positions: Int[ArrayLike, "..."] | None = None,
) -> Float[Array, "*b n"]:
    """Mean weight on one key over the queries at or after it, `mean over i >= k of p_ik`.

    Compare with the uniform causal pattern's `(1 + 1/2 + … + 1/n) / n` (0.013 at n = 512). Packed documents each have
    a first token of their own; a learned sink logit is no key and does not count here.

    Args:
        weights: `[*B, N, T, S]`, floating, after the softmax.
        key: index of the key; the first by default.
        query_positions: integers `[T]` or `[*B, T]`.
        key_positions: integers `[S]` or `[*B, S]`.

    Returns:
        `[*B, N]`, float32 or better. By convention a head above 0.3 is a sink head; that is information, no fault.

    Raises:
        ValueError: if `key` is no index of a key, or positions do not fit.
        TypeError: if `weights` is not floating, or positions are not integers.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import sink_mass
    >>> sink, itself = jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.eye(2)  # two heads of two queries
    >>> sink_mass(jnp.stack([sink, itself])).tolist()  # the first query has no other key to look at
    [1.0, 0.5]
    """
    p = measured("weights", weights, 3, "[*B, N, T, S]")
    k = key_index(key, p.shape[-1])
    steps = _steps_back(p, query_positions, key_positions)
    return _mean(p[..., k], _seeing(p) & (steps[..., k] >= 0))


def diagonal_mass(
    weights: Float[ArrayLike, "*b n t s"],
    *,
    back: int = 0,
    without: int | None = None,
    query_positions: Int[ArrayLike, "..."] | None = None,
    key_positions: Int[ArrayLike, "..."] | None = None,
) -> Float[Array, "*b n"]:
    """Mean weight on the token itself, mean `p_ii`, or on the one `back` steps before it.

    Not for cross-attention, where query i and key i are unrelated.

    Args:
        weights: `[*B, N, T, S]`, floating, after the softmax.
        back: how many positions back; 1 is the previous token.
        without: index of a key to leave out first, the others renormalised.
        query_positions: integers `[T]` or `[*B, T]`.
        key_positions: integers `[S]` or `[*B, S]`.

    Returns:
        `[*B, N]`, float32 or better: the mean over the queries that have a key there.

    Raises:
        ValueError: if `back` is negative, `without` is no index of a key, or positions do not fit.
        TypeError: if `weights` is not floating, or positions are not integers.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import diagonal_mass
    >>> heads = jnp.stack([jnp.eye(4), jnp.eye(4, k=-2)])  # on itself; two back
    >>> diagonal_mass(heads).tolist(), diagonal_mass(heads, back=2).tolist()
    ([1.0, 0.0], [0.0, 1.0])
    """
    p = _pattern(weights, without)
    there = _steps_back(p, query_positions, key_positions) == checks.positive_int("back", back, least=0)
    return _mean(jnp.sum(jnp.where(there, p, 0.0), axis=-1), _seeing(p) & jnp.any(there, axis=-1))


def previous_token_mass(
    weights: Float[ArrayLike, "*b n t s"],
    *,
    without: int | None = None,
    query_positions: Int[ArrayLike, "..."] | None = None,
    key_positions: Int[ArrayLike, "..."] | None = None,
) -> Float[Array, "*b n"]:
    """Mean weight on the token before, mean `p_{i,i−1}`: `diagonal_mass` with `back=1`, same arguments and errors.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import previous_token_mass
    >>> heads = jnp.stack([jnp.eye(4, k=-1), jnp.eye(4)])  # on the token before; on itself
    >>> previous_token_mass(heads).tolist()
    [1.0, 0.0]
    """
    return diagonal_mass(weights, back=1, without=without, query_positions=query_positions, key_positions=key_positions)


def mean_distance(
    weights: Float[ArrayLike, "*b n t s"],
    *,
    without: int | None = None,
    query_positions: Int[ArrayLike, "..."] | None = None,
    key_positions: Int[ArrayLike, "..."] | None = None,
) -> Float[Array, "*b n"]:
    """How many tokens away a head looks, mean over queries of `Σ_j p_ij |i − j|`.

    Args:
        weights: `[*B, N, T, S]`, floating, after the softmax.
        without: index of a key to leave out first, the others renormalised.
        query_positions: integers `[T]` or `[*B, T]`.
        key_positions: integers `[S]` or `[*B, S]`.

    Returns:
        Tokens, `[*B, N]`, float32 or better.

    Raises:
        ValueError: if `without` is no index of a key, or positions do not fit.
        TypeError: if `weights` is not floating, or positions are not integers.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import mean_distance
    >>> heads = jnp.stack([jnp.eye(4), jnp.eye(4, k=-1), jnp.eye(4, k=-2)])  # on itself, one back, two back
    >>> mean_distance(heads).tolist()
    [0.0, 1.0, 2.0]
    """
    p = _pattern(weights, without)
    return _mean(_row_distance(p, _steps_back(p, query_positions, key_positions)), _seeing(p))


def distance_ratio(
    weights: Float[ArrayLike, "*b n t s"],
    visible: Bool[ArrayLike, "..."],
    *,
    without: int | None = None,
    query_positions: Int[ArrayLike, "..."] | None = None,
    key_positions: Int[ArrayLike, "..."] | None = None,
) -> Float[Array, "*b n"]:
    """Mean distance in units of what uniform weights over the visible keys give: 1 is no preference, less is local.

    Both means run over the same queries, those that see at least two keys.

    Args:
        weights: `[*B, N, T, S]`, floating, after the softmax.
        visible: which keys a query may see, boolean `[T, S]` or broadcastable to the weights. A weight of 0 does not
            tell: it may have underflowed.
        without: index of a key to leave out of both patterns first.
        query_positions: integers `[T]` or `[*B, T]`.
        key_positions: integers `[S]` or `[*B, S]`.

    Returns:
        `[*B, N]`, float32 or better; 0 for a head no query of which has a choice.

    Raises:
        ValueError: if `visible` does not fit, `without` is no index of a key, or positions do not fit.
        TypeError: if `weights` is not floating, `visible` not boolean, or positions are not integers.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import distance_ratio
    >>> visible = jnp.tri(4, dtype=bool)
    >>> heads = jnp.stack([jnp.eye(4), visible / jnp.arange(1.0, 5)[:, None]])  # on itself; uniform
    >>> distance_ratio(heads, visible).round(3).tolist()
    [0.0, 1.0]
    """
    p = _pattern(weights, without)
    mask = checks.as_array("visible", visible)
    if mask.dtype != bool:
        raise TypeError(f"visible must be boolean, got {mask.dtype}")
    if mask.ndim == 2:
        mask = mask.reshape((1,) * (p.ndim - 2) + mask.shape)
    checks.broadcastable("visible", mask, p.shape, "[*B, N, T, S]")
    uniform = _pattern(jnp.broadcast_to(mask, p.shape).astype(p.dtype), without)
    choosing = _seeing(p) & (jnp.sum(uniform > 0, axis=-1) >= 2)
    uniform = divide(uniform, jnp.sum(uniform, axis=-1, keepdims=True))
    steps = _steps_back(p, query_positions, key_positions)
    return divide(_mean(_row_distance(p, steps), choosing), _mean(_row_distance(uniform, steps), choosing))


def _pattern(weights: ArrayLike, without: int | None) -> Array:
    p = measured("weights", weights, 3, "[*B, N, T, S]")
    return p if without is None else without_key(p, key_index(without, p.shape[-1]))


def _seeing(p: Float[Array, "*b n t s"]) -> Bool[Array, "*b n t"]:
    return jnp.any(p != 0, axis=-1)


def _mean(rows: Float[Array, "*b n t"], included: Bool[Array, "*b n t"]) -> Float[Array, "*b n"]:
    count = jnp.sum(included, axis=-1).astype(rows.dtype)
    return divide(jnp.sum(jnp.where(included, rows, 0.0), axis=-1), count)


def _row_distance(p: Float[Array, "*b n t s"], steps: Int[Array, "*#b #n t s"]) -> Float[Array, "*b n t"]:
    return jnp.sum(p * jnp.abs(steps).astype(p.dtype), axis=-1)


def _steps_back(p: Array, query_positions: ArrayLike | None, key_positions: ArrayLike | None) -> Array:
    """Query position minus key position, `[*B or 1s, 1, T, S]`; an empty slot, at -1, is behind every query."""
    q = _positions("query_positions", query_positions, p.shape[:-3], p.shape[-2], "T")[..., :, None]
    k = _positions("key_positions", key_positions, p.shape[:-3], p.shape[-1], "S")[..., None, :]
    return jnp.where(k < 0, -1, q - k)[..., None, :, :]


def _positions(name: str, given: ArrayLike | None, batch: tuple[int, ...], length: int, axis: str) -> Array:
    positions = jnp.arange(length) if given is None else checks.integer_array(name, given)
    if positions.ndim == 1:
        checks.shape(name, positions, (length,), f"[{axis}] or [*B, {axis}]")
        return positions.reshape((1,) * len(batch) + (length,))
    checks.shape(name, positions, (*batch, length), f"[{axis}] or [*B, {axis}]")
    return positions
