"""Linformer and Nyström attention by their definitions, one item, head and token at a time, in NumPy float64."""

import math

import numpy as np


def weights(query, keys, scale):
    """Of each query `[rows, H]` over `keys` `[S, H]`: `[rows, S]`."""
    found = np.zeros((len(query), len(keys)))
    for i, row in enumerate(query):
        logits = np.array([scale * float(row @ key) for key in keys])
        numerators = np.exp(logits - logits.max(initial=-np.inf))
        found[i] = numerators / numerators.sum()
    return found


def segments(count: int, landmarks: int) -> list[list[int]]:
    """The tokens of each landmark: as even as can be, the longer segments first, none of them empty."""
    landmarks = min(landmarks, count)
    found, start = [], 0
    for j in range(landmarks):
        size = count // landmarks + (1 if j < count % landmarks else 0)
        found.append(list(range(start, start + size)))
        start += size
    return found


def means(x, landmarks: int) -> np.ndarray:
    """`[tokens, width]` to one mean per landmark."""
    groups = segments(len(x), landmarks)
    return np.array([sum(x[t] for t in group) / len(group) for group in groups]).reshape(len(groups), x.shape[1])


def nystrom_head(query, key, value, landmarks, scale, invert=np.linalg.pinv):
    """One head whose tokens all count: `[T, V]`."""
    if not len(key) or not len(query):
        return np.zeros((len(query), value.shape[1]))
    of_queries, of_keys = means(query, landmarks), means(key, landmarks)
    inverse = invert(weights(of_queries, of_keys, scale))
    return weights(query, of_keys, scale) @ inverse @ weights(of_queries, key, scale) @ value


def linformer_head(query, key, value, key_projection, value_projection, scale):
    """One head; what does not count is 0 already. Projections `[R, S]`."""
    keys, values = (
        np.array([sum(row[s] * x[s] for s in range(len(x))) + np.zeros(x.shape[1]) for row in projection])
        for projection, x in ((key_projection, key), (value_projection, value))
    )
    return weights(query, keys, scale) @ values


def iterate(matrix, iterations: int = 6) -> np.ndarray:
    """The iteration for one matrix."""
    columns, rows = np.abs(matrix).sum(0).max(), np.abs(matrix).sum(1).max()
    inverse, identity = matrix.T / (columns * rows), np.eye(len(matrix))
    for _ in range(iterations):
        image = matrix @ inverse
        inverse = inverse @ (13 * identity - image @ (15 * identity - image @ (7 * identity - image))) / 4
    return inverse


def each_head(function, query, key, value, *per_head, scale=None, query_lengths=None, key_lengths=None, pad=False):
    """`function(q [T, H], k [S, H], v [S, V], *per_head of the key head, scale)` of every item and query head.

    `pad`: what does not count is zeroed, else it is cut off. `per_head` arrays are `[K, …]`.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, length, heads, width = query.shape
    keys, key_heads = key.shape[-3:-1]
    scales = np.broadcast_to(1 / math.sqrt(width) if scale is None else np.asarray(scale, np.float64), (heads,))
    output = np.zeros((*batch, length, heads, value.shape[-1]))
    for *item, n in np.ndindex(*batch, heads):
        item, k = tuple(item), n * key_heads // heads
        last_query = length if query_lengths is None else int(np.broadcast_to(query_lengths, batch)[item])
        last_key = keys if key_lengths is None else int(np.broadcast_to(key_lengths, batch)[item])
        q, ks, vs = query[item][:last_query, n], key[item][:last_key, k], value[item][:last_key, k]
        if pad:
            ks, vs = (np.concatenate([x, np.zeros((keys - last_key, x.shape[1]))]) for x in (ks, vs))
        output[item][:last_query, n] = function(q, ks, vs, *(x[k] for x in per_head), scales[n])
    return output


def nystrom(query, key, value, *, landmarks, invert=np.linalg.pinv, **options):
    def head(q, k, v, scale):
        return nystrom_head(q, k, v, landmarks, scale, invert)

    return each_head(head, query, key, value, **options)


def linformer(query, key, value, key_projection, value_projection=None, **options):
    length, heads = key.shape[-3:-1]
    value_projection = key_projection if value_projection is None else value_projection
    projections = [
        np.broadcast_to(x, (heads, *x.shape[-2:])).astype(np.float64)[..., :length]
        for x in (np.asarray(key_projection), np.asarray(value_projection))
    ]
    return each_head(linformer_head, query, key, value, *projections, pad=True, **options)
