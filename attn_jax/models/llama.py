"""The Llama family in GGUF and safetensors files: its configuration and its name maps.

A linear layer is stored `[out, in]`; ours multiplies from the right, `[in, out]`, with heads on axes of their own.
In GGUF files the rows of the query's and the key's weights are stored so that the two partners of a rotated pair are
neighbours; they are put back half a head apart, where `apply_rotary` looks for them (and where safetensors files,
as the original weights, have them).

Reference: Touvron et al. 2023.
"""

from typing import Any

import numpy as np

from attn_jax.models.checkpoint import Settings, WeightFile, short
from attn_jax.models.gguf_file import GGUFFile
from attn_jax.models.hub_config import activation_from_json, head_kind, rotary_from_json
from attn_jax.models.mapping import (
    Convert,
    Entry,
    bias_to_heads,
    checked_config,
    columns_to_heads,
    prefix_of,
    rows_to_heads,
    sizes_of,
)
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
_DEFAULT_BASE = 10000.0  # of the architecture, for files that do not say
# Tables that follow from the configuration, and a head that is tied to the embedding.
BUFFERS = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", r"lm_head\.weight", r"rope_freqs\.weight")


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
    if "rope_freqs.weight" in file.names and (file.tensor("rope_freqs.weight", (head_width // 2,)) != 1).any():
        raise ValueError(
            f"{file.path}: tensor 'rope_freqs.weight', which scales the rotary frequencies, is not supported"
        )
    return checked_config(
        file.path,
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


def config_from_json(file: WeightFile, settings: Settings) -> TransformerConfig:
    """The `TransformerConfig` that the `config.json` of a Llama-family checkpoint describes.

    Args:
        file: the opened weights, which say whether the head is the embedding.
        settings: of the `config.json`.

    Returns:
        TransformerConfig: a decoder.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    settings.require("sliding_window")
    settings.require("rope_interleaved", False)
    sizes: dict[str, Any] = {
        "vocabulary_size": settings.value("vocab_size", int),
        "num_layers": settings.value("num_hidden_layers", int),
        "model_width": settings.value("hidden_size", int),
        "num_heads": settings.value("num_attention_heads", int),
        "num_kv_heads": settings.optional("num_key_value_heads", int),
        "head_width": settings.optional("head_dim", int),
        "mlp_width": settings.value("intermediate_size", int),
    }
    attention, mlp = (settings.value(f"{part}_bias", bool, False) for part in ("attention", "mlp"))
    base, scaling = rotary_from_json(settings, default_base=_DEFAULT_BASE)
    shape = sizes["vocabulary_size"], sizes["model_width"]
    tied = settings.value("tie_word_embeddings", bool, False)
    return checked_config(
        settings.path,
        **sizes,
        norm="rms",
        norm_position="pre",
        norm_epsilon=settings.value("rms_norm_eps", float, 1e-6),
        mlp="gated",
        activation=activation_from_json(settings, "hidden_act", "silu"),
        use_bias=(attention and mlp) or ("attention" if attention else "mlp" if mlp else False),
        positions="rotary",
        rotary_base=base,
        rotary_scaling=scaling,
        causal=True,
        head=head_kind(file, f"{prefix_of(file, 'model.')}embed_tokens.weight", "lm_head.weight", shape, tied=tied),
    )


def gguf_map(file: GGUFFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a Llama-family GGUF file goes in the `Transformer` of `config`."""
    D, F, N, K, H, V = sizes_of(config)
    vocabulary = config.vocabulary_size

    def rotated_heads(count: int) -> Convert:
        return lambda rows: rows_to_heads(count)(unpermute(rows, count))

    entries = [
        Entry("token_embd.weight", (vocabulary, D), "embedding"),
        Entry("blk.{}.attn_norm.weight", (D,), "layers.attention_norm.scale"),
        Entry("blk.{}.attn_q.weight", (N * H, D), "layers.attention.query_weight", rotated_heads(N)),
        Entry("blk.{}.attn_k.weight", (K * H, D), "layers.attention.key_weight", rotated_heads(K)),
        Entry("blk.{}.attn_v.weight", (K * V, D), "layers.attention.value_weight", rows_to_heads(K)),
        Entry("blk.{}.attn_output.weight", (D, N * V), "layers.attention.output_weight", columns_to_heads(N)),
        Entry("blk.{}.ffn_norm.weight", (D,), "layers.mlp_norm.scale"),
        Entry("blk.{}.ffn_gate.weight", (F, D), "layers.mlp.gate_weight", np.transpose),
        Entry("blk.{}.ffn_up.weight", (F, D), "layers.mlp.up_weight", np.transpose),
        Entry("blk.{}.ffn_down.weight", (D, F), "layers.mlp.down_weight", np.transpose),
        Entry("output_norm.weight", (D,), "final_norm.scale"),
    ]
    if config.head == "untied":
        entries.append(Entry("output.weight", (vocabulary, D), "head_weight", np.transpose))
    return entries


def safetensors_map(file: WeightFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a Llama-family safetensors file goes in the `Transformer` of `config`."""
    D, F, N, K, H, V = sizes_of(config)
    start = prefix_of(file, "model.")
    layer = start + "layers.{}."
    entries = [
        Entry(f"{layer}input_layernorm.weight", (D,), "layers.attention_norm.scale"),
        Entry(f"{layer}post_attention_layernorm.weight", (D,), "layers.mlp_norm.scale"),
        Entry(f"{start}norm.weight", (D,), "final_norm.scale"),
        Entry(f"{layer}self_attn.o_proj.weight", (D, N * V), "layers.attention.output_weight", columns_to_heads(N)),
    ]
    if config.use_bias in (True, "attention"):
        entries.append(Entry(f"{layer}self_attn.o_proj.bias", (D,), "layers.attention.output_bias"))
    for name, count, width in (("query", N, H), ("key", K, H), ("value", K, V)):
        stored, parameter = f"{layer}self_attn.{name[0]}_proj", f"layers.attention.{name}"
        entries.append(Entry(f"{stored}.weight", (count * width, D), f"{parameter}_weight", rows_to_heads(count)))
        if config.use_bias in (True, "attention"):
            entries.append(Entry(f"{stored}.bias", (count * width,), f"{parameter}_bias", bias_to_heads(count)))
    for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        stored, parameter = f"{layer}mlp.{name}_proj", f"layers.mlp.{name}"
        entries.append(Entry(f"{stored}.weight", shape, f"{parameter}_weight", np.transpose))
        if config.use_bias in (True, "mlp"):
            entries.append(Entry(f"{stored}.bias", shape[:1], f"{parameter}_bias"))
    embedding = f"{start}embed_tokens.weight"
    if config.head == "untied":
        entries.append(Entry("lm_head.weight", (config.vocabulary_size, D), "head_weight", np.transpose))
    elif embedding not in file.names and "lm_head.weight" in file.names:
        embedding = "lm_head.weight"
    entries.append(Entry(embedding, (config.vocabulary_size, D), "embedding"))
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
