"""What stands beside the weights in a folder as Hugging Face has it: tokenizer, chat template, stop tokens, pooling."""

import pathlib
from typing import Any

from tokenizers import Tokenizer

from attn_jax.models.checkpoint import Settings, read_settings, read_short, short
from attn_jax.nn import TransformerConfig

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def weights_in(folder: pathlib.Path) -> pathlib.Path:
    """The weights in a folder: one file, or the index of its shards."""
    if not (folder / CONFIG).is_file():
        raise IsADirectoryError(f"{folder}: is a directory without {CONFIG}, not a checkpoint")
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: holds neither {' nor '.join(_WEIGHTS)}")


def read_extras(folder: pathlib.Path, config: TransformerConfig) -> dict[str, Any]:
    """The fields of `LoadedModel` that come from the folder: tokenizer, chat template, stop tokens and pooling.

    Args:
        folder: that holds the weights; of these files it may lack any.
        config: of the model.

    Returns:
        The fields by name.

    Raises:
        ValueError: a file is not readable, or does not fit the model; one line that names it.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json", config)
    words = _settings(folder, "tokenizer_config.json")
    decoder = config.head is not None
    return {
        "tokenizer": tokenizer,
        "chat_template": _chat_template(folder, words),
        "stop_tokens": _stop_tokens(folder, config) if decoder else (),
        "max_tokens": None if decoder else _max_tokens(folder, words, config),
        "pooling": None if decoder else _pooling(folder),
    }


def _settings(folder: pathlib.Path, name: str) -> Settings:
    path = folder / name
    return read_settings(path) if path.is_file() else Settings(path, {})


def _tokenizer(path: pathlib.Path, config: TransformerConfig) -> Tokenizer | None:
    """As the file has it, but that a text is neither cut nor padded: `embed` does both, and knows the lengths."""
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode("")  # which tries the special tokens that it adds
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises no narrower one; its panic is not even an Exception
        raise ValueError(f"{path}: not a readable tokenizer: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= config.vocabulary_size:
        raise ValueError(f"{path}: has token {last}, but the model's vocabulary_size is {config.vocabulary_size}")
    return tokenizer


def _max_tokens(folder: pathlib.Path, words: Settings, config: TransformerConfig) -> int | None:
    """The length that sentence-transformers cuts to, or else the tokenizer's own; at most what the model has."""
    settings = _settings(folder, "sentence_bert_config.json")
    most = settings.optional("max_seq_length", int)
    if most is not None and most < 3:  # two special tokens and one more
        raise ValueError(f"{settings.path}: 'max_seq_length' must be at least 3, got {most}")
    if most is None and type(words.values.get("model_max_length")) is int:
        most = max(3, words.values["model_max_length"])  # by a huge number it says that there is no limit
    limits = [limit for limit in (most, config.max_length) if limit is not None]
    return min(limits) if limits else None


def _chat_template(folder: pathlib.Path, words: Settings) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_short(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not readable as text: {error}") from error
    templates = words.values.get("chat_template")
    if isinstance(templates, list):  # several by name
        named = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
        templates = named.get("default")
    if templates is not None and not isinstance(templates, str):
        raise ValueError(f"{words.path}: 'chat_template' must be str, got {short(templates)}")
    return templates


def _stop_tokens(folder: pathlib.Path, config: TransformerConfig) -> tuple[int, ...]:
    """`eos_token_id`, a number or a list, of the generation's settings or else of the model's."""
    for name in ("generation_config.json", CONFIG):
        settings = _settings(folder, name)
        ids = settings.values.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(type(one) is int and 0 <= one < config.vocabulary_size for one in ids):
            most = config.vocabulary_size - 1
            raise ValueError(f"{settings.path}: 'eos_token_id' must be in 0..{most}, got {short(ids)}")
        return tuple(dict.fromkeys(ids))
    return ()


def _pooling(folder: pathlib.Path) -> str:
    """As sentence-transformers has it, "mean" where it says nothing."""
    settings = _settings(folder / "1_Pooling", CONFIG)
    modes = [key for key, on in settings.values.items() if key.startswith("pooling_mode_") and on is True]
    modes += [mode for mode in [settings.values.get("pooling_mode")] if mode is not None]  # newer files name it
    named = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "mean": "mean", "cls": "cls"}
    if not modes:
        return "mean"
    if len(modes) > 1 or not isinstance(modes[0], str) or modes[0] not in named:
        raise ValueError(f"{settings.path}: pooling {short(modes)} is not supported, only one of {', '.join(named)}")
    return named[modes[0]]
