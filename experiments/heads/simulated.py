"""What `heads` finds without data: the cost of many heads, the patterns a head can express, the dimensions it sees."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import attn_jax
from attn_jax import projections
from attn_jax.diagnostics import numerical_rank
from attn_jax.nn import MultiHeadAttention
from attn_jax.typing import Array, Float
from experiments.artifacts import Row
from experiments.benchmarks.timing import interleave
from experiments.claims.heads import PATTERNS
from experiments.counting import temporary_bytes, xla_cost
from experiments.heads.config import HeadsConfig
from experiments.sampling import each_seed, rows_of

FIT_RATE = 0.3  # of Adam, down to nothing by a cosine


def cost(config: HeadsConfig) -> list[Row]:
    """What one attention layer of width D takes: counted, and timed in turn, at every number of heads."""
    dense = functools.partial(attn_jax.dot_product_attention, implementation="dense")
    x = jax.random.normal(jax.random.key(config.seed), (1, config.cost_length, config.cost_width))
    rows, sides = [], {}
    for heads in sorted(config.cost_heads):
        layer = MultiHeadAttention(config.cost_width, heads, attention_fn=dense, rngs=nnx.Rngs(config.seed))
        graphdef, params = nnx.split(layer)
        program = jax.jit(lambda params, x, graphdef=graphdef: nnx.merge(graphdef, params)(x))
        counted = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "products": product_flops(program, params, x),
            "operations": xla_cost(program, params, x).flops,
            "memory": temporary_bytes(program, params, x),
        }
        rows += [{"part": "cost", "heads": heads, "measure": name, "value": n} for name, n in counted.items()]
        jax.block_until_ready(program(params, x))
        sides[heads] = lambda program=program, params=params: jax.block_until_ready(program(params, x))
    for heads, seconds in interleave(sides, rounds=config.rounds).items():
        rows += [{"part": "cost", "heads": heads, "round": r, "seconds": value} for r, value in enumerate(seconds)]
    return rows


def product_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """FLOPs of the matrix products of a program without loops, two a multiply-add, as they stand in its trace."""

    def count(jaxpr: Any) -> int:
        total = 0
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name in ("scan", "while", "cond"):
                raise ValueError(f"function must have no loop or branch, whose products cannot be counted; got {name}")
            if name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
            inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
            total += sum(count(value) for value in inner if hasattr(value, "eqns"))
        return total

    return count(jax.make_jaxpr(function)(*arguments).jaxpr)


def fits(config: HeadsConfig, length: int) -> list[Row]:
    """What is left of the KL to each pattern after q and k were fitted to it, at every width and by construction."""
    draw = functools.partial(draw_patterns, length=length, hot=config.hot)
    targets = each_seed(draw, config.seed, config.simulations, stream=f"patterns {length}")
    starts = each_seed(jax.random.key_data, config.seed, config.simulations, stream=f"starts {length}")
    rows = []
    for width in sorted(config.fit_dims):
        fit = functools.partial(fit_patterns, width=width, steps=config.fit_steps)
        left, apart = jax.jit(lambda *seeds, fit=fit: jax.lax.map(lambda seed: fit(*seed), seeds))(targets, starts)
        where: dict[str, Any] = {"part": "fit", "length": length, "head_dim": width}
        rows += rows_of(left, {"arm": PATTERNS}, measure="left", **where)
        rows += rows_of(apart, {"arm": PATTERNS}, measure="range", **where)
    for index, (name, hot) in enumerate({"permutation": 1, "k_hot": config.hot}.items()):
        logits = [logits_by_hand(np.argsort(-seed[index], axis=-1, kind="stable")[:, :hot]) for seed in targets]
        found = np.array(
            [(left_of(seed[index], s), s.max() - s.min()) for seed, s in zip(targets, logits, strict=True)]
        )
        where = {"part": "fit", "length": length, "head_dim": 2 * hot, "arm": name}
        rows += rows_of(found[:, 0], {}, measure="by_hand", **where)
        rows += rows_of(found[:, 1], {}, measure="by_hand_range", **where)
    return rows


def draw_patterns(key: Array, *, length: int, hot: int) -> Float[Array, "p n n"]:
    """One of each kind of `PATTERNS`, rows that sum to 1."""
    streams = jax.random.split(key, 4)
    permutation = jnp.eye(length)[jax.random.permutation(streams[0], length)]
    order = jnp.argsort(jax.random.uniform(streams[1], (length, length)), axis=-1)
    k_hot = (order < hot) / hot
    sharp, flat = (
        jax.random.dirichlet(stream, jnp.full(length, alpha), (length,))
        for stream, alpha in zip(streams[2:], (0.1, 1.0), strict=True)
    )
    return jnp.stack([permutation, k_hot, sharp, flat])


def fit_patterns(
    target: Float[Array, "p n n"], key_data: Array, *, width: int, steps: int
) -> tuple[Float[Array, " p"], Float[Array, " p"]]:
    """q and k `[n, d_k]` fitted to each pattern by Adam.

    Returns:
        `(left, apart)`: KL(pattern ‖ softmax(q kᵀ/√d_k)) as a share of that of uniform rows, means over rows, and
        largest − smallest logit.
    """
    shape = (2, *target.shape[:-1], width)
    negative_entropy = jax.scipy.special.xlogy(target, target).sum(axis=-1)

    def logits(parameters: Array) -> Array:
        return jnp.einsum("pth,psh->pts", *parameters) / math.sqrt(width)

    def divergence(parameters: Array) -> Array:
        cross = jnp.sum(target * jax.nn.log_softmax(logits(parameters), axis=-1), axis=-1)
        return negative_entropy - cross

    optimizer = optax.adam(optax.cosine_decay_schedule(FIT_RATE, steps))

    def step(state: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], None]:
        parameters, moments = state
        gradient = jax.grad(lambda x: divergence(x).sum())(parameters)
        update, moments = optimizer.update(gradient, moments)
        return (parameters + jnp.asarray(update), moments), None

    start = jax.random.normal(jax.random.wrap_key_data(key_data), shape)
    (parameters, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    found, uniform = logits(parameters), negative_entropy + math.log(target.shape[-1])
    left = divergence(parameters).mean(axis=-1) / uniform.mean(axis=-1)
    return left, found.max(axis=(-2, -1)) - found.min(axis=(-2, -1))


def logits_by_hand(members: np.ndarray) -> np.ndarray:
    """Logits of rank 2k that are 0 at the k keys of each row, `[n, k]`, and far below at all others: `[n, n]`, float64.

    With the keys at points z of the unit circle, −c Π |z − z_m|² over the row's members m is a trigonometric polynomial
    of degree k: k = (cos z, sin z, …, cos kz, sin kz), q its coefficients; the constant is lost in the softmax. c is
    chosen so that all other keys together have a hundredth of a member's weight or less.
    """
    n, degree = members.shape
    points = np.exp(2j * np.pi * np.arange(n) / n)
    query = np.empty((n, 2 * degree))
    for row, own in enumerate(members):
        coefficients = np.poly(points[own])
        powers = np.correlate(coefficients, coefficients, "full")[degree + 1 :]  # of z^-1 … z^-k in |Π|²
        others = np.delete(np.abs(np.polyval(coefficients, points)) ** 2, own)
        strength = 2 * np.log(100 * n) / others.min()
        query[row] = -strength * np.concatenate([powers.real, powers.imag])
    multiples = np.arange(1, degree + 1)[None, :] * np.angle(points)[:, None]
    return query @ np.concatenate([np.cos(multiples), np.sin(multiples)], axis=1).T


def left_of(target: np.ndarray, logits: np.ndarray) -> float:
    """The KL of `softmax(logits)` to a pattern as a share of that of uniform rows."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    inside = target > 0
    own = np.log(np.where(inside, target, 1))
    divergence, uniform = ((target * (own - other)).sum(axis=-1) for other in (logs, -math.log(target.shape[-1])))
    return float(divergence.mean() / uniform.mean())


