"""Whether other weights would give the same prediction: weights as different as can be, and weights that are permuted.

`predict(weights)` is the prediction of one example with such weights in the place of the model's own: probabilities
`[*P, C]`, one distribution or several. The shape of the weights is the unit that is changed together: `[T, S]` is one
head, `[N, T, S]` a layer. Functions are of one example; `jax.vmap` takes more.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from attn_jax import checks
from attn_jax.diagnostics.numerics import divide, measured, visible_mask
from attn_jax.diagnostics.similarity import choosing_rows, row_divergence
from attn_jax.typing import Array, ArrayLike, Bool, Float

Predict = Callable[[Array], Array]

PENALTY = (1e2, 1e5)  # on the squared excess, from the first step to the last: soft, so that a climb can go around
RATE = 0.3  # of Adam on the logits, falling to 0
BISECTIONS = 16
HIDDEN = -1e4  # logit of a key that is not visible: its weight is 0, and so is its gradient


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adversarial:
    """Weights found by `adversarial_attention`.

    Attributes:
        weights: `[*U, S]`.
        divergence: mean over rows of JS(p̃, p), nats: 0 is the same weights, ln 2 = 0.693 no key in common.
        total_variation: of the prediction, the largest if there are several; at most ε.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import adversarial_attention
    >>> itself, p = lambda weights: weights, jnp.array([0.5, 0.5])  # predicts the weights: they may move by ε, no more
    >>> found = adversarial_attention(itself, p, jax.random.key(0), epsilon=0.25, steps=50, starts=2)
    >>> sorted(found.weights.round(2).tolist()), bool(found.total_variation <= 0.25)
    ([0.25, 0.75], True)
    """

    weights: Float[Array, "*u s"]
    divergence: Float[Array, ""]
    total_variation: Float[Array, ""]


def adversarial_attention(
    predict: Predict,
    weights: Float[ArrayLike, "*u s"],
    key: Array,
    *,
    epsilon: float,
    visible: Bool[ArrayLike, "..."] | None = None,
    steps: int = 200,
    starts: int = 8,
) -> Adversarial:
    """The weights p̃ that differ most from p and leave the prediction where it is.

        max over p̃ of  mean over rows of JS(p̃, p)    while  TV(predict(p̃), predict(p)) ≤ ε

    Adam climbs on the logits of p̃, half of the starts near p and half anywhere, with a growing penalty on the excess
    over ε. From each end the way to p is searched for its farthest point that keeps to ε. What is found keeps to ε for
    certain; as a maximum it is a lower bound. On small problems whose maximum is known it came to nine tenths of it.

    Args:
        predict: weights `[*U, S]` to probabilities `[*P, C]`.
        weights: p, floating `[*U, S]`, after the softmax. The mean runs over the rows that have a choice of two keys
            or more; rows of zeros stay so. A row that sums to less than 1, beside a sink, keeps its sum.
        key: of `jax.random.key`; draws the starts.
        epsilon: the largest total variation of a prediction, in [0, 1].
        visible: which keys may get weight, boolean, of the shape of the weights or broadcastable to it; None: all.
        steps: of each climb.
        starts: how many climbs, all in memory together.

    Returns:
        `Adversarial`: the best of all climbs; p itself where none keeps to ε.

    Raises:
        ValueError: if an argument has a wrong shape or value.
        TypeError: if `weights` is not floating, or `visible` not boolean.

    Reference: Jain and Wallace 2019, "Attention is not Explanation", section 4.2.2.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import adversarial_attention
    >>> p, values = jnp.array([1.0, 0.0]), jnp.array([0.25, 0.25])  # keys of the same value: either will do
    >>> predict = lambda weights: jnp.stack([weights @ values, 1 - weights @ values])
    >>> found = adversarial_attention(predict, p, jax.random.key(0), epsilon=0.01, steps=50, starts=2)
    >>> bool(found.weights[1] > 0.99), bool(found.total_variation <= 0.01)
    (True, True)
    """
    given = measured("weights", weights, 1, "[*U, S]")
    mask = visible_mask(visible, given)
    key = checks.prng_key("key", key)
    epsilon = _at_most_one("epsilon", epsilon)
    steps, starts = checks.positive_int("steps", steps), checks.positive_int("starts", starts)
    sums = jnp.sum(given, axis=-1, keepdims=True)
    p = divide(given, sums)
    counted = choosing_rows(p, mask)
    prediction = predict(given)

    def variation(q: Array) -> Array:
        return jnp.max(total_variation(predict(q * sums), prediction))

    def mean(rows: Array) -> Array:
        return jnp.sum(jnp.where(counted, rows, 0.0)) / jnp.maximum(jnp.sum(counted), 1).astype(rows.dtype)

    def with_logits(logits: Array) -> Array:
        return jnp.where(counted[..., None], jax.nn.softmax(jnp.where(mask, logits, HIDDEN)), p)

    def excess(q: Array) -> Array:
        """The change of the prediction, less the part of it that ε allows."""
        now = predict(q * sums)
        size = total_variation(now, prediction)[..., None]
        over = size > epsilon
        return (now - prediction) * jnp.where(over, 1 - epsilon / jnp.where(over, size, 1.0), 0.0)

    def objective(logits: Array, penalty: Array) -> Array:
        q, log_q = with_logits(logits), jax.nn.log_softmax(jnp.where(mask, logits, HIDDEN))
        return penalty / 2 * jnp.sum(excess(q) ** 2) - mean(_divergence_of_logs(p, q, log_q))

    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    penalties = jnp.geomspace(*PENALTY, steps, dtype=p.dtype)

    def climb(logits: Array) -> tuple[Array, Array]:
        def step(carry: tuple[Array, optax.OptState], penalty: Array) -> tuple[tuple[Array, optax.OptState], None]:
            logits, state = carry
            updates, state = optimizer.update(jax.grad(objective)(logits, penalty), state)
            return (optax.apply_updates(logits, updates), state), None  # pyright: ignore[reportReturnType]

        (logits, _), _ = jax.lax.scan(step, (logits, optimizer.init(logits)), penalties)
        return _farthest(p, with_logits(logits), variation, epsilon)

    of_near, of_far = jax.random.split(key)
    near = jnp.log(jnp.maximum(p, 1e-6))[None] + jax.random.normal(of_near, (starts // 2, *p.shape), p.dtype)
    far = 2 * jax.random.normal(of_far, (starts - starts // 2, *p.shape), p.dtype)
    found, moved = jax.vmap(climb)(jnp.concatenate([near, far]))
    divergence = jax.vmap(lambda q: mean(row_divergence(q, p)) * math.log(2))(found)
    best = jnp.argmax(divergence)
    return Adversarial(found[best] * sums, divergence[best], moved[best])


def permuted_attention(
    predict: Predict,
    weights: Float[ArrayLike, "*u s"],
    key: Array,
    *,
    visible: Bool[ArrayLike, "..."] | None = None,
    permutations: int = 100,
) -> Float[Array, " permutations"]:
    """The total variation of the prediction as the weights of each row are permuted among the keys that it may see.

    Args:
        predict: weights `[*U, S]` to probabilities `[*P, C]`.
        weights: floating `[*U, S]`, after the softmax.
        key: of `jax.random.key`; draws the permutations, of each row its own.
        visible: as for `adversarial_attention`.
        permutations: how many, one after the other.

    Returns:
        `[permutations]`, the largest total variation where there are several predictions. The paper takes the median.

    Raises:
        ValueError: if an argument has a wrong shape or value.
        TypeError: if `weights` is not floating, or `visible` not boolean.

    Reference: Jain and Wallace 2019, section 4.2.1.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import permuted_attention
    >>> predict = lambda weights: jnp.stack([weights[0], 1 - weights[0]])  # hangs on the weight of the first key
    >>> sharp, flat = (permuted_attention(predict, jnp.array(p), jax.random.key(0)) for p in ([1.0, 0.0], [0.5, 0.5]))
    >>> sorted(set(sharp.tolist())), float(flat.max())
    ([0.0, 1.0], 0.0)
    """
    given = measured("weights", weights, 1, "[*U, S]")
    keys = jax.random.split(checks.prng_key("key", key), checks.positive_int("permutations", permutations))
    prediction = predict(given)
    return jax.lax.map(
        lambda key: jnp.max(total_variation(predict(permute_weights(key, given, visible)), prediction)), keys
    )


def permute_weights(
    key: Array, weights: Float[ArrayLike, "*b s"], visible: Bool[ArrayLike, "..."] | None = None
) -> Float[Array, "*b s"]:
    """The weights of each row in a random order of their own, among the keys that the row may see.

    Args:
        key: of `jax.random.key`.
        weights: floating `[..., S]`.
        visible: boolean, of the shape of the weights or broadcastable to it; None: all keys.

    Returns:
        `[..., S]`, float32 or better. What stands at a key that is not visible stays there.

    Raises:
        ValueError, TypeError: as `permuted_attention`.

    >>> import jax, jax.numpy as jnp
    >>> from attn_jax.diagnostics import permute_weights
    >>> weights, visible = jnp.array([0.5, 0.25, 0.25, 0.0]), jnp.array([True, True, True, False])
    >>> drawn = jax.vmap(lambda key: permute_weights(key, weights, visible))(jax.random.split(jax.random.key(0), 32))
    >>> sorted(set(map(tuple, drawn.tolist())))  # the key that is not visible stays without weight
    [(0.25, 0.25, 0.5, 0.0), (0.25, 0.5, 0.25, 0.0), (0.5, 0.25, 0.25, 0.0)]
    """
    given = measured("weights", weights, 1, "[..., S]")
    mask = visible_mask(visible, given)
    order = jnp.broadcast_to(jnp.arange(given.shape[-1]), given.shape)
    drawn = jax.random.uniform(checks.prng_key("key", key), given.shape)
    # Both put the visible keys first, and leave the others in their order: one in order, one in a random order.
    places = jnp.argsort(jnp.where(mask, order, order + given.shape[-1]), axis=-1)
    sources = jnp.argsort(jnp.where(mask, drawn, 1.0 + order), axis=-1)
    moved = jnp.take_along_axis(given, sources, axis=-1)
    return jnp.take_along_axis(moved, jnp.argsort(places, axis=-1), axis=-1)


def total_variation(p: Float[ArrayLike, "*b c"], q: Float[ArrayLike, "*b c"]) -> Float[Array, "*b"]:
    """`½ Σ |p − q|` of two distributions: 0 if they are the same, 1 if no outcome is in both.

    Args:
        p: probabilities, floating `[..., C]`.
        q: probabilities of the same shape.

    Returns:
        `[...]`, float32 or better.

    Raises:
        ValueError: if the shapes differ, or there is no outcome.
        TypeError: if an array is not floating.

    >>> import jax.numpy as jnp
    >>> from attn_jax.diagnostics import total_variation
    >>> p, others = jnp.array([1.0, 0.0, 0.0]), jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    >>> [float(total_variation(p, q)) for q in others]
    [0.0, 0.5, 1.0]
    """
    first, second = measured("p", p, 1, "[..., C]"), measured("q", q, 1, "[..., C]")
    checks.shape("q", second, first.shape, "of p")
    return jnp.sum(jnp.abs(first - second), axis=-1) / 2


def _divergence_of_logs(p: Array, q: Array, log_q: Array) -> Array:
    """JS(p, q) of each row in nats; its gradient with respect to the logits of q is finite even where q underflows."""
    middle = (p + q) / 2
    log_middle = jnp.log(jnp.where(middle == 0, 1.0, middle))
    log_p = jnp.log(jnp.where(p == 0, 1.0, p))
    return jnp.sum(p * (log_p - log_middle) + q * (log_q - log_middle), axis=-1) / 2


def _farthest(p: Array, q: Array, variation: Callable[[Array], Array], epsilon: float) -> tuple[Array, Array]:
    """The farthest point from p on the ray through q that is found to keep to ε, and the variation there.

    The end of the ray is tried, where a weight is 0, then q, then bisection. The divergence from p grows all along the
    ray, since it is convex and 0 at p.
    """
    end = jnp.min(jnp.where(q < p, p / jnp.where(q < p, p - q, 1.0), jnp.inf))
    end = jnp.where(jnp.isfinite(end), end, 1.0)

    def at(share: Array) -> Array:
        return jnp.maximum(p + share * (q - p), 0.0)

    def attempt(index: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        inside, outside, moved = found
        share = jnp.where(index < 2, jnp.where(index < 1, end, jnp.maximum(inside, 1.0)), (inside + outside) / 2)
        change = variation(at(share))
        keeps = change <= epsilon
        return jnp.where(keeps, share, inside), jnp.where(keeps, outside, share), jnp.where(keeps, change, moved)

    start = jnp.zeros((), p.dtype), end.astype(p.dtype), jnp.zeros((), p.dtype)
    inside, _, moved = jax.lax.fori_loop(0, BISECTIONS + 2, attempt, start)
    return at(inside), moved


def _at_most_one(name: str, x: float) -> float:
    number = checks.finite_number(name, x, least=0.0)
    if number > 1:
        raise ValueError(f"{name} must lie in [0, 1], got {number}")
    return number
