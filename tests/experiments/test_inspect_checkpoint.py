"""What the headers say: the same as the loaded model, without its weights."""

import json
import shutil

import jax
import pytest

from attn_jax import models
from attn_jax.models.gguf_file import GGUFFile
from attn_jax.models.safetensors_file import SafetensorsFile
from experiments import inspect_checkpoint
from experiments.inspect_checkpoint import describe, main
from tests.models import gemma_files, llama_files
from tests.models.safetensors_files import TINY


def rows_of(path):
    return dict(describe(str(path)).rows)


def error_of(capsys, *arguments):
    """The one line on standard error that the command ends in."""
    assert main(["inspect_checkpoint", *map(str, arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_a_gguf_file_of_the_llama_family(tmp_path):
    llama_files.write(tmp_path / "a.gguf", fields={"tokenizer.chat_template": "{{ messages }}"})
    parameters = sum(values.size for values in llama_files.tensors().values())
    assert rows_of(tmp_path / "a.gguf") == {
        "file": str(tmp_path / "a.gguf"),
        "family": "llama (decoder)",
        "layers": "2",
        "heads": "4 of queries, 2 of keys and values",
        "widths": "model 32, head 8, MLP 64",
        "vocabulary": str(llama_files.VOCABULARY),
        "positions": "rotary, base 10,000, all keys",
        "norms": "rms, before attention and MLP; epsilon 1e-05",
        "MLP": "gated, silu",
        "biases": "none",
        "logits": "query · key times 0.353553",
        "head": "the embedding, transposed",
        "tensors": f"{len(llama_files.shapes())} F32",
        "not used": "none",
        "parameters": f"{parameters:,} ({4 * parameters / 1e6:.4g} MB in float32)",
        "tokenizer": "gpt2 (smollm)",
        "chat template": "yes",
    }


def test_gemma_in_both_formats(tmp_path):
    gemma_files.write(tmp_path / "a.gguf")
    rows, others = rows_of(tmp_path / "a.gguf"), rows_of(gemma_files.folder(tmp_path / "folder"))
    assert rows["positions"].splitlines() == [
        "layers 0-4, 6-10: rotary, base 10,000, a window of 4 keys, 3 before the query's own",
        "layers 5, 11: rotary, base 1,000,000, Linear(factor=8.0), all keys",
    ]
    assert rows["norms"] == "rms, before and after attention and MLP, rms on queries and keys; epsilon 1e-06"
    assert rows["logits"] == "query · key times 0.25, embeddings times √D"
    assert (rows["tokenizer"], others["tokenizer"], rows["chat template"]) == ("llama (default)", "none", "no")
    differing = {"file", "family", "tokenizer"}
    assert {key for key in rows if rows[key] != others[key]} == differing


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_biased", "llama_bfloat16"])
def test_folders(name):
    rows = rows_of(TINY / name)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(models.load(TINY / name).model))
    assert rows["parameters"].split()[0] == f"{parameters:,}"
    config = json.loads((TINY / name / "config.json").read_text())
    assert rows["family"] == f"{config['model_type']} ({'encoder' if name == 'bert' else 'decoder'})"
    assert rows["tensors"].split()[1] == {"llama_bfloat16": "BF16"}.get(name, "F32")
    assert rows["biases"] == {"llama_bfloat16": "in attention"}.get(name, "in attention and MLP")


def test_tensors_without_a_use_and_kinds_are_counted(tmp_path):
    rows = rows_of(TINY / "bert")
    assert "cls.predictions.bias" in rows["not used"]
    kinds = {"token_embd.weight": llama_files.GGMLQuantizationType.Q8_0}
    weights = llama_files.tensors(untied=True)
    llama_files.write(tmp_path / "a.gguf", weights=weights, kinds=kinds)
    rows = rows_of(tmp_path / "a.gguf")
    assert rows["tensors"] == f"{len(weights) - 1} F32, 1 Q8_0"
    assert rows["head"] == "weights of its own"


def test_no_weight_is_read(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(GGUFFile, "tensor", refuse)
    monkeypatch.setattr(SafetensorsFile, "tensor", refuse)
    gemma_files.write(tmp_path / "a.gguf")
    for path in (tmp_path / "a.gguf", gemma_files.folder(tmp_path / "folder"), TINY / "bert", TINY / "llama_biased"):
        assert rows_of(path)


def test_the_command(capsys):
    assert main(["inspect_checkpoint", f"--path={TINY / 'gpt2'}"]) == 0
    out = capsys.readouterr().out
    assert "gpt2 (decoder)" in out
    assert "learned, at most 48" in out
    assert main(["inspect_checkpoint", "--help"]) == 0
    assert "--path: a checkpoint (smollm2, minilm, gemma3) or the path" in capsys.readouterr().out


def test_what_is_wrong_is_one_line(tmp_path, capsys):
    gemma_files.write(tmp_path / "cut.gguf")
    data = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) - 40])
    assert "tensor 'output_norm.weight' ends at byte" in error_of(capsys, f"--path={tmp_path}/cut.gguf")
    shutil.copytree(TINY / "llama_biased", tmp_path / "shards")
    (tmp_path / "shards" / "model-00002-of-00003.safetensors").unlink()
    assert "'model-00002-of-00003.safetensors'" in error_of(capsys, f"--path={tmp_path}/shards")
    assert "absent.gguf: no such file" in error_of(capsys, "--path=absent.gguf")
    assert "without config.json" in error_of(capsys, f"--path={tmp_path}")
    assert "must be one of 'smollm2'" in error_of(capsys, "--path=smollm3")
    assert "flag --path must be" in error_of(capsys)
    assert "flag --path must be" in error_of(capsys, "--path=")
    assert "'pth'" in error_of(capsys, "--pth=smollm2")
    assert "unexpected argument 'smollm2'" in error_of(capsys, "smollm2")


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([0, 1, 2], "0-2"), ([5, 11], "5, 11"), ([0, 2, 3, 7], "0, 2-3, 7")]
)
def test_ranges(numbers, text):
    assert inspect_checkpoint._ranges(numbers) == text
