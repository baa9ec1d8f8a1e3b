"""The diagnosis of a model, on small checkpoints written here: what it measures, what it refuses, what it reports."""

import re

import numpy as np
import pytest

from attn_jax import models
from attn_jax.diagnostics import summarize_heads
from experiments import diagnose, harness, texts
from experiments.diagnose import EXPERIMENT, DiagnoseConfig
from experiments.harness import InputError
from tests.models import llama_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("diagnose")
    llama_files.write(folder / "small.gguf")
    (folder / "text.txt").write_text("the routing of a small model, measured\n" * 12, "utf-8")
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return DiagnoseConfig(
        model=str(folder / "small.gguf"), text_file=str(folder / "text.txt"), max_tokens=24, documents=6
    )


@pytest.fixture(scope="module")
def result(config):
    return diagnose.run(config)


def test_measures_are_those_of_the_model(config, result):
    loaded = models.load(config.model)
    name, text = texts.read(config.text_file)
    documents = texts.documents(text, loaded.tokenizer, count=6, length=24)
    assert name == "text.txt"
    assert documents.shape == (6, 24)
    _, summary = loaded.model(documents[3], observe=summarize_heads)
    measured = diagnose.cube(result.measurements, "model", "normalized_entropy")
    assert measured.shape == (6, llama_files.LAYERS, llama_files.N)
    np.testing.assert_allclose(measured[3], summary.normalized_entropy, rtol=1e-6)


def test_controls_differ_where_they_should(config, result):
    first = diagnose.cube(result.measurements, "model", "sink_mass")
    for arm in diagnose.CONTROLS:
        assert (diagnose.cube(result.measurements, arm, "sink_mass") != first).any()


def test_claims_name_their_scope(result):
    assert [outcome.claim.id for outcome in result.claims] == ["D1", "D6"]
    for outcome in result.claims:
        assert "small.gguf" in outcome.scope
        assert "6 documents of 24 tokens of text.txt" in outcome.scope
        assert all(estimate.count == 6 for estimate in outcome.evidence.values())


def test_tables_and_figure(result):
    layers, controls = result.tables
    assert len(layers.rows) == llama_files.LAYERS
    assert controls.rows[0][0] == "model"
    assert len(result.figure().axes) == 16  # eight maps and their scales


def test_logits_that_are_not_finite_are_reported_with_layer_and_head(folder):
    weights = llama_files.tensors()
    weights["blk.1.attn_q.weight"][llama_files.H] = np.inf  # a row of query head 1, layer 1
    llama_files.write(folder / "broken.gguf", weights=weights)
    config = DiagnoseConfig(
        model=str(folder / "broken.gguf"), text_file=str(folder / "text.txt"), max_tokens=24, documents=2
    )
    result = diagnose.run(config)
    broken = result.tables[0]
    assert broken.title.startswith("NOT FINITE")
    assert [row[:2] for row in broken.rows] == [("1", "1")]
    entropy = diagnose.cube(result.measurements, "model", "normalized_entropy")
    assert np.isnan(entropy[:, 1, 1]).all()
    assert np.isfinite(np.delete(entropy, 1, axis=2)).all()
    assert all("nan" not in cell for table in result.tables for row in table.rows for cell in row)
    result.figure()


def test_documents_are_spread_over_the_text():
    class Characters:
        def encode(self, text, add_special_tokens):
            return type("Encoding", (), {"ids": [ord(c) for c in text]})

    text = "".join(chr(i) for i in range(100))
    pieces = texts.documents(text, Characters(), count=3, length=10)
    np.testing.assert_array_equal(pieces[:, 0], [0, 40, 90])
    np.testing.assert_array_equal(texts.documents(text[:7], Characters(), count=3, length=10), [range(7)])
    assert texts.documents(text, Characters(), count=30, length=10).shape == (10, 10)


def test_the_default_text_comes_with_python():
    name, text = texts.read("")
    assert name == "pydoc_data.topics"
    assert len(text) > 100_000


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "must hold some text, and is empty"),
        (b" \n ", "must hold some text, and is empty"),
        (b"\xff\xfe\x00", "must hold UTF-8 text: invalid start byte at byte 0"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_bad_text(tmp_path, contents, message):
    path = tmp_path / "text.txt"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InputError, match=f"^--text_file={path} {message}$"):
        texts.read(str(path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=smollm3"], "--model=smollm3: name_or_path must be one of 'smollm2'"),
        (["--model=absent.gguf"], "--model=absent.gguf: absent.gguf: no such file"),
        (["--max_tokens=1"], "max_tokens must be at least 2, got 1"),
        (["--max_tokens=many"], "'many' is not an integer"),
        (["--documents=0"], "documents must be at least 1, got 0"),
        (["--text_file={folder}/one.txt"], "the text must have at least two tokens to route between, got 1"),
        (["--text_file={folder}/absent.txt"], "cannot be read"),
        (["--model={folder}/cut.gguf"], "--model=.*cut.gguf"),
    ],
)
def test_wrong_flags_write_nothing(folder, tmp_path, capsys, flags, message):
    (folder / "one.txt").write_text("a", "utf-8")
    (folder / "cut.gguf").write_bytes((folder / "small.gguf").read_bytes()[:2000])
    usual = [f"--model={folder}/small.gguf", f"--text_file={folder}/text.txt", f"--out={tmp_path}/out"]
    flags = [flag.format(folder=folder) for flag in flags]
    with pytest.raises(SystemExit) as stopped:
        harness.main(EXPERIMENT, ["diagnose", *usual, *flags])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()
