"""The diagnosis of a model, on small checkpoints written here: what it measures, what it refuses, what it reports."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from flax import nnx

import attn_jax
from attn_jax import models
from attn_jax.diagnostics import summarize_heads
from attn_jax.diagnostics.diagnosis.findings import SEVERITIES
from attn_jax.nn import Transformer
from experiments import diagnose, harness, texts
from experiments.diagnose import EXPERIMENT, DiagnoseConfig, measured
from experiments.diagnose.config import CONTROLS
from experiments.diagnose.results import cube, of_documents
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
        model=(str(folder / "small.gguf"),), text_file=str(folder / "text.txt"), max_tokens=24, documents=6
    )


@pytest.fixture(scope="module")
def result(config):
    return diagnose.run(config)


def test_measures_are_those_of_the_model(config, result):
    loaded = models.load(config.model[0])
    name, text = texts.read(config.text_file)
    documents = texts.documents(text, loaded.tokenizer, count=6, length=24)
    assert name == "text.txt"
    assert documents.shape == (6, 24)
    _, summary = loaded.model(documents[3], observe=summarize_heads)
    entropy = cube(result.measurements, *config.model, "model", "normalized_entropy")
    assert entropy.shape == (6, llama_files.LAYERS, llama_files.N)
    np.testing.assert_allclose(entropy[3], summary.normalized_entropy, rtol=1e-6)


def test_controls_differ_where_they_should(config, result):
    first = cube(result.measurements, *config.model, "model", "sink_mass")
    for arm in CONTROLS:
        assert (cube(result.measurements, *config.model, arm, "sink_mass") != first).any()


def test_no_head_has_less_entropy_than_its_logits_allow():
    """Zhai et al. 2023, theorem 3.1, in float64; with two keys the bound is reached."""
    rng = np.random.default_rng(0)
    query, key = 2 * rng.normal(size=(2, 9, 3, 4))
    found = measured.entropy_margins(query.astype(np.float32), key.astype(np.float32), is_causal=True)
    for head in range(3):
        margins = []
        for i in range(1, 9):
            logits = key[: i + 1, head] @ query[i, head] / 2
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            gap = np.linalg.norm(logits - logits.mean()) * np.sqrt((i + 1) / i)
            others = i * np.exp(-gap)
            margins.append(-(weights * np.log(weights)).sum() - np.log1p(others) - gap * others / (1 + others))
        assert np.allclose([margins[0], min(margins)], 0, atol=1e-12)
        np.testing.assert_allclose(found["entropy_margin_least"][head], 0, atol=1e-5)
        np.testing.assert_allclose(found["entropy_margin_mean"][head], np.mean(margins), rtol=1e-4)


def test_losses_are_those_of_the_tokens_in_sight(config, result):
    """The loss of a window by a dense mask, over the last half; in the whole, the model's own."""
    loaded = models.load(config.model[0])
    _, text = texts.read(config.text_file)
    token_ids = texts.documents(text, loaded.tokenizer, count=6, length=24)[2]
    state = nnx.state(loaded.model)
    back = np.arange(24)[:, None] - np.arange(24)
    sights = {
        "all": back >= 0,
        "window": (back >= 0) & (back < config.window),
        "window_and_first": (back >= 0) & ((back < config.window) | (np.arange(24) < 4)),
    }
    assert config.window == 3
    for arm, sight in sights.items():
        attention = functools.partial(attn_jax.dot_product_attention, mask=sight)
        other = Transformer(dataclasses.replace(loaded.config, attention_fn=attention), rngs=nnx.Rngs(0))
        logits = np.asarray(nnx.merge(nnx.graphdef(other), state)(token_ids), np.float64)[11:-1]
        logits -= logits.max(axis=-1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = -log_p[np.arange(12), token_ids[12:]].mean()
        np.testing.assert_allclose(
            of_documents(result.measurements, *config.model, arm, "loss")[2], expected, rtol=1e-5
        )
    ratio = of_documents(result.measurements, *config.model, "model", "first_value_ratio")
    assert (ratio > 0).all()


def test_several_checkpoints_are_judged_together(folder):
    """A decoder and an encoder, which has no loss and puts its own tokens around a text."""
    config = DiagnoseConfig(
        model=(str(folder / "small.gguf"), "minilm"), text_file=str(folder / "text.txt"), max_tokens=24, documents=2
    )
    result = diagnose.run(config)
    d1, d6 = result.claims
    assert "small.gguf, minilm; 2 documents of 24 tokens" in d1.scope
    assert np.isfinite([d1.evidence["spearman_1"].value, d1.evidence["spearman_2"].value]).all()
    assert np.isnan(d1.evidence["spearman_3"].value)
    assert np.isfinite(d6.evidence["window_cost_1"].value)
    assert np.isnan(d6.evidence["window_cost_2"].value)
    assert cube(result.measurements, "minilm", "model", "sink_mass").shape == (2, 6, 12)
    assert len(result.figure().axes) == 32
    tokens = measured.documents(config, "minilm")
    assert (tokens[:, 0] == 101).all()  # [CLS]
    assert (tokens[:, -1] == 102).all()  # [SEP]
    assert tokens.shape == (2, 24)


def test_claims_name_their_scope(result):
    assert [outcome.claim.id for outcome in result.claims] == ["D1", "D6"]
    for outcome in result.claims:
        assert "small.gguf" in outcome.scope
        assert "6 documents of 24 tokens of text.txt" in outcome.scope
        assert {estimate.count for estimate in outcome.evidence.values()} == {6, None}


def test_tables_and_figure(result):
    findings, layers, controls, bound, losses = result.tables
    assert findings.title.endswith("findings, the worst first")
    assert len(layers.rows) == llama_files.LAYERS
    assert controls.rows[0][0] == "model"
    assert [row[2] for row in bound.rows] == [f"0 of {6 * llama_files.LAYERS * llama_files.N}"] * 2
    assert len(losses.rows) == 1
    assert len(result.figure().axes) == 16  # eight maps and their scales


def test_logits_that_are_not_finite_are_reported_with_layer_and_head(folder):
    weights = llama_files.tensors()
    weights["blk.1.attn_q.weight"][llama_files.H] = np.inf  # a row of query head 1, layer 1
    llama_files.write(folder / "broken.gguf", weights=weights)
    config = DiagnoseConfig(
        model=(str(folder / "broken.gguf"),), text_file=str(folder / "text.txt"), max_tokens=24, documents=2
    )
    result = diagnose.run(config)
    findings, broken = result.tables[:2]
    assert findings.rows[0][0] == "serious"
    assert broken.title.startswith("NOT FINITE")
    assert [row[:2] for row in broken.rows] == [("1", "1")]
    entropy = cube(result.measurements, *config.model, "model", "normalized_entropy")
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
        (["--model=smollm2,minilm,gemma3,a.gguf"], "model must name at most 3 checkpoints"),
        (["--model=smollm2,smollm2"], "model must not repeat an item"),
        (["--max_tokens=15"], "max_tokens must be at least 16, got 15"),
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


def test_the_checkpoints_are_those_installed_unless_they_are_named(monkeypatch):
    def find(name):
        if name == "minilm":
            raise FileNotFoundError(name)

    monkeypatch.setattr(measured, "find", find)
    measured._installed.cache_clear()
    try:
        assert measured.checkpoints(DiagnoseConfig()) == ("smollm2", "gemma3")
        assert measured.checkpoints(DiagnoseConfig(model=("minilm",))) == ("minilm",)
    finally:
        measured._installed.cache_clear()


def test_findings_come_first_and_are_written(config, result):
    (table, *_) = result.tables
    assert table.title == f"{config.model[0]}: findings, the worst first"
    told = result.records["findings.json"][config.model[0]]
    assert [row[0] for row in table.rows][: len(told["findings"])] == [one["severity"] for one in told["findings"]]
    severities = [SEVERITIES.index(one["severity"]) for one in told["findings"]]
    assert severities == sorted(severities, reverse=True)
    assert "serious" not in {one["severity"] for one in told["findings"]}
    assert {"head_width"} <= {one["signal"] for one in told["findings"]}
    assert all(isinstance(pair, list) for one in told["findings"] for pair in one["heads"])


def captured(path, *, scale=0.25):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 12, 2, 16)) for _ in range(3))
    output = attn_jax.dot_product_attention(query, key, value, scale=scale, is_causal=True)
    arrays = {"query": query, "key": key, "value": value, "output": np.asarray(output)}
    np.savez(path, **{f"layers.0.{name}": x for name, x in arrays.items()}, broken=np.zeros(3))
    return path


