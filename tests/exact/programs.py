"""What the conformance suite compiles: geometries and structures.

A *program* is a geometry (shapes) and a structure (dtype, which arguments are given, the numbers that are static).
Everything else, values, lengths, offsets, positions, masks, is data of a *problem* (`problems.py`), so that thousands
of problems cost some fifty compilations.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attn_jax import biases, masks
from tests import oracles


@dataclasses.dataclass(frozen=True)
class Geometry:
    batch: tuple[int, ...]
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int

    def __str__(self):
        return f"{'x'.join(map(str, self.batch)) or 'single'}-T{self.T}S{self.S}N{self.N}K{self.K}H{self.H}V{self.V}"


GEOMETRIES = (
    Geometry((2,), 8, 8, 2, 2, 4, 4),
    Geometry((), 7, 7, 4, 2, 8, 8),
    Geometry((1,), 13, 13, 4, 1, 4, 4),
    Geometry((2, 2), 5, 5, 2, 1, 4, 4),
    Geometry((3,), 6, 11, 4, 2, 4, 6),
    Geometry((2,), 11, 6, 4, 4, 8, 3),
    Geometry((2,), 1, 9, 4, 2, 8, 8),
    Geometry((2,), 9, 1, 2, 1, 4, 4),
    Geometry((1,), 1, 1, 1, 1, 1, 1),
    Geometry((4,), 17, 17, 1, 1, 2, 5),
    Geometry((), 5, 12, 6, 3, 4, 4),
    Geometry((2, 3), 3, 4, 4, 2, 2, 1),
    Geometry((1,), 23, 23, 2, 2, 16, 16),
    Geometry((2,), 16, 32, 2, 1, 8, 8),
    Geometry((2,), 19, 7, 6, 2, 4, 2),
    Geometry((3,), 2, 2, 3, 3, 4, 4),
    Geometry((2,), 12, 12, 8, 2, 4, 4),
    Geometry((), 31, 29, 1, 1, 8, 8),
    Geometry((1, 1), 6, 6, 2, 2, 3, 7),
    Geometry((5,), 4, 4, 5, 1, 5, 5),
    Geometry((2,), 10, 10, 4, 4, 1, 4),
    Geometry((2,), 1, 17, 8, 1, 16, 4),
    Geometry((2,), 13, 5, 2, 2, 4, 4),
    Geometry((1,), 37, 41, 3, 1, 4, 4),
)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is static in a call. A shape is spelled in letters of `bnts` and 1: "b11s", "ts"."""

    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    logits_soft_cap: float | None = None
    scale: float | str | None = None  # "per head": an array [N], with a gradient
    mask: str | None = None  # letters for an array, or a name in LAZY_MASKS
    bias: str | None = None  # letters for an array, or a name in LAZY_BIASES
    lengths: str = ""  # "q", "k" or "qk"
    positions: str = ""  # "offset", "offsets" (per item), "q", "k" or "qk" (explicit, with empty slots)
    sinks: bool = False

    def __str__(self):
        given = (
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return ",".join(name if value is True else f"{name}={value}" for name, value in given) or "bare"


STRUCTURES = (
    Structure(),
    Structure(is_causal=True),
    Structure(local_window_size=(2, 1)),
    Structure(local_window_size=3, is_causal=True, logits_soft_cap=5.0),
    Structure(mask="bnts"),
    Structure(mask="b11s", is_causal=True, sinks=True),
    Structure(mask="ts", bias="1nts"),
    Structure(bias="bnts", logits_soft_cap=20.0),
    Structure(bias="b1ts", lengths="k", sinks=True),
    Structure(bias="ts", scale=0.3, positions="qk", is_causal=True),
    Structure(lengths="qk", is_causal=True, positions="offset"),
    Structure(lengths="q", logits_soft_cap=2.0, scale="per head"),
    Structure(positions="offsets", is_causal=True, local_window_size=(4, 0)),
    Structure(positions="qk", local_window_size=(3, 2), sinks=True),
    Structure(positions="q", mask="causal & window", bias="alibi"),
    Structure(positions="k", mask="longformer", lengths="k"),
    Structure(mask="prefix", bias="buckets", positions="offset"),
    Structure(mask="segments & causal", bias="alibi + b11s", logits_soft_cap=30.0),
    Structure(mask="padding & ~strided", scale="per head", sinks=True),
    Structure(mask="dilated | array", positions="qk", bias="11ts"),
    Structure(mask="sliding | b1t1", lengths="q", bias="one-way buckets"),
    Structure(mask="1n1s", bias="1n1s", lengths="qk", positions="offsets", is_causal=True),
    Structure(scale=0.0, sinks=True, local_window_size=(0, 0), positions="offset"),
    Structure(is_causal=True, bias="bnt1", lengths="k", logits_soft_cap=1.0, scale=-0.5, sinks=True, mask="b1ts"),
)


# A lazy mask three times: as the package spells it, as the oracle does, and the arrays both read.
@dataclasses.dataclass(frozen=True)
class LazyPair:
    package: Callable[[dict[str, Any]], Any]
    oracle: Callable[[dict[str, Any]], oracles.Lazy]
    reads: tuple[str, ...] = ()


LAZY_MASKS = {
    "causal & window": LazyPair(
        lambda d: masks.Causal() & masks.LocalWindow(3, None),
        lambda d: oracles.both(oracles.causal, oracles.local_window(3, 10**6)),
    ),
    "longformer": LazyPair(
        lambda d: masks.LocalWindow(1, 2) | masks.GlobalTokens(2),
        lambda d: oracles.either(oracles.local_window(1, 2), oracles.global_tokens(2)),
    ),
    "prefix": LazyPair(lambda d: masks.PrefixLM(d["prefix"]), lambda d: oracles.prefix_lm(d["prefix"]), ("prefix",)),
    "segments & causal": LazyPair(
        lambda d: masks.Segments(d["query_ids"], d["key_ids"]) & masks.Causal(),
        lambda d: oracles.both(oracles.segments(d["query_ids"], d["key_ids"]), oracles.causal),
        ("query_ids", "key_ids"),
    ),
    "padding & ~strided": LazyPair(
        lambda d: masks.Padding(d["padding"]) & ~masks.Strided(3),
        lambda d: oracles.both(oracles.padding(d["padding"]), oracles.opposite(oracles.strided(3))),
        ("padding",),
    ),
    "dilated | array": LazyPair(
        lambda d: masks.Dilated(2, 1, 2) | masks.Array(d["b11s"]),
        lambda d: oracles.either(oracles.dilated(2, 1, 2), lambda q, k: d["b11s"]),
        ("b11s",),
    ),
    "sliding | b1t1": LazyPair(
        lambda d: masks.SlidingWindow(3) | d["b1t1"],
        lambda d: oracles.either(oracles.sliding_window(3), lambda q, k: d["b1t1"]),
        ("b1t1",),
    ),
}
LAZY_BIASES = {
    "alibi": LazyPair(lambda d: biases.Alibi(d["heads"]), lambda d: oracles.alibi(d["heads"])),
    "alibi + b11s": LazyPair(
        lambda d: biases.Alibi(d["heads"]) + d["bias"],
        lambda d: lambda q, k: oracles.alibi(d["heads"])(q, k) + np.asarray(d["bias"], np.float64),
        ("bias",),
    ),
    "buckets": LazyPair(
        lambda d: biases.RelativeBuckets(d["table"], max_distance=16),
        lambda d: oracles.relative_buckets(d["table"], bidirectional=True, max_distance=16),
        ("table",),
    ),
    "one-way buckets": LazyPair(
        lambda d: biases.RelativeBuckets(d["table"], bidirectional=False, max_distance=12),
        lambda d: oracles.relative_buckets(d["table"], bidirectional=False, max_distance=12),
        ("table",),
    ),
}
TABLE_ROWS = 8
DIFFERENTIABLE = ("query", "key", "value", "bias", "table", "sinks", "scale")


@dataclasses.dataclass(frozen=True)
class Program:
    geometry: Geometry
    structure: Structure
    dtype: str

    def __str__(self):
        return f"{self.dtype}-{self.geometry}-{self.structure}"

    def x64(self):
        """A context in which the dtype exists."""
        return jax.enable_x64(self.dtype == "float64")


def programs(per_geometry: int) -> list[Program]:
    """`per_geometry` structures for each geometry: every structure appears as often, each time in other company."""
    dtypes = ("float32", "float64", "bfloat16", "float32", "float16", "float64")
    chosen = []
    for turn in range(per_geometry):
        for i, geometry in enumerate(GEOMETRIES):
            structure = STRUCTURES[(i + 7 * turn) % len(STRUCTURES)]
            dtype = "float32" if turn == 0 else dtypes[(i + turn) % len(dtypes)]
            chosen.append(Program(geometry, structure, dtype))
    return chosen


# What the handed-over implementations take is little: programs that give them something to do.
PLAIN_PROGRAMS = [
    Program(GEOMETRIES[g], STRUCTURES[s], dtype)
    for g, s, dtype in (
        (0, 1, "float32"), (1, 0, "float32"), (2, 1, "float32"), (3, 2, "float32"), (16, 0, "bfloat16"), (12, 1, "bfloat16")
    )
]  # fmt: skip
