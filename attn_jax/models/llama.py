"""The Llama family in GGUF files: its configuration and its name map.

A linear layer is stored `[out, in]`; ours multiplies from the right, `[in, out]`, with heads on axes of their own.
The rows of the query's and the key's weights are stored so that the two partners of a rotated pair are neighbours;
they are put back half a head apart, where `apply_rotary` looks for them (and where the original weights had them).
"""

import operator
from typing import Any

import numpy as np

from attn_jax.models.gguf_file import GGUFFile, short
from attn_jax.models.mapping import Convert, Entry
from attn_jax.nn import TransformerConfig

# Metadata that `config_from_gguf` reads, or that changes no result: the context's length is that of the training texts.
_KNOWN = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
}
# Metadata that is harmless only at this value.
_NEUTRAL: dict[str, Any] = {"expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
_SIZES = operator.attrgetter("model_width", "mlp_width", "num_heads", "num_kv_heads", "head_width", "value_width")
_DEFAULT_BASE = 10000.0  # of the architecture, for files that do not say


def config_from_gguf(file: GGUFFile) -> TransformerConfig:
    """The `TransformerConfig` that the metadata of a Llama-family file describe.

    Args:
        file: an opened GGUF file of architecture "llama".

    Returns:
        TransformerConfig: a decoder; its head is tied to the embedding exactly if the file has no `output.weight`.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    prefix = "llama."
    for key in file.metadata:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name not in _KNOWN and file.metadata[key] != _NEUTRAL.get(name):
            raise ValueError(f"{file.path}: metadata {key!r} = {short(file.metadata[key])} is not supported")

    def number(name: str, default: int | None = None) -> int:
        return file.value(prefix + name, int, default)

    vocabulary = len(file.value("tokenizer.ggml.tokens", list))
    heads = number("attention.head_count")
    width = number("embedding_length")
    if heads < 1 or width < 1:
        raise ValueError(f"{file.path}: head count and width must be positive, got {heads} and {width}")
    head_width = number("attention.key_length", width // heads)
    for name, expected in (("vocab_size", vocabulary), ("rope.dimension_count", head_width)):
        if number(name, expected) != expected:
            raise ValueError(f"{file.path}: metadata {prefix + name!r} must be {expected}, got {number(name)}")
    sizes: dict[str, Any] = {
        "vocabulary_size": vocabulary,
        "num_layers": number("block_count"),
        "model_width": width,
        "num_heads": heads,
        "num_kv_heads": number("attention.head_count_kv", heads),
        "head_width": head_width,
        "value_width": number("attention.value_length", head_width),
        "mlp_width": number("feed_forward_length"),
    }
    epsilon = file.value(prefix + "attention.layer_norm_rms_epsilon", float)
    base = file.value(prefix + "rope.freq_base", float, _DEFAULT_BASE)
    try:
        return TransformerConfig(
            **sizes,
            norm="rms",
            norm_position="pre",
            norm_epsilon=epsilon,
            mlp="gated",
            activation="silu",
            positions="rotary",
            rotary_base=base,
            causal=True,
            head="untied" if "output.weight" in file.tensors else "tied",
        )
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def name_map(config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a Llama-family GGUF file goes in the `Transformer` of `config`."""
    D, F, N, K, H, V = _SIZES(config)
    vocabulary = config.vocabulary_size

    def heads(count: int, width: int) -> Convert:
        return lambda rows: rows.T.reshape(D, count, width)

    def rotated_heads(count: int) -> Convert:
        return lambda rows: unpermute(rows, count).T.reshape(D, count, H)

    def output(columns: np.ndarray) -> np.ndarray:
        return columns.T.reshape(N, V, D)

    entries = [
        Entry("token_embd.weight", (vocabulary, D), "embedding"),
        Entry("blk.{}.attn_norm.weight", (D,), "layers.attention_norm.scale"),
        Entry("blk.{}.attn_q.weight", (N * H, D), "layers.attention.query_weight", rotated_heads(N)),
        Entry("blk.{}.attn_k.weight", (K * H, D), "layers.attention.key_weight", rotated_heads(K)),
        Entry("blk.{}.attn_v.weight", (K * V, D), "layers.attention.value_weight", heads(K, V)),
        Entry("blk.{}.attn_output.weight", (D, N * V), "layers.attention.output_weight", output),
        Entry("blk.{}.ffn_norm.weight", (D,), "layers.mlp_norm.scale"),
        Entry("blk.{}.ffn_gate.weight", (F, D), "layers.mlp.gate_weight", np.transpose),
        Entry("blk.{}.ffn_up.weight", (F, D), "layers.mlp.up_weight", np.transpose),
        Entry("blk.{}.ffn_down.weight", (D, F), "layers.mlp.down_weight", np.transpose),
        Entry("output_norm.weight", (D,), "final_norm.scale"),
    ]
    if config.head == "untied":
        entries.append(Entry("output.weight", (vocabulary, D), "head_weight", np.transpose))
    return entries


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows stored as 0, H/2, 1, H/2 + 1, … in each head, back in the order 0, 1, …, H - 1.

    Args:
        rows: `[heads · H, ...]`.
        num_heads: how many heads these rows have: N for the query's, K for the key's.

    Returns:
        The same rows in the order of the original weights.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, H/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)
