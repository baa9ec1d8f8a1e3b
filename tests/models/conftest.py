"""The real checkpoint, loaded once. `make test` installs its package; without it these tests fail, not skip."""

import pathlib

import numpy as np
import pytest

from attn_jax import models


@pytest.fixture(scope="session")
def smollm2():
    return models.load("smollm2")


@pytest.fixture(scope="session")
def golden():
    """What `transformers` computes from the same file: see tests/golden/make_smollm2.py."""
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "smollm2.npz") as stored:
        return dict(stored)
