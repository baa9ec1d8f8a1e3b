"""Random weights that cost no minute."""

import functools
import sys

import jax
import numpy as np
import pytest

from experiments import checkpoints

initial = checkpoints.at_random


@functools.lru_cache(maxsize=1)
def drawn_alike(name, seed):
    """The model of a checkpoint with normals for its weights, each array with its mean and spread where finite."""
    rng = np.random.default_rng(seed)

    def draw(x):
        x = np.asarray(x)
        finite = x[np.isfinite(x)]
        return jax.numpy.asarray(finite.mean() + finite.std() * rng.standard_normal(x.shape, np.float32), x.dtype)

    return jax.tree.map(draw, checkpoints.load(name).model)


@pytest.fixture(autouse=True)
def quick_random_weights(request, monkeypatch):
    """In place of initial weights: threefry draws those of a real model in half a minute where little is optimised."""
    if request.node.get_closest_marker("slow") is None:
        for module in list(sys.modules.values()):
            if getattr(module, "at_random", None) is initial:
                monkeypatch.setattr(module, "at_random", drawn_alike)
