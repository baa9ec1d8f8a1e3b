"""Small safetensors files and folders: written byte by byte, or copied from those that `transformers` wrote."""

import json
import pathlib
import shutil
import struct

import numpy as np
from safetensors.numpy import load_file, save_file

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny"


def pack(header, data=b"", *, length=None):
    """The bytes of a file: `header` an object or the text that stands there, `length` what is said of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(kind, shape, first, last):
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


def unpack(data):
    """The header of a file's bytes as an object, and the bytes after it."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def copied(name, folder, **settings):
    """A copy of a tiny checkpoint in `folder`, some of its settings replaced (None leaves one out)."""
    shutil.copytree(TINY / name, folder, dirs_exist_ok=True)
    return changed(folder, **settings)


def changed(folder, **settings):
    """The folder itself, with some settings of its `config.json` replaced."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def rotary(name, folder):
    """The checkpoint of `llama_rotary` whose settings are NAME, and its output."""
    folder.mkdir(exist_ok=True)
    shutil.copy(TINY / "llama_rotary" / "model.safetensors", folder)
    shutil.copy(TINY / "llama_rotary" / f"{name}.json", folder / "config.json")
    with np.load(TINY / "llama_rotary" / "output.npz") as stored:
        return folder, stored["token_ids"], stored[name]


def output(name):
    """Token ids of a tiny checkpoint and what `transformers` makes of them."""
    with np.load(TINY / name / "output.npz") as stored:
        return stored["token_ids"], stored["output"]


def weights(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors):
    """The folder itself, with `tensors` for its weights."""
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def error_of(load, *args, match=None, kind=ValueError):
    """The one line that a call ends in."""
    try:
        load(*args)
    except kind as error:
        text = str(error)
        assert "\n" not in text
        assert match is None or match in text, text
        return text
    raise AssertionError(f"{match or kind.__name__}: nothing was raised")
