"""How fast is linear attention in chunks, in how much memory, and against whom?

Claims: none; the figures of the README rest on it.
Command: python -m experiments.benchmarks.linear --preset=quick --out=results/benchmarks.linear
Time: smoke 10 s, quick 90 s, full 6 min on two cores; full takes 3 GB for the scan over tokens with gradients.

Causal linear attention, forward, and forward and backward: in chunks, token by token (a plain scan over tokens, as one
would write it), and exact softmax attention by tiles, run in turn at one length; all linear ones are checked to return
the same numbers. Then chunks alone at growing lengths: the exponent of time in n, and of compiled temporary memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import attn_jax
from attn_jax.linear import linear_attention, retention
from attn_jax.typing import Array
from experiments import counting, figures, harness
from experiments.artifacts import Row
from experiments.benchmarks.problems import DIRECTIONS
from experiments.benchmarks.race import PRODUCT, Entrant, product_flops, race
from experiments.benchmarks.sides import Contestant, contestant
from experiments.benchmarks.timing import LEAST_ROUNDS, exponent, ratio
from experiments.config import Config, option
from experiments.estimates import Estimate
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells

CHUNKS, TOKENS, TILES = "chunks", "token by token", "exact tiles"


def token_by_token(query: Array, key: Array, value: Array) -> Array:
    """Linear attention as a scan over tokens: two sums, one product to read each."""
    query, key = (jax.nn.elu(x) + 1 for x in (query, key))

    def step(sums: tuple[Array, Array], token: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        q, k, v = token
        memory, normalizer = sums[0] + k[..., None] * v[..., None, :], sums[1] + k
        weight = jnp.einsum("bnr,bnr->bn", q, normalizer)
        return (memory, normalizer), jnp.einsum("bnr,bnrv->bnv", q, memory) / weight[..., None]

    empty = jnp.zeros((*key.shape[:1], *key.shape[2:], value.shape[-1]))
    tokens = (jnp.moveaxis(query, 1, 0), jnp.moveaxis(key, 1, 0), jnp.moveaxis(value, 1, 0))
    return jnp.moveaxis(jax.lax.scan(step, (empty, empty[..., 0]), tokens)[1], 0, 1)


SIDES: dict[str, Callable[[Array, Array, Array], Array]] = {
    CHUNKS: functools.partial(linear_attention, is_causal=True),
    TOKENS: token_by_token,
    TILES: functools.partial(attn_jax.dot_product_attention, is_causal=True),
}
GROWING: dict[str, Callable[[Array, Array, Array], Array]] = {"linear attention": SIDES[CHUNKS], "retention": retention}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(Config):
    """Flags of this benchmark."""

    length: int = option(16384, "n where sides are compared", least=1, most=2**17)
    lengths: tuple[int, ...] = option((8192, 32768, 131072), "n of the growth", least=8, most=2**20)
    heads: int = option(8, "heads where sides are compared", least=1, most=256)
    growing_heads: int = option(2, "heads of the growth", least=1, most=256)
    head_dim: int = option(64, "head width", least=1, most=1024)
    rounds: int = option(LEAST_ROUNDS, "readings of each side", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lengths) < 2:
            raise ValueError(f"lengths must hold two lengths to fit an exponent, got {self.lengths}")

    def ready(self, attend: Callable[..., Any], length: int, heads: int, direction: str) -> Contestant:
        """A function on normal inputs of a size."""
        keys = jax.random.split(jax.random.key(self.seed), 4)
        *inputs, cotangent = (jax.random.normal(key, (1, length, heads, self.head_dim)) for key in keys)
        return contestant(attend, inputs, cotangent, direction)


def units(config: LinearConfig) -> list[Unit]:
    found = []
    for direction in DIRECTIONS:
        found.append(Unit(f"sides-{direction}", functools.partial(_sides, config, direction)))
        found += [
            Unit(f"growth-{x.replace(' ', '-')}-{direction}", functools.partial(_growth, config, x, direction))
            for x in GROWING
        ]
    return found


def _sides(config: LinearConfig, direction: str) -> list[Row]:
    """All sides at one length; that of exact tiles computes something else."""
    ready = {name: config.ready(attend, config.length, config.heads, direction) for name, attend in SIDES.items()}
    expected = ready[TOKENS].result()
    entrants = {name: Entrant(one, None if name == TILES else expected) for name, one in ready.items()}
    rows = race(entrants, rounds=config.rounds, torch=False)
    return [{"part": "sides", "direction": direction, "n": config.length, **row} for row in rows]


def _growth(config: LinearConfig, name: str, direction: str) -> list[Row]:
    """One function at all lengths, in turn."""
    entrants = {
        str(length): Entrant(config.ready(GROWING[name], length, config.growing_heads, direction), None)
        for length in sorted(config.lengths)
    }
    rows = race(entrants, rounds=config.rounds, torch=False)
    return [
        {"part": name, "direction": direction, "n": int(row["side"]), **row} for row in rows if row["side"] != PRODUCT
    ]


def over(measurements: pd.DataFrame, side: str, base: str, direction: str) -> Estimate:
    """Time of a side over that of another."""
    return ratio(*(_seconds(measurements, "sides", direction, name)[:, 0] for name in (side, base)))


def time_exponent(measurements: pd.DataFrame, name: str, direction: str) -> Estimate:
    """Of the time of a function in n."""
    lengths = _memory(measurements, name, direction).index.to_numpy(dtype=np.float64)
    return exponent(lengths, _seconds(measurements, name, direction))


def memory_exponent(measurements: pd.DataFrame, name: str, direction: str) -> Estimate:
    """Of its compiled temporary memory; the interval is the range over neighbouring lengths."""
    found = _memory(measurements, name, direction)
    return counting.counted_exponent([int(n) for n in found.index], found.to_numpy(dtype=np.float64))


def _chosen(measurements: pd.DataFrame, part: str, direction: str, side: str | None) -> pd.DataFrame:
    rows = measurements.query("part == @part and direction == @direction")
    return rows if side is None else rows.query("side == @side")


def _seconds(measurements: pd.DataFrame, part: str, direction: str, side: str | None = None) -> np.ndarray:
    """`[rounds, lengths]`."""
    rows = _chosen(measurements, part, direction, side).query("seconds.notna()")
    return rows.pivot_table(index="round", columns="n", values="seconds").to_numpy(dtype=np.float64)


def _memory(measurements: pd.DataFrame, part: str, direction: str, side: str | None = None) -> pd.Series:
    """Bytes by length."""
    rows = _chosen(measurements, part, direction, side).query("measure == 'temporary_bytes'")
    return pd.Series(rows["value"].to_numpy(), index=rows["n"].to_numpy()).sort_index()


def tables(config: LinearConfig, measurements: pd.DataFrame) -> list[Table]:
    compared, grown = [], []
    for direction in DIRECTIONS:
        words = direction.replace("_", " and ")
        for side in SIDES:
            seconds = _seconds(measurements, "sides", direction, side)
            memory = _memory(measurements, "sides", direction, side)
            if not seconds.size:
                compared.append((words, side, "returns other numbers", "–", "–"))
                continue
            numbers = (f"{np.median(seconds) * 1e3:.3g}", f"{memory.iloc[0] / 1e6:.3g}")
            compared.append((words, side, *numbers, _spell(over(measurements, side, CHUNKS, direction))))
        for name in GROWING:
            milliseconds = np.median(_seconds(measurements, name, direction), axis=0) * 1e3
            exponents = (f(measurements, name, direction) for f in (time_exponent, memory_exponent))
            grown.append((words, name, *(f"{x:.3g}" for x in milliseconds), *map(_spell, exponents)))
    product = _seconds(measurements, "sides", "forward", PRODUCT)
    rate = f"the machine's product: {product_flops() / np.median(product) / 1e9:.3g} GFLOP/s"
    title = f"n = {config.length}, {config.heads} heads of {config.head_dim}; {rate}"
    lengths = [f"ms at {n}" for n in sorted(config.lengths)]
    return [
        Table(title, ("direction", "side", "ms", "temporary MB", f"time over {CHUNKS}"), cells(compared)),
        Table("Growth", ("direction", "function", *lengths, "time exponent", "memory exponent"), cells(grown)),
    ]


def _spell(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def figure(config: LinearConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 2)
    for row, direction in enumerate(DIRECTIONS):
        for index, name in enumerate(GROWING):
            look = {"linestyle": ("-", "--")[row], "alpha": 0.85}
            label = f"{name}, {direction.replace('_', ' and ')}"
            times = np.median(_seconds(measurements, name, direction), axis=0) * 1e3
            memory = _memory(measurements, name, direction)
            figures.curve(axes[0, 0], index, sorted(config.lengths), times, label, **look)
            figures.curve(axes[0, 1], index, memory.index, memory / 1e6, label, **look)
    axes[0, 0].set(title="Time", xlabel="n", ylabel="milliseconds", yscale="log")
    axes[0, 1].set(title="Compiled temporary memory", xlabel="n", ylabel="MB", yscale="log")
    for one in axes[0]:
        figures.powers(one, sorted(config.lengths))
        one.legend(fontsize=7)
    return drawn


EXPERIMENT = Experiment(
    name="benchmarks.linear",
    question="How fast is linear attention in chunks, in how much memory, and against whom?",
    config=LinearConfig,
    presets={
        "smoke": {"length": 256, "lengths": (256, 1024), "heads": 2, "head_dim": 16},
        "quick": {"length": 8192, "lengths": (4096, 16384, 65536)},
        "full": {"rounds": 15},
    },
    units=units,
    judge=lambda config, measurements: (),
    figure=figure,
    alt="Two log-log plots against the length, time and memory: straight lines of slope 1.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: LinearConfig) -> Result:
    """Measures; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
