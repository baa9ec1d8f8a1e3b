"""How do time and memory grow with the length, the head width and the heads?

Claims: C1, C1b.
Command: python -m experiments.complexity --preset=quick --out=results/complexity
Time: smoke 15 s, quick 87 s, full about 15 min on two cores.

Exponents of time in n and in d, per mechanism, forward and with backward, all run in turn; where attention becomes half
of a whole layer, by FLOPs and by time; and exponents of memory in n, d and h: of what the compiled program takes, and
of what is kept between forward and backward.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax.typing import Array
from experiments import counting, harness
from experiments.artifacts import Row
from experiments.benchmarks.timing import LEAST_ROUNDS, interleave
from experiments.complexity import results
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.mechanisms import EXACT, MECHANISMS, Attend, apply_layer, bare, make_layer

STAGES = ("forward", "training")
SIZES = ("n", "d", "h")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComplexityConfig(Config):
    """Flags of this experiment."""

    mechanisms: tuple[str, ...] = option((*EXACT, "linear"), "mechanisms", choices=tuple(MECHANISMS))
    lengths: tuple[int, ...] = option((512, 1024, 2048), "n of the timed sweep", least=8, most=2**17)
    widths: tuple[int, ...] = option((32, 64, 128, 256), "d of the timed sweep, and of the memory", least=1, most=4096)
    length: int = option(1024, "n where d varies", least=8, most=2**16)
    heads: int = option(2, "heads h", least=1, most=64)
    head_dim: int = option(64, "head width d where n varies; the layer has D = h · d", least=1, most=1024)
    layer_shares: tuple[float, ...] = option(
        (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0), "n of the layer, over 6D", least=1e-3, most=100
    )
    memory_lengths: tuple[int, ...] = option((512, 1024, 2048, 4096), "n of the memory", least=8, most=2**16)
    memory_heads: tuple[int, ...] = option((2, 4, 8, 16), "h of the memory", least=1, most=256)
    rounds: int = option(16, "readings of each time", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "widths", "memory_lengths", "memory_heads"):
            if len(getattr(self, name)) < 2:
                raise ValueError(f"{name} must hold two sizes to fit an exponent, got {getattr(self, name)}")
        if not {"dense", "blockwise"} <= set(self.mechanisms):
            raise ValueError(f"mechanisms must hold dense and blockwise, which C1b reads, got {self.mechanisms}")
        if sum(share <= 1 for share in self.layer_shares) < 2 or max(self.layer_shares) <= 1:
            raise ValueError(f"layer_shares must hold two up to 1 and one above it, got {self.layer_shares}")

    @property
    def model_width(self) -> int:
        """D of the layer."""
        return self.heads * self.head_dim

    @property
    def layer_lengths(self) -> tuple[int, ...]:
        """n of the layer, ascending."""
        return tuple(sorted({max(round(6 * self.model_width * share), 1) for share in self.layer_shares}))

    def memory_sizes(self, vary: str) -> list[tuple[int, int, int]]:
        """(n, d, h) of the memory while one of them varies."""
        varied = {"n": self.memory_lengths, "d": self.widths, "h": self.memory_heads}[vary]
        base = {"n": self.length, "d": self.head_dim, "h": self.heads}
        sizes = ({**base, vary: size} for size in sorted(varied))
        return [(size["n"], size["d"], size["h"]) for size in sizes]


def units(config: ComplexityConfig) -> list[Unit]:
    by_length = [(n, config.head_dim, config.heads) for n in sorted(config.lengths)]
    by_width = [(config.length, d, config.heads) for d in sorted(config.widths)]
    timed = [
        Unit(f"time-{vary}-{stage}", functools.partial(_times, config, vary, stage, sizes))
        for vary, sizes in (("n", by_length), ("d", by_width))
        for stage in STAGES
    ]
    memory = [Unit(f"memory-{name}", functools.partial(_memory, config, name)) for name in config.mechanisms]
    return [*timed, Unit("layer", functools.partial(_layer, config)), *memory]


def program(attend: Attend, stage: str) -> Callable[..., Any]:
    """`(cotangent, query, key, value)` to the output and, in training, the gradients."""

    def run(cotangent: Array, query: Array, key: Array, value: Array) -> tuple[Array, ...]:
        if stage == "forward":
            return (attend(query, key, value),)
        output, pull = jax.vjp(attend, query, key, value)
        return output, *pull(cotangent)

    return run


def _times(config: ComplexityConfig, vary: str, stage: str, sizes: list[tuple[int, int, int]]) -> list[Row]:
    """Seconds of every mechanism at every size, all in turn."""
    sides = {}
    for n, d, h in sizes:
        arrays = jax.random.normal(jax.random.key(config.seed), (4, n, h, d))
        for name in config.mechanisms:
            sides[name, n, d, h] = _ready(jax.jit(program(MECHANISMS[name].attend, stage)), *arrays)
    return _rows(sides, config.rounds, vary=vary, stage=stage)


def _layer(config: ComplexityConfig) -> list[Row]:
    """Seconds of a whole layer, with each mechanism and without attention, and their FLOPs where no loop hides them."""
    layer = make_layer(jax.random.key(config.seed), config.heads, config.head_dim)
    attends = {"bare": bare, **{name: MECHANISMS[name].attend for name in config.mechanisms}}
    sides, rows = {}, []
    for n in config.layer_lengths:
        x = jax.random.normal(jax.random.key(config.seed + 1), (n, config.model_width))
        for name, attend in attends.items():
            run = jax.jit(functools.partial(apply_layer, attend=attend))
            sides[name, n, config.head_dim, config.heads] = _ready(run, layer, x)
            if name in ("bare", "dense"):
                flops = counting.xla_cost(run, layer, x).flops
                rows.append({"mechanism": name, "n": n, "vary": "layer", "measure": "flops", "value": flops})
    return rows + _rows(sides, config.rounds, vary="layer", stage="forward")


def _memory(config: ComplexityConfig, name: str) -> list[Row]:
    """Bytes that the compiled programs take, and that forward keeps for backward, while one size varies."""
    attend, rows = MECHANISMS[name].attend, []

    @functools.cache  # the sweeps meet
    def measure(n: int, d: int, h: int) -> dict[str, int]:
        array = jax.ShapeDtypeStruct((n, h, d), jnp.float32)
        found = {stage: counting.temporary_bytes(program(attend, stage), *[array] * 4) for stage in STAGES}
        return {**found, "kept": _kept_bytes(attend, array)}

    for vary in SIZES:
        for n, d, h in config.memory_sizes(vary):
            where = {"mechanism": name, "vary": vary, "n": n, "d": d, "h": h, "measure": "bytes"}
            rows += [{**where, "stage": stage, "value": value} for stage, value in measure(n, d, h).items()]
    return rows


def _kept_bytes(attend: Attend, array: jax.ShapeDtypeStruct) -> int:
    """Bytes of the residuals: what `jax.vjp` keeps until the gradient of the output arrives."""
    kept = jax.eval_shape(lambda *inputs: jax.vjp(attend, *inputs)[1], array, array, array)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))


def _ready(run: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    jax.block_until_ready(run(*arguments))  # compiles
    return lambda: jax.block_until_ready(run(*arguments))


def _rows(sides: dict[tuple[str, int, int, int], Callable[[], Any]], rounds: int, **where: str) -> list[Row]:
    readings = interleave(sides, rounds=rounds)
    return [
        {**where, "mechanism": name, "n": n, "d": d, "h": h, "round": number, "seconds": seconds}
        for (name, n, d, h), found in readings.items()
        for number, seconds in enumerate(found)
    ]


EXPERIMENT = Experiment(
    name="complexity",
    question="How do time and memory grow with the length, the head width and the heads?",
    config=ComplexityConfig,
    presets={
        "smoke": {
            "mechanisms": ("dense", "blockwise"),
            "lengths": (128, 256),
            "widths": (16, 32),
            "length": 512,
            "head_dim": 16,
            "layer_shares": (0.5, 1.0, 2.0),
            "memory_lengths": (512, 1024),
            "memory_heads": (2, 4),
            "rounds": LEAST_ROUNDS,  # too few for a verdict on time
        },
        "quick": {},
        "full": {
            "mechanisms": tuple(MECHANISMS),
            "lengths": (1024, 2048, 4096),
            "heads": 4,
            "layer_shares": (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
            "memory_lengths": (512, 1024, 2048, 4096),
            "rounds": 32,
        },
    },
    units=units,
    judge=results.judge,
    figure=results.figure,
    alt="Four panels. Time against the length and against the head width, per mechanism. The share of attention in a "
    "layer's time and FLOPs, which passes one half near n = 6D. Memory against the length, per mechanism.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: ComplexityConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
