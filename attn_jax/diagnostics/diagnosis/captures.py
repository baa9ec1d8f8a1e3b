"""Arrays that were captured in a model of any framework: what attention got and gave, layer by layer, by name.

    layers.3.query     [*B, T, N, H]   as it enters the dot product, after rotary positions and norms
    layers.3.key       [*B, S, K, H]
    layers.3.value     [*B, S, K, V]
    layers.3.output    [*B, T, N, V]   optional: before the output projection
    layers.3.mask      boolean         optional: True = may attend; [T, S], or broadcastable to [*B, N, T, S]
    layers.3.logits    [*B, N, T, S]   optional: as they enter the softmax
    layers.3.scale     [] or [N]       optional: that was meant; 1/√H otherwise

In a NumPy archive (`.npz`) or a safetensors file. What is broken is named, one line each; the rest is read.
"""

import dataclasses
import io
import json
import math
import os
import pathlib
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attn_jax.diagnostics.diagnosis.layer_arrays import LayerArrays
from attn_jax.diagnostics.reference import Array

NAMES = ("query", "key", "value", "output", "mask", "logits", "scale")
NEEDED = ("query", "key", "value")
_NAME = re.compile(r"layers\.(\d{1,5})\.([a-z_]+)")
_AXES = {"query": "[*B, T, N, H]", "key": "[*B, S, K, H]", "value": "[*B, S, K, V]", "output": "[*B, T, N, V]"}
_KINDS: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_,
    "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip
_MOST_HEADER = 1 << 22

Arrays = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Captures:
    """Layers of a model, captured.

    Attributes:
        source: where they are from.
        layers: by index, the arrays of each by name, those that could be used.
        problems: what could not, and why, a line each.

    >>> import numpy as np
    >>> from attn_jax.diagnostics import Captures
    >>> arrays = {f"layers.0.{name}": np.ones((4, 1, 2)) for name in ("query", "key", "value")}
    >>> captures = Captures.of(arrays | {"layers.0.mask": np.ones((4, 4))})
    >>> list(captures.layers[0]), captures.problems
    (['query', 'key', 'value'], ('layers.0.mask must be boolean, True = may attend; got float64',))
    """

    source: str
    layers: Mapping[int, Arrays]
    problems: tuple[str, ...] = ()

    @classmethod
    def of(cls, arrays: Mapping[str, Any], source: str = "captured arrays") -> "Captures":
        """From arrays by name, checked.

        Raises:
            TypeError: if they are no mapping.
        """
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays must be a mapping of names to arrays, got {type(arrays).__name__}")
        return _checked(source, arrays.keys(), lambda name: np.asarray(arrays[name]))

    def layer_arrays(self, layer: int) -> LayerArrays:
        """One layer in float64, `[B, T, N, H]` and so on."""
        own = self.layers[layer]
        query = own["query"]
        lead = query.shape[:-3]
        batch = math.prod(lead)
        found: dict[str, Any] = {
            name: np.asarray(own[name], np.float64).reshape(batch, *own[name].shape[-3:])
            for name in ("query", "key", "value", "output")
            if name in own
        }
        square = (*lead, query.shape[-2], query.shape[-3], own["key"].shape[-3])
        if "mask" in own:
            found["visible"] = np.broadcast_to(own["mask"], square).reshape(batch, *square[-3:])
        if "scale" in own:
            found["scale"] = np.broadcast_to(np.asarray(own["scale"], np.float64), query.shape[-2:-1])
        rounding = max(_spacing(own[name].dtype) for name in found if name in _AXES)
        return LayerArrays(**found, rounding=rounding)

    def logits(self, layer: int) -> Array | None:
        """`[B, N, T, S]`, if they were captured."""
        logits = self.layers[layer].get("logits")
        return None if logits is None else np.asarray(logits, np.float64).reshape(-1, *logits.shape[-3:])


