"""The real checkpoint, loaded once. `make test` installs its package; without it these tests fail, not skip."""

import pathlib

import numpy as np
import pytest

from attn_jax import models
from attn_jax.models import loading
from attn_jax.models.gguf_file import read_gguf


@pytest.fixture(scope="session")
def smollm2():
    return models.load("smollm2")


@pytest.fixture(scope="session")
def golden():
    """What `transformers` computes from the same file: see tests/golden/make_smollm2.py."""
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "smollm2.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="session")
def gemma3_file():
    """The real Gemma 3, opened without its weights. Its package is optional, for its terms are Gemma's own."""
    try:
        return read_gguf(*loading.find("gemma3"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma3_golden():
    """What `transformers` computes from the same file: see tests/golden/make_gemma3.py."""
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "gemma3.npz") as stored:
        return dict(stored)
