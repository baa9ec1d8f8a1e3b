"""The modules in NumPy float64, from their parameters: attention by the oracle, all around it by its definition."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests import oracles

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def parameters(module) -> dict[str, np.ndarray]:
    """Every parameter by its dotted path, float64."""
    return {
        ".".join(map(str, path)): np.asarray(value[...], np.float64)
        for path, value in nnx.to_flat_state(nnx.state(module))
    }


def of(values: dict[str, np.ndarray], prefix: str, layer: int | None = None) -> dict[str, np.ndarray]:
    """The parameters under `prefix`, of one layer of a stack."""
    part = {path.removeprefix(prefix + "."): x for path, x in values.items() if path.startswith(prefix + ".")}
    return part if layer is None else {path: x[layer] for path, x in part.items()}


def randomized(build, seed: int):
    """What `build()` makes, with every parameter drawn by NumPy: no bias, norm or sink at its neutral initial value.

    The constructor is only traced: drawing by JAX would compile for seconds and be thrown away.
    """
    rng = np.random.default_rng(seed)
    graph, state = nnx.split(nnx.eval_shape(build))
    flat = []
    for path, variable in nnx.to_flat_state(state):
        around = 1 if "norm" in ".".join(map(str, path)) and path[-1] != "bias" else 0
        values = around + 0.3 * rng.standard_normal(variable.shape)
        flat.append((path, variable.replace(jnp.asarray(values, variable.dtype))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def rms(x, weight, epsilon):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * weight


def norm(kind, p, x, epsilon):
    if kind == "rms":
        return rms(x, p["scale"], epsilon)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def rotate(x, positions, base, interleaved):
    """`x` `[..., T, N, H]`, pairs as complex numbers."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.asarray(positions)[..., None, None] * base ** (-np.arange(half) / half))
    pairs = x[..., ::2] + 1j * x[..., 1::2] if interleaved else x[..., :half] + 1j * x[..., half:]
    pairs = pairs * turn
    if interleaved:
        return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)
    return np.concatenate([pairs.real, pairs.imag], -1)


def attention(
    p,
    x,
    context=None,
    *,
    scale=None,
    qk_norm=None,
    epsilon=1e-6,
    positions=None,
    base=10000.0,
    interleaved=False,
    max_distance=128,
    causal=False,
    query_positions=None,
    key_positions=None,
    **options,
):
    """Output of a `MultiHeadAttention` with the parameters `p`, and the oracle's forward pass."""
    context = x if context is None else context
    key_weight, key_bias = p.get("key_weight", p["query_weight"]), p.get("key_bias", p.get("query_bias", 0))
    query = np.einsum("...td,dnh->...tnh", x, p["query_weight"]) + p.get("query_bias", 0)
    key = np.einsum("...td,dnh->...tnh", context, key_weight) + key_bias
    value = np.einsum("...td,dnh->...tnh", context, p["value_weight"]) + p.get("value_bias", 0)
    if qk_norm == "rms":
        query = rms(query, p["query_norm_weight"], epsilon)
        key = rms(key, p.get("key_norm_weight", p["query_norm_weight"]), epsilon)
    elif qk_norm == "l2":
        query, key = (y / np.sqrt(np.sum(y**2, -1, keepdims=True) + epsilon) for y in (query, key))
    if positions == "rotary":
        at_queries = np.arange(query.shape[-3]) if query_positions is None else query_positions
        at_keys = np.arange(key.shape[-3]) if key_positions is None else key_positions
        query, key = rotate(query, at_queries, base, interleaved), rotate(key, at_keys, base, interleaved)
    if "log_temperature" in p:
        query = query / np.exp(p["log_temperature"])[:, None]
    if positions == "alibi":
        options["bias"] = oracles.alibi(query.shape[-2])
    elif positions == "relative":
        options["bias"] = oracles.relative_buckets(
            p["relative_table"], bidirectional=not causal, max_distance=max_distance
        )
    forward = oracles.attention(
        query, key, value, scale=scale, is_causal=causal, sinks=p.get("sinks"),
        query_positions=query_positions, key_positions=key_positions, **options,
    )  # fmt: skip
    output = np.einsum("...tnv,nvd->...td", forward.output, p["output_weight"]) + p.get("output_bias", 0)
    return output, forward


def mlp(p, x, activation):
    act = ACTIVATIONS[activation]
    up = x @ p["up_weight"] + p.get("up_bias", 0)
    inner = act(x @ p["gate_weight"] + p.get("gate_bias", 0)) * up if "gate_weight" in p else act(up)
    return inner @ p["down_weight"] + p.get("down_bias", 0)


def block(p, x, config, layer=0, **options):
    """One block by its configuration, and the oracle's forward pass of its attention."""
    own = config if config.layer_pattern is None else config.layer_pattern[layer % len(config.layer_pattern)]

    def normed(name, y):
        return norm(config.norm, of(p, name), y, config.norm_epsilon)

    def attend(y):
        return attention(
            of(p, "attention"), y, qk_norm=config.qk_norm, epsilon=config.norm_epsilon,
            scale=None if isinstance(config.scale_rule, str) else config.scale_rule,
            positions=config.positions if config.positions in ("rotary", "alibi", "relative") else None,
            base=own.rotary_base, interleaved=config.rotary_interleaved,
            max_distance=config.relative_max_distance, causal=config.causal,
            local_window_size=own.local_window_size, logits_soft_cap=config.logits_soft_cap, **options,
        )  # fmt: skip

    if config.norm_position == "both":
        attended, forward = attend(normed("attention_norm", x))
        x = x + normed("attention_output_norm", attended)
        return x + normed("mlp_output_norm", mlp(of(p, "mlp"), normed("mlp_norm", x), config.activation)), forward
    pre = config.norm_position == "pre"
    attended, forward = attend(normed("attention_norm", x) if pre else x)
    x = x + attended
    x = x if pre else normed("attention_norm", x)
    x = x + mlp(of(p, "mlp"), normed("mlp_norm", x) if pre else x, config.activation)
    return x if pre else normed("mlp_norm", x), forward


def transformer(p, token_ids, config, *, lengths=None, positions=None, token_types=None):
    """Logits or hidden states by the configuration, and the oracle's forward pass of every layer."""
    T = token_ids.shape[-1]
    x = p["embedding"][token_ids] * (math.sqrt(config.model_width) if config.scale_embedding else 1)
    if config.num_token_types is not None:
        x = x + p["token_type_embedding"][np.zeros_like(token_ids) if token_types is None else token_types]
    at = np.arange(T) if positions is None else positions
    if config.positions == "learned":
        x = x + p["position_embedding"][at]
    elif config.positions == "sinusoidal":
        angle = np.asarray(at)[..., None] * 10000.0 ** (-np.arange(0, config.model_width, 2) / config.model_width)
        x = x + np.stack([np.sin(angle), np.cos(angle)], -1).reshape(*np.shape(at), -1)
    if config.embedding_norm:
        x = norm(config.norm, of(p, "embedding_norm"), x, config.norm_epsilon)
    passes = []
    for layer in range(config.num_layers):
        x, forward = block(
            of(p, "layers", layer), x, config, layer, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
            query_positions=positions, key_positions=positions,
        )  # fmt: skip
        passes.append(forward)
    if config.norm_position != "post":
        x = norm(config.norm, of(p, "final_norm"), x, config.norm_epsilon)
    if config.head is None:
        return x, passes
    return x @ (p["embedding"].T if config.head == "tied" else p["head_weight"]), passes
