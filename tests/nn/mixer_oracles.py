"""The mixers in NumPy float64, token by token from their parameters: one item `[T, D]`, all rows of which count."""

import numpy as np

from tests.nn import reference

MAPS = {
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "squared": np.square,
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def heads(p, x):
    """Queries, keys and values `[T, N, ·]`, keys and values repeated for the query heads that read them."""
    query, key, value = (
        np.einsum("td,dnh->tnh", x, p[f"{name}_weight"]) + p.get(f"{name}_bias", 0)
        for name in ("query", "key" if "key_weight" in p else "query", "value")
    )
    groups = query.shape[1] // key.shape[1]
    return query, np.repeat(key, groups, axis=1), np.repeat(value, groups, axis=1)


def merge(p, y):
    return np.einsum("tnv,nvd->td", y, p["output_weight"]) + p.get("output_bias", 0)


def linear(p, x, *, causal, options):
    query, key, value = heads(p, x)
    if options.feature_map == "random":
        query, key = (y / y.shape[-1] ** 0.25 for y in (query, key))

        def features(y):
            return np.exp(y @ p["random_features"].T - np.sum(y**2) / 2)
    else:
        features = MAPS[options.feature_map]
    output = np.zeros((*query.shape[:2], value.shape[-1]))
    for t in range(len(x)):
        for n in range(query.shape[1]):
            seen = range(t + 1 if causal else len(x))
            weights = np.array([features(query[t, n]) @ features(key[s, n]) for s in seen])
            if weights.any():  # else 0: the query has no feature in common with any key
                output[t, n] = weights @ value[list(seen), n] / weights.sum()
    return merge(p, output)


def retention(p, x, *, causal, options):
    query, key, value = heads(p, x)
    query, key = (reference.rotate(y, np.arange(len(x)), 10000.0, False) for y in (query, key))
    output = np.zeros((*query.shape[:2], value.shape[-1]))
    for n in range(query.shape[1]):
        memory = np.zeros((query.shape[-1], value.shape[-1]))
        for t in range(len(x)):
            memory = (1 - 2.0 ** (-5 - n)) * memory + np.outer(key[t, n] / np.sqrt(key.shape[-1]), value[t, n])
            output[t, n] = query[t, n] @ memory
    output = (output - output.mean(-1, keepdims=True)) / np.sqrt(output.var(-1, keepdims=True) + 1e-6)
    gate = np.einsum("td,dnv->tnv", x, p["gate_weight"]) + p.get("gate_bias", 0)
    return merge(p, silu(gate) * output * p["norm_weight"])


def state_space(p, x, *, causal, options):
    N, V = p["gate_weight"].shape[1:]
    R = (p["input_weight"].shape[1] - N * V) // 2
    u = x @ p["input_weight"] + p.get("input_bias", 0)
    mixed = silu(convolved(u, p["convolution_weight"], len(p["convolution_weight"]) - 1) + p["convolution_bias"])
    inputs, B, C = mixed[:, : N * V].reshape(-1, N, V), mixed[:, N * V : N * V + R], mixed[:, N * V + R :]
    steps = np.log1p(np.exp(x @ p["step_weight"] + p["step_bias"]))
    output = np.zeros_like(inputs)
    for n in range(N):
        memory = np.zeros((R, V))
        for t in range(len(x)):
            memory = np.exp(-steps[t, n] * np.exp(p["log_rate"][n])) * memory
            memory += np.outer(B[t], steps[t, n] * inputs[t, n])
            output[t, n] = C[t] @ memory + p["skip"][n] * inputs[t, n]
    gate = np.einsum("td,dnv->tnv", x, p["gate_weight"]) + p.get("gate_bias", 0)
    gated = (output * silu(gate)).reshape(len(x), N * V)
    return merge(p, reference.rms(gated, p["norm_weight"], 1e-6).reshape(output.shape))


def convolved(x, weight, left):
    """`Σ_j weight[j] x[t + j - left]`, zeros beyond the ends."""
    output = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(len(weight)):
            if 0 <= t + j - left < len(x):
                output[t] += weight[j] * x[t + j - left]
    return output


def convolution(p, x, *, causal, options):
    width = len(p["convolution_weight"])
    y = convolved(x, p["convolution_weight"], width - 1 if causal else width // 2) + p.get("convolution_bias", 0)
    return y @ p["output_weight"] + p.get("output_bias", 0)


def gru(p, x, *, causal, options):
    D = x.shape[-1]
    (W_r, W_z, W_n), (U_r, U_z, U_n) = (np.moveaxis(p[f"{name}_weight"], 1, 0) for name in ("input", "recurrent"))
    b_r, b_z, b_n = p.get("input_bias", np.zeros((3, D)))
    h, output = np.zeros(D), np.zeros_like(x)
    for t in range(len(x)):
        r, z = sigmoid(x[t] @ W_r + h @ U_r + b_r), sigmoid(x[t] @ W_z + h @ U_z + b_z)
        n = np.tanh(x[t] @ W_n + b_n + r * (h @ U_n + p.get("recurrent_bias", 0)))
        h = output[t] = (1 - z) * n + z * h
    return output


def softmax_over(query, keys, values):
    """One query over the keys found, and its log-sum-exp."""
    logits = keys @ query / np.sqrt(len(query))
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum(), logits.max() + np.log(weights.sum())


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def lsh(p, x, *, causal, options):
    query, _, value = heads(p, x)
    output = np.zeros_like(value)
    for n in range(query.shape[1]):
        found = np.zeros((len(x), len(x)), bool)
        for turn in p["rotations"][:, n]:
            turned = query[:, n] @ turn
            bucket = np.argmax(np.concatenate([turned, -turned], -1), -1)
            rank = np.array([np.sum(bucket[:t] == bucket[t]) for t in range(len(x))])
            apart = rank[:, None] - rank[None]
            found |= (bucket[:, None] == bucket[None]) & (abs(apart) < options.group_window) & (apart != 0)
        if causal:
            found &= np.tri(len(x), dtype=bool)
        for t in range(len(x)):
            if found[t].any():
                output[t, n], _ = softmax_over(query[t, n], unit(query[found[t], n]), value[found[t], n])
            else:
                output[t, n] = value[t, n]
    return merge(p, output)


def routing(p, x, *, causal, options):
    query, key, value = heads(p, x)
    groups = query.shape[1] // len(p["centroids"])
    output = np.zeros_like(query[..., :1] * value[:1])
    for n in range(query.shape[1]):
        centroids = unit(p["centroids"][n // groups])
        near_queries, near_keys = (unit(y[:, n]) @ centroids.T for y in (query, key))
        if causal:
            for t in range(len(x)):
                mine = near_queries[t].argmax()
                members = [s for s in range(t + 1) if near_keys[s].argmax() == mine][-options.group_window :]
                if members:
                    output[t, n], _ = softmax_over(query[t, n], key[members, n], value[members, n])
            continue
        best_queries, best_keys = (
            np.argsort(-near, axis=0, kind="stable")[: options.group_window].T for near in (near_queries, near_keys)
        )
        for t in range(len(x)):
            parts = [
                softmax_over(query[t, n], key[best_keys[c], n], value[best_keys[c], n])
                for c in range(len(centroids))
                if t in best_queries[c]
            ]
            if parts:
                shares = np.exp([logsumexp for _, logsumexp in parts])
                output[t, n] = sum(share * y for share, (y, _) in zip(shares, parts, strict=True)) / shares.sum()
    return merge(p, output)


ORACLES = {
    "linear": linear, "retention": retention, "state_space": state_space, "lsh": lsh, "routing": routing,
    "convolution": convolution, "gru": gru,
}  # fmt: skip