def test_captured_arrays_in_which_nothing_is_found(tmp_path):
    rng = np.random.default_rng(0)
    wide = {f"layers.0.{name}": rng.standard_normal((1, 32, 2, 64)) for name in ("query", "key", "value")}
    np.savez(tmp_path / "captured.npz", **wide)
    with pytest.raises(SystemExit, match="0"):
        harness.main(EXPERIMENT, ["diagnose", f"--capture={tmp_path / 'captured.npz'}", f"--out={tmp_path / 'out'}"])
    told = json.loads((tmp_path / "out" / "findings.json").read_text())
    assert told == {"captured.npz": {"findings": [], "skipped": []}}


def test_captured_arrays_are_diagnosed_from_the_command_line(tmp_path, capsys):
    path = captured(tmp_path / "captured.npz", scale=1.0)
    with pytest.raises(SystemExit) as status:
        harness.main(EXPERIMENT, ["diagnose", f"--capture={path}", f"--out={tmp_path / 'out'}"])
    assert status.value.code == 0
    told = json.loads((tmp_path / "out" / "findings.json").read_text())["captured.npz"]
    assert told["findings"][0]["link"] == "scale"
    assert told["findings"][0]["severity"] == "serious"
    assert told["skipped"] == [["captures", "'broken' is no name of a capture, layers.3.query for one"]]
    printed = capsys.readouterr().out
    assert printed.index("serious") < printed.index("information")


@pytest.mark.parametrize("content", [None, b"not a zip"])
def test_a_capture_that_cannot_be_read_ends_in_one_line(tmp_path, content, capsys):
    path = tmp_path / "captured.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as status:
        harness.main(EXPERIMENT, ["diagnose", f"--capture={path}", f"--out={tmp_path / 'out'}"])
    assert status.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_limits_of_another_version_end_in_one_line(tmp_path, capsys):
    (tmp_path / "limits.json").write_text('{"format": "attn_jax attention limits", "version": 9, "limits": {}}')
    path = captured(tmp_path / "captured.npz")
    command = ["diagnose", f"--capture={path}", f"--limits={tmp_path / 'limits.json'}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as status:
        harness.main(EXPERIMENT, command)
    assert status.value.code == 2
    assert "it has version 9, and this is version 1" in capsys.readouterr().err


def test_a_capture_stands_in_the_place_of_models():
    with pytest.raises(ValueError, match="capture stands in the place of model"):
        DiagnoseConfig(capture="a.npz", model=("smollm2",))
