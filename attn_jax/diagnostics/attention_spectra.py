"""Leading singular values of the weights of each head, without ever forming the square.

`A·x` is attention whose value is x, and `Aᵀ·y` its transpose with respect to the value: both run tile by tile. A block
of directions is drawn at random, grown by `Aᵀ` of its best left directions, cut back to the best of what there is, and
grown again (block Davidson). So it finds by itself the polynomials in `AᵀA` that tell close singular values apart; the
powers of plain subspace iteration would need many times the products.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import biases, checks, masks
from attn_jax.diagnostics.numerics import divide, root
from attn_jax.diagnostics.ranks import effective_rank_of, stable_rank_of
from attn_jax.exact import Blockwise, blockwise, dense
from attn_jax.exact.arguments import AttentionOptions, Problem, only_attention_options, prepare
from attn_jax.exact.attention import choose_measured
from attn_jax.exact.steps import sink_shares
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpectrum:
    """The k leading singular triplets of the weights A `[T, S]` of each head, and what they say of its rank.

    Attributes:
        values: `[*B, N, k]`, descending.
        left, right: `[*B, T, N, k]` and `[*B, S, N, k]`, orthonormal in each head, with `A · right = left · values`.
        residuals: `[*B, N, k]`, `‖Aᵀ · left − right · values‖`. A singular value of A lies within `residual / √2` of
            each of `values`; where no other is near, within about `residual²` by its distance from the next.
        stable_rank: `[*B, N]`, `‖A‖_F² / σ₁²`; 0 for a head of zeros.
        effective_rank_low, effective_rank_high: `[*B, N]`, between them lies the effective rank, `exp(−Σ q ln q)` with
            `q = σ / Σσ` over all singular values, whatever those not computed are; see `attention_spectrum`.
        converged: boolean `[*B, N]`, whether all residuals of the head are within the tolerance.
        iterations: int32, how often the block was grown; 0 where the square itself was decomposed.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import attention_spectrum
    >>> x = jnp.zeros((4, 1, 2))  # equal logits: every entry of the weights is 1/4, of rank one
    >>> found = attention_spectrum(x, x, k=1)
    >>> bool(jnp.allclose(found.left[:, 0] * found.values[0] @ found.right[:, 0].T, 0.25, atol=1e-6))
    True
    >>> found.converged.tolist(), int(found.iterations)  # so few that the square was decomposed
    ([True], 0)
    """

    values: Float[Array, "*b n k"]
    left: Float[Array, "*b t n k"]
    right: Float[Array, "*b s n k"]
    residuals: Float[Array, "*b n k"]
    stable_rank: Float[Array, "*b n"]
    effective_rank_low: Float[Array, "*b n"]
    effective_rank_high: Float[Array, "*b n"]
    converged: Bool[Array, "*b n"]
    iterations: Int[Array, ""]


def attention_spectrum(
    query: Float[ArrayLike, "*b t n h"],
    key: Float[ArrayLike, "*b s k h"],
    bias: biases.Bias | ArrayLike | None = None,
    mask: masks.Mask | ArrayLike | None = None,
    *,
    k: int = 32,
    oversampling: int | None = None,
    iterations: int = 300,
    tolerance: float = 1e-3,
    rng_key: ArrayLike | None = None,
    implementation: str | Blockwise | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionSpectrum:
    """The k leading singular values and vectors of the weights `A = attention_weights(...)`, in O(T + S) memory.

    With V the directions kept, orthonormal, and A V = U Σ, one step is

        Z = an orthonormal basis of Aᵀ U₁ without what lies in V
        A [V Z] = Q R = Q P Σ' Wᵀ,    U ← Q P₂,    V ← [V Z] W₂

    where U₁ are the first `k + oversampling` columns of U, and P₂ and W₂ the first twice as many. It is repeated until
    every residual `‖Aᵀ u − σ v‖` is at most `tolerance · σ`, or down to rounding. Where there are few logits, or one
    side is so short that the kept directions would fill it, the square itself is formed and decomposed.

    What is known of the r singular values not computed bounds the **effective rank**: none is above c, the last one
    computed with its residual, and their squares sum to `τ = ‖A‖_F² − Σσ²`. Let s be the sum of the σ computed, h that
    of their σ ln σ, and t and g those of the others. The entropy of all of them, over their sum, is

        ln(s + t) − (h + g) / (s + t),    t ln(t / r) ≤ g ≤ t ln(τ / t)

    since g is least where all r are equal, and since no entropy is below the negative logarithm of the sum of squares.
    With g at either end it grows with t, as no other is above those computed, and `τ / c ≤ t ≤ √(r τ)`. So it is least
    for `τ / c²` values of size c and largest for r equal ones. τ counts as uncertain by the rounding of `‖A‖_F²`.

    Args:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        bias, mask, options: as for `attn_jax.dot_product_attention`; `precision` is the highest unless given, since
            coarser products have no sharper residuals than their own rounding.
        k: how many singular values, at most `min(T, S)`.
        oversampling: how many more directions each step adds, at most `min(T, S) − k`; None for 16, or what fits.
        iterations: the most steps. Each takes about as long as attention, forward and backward.
        tolerance: of the residuals, relative to their singular values.
        rng_key: of `jax.random`, draws the first directions; None for `jax.random.key(0)`.
        implementation: "dense" decomposes the square, "blockwise" and `Blockwise(...)` go tile by tile, None chooses as
            `dot_product_attention` does.

    Returns:
        `AttentionSpectrum`, float32 or better; a constant to gradients.

    Raises:
        ValueError: `k` or `oversampling` that does not fit the square, an implementation that is not one of these, or
            as `dot_product_attention`.
        TypeError: as `dot_product_attention`.

    Reference: Halko, Martinsson & Tropp 2011, algorithms 4.1 and 5.1 (random start, decomposition in its image); Musco
    & Musco 2015 (more than powers); Stathopoulos & Saad 1998, "Restarting techniques for the (Jacobi-)Davidson
    symmetric eigenvalue methods"; Roy & Vetterli 2007 (effective rank).

    >>> import jax.numpy as jnp
    >>> x = jnp.zeros((128, 1, 8))  # uniform weights are of rank one
    >>> spectrum = attention_spectrum(x, x, k=2)
    >>> spectrum.values.round(4).tolist(), spectrum.stable_rank.round(4).tolist()
    ([[1.0, 0.0]], [1.0])
    """
    options = only_attention_options("attention_spectrum", options)
    if options.get("precision") is None:
        options["precision"] = _HIGHEST
    problem = prepare(query, key, None, bias, mask, **options)
    options["logits_soft_cap"] = problem.logits_soft_cap  # a number, even if it came as an array
    most, k = min(problem.square.shape[-2:]), checks.positive_int("k", k)
    if k > most:
        raise ValueError(f"k must be at most min(T, S) = {most}, got {k}")
    fitting = min(16, most - k)
    oversampling = fitting if oversampling is None else checks.positive_int("oversampling", oversampling, least=0)
    if oversampling > most - k:
        raise ValueError(f"oversampling must be at most min(T, S) - k = {most - k}, got {oversampling}")
    iterations = checks.positive_int("iterations", iterations)
    tolerance = checks.finite_number("tolerance", tolerance, positive=True)
    rng_key = checks.prng_key("rng_key", jax.random.key(0) if rng_key is None else rng_key)
    if not isinstance(implementation, Blockwise):
        checks.one_of("implementation", implementation, ("dense", "blockwise", None))
    sizes = _Sizes(k, k + oversampling, implementation if isinstance(implementation, Blockwise) else Blockwise())
    if choose_measured(problem, implementation) == "dense" or most < 3 * sizes.block:
        sizes = dataclasses.replace(sizes, tiles=None)
    query, key = (x.astype(problem.accumulation_dtype) for x in (problem.query, problem.key))
    # Compiled once for each structure: arrays are traced, everything else is static.
    leaves, structure = jax.tree.flatten((query, key, bias, mask, options))
    is_array = [isinstance(x, (jax.Array, np.ndarray)) for x in leaves]
    arrays = [jax.lax.stop_gradient(x) if traced else None for x, traced in zip(leaves, is_array, strict=True)]
    others = tuple(None if traced else x for x, traced in zip(leaves, is_array, strict=True))
    return _spectrum(structure, others, sizes, arrays, _Search(rng_key, iterations, tolerance))


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """How many triplets are wanted, how many directions a step adds, and the tiles; None to form the square."""

    k: int
    block: int
    tiles: Blockwise | None


class _Search(NamedTuple):
    """How to begin and when to end."""

    rng_key: Array
    iterations: int | Array
    tolerance: float | Array


class _Triplets(NamedTuple):
    """Singular triplets, descending: `A · right = left · values`, columns orthonormal."""

    left: Float[Array, "*b n t r"]
    values: Float[Array, "*b n r"]
    right: Float[Array, "*b n s r"]

    def first(self, count: int) -> "_Triplets":
        return _Triplets(*(x[..., :count] for x in self))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _spectrum(
    structure: Any, others: tuple, sizes: _Sizes, arrays: list[Array | None], search: _Search
) -> AttentionSpectrum:
    leaves = [other if array is None else array for array, other in zip(arrays, others, strict=True)]
    query, key, bias, mask, options = jax.tree.unflatten(structure, leaves)
    problem = prepare(query, key, None, bias, mask, **options)
    if sizes.tiles is None:
        left, values, right = jnp.linalg.svd(dense.weights(problem), full_matrices=False)
        found = _Triplets(left, values, jnp.swapaxes(right, -1, -2)).first(sizes.k)
        residuals, turns = jnp.zeros_like(found.values), jnp.int32(0)
        stable_rank, low = stable_rank_of(values), effective_rank_of(values)
        high, converged = low, jnp.isfinite(values).all(axis=-1)
    else:
        found, residuals, norm, turns = _find(problem, sizes, sizes.tiles, search)
        stable_rank = divide(norm, found.values[..., 0]) ** 2
        rest = min(problem.square.shape[-2:]) - sizes.k
        low, high = _effective_rank_bounds(found.values, residuals, stable_rank, rest)
        converged = jnp.all(residuals <= _allowed(found.values, search.tolerance), axis=-1)
    left, right = (jnp.swapaxes(x, -2, -3) for x in (found.left, found.right))
    return AttentionSpectrum(found.values, left, right, residuals, stable_rank, low, high, converged, turns)


def _find(problem: Problem, sizes: _Sizes, tiles: Blockwise, search: _Search) -> tuple[_Triplets, Array, Array, Array]:
    """The first k triplets, their residuals, the Frobenius norm of each head, and how many steps it took."""
    dtype, k, block, keep = problem.accumulation_dtype, sizes.k, sizes.block, 2 * sizes.block
    *batch, heads, _, columns = problem.square.shape
    # The directions differ from query head to query head, so each gets a value, and a key, of its own.
    problem = dataclasses.replace(problem, key=jnp.repeat(problem.key, heads // problem.num_kv_heads, axis=-2))

    def attend(x: Array, *statistics: str) -> tuple[Array, blockwise.Results]:
        """`A · x`."""
        valued = dataclasses.replace(problem, value=jnp.swapaxes(x, -2, -3))
        results = blockwise.attend(valued, statistics, tiles)
        assert results.output is not None
        return jnp.swapaxes(results.output, -2, -3), results

    nothing = jnp.zeros((*batch, heads, columns, block), dtype)
    _, transpose, rows = jax.vjp(lambda x: attend(x, "sum_p2"), nothing, has_aux=True)

    def look_back(found: _Triplets) -> tuple[Array, Array]:
        """`Aᵀ` of the best left directions, and the residuals of the first k."""
        (back,) = transpose(found.left[..., :block])
        difference = back[..., :k] - found.right[..., :k] * found.values[..., None, :k]
        return back, jnp.linalg.norm(difference, axis=-2)

    def goes_on(state: tuple[_Triplets, Array, Array, Array]) -> Array:
        found, _, residuals, turns = state
        allowed = _allowed(found.values[..., :k], search.tolerance)
        return (turns < search.iterations) & jnp.any(residuals > allowed)  # NaN ends it

    def step(state: tuple[_Triplets, Array, Array, Array]) -> tuple[_Triplets, Array, Array, Array]:
        found, back, _, turns = state
        # One stacked factorisation after the other: two at a time can starve XLA's CPU threads. Householder's Q is
        # orthonormal whatever the rank.
        new = jnp.linalg.qr(jnp.concatenate([found.right, back], axis=-1))[0][..., keep:]
        images = jnp.concatenate([found.left * found.values[..., None, :], attend(new)[0]], axis=-1)
        found = _decompose(images, jnp.concatenate([found.right, new], axis=-1)).first(keep)
        return found, *look_back(found), turns + 1

    start, _ = jnp.linalg.qr(jax.random.normal(search.rng_key, (*batch, heads, columns, keep), dtype))
    found = _decompose(attend(start)[0], start)
    found, _, residuals, turns = jax.lax.while_loop(goes_on, step, (found, *look_back(found), jnp.int32(0)))
    return found.first(k), residuals, _norm(problem, rows), turns


def _decompose(images: Float[Array, "*b n t r"], directions: Float[Array, "*b n s r"]) -> _Triplets:
    """The triplets of A among orthonormal directions, from their images `A · directions`."""
    basis, triangle = jnp.linalg.qr(images)
    left, values, right = jnp.linalg.svd(triangle)
    return _Triplets(
        jnp.matmul(basis, left, precision=_HIGHEST),
        values,
        jnp.matmul(directions, jnp.swapaxes(right, -1, -2), precision=_HIGHEST),
    )


def _allowed(values: Float[Array, "*b n k"], tolerance: float | Array) -> Float[Array, "*b n k"]:
    """The residuals that end the search. Measured in units of `ε σ₁`, those of ordinary heads come down to about 10,
    and of heads of low rank, where the values are rounding themselves, to about 150."""
    unit = float(jnp.finfo(values.dtype).eps) * values[..., :1]
    return jnp.where(values > 256 * unit, jnp.maximum(tolerance * values, 32 * unit), 256 * unit)


def _norm(problem: Problem, rows: blockwise.Results) -> Float[Array, "*b n"]:
    """`‖A‖_F`, from Σp² over the visible keys of each row and the keys' share of its softmax."""
    sizes = root(rows.statistics["sum_p2"])
    if problem.sinks is not None:
        keys_share, _ = sink_shares(problem.sinks.reshape((1,) * (sizes.ndim - 1) + (-1,)), rows.logsumexp)
        sizes = jnp.where(sizes == 0, 0, sizes * keys_share)
    largest = sizes.max(axis=-2, keepdims=True)
    return largest[..., 0, :] * root(jnp.sum(divide(sizes, largest) ** 2, axis=-2))


