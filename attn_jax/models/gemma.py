"""Gemma 3 in GGUF and safetensors files: its configuration and its name maps.

Five layers of six see a window of keys and rotate by one base, the sixth sees all keys and rotates by another, with a
scaling of its own. Norms stand before and after attention and MLP, and on each query and key. Safetensors files hold
norm weights w of layers that multiply by 1 + w, as ours do not: 1 is added. GGUF files hold 1 + w. Neither permutes
the rows of queries and keys.

Reference: Gemma Team 2025 (Gemma 3 Technical Report), section 2.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_jax.models.checkpoint import Settings, WeightFile, short
from attn_jax.models.gguf_file import GGUFFile
from attn_jax.models.hub_config import activation_from_json, head_kind, rotary_from_json
from attn_jax.models.mapping import Convert, Entry, checked_config, columns_to_heads, prefix_of, rows_to_heads, sizes_of
from attn_jax.nn import LayerOptions, TransformerConfig
from attn_jax.positions import Linear, Scaling

# Metadata that `config_from_gguf` reads, or that changes no result: the context's length is that of the training texts.
_KNOWN = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attn_logit_softcapping",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
# Of the architecture, for files that do not say.
_GLOBAL_BASE, _LOCAL_BASE = 1e6, 1e4
_PERIOD = 6  # every sixth layer is global
_HEAD_WIDTH = 256
_LAYERS_OF_27B = 62  # the one model that scales by D / N instead of H; its GGUF file says it by no other number
_MOST_LAYERS = 1 << 12  # what differs between layers is listed layer by layer
# Tables that follow from the configuration, and a head that is tied to the embedding.
BUFFERS = (r"(model\.)?rotary_emb(_local)?\.inv_freq", r"lm_head\.weight")


def config_from_gguf(file: GGUFFile) -> TransformerConfig:
    """The `TransformerConfig` that the metadata of a Gemma 3 file describe.

    Args:
        file: an opened GGUF file of architecture "gemma3".

    Returns:
        TransformerConfig: a decoder; its head is tied to the embedding exactly if the file has no `output.weight`.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    prefix = "gemma3."
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in _KNOWN:
            raise ValueError(f"{file.path}: metadata {key!r} = {short(value)} is not supported")

    def number(name: str, default: int | None = None) -> int:
        return file.value(prefix + name, int, default)

    def real(name: str, default: float | None = None) -> float:
        return file.value(prefix + name, float, default)

    vocabulary = len(file.value("tokenizer.ggml.tokens", list))
    layers, width, heads = (number(key) for key in ("block_count", "embedding_length", "attention.head_count"))
    head_width = number("attention.key_length")
    for name, expected in (("vocab_size", vocabulary), ("rope.dimension_count", head_width)):
        if number(name, expected) != expected:
            raise ValueError(f"{file.path}: metadata {prefix + name!r} must be {expected}, got {number(name)}")
    scaled = prefix + "rope.scaling.factor" in file.metadata
    scaling = file.value(prefix + "rope.scaling.type", str, "linear" if scaled else "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{file.path}: metadata '{prefix}rope.scaling.type' = {short(scaling)} is not supported")
    scaled_width = width / max(heads, 1) if layers == _LAYERS_OF_27B else head_width
    cap = prefix + "attn_logit_softcapping"
    return _config(
        file.path,
        local=(number("attention.sliding_window"), real("rope.freq_base_swa", _LOCAL_BASE), None),
        everywhere=(
            real("rope.freq_base", _GLOBAL_BASE),
            _linear(file.path, real("rope.scaling.factor")) if scaling == "linear" else None,
        ),
        is_local=_every(file.path, number("attention.sliding_window_pattern", _PERIOD), layers),
        vocabulary_size=vocabulary,
        num_layers=layers,
        model_width=width,
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_width=head_width,
        value_width=number("attention.value_length", head_width),
        mlp_width=number("feed_forward_length"),
        norm_epsilon=real("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh",
        scale_rule=real("attention.scale", max(scaled_width, 1) ** -0.5),
        logits_soft_cap=real("attn_logit_softcapping") if cap in file.metadata else None,
        head="untied" if "output.weight" in file.names else "tied",
    )


def config_from_json(file: WeightFile, settings: Settings) -> TransformerConfig:
    """The `TransformerConfig` that the `config.json` of a Gemma 3 text model describes.

    Args:
        file: the opened weights, which say whether the head is the embedding.
        settings: of the `config.json`, of model_type "gemma3_text".

    Returns:
        TransformerConfig: a decoder.

    Raises:
        ValueError: a value is missing, of the wrong type, or describes something that this family's map does not cover.
    """
    for key in ("attention_bias", "use_bidirectional_attention"):
        settings.require(key, False)
    settings.require("final_logit_softcapping")
    layers = settings.value("num_hidden_layers", int)
    vocabulary, width = settings.value("vocab_size", int), settings.value("hidden_size", int)
    scaled_width = settings.value("query_pre_attn_scalar", float, float(_HEAD_WIDTH))
    if not scaled_width > 0:
        raise ValueError(f"{settings.path}: 'query_pre_attn_scalar' must be positive, got {scaled_width}")
    embedding = f"{prefix_of(file, 'model.')}embed_tokens.weight"
    tied = settings.value("tie_word_embeddings", bool, True)
    return _config(
        settings.path,
        local=(settings.value("sliding_window", int), *_local_rotary(settings)),
        everywhere=_global_rotary(settings),
        is_local=_layer_types(settings, layers),
        vocabulary_size=vocabulary,
        num_layers=layers,
        model_width=width,
        num_heads=settings.value("num_attention_heads", int),
        num_kv_heads=settings.value("num_key_value_heads", int),
        head_width=settings.value("head_dim", int, _HEAD_WIDTH),
        mlp_width=settings.value("intermediate_size", int),
        norm_epsilon=settings.value("rms_norm_eps", float, 1e-6),
        activation=activation_from_json(settings, "hidden_activation", "gelu_pytorch_tanh"),
        scale_rule=scaled_width**-0.5,
        logits_soft_cap=settings.optional("attn_logit_softcapping", float),
        head=head_kind(file, embedding, "lm_head.weight", (vocabulary, width), tied=tied),
    )


def _config(
    path: pathlib.Path,
    *,
    local: tuple[int, float, Scaling | None],
    everywhere: tuple[float, Scaling | None],
    is_local: Sequence[bool],
    **choices: Any,
) -> TransformerConfig:
    """The configuration, whose layers are of two kinds: window, base and scaling; base and scaling."""
    window, base, scaling = local
    if window < 1:
        raise ValueError(f"{path}: the sliding window must have at least 1 key, got {window}")
    kinds = {
        # `window` keys, the query's own among them
        True: LayerOptions(local_window_size=(window - 1, 0), rotary_base=base, rotary_scaling=scaling),
        False: LayerOptions(rotary_base=everywhere[0], rotary_scaling=everywhere[1]),
    }
    return checked_config(
        path,
        **choices,
        norm="rms",
        norm_position="both",
        mlp="gated",
        positions="rotary",
        causal=True,
        scale_embedding=True,
        qk_norm="rms",
        layer_pattern=tuple(kinds[one] for one in _period(is_local)),
    )


def _every(path: pathlib.Path, period: int, num_layers: int) -> list[bool]:
    """Whether each layer is local: the last of every `period` is not."""
    if period < 1 or not 1 <= num_layers <= _MOST_LAYERS:
        raise ValueError(f"{path}: the layers must be 1 to {_MOST_LAYERS} in periods of 1 or more, got {num_layers}")
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _period(values: Sequence[bool]) -> Sequence[bool]:
    """The shortest beginning that gives all of them when it is repeated."""
    lengths = range(1, len(values) + 1)
    return next(values[:n] for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def _layer_types(settings: Settings, num_layers: int) -> list[bool]:
    """Whether each layer is local: from `layer_types`, or else from the period."""
    period = settings.value("sliding_window_pattern", int, settings.value("_sliding_window_pattern", int, _PERIOD))
    types = settings.optional("layer_types", list)
    if types is None:
        return _every(settings.path, period, num_layers)
    names = {"sliding_attention": True, "full_attention": False}
    if len(types) != num_layers or not all(isinstance(one, str) and one in names for one in types):
        known = " or ".join(map(repr, names))
        raise ValueError(f"{settings.path}: layer_types must be {num_layers} times {known}, got {short(types)}")
    return [names[one] for one in types]


def _linear(path: pathlib.Path, factor: float) -> Linear:
    try:
        return Linear(factor)
    except ValueError as error:
        raise ValueError(f"{path}: rope scaling: {error}") from error


def _global_rotary(settings: Settings) -> tuple[float, Scaling | None]:
    """Base and scaling of the layers that see all keys; `rope_scaling`, where files have it, is theirs alone."""
    rope = settings.optional("rope_parameters", dict) or {}
    if not rope.keys() <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"{settings.path}: 'rope_parameters' must be by layer type, got {short(rope)}")
    flat = settings.optional("rope_scaling", dict) is not None
    if rope and flat:
        raise ValueError(f"{settings.path}: 'rope_scaling' and 'rope_parameters' must not both be there")
    return rotary_from_json(settings, None if flat else "full_attention", default_base=_GLOBAL_BASE)


def _local_rotary(settings: Settings) -> tuple[float, Scaling | None]:
    """Base and scaling of the layers with a window; without `rope_parameters` the base has a key of its own."""
    own = {key: value for key, value in settings.values.items() if key not in ("rope_theta", "rope_scaling")}
    own["rope_theta"] = settings.values.get("rope_local_base_freq")
    return rotary_from_json(Settings(settings.path, own), "sliding_attention", default_base=_LOCAL_BASE)


def gguf_map(file: GGUFFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a Gemma 3 GGUF file goes in the `Transformer` of `config`."""
    del file
    norms = {
        "blk.{}.attn_norm": "layers.attention_norm.scale",
        "blk.{}.post_attention_norm": "layers.attention_output_norm.scale",
        "blk.{}.ffn_norm": "layers.mlp_norm.scale",
        "blk.{}.post_ffw_norm": "layers.mlp_output_norm.scale",
        "blk.{}.attn_q_norm": "layers.attention.query_norm_weight",
        "blk.{}.attn_k_norm": "layers.attention.key_norm_weight",
        "output_norm": "final_norm.scale",
    }
    attention = {kind: f"blk.{{}}.attn_{kind if kind == 'output' else kind[0]}" for kind in _PROJECTIONS}
    mlp = {kind: f"blk.{{}}.ffn_{kind}" for kind in ("gate", "up", "down")}
    return _entries(config, norms, attention, mlp, embedding="token_embd", head="output", convert_norm=lambda w: w)


def safetensors_map(file: WeightFile, config: TransformerConfig) -> list[Entry]:
    """Where each tensor of a Gemma 3 safetensors file goes in the `Transformer` of `config`."""
    start = prefix_of(file, "model.")
    layer = start + "layers.{}."
    norms = {
        f"{layer}input_layernorm": "layers.attention_norm.scale",
        f"{layer}post_attention_layernorm": "layers.attention_output_norm.scale",
        f"{layer}pre_feedforward_layernorm": "layers.mlp_norm.scale",
        f"{layer}post_feedforward_layernorm": "layers.mlp_output_norm.scale",
        f"{layer}self_attn.q_norm": "layers.attention.query_norm_weight",
        f"{layer}self_attn.k_norm": "layers.attention.key_norm_weight",
        f"{start}norm": "final_norm.scale",
    }
    attention = {kind: f"{layer}self_attn.{kind[0]}_proj" for kind in _PROJECTIONS}
    mlp = {kind: f"{layer}mlp.{kind}_proj" for kind in ("gate", "up", "down")}
    embedding = f"{start}embed_tokens"
    if f"{embedding}.weight" not in file.names:  # of a tied pair, one may be left out
        embedding = "lm_head"
    return _entries(config, norms, attention, mlp, embedding=embedding, head="lm_head", convert_norm=lambda w: w + 1)


_PROJECTIONS = ("query", "key", "value", "output")


def _entries(
    config: TransformerConfig,
    norms: dict[str, str],
    attention: dict[str, str],
    mlp: dict[str, str],
    *,
    embedding: str,
    head: str,
    convert_norm: Convert,
) -> list[Entry]:
    """The name map, given what the file calls each tensor, without `.weight`."""
    D, F, N, K, H, V = sizes_of(config)
    vocabulary = config.vocabulary_size
    entries = [
        Entry(f"{embedding}.weight", (vocabulary, D), "embedding"),
        Entry(f"{attention['output']}.weight", (D, N * V), "layers.attention.output_weight", columns_to_heads(N)),
    ]
    for kind, count, width in (("query", N, H), ("key", K, H), ("value", K, V)):
        stored, parameter = f"{attention[kind]}.weight", f"layers.attention.{kind}_weight"
        entries.append(Entry(stored, (count * width, D), parameter, rows_to_heads(count)))
    for kind, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        entries.append(Entry(f"{mlp[kind]}.weight", shape, f"layers.mlp.{kind}_weight", np.transpose))
    for stored, parameter in norms.items():
        size = H if parameter.endswith("norm_weight") else D
        entries.append(Entry(f"{stored}.weight", (size,), parameter, convert_norm))
    if config.head == "untied":
        entries.append(Entry(f"{head}.weight", (vocabulary, D), "head_weight", np.transpose))
    return entries
