"""How concentrated the routing is: entropy over the visible keys, in nats.

Every function reads the renormalised weights `p / Σp`: the rounding of half-precision weights, whose rows sum to
1 ± 1e-3, then shifts nothing, and with a sink logit the entropy is the one over keys. For the joint entropy of keys
and sink, append the sink's share as one more key (and count it in `visible_keys`).
"""

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, measured, per_row, renormalize, root, without_key
from attn_jax.typing import Array, ArrayLike, Float, Int


def entropy(weights: Float[ArrayLike, "*b s"]) -> Float[Array, "*b"]:
    """Shannon entropy of each row, `−Σ p ln p` of `p / Σp`, with 0·ln 0 = 0.

    Args:
        weights: floating, non-negative `[..., S]`, after the softmax and before dropout.

    Returns:
        Nats, `[...]`, float32 or better. A row of zeros gives 0; a negative weight gives NaN. Gradients are finite:
        a weight of exactly 0 gets 0, so that `softmax` passes on `−p(ln p + H)` at the logits.

    Raises:
        ValueError: if `weights` has no axis, or no key.
        TypeError: if it is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import entropy
    >>> weights = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    >>> jnp.exp(entropy(weights)).round(3).tolist()  # as many keys, equally likely
    [1.0, 2.0, 4.0]
    """
    p = renormalize(measured("weights", weights, 1, "[..., S]"))
    zero = p == 0
    # Two selects: with one, the gradient of the branch not taken is 0·inf.
    return -jnp.sum(jnp.where(zero, 0.0, p * jnp.log(jnp.where(zero, 1.0, p))), axis=-1)


def entropy_from_logits(logits: Float[ArrayLike, "*b s"]) -> Float[Array, "*b"]:
    """Entropy of `softmax(logits)`, `ln l − Σ p (s − m)` with row maximum m and `l = Σ exp(s − m)`.

    Args:
        logits: floating `[..., S]`, final: after scale, bias and soft cap. `-inf` is a key that is not visible.

    Returns:
        Nats, `[...]`, float32 or better; 0 for a row that sees nothing. The gradient is `−p (ln p + H)`, always finite.

    Raises:
        ValueError: if `logits` has no axis, or no key.
        TypeError: if it is not floating.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import entropy, entropy_from_logits
    >>> logits = jnp.array([[3.0, 1.0, -2.0], [0.0, 0.0, -jnp.inf]])
    >>> bool(jnp.allclose(entropy_from_logits(logits), entropy(jax.nn.softmax(logits)), atol=1e-5))
    True
    >>> bool(jnp.allclose(entropy_from_logits(logits)[1], jnp.log(2)))  # two visible keys, equally likely
    True
    """
    s = measured("logits", logits, 1, "[..., S]")
    # H does not depend on the maximum, so no gradient flows through it; an empty row has none to shift by.
    largest = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    shifted = s - jnp.where(largest == -jnp.inf, 0.0, largest)
    unseen = jnp.exp(shifted) == 0  # -inf, or too far below the maximum to count: 0·(-inf) is kept out
    shifted = jnp.where(unseen, 0.0, shifted)
    exponential = jnp.where(unseen, 0.0, jnp.exp(shifted))
    total = jnp.sum(exponential, axis=-1)
    mean = divide(jnp.sum(exponential * shifted, axis=-1), total)
    return jnp.log(jnp.where(total == 0, 1.0, total)) - mean


def normalized_entropy(weights: Float[ArrayLike, "*b s"], *, visible_keys: Int[ArrayLike, "..."]) -> Float[Array, "*b"]:
    """Entropy as a share of its maximum over the keys a query may see, `H / ln n`.

    The count must be the visible one: over the padded or full length, uniform causal rows would read 0.80 at n = 128.

    Args:
        weights: floating `[..., S]`.
        visible_keys: n, integer from 0 to S, of the row axes `[...]` or of their last ones, such as `[T]`. It must
            count every key with a weight above 0, which is checked where both values can be read, that is, not traced.

    Returns:
        `[...]` between 0 and 1, for such counts. A query with one visible key has nothing to choose between and reads
        1 by convention; one that sees nothing reads 0. Leave both out of means.

    Raises:
        ValueError: if `visible_keys` does not fit the rows, or is a count that cannot be.
        TypeError: if `weights` is not floating or `visible_keys` not integer.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import normalized_entropy
    >>> weights = jnp.array([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    >>> normalized_entropy(weights, visible_keys=jnp.array([2, 4])).round(3).tolist()  # uniform over what they see
    [1.0, 1.0]
    >>> normalized_entropy(weights, visible_keys=jnp.array([4, 4])).round(3).tolist()  # the first chose two of four
    [0.5, 1.0]
    """
    nats = entropy(weights)
    n = per_row("visible_keys", visible_keys, nats.shape, most=jnp.shape(weights)[-1])
    _check_all_counted(weights, n)
    share = nats / jnp.log(jnp.maximum(n, 2).astype(nats.dtype))
    return jnp.where(n < 2, (n == 1).astype(nats.dtype), share)