def _effective_rank_bounds(
    values: Float[Array, "*b n k"], residuals: Float[Array, "*b n k"], stable_rank: Float[Array, "*b n"], others: int
) -> tuple[Float[Array, "*b n"], Float[Array, "*b n"]]:
    """The least and the largest effective rank with these leading values and `others` more, in units of σ₁."""
    sigma = divide(values, values[..., :1])
    ceiling = divide(values[..., -1] + residuals[..., -1], values[..., 0])
    rest = stable_rank - jnp.sum(sigma**2, axis=-1)
    rounding = 8 * float(jnp.finfo(values.dtype).eps) * stable_rank
    total, logs = jnp.sum(sigma, axis=-1), jnp.sum(_x_log_x(sigma), axis=-1)

    def rank(count: Array | int, size: Array) -> Array:
        """The effective rank if there are `count` more values of this size."""
        whole = total + count * size
        nats = jnp.log(jnp.where(whole == 0, 1, whole)) - divide(logs + count * _x_log_x(size), whole)
        return jnp.where(whole == 0, 0, jnp.exp(nats))

    least, most = jnp.maximum(rest - rounding, 0), jnp.maximum(rest + rounding, 0)
    few, equal = divide(least, ceiling**2), root(most / others)
    return rank(jnp.minimum(few, others), ceiling), rank(others, jnp.minimum(equal, ceiling))


def _x_log_x(x: Array) -> Array:
    return x * jnp.log(jnp.where(x == 0, 1, x))
