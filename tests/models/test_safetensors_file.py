"""Safetensors files: what is in them comes out; whatever is wrong with one is a single line that names it."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import save_file

from attn_jax.models.safetensors_file import read_safetensors
from tests.models.safetensors_files import TINY, copied, entry, error_of, pack, unpack


def read_all(path):
    """Reads the file and every tensor of it."""
    file = read_safetensors(path)
    return {name: file.tensor(name, stored.shape) for name, stored in file.tensors.items()}


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A valid file of several types, and its bytes."""
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("safetensors") / "valid.safetensors"
    tensors = {f"blk.{i}.weight": generator.standard_normal((3, 4)).astype(np.float32) for i in range(4)}
    tensors |= {"half": np.ones((2, 2), np.float16), "double": np.full(3, 1e300), "empty": np.zeros((0, 4), np.float32)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path, path.read_bytes(), tensors


def written(tmp_path, data):
    path = tmp_path / "small.safetensors"
    path.write_bytes(data)
    return path


def test_values_come_back_in_float32(valid):
    path, _, tensors = valid
    read = read_all(path)
    assert read.keys() == tensors.keys() == read_safetensors(path).names
    for name, values in read.items():
        assert values.dtype == np.float32
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(values, tensors[name].astype(np.float32))


def test_bfloat16_bytes(tmp_path):
    """C36: the bytes 80 3F C0 40 are 1 and 6."""
    path = written(tmp_path, pack({"w": entry("BF16", [2], 0, 4)}, bytes.fromhex("803fc040")))
    np.testing.assert_array_equal(read_safetensors(path).tensor("w", (2,)), np.array([1, 6], np.float32), strict=True)


@pytest.mark.parametrize("kind", ["BOOL", "U8", "I64", "F8_E4M3"])
def test_a_type_that_is_no_weight_is_refused_where_it_is_read(tmp_path, kind):
    size = 8 if kind == "I64" else 1
    file = read_safetensors(written(tmp_path, pack({"ids": entry(kind, [2], 0, 2 * size)}, bytes(2 * size))))
    assert file.names == {"ids"}
    error_of(file.check, "ids", (2,), match=f"tensor 'ids' has type {kind}, only F32, F16, BF16, F64 are read")
    error_of(file.tensor, "ids", (2,), match="small.safetensors")


def test_absent_and_misshapen_tensor(valid):
    file = read_safetensors(valid[0])
    error_of(file.tensor, "w", (3,), match="valid.safetensors: tensor 'w' is missing")
    error_of(file.tensor, "half", (4,), match="tensor 'half' must have shape (4,), got (2, 2)")
    error_of(file.check, "half", (2, 2, 1), match="must have shape (2, 2, 1), got (2, 2)")


def test_no_file(tmp_path):
    for path in (tmp_path / "absent.safetensors", tmp_path):
        error_of(read_safetensors, path, match=f"{path}: no such file", kind=FileNotFoundError)


ONE = entry("F32", [2], 0, 8)
HUGE = 1 << 62


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it has 0 bytes"),
        (b"\x01\x00", "truncated"),
        (b"PK\x03\x04" + bytes(100), "its header would have"),
        (b"GGUF" + struct.pack("<I", 3) + bytes(100), "its header would have"),
        (pack({}, length=HUGE), f"its header would have {HUGE} bytes"),
        (pack({"w": ONE}, bytes(8), length=1 << 20), "its header would have 1048576 bytes"),
        (pack(b""), "its header begins with b''"),
        (pack(b"[1, 2]"), "its header begins with b'[1, '"),
        (pack(b'{"w": '), "not readable as JSON"),
        (pack(b'{"\xff": 1}'), "not readable as JSON"),
        (pack(b'{"w":' + b"[" * 100_000), "not readable as JSON"),
        (pack(b'{"w":' + b"9" * 5000 + b"}"), "not readable as JSON"),
        (pack(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w": 3}', bytes(8)), "'w' stands twice"),
        (pack({"w": ONE}, bytes(7)), "tensor 'w' ends at byte 8 of the data, but the file has 7: truncated?"),
        (pack({"w": ONE}, bytes(9)), "its tensors end at byte 8 of the data, but the file has 9"),
        (pack({}, bytes(1)), "its tensors end at byte 0"),
        (pack({"w": 3}), "tensor 'w' must have dtype, shape and data_offsets, got 3"),
        (pack({"w": ONE | {"device": "cpu"}}, bytes(8)), "tensor 'w' must have dtype"),
        (pack({"w": ONE | {"dtype": "F31"}}, bytes(8)), "tensor 'w' has the unknown type 'F31'"),
        (pack({"w": ONE | {"dtype": ["F32"]}}, bytes(8)), "tensor 'w' has the unknown type ['F32']"),
        (pack({"w": ONE | {"shape": [3]}}, bytes(8)), "tensor 'w' of type F32 and shape (3,) has [0, 8]"),
        (pack({"w": ONE | {"shape": [HUGE]}}, bytes(8)), "tensor 'w' of type F32"),
        (pack({"w": ONE | {"shape": [HUGE, HUGE, 4]}}, bytes(8)), "tensor 'w' of type F32"),  # wraps to 0 in 64 bits
        (pack({"w": ONE | {"shape": [1 << 64]}}, bytes(8)), "tensor 'w' must have a shape"),
        (pack({"w": ONE | {"shape": [-2]}}, bytes(8)), "tensor 'w' must have a shape"),
        (pack({"w": ONE | {"shape": [2.0]}}, bytes(8)), "tensor 'w' must have a shape"),
        (pack({"w": ONE | {"shape": [2, True]}}, bytes(8)), "tensor 'w' must have a shape"),
        (pack({"w": ONE | {"shape": [1] * 8 + [2]}}, bytes(8)), "tensor 'w' must have a shape of at most 8"),
        (pack({"w": ONE | {"shape": 2}}, bytes(8)), "tensor 'w' must have a shape"),
        (pack({"w": ONE | {"data_offsets": [8, 0]}}, bytes(8)), "has [8, 0] for data_offsets"),
        (pack({"w": ONE | {"data_offsets": [-8, 0]}}, bytes(8)), "tensor 'w' must have two data_offsets"),
        (pack({"w": ONE | {"data_offsets": [0]}}, bytes(8)), "tensor 'w' must have two data_offsets"),
        (pack({"w": ONE | {"data_offsets": [HUGE, HUGE + 8]}}, bytes(8)), "tensor 'w' begins at byte"),
        (
            pack({"w": ONE | {"data_offsets": [8, 16]}}, bytes(16)),
            "tensor 'w' begins at byte 8 of the data, expected 0",
        ),
        (pack({"v": ONE, "w": ONE}, bytes(8)), "begins at byte 0 of the data, expected 8: no gap, no overlap"),
        (pack({"v": ONE, "w": entry("F32", [2], 4, 12)}, bytes(12)), "tensor 'w' begins at byte 4"),
        (pack({"v": ONE, "w": entry("F32", [2], 12, 20)}, bytes(20)), "tensor 'w' begins at byte 12"),
        (pack({"__metadata__": {"a": 1}, "w": ONE}, bytes(8)), "'__metadata__' must map names to texts"),
        (pack({"__metadata__": "pt", "w": ONE}, bytes(8)), "'__metadata__' must map names to texts"),
    ],
)
def test_a_header_that_does_not_fit(tmp_path, data, reason):
    tracemalloc.start()
    try:
        error_of(read_all, written(tmp_path, data), match=reason)
        assert tracemalloc.get_traced_memory()[1] < 30e6  # nothing is made for a count before it is checked
    finally:
        tracemalloc.stop()


def test_a_header_too_long_to_read(tmp_path):
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(1 << 31)  # sparse
    error_of(read_safetensors, path, match="at most 4194304 are read")


def test_an_error_names_the_file_once_and_in_one_line(tmp_path):
    message = error_of(read_all, written(tmp_path, pack({"a\nb": 3})))
    assert message.count("small.safetensors") == 1
    assert "\\n" in message


def test_truncated_anywhere(tmp_path, valid):
    _, data, _ = valid
    for end in (*range(0, len(data), 37), len(data) - 1):
        error_of(read_all, written(tmp_path, data[:end]), match="small.safetensors")


def flipped(data, start, end, generator):
    """`data` with one to four bits flipped from `start` to `end`."""
    mutated = bytearray(data)
    for at, bit in generator.integers((start, 0), (end, 8), (generator.integers(1, 5), 2)):
        mutated[at] ^= 1 << int(bit)
    return bytes(mutated)


def check_against_the_bytes(read, data):
    stored, tail = unpack(data)
    stored.pop("__metadata__", None)
    assert read.keys() == stored.keys()
    for name, one in stored.items():
        dtype = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[one["dtype"]]
        with np.errstate(all="ignore"):
            values = np.frombuffer(tail[slice(*one["data_offsets"])], dtype).astype(np.float32)
        np.testing.assert_array_equal(read[name], values.reshape(one["shape"]), strict=True)


def test_two_hundred_mutations(tmp_path, valid):
    """Flipped bits, cuts and counts that lie: that one error, or what a sound file of these bytes would hold."""
    _, data, _ = valid
    header, tail = unpack(data)
    end = len(data) - len(tail)
    generator = np.random.default_rng(0)
    refused = []
    tracemalloc.start()
    try:
        for case in range(200):
            if case % 4 < 2:
                mutated = flipped(data, *((0, end) if case % 4 else (end, len(data))), generator)
            elif case % 4 == 2:
                mutated = data[: generator.integers(0, len(data))]
            else:
                name = sorted(header)[generator.integers(1, len(header))]  # past __metadata__
                huge = int(2.0 ** generator.uniform(3, 70))
                lie = {"shape": [huge]} if case % 8 == 3 else {"data_offsets": [0, huge]}
                mutated = pack(header | {name: header[name] | lie}, tail)
            path = written(tmp_path, mutated)
            try:
                read = read_all(path)
            except ValueError as error:
                refused.append(str(error))
            else:
                check_against_the_bytes(read, mutated)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    assert all(path.name in error and "\n" not in error for error in refused)
    assert 120 < len(refused) < 170  # both happen, so the series tests both


class TestShards:
    """`model.safetensors.index.json` and the files beside it."""

    @pytest.fixture
    def folder(self, tmp_path):
        return copied("llama_biased", tmp_path / "shards")

    @staticmethod
    def index(folder):
        return folder / "model.safetensors.index.json"

    def edit(self, folder, change):
        """The index, its weight_map changed."""
        path = self.index(folder)
        value = json.loads(path.read_text())
        change(value["weight_map"])
        path.write_text(json.dumps(value))
        return path

    def test_every_tensor_of_every_shard(self, folder):
        placed = json.loads(self.index(folder).read_text())["weight_map"]
        read = read_all(self.index(folder))
        assert read.keys() == placed.keys()
        assert len(set(placed.values())) == 3
        for name, shard in placed.items():
            np.testing.assert_array_equal(read[name], read_all(folder / shard)[name])

    def test_a_missing_shard(self, folder):
        (folder / "model-00002-of-00003.safetensors").unlink()
        message = error_of(read_safetensors, self.index(folder), match="shard 'model-00002-of-00003.safetensors'")
        assert "which holds tensor 'model.layers." in message
        assert message.endswith("is missing")

    def test_half_a_shard(self, folder):
        shard = folder / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
        message = error_of(read_safetensors, self.index(folder), match=f"{shard.name}: not a readable")
        assert "tensor 'model.layers." in message
        assert "truncated?" in message

    def test_a_tensor_that_the_shard_lacks(self, folder):
        path = self.edit(folder, lambda places: places.update(w="model-00001-of-00003.safetensors"))
        error_of(read_safetensors, path, match="shard 'model-00001-of-00003.safetensors' lacks tensor 'w'")

    def test_a_tensor_that_the_index_forgets(self, folder):
        path = self.edit(folder, lambda places: places.pop("lm_head.weight"))
        error_of(read_safetensors, path, match="holds tensor 'lm_head.weight', which the index does not place there")

    @pytest.mark.parametrize(
        "shard", ["../x.safetensors", "/etc/x.safetensors", "a\\..\\x.safetensors", "weights.bin", "x\0.safetensors", 3]
    )
    def test_a_shard_elsewhere_is_not_followed(self, folder, shard):
        (folder.parent / "x.safetensors").write_bytes((TINY / "gpt2" / "model.safetensors").read_bytes())
        path = self.edit(folder, lambda places: places.update({"lm_head.weight": shard}))
        error_of(read_safetensors, path, match="tensor 'lm_head.weight' must be in a .safetensors file beside it")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "not readable as JSON"),
            ("[]", "must hold a JSON object, got list"),
            ("{}", "'weight_map' is missing"),
            ('{"weight_map": ["a"]}', "'weight_map' must be dict, got ['a']"),
        ],
    )
    def test_an_index_that_is_none(self, folder, text, reason):
        self.index(folder).write_text(text)
        error_of(read_safetensors, self.index(folder), match=f"index.json: {reason}")
