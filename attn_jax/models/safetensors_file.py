"""Safetensors files, one or in shards, read by the `safetensors` library once their headers are known to be sound.

A file is 8 bytes that say how long the header is, the header, a JSON object that says where each tensor lies, and the
tensors' bytes without a gap. A checkpoint comes from somewhere else, so all of that is compared with the bytes that are
there before anything is allocated for it. Whatever is wrong ends in one `ValueError` that names the file and, where
there is one, the tensor.
"""

import dataclasses
import math
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  its import tells NumPy what "bfloat16" is, which the library asks for
import numpy as np
from safetensors import SafetensorError, safe_open

from attn_jax.models.checkpoint import parse_object, read_settings, short

# Bytes of an element, for the types that a file may hold; those in _READ become float32.
_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
_READ = ("F32", "F16", "BF16", "F64")
_MOST_HEADER_BYTES = 1 << 22  # each item becomes a Python object: room for 30,000 tensors
_MOST_AXES = 8


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: its type by the format's name, its shape, and the file that holds it."""

    kind: str
    shape: tuple[int, ...]
    path: pathlib.Path


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """The stored tensors of one file, or of all shards that an index names; `tensor` reads one."""

    path: pathlib.Path
    tensors: Mapping[str, StoredTensor]

    @property
    def names(self) -> frozenset[str]:
        """Of the stored tensors."""
        return frozenset(self.tensors)

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises unless the tensor is there, has this shape and a floating type of 16 bits or more; reads nothing."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        stored = self.tensors[name]
        if stored.shape != tuple(shape):
            raise ValueError(f"{self.path}: tensor {name!r} must have shape {tuple(shape)}, got {stored.shape}")
        if stored.kind not in _READ:
            raise ValueError(f"{self.path}: tensor {name!r} has type {stored.kind}, only {', '.join(_READ)} are read")

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The values of the tensor called `name`, float32; shape as `check` demands."""
        self.check(name, shape)
        try:
            with safe_open(self.tensors[name].path, framework="np") as file:  # its pages go when it is closed
                values = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path}: tensor {name!r} is not readable: {_line(error)}") from error
        with np.errstate(all="ignore"):  # a float64 beyond float32 becomes infinite: the model's to show
            return values.astype(np.float32, copy=False)


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Reads the header of a safetensors file, or those of all shards of an index; the tensors stay on disk.

    Args:
        path: a `.safetensors` file, or the `model.safetensors.index.json` that lists the shards beside it.

    Returns:
        SafetensorsFile: its stored tensors by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, truncated or inconsistent; a shard is missing, or does not hold what the
            index says; one line that names the file and the tensor.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return SafetensorsFile(path, _indexed(path) if path.suffix == ".json" else _one(path))


def _indexed(path: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of the shards that the index at `path` names."""
    index = read_settings(path).value("weight_map", dict)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name, shard in index.items():
        # The shards lie beside the index: a name that leads elsewhere is not followed.
        if not isinstance(shard, str) or {"/", "\\", "\0"} & set(shard) or not shard.endswith(".safetensors"):
            raise ValueError(f"{path}: tensor {name!r} must be in a .safetensors file beside it, got {short(shard)}")
        if shard not in shards:
            if not (path.parent / shard).is_file():
                raise ValueError(f"{path}: shard {shard!r}, which holds tensor {name!r}, is missing")
            shards[shard] = _one(path.parent / shard)
        if name not in shards[shard]:
            raise ValueError(f"{path}: shard {shard!r} lacks tensor {name!r}")
    for shard, tensors in shards.items():
        for name in tensors:
            if index.get(name) != shard:
                raise ValueError(f"{path}: shard {shard!r} holds tensor {name!r}, which the index does not place there")
    return {name: shards[shard][name] for name, shard in index.items()}


def _one(path: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of the one file at `path`."""
    try:
        described = _scan(path)
        with safe_open(path, framework="np"):  # the library's own checks
            pass
    except (ValueError, SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {_line(error)}") from error
    return {name: StoredTensor(kind, shape, path) for name, (kind, shape) in described.items()}


def _scan(path: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor; ValueError unless length, types, shapes and offsets fit the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"it has {size} bytes, too few to say how long the header is: truncated?")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - 8, _MOST_HEADER_BYTES):
            most = f"at most {_MOST_HEADER_BYTES} are read"
            raise ValueError(f"its header would have {length} bytes, the file has {size}, and {most}: truncated?")
        header = file.read(length)
    if not header.startswith(b"{"):
        raise ValueError(f"its header begins with {header[:4]!r}, expected b'{{'")
    header = parse_object(header)
    texts = header.pop("__metadata__", None)
    if texts is not None and not (isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())):
        raise ValueError("'__metadata__' must map names to texts")
    tensors = {name: _described(name, entry) for name, entry in header.items()}
    end = 0
    for name, (_, _, first, last) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise ValueError(f"tensor {name!r} begins at byte {first} of the data, expected {end}: no gap, no overlap")
        end = last
        if end > size - 8 - length:
            raise ValueError(
                f"tensor {name!r} ends at byte {end} of the data, but the file has {size - 8 - length}: truncated?"
            )
    if end != size - 8 - length:
        raise ValueError(f"its tensors end at byte {end} of the data, but the file has {size - 8 - length}")
    return {name: (kind, shape) for name, (kind, shape, _, _) in tensors.items()}


def _described(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first byte and end of a tensor, from its entry in the header."""
    what = f"tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} must have dtype, shape and data_offsets, got {short(entry)}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _BYTES:
        raise ValueError(f"{what} has the unknown type {short(kind)}")
    if not _counts(shape) or len(shape) > _MOST_AXES:
        raise ValueError(f"{what} must have a shape of at most {_MOST_AXES} sizes, got {short(shape)}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{what} must have two data_offsets, got {short(offsets)}")
    size = math.prod(shape) * _BYTES[kind]
    if offsets[1] - offsets[0] != size:
        raise ValueError(f"{what} of type {kind} and shape {short(tuple(shape))} has {short(offsets)} for data_offsets")
    return kind, tuple(shape), *offsets


def _counts(value: Any) -> bool:
    """Whether `value` is a list of integers that are 0 or more and fit 64 bits."""
    return isinstance(value, list) and all(type(count) is int and 0 <= count < 1 << 63 for count in value)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
