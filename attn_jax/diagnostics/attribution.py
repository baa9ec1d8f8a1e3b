"""What a number that a model computes owes to each of its attention weights, and whether two such accounts agree.

`output(weights)` is that number of one example, a loss or a logit, with such weights in the place of the model's own;
of a `Transformer` it is built with the intervention `attn_jax.nn.interventions.shift_weights`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.diagnostics.numerics import measured
from attn_jax.typing import Array, ArrayLike, Bool, Float

Output = Callable[[Array], Array]


def gradient_attribution(output: Output, weights: Float[ArrayLike, "*w"]) -> Float[Array, "*w"]:
    """`A ⊙ ∂y/∂A`: to first order, how much y would lose without each weight.

    Args:
        output: weights to y, one number.
        weights: A, floating `[N, T, S]` or of any shape.

    Returns:
        As the weights, float32 or better, with signs.

    Raises:
        ValueError: if `output` returns more than one number.
        TypeError: if `weights` is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import gradient_attribution
    >>> weights, values = jnp.array([0.75, 0.25, 0.0]), jnp.array([4.0, -8.0, 100.0])
    >>> gradient_attribution(lambda weights: weights @ values, weights).tolist()  # weight times value
    [3.0, -2.0, 0.0]
    """
    array = measured("weights", weights, 0, "[N, T, S]")
    return array * jax.grad(_scalar(output))(array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Integrated:
    """What `integrated_gradients` found.

    Attributes:
        values: as the weights, with signs.
        change: y at the weights less y at the baseline.
        gap: the sum of the values less the change: 0 but for the error of the sum over the way.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import integrated_gradients
    >>> output, weights = lambda weights: jnp.sum(weights**4), jnp.array([1.0, 0.0])
    >>> found = integrated_gradients(output, weights, baseline=jnp.array([0.5, 0.5]))
    >>> float(found.change), bool(abs(found.gap) < 1e-5)
    (0.875, True)
    """

    values: Float[Array, "*w"]
    change: Float[Array, ""]
    gap: Float[Array, ""]


def integrated_gradients(
    output: Output, weights: Float[ArrayLike, "*w"], *, baseline: Float[ArrayLike, "*w"] | None = None, steps: int = 16
) -> Integrated:
    """Attributions that add up: the gradient along the straight way from a baseline to the weights.

        (A − A₀) ⊙ ∫₀¹ ∂y/∂A at A₀ + α (A − A₀) dα

    The integral is a Gauss–Legendre sum. `gap` checks completeness: beside `change` it should be small, or more steps
    are needed.

    Args:
        output: weights to y, one number.
        weights: A, floating `[N, T, S]` or of any shape.
        baseline: A₀, of the same shape; None: zeros, that is, nothing is attended to.
        steps: points on the way, one after the other.

    Returns:
        `Integrated`.

    Raises:
        ValueError: if shapes differ, `steps` is not positive, or `output` returns more than one number.
        TypeError: if an array is not floating.

    Reference: Sundararajan et al. 2017, "Axiomatic attribution for deep networks", equation 1.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import gradient_attribution, integrated_gradients
    >>> output, weights = lambda weights: (weights @ jnp.array([2.0, -4.0])) ** 2, jnp.array([0.5, 0.5])
    >>> float(output(weights)), integrated_gradients(output, weights).values.round(3).tolist()  # they add up to it
    (1.0, [-1.0, 2.0])
    >>> gradient_attribution(output, weights).tolist()  # these do not
    [-2.0, 4.0]
    """
    array = measured("weights", weights, 0, "[N, T, S]")
    start = jnp.zeros_like(array) if baseline is None else measured("baseline", baseline, 0, "[N, T, S]")
    checks.shape("baseline", start, array.shape, "of weights")
    nodes, shares = np.polynomial.legendre.leggauss(checks.positive_int("steps", steps))
    on_way = jnp.asarray((nodes + 1) / 2, array.dtype), jnp.asarray(shares / 2, array.dtype)
    scalar = _scalar(output)

    def add(total: Array, point: tuple[Array, Array]) -> tuple[Array, None]:
        at, share = point
        return total + share * jax.grad(scalar)(start + at * (array - start)), None

    mean, _ = jax.lax.scan(add, jnp.zeros_like(array), on_way)
    values = (array - start) * mean
    change = scalar(array) - scalar(start)
    return Integrated(values, change, jnp.sum(values) - change)


@dataclasses.dataclass(frozen=True)
class RankAgreement:
    """Kendall's τ between two accounts of the same examples.

    Attributes:
        values: `[E]`, of each example; NaN where an account does not tell two items apart.
        mean: over the examples that have a value.
        low, high: 95% interval of the mean over examples, Student's t.
        null_low, null_high: where 95% of such means lie if one account is permuted within each example.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import rank_agreement
    >>> weights = np.random.default_rng(0).random((8, 6))
    >>> found = rank_agreement(weights, np.exp(weights))  # the same order
    >>> round(found.mean, 6), bool(found.null_low < 0 < found.null_high < found.mean)
    (1.0, True)
    """

    values: np.ndarray
    mean: float
    low: float
    high: float
    null_low: float
    null_high: float


def rank_agreement(
    first: Float[ArrayLike, "e n"],
    second: Float[ArrayLike, "e n"],
    counted: Bool[ArrayLike, "e n"] | None = None,
    *,
    permutations: int = 100,
    seed: int = 0,
) -> RankAgreement:
    """Whether two accounts rank the items of an example alike: Kendall's τ-b, with an interval and a permuted null.

    Runs on the host. An example whose account is the same for all items has no τ and is left out.

    Args:
        first: `[E, n]`: E examples of n items, attention weights on n keys, say.
        second: `[E, n]`: the same items by gradients, or by leaving them out.
        counted: which items count, boolean `[E, n]`; None: all.
        permutations: of the null.
        seed: of the permutations.

    Returns:
        `RankAgreement`.

    Raises:
        ValueError: if shapes differ or `permutations` is not positive.
        TypeError: if `first` or `second` is not floating, or `counted` not boolean.

    Reference: Kendall 1945; Jain and Wallace 2019, section 4.1.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import rank_agreement
    >>> weights = np.array([[0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
    >>> importance = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [5.0, 5.0, 5.0]])  # alike, opposite, all the same
    >>> rank_agreement(weights, importance).values.round(6).tolist()
    [1.0, -1.0, nan]
    """
    from scipy import stats  # most of a second to import, and only this function needs it

    x, y = (
        np.asarray(checks.floating_array(name, a), np.float64) for name, a in (("first", first), ("second", second))
    )
    checks.rank("first", x, 2, "[E, n]")
    checks.shape("second", y, x.shape, "[E, n]")
    mask = np.ones(x.shape, bool) if counted is None else np.asarray(counted)
    checks.shape("counted", mask, x.shape, "[E, n]")
    if mask.dtype != bool:
        raise TypeError(f"counted must be boolean, got {mask.dtype}")
    permutations = checks.positive_int("permutations", permutations)
    pairs = [(one[at], other[at]) for one, other, at in zip(x, y, mask, strict=True)]
    values = np.array([_kendall(*pair) for pair in pairs])
    known = [pair for pair, value in zip(pairs, values, strict=True) if not np.isnan(value)]
    if not known:
        return RankAgreement(values, *[float("nan")] * 5)
    rng = np.random.default_rng(seed)
    null = [np.mean([_kendall(one, rng.permutation(other)) for one, other in known]) for _ in range(permutations)]
    found = values[~np.isnan(values)]
    half = stats.t.ppf(0.975, len(found) - 1) * stats.sem(found) if len(found) > 1 else np.inf
    ends = (found.mean() - half, found.mean() + half, *np.quantile(null, (0.025, 0.975)))
    return RankAgreement(values, float(found.mean()), *map(float, ends))


def _kendall(x: np.ndarray, y: np.ndarray) -> float:
    """τ-b = Σ sign(Δx) sign(Δy) / √(pairs that x tells apart · pairs that y tells apart); NaN if one tells none."""
    first, second = (np.sign(z[:, None] - z[None, :]) for z in (x, y))
    apart = np.abs(first).sum() * np.abs(second).sum()
    return float((first * second).sum() / np.sqrt(apart)) if apart else float("nan")


def _scalar(output: Output) -> Output:
    def scalar(weights: Array) -> Array:
        value = jnp.asarray(output(weights))
        checks.rank("the result of output", value, 0, "[]: one number")
        return value

    return scalar
