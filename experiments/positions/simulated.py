"""What `positions` measures without training: scores by the way their phases are computed, and what a shift changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attn_jax.positions import apply_rotary, rotary_frequencies
from attn_jax.training import TrainState
from attn_jax.typing import Array
from experiments.artifacts import Row
from experiments.positions.config import SCORE_ARMS, PositionsConfig
from experiments.sampling import rows_of

PARTS = ("query", "key", "value")


def scores(config: PositionsConfig) -> list[Row]:
    """The error of ⟨R(p + d) q, R(p) k⟩ against float64, as a share of the scores' standard deviation, by p."""
    keys_at = np.repeat(config.score_positions, len(config.distances))
    queries_at = keys_at + np.tile(config.distances, len(config.score_positions))
    found = {arm: [] for arm in SCORE_ARMS}
    for seed in range(config.simulations):
        rng = np.random.default_rng([config.seed, seed])
        drawn = rng.standard_normal((2, config.pairs, config.score_width))
        for arm in SCORE_ARMS:
            source, dtype = arm.split("_")
            query, key = drawn.astype(dtype)
            rotate = rotate_by_table if source == "table" else rotate_fixed
            turned = np.sum(rotate(query, queries_at) * rotate(key, keys_at), axis=-1)
            exact = exact_scores(query.astype(np.float64), key.astype(np.float64), queries_at - keys_at)
            squares = ((turned - exact) ** 2).reshape(len(config.score_positions), -1)
            found[arm].append(np.sqrt(squares.mean(axis=1) / np.mean(exact**2)))
    axes = {"position": config.score_positions}
    return [row for arm, x in found.items() for row in rows_of(np.stack(x), axes, part="scores", arm=arm)]


def exact_scores(query: np.ndarray, key: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Float64 `[distances, pairs]`: each pair of coordinates a complex number, its phase that of the distance alone."""
    frequencies, _ = rotary_frequencies(query.shape[-1])
    a, b = (x[..., : len(frequencies)] + 1j * x[..., len(frequencies) :] for x in (query, key))
    return np.real(np.exp(1j * np.multiply.outer(distances, frequencies)) @ (a * b.conj()).T)


def rotate_fixed(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`[pairs, H]` at each position by `attn_jax.positions.apply_rotary`: `[positions, pairs, H]`, as float64."""
    everywhere = np.broadcast_to(x, (len(positions), *x.shape))
    return np.asarray(apply_rotary(everywhere, positions), np.float64)


def rotate_by_table(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The same by what is often written: a table of position × frequency in the dtype of x, whose phases it rounds."""
    frequencies, _ = rotary_frequencies(x.shape[-1])
    angles = np.multiply.outer(positions.astype(x.dtype), frequencies.astype(x.dtype)).astype(np.float64)
    cos, sin = (f(angles).astype(x.dtype).astype(np.float64)[:, None, :] for f in (np.cos, np.sin))
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return turned.astype(x.dtype).astype(np.float64)


def shifted(config: PositionsConfig, kind: str, begun: TrainState, token_ids: Array) -> list[Row]:
    """How much queries, keys and values of each layer change if all positions are shifted by L."""
    here = jnp.arange(token_ids.shape[-1])
    one, other = (projections(begun, token_ids, at) for at in (here, here + config.length))
    rows = []
    for part, x, y in zip(PARTS, one, other, strict=True):
        x, y = (np.asarray(z, np.float64).reshape(*z.shape[:2], -1) for z in (x, y))
        changes = {
            "change": np.linalg.norm(y - x, axis=-1) / np.linalg.norm(x, axis=-1),
            "largest": np.abs(y - x).max(axis=-1) / np.abs(x).max(axis=-1),
        }
        for measure, values in changes.items():
            where = {"part": "shift", "arm": kind, "of": part, "measure": measure}
            rows += rows_of(values, {"layer": range(config.layers)}, **where)
    return rows


@jax.jit
def projections(state: TrainState, token_ids: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries, keys (turned, if they are) and values of every run and layer, each `[runs, L, B, T, N, H]`."""

    def run(params: Any) -> tuple[Array, Array, Array]:
        return nnx.merge(state.graphdef, params)(token_ids, positions=positions, observe=_as_they_are)[1]

    return jax.lax.map(run, state.params)


def _as_they_are(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array, Array]:
    return query, key, value
