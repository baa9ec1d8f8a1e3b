"""Small valid GGUF files of the Llama family, and the logits that they mean, in NumPy float64."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

LAYERS, D, N, K, H, V, F = 2, 32, 4, 2, 8, 8, 64
BASE, EPSILON = 10000.0, 1e-5


def tokens():
    """The 256 characters of the byte alphabet, one control token, one token of a user, and two merges."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in kept] + [chr(256 + i) for i in range(256 - len(kept))]
    names = ["<|end|>", "<think>", *alphabet, "he", "Ġt"]
    kinds = [TokenType.CONTROL, TokenType.USER_DEFINED] + [TokenType.NORMAL] * (len(names) - 2)
    return names, [int(kind) for kind in kinds], ["h e", "Ġ t"]


VOCABULARY = len(tokens()[0])


def metadata():
    names, kinds, merges = tokens()
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": D,
        "llama.feed_forward_length": F,
        "llama.attention.head_count": N,
        "llama.attention.head_count_kv": K,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.freq_base": BASE,
        "llama.rope.dimension_count": H,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }


def shapes():
    per_layer = {
        "attn_norm": (D,),
        "attn_q": (N * H, D),
        "attn_k": (K * H, D),
        "attn_v": (K * V, D),
        "attn_output": (D, N * V),
        "ffn_norm": (D,),
        "ffn_gate": (F, D),
        "ffn_up": (F, D),
        "ffn_down": (D, F),
    }
    layers = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in per_layer.items()}
    return {"token_embd.weight": (VOCABULARY, D), **layers, "output_norm.weight": (D,)}


def tensors(seed=0, *, untied=False):
    """Random weights, norms around 1; each tensor distinct."""
    generator = np.random.default_rng(seed)
    wanted = shapes() | ({"output.weight": (VOCABULARY, D)} if untied else {})
    drawn = {}
    for name, shape in wanted.items():
        values = generator.standard_normal(shape) * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
        drawn[name] = (values + (1 if len(shape) == 1 else 0)).astype(np.float32)
    return drawn


def write(path, *, architecture="llama", fields=None, weights=None, kinds=None):
    """Writes a file; returns the weights that it holds, as `gguf` dequantises them.

    `fields` replace metadata (None leaves one out), `weights` all tensors, `kinds` the type of some of them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata() | (fields or {})).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ](key, value)
    held = {}
    for name, values in (tensors() if weights is None else weights).items():
        kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        held[name] = gguf.quants.dequantize(stored, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def logits(weights, token_ids):
    """The model's logits `[T, vocabulary]`. Stored rows are rotated as they lie: the partners are neighbours."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = w["token_embd.weight"][token_ids]
    steps = len(token_ids)
    seen = np.tri(steps, dtype=bool)
    for i in range(LAYERS):
        layer = {name.split(".")[2]: values for name, values in w.items() if name.startswith(f"blk.{i}.")}
        y = rms(x) * layer["attn_norm"]
        query = rotate((y @ layer["attn_q"].T).reshape(steps, N, H))
        key = rotate((y @ layer["attn_k"].T).reshape(steps, K, H))
        value = (y @ layer["attn_v"].T).reshape(steps, K, V)
        heads = []
        for n in range(N):
            scores = np.where(seen, query[:, n] @ key[:, n // (N // K)].T / np.sqrt(H), -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ value[:, n // (N // K)])
        x = x + np.concatenate(heads, -1) @ layer["attn_output"].T
        y = rms(x) * layer["ffn_norm"]
        gate = y @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    return rms(x) * w["output_norm.weight"] @ w.get("output.weight", w["token_embd.weight"]).T


def rms(x):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPSILON)


def rotate(x):
    """[T, heads, H], rotated by position in neighbouring pairs."""
    angles = np.arange(x.shape[0])[:, None, None] * BASE ** (-np.arange(0, H, 2) / H)[None, None]
    rotated = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([rotated.real, rotated.imag], -1).reshape(x.shape)
