"""Nyström attention: the square of weights from a few of its columns and rows.

Landmarks are means of segments of the queries and of the keys. With Q̃ and K̃ of them,

    P ≈ softmax(Q K̃ᵀ) · softmax(Q̃ K̃ᵀ)⁺ · softmax(Q̃ Kᵀ)
          [T, R]            [R, R]            [R, S]

and applied to the values from the right no square is ever formed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.exact import attention_weights, dot_product_attention
from attn_jax.lowrank import arguments
from attn_jax.typing import Array, ArrayLike, Float, Int

METHODS = ("iterative", "exact")


def nystrom_attention(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    value: Float[ArrayLike, "*b s k v"],
    *,
    landmarks: int,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    pseudo_inverse: str = "iterative",
    iterations: int = 6,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*b t n v"]:
    """Softmax attention by way of R landmarks, in O(R (T + S)).

        output = softmax(scale · Q K̃ᵀ) · softmax(scale · Q̃ K̃ᵀ)⁺ · softmax(scale · Q̃ Kᵀ) · V

    The landmarks are the means of R consecutive segments of the queries and of the keys that count, as even as can be:
    the first `length mod R` have one more. Where no more than R count, they are their own landmarks. With as many
    landmarks as keys this is exact attention, up to the pseudo-inverse. A landmark holds something of every token of
    its segment, so there is no causal form.

    The landmarks of padded queries would be wrong as those of padded keys would: self-attention over padded items needs
    both lengths.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`; query head n reads key/value head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        landmarks: R, at most S.
        scale: a number, or one per head `[N]`; None for `1/sqrt(H)`.
        is_causal: False; True is refused.
        query_seq_lengths: int `[*B]`; queries past it are not read and give 0.
        key_value_seq_lengths: int `[*B]`; keys and values past it are not read. An item without keys gives 0.
        pseudo_inverse: "iterative" or "exact", see `pseudo_invert`.
        iterations: of the iterative one.
        precision: of the products with queries, keys and values, as in `jax.lax.dot_general`.

    Returns:
        `[*B, T, N, V]` in the query's dtype. Products and sums are at least float32.

    Raises:
        ValueError: a wrong shape or value, more landmarks than keys, or `is_causal=True`.
        TypeError: a wrong type or dtype.

    Reference: Xiong et al. 2021, "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", equations
    13 and 14, without their convolution of the values.

    >>> from attn_jax import dot_product_attention
    >>> x = jax.random.normal(jax.random.key(0), (12, 1, 4))
    >>> errors = nystrom_attention(x, x, x, landmarks=12, pseudo_inverse="exact") - dot_product_attention(x, x, x)
    >>> bool(jnp.abs(errors).max() < 1e-3)  # a landmark for each key: exact
    True
    """
    arrays = arguments.check(
        query, key, value, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        why_not_causal="a landmark is a mean over tokens, those ahead of a query too",
    )  # fmt: skip
    landmarks = checks.positive_int("landmarks", landmarks)
    if landmarks > arrays.key.shape[-3]:
        raise ValueError(f"landmarks must be at most the number of keys S = {arrays.key.shape[-3]}, got {landmarks}")
    checks.one_of("pseudo_inverse", pseudo_inverse, METHODS)
    of_queries = _segment_means(arrays.query, arrays.query_lengths, landmarks)
    of_keys = _segment_means(arrays.key, arrays.key_lengths, landmarks)
    # [*B, R, N, V]: what each query landmark fetches
    fetched = dot_product_attention(
        of_queries.means, arrays.key, arrays.value, scale=scale, precision=precision,
        query_seq_lengths=of_queries.counts, key_value_seq_lengths=arrays.key_lengths,
    )  # fmt: skip
    between = attention_weights(
        of_queries.means, of_keys.means, scale=scale, precision=precision,
        query_seq_lengths=of_queries.counts, key_value_seq_lengths=of_keys.counts,
    )  # fmt: skip
    inverse = pseudo_invert(between, method=pseudo_inverse, iterations=iterations)  # [*B, N, R, R]
    for_keys = jnp.einsum("...nkq,...qnv->...knv", inverse, fetched, precision="highest")
    group = arrays.query.shape[-2] // arrays.key.shape[-2]
    output = dot_product_attention(
        arrays.query, jnp.repeat(of_keys.means, group, axis=-2), for_keys, scale=scale, precision=precision,
        query_seq_lengths=arrays.query_lengths, key_value_seq_lengths=of_keys.counts,
    )  # fmt: skip
    return output.astype(jnp.asarray(query).dtype)


def pseudo_invert(
    matrix: Float[ArrayLike, "*b m n"], *, method: str = "iterative", iterations: int = 6
) -> Float[Array, "*b n m"]:
    """The Moore–Penrose inverse of each matrix, exact or by iteration without a decomposition.

        Z₀ = Aᵀ / (‖A‖₁ ‖A‖_∞),    Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z)))

    Each matrix starts from its own norms, so no other matrix of the batch has a say. With A = U Σ Vᵀ the result is
    V diag(x / σ) Uᵀ, where each x, 1 in the inverse, comes from its own singular value:

        x₀ = σ² / (‖A‖₁ ‖A‖_∞),    x ← ¼ x (13 − x (15 − x (7 − x)))

    A small x grows by 13/4 a step, and near 1 the distance from it is cubed. So six steps bring what begins at 0.01 or
    more within 2e-5 of the inverse, and leave out what is far below, as a cutoff would.

    Args:
        matrix: `[*B, M, N]`, floating.
        method: "iterative", or "exact" by singular values, where those below `10 · max(M, N) · ε · σ₁` count as 0.
        iterations: of the iterative one.

    Returns:
        `[*B, N, M]`, float32 or better. A matrix of zeros has the inverse 0.

    Raises:
        ValueError: `method` that is neither, `iterations` below 1, or fewer than two axes.
        TypeError: a matrix that is not floating.

    Reference: Razavi et al. 2014, "A new iterative method for finding approximate inverses of complex matrices"; Xiong
    et al. 2021, equation 11. (Their code starts from the largest norms of the whole batch.)
    """
    matrix = checks.floating_array("matrix", matrix)
    checks.minimum_rank("matrix", matrix, 2, "[*B, M, N]")
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    checks.one_of("method", method, METHODS)
    iterations = checks.positive_int("iterations", iterations)
    if method == "exact":
        return jnp.linalg.pinv(matrix)

    def product(one: Array, other: Array) -> Array:
        return jnp.matmul(one, other, precision="highest")

    sizes, rows = jnp.abs(matrix), matrix.shape[-2]
    norms = sizes.sum(axis=-2).max(axis=-1, initial=0) * sizes.sum(axis=-1).max(axis=-1, initial=0)
    inverse = jnp.swapaxes(matrix, -1, -2) / jnp.where(norms == 0, 1, norms)[..., None, None]
    identity = jnp.eye(rows, dtype=matrix.dtype).reshape((1,) * (matrix.ndim - 2) + (rows, rows))
    for _ in range(iterations):
        image = product(matrix, inverse)
        inner = 15 * identity - product(image, 7 * identity - image)
        inverse = product(inverse, 13 * identity - product(image, inner)) / 4
    return inverse


class _Landmarks(NamedTuple):
    """Means of segments `[*B, R, heads, width]`, and of how many of them there is something, int `[*B]`, or None."""

    means: Float[Array, "*b r heads width"]
    counts: Int[Array, "*b"] | None


def _segment_means(x: Float[Array, "*b s heads width"], lengths: Array | None, landmarks: int) -> _Landmarks:
    """Means over consecutive segments of the entries that count.

    Segment j of n entries begins at `j ⌊n / R⌋ + min(j, n mod R)`. No segment is longer than that of the full length,
    so that all are gathered at once: `[*B, R, longest, heads, width]`.
    """
    size, batch = x.shape[-3], x.shape[:-3]
    landmarks = min(landmarks, size)
    n = jnp.full(batch, size) if lengths is None else lengths
    counts = jnp.minimum(n, landmarks)
    shortest, longer = jnp.divmod(n, jnp.maximum(counts, 1))
    steps = jnp.arange(landmarks, dtype=n.dtype)
    aligned = steps.reshape((1,) * len(batch) + (-1,))
    starts = aligned * shortest[..., None] + jnp.minimum(aligned, longer[..., None])
    there = aligned < counts[..., None]
    sizes = jnp.where(there, shortest[..., None] + (aligned < longer[..., None]), 0)  # [*B, R]
    within = jnp.arange(-(-size // landmarks), dtype=n.dtype).reshape((1,) * (len(batch) + 1) + (-1,))
    inside = within < sizes[..., None]  # [*B, R, longest]
    at = jnp.where(inside, starts[..., None] + within, 0).reshape(*batch, -1, 1, 1)
    taken = jnp.take_along_axis(x, at, axis=-3).reshape(*inside.shape, *x.shape[-2:])
    sums = jnp.where(inside[..., None, None], taken, 0).sum(axis=-3)
    means = sums / jnp.maximum(sizes, 1).astype(x.dtype)[..., None, None]
    return _Landmarks(means, None if lengths is None else counts)
