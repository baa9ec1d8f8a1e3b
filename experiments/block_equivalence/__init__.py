"""Does attention by tiles return the same numbers, and what does it save and cost?

Claims: C2.
Command: python -m experiments.block_equivalence --preset=quick --out=results/block_equivalence
Time: smoke 8 s, quick 25 s, full about 2 min on two cores.

The error of the tile loop and of the dense form against float64, output and gradients, by mask and dtype; the FLOPs and
bytes of both, counted; and the temporary memory of the compiled programs against the length.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import attn_jax
from attn_jax import masks
from attn_jax.exact.tiles import Blockwise
from attn_jax.typing import Array
from experiments import claims, counting, estimates, harness
from experiments.artifacts import Row
from experiments.block_equivalence.results import FORMS, RESULTS, STAGES, counted, error_ratio, figure, memories, tables
from experiments.config import Config, option
from experiments.estimates import Estimate
from experiments.harness import Experiment, Result, Unit
from experiments.verdicts import Outcome

PATTERNS: dict[str, Callable[[int], masks.Mask | None]] = {
    "full": lambda length: None,
    "causal": lambda length: masks.Causal(),
    "window": lambda length: masks.SlidingWindow(max(length // 8, 1)),
    "bigbird": lambda length: masks.bigbird(32, 32, per_row=1, block=32),
}
DIRECTIONS = {"forward": ("forward",), "training": ("forward", "backward")}  # of each stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquivalenceConfig(Config):
    """Flags of this experiment."""

    length: int = option(512, "queries and keys n of the errors", least=8, most=8192)
    tile: int = option(128, "queries and keys of a tile in the errors", least=1, most=8192)
    heads: int = option(2, "heads", least=1, most=64)
    head_dim: int = option(64, "head width", least=1, most=1024)
    dtypes: tuple[str, ...] = option(("float32", "bfloat16"), "dtypes of the errors", choices=("float32", "bfloat16"))
    masks: tuple[str, ...] = option(tuple(PATTERNS), "masks of the errors", choices=tuple(PATTERNS))
    seeds: int = option(16, "independent seeds", least=2, most=4096)
    counted_length: int = option(4096, "n at which FLOPs and bytes are counted", least=8, most=2**16)
    memory_lengths: tuple[int, ...] = option((1024, 2048, 4096, 8192), "n of the memory, one head", least=8, most=2**17)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.memory_lengths) < 2:
            raise ValueError(f"memory_lengths must hold two lengths to fit an exponent, got {self.memory_lengths}")


def units(config: EquivalenceConfig) -> list[Unit]:
    errors = [
        Unit(f"errors-{mask}-{dtype}", functools.partial(_errors, config, mask, dtype))
        for mask in config.masks
        for dtype in config.dtypes
    ]
    work = [Unit(f"work-{mask}", functools.partial(_work, config, mask)) for mask in PATTERNS]
    memory = [Unit(f"memory-{form}", functools.partial(_memory, config, form)) for form in FORMS]
    return [*errors, *work, *memory]


def reference(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray, visible: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The output and the three gradients by the textbook formulas, in float64; arrays are `[h, n, d]`."""
    logits = np.where(visible, query @ key.mT / np.sqrt(query.shape[-1]), -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    pull = cotangent @ value.mT
    d_logits = weights * (pull - (weights * pull).sum(axis=-1, keepdims=True)) / np.sqrt(query.shape[-1])
    return weights @ value, d_logits @ key, d_logits.mT @ query, weights.mT @ cotangent


def _attend(form: str, tile: int | None = None) -> Callable[..., Array]:
    tiled = "blockwise" if tile is None else Blockwise(tile, tile)
    return functools.partial(attn_jax.dot_product_attention, implementation=tiled if form == "tiled" else "dense")


def _program(form: str, stage: str, tile: int | None = None) -> Callable[..., tuple[Array, ...]]:
    """`(mask, cotangent, query, key, value)` to the output and, in training, the gradients."""
    attend = _attend(form, tile)

    def program(mask: masks.Mask | None, cotangent: Array, *inputs: Array) -> tuple[Array, ...]:
        if stage == "forward":
            return (attend(*inputs, mask=mask),)
        output, pull = jax.vjp(lambda *inputs: attend(*inputs, mask=mask), *inputs)
        return output, *pull(cotangent)

    return program


def _errors(config: EquivalenceConfig, name: str, dtype: str) -> list[Row]:
    """‖x − x₆₄‖ / ‖x₆₄‖ of each result, per seed."""
    mask = PATTERNS[name](config.length)
    visible = np.ones(1, bool) if mask is None else np.asarray(masks.materialize(mask, config.length))
    programs = {form: jax.jit(_program(form, "training", config.tile)) for form in FORMS}
    rows = []
    for seed in range(config.seeds):
        key = jax.random.fold_in(jax.random.key(config.seed), seed)
        shape = (4, config.length, config.heads, config.head_dim)
        query, keys, values, cotangent = jax.random.normal(key, shape).astype(dtype)
        exact = reference(*map(_heads_first, (query, keys, values, cotangent)), visible=visible)
        for form, program in programs.items():
            found = program(mask, cotangent, query, keys, values)
            for result, x, expected in zip(RESULTS, found, exact, strict=True):
                off = np.linalg.norm(_heads_first(x) - expected)
                where = {"mask": name, "dtype": dtype, "form": form, "arm": result, "seed": seed}
                rows.append({**where, "measure": "error", "value": off / np.linalg.norm(expected)})
    return rows


def _heads_first(x: Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64).swapaxes(0, 1)


def _work(config: EquivalenceConfig, name: str) -> list[Row]:
    """FLOPs of the products, and bytes: of the tile loop by its tiles, of the dense program, without loops, by XLA."""
    length, sizes = config.counted_length, {"heads": config.heads, "width": config.head_dim}
    mask = PATTERNS[name](length)
    tile = counting.tile_of(mask, length, heads=config.heads, kv_heads=config.heads)
    array = jax.ShapeDtypeStruct((length, config.heads, config.head_dim), jnp.float32)
    rows = []
    for stage, directions in DIRECTIONS.items():
        tiled = [counting.tile_loop(d, mask, length, tile, kv_heads=config.heads, **sizes) for d in directions]
        found = {
            ("tiled", "flops"): sum(work.flops for work in tiled),
            ("tiled", "bytes"): sum(work.bytes for work in tiled),
            ("dense", "flops"): sum(counting.dense_flops(d, length, **sizes) for d in directions),
            ("dense", "bytes"): counting.xla_cost(_program("dense", stage), mask, *[array] * 4).bytes,
        }
        where = {"mask": name, "stage": stage, "n": length}
        rows += [{**where, "form": form, "measure": what, "value": x} for (form, what), x in found.items()]
    return rows


def _memory(config: EquivalenceConfig, form: str) -> list[Row]:
    """Temporary memory of the compiled programs, one head, no mask; nothing is run."""
    rows = []
    for length in sorted(config.memory_lengths):
        array = jax.ShapeDtypeStruct((length, 1, config.head_dim), jnp.float32)
        for stage in STAGES:
            value = counting.temporary_bytes(_program(form, stage), None, *[array] * 4)
            rows.append({"form": form, "stage": stage, "n": length, "measure": "temporary_bytes", "value": value})
    return rows


def judge(config: EquivalenceConfig, measurements: pd.DataFrame) -> list[Outcome]:
    arms = itertools.product(config.masks, config.dtypes, RESULTS)
    ratios = [error_ratio(measurements, *arm) for arm in arms]
    exponents = {
        (form, stage): counting.counted_exponent(sorted(config.memory_lengths), memories(measurements, form, stage))
        for form in FORMS
        for stage in STAGES
    }

    def work(measure: str, stage: str, mask: str) -> float:
        tiled, dense = (counted(measurements, form, measure, stage, mask) for form in FORMS)
        return tiled / dense

    def most_bytes(stage: str) -> Estimate:
        return estimates.counted(max(work("bytes", stage, mask) for mask in PATTERNS))

    outcome = claims.judge(
        "C2",
        {
            "error_ratio": max(ratios, key=lambda ratio: ratio.value),
            "memory_forward": exponents["tiled", "forward"],
            "memory_training": exponents["tiled", "training"],
            "memory_dense": exponents["dense", "forward"],
            "flops_forward": estimates.counted(work("flops", "forward", "full")),
            "flops_training": estimates.counted(work("flops", "training", "full")),
            "flops_causal": estimates.counted(work("flops", "training", "causal")),
            "bytes_forward": most_bytes("forward"),
            "bytes_training": most_bytes("training"),
        },
        device=jax.devices()[0].device_kind,
        length=config.length,
        tile=config.tile,
        heads=config.heads,
        width=config.head_dim,
        seeds=config.seeds,
        dtypes=", ".join(config.dtypes),
        masks=", ".join(config.masks),
        counted=config.counted_length,
        lengths=", ".join(map(str, sorted(config.memory_lengths))),
    )
    return [outcome]


EXPERIMENT = Experiment(
    name="block_equivalence",
    question="Does attention by tiles return the same numbers, and what does it save and cost?",
    config=EquivalenceConfig,
    presets={
        "smoke": {
            "length": 64,
            "tile": 16,
            "head_dim": 16,
            "masks": ("causal",),
            "dtypes": ("float32",),
            "counted_length": 2048,
            "memory_lengths": (2048, 4096),
        },
        "quick": {},
        "full": {
            "length": 1024,
            "seeds": 64,
            "counted_length": 16384,
            "memory_lengths": (1024, 2048, 4096, 8192, 16384, 32768),
        },
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Three panels. Errors against float64: tiled and dense agree in each mask and dtype. Temporary memory against "
    "the length: dense grows with the square, tiled with the length. FLOPs and bytes, tiled over dense, by mask.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: EquivalenceConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
