"""From logits to a token: the likeliest, or one drawn among those that are likely enough."""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float, Int


def candidates(
    logits: Float[ArrayLike, "*b v"], *, top_k: int | None = None, top_p: float | ArrayLike | None = None
) -> tuple[Float[Array, "*b r"], Int[Array, "*b r"]]:
    """The tokens that may be drawn, the likeliest first; equally likely ones in the order of their ids.

    `top_k` keeps the k likeliest. `top_p` keeps the fewest that together have probability p among those: a token stays
    while the ones before it have less than p, so the likeliest always does.

    Args:
        logits: `[*B, vocabulary]`.
        top_k: k, at least 1; None, or more than the vocabulary: all.
        top_p: p in (0, 1]; it may be traced. None: all.

    Returns:
        Logits `[*B, R]`, `-inf` for tokens that may not be drawn, and the ids `[*B, R]` they belong to; R is k or the
        vocabulary.

    Reference: Fan et al. 2018, section 4.4 (top-k); Holtzman et al. 2020, section 3.1 (top-p, nucleus).

    >>> values, ids = candidates(jnp.log(jnp.array([0.1, 0.6, 0.3])), top_p=0.7)
    >>> ids.tolist(), jnp.isneginf(values).tolist()
    ([1, 2, 0], [False, False, True])
    """
    logits = checks.floating_array("logits", logits)
    size = logits.shape[-1]
    top_k = size if top_k is None else min(checks.positive_int("top_k", top_k), size)
    values, ids = jax.lax.top_k(logits, top_k)
    if top_p is not None:
        check_top_p(top_p)
        probabilities = jax.nn.softmax(values.astype(jnp.float32), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        first = (jnp.arange(top_k) == 0).reshape((1,) * (values.ndim - 1) + (-1,))  # whatever rounding says of it
        values = jnp.where(first | (before < top_p), values, -jnp.inf)
    return values, ids


def sample(
    logits: Float[ArrayLike, "b v"],
    keys: Array,
    *,
    temperature: float | ArrayLike,
    top_k: int | None = None,
    top_p: float | ArrayLike | None = None,
) -> Int[Array, " b"]:
    """One token for each row, drawn from softmax(logits / temperature) over `candidates`.

    Args:
        logits: `[B, vocabulary]`.
        keys: `[B]`, a key for each row.
        temperature: positive; it may be traced.
        top_k, top_p: as in `candidates`, of the probabilities at this temperature.

    Returns:
        int32 `[B]`.
    """
    logits = checks.floating_array("logits", logits).astype(jnp.float32)
    # Differences from the largest, so that a small temperature gives -inf and not inf - inf.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    values, ids = candidates(logits, top_k=top_k, top_p=top_p)
    drawn = jax.vmap(jax.random.categorical)(keys, values)
    return jnp.take_along_axis(ids, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def check_top_p(top_p: float | ArrayLike) -> None:
    """Raises unless p lies in (0, 1]; a traced one cannot be seen."""
    if checks.is_concrete(top_p) and not 0 < checks.finite_number("top_p", top_p) <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
