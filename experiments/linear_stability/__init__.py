"""Does linear attention lose precision on long sequences?

Claims: L4.
Command: python -m experiments.linear_stability --preset=quick --out=results/linear_stability
Time: smoke 10 s, quick 24 s, full about 3 min on two cores.

Linear attention with and without its normaliser, and with a memory that fades, by dtype of the inputs, in each form of
our engine, whose sums are float32; and token by token with sums that are rounded to the dtype of the inputs.
Errors of the last rows at each length, against the definition in float64 on the same inputs; softmax attention beside
them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import attn_jax
from attn_jax.linear import linear_recurrence
from attn_jax.typing import Array, Float
from experiments import harness
from experiments.artifacts import Row
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.linear_stability import results
from experiments.linear_stability.results import ARMS, DTYPES, FORMS, Arm


@dataclasses.dataclass(frozen=True, kw_only=True)
class StabilityConfig(Config):
    """Flags of this experiment."""

    lengths: tuple[int, ...] = option((256, 1024, 4096, 16384), "n at which errors are measured", least=8, most=2**18)
    square_length: int = option(1024, "longest n of the parallel form, which holds n² weights", least=8, most=2**13)
    width: int = option(32, "width of the head", least=1, most=1024)
    decay: float = option(31 / 32, "of the memory that fades", least=1e-3, most=1.0)
    chunk_size: int = option(64, "steps of a chunk", least=1, most=4096)
    rows: int = option(32, "last rows whose error is measured", least=1, most=1024)
    seeds: int = option(16, "independent seeds", least=2, most=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lengths) < 2:
            raise ValueError(f"lengths must hold two lengths to fit an exponent, got {self.lengths}")
        if self.square_length < min(self.lengths):
            raise ValueError(f"square_length must be at least {min(self.lengths)}, got {self.square_length}")
        if self.rows > min(self.lengths):
            raise ValueError(f"rows must be at most {min(self.lengths)}, got {self.rows}")

    def positions(self, longest: int) -> np.ndarray:
        """The rows that are measured, `[lengths, rows]`, of the lengths up to `longest`."""
        lengths = np.array([n for n in sorted(self.lengths) if n <= longest])
        return lengths[:, None] - np.arange(self.rows, 0, -1)


def units(config: StabilityConfig) -> list[Unit]:
    return [Unit(f"errors-{dtype}", functools.partial(_errors, config, dtype)) for dtype in DTYPES]


def features(x: Array) -> Array:
    """elu(x) + 1 in float32."""
    return jax.nn.elu(x.astype(jnp.float32)) + 1


def _errors(config: StabilityConfig, dtype: str) -> list[Row]:
    """‖x − x₆₄‖ / ‖x₆₄‖ over the last rows at each length, for every arm, way and seed."""
    shape = (3, config.seeds, max(config.lengths), 1, config.width)
    query, key, value = jax.random.normal(jax.random.key(config.seed), shape).astype(dtype)
    mapped = features(query), features(key)
    longest, rows = max(config.lengths), []

    def add(way: str, arm: str, last: Array, exact: np.ndarray) -> None:
        """Rows of one way, from its last rows `[seeds, lengths, rows, v]`, perhaps at the shorter lengths alone."""
        found = np.asarray(last.astype(dtype)).astype(np.float64)
        for (seed, index), error in np.ndenumerate(relative_errors(found, exact[:, : found.shape[1]])):
            where = {"dtype": dtype, "arm": arm, "way": way, "n": sorted(config.lengths)[index], "seed": seed}
            rows.append({**where, "value": error})

    for name, arm in ARMS.items():
        exact = reference(config, mapped, value, arm)
        for form in FORMS:
            length = config.square_length if form == "parallel" else longest
            cut = (x[:, :length] for x in (*mapped, value.astype(jnp.float32)))
            add(form, name, _engine(config, form, arm)(*cut)[:, config.positions(length), 0], exact)
        if dtype != "float32":
            found = _own_sums(config, arm, dtype)(*mapped, value)
            add("own sums", name, found[:, config.positions(longest), 0], exact)
    at = config.positions(longest).ravel()
    attend = jax.jit(attn_jax.dot_product_attention, static_argnames="is_causal")
    found = attend(query[:, at], key, value, query_positions=at, is_causal=True)
    exact = softmax_reference(config, query, key, value)
    add("softmax", "normalised", found.reshape(exact.shape), exact)
    return rows


@functools.cache  # one program for all dtypes of the inputs
def _engine(config: StabilityConfig, form: str, arm: Arm) -> Callable[..., Array]:
    log_decay = jnp.full(1, math.log(config.decay)) if arm.fades else None
    options = {"form": form, "chunk_size": config.chunk_size, "normalize": arm.normalize, "precision": "highest"}
    return jax.jit(lambda query, key, value: linear_recurrence(query, key, value, log_decay, **options))


def _own_sums(config: StabilityConfig, arm: Arm, dtype: str) -> Callable[..., Array]:
    """Token by token in float32, but memory and normaliser rounded to the dtype of the inputs after each."""
    kept = jnp.finfo(dtype)
    decay = config.decay if arm.fades else 1.0

    def rounded(x: Array) -> Array:
        return jax.lax.reduce_precision(x, kept.nexp, kept.nmant)

    def step(sums: tuple[Array, Array], token: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        query, key, value = token
        memory = rounded(decay * sums[0] + key[:, :, None] * value[:, None, :])
        normalizer = rounded(decay * sums[1] + key)
        output = jnp.einsum("br,brv->bv", query, memory, precision="highest")
        if arm.normalize:
            output = output / jnp.einsum("br,br->b", query, normalizer, precision="highest")[:, None]
        return (memory, normalizer), output

    @jax.jit
    def attend(query: Array, key: Array, value: Array) -> Array:
        in_time = (jnp.moveaxis(x[:, :, 0].astype(jnp.float32), 1, 0) for x in (query, key, value))
        tokens = next(in_time), next(in_time), next(in_time)
        empty = jnp.zeros((key.shape[0], key.shape[-1], value.shape[-1]))
        return jnp.moveaxis(jax.lax.scan(step, (empty, empty[..., 0]), tokens)[1], 0, 1)[:, :, None]

    return attend


def reference(
    config: StabilityConfig, mapped: tuple[Array, Array], value: Array, arm: Arm
) -> Float[np.ndarray, "seeds lengths rows v"]:
    """The measured rows by the definition, every pair, in float64."""
    query, keys, values = (np.asarray(x[:, :, 0]).astype(np.float64) for x in (*mapped, value))
    at = config.positions(max(config.lengths))
    distance = at.reshape(-1, 1) - np.arange(keys.shape[1])
    left = np.where(distance >= 0, (config.decay if arm.fades else 1.0) ** np.maximum(distance, 0), 0)
    found = []
    for q, k, v in zip(query, keys, values, strict=True):
        weights = (q[at.ravel()] @ k.T) * left
        found.append(weights @ v / (weights.sum(-1, keepdims=True) if arm.normalize else 1))
    return np.stack(found).reshape(len(found), *at.shape, -1)


def softmax_reference(config: StabilityConfig, *inputs: Array) -> Float[np.ndarray, "seeds lengths rows v"]:
    """The same of softmax attention."""
    query, keys, values = (np.asarray(x[:, :, 0]).astype(np.float64) for x in inputs)
    at = config.positions(max(config.lengths))
    visible = at.reshape(-1, 1) >= np.arange(keys.shape[1])
    found = []
    for q, k, v in zip(query, keys, values, strict=True):
        weights = np.where(visible, np.exp(q[at.ravel()] @ k.T / math.sqrt(config.width)), 0)
        found.append(weights @ v / weights.sum(-1, keepdims=True))
    return np.stack(found).reshape(len(found), *at.shape, -1)


def relative_errors(found: np.ndarray, exact: np.ndarray) -> Float[np.ndarray, "seeds lengths"]:
    """Norm of the difference over that of what is exact; 1 where something is not finite."""
    finite = np.logical_and.reduce(np.isfinite(found), axis=(-2, -1))
    off = np.linalg.norm(np.where(finite[..., None, None], found - exact, 0), axis=(-2, -1))
    return np.where(finite, off / np.linalg.norm(exact, axis=(-2, -1)), 1.0)


EXPERIMENT = Experiment(
    name="linear_stability",
    question="Does linear attention lose precision on long sequences?",
    config=StabilityConfig,
    presets={
        "smoke": {"lengths": (64, 512), "square_length": 64, "width": 8, "rows": 8},
        "quick": {},
        "full": {"lengths": (256, 1024, 4096, 16384, 65536), "square_length": 4096, "width": 64},
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt="Three panels of relative error against the length, by dtype. The forms with sums in float32 stay low, in half "
    "precision at the rounding of the output; sums in half precision rise by orders of magnitude unless memory fades.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: StabilityConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
