"""Checkpoints that experiments measure, and the same architectures at random weights, their control."""

import functools
import zlib

import jax
from flax import nnx

from attn_jax import models
from attn_jax.nn import Transformer
from experiments.harness import InputError


@functools.lru_cache(maxsize=1)
def load(name: str) -> models.LoadedModel:
    """A checkpoint that has a tokenizer, by the value of `--model`."""
    try:
        loaded = models.load(name)
    except (ValueError, OSError) as error:
        raise InputError(f"--model={name}: {error}") from error
    if loaded.tokenizer is None:
        raise InputError(f"--model={name}: it has no tokenizer")
    return loaded


@functools.lru_cache(maxsize=1)
def at_random(name: str, seed: int) -> Transformer:
    """The architecture of a checkpoint at its initial weights."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"random weights"))
    return Transformer(load(name).config, rngs=nnx.Rngs(params=key))
