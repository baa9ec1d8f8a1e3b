"""GGUF files: what is in them comes out; whatever is wrong with one is a single line that names it."""

import struct
import time
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from attn_jax.models import gguf_file
from attn_jax.models.gguf_file import read_gguf
from attn_jax.models.loading import open_checkpoint
from attn_jax.models.tokenizer import tokenizer_from_gguf
from tests.models import gemma_files, llama_files


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A valid file with several types in it, and its bytes."""
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    llama_files.write(path, kinds={"token_embd.weight": Kind.Q8_0, "blk.0.ffn_up.weight": Kind.Q4_1})
    return path, path.read_bytes()


def read_all(path):
    """Reads the file and every tensor of it."""
    file = read_gguf(path)
    return {name: file.tensor(name, stored.shape) for name, stored in file.tensors.items()}


def error_of(path):
    """The one line that reading the file ends in."""
    with pytest.raises(ValueError, match=path.name) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def mutated(tmp_path, data, *changes):
    """A file with `data` and each (offset, replacement) put in."""
    data = bytearray(data)
    for offset, replacement in changes:
        data[offset : offset + len(replacement)] = replacement
    path = tmp_path / "mutated.gguf"
    path.write_bytes(data)
    return path


def test_axes_come_back_in_the_order_they_were_written(tmp_path):
    """C33: the stored dimensions run fastest first."""
    values = np.arange(15, dtype=np.float32).reshape(3, 5)
    llama_files.write(tmp_path / "a.gguf", weights={"w": values})
    file = read_gguf(tmp_path / "a.gguf")
    assert file.tensors["w"].shape == (3, 5)
    np.testing.assert_array_equal(file.tensor("w", (3, 5)), values)


def test_metadata_come_back_as_python_values(valid):
    file = read_gguf(valid[0])
    expected = llama_files.metadata() | {"general.architecture": "llama"}
    for key, value in expected.items():
        assert file.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_types_are_dequantised_by_gguf(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    held = llama_files.write(tmp_path / "a.gguf", weights={"w": values}, kinds={"w": kind})
    read = read_all(tmp_path / "a.gguf")["w"]
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, held["w"])
    np.testing.assert_allclose(read, values, atol=0.3)


def test_bfloat16_bytes(tmp_path):
    """C36: the bytes 80 3F C0 40 are 1 and 6."""
    path = tmp_path / "a.gguf"
    llama_files.write(path, weights={"w": np.array([[1, 6]], np.float32)}, kinds={"w": Kind.BF16})
    assert bytes.fromhex("803fc040") in path.read_bytes()
    np.testing.assert_array_equal(read_all(path)["w"], [[1, 6]])


def test_type_without_dequantisation(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("counts", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "tensor 'counts' has type I32" in error_of(tmp_path / "a.gguf")


def test_absent_and_misshapen_tensor(valid):
    file = read_gguf(valid[0])
    with pytest.raises(ValueError, match=r"valid\.gguf: tensor 'blk\.9\.x' is missing"):
        file.tensor("blk.9.x", (1,))
    with pytest.raises(ValueError, match=r"'output_norm\.weight' must have shape \(31,\), got \(32,\)"):
        file.tensor("output_norm.weight", (31,))


def test_metadata_of_another_type(valid):
    file = read_gguf(valid[0])
    assert file.value("absent", int, 3) == 3
    with pytest.raises(ValueError, match=r"valid\.gguf: metadata 'absent' is missing"):
        file.value("absent", int)
    with pytest.raises(ValueError, match=r"'llama\.block_count' must be bool, got 2"):
        file.value("llama.block_count", bool)
    with pytest.raises(ValueError, match=r"'tokenizer\.ggml\.tokens' must be str, got .{60}$"):
        file.value("tokenizer.ggml.tokens", str)


def test_no_file(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(FileNotFoundError, match=path.name):
            read_gguf(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"GG", "needs 4 bytes"),
        (b"PK\x03\x04" + bytes(100), r"begins with b'PK\x03\x04', expected b'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version must be one of"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "version must be one of"),  # big-endian
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "begins with"),
    ],
)
def test_foreign_file(tmp_path, data, reason):
    assert reason in error_of(mutated(tmp_path, data))


def test_truncated_anywhere(tmp_path, valid):
    """The header is cut at every 97th byte and the data at the middle of each tensor, which is then named."""
    path, data = valid
    tensors = gguf.GGUFReader(path).tensors
    for end in range(0, tensors[0].data_offset, 97):
        error_of(mutated(tmp_path, data[:end]))
    for tensor in tensors:
        cut = mutated(tmp_path, data[: tensor.data_offset + int(tensor.n_bytes) // 2])
        assert f"tensor '{tensor.name}'" in error_of(cut)


def test_counts_that_lie(tmp_path, valid):
    """A count is compared with the file before anything is made for it."""
    data = valid[1]
    name = b"blk.0.attn_q.weight"
    axes = data.index(name) + len(name)  # then: number of axes (4 bytes), two axes, type (4), offset
    text = data.index(b"general.architecture") + len("general.architecture") + 4
    array = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4 + 4
    huge = struct.pack("<Q", 2**62)
    for offset, replacement, named in (
        (8, huge, "tensor"),  # number of tensors
        (16, huge, "metadata"),  # number of keys
        (8, struct.pack("<Q", 0), ""),  # no tensors: readable, and nothing in it
        (24, huge, "metadata"),  # length of the first key
        (text, huge, "general.architecture"),
        (array, huge, "tokenizer.ggml.tokens"),
        (array, struct.pack("<Q", 2**19), "tokenizer.ggml.tokens"),
        (axes, struct.pack("<I", 2**31), "blk.0.attn_q.weight"),
        (axes, struct.pack("<I", 0), "blk.0.attn_q.weight"),
        (axes + 4, huge, "blk.0.attn_q.weight"),
        (axes + 4, huge + huge, "blk.0.attn_q.weight"),  # a product that wraps to 0 in 64 bits
        (axes + 4, struct.pack("<Q", 0), "blk.0.attn_q.weight"),
        (axes + 20, struct.pack("<I", 999), "blk.0.attn_q.weight"),  # type
        (axes + 20, struct.pack("<I", Kind.Q6_K), "blk.0.attn_q.weight"),  # blocks of 256 in rows of 32
        (axes + 24, huge, "blk.0.attn_q.weight"),  # offset
        (axes + 24, struct.pack("<Q", 33), "blk.0.attn_q.weight"),  # not aligned
    ):
        path = mutated(tmp_path, data, (offset, replacement))
        if named:
            assert named in error_of(path)
        else:
            assert read_gguf(path).tensors == {}


def aligned(path, alignment, kind="<II"):
    """Writes one tensor, w = 0..4, behind a header that says that its place is a multiple of `alignment`."""
    key = b"general.alignment"
    data = b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, len(key)) + key
    data += struct.pack(kind, gguf.GGUFValueType.UINT64 if "Q" in kind else gguf.GGUFValueType.UINT32, alignment)
    data += struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, 5, Kind.F32, 0)
    data += bytes(-len(data) % max(alignment, 1)) if alignment < 1 << 10 else b""
    path.write_bytes(data + np.arange(5, dtype=np.float32).tobytes())
    return path


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_alignment(tmp_path, alignment):
    np.testing.assert_array_equal(read_all(aligned(tmp_path / "a.gguf", alignment))["w"], np.arange(5))


@pytest.mark.parametrize(("alignment", "kind"), [(0, "<II"), (24, "<II"), (2**31, "<II"), (2**63, "<IQ")])
def test_alignment_that_is_none(tmp_path, alignment, kind):
    error = error_of(aligned(tmp_path / "a.gguf", alignment, kind))
    assert "'general.alignment' must be a power of two" in error or "tensor 'w' ends at byte" in error


def test_repeated_names(tmp_path, valid):
    data = valid[1]
    tensor = mutated(tmp_path, data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    assert "blk.0.attn_v.weight" in error_of(tensor)
    key = mutated(tmp_path, data.replace(b"llama.context_length", b"llama.rope.freq_base"))
    assert "llama.rope.freq_base" in error_of(key)


def test_text_that_is_not_utf8(tmp_path, valid):
    error_of(mutated(tmp_path, valid[1], (valid[1].index(b"smollm"), b"\xff\xfe")))


def mutation(data, header, generator):
    """`data` with flipped bits, cut short, or with a number in the header that lies."""
    data = bytearray(data)
    match generator.integers(4):
        case 0 | 1 as anywhere:
            for at, bit in generator.integers(0, (len(data) if anywhere else header, 8), (generator.integers(1, 5), 2)):
                data[at] ^= 1 << int(bit)
        case 2:
            del data[generator.integers(len(data)) if generator.integers(2) else generator.integers(header) :]
        case 3:
            number = generator.choice(np.array([0, 2**20, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1], np.uint64))
            data[at := generator.integers(header - 8)] = 0
            data[at : at + 8] = struct.pack("<Q", number)
    return data


def read_model(path):
    """All that `load` does before it builds the model, and every tensor."""
    opened = open_checkpoint(path)
    tokenizer_from_gguf(opened.file)
    for name, stored in opened.file.tensors.items():
        opened.file.tensor(name, stored.shape)


@pytest.mark.parametrize("files", [llama_files, gemma_files])
def test_mutations(tmp_path, files):
    """Two hundred damaged files end in that one error or are read to the end, in little memory and little time."""
    path = tmp_path / "mutated.gguf"
    files.write(path)
    data, generator = path.read_bytes(), np.random.default_rng(0)
    header = gguf.GGUFReader(path).data_offset
    refused = []
    read_model(path)  # what is imported and cached once is not the files'
    tracemalloc.start()
    for _ in range(200):
        path.write_bytes(mutation(data, header, generator))
        start = time.process_time()
        try:
            read_model(path)
        except ValueError as error:
            refused.append(str(error))
        assert time.process_time() - start < 10
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) + 200e6
    assert all(path.name in error and "\n" not in error for error in refused)
    assert 80 < len(refused) < 190  # both happen, so the series tests both


def test_a_list_that_is_too_long_for_memory(tmp_path):
    """A count that the file's bytes do cover, of items that would each become a Python object."""
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    for name in (b"a", b"b", b"c"):
        kinds = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8
        data += struct.pack("<Q", 1) + name + struct.pack("<IIQ", *kinds, 2**20) + bytes(2**20)
    (tmp_path / "a.gguf").write_bytes(data)
    assert "metadata 'c' has 1048576 items, more than the 0 that are still read" in error_of(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS])