def entropy_without(weights: Float[ArrayLike, "*b s"], *, key: int = 0) -> Float[Array, "*b"]:
    """Entropy of the distribution over the other keys, once one key (the first: the usual sink) is left out.

    Args:
        weights: floating `[..., S]`.
        key: index of the key to leave out.

    Returns:
        Nats, `[...]`, of the other weights renormalised; 0 where nothing else is seen. To normalise it divide by
        `ln(n − 1)`, with n the keys that are visible, the left-out one among them.

    Raises:
        ValueError: if `key` is not an index of a key.
        TypeError: if `weights` is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import entropy_without
    >>> weights = jnp.array([[0.98, 0.01, 0.01], [0.98, 0.02, 0.0]])  # two queries on a sink
    >>> jnp.exp(entropy_without(weights)).round(3).tolist()  # beside it, one looks at two keys, one at a single key
    [2.0, 1.0]
    """
    return entropy(without_key(weights, key))


def entropy_lower_bound(logit_variance: Float[ArrayLike, "*b"], visible_keys: Int[ArrayLike, "..."]) -> Array:
    """The least entropy that n logits of a given variance can have; less is a fault of the measurement.

        σ = sqrt(n·v) = ‖s − mean s‖₂,   β = σ sqrt(n / (n − 1)),   e = (n − 1) exp(−β)
        H ≥ ln(1 + e) + β e / (1 + e)

    It is reached when one logit stands above n − 1 equal ones.

    Args:
        logit_variance: v, floating `[...]`: the variance (over n, not n − 1) of the final logits over the visible keys.
        visible_keys: n, integer of at least 0, `[...]` or of its last axes.

    Returns:
        Nats, `[...]`, float32 or better; 0 for fewer than two visible keys.

    Raises:
        ValueError: if `visible_keys` does not fit, or is negative.
        TypeError: if `logit_variance` is not floating or `visible_keys` not integer.

    Reference:
        Zhai et al. 2023, "Stabilizing transformer training by preventing attention entropy collapse", Theorem 3.1.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import entropy_from_logits, entropy_lower_bound
    >>> logits = jnp.array([[3.0, 0.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0]])
    >>> gap = entropy_from_logits(logits) - entropy_lower_bound(logits.var(axis=-1), 4)
    >>> bool(jnp.allclose(gap[0], 0, atol=1e-5)), bool(gap[1] > 0.1)  # reached by the one, not by the other
    (True, True)
    """
    variance = measured("logit_variance", logit_variance, 0, "[...]")
    count = per_row("visible_keys", visible_keys, variance.shape)
    n = jnp.maximum(count, 2).astype(variance.dtype)
    gap = root(variance) * n / jnp.sqrt(n - 1)
    others = (n - 1) * jnp.exp(-gap)
    return jnp.where(count < 2, 0.0, jnp.log1p(others) + gap * others / (1 + others))


def participation(sum_p2: Float[ArrayLike, "*b"]) -> Float[Array, "*b"]:
    """The number of keys that effectively take part, `1 / Σp²`: 1 for a one-hot row, n for a uniform one.

    Args:
        sum_p2: Σp² of each row, floating `[...]`, as `AttentionStatistics.sum_p2` holds it.

    Returns:
        `[...]`, float32 or better; 0 for a row that sees nothing.

    Raises:
        TypeError: if `sum_p2` is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import participation
    >>> weights = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    >>> participation(jnp.sum(weights**2, axis=-1)).tolist()
    [1.0, 4.0]
    """
    squares = measured("sum_p2", sum_p2, 0, "[...]")
    return divide(jnp.ones((), squares.dtype), squares)


def _check_all_counted(weights: ArrayLike, visible_keys: Int[Array, "*b"]) -> None:
    """Raises if a row has more weights above 0 than its count says; values of a tracer cannot be seen."""
    if not (checks.is_concrete(weights) and checks.is_concrete(visible_keys)):
        return
    used, counted = (np.asarray(weights) > 0).sum(axis=-1), np.asarray(visible_keys)  # a NaN is not above 0
    if (used > counted).any():
        row = np.unravel_index(np.argmax(used - counted), used.shape)
        raise ValueError(
            f"visible_keys must count every key with a weight above 0, got {counted[row]} for a row with {used[row]}"
        )
