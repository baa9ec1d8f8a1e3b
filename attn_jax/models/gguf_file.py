"""GGUF files, read by the `gguf` library once their header is known to be sound.

The library trusts every count that it reads. A checkpoint comes from somewhere else, so `_scan` walks the header first
and compares each count, length, offset and size with the bytes that are there, before anything is allocated for it.
Whatever is wrong with a file ends in one `ValueError` that names the file and, where there is one, the tensor.
"""

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

_SCALAR_BYTES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}
_MOST_ITEMS = 1 << 20  # the library makes Python objects of each: four times the longest list of merges known
_MOST_AXES = 4  # GGML_MAX_DIMS


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file: `shape` slowest axis first (the file lists it fastest first), `data` raw."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The metadata and the stored tensors of one file; `tensor` dequantises."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata under `key`, an instance of `kind`; `default` where it is absent, an error if that is None."""
        if key not in self.metadata:
            if default is None:
                raise ValueError(f"{self.path}: metadata {key!r} is missing")
            return default
        value = self.metadata[key]
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{self.path}: metadata {key!r} must be {kind.__name__}, got {short(value)}")
        return value

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises unless the tensor is there, has this shape and a type that can be dequantised; reads one row."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        stored = self.tensors[name]
        if stored.shape != tuple(shape):
            raise ValueError(f"{self.path}: tensor {name!r} must have shape {tuple(shape)}, got {stored.shape}")
        try:
            with np.errstate(all="ignore"):
                gguf.quants.dequantize(stored.data.reshape(-1, stored.data.shape[-1])[:1], stored.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} has type {stored.kind.name}, not dequantised") from error

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The values of the tensor called `name`, float32, dequantised by `gguf`; shape as `check` demands."""
        self.check(name, shape)
        stored = self.tensors[name]
        with np.errstate(all="ignore"):  # a scale that is no number gives weights that are none: the model's to show
            return gguf.quants.dequantize(stored.data, stored.kind)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Reads the header of a GGUF file; the tensors' data stay on disk until they are asked for.

    Args:
        path: the file.

    Returns:
        GGUFFile: its metadata as Python values and its stored tensors by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, truncated, or inconsistent; one line that names the file and the tensor.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        _scan(path)
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError) as error:  # the library's own: a repeated key, text that is not UTF-8, ...
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise ValueError(f"{path}: not a readable GGUF file: {reason}") from error
    tensors = {}
    for tensor in reader.tensors:  # asarray: slicing a memmap costs more than dequantising the slice
        shape = tuple(tensor.shape.tolist()[::-1])
        tensors[tensor.name] = StoredTensor(tensor.tensor_type, shape, np.asarray(tensor.data))
    return GGUFFile(path, metadata, tensors)


def _scan(path: pathlib.Path) -> None:
    """Raises ValueError unless every count, length, offset and size in the header fits the file."""
    if path.stat().st_size == 0:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        magic = cursor.take(4, "the magic number")
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}, expected b'GGUF'")
        version = cursor.number("I", "the version")
        if version not in gguf.gguf_reader.READER_SUPPORTED_VERSIONS:
            raise ValueError(f"version must be one of {gguf.gguf_reader.READER_SUPPORTED_VERSIONS}, got {version}")
        tensor_count = cursor.number("Q", "the number of tensors")
        key_count = cursor.number("Q", "the number of keys")
        alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        for _ in range(key_count):  # a count that lies runs into the end of the file
            key = cursor.text("a metadata key")
            start = cursor.offset
            cursor.skip_value(f"metadata {key!r}")
            if key == "general.alignment":
                kind, alignment = struct.unpack_from("<II", data, start)
                if kind != GGUFValueType.UINT32 or alignment < 1 or alignment & (alignment - 1):
                    raise ValueError("metadata 'general.alignment' must be a power of two of type UINT32")
        sizes = [_tensor_size(cursor) for _ in range(tensor_count)]
        start = cursor.offset + -cursor.offset % alignment
        for name, offset, size in sizes:
            if offset % alignment:
                raise ValueError(f"tensor {name!r} begins at {offset}, not a multiple of {alignment}")
            if start + offset + size > len(data):
                end = start + offset + size
                raise ValueError(f"tensor {name!r} ends at byte {end}, but the file has {len(data)}: truncated?")


def _tensor_size(cursor: "_Cursor") -> tuple[str, int, int]:
    """Name, offset and bytes of the tensor whose description the cursor stands at."""
    name = cursor.text("a tensor's name")
    what = f"tensor {name!r}"
    axes = cursor.number("I", what)
    if not 1 <= axes <= _MOST_AXES:
        raise ValueError(f"{what} must have 1 to {_MOST_AXES} axes, got {axes}")
    shape = [cursor.number("Q", what) for _ in range(axes)]
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise ValueError(f"{what} has the unknown type {number}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[0] % block:
        raise ValueError(f"{what} has shape {tuple(shape[::-1])}, not whole blocks of {block} in type {kind.name}")
    return name, offset, math.prod(shape) // block * block_bytes


class _Cursor:
    """A place in the file that moves forward and never past its end."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.offset = 0

    def skip(self, count: int, what: str) -> int:
        """Moves on by `count` bytes and returns where it stood."""
        start = self.offset
        if count > len(self.data) - start:
            raise ValueError(f"{what} needs {count} bytes at byte {start}, but the file has {len(self.data)}")
        self.offset += count
        return start

    def take(self, count: int, what: str) -> bytes:
        start = self.skip(count, what)
        return self.data[start : start + count]

    def number(self, code: str, what: str) -> int:
        """A little-endian unsigned integer: `code` I for 32 bits, Q for 64."""
        start = self.skip(struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def text(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode("utf-8")

    def skip_value(self, what: str) -> None:
        """Moves past a metadata value, its type and its length included."""
        kind = self.value_type(what)
        if kind != GGUFValueType.ARRAY:
            self._skip_items(kind, 1, what)
            return
        kind, count = self.value_type(what), self.number("Q", what)
        if kind == GGUFValueType.ARRAY:
            raise ValueError(f"{what} is an array of arrays")
        if count > _MOST_ITEMS:
            raise ValueError(f"{what} has {count} items, at most {_MOST_ITEMS} are read")
        self._skip_items(kind, count, what)

    def value_type(self, what: str) -> GGUFValueType:
        number = self.number("I", what)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"{what} has the unknown type {number}") from error

    def _skip_items(self, kind: GGUFValueType, count: int, what: str) -> None:
        if kind != GGUFValueType.STRING:
            self.skip(count * _SCALAR_BYTES[kind], what)
            return
        for _ in range(count):
            self.skip(self.number("Q", what), what)


def short(value: Any) -> str:
    """`value` as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
