"""The control of a checkpoint: its architecture at initial weights, drawn by the seed."""

import types

import jax
import numpy as np

from attn_jax.nn import TransformerConfig
from experiments import checkpoints
from tests.experiments import conftest

CONFIG = TransformerConfig(vocabulary_size=11, num_layers=2, model_width=8, num_heads=2)


def test_random_weights_are_those_of_a_new_model_by_the_seed(monkeypatch):
    monkeypatch.setattr(checkpoints, "load", lambda name: types.SimpleNamespace(config=CONFIG))
    draw = conftest.initial.__wrapped__  # without what it keeps of real models
    one, again, other = (draw("tiny", seed) for seed in (0, 0, 1))
    assert one.config == CONFIG
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (one.embedding[...] != other.embedding[...]).all()
    assert 0.5 < one.embedding[...].std() * CONFIG.model_width**0.5 < 1.5