def test_blocks_of_256(tmp_path, kind, monkeypatch):
    """Types that `gguf` reads and cannot write: any bytes are valid. A tensor is read in pieces of whole rows."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (5, 2 * block_bytes), np.uint8)
    stored[:, ::2] &= 0x3B  # exponents of the scales that are finite
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_file, "_CHUNK", 5 * block_bytes)  # two rows and a half
    read = read_all(tmp_path / "a.gguf")["w"]
    assert read.shape == (5, 2 * block)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(read, gguf.quants.dequantize(stored, kind))


@pytest.mark.parametrize("window", [64, 1 << 20])
def test_parts_are_read_as_if_they_were_joined(tmp_path, valid, monkeypatch, window):
    """Wherever the file was cut: in the header, in a tensor, or nowhere; also an empty part."""
    monkeypatch.setattr(gguf_file, "_WINDOW", window)
    path, data = valid
    whole, expected = read_gguf(path), read_all(path)
    for cuts in ([3, 24, 25, 1000], [1000, 1000, len(data) // 2, len(data) - 3], []):
        ends = [0, *cuts, len(data)]
        paths = [tmp_path / f"part{i}" for i in range(len(ends) - 1)]
        for part, start, end in zip(paths, ends[:-1], ends[1:], strict=True):
            part.write_bytes(data[start:end])
        read = read_gguf(*paths)
        assert (read.path, read.metadata, read.tensors) == (paths[0], whole.metadata, whole.tensors)
        for name, values in expected.items():
            np.testing.assert_array_equal(read.tensor(name, values.shape), values)


def test_parts_that_do_not_fit(tmp_path, valid):
    data = valid[1]
    (tmp_path / "part0").write_bytes(data[:5000])
    (tmp_path / "part1").write_bytes(data[5000:])
    with pytest.raises(FileNotFoundError, match="part2: no such file"):
        read_gguf(tmp_path / "part0", tmp_path / "part1", tmp_path / "part2")
    with pytest.raises(ValueError, match=r"part1: not a readable GGUF file: it begins with"):
        read_gguf(tmp_path / "part1", tmp_path / "part0")
    with pytest.raises(ValueError, match=r"part0: not a readable GGUF file: .* but the file has 5000"):
        read_gguf(tmp_path / "part0")


def test_file_that_shrinks_while_it_is_read(tmp_path, valid):
    path = mutated(tmp_path, valid[1])
    file = read_gguf(path)
    path.write_bytes(valid[1][: file.tensors["output_norm.weight"].start + 5])
    with pytest.raises(ValueError, match=r"mutated\.gguf: tensor 'output_norm\.weight' is no longer whole"):
        file.tensor("output_norm.weight", (32,))
