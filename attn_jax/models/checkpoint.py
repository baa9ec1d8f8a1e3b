"""What a family reads of an opened checkpoint, whatever its format: tensors by name, and settings by key."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

_MOST_BYTES = 1 << 22  # of a text that is parsed, each of whose items may become a Python object: 30 times its bytes


class StoredTensor(Protocol):
    """A tensor as it lies in a file."""

    @property
    def kind(self) -> Any:
        """Its type, by the format's name for it or as the format's library has it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Slowest axis first."""
        ...


class WeightFile(Protocol):
    """An opened checkpoint: `GGUFFile` or `SafetensorsFile`. Nothing is read from the disk before `tensor` asks."""

    @property
    def path(self) -> pathlib.Path:
        """What messages call the checkpoint."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The stored tensors by name."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Of the stored tensors."""
        ...

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises ValueError unless the tensor is there, has this shape (slowest axis first) and a type we read."""
        ...

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The tensor's values in float32; shape as `check` demands."""
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """The object that a JSON file holds, `config.json` for one; None and an absent key are the same."""

    path: pathlib.Path
    values: Mapping[str, Any]

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value under `key`, an instance of `kind`; `default` where it is absent, an error if that is None."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ValueError(f"{self.path}: {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000:
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{self.path}: {key!r} must be {kind.__name__}, got {short(value)}")
        return value

    def optional(self, key: str, kind: type) -> Any:
        """The value under `key`, an instance of `kind`, or None."""
        return None if self.values.get(key) is None else self.value(key, kind)

    def nested(self, key: str) -> "Settings | None":
        """The object under `key`, whose messages name it, or None where there is none or nothing in it."""
        values = self.optional(key, dict)
        return Settings(self.path / key, values) if values else None

    def require(self, key: str, *allowed: Any) -> None:
        """Raises unless the value under `key` is absent or one of `allowed`."""
        value = self.values.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            expected = " or ".join(map(repr, allowed)) or "absent"
            raise ValueError(f"{self.path}: {key!r} = {short(value)} is not supported, only {expected}")


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """Reads the object in a JSON file.

    Args:
        path: the file.

    Returns:
        Settings: its values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is too long, no JSON, or no object; one line that names it.
    """
    path = pathlib.Path(path)
    data = read_short(path)
    try:
        return Settings(path, parse_object(data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_short(path: pathlib.Path) -> bytes:
    """All bytes of a file, or an error that names it: there is none, or it is too long to parse."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path}: has {path.stat().st_size} bytes, at most {_MOST_BYTES} are read")
    return path.read_bytes()


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that `data` spell; ValueError if they spell none, or name a key twice."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not readable as JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must hold a JSON object, got {type(value).__name__}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for key, value in pairs:
        if key in held:
            raise ValueError(f"the key {short(key)} stands twice")
        held[key] = value
    return held


def short(value: Any) -> str:
    """`value` as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
