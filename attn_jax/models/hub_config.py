"""What several families read alike from a `config.json`, in the words of Hugging Face transformers."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

from attn_jax import positions
from attn_jax.models.checkpoint import Settings, WeightFile

# By their names there: the same functions as ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_ROTARY = ("default", "linear", "dynamic", "yarn", "llama3")


def activation_from_json(settings: Settings, key: str, default: str) -> str:
    """The `TransformerConfig.activation` under `key`; ValueError if it is another function."""
    name = settings.value(key, str, default)
    if name not in _ACTIVATIONS:
        raise ValueError(f"{settings.path}: {key} must be one of {', '.join(map(repr, _ACTIVATIONS))}; got {name!r}")
    return _ACTIVATIONS[name]


def head_kind(file: WeightFile, embedding: str, head: str, shape: Sequence[int], *, tied: bool) -> str:
    """Whether the head of a decoder is "tied" to the embedding or "untied": what is in the file decides.

    Without a head of its own the embedding is the head, and the other way round where the settings say that they are
    tied. With both, a head that differs from the embedding is used, whatever the settings say.

    Args:
        file: the opened file.
        embedding: name of the embedding.
        head: name of the head.
        shape: of both.
        tied: what the settings say.

    Returns:
        "tied" or "untied".

    Warns:
        UserWarning: the settings say tied, and the file holds both, and they differ.
    """
    if head not in file.names or (tied and embedding not in file.names):
        return "tied"
    if not tied:
        return "untied"
    if np.array_equal(file.tensor(embedding, shape), file.tensor(head, shape), equal_nan=True):
        return "tied"
    warnings.warn(
        f"{file.path}: {head!r} differs from {embedding!r}, though the settings say that they are tied: both are used",
        stacklevel=2,
    )
    return "untied"


def rotary_from_json(
    settings: Settings, layer_type: str | None = None, *, default_base: float = 10000.0
) -> tuple[float, positions.Scaling | None]:
    """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Args:
        settings: of the `config.json`.
        layer_type: in files whose `rope_parameters` are nested, the kind of layer that is asked about.
        default_base: of the architecture, for files that do not say.

    Returns:
        `(base, scaling)`, for `attn_jax.positions.apply_rotary`.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that is not covered.
    """
    base = settings.value("rope_theta", float, default_base)
    settings.require("partial_rotary_factor", 1, 1.0)
    rope = settings.nested("rope_scaling") or settings.nested("rope_parameters")
    if rope is not None and layer_type is not None:
        rope = rope.nested(layer_type)
    if rope is None:
        return base, None
    base = rope.value("rope_theta", float, base)
    rope.require("partial_rotary_factor", 1, 1.0)
    kind = rope.value("rope_type", str, rope.value("type", str, "default"))
    if kind not in _ROTARY:
        raise ValueError(f"{rope.path}: rope_type must be one of {', '.join(map(repr, _ROTARY))}; got {kind!r}")
    try:
        return base, _scaling(kind, rope, settings)
    except (ValueError, TypeError, OverflowError) as error:
        message = str(error)
        raise ValueError(message if message.startswith(str(settings.path)) else f"{rope.path}: {message}") from error


def _scaling(kind: str, rope: Settings, settings: Settings) -> positions.Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return positions.Linear(rope.value("factor", float))
    if kind == "dynamic":  # the length that it was trained at is the model's own, whatever else stands there
        length = settings.value("max_position_embeddings", int)
        rope.require("original_max_position_embeddings", length)
        return positions.DynamicNTK(rope.value("factor", float), length)
    most = settings.optional("max_position_embeddings", int)
    length = settings.optional("original_max_position_embeddings", int)
    if length is None:
        length = rope.value("original_max_position_embeddings", int, most)
    if kind == "llama3":
        factor, low, high = (rope.value(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return positions.Llama3(factor, low, high, length)
    rope.require("truncate", True)
    factor = rope.value("factor", float, most / length if most and length > 0 else None)
    magnitude = rope.optional("attention_factor", float)
    numerator, denominator = rope.optional("mscale", float), rope.optional("mscale_all_dim", float)
    if magnitude is None and numerator and denominator and factor > 1:
        magnitude = (0.1 * numerator * math.log(factor) + 1) / (0.1 * denominator * math.log(factor) + 1)
    fast, slow = rope.value("beta_fast", float, 32.0), rope.value("beta_slow", float, 1.0)
    return positions.YaRN(factor, length, beta_fast=fast, beta_slow=slow, attention_factor=magnitude)