def _spacing(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def read_captures(path: str | os.PathLike[str]) -> Captures:
    """Reads a file of captured arrays.

    Args:
        path: `.npz` or `.safetensors`.

    Returns:
        `Captures`: the arrays that can be used; `problems` says a line of each other one.

    Raises:
        ValueError: in one line, if the file is none of these, broken, or holds no array that can be used.
        OSError: if it cannot be opened.

    >>> import pathlib, tempfile
    >>> import numpy as np
    >>> from attn_jax.diagnostics import read_captures
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "captured.npz")
    ...     np.savez(path, **{f"layers.3.{name}": np.ones((4, 1, 2)) for name in ("query", "key", "value")})
    ...     captures = read_captures(path)
    >>> list(captures.layers), captures.problems
    ([3], ())
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path}: captures are .npz or .safetensors, got {path.suffix or 'no suffix'}")
    names, read = readers[path.suffix](path)
    return _checked(str(path), names, read)


def _read_npz(path: pathlib.Path) -> tuple[list[str], Callable[[str], Any]]:
    try:
        archive = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        names = list(archive.files)
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError, EOFError) as error:
        raise ValueError(f"{path}: not a readable .npz: {_line(error)}") from error
    return names, lambda name: archive[name]


def _read_safetensors(path: pathlib.Path) -> tuple[list[str], Callable[[str], Any]]:
    """A header of JSON, which says where each tensor lies, and the tensors' bytes."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header would have {length} bytes of {size}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
    except (ValueError, struct.error, RecursionError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {_line(error)}") from error
    header.pop("__metadata__", None)

    def read(name: str) -> Any:
        entry = header[name]
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if kind not in _KINDS:
            raise ValueError(f"type {kind} is not read")
        dtype = np.dtype(_KINDS[kind])
        if not 0 <= first <= last <= size - 8 - length or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its bytes {first} to {last} do not hold shape {tuple(shape)} of {kind}")
        with path.open("rb") as file:
            file.seek(8 + length + first)
            return np.frombuffer(file.read(last - first), dtype).reshape(shape)

    return list(header), read


def _checked(source: str, names: Any, read: Callable[[str], Any]) -> Captures:
    """The arrays that fit each other; a line about each that does not."""
    layers: dict[int, dict[str, NDArray[Any]]] = {}
    problems = []
    for name in names:
        match = _NAME.fullmatch(str(name))
        if not match or match.group(2) not in NAMES:
            problems.append(f"{name!r} is no name of a capture, layers.3.query for one")
            continue
        try:
            array = np.asarray(read(name))
        except Exception as error:  # whatever the file's bytes are
            problems.append(f"{name} is not readable: {_line(error)}")
            continue
        layers.setdefault(int(match.group(1)), {})[match.group(2)] = array
    sound = {}
    for layer, arrays in sorted(layers.items()):
        kept, told = _sound(f"layers.{layer}", arrays)
        problems += told
        if kept:
            sound[layer] = kept
    if not sound:
        raise ValueError(f"{source}: no layer can be used: {problems[0] if problems else 'it holds no arrays'}")
    return Captures(source, sound, tuple(problems))


def _sound(layer: str, arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """What of a layer can be used, and what is wrong with the rest."""
    problems, kept = [], {}
    for name, x in arrays.items():
        floating = x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16
        if name == "mask" and x.dtype != bool:
            problems.append(f"{layer}.mask must be boolean, True = may attend; got {x.dtype}")
        elif name != "mask" and not floating:
            problems.append(f"{layer}.{name} must be floating, got {x.dtype}")
        elif name in _AXES and (x.ndim < 3 or 0 in x.shape):
            problems.append(f"{layer}.{name} must be {_AXES[name]}, got shape {x.shape}")
        elif name in ("output", "scale") and not np.isfinite(np.asarray(x, np.float64)).all():
            problems.append(f"{layer}.{name} has {_not_finite(x)} numbers that are not finite")
        else:
            kept[name] = x
    missing = [name for name in NEEDED if name not in arrays]
    if missing:
        return {}, [*problems, f"{layer}.{missing[0]} is missing"]
    if any(name not in kept for name in NEEDED):
        return {}, problems
    query, key, value = (kept[name] for name in NEEDED)
    (*lead, length, heads, width), (keys, kv_heads) = query.shape, key.shape[-3:-1]
    expected = {"key": (*lead, keys, kv_heads, width), "value": (*lead, keys, kv_heads, value.shape[-1])}
    for name, shape in expected.items():
        if kept[name].shape != shape:
            return {}, [*problems, f"{layer}.{name} must be {_AXES[name]} = {shape}, got shape {kept[name].shape}"]
    if heads % kv_heads:
        return {}, [*problems, f"{layer}.key must have a number of heads that divides {heads}, got {kv_heads}"]
    square = (*lead, heads, length, keys)
    others = {"output": (*lead, length, heads, value.shape[-1]), "logits": square}
    for name, shape in others.items():
        if name in kept and kept[name].shape != shape:
            problems.append(f"{layer}.{name} must have shape {shape}, got {kept.pop(name).shape}")
    for name, target in (("mask", square), ("scale", (heads,))):
        if name in kept and not _fits(kept[name].shape, target):
            problems.append(f"{layer}.{name} must be broadcastable to {target}, got shape {kept.pop(name).shape}")
    for name in NEEDED:
        if count := _not_finite(kept[name]):
            problems.append(f"{layer}.{name} has {count} numbers that are not finite")
    return kept, problems


def _not_finite(x: NDArray[Any]) -> int:
    return int((~np.isfinite(np.asarray(x, np.float64))).sum())


def _fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
