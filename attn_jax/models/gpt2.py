"""GPT-2 in safetensors files: its configuration and its name map.

A linear layer is stored as it is used, `[in, out]`, unlike in the other families; query, key and value lie side by
side on the output axis of one tensor, each of them head by head.

Reference: Radford et al. 2019.
"""

from typing import Any

import numpy as np

from attn_jax.models.checkpoint import Settings, WeightFile
from attn_jax.models.hub_config import activation_from_json, head_kind
from attn_jax.models.mapping import Convert, Entry, bias_to_heads, checked_config, prefix_of, sizes_of
from attn_jax.nn import TransformerConfig

BUFFERS = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight")  # causal masks; a head that is tied


def config_from_json(file: WeightFile, settings: Settings) -> TransformerConfig:
    """The `TransformerConfig` that the `config.json` of a GPT-2 checkpoint describes.

    Args:
        file: the opened weights, which say whether the head is the embedding.
        settings: of the `config.json`.

    Returns:
        TransformerConfig: a decoder.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    for key, neutral in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        settings.require(key, neutral)
    sizes: dict[str, Any] = {
        "vocabulary_size": settings.value("vocab_size", int),
        "num_layers": settings.value("n_layer", int),
        "model_width": settings.value("n_embd", int),
        "num_heads": settings.value("n_head", int),
        "mlp_width": settings.optional("n_inner", int),
        "max_length": settings.value("n_positions", int),
    }
    shape = sizes["vocabulary_size"], sizes["model_width"]
    tied = settings.value("tie_word_embeddings", bool, True)
    return checked_config(
        settings.path,
        **sizes,
        norm="layer",
        norm_position="pre",
        norm_epsilon=settings.value("layer_norm_epsilon", float, 1e-5),
        mlp="plain",
        activation=activation_from_json(settings, "activation_function", "gelu_new"),
        use_bias=True,
        positions="learned",
        causal=True,
        head=head_kind(file, f"{prefix_of(file, 'transformer.')}wte.weight", "lm_head.weight", shape, tied=tied),
    )


def safetensors_map(file: WeightFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a GPT-2 checkpoint goes in the `Transformer` of `config`."""
    D, F, N, _, _, V = sizes_of(config)
    vocabulary, start = config.vocabulary_size, prefix_of(file, "transformer.")
    layer = start + "h.{}."

    def part(index: int) -> Convert:
        """Of the fused `[D, 3 · D]`, whose thirds are query, key and value: one third, `[D, N, H]`."""
        return lambda columns: columns[:, index * D : (index + 1) * D].reshape(D, N, -1)

    def part_of_bias(index: int) -> Convert:
        return lambda bias: bias_to_heads(N)(bias[index * D : (index + 1) * D])

    entries = [
        Entry(f"{start}wpe.weight", (config.max_length or 0, D), "position_embedding"),
        Entry(f"{layer}attn.c_proj.weight", (D, D), "layers.attention.output_weight", lambda w: w.reshape(N, V, D)),
        Entry(f"{layer}attn.c_proj.bias", (D,), "layers.attention.output_bias"),
        Entry(f"{layer}mlp.c_fc.weight", (D, F), "layers.mlp.up_weight"),
        Entry(f"{layer}mlp.c_fc.bias", (F,), "layers.mlp.up_bias"),
        Entry(f"{layer}mlp.c_proj.weight", (F, D), "layers.mlp.down_weight"),
        Entry(f"{layer}mlp.c_proj.bias", (D,), "layers.mlp.down_bias"),
    ]
    for index, name in enumerate(("query", "key", "value")):
        weight, bias = f"layers.attention.{name}_weight", f"layers.attention.{name}_bias"
        entries.append(Entry(f"{layer}attn.c_attn.weight", (D, 3 * D), weight, part(index)))
        entries.append(Entry(f"{layer}attn.c_attn.bias", (3 * D,), bias, part_of_bias(index)))
    norms = {f"{layer}ln_1": "layers.attention_norm", f"{layer}ln_2": "layers.mlp_norm", f"{start}ln_f": "final_norm"}
    for stored, parameter in norms.items():
        entries.append(Entry(f"{stored}.weight", (D,), f"{parameter}.scale"))
        entries.append(Entry(f"{stored}.bias", (D,), f"{parameter}.bias"))
    embedding = f"{start}wte.weight"
    if config.head == "untied":
        entries.append(Entry("lm_head.weight", (vocabulary, D), "head_weight", np.transpose))
    elif embedding not in file.names and "lm_head.weight" in file.names:
        embedding = "lm_head.weight"
    entries.append(Entry(embedding, (vocabulary, D), "embedding"))
    return entries
