"""BERT in safetensors files: its configuration and its name map.

An encoder with norms after the branches, learned positions and token types, and a norm of their sum. Its heads for
pretraining or for a task (the pooler is one) read the hidden states and are left aside.

Reference: Devlin et al. 2019.
"""

from typing import Any

import numpy as np

from attn_jax.models.checkpoint import Settings, WeightFile
from attn_jax.models.hub_config import activation_from_json
from attn_jax.models.mapping import (
    Entry,
    bias_to_heads,
    checked_config,
    columns_to_heads,
    prefix_of,
    rows_to_heads,
    sizes_of,
)
from attn_jax.nn import TransformerConfig

BUFFERS = (
    r"(bert\.)?embeddings\.(position|token_type)_ids",
    r"(bert\.)?pooler\.dense\.(weight|bias)",
    r"(cls|classifier|qa_outputs)\..+",
)


def config_from_json(file: WeightFile, settings: Settings) -> TransformerConfig:
    """The `TransformerConfig` that the `config.json` of a BERT checkpoint describes.

    Args:
        file: the opened weights, which decide nothing here.
        settings: of the `config.json`.

    Returns:
        TransformerConfig: an encoder; its outputs are hidden states.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    settings.require("position_embedding_type", "absolute")
    settings.require("is_decoder", False)
    settings.require("add_cross_attention", False)
    sizes: dict[str, Any] = {
        "vocabulary_size": settings.value("vocab_size", int),
        "num_layers": settings.value("num_hidden_layers", int),
        "model_width": settings.value("hidden_size", int),
        "num_heads": settings.value("num_attention_heads", int),
        "mlp_width": settings.value("intermediate_size", int),
        "max_length": settings.value("max_position_embeddings", int),
        "num_token_types": settings.value("type_vocab_size", int, 2),
    }
    return checked_config(
        settings.path,
        **sizes,
        norm="layer",
        norm_position="post",
        norm_epsilon=settings.value("layer_norm_eps", float, 1e-12),
        embedding_norm=True,
        mlp="plain",
        activation=activation_from_json(settings, "hidden_act", "gelu"),
        use_bias=True,
        positions="learned",
        causal=False,
        head=None,
    )


def safetensors_map(file: WeightFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a BERT checkpoint goes in the `Transformer` of `config`."""
    D, F, N, _, _, V = sizes_of(config)
    start = prefix_of(file, "bert.")
    layer = start + "encoder.layer.{}."
    attention, mlp = "layers.attention", "layers.mlp"
    tables = {
        "word": (config.vocabulary_size, "embedding"),
        "position": (config.max_length or 0, "position_embedding"),
        "token_type": (config.num_token_types or 0, "token_type_embedding"),
    }
    entries = [
        Entry(f"{start}embeddings.{name}_embeddings.weight", (rows, D), parameter)
        for name, (rows, parameter) in tables.items()
    ]
    for name in ("query", "key", "value"):
        stored, parameter = f"{layer}attention.self.{name}", f"{attention}.{name}"
        entries.append(Entry(f"{stored}.weight", (D, D), f"{parameter}_weight", rows_to_heads(N)))
        entries.append(Entry(f"{stored}.bias", (D,), f"{parameter}_bias", bias_to_heads(N)))
    entries += [
        Entry(f"{layer}attention.output.dense.weight", (D, N * V), f"{attention}.output_weight", columns_to_heads(N)),
        Entry(f"{layer}attention.output.dense.bias", (D,), f"{attention}.output_bias"),
        Entry(f"{layer}intermediate.dense.weight", (F, D), f"{mlp}.up_weight", np.transpose),
        Entry(f"{layer}intermediate.dense.bias", (F,), f"{mlp}.up_bias"),
        Entry(f"{layer}output.dense.weight", (D, F), f"{mlp}.down_weight", np.transpose),
        Entry(f"{layer}output.dense.bias", (D,), f"{mlp}.down_bias"),
    ]
    norms = {
        f"{start}embeddings.LayerNorm": "embedding_norm",
        f"{layer}attention.output.LayerNorm": "layers.attention_norm",
        f"{layer}output.LayerNorm": "layers.mlp_norm",
    }
    older = any(name.endswith("LayerNorm.gamma") for name in file.names)  # the names of the first release
    for stored, parameter in norms.items():
        entries.append(Entry(f"{stored}.{'gamma' if older else 'weight'}", (D,), f"{parameter}.scale"))
        entries.append(Entry(f"{stored}.{'beta' if older else 'bias'}", (D,), f"{parameter}.bias"))
    return entries
