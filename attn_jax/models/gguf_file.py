"""GGUF files: their header read here, their tensors dequantised by the `gguf` library.

The library's own reader trusts every count that it meets, and makes two arrays of each string: 11 s and 700 MB for a
vocabulary of 262,144. A checkpoint comes from somewhere else, so the header is walked once, and each count, length,
offset and size is compared with the bytes that are there before anything is allocated for it. Whatever is wrong with
a file ends in one `ValueError` that names the file and, where there is one, the tensor.
"""

import dataclasses
import math
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from attn_jax.models.checkpoint import short

_NUMBERS = {
    GGUFValueType.UINT8: np.dtype("u1"),
    GGUFValueType.INT8: np.dtype("i1"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_VERSIONS = (2, 3)
_MOST_ITEMS = 1 << 21  # in all lists together, each a Python object: more than twice what the longest vocabulary needs
_MOST_AXES = 4  # GGML_MAX_DIMS
_WINDOW = 1 << 20  # bytes of the header that are read at once
_CHUNK = 1 << 22  # bytes of a tensor that are


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `shape` slowest axis first (the file lists it fastest first), `size` bytes at `start`."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The metadata and the places of the tensors of one file; `tensor` reads and dequantises.

    A `WeightFile`. It holds no file open; `path` is the file, or the first of the parts that it was cut into.
    """

    path: pathlib.Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    parts: "Parts"

    @property
    def names(self) -> frozenset[str]:
        """Of the stored tensors."""
        return frozenset(self.tensors)

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
        """Raises unless the tensor is there, has this shape and a type that can be dequantised."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        stored = self.tensors[name]
        if stored.shape != tuple(shape):
            raise ValueError(f"{self.path}: tensor {name!r} must have shape {tuple(shape)}, got {stored.shape}")
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[stored.kind][1]), np.uint8), stored.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} has type {stored.kind.name}, not dequantised") from error

    def tensor(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """The values of the tensor called `name`, float32, dequantised by `gguf`; shape as `check` demands."""
        self.check(name, shape)
        stored = self.tensors[name]
        rows = np.empty((math.prod(stored.shape[:-1]), stored.shape[-1]), np.float32)
        row_bytes = stored.size // len(rows)
        step = max(1, _CHUNK // row_bytes)  # so that little is held beside the values
        for row in range(0, len(rows), step):
            some = rows[row : row + step]
            data = self.parts.read(stored.start + row * row_bytes, len(some) * row_bytes)
            if len(data) != len(some) * row_bytes:
                raise ValueError(f"{self.path}: tensor {name!r} is no longer whole: did the file change?")
            with np.errstate(
                all="ignore"
            ):  # a scale that is no number gives weights that are none: the model's to show
                some[...] = gguf.quants.dequantize(np.frombuffer(data, np.uint8).reshape(len(some), -1), stored.kind)
        return rows.reshape(stored.shape)


def read_gguf(*parts: str | os.PathLike[str]) -> GGUFFile:
    """Reads the header of a GGUF file; the tensors' data stay on disk until they are asked for.

    Args:
        parts: the file; or, in order, the files whose bytes make it when they are joined. Nothing is written.

    Returns:
        GGUFFile: its metadata as Python values and its stored tensors by name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is foreign, truncated, or inconsistent; one line that names the file and the tensor.
    """
    paths = tuple(map(pathlib.Path, parts))
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    joined = Parts(paths, tuple(path.stat().st_size for path in paths))
    try:
        metadata, tensors = _read_header(_Cursor(joined))
    except ValueError as error:
        raise ValueError(f"{paths[0]}: not a readable GGUF file: {' '.join(str(error).split())}") from error
    return GGUFFile(paths[0], metadata, tensors, joined)


def _read_header(cursor: "_Cursor") -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors; ValueError unless every count, length, offset and size fits the file."""
    if cursor.size == 0:
        raise ValueError("it is empty")
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise ValueError(f"it begins with {magic!r}, expected b'GGUF'")
    version = cursor.number(_UINT32, "the version")
    if version not in _VERSIONS:
        raise ValueError(f"version must be one of {_VERSIONS}, got {version}")
    tensor_count = cursor.number(_UINT64, "the number of tensors")
    key_count = cursor.number(_UINT64, "the number of keys")
    metadata = {}
    for _ in range(key_count):  # a count that lies runs into the end of the file
        key = cursor.text("a metadata key")
        if key in metadata:
            raise ValueError(f"metadata {key!r} stands twice")
        metadata[key] = cursor.value(f"metadata {key!r}")
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"metadata 'general.alignment' must be a power of two, got {short(alignment)}")
    tensors = {}
    for _ in range(tensor_count):
        name, tensor = _read_tensor(cursor)
        if name in tensors:
            raise ValueError(f"tensor {name!r} stands twice")
        tensors[name] = tensor
    data = cursor.offset + -cursor.offset % alignment
    for name, tensor in tensors.items():
        if tensor.start % alignment:
            raise ValueError(f"tensor {name!r} begins at {tensor.start}, not a multiple of {alignment}")
        end = data + tensor.start + tensor.size
        if end > cursor.size:
            raise ValueError(f"tensor {name!r} ends at byte {end}, but the file has {cursor.size}: truncated?")
        tensors[name] = dataclasses.replace(tensor, start=data + tensor.start)
    return metadata, tensors


def _read_tensor(cursor: "_Cursor") -> tuple[str, StoredTensor]:
    """The tensor whose description the cursor stands at; `start` counts from where the data begin."""
    name = cursor.text("a tensor's name")
    what = f"tensor {name!r}"
    axes = cursor.number(_UINT32, what)
    if not 1 <= axes <= _MOST_AXES:
        raise ValueError(f"{what} must have 1 to {_MOST_AXES} axes, got {axes}")
    shape = tuple(cursor.number(_UINT64, what) for _ in range(axes))[::-1]
    number, start = cursor.number(_UINT32, what), cursor.number(_UINT64, what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise ValueError(f"{what} has the unknown type {number}") from error
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"{what} has shape {shape}, not whole blocks of {block} in type {kind.name}")
    return name, StoredTensor(kind, shape, start, math.prod(shape) // block * block_bytes)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The bytes of files that are read as if they were joined."""

    paths: tuple[pathlib.Path, ...]
    sizes: tuple[int, ...]

    def read(self, start: int, count: int) -> bytes:
        """The `count` bytes from `start` on, fewer at the end."""
        pieces = []
        for path, size in zip(self.paths, self.sizes, strict=True):
            wanted = min(count, size - start)
            if wanted > 0:
                with path.open("rb") as file:
                    file.seek(start)
                    pieces.append(file.read(wanted))
                start, count = start + wanted, count - wanted
            start -= size
        return b"".join(pieces)


_UINT32, _UINT64 = struct.Struct("<I"), struct.Struct("<Q")


class _Cursor:
    """A place in the file that moves forward and never past its end."""

    def __init__(self, parts: Parts):
        self.size = sum(parts.sizes)
        self.offset = 0
        self._parts = parts
        self._window, self._window_start = b"", 0
        self._items_left = _MOST_ITEMS

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.offset:
            raise ValueError(f"{what} needs {count} bytes at byte {self.offset}, but the file has {self.size}")
        start = self.offset - self._window_start
        if start + count > len(self._window):
            self._window = self._parts.read(self.offset, max(count, _WINDOW))
            self._window_start, start = self.offset, 0
        self.offset += count
        return self._window[start : start + count]

    def number(self, kind: struct.Struct, what: str) -> int:
        return kind.unpack(self.take(kind.size, what))[0]

    def text(self, what: str) -> str:
        data = self.take(self.number(_UINT64, what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8: {short(data)}") from error

    def value(self, what: str) -> Any:
        """A metadata value, whose type comes first: a number, a text, or a list of one of them."""
        kind = self._value_type(what)
        if kind != GGUFValueType.ARRAY:
            return self._items(kind, 1, what)[0]
        kind, count = self._value_type(what), self.number(_UINT64, what)
        if kind == GGUFValueType.ARRAY:
            raise ValueError(f"{what} is an array of arrays")
        if count > self._items_left:
            raise ValueError(f"{what} has {count} items, more than the {self._items_left} that are still read")
        self._items_left -= count
        return self._items(kind, count, what)

    def _value_type(self, what: str) -> GGUFValueType:
        number = self.number(_UINT32, what)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"{what} has the unknown type {number}") from error

    def _items(self, kind: GGUFValueType, count: int, what: str) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.text(what) for _ in range(count)]
        dtype = _NUMBERS[kind]
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()