def seen(config: HeadsConfig) -> list[Row]:
    """On how many dimensions of X each head depends, and through how many directions."""
    width, heads = config.seen_width, config.seen_heads
    head_width = width // heads

    def measure(key: Array) -> dict[str, Array]:
        streams = jax.random.split(key, 5)
        x = jax.random.normal(streams[0], (config.seen_length, width))
        initial = jax.nn.initializers.lecun_normal()
        weights = [initial(stream, (width, width)).reshape(width, heads, head_width) for stream in streams[1:4]]

        def one_token(token: Array) -> Array:
            return jnp.stack(projections.project_qkv(token[None], *weights))[:, 0]

        def output(x: Array) -> Array:
            return attn_jax.dot_product_attention(*projections.project_qkv(x, *weights))[-1]

        def sliced(token: Array) -> Array:
            own = initial(streams[4], (head_width, head_width))
            return projections.split_heads(token[None], heads)[0] @ own

        projected = jax.jacrev(one_token)(x[-1])  # [qkv, N, H, D]
        attended = jax.jacrev(output)(x)  # [N, V, T, D]
        joint = jnp.moveaxis(projected, 0, 1).reshape(heads, 3 * head_width, width)
        # One factorisation: rows of zeros change no rank, and two at once can wait for each other in XLA's CPU pool.
        below = ((0, 0), (0, 2 * head_width), (0, 0))
        ranks = numerical_rank(jnp.stack([joint, *(jnp.pad(m, below) for m in (projected[0], attended[:, :, -1]))]))
        depends = [
            (projected != 0).any(axis=2).mean(axis=-1).min(),
            (attended != 0).any(axis=(1, 2)).mean(axis=-1).min(),
        ]
        return {
            "seen_share": jnp.minimum(*depends),
            "sliced_share": (jax.jacrev(sliced)(x[-1]) != 0).any(axis=1).mean(axis=-1).max(),
            **{f"{name}_rank": rank.mean() for name, rank in zip(("joint", "query", "output"), ranks, strict=True)},
        }

    values = each_seed(measure, config.seed, config.simulations, stream="seen")
    return [row for name, x in values.items() for row in rows_of(x, {}, part="seen", measure=name)]
