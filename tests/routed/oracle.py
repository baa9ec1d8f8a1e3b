"""Hashed and routed attention, token by token, in NumPy float64."""

import numpy as np


def unit(x):
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)


def softmax(logits):
    e = np.exp(logits - logits.max())
    return e / e.sum()


def buckets(x, rotations):
    """`[B, T, N, rounds]`."""
    x, rotations = np.asarray(x, np.float64), np.asarray(rotations, np.float64)
    batch, length, heads, _ = x.shape
    found = np.zeros((batch, length, heads, len(rotations)), int)
    for b, t, n, r in np.ndindex(found.shape):
        turned = x[b, t, n] @ rotations[r, n]
        both = np.concatenate([turned, -turned])
        found[b, t, n, r] = both.argmax() if both.size else 0
    return found


def neighbours(group_of_query, group_of_key, i, window, causal):
    """The keys that query i sees: of its group, of a rank that differs by less than the window."""
    group = [j for j, g in enumerate(group_of_key) if g == group_of_query[i]]
    rank = sum(j <= i for j in group) - 1
    return {j for r, j in enumerate(group) if abs(r - rank) < window and (j <= i or not causal)}


def lsh_pairs(x, rotations, *, window=None, causal=False, lengths=None):
    """Who finds whom, `[B, N, T, T]`."""
    groups = buckets(x, rotations)
    batch, length, heads, rounds = groups.shape
    window = length if window is None else window
    seen = np.zeros((batch, heads, length, length), bool)
    for b, n, i, r in np.ndindex(batch, heads, length, rounds):
        end = length if lengths is None else lengths[b]
        if i < end:
            group = groups[b, :end, n, r]
            for j in neighbours(group, group, i, window, causal) - {i}:
                seen[b, n, i, j] = True
    return seen


def attend(query, key, value, seen, *, scale=None):
    """Softmax attention over the pairs that are seen, and 0 where there is none. One key head for each query head."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for b, n, i in np.ndindex(seen.shape[:3]):
        at = np.flatnonzero(seen[b, n, i])
        if at.size:
            output[b, i, n] = softmax(scale * key[b, at, n] @ query[b, i, n]) @ value[b, at, n]
    return output


def lsh(x, value, rotations, *, lengths=None, scale=None, pairs=None, **options):
    """As `lsh_attention`; `pairs` fixes who finds whom."""
    x, value = np.asarray(x, np.float64), np.asarray(value, np.float64)
    seen = lsh_pairs(x, rotations, lengths=lengths, **options) if pairs is None else pairs
    output = attend(x, unit(x), value, seen, scale=scale)
    for b, n, i in np.ndindex(seen.shape[:3]):
        if not seen[b, n, i].any() and i < (x.shape[1] if lengths is None else lengths[b]):
            output[b, i, n] = value[b, i, n]
    return output


def affinities(x, centroids):
    """Cosines `[B, T, N, C]` of heads to the centroids of heads."""
    return np.einsum("btnh,nch->btnc", unit(np.asarray(x, np.float64)), unit(np.asarray(centroids, np.float64)))


def routing(query, key, value, centroids, *, window=None, causal=False, lengths=None, gates=None, chosen=None):
    """As `routing_attention`, as many key heads as query heads.

    `gates`, of queries and keys, `[B, T, N, C]`, multiply outputs and unnormalised weights of a cluster. `chosen`, of
    queries and keys, fixes the affinities by which tokens choose.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, length, heads, _ = query.shape
    clusters = np.asarray(centroids).shape[1]
    near, near_key = chosen if chosen is not None else (affinities(x, centroids) for x in (query, key))
    gates = gates if gates is not None else [np.ones((batch, length, heads, clusters))] * 2
    output = np.zeros((batch, length, heads, value.shape[-1]))
    for b, n in np.ndindex(batch, heads):
        end = length if lengths is None else lengths[b]
        parts = [[] for _ in range(length)]  # of each query, (cluster, keys)
        if causal:
            of_query, of_key = near[b, :end, n].argmax(axis=-1), near_key[b, :end, n].argmax(axis=-1)
            for i in range(end):
                keys = neighbours(of_query, of_key, i, length if window is None else window, True)
                parts[i].append((of_query[i], sorted(keys)))
        else:
            size = min(length // clusters if window is None else window, end)
            for c in range(clusters):
                rows = np.argsort(-near[b, :end, n, c], kind="stable")[:size]
                columns = np.argsort(-near_key[b, :end, n, c], kind="stable")[:size]
                for i in rows:
                    parts[i].append((c, columns))
        for i in range(end):
            numerator, total = 0.0, 0.0
            for c, keys in parts[i]:
                for j in keys:
                    weight = np.exp(query[b, i, n] @ key[b, j, n] / np.sqrt(query.shape[-1])) * gates[1][b, j, n, c]
                    numerator = numerator + gates[0][b, i, n, c] * weight * value[b, j, n]
                    total += weight
            output[b, i, n] = numerator / total if total else 0.0
    return output


def probabilities(near, temperature):
    e = np.exp((near - near.max(axis=-1, keepdims=True)) / temperature)
    return e / e.sum(axis=-1, keepdims=True)


def soft_routing(query, key, value, centroids, *, temperature, causal=False):
    """Every pair meets, weighted by the probability of a common cluster."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    p, p_key = (probabilities(affinities(x, centroids), temperature) for x in (query, key))
    output = np.zeros((*query.shape[:-1], value.shape[-1]))
    for b, i, n in np.ndindex(query.shape[:3]):
        keys = range(i + 1 if causal else query.shape[1])
        weights = np.array(
            [
                np.exp(query[b, i, n] @ key[b, j, n] / np.sqrt(query.shape[-1])) * (p[b, i, n] @ p_key[b, j, n])
                for j in keys
            ]
        )
        output[b, i, n] = weights / weights.sum() @ value[b, : len(keys), n]
    return output


def slope(function, x, direction, step=1e-5):
    """The central difference of a number along a direction."""
    x, direction = np.asarray(x, np.float64), np.asarray(direction, np.float64)
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)
