"""Captures: read from both kinds of file; what is broken costs a line, and its layer at most."""

import json
import pathlib
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from attn_jax.diagnostics import Captures, diagnose, read_captures

safetensors = pytest.importorskip("safetensors.numpy")

T, N, K, H = 12, 4, 2, 16
NUMBERS = np.random.default_rng(0)


def layer(n=0, **changes):
    """One layer of causal attention by name, with changes; None takes an array away."""
    query, key, value = (NUMBERS.standard_normal((2, T, heads, H)).astype(np.float32) for heads in (N, K, K))
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, N // K, axis=2)) / np.sqrt(H)
    raised = np.where(np.tri(T, dtype=bool), np.exp(logits), 0)
    weights = raised / raised.sum(axis=-1, keepdims=True)
    output = np.einsum("bnts,bsnv->btnv", weights, np.repeat(value, N // K, axis=2)).astype(np.float32)
    arrays = {"query": query, "key": key, "value": value, "output": output, "mask": np.tri(T, dtype=bool), **changes}
    return {f"layers.{n}.{name}": x for name, x in arrays.items() if x is not None}


def write(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors.save_file(arrays, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_hold_what_was_captured(tmp_path, suffix):
    arrays = layer(3) | layer(11)
    read = read_captures(write(tmp_path / f"captured{suffix}", arrays))
    assert list(read.layers) == [3, 11]
    assert read.problems == ()
    for name, x in arrays.items():
        n, kind = re.fullmatch(r"layers\.(\d+)\.(\w+)", name).groups()
        np.testing.assert_array_equal(read.layers[int(n)][kind], x)


def test_half_precision_is_read(tmp_path):
    arrays = {name: x if x.dtype == bool else x.astype(ml_dtypes.bfloat16) for name, x in layer().items()}
    read = read_captures(write(tmp_path / "captured.safetensors", arrays))
    own = read.layer_arrays(0)
    np.testing.assert_array_equal(own.query, arrays["layers.0.query"].astype(np.float64))
    assert own.rounding == 2**-7


def test_no_batch_axis_and_a_mask_of_all_heads():
    arrays = {name: x[0] if x.ndim == 4 else x for name, x in layer().items()}
    own = Captures.of(arrays).layer_arrays(0)
    assert own.query.shape == (1, T, N, H)
    assert own.visible.shape == (1, N, T, T)


BROKEN = {
    "misnamed": ({"layers.1.queries": np.zeros((T, N, H))}, "'layers.1.queries' is no name of a capture, layers.3.query for one"),
    "foreign": ({"weights": np.zeros(3)}, "'weights' is no name of a capture"),
    "missing": (layer(1, key=None), "layers.1.key is missing"),
    "misshaped query": (layer(1, query=np.zeros((N, H))), r"layers.1.query must be [*B, T, N, H], got shape (4, 16)"),
    "another batch": (layer(1, key=np.zeros((3, T, K, H))), "layers.1.key must be [*B, S, K, H] = (2, 12, 2, 16), got shape (3, 12, 2, 16)"),
    "heads that do not divide": (
        layer(1, key=np.zeros((2, T, 3, H)), value=np.zeros((2, T, 3, H))), "layers.1.key must have a number of heads that divides 4, got 3",
    ),
    "integers": (layer(1, value=np.zeros((2, T, K, H), int)), "layers.1.value must be floating, got int64"),
}  # fmt: skip
HARMLESS = {
    "misshaped output": (layer(1, output=np.zeros((2, T, N, 3))), "layers.1.output must have shape (2, 12, 4, 16), got (2, 12, 4, 3)"),
    "an output that is not finite": (layer(1, output=np.full((2, T, N, H), np.nan)), "layers.1.output has 1536 numbers that are not finite"),
    "a mask of numbers": (layer(1, mask=np.ones((T, T))), "layers.1.mask must be boolean, True = may attend; got float64"),
    "a mask that does not fit": (layer(1, mask=np.ones((T, 3), bool)), "layers.1.mask must be broadcastable to (2, 4, 12, 12), got shape (12, 3)"),
    "a scale that does not fit": (layer(1, scale=np.ones(3)), "layers.1.scale must be broadcastable to (4,), got shape (3,)"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BROKEN, *HARMLESS])
def test_a_broken_array_is_named_and_the_rest_is_read(case):
    arrays, problem = {**BROKEN, **HARMLESS}[case]
    read = Captures.of(layer(0) | arrays)
    (told,) = read.problems
    assert told.startswith(problem)
    assert "\n" not in told
    assert list(read.layers) == ([0] if case in BROKEN else [0, 1])


def test_numbers_that_are_not_finite_are_told_and_found():
    arrays = layer(0)
    arrays["layers.0.query"] = arrays["layers.0.query"].copy()
    arrays["layers.0.query"][0, 3, 1, 0] = np.inf
    diagnosis = diagnose(Captures.of(arrays))
    assert diagnosis.skipped[0] == ("captures", "layers.0.query has 1 numbers that are not finite")
    (found,) = [one for one in diagnosis.alarms if one.signal == "non_finite"]
    assert (found.link, found.heads) == ("numerics", ((0, 1),))


def test_nothing_to_use_is_one_clear_error():
    with pytest.raises(ValueError, match=r"^captured arrays: no layer can be used: layers.0.key is missing$"):
        Captures.of(layer(key=None))
    with pytest.raises(ValueError, match=r"no layer can be used: it holds no arrays$"):
        Captures.of({})
    with pytest.raises(TypeError, match=r"^arrays must be a mapping of names to arrays, got list$"):
        Captures.of([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("captured.npz", b"PK\x03\x04 not a zip", "not a readable .npz"),
        ("captured.safetensors", b"abc", "not a readable safetensors file"),
        ("captured.safetensors", struct.pack("<Q", 10**9) + b"{}", "its header would have 1000000000 bytes of 10"),
        ("captured.safetensors", struct.pack("<Q", 2) + b"[]", "its header is no object"),
        ("captured.pt", b"abc", "captures are .npz or .safetensors, got .pt"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}: .*{re.escape(message)}") as error:
        read_captures(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"captured.npz: no such file$"):
        read_captures(tmp_path / "captured.npz")


def test_a_tensor_whose_bytes_are_not_there_is_named(tmp_path):
    path = write(tmp_path / "captured.safetensors", layer(0) | layer(1))
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["layers.1.key"]["data_offsets"][1] += 4
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    read = read_captures(path)
    assert list(read.layers) == [0]
    assert read.problems[0].startswith("layers.1.key is not readable: its bytes")


def test_a_pickle_is_not_opened(tmp_path):
    np.savez(tmp_path / "captured.npz", **layer(0), **{"layers.1.query": np.array([{}], dtype=object)})
    read = read_captures(tmp_path / "captured.npz")
    assert list(read.layers) == [0]
    assert "layers.1.query is not readable" in read.problems[0]


def test_healthy_captures_are_silent_and_their_file_name_is_told(tmp_path):
    path = write(tmp_path / "captured.npz", layer(0) | layer(1))
    diagnosis = diagnose(read_captures(path))
    assert diagnosis.ok
    assert diagnosis.subject == str(path)
    assert diagnosis.measures["max_logit"].shape == (2, N)
    assert diagnosis.measures["token_cosine"].shape == (2,)
    assert {one.severity for one in diagnosis.findings} == {"information"}


def test_a_scale_that_is_said_is_no_fault():
    arrays = layer(0, scale=np.float32(1 / np.sqrt(H)))
    assert diagnose(Captures.of(arrays)).ok
    arrays["layers.0.scale"] = np.float32(1.0)
    (found,) = diagnose(Captures.of(arrays)).alarms
    assert (found.link, found.signal) == ("scale", "attention_function")


RECIPE = (
    (pathlib.Path(__file__).parents[3] / "docs" / "capturing.md").read_text("utf-8").split("```py\n")[1].split("```")[0]
)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_the_recipe_captures_models_of_transformers(family):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    space = {}
    exec(RECIPE, space)
    sizes = {
        "vocab_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 64,
    }
    if family == "gpt2":
        sizes = {"vocab_size": 50, "n_layer": 2, "n_head": 4, "n_embd": 64, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(family, attn_implementation="capture", **sizes)
    kind = transformers.AutoModel if family == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.no_grad():
        kind.from_config(config, attn_implementation="capture").eval()(torch.randint(0, 50, (2, 24)))
    diagnosis = diagnose(Captures.of(space["arrays"]))
    assert diagnosis.ok, str(diagnosis)
    assert diagnosis.measures["max_logit"].shape == (2, 4)
    halved = {name: x / 2 if name.endswith("query") else x for name, x in space["arrays"].items()}
    assert [one.link for one in diagnose(Captures.of(halved)).alarms] == ["scale"]
