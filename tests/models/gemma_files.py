"""The tiny Gemma 3 that `transformers` wrote, as its folder and as a GGUF file with the same weights."""

import json
import pathlib
import shutil

import numpy as np
from gguf import TokenType
from safetensors.numpy import load_file

from tests.models import llama_files

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_gemma3"
SETTINGS = json.loads((TINY / "config.json").read_text())
LAYERS, VOCABULARY, H = SETTINGS["num_hidden_layers"], SETTINGS["vocab_size"], SETTINGS["head_dim"]
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tokens():
    """Names, kinds and scores of a SentencePiece vocabulary: controls, runs of spaces, bytes, letters, merges."""
    named = [("<pad>", TokenType.CONTROL), ("<eos>", TokenType.CONTROL), ("<bos>", TokenType.CONTROL)]
    named += [("<unk>", TokenType.CONTROL), ("\n\n", TokenType.USER_DEFINED)]
    named += [(" " * count, TokenType.USER_DEFINED) for count in (2, 3)]
    named += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in "é\n".encode()]
    best_first = ["th", "▁th", "the", "▁the", "he", "▁h"]
    named += [(name, TokenType.NORMAL) for name in (*best_first, "▁", *"abcdefghijklmnopqrstuvwxyz")]
    named += [(f"<unused{i}>", TokenType.CONTROL) for i in range(VOCABULARY - len(named))]
    scores = [float(-i) if kind == TokenType.NORMAL else -1000.0 for i, (_, kind) in enumerate(named)]
    return [name for name, _ in named], [int(kind) for _, kind in named], scores


def metadata():
    names, kinds, scores = tokens()
    return {
        "gemma3.block_count": LAYERS,
        "gemma3.context_length": SETTINGS["max_position_embeddings"],
        "gemma3.embedding_length": SETTINGS["hidden_size"],
        "gemma3.feed_forward_length": SETTINGS["intermediate_size"],
        "gemma3.attention.head_count": SETTINGS["num_attention_heads"],
        "gemma3.attention.head_count_kv": SETTINGS["num_key_value_heads"],
        "gemma3.attention.key_length": H,
        "gemma3.attention.value_length": H,
        "gemma3.attention.layer_norm_rms_epsilon": SETTINGS["rms_norm_eps"],
        "gemma3.attention.scale": SETTINGS["query_pre_attn_scalar"] ** -0.5,
        "gemma3.attention.sliding_window": SETTINGS["sliding_window"],
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def stored():
    """The folder's tensors, as they lie there."""
    return load_file(TINY / "model.safetensors")


def tensors():
    """The same tensors as a GGUF file has them: under its names, and norms with 1 added."""
    renamed = {}
    for name, values in stored().items():
        parts = name.removeprefix("model.").split(".")
        if parts[0] == "layers":
            name = f"blk.{parts[1]}.{_NAMES['.'.join(parts[2:-1])]}.weight"
        else:
            name = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[0]]
        renamed[name] = values + np.float32(1) if "norm" in name else values
    return renamed


def write(path, *, fields=None, weights=None, **options):
    """Writes a GGUF file; `fields` replace metadata (None leaves one out), `weights` all tensors."""
    fields = dict.fromkeys(llama_files.metadata()) | metadata() | (fields or {})
    weights = tensors() if weights is None else weights
    return llama_files.write(path, **{"architecture": "gemma3"} | options, fields=fields, weights=weights)


def folder(path, name="config", **settings):
    """A folder with the weights and the settings NAME, some of them replaced (None leaves one out)."""
    path.mkdir(exist_ok=True)
    shutil.copy(TINY / "model.safetensors", path)
    values = json.loads((TINY / f"{name}.json").read_text()) | settings
    kept = {key: value for key, value in values.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def golden(name):
    """Token ids, and the logits of the model with the settings NAME."""
    with np.load(TINY / "output.npz") as held:
        return held["token_ids"], held[name]
