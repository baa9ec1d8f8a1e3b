"""Is the cache of keys and values the bottleneck of decoding?

Claims: C3.
Command: python -m experiments.kv_cache --preset=quick --out=results/kv_cache
Time: smoke 10 s, quick 33 s, full about 2 min on two cores.

The bytes that a step reads, of the weights and of the cache, and the context n* where they are equal: counted from the
arrays of published models, per batch and dtype. And the time of a step against the context, all heads, grouped heads,
one key/value head, a ring and mixers with a state of fixed size, measured in turn on a small model.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from experiments import harness
from experiments.artifacts import Row
from experiments.benchmarks.timing import LEAST_ROUNDS, interleave
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.kv_cache import results
from experiments.kv_cache.published import MODELS, cache_read, crossing, weights_read

MIXERS = {  # kinds whose state does not grow, by the words of `TransformerConfig.mixer`
    "state space": "state_space",
    "linear": "linear",
    "retention": "retention",
    "routed": "routing",
    "hashed": "lsh",
    "GRU": "gru",
    "convolution": "convolution",
}
KINDS = ("all heads", "grouped heads", "one head", "ring", *MIXERS)
DECIDING = KINDS[:5]  # that the claim reads
BYTES = {"float32": (4.0, 4.0), "bfloat16": (2.0, 2.0), "4-bit weights": (0.5, 2.0)}  # of a weight, of a cache's number
BATCHES = (1, 8, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheConfig(Config):
    """Flags of this experiment."""

    kinds: tuple[str, ...] = option(DECIDING, "of layers that are timed", choices=KINDS)
    contexts: tuple[int, ...] = option((64, 256, 512, 1024, 2048), "contexts of the timed sweep", least=2, most=2**17)
    batch: int = option(8, "items that are decoded together", least=1, most=1024)
    layers: int = option(4, "layers of the timed model", least=1, most=64)
    heads: int = option(8, "query heads; key/value heads where every query head has one", least=2, most=64)
    head_width: int = option(32, "width of a head", least=2, most=256)
    group: int = option(4, "query heads to a key/value head where they are grouped", least=2, most=64)
    window: int = option(128, "tokens that the ring keeps", least=1, most=2**16)
    rounds: int = option(16, "readings of each time", least=LEAST_ROUNDS, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(DECIDING) <= set(self.kinds):
            raise ValueError(f"kinds must hold {', '.join(DECIDING)}, got {self.kinds}")
        if len(self.contexts) < 2:
            raise ValueError(f"contexts must hold two lengths, got {self.contexts}")
        if self.window >= max(self.contexts):
            raise ValueError(f"window must be below the longest context {max(self.contexts)}, got {self.window}")
        if self.heads % self.group:
            raise ValueError(f"group must divide heads = {self.heads}, got {self.group}")

    def model(self, kind: str) -> TransformerConfig:
        """The timed model of a kind."""
        key_heads = {"grouped heads": self.heads // self.group, "one head": 1}.get(kind, self.heads)
        return TransformerConfig(
            vocabulary_size=512,
            num_layers=self.layers,
            model_width=self.heads * self.head_width,
            num_heads=self.heads,
            num_kv_heads=key_heads,
            local_window_size=(self.window - 1, 0) if kind == "ring" else None,
            mixer=MIXERS.get(kind, "softmax"),
        )


def units(config: KVCacheConfig) -> list[Unit]:
    counted = [Unit(f"bytes-{name.replace(' ', '-')}", functools.partial(_bytes, name)) for name in MODELS]
    return [*counted, Unit("time", functools.partial(_times, config))]


def _bytes(name: str) -> list[Row]:
    """What a step of a published model reads, and where cache and weights are equal."""
    published = MODELS[name]
    sizes = published.config
    full, half = cache_read(sizes, published.context), cache_read(sizes, published.context // 2)
    rows: list[Row] = [
        {"model": name, "measure": "weights", "value": weights_read(sizes)},
        {"model": name, "measure": "cache per token", "value": (full - half) / (published.context / 2)},
        {"model": name, "measure": "cache at the context", "value": full},
    ]
    for dtype, (weight, number) in BYTES.items():
        for batch in BATCHES:
            found = crossing(sizes, batch=batch, weight_over_cache=weight / number)
            rows.append({"model": name, "measure": "crossing", "dtype": dtype, "batch": batch, "value": found})
    return rows


def _times(config: KVCacheConfig) -> list[Row]:
    """Seconds of a step, every kind at every context, all in turn."""
    sides = {}
    for kind in config.kinds:
        model = Transformer(config.model(kind), rngs=nnx.Rngs(config.seed))
        for context in sorted(config.contexts):
            sides[kind, context] = _step(model, config.batch, context)
    readings = interleave(sides, rounds=config.rounds)
    return [
        {"kind": kind, "n": context, "round": number, "seconds": seconds}
        for (kind, context), found in readings.items()
        for number, seconds in enumerate(found)
    ]


@functools.partial(jax.jit, donate_argnums=1)
def _decode(model: Transformer, caches: tuple[Any, ...], token_ids: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """A step, and the caches with their lengths put back, so that every call does the same."""
    logits, after = model.extend(token_ids, caches, last=True)
    return logits, tuple(dataclasses.replace(x, lengths=y.lengths) for x, y in zip(after, caches, strict=True))


def _step(model: Transformer, batch: int, context: int) -> Callable[[], None]:
    """Decodes one token of items that have `context` tokens with it, from a cache of no more slots than that."""
    token_ids = jnp.zeros((batch, 1), jnp.int32)
    held = [_filled(model, batch, context)]

    def call() -> None:
        logits, held[0] = _decode(model, held[0], token_ids)
        logits.block_until_ready()

    call()  # compiles
    return call


def _filled(model: Transformer, batch: int, context: int) -> tuple[Any, ...]:
    """Caches in which every item has all but one of `context` tokens."""
    caches = model.empty_cache(batch, context)
    return tuple(dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, context - 1)) for cache in caches)


def counted_crossing(config: KVCacheConfig) -> float:
    """n* of the timed model with all heads: float32 for both."""
    return crossing(config.model("all heads"), batch=config.batch, weight_over_cache=1.0)


EXPERIMENT = Experiment(
    name="kv_cache",
    question="Is the cache of keys and values the bottleneck of decoding?",
    config=KVCacheConfig,
    presets={
        "smoke": {
            "contexts": (32, 128),
            "batch": 2,
            "layers": 1,
            "window": 16,
            "rounds": LEAST_ROUNDS,  # too few for a verdict
        },
        "quick": {},
        "full": {"kinds": KINDS, "contexts": (64, 256, 512, 1024, 2048, 4096), "layers": 8, "rounds": 32},
    },
    units=units,
    judge=lambda config, measurements: results.judge(config, measurements, counted_crossing(config)),
    figure=lambda config, measurements: results.figure(config, measurements, counted_crossing(config)),
    alt="Two panels. The cache's bytes over the weights' against the context, for five published models: they pass 1 "
    "beyond the trained context. Time of a step against the context: steepest with all heads, flat with a ring and "
    "with a state of fixed size.",
    tables=results.tables,
    documentation=__doc__ or "",
)


def run(config: KVCacheConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
