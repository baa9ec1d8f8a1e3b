"""Arrays for the recurrence, and its call with gradients: one compilation a shape, values as data."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from attn_jax.linear import LinearState, linear_recurrence
from tests import oracles

DECAYS = ("none", "per head", "per step", "per feature")
LEVELS = (0.0, -1e-3, np.log(0.9), np.log(0.5), -30.0, -200.0)  # of log-decays


class Geometry(NamedTuple):
    batch: tuple[int, ...] = (2,)
    T: int = 13
    N: int = 4
    K: int = 2
    R: int = 5
    V: int = 3


def draw(
    seed: int, geometry: Geometry, decay: str = "none", *, levels=LEVELS, positive: bool = False, masked: bool = False
) -> dict[str, np.ndarray]:
    """Inputs by name, in float64: query, key, value, log_decay, key_mask, those that there are."""
    batch, T, N, K, R, V = geometry
    rng = np.random.default_rng(seed)
    shapes = {"query": (*batch, T, N, R), "key": (*batch, T, K, R), "value": (*batch, T, K, V)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if positive:
        arrays |= {name: np.abs(arrays[name]) for name in ("query", "key")}
    shape = {"per head": (N,), "per step": (*batch, T, N), "per feature": (*batch, T, N, R)}.get(decay)
    if shape is not None:
        arrays["log_decay"] = rng.choice(np.asarray(levels), shape)
    if masked:
        arrays["key_mask"] = rng.random((*batch, T)) < 0.8
    return arrays


@functools.partial(jax.jit, static_argnames=("form", "chunk_size", "normalize", "is_causal"))
def call(arrays, state, cotangent, *, form, chunk_size=None, normalize=False, is_causal=True):
    """Output, state after, and gradients by name, that of the state before too, if there is one."""
    fixed = {name: arrays[name] for name in ("key_mask",) if name in arrays}
    moving = {name: x for name, x in arrays.items() if name not in fixed}

    def run(moving, state):
        return linear_recurrence(
            **moving, **fixed, form=form, chunk_size=chunk_size, normalize=normalize, is_causal=is_causal,
            initial_state=state, return_state=True,
        )  # fmt: skip

    output, pull, after = jax.vjp(run, moving, state, has_aux=True)
    gradients, of_state = pull(cotangent)
    return output, after, {**gradients, "state": of_state}


def expected(arrays, cotangent, *, memory=None, normalize=False, is_causal=True):
    """The same from the definition, in float64; the state as one array with the normaliser as its last column."""
    arrays = dict(arrays)
    counted = arrays.pop("key_mask", None)
    forward = oracles.recurrence(**arrays, counted=counted, memory=memory, normalize=normalize, is_causal=is_causal)
    gradients = oracles.recurrence_gradients(forward, cotangent)
    if "log_decay" in arrays:
        by_feature = gradients["log_decay"]
        if counted is not None:
            by_feature = np.where(counted[..., None, None], by_feature, 0)
        shape = arrays["log_decay"].shape
        by_step = by_feature if len(shape) == by_feature.ndim else by_feature.sum(-1)
        gradients["log_decay"] = oracles.sum_to(by_step, shape)
    else:
        del gradients["log_decay"]
    return forward, gradients


def cast(arrays, dtype):
    return {name: x if x.dtype == bool else x.astype(dtype) for name, x in arrays.items()}


def to_state(memory: np.ndarray, dtype, *, normalize: bool) -> LinearState:
    memory = memory.astype(dtype)
    return LinearState(memory[..., :-1], memory[..., -1]) if normalize else LinearState(memory)


def joined(state: LinearState) -> np.ndarray:
    parts = [state.memory] if state.normalizer is None else [state.memory, state.normalizer[..., None]]
    return np.concatenate([np.asarray(x, np.float64) for x in parts], -1)


def assert_near(found, expected, tolerance, name=""):
    """Within `tolerance` of the largest entry."""
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=tolerance * largest + 1e-300, err_msg=name
    )
