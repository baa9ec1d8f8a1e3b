"""Training from the command line: flags to models, whole runs, continued runs, and one line for whatever is wrong."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.nn import Transformer
from attn_jax.training.files import holding
from experiments import artifacts, train
from experiments.command_line import CommandError
from experiments.train import config as train_config
from experiments.train.config import PRESETS, TrainConfig
from experiments.train.continuation import continue_tokens
from experiments.train.results import Run
from tests.training.test_checkpoints import read_only
from tests.training.toy import bits

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {
    "task": "copy", "distance": 2, "length": 8, "num_layers": 1, "model_width": 8, "num_heads": 2, "batch_size": 4,
    "steps": 20, "steps_per_call": 5, "evaluate_every": 10, "checkpoint_every": 10, "monitor": False,
}  # fmt: skip
TEXT = {**SMALL, "task": "text", "distance": 0, "sample": 12}


def flags_of(options):
    return [f"--{name}={value}" for name, value in options.items()]


def command(out, *flags):
    """The status of the command."""
    with pytest.raises(SystemExit) as ended:
        train.main(["train", f"--out={out}", *flags])
    return ended.value.code


def small(out, **options):
    """A small run by itself."""
    return train.run(TrainConfig(**{**SMALL, **options}), out)


def log_of(directory):
    return (directory / "log.jsonl").read_bytes()


def interrupt_at(monkeypatch, step, number=signal.SIGINT):
    """Ctrl-C, when the run tells of a step."""
    progress = train.Screen.progress

    def interrupted(self, told):
        progress(self, told)
        if told.step == step:
            signal.raise_signal(number)

    monkeypatch.setattr(train.Screen, "progress", interrupted)


CHOICES = [
    (field.name, choice) for field in dataclasses.fields(TrainConfig) for choice in field.metadata.get("choices") or ()
]


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_every_choice_of_every_flag_builds(name, choice):
    config = TrainConfig(**{name: choice}, model_width=16, num_layers=1, num_heads=2)
    task, tokenizer = config.make_task()
    assert (tokenizer is not None) == (config.task == "text")
    model_config = config.transformer(vocabulary_size=task.vocabulary_size, length=task.length)
    model = nnx.eval_shape(lambda: Transformer(model_config, rngs=nnx.Rngs(0)))
    assert (model.layers.attention.query_norm_weight is not None) == (config.qk_norm == "rms")
    assert model_config.positions == (None if config.positions == "none" else config.positions)
    assert config.optimizer_config(config.steps).schedule == config.schedule
    assert config.loop_config(task.num_held_out).steps == config.steps


def test_flags_reach_what_they_name():
    config = TrainConfig(
        tie=True, window=5, use_sinks=True, head_width=6, mlp_width=24, dropout_rate=0.1, scale_rule="none",
        qk_norm="l2", clip_norm=0.0, warmup=0.1, steps=100, schedule="constant", weight_decay=0.0,
    )  # fmt: skip
    model = config.transformer(vocabulary_size=7, length=9)
    assert (model.tie_query_key, model.local_window_size, model.use_sinks) == (True, (4, 0), True)
    assert (model.head_width, model.mlp_width, model.dropout_rate) == (6, 24, 0.1)
    assert (model.scale_rule, model.qk_norm, model.causal, model.vocabulary_size) == ("none", "l2", True, 7)
    optimizer = config.optimizer_config(100)
    assert (optimizer.clip_norm, optimizer.warmup_steps, optimizer.total_steps) == (None, 10, None)
    assert TrainConfig(positions="learned").transformer(vocabulary_size=7, length=9).max_length == 9
    assert TrainConfig(monitor_rows=0).attention_monitor(64).rows is None
    assert TrainConfig().attention_monitor(64).rows == 64  # of the 16 · 64 of a batch
    assert TrainConfig(batch_size=2).attention_monitor(16).rows is None  # as many as there are
    assert TrainConfig(monitor_every=3).attention_monitor(128) == train_config.AttentionMonitor(every=3, rows=64)
    assert TrainConfig(monitor=False).attention_monitor(64) is None
    assert TrainConfig(batch_size=16, evaluation_batches=8).loop_config(40).evaluation_batches == 2


@pytest.mark.parametrize(
    ("task", "loss", "accuracy"),
    [
        ("recall", np.log(8), 1 / 8),
        ("relation", np.log(2), 1 / 2),
        ("copy", np.log(16), 1 / 16),
        ("digits", 2.302, 0.1),
    ],
)
def test_what_needs_no_look_is_known(task, loss, accuracy):
    found = Run(TrainConfig(task=task), TrainConfig(task=task).make_task()[0], None, [], ())
    np.testing.assert_allclose(found.baseline, (loss, accuracy), rtol=1e-6 if task != "digits" else 0.1)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """(directory, what was printed) of the command at its smallest preset."""
    out = tmp_path_factory.mktemp("train") / "run"
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *args, **how: printed.append(" ".join(map(str, args))))
        assert command(out, "--preset=smoke") == 0
    return out, "\n".join(printed)


def test_a_run_leaves_all_its_files(smoke):
    out, _ = smoke
    names = {entry.name for entry in out.iterdir()} - {"tensorboard"}
    assert names == {
        "config.json", "log.jsonl", "events.jsonl", "checkpoints", "figure.png", "measurements.csv", "sample.txt"
    }  # fmt: skip
    record = json.loads((out / "config.json").read_text())
    assert record["command"] == "python -m experiments.train --preset=smoke"
    assert record["flags"]["steps"] == PRESETS["smoke"]["steps"]
    assert record["inputs"]["data"].startswith("LanguageModel(training=int32[")
    assert artifacts.read_record(out) == record


def test_the_text_is_learned_beyond_its_frequencies(smoke):
    out, printed = smoke
    rows = pd.read_csv(out / "measurements.csv")
    assert list(rows.columns) == ["kind", "step", "seed", "layer", "head", "measure", "value"]
    losses = rows.query("kind == 'evaluation' and measure == 'loss'")["value"].to_list()
    unigram = float(re.search(r"loss, nats.*?([\d.]+)\D*$", printed, re.M)[1])
    assert losses[0] > unigram > losses[-1] + 0.5
    assert re.search(rf"loss, nats\W+{losses[0]:.3f}\W+{losses[-1]:.3f}\W+{unigram:.3f}", printed)
    assert re.search(rf"bits per token\W+{losses[0] / np.log(2):.3f}", printed)
    assert "tokens per second" in printed
    assert len((out / "sample.txt").read_text()) > PRESETS["smoke"].get("sample", 200)


def test_attention_is_watched_head_by_head(smoke):
    rows = pd.read_csv(smoke[0] / "measurements.csv").query("kind == 'attention'")
    entropy = rows.query("measure == 'normalized_entropy'")
    assert sorted(set(entropy["step"]))[:3] == [1, 11, 21]
    assert entropy.groupby("step").size().eq(2 * 4).all()
    assert entropy["value"].between(0, 1).all()
    gradients = rows.query("measure == 'query_gradient'")
    assert gradients["head"].isna().all()
    assert set(gradients["layer"]) == {0, 1}


def test_a_finished_run_says_so_and_is_not_trained_again(smoke, capsys):
    out, _ = smoke
    before = {
        name: (out / name).read_bytes() for name in ("log.jsonl", "measurements.csv", "config.json", "sample.txt")
    }
    assert command(out, "--preset=smoke") == 0
    assert "all 400 steps were done before: nothing was left to train" in capsys.readouterr().out
    assert before == {name: (out / name).read_bytes() for name in before}


@pytest.mark.parametrize("options", [{"dropout_rate": 0.1, "monitor": True, "monitor_every": 4}, {"seeds": 2}])
def test_an_interrupted_run_continues_to_the_same_bits(options, tmp_path, monkeypatch, capsys):
    whole = small(tmp_path / "whole", **options)
    flags = flags_of({**SMALL, **options})
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        assert command(tmp_path / "cut", *flags) == 130
    assert "saved step" in capsys.readouterr().out
    assert not (tmp_path / "cut" / "measurements.csv").exists()
    assert command(tmp_path / "cut", *flags) == 0
    assert "continuing from step" in capsys.readouterr().out
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    for name in ("measurements.csv", "figure.png"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again = small(tmp_path / "cut", **options)
    assert bits(again.state) == bits(whole.state)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"learning_rate": 0.5}, "learning_rate is 0.003 there, 0.5 here"),
        ({"steps": 40}, "steps is 20 there, 40 here"),  # by which the cosine would be another
        ({"tie": True, "num_heads": 1}, "num_heads is 2 there, 1 here, tie is False there, True here"),
        ({"monitor": True}, "monitor is False there, True here"),
        ({"seed": 3}, "seed is 0 there, 3 here"),
    ],
)
def test_another_configuration_is_refused_by_name(changed, says, tmp_path, capsys):
    small(tmp_path)
    before = {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()}
    capsys.readouterr()
    assert command(tmp_path, *flags_of({**SMALL, **changed})) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --out={tmp_path} holds another run: {says}")
    assert error.count("\n") == 1
    assert before == {entry.name: entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()}


def test_a_run_becomes_longer_where_that_changes_nothing_that_was_done(tmp_path):
    constant = {"schedule": "constant", "warmup": 0.0}
    small(tmp_path / "two", **constant)
    longer = small(tmp_path / "two", **constant, steps=30)
    assert bits(longer.state) == bits(small(tmp_path / "one", **constant, steps=30).state)
    assert json.loads((tmp_path / "two" / "config.json").read_text())["flags"]["steps"] == 30
    with pytest.raises(CommandError, match="holds another run: steps is 30 there, 20 here"):
        small(tmp_path / "two", **constant)


def test_a_text_is_known_by_what_it_holds(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox, the lazy dog. " * 40)
    first = train.run(TrainConfig(**TEXT, text_file=str(text)), tmp_path / "run")
    text = text.rename(tmp_path / "b.txt")
    # Another name, no sample: the run is the same.
    again = train.run(TrainConfig(**{**TEXT, "sample": 0}, text_file=str(text)), tmp_path / "run")
    assert bits(again.state) == bits(first.state)
    text.write_text("the quick brown cat, the lazy dog. " * 40)
    with pytest.raises(CommandError, match=r"holds another run: data is LanguageModel\(training="):
        train.run(TrainConfig(**TEXT, text_file=str(text)), tmp_path / "run")


def test_byte_pairs_of_any_language_are_compared_by_the_character(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("我爱吃苹果，你爱吃梨。人人都爱吃水果！" * 60)
    assert command(tmp_path / "run", *flags_of({**TEXT, "text_file": text, "vocabulary_size": 262})) == 0
    printed = capsys.readouterr().out
    tokens, characters = (
        float(re.search(rf"{what}\W+([\d.]+)", printed)[1]) for what in ("bits per token", "bits per character")
    )
    assert characters > 1.5 * tokens  # a character is up to three bytes
    assert "苹果" in text.read_text()
    assert "|" in (tmp_path / "run" / "sample.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num_heads=3"], "model_width must be a multiple of num_heads where head_width is not given, got 8 and 3"),
        (["--num_kv_heads=3"], "num_heads must be a multiple of num_kv_heads, got 2 and 3"),
        (["--num_kv_heads=1", "--tie"], "num_kv_heads must be 2 where tie_query_key shares one projection, got 1"),
        (["--head_width=3"], "head_width must be even for positions='rotary', got 3"),
        (["--positions=sinusoidal", "--model_width=9", "--head_width=4"], "model_width must be even for positions="),
        (["--steps=22"], "steps must be a multiple of steps_per_call = 5, got 22"),
        (["--evaluate_every=7"], "evaluate_every must be a multiple of steps_per_call = 5, got 7"),
        (["--dropout_rate=1"], "dropout_rate must"),
        (["--learning_rate=0"], "learning_rates must"),
        (["--warmup=1"], "warmup_steps must be below total_steps, got 20, 20"),
        (["--distance=8"], "length must be more than distance = 8, got 8"),
        (["--task=relation"], "length has no effect with task=relation, only with text, recall, copy; got 8"),
        (["--vocabulary_size=300"], "vocabulary_size has no effect with task=copy, only with text; got 300"),
        (["--task=recall", "--distance=0", "--num_pairs=5"], "length must be at least 3 · num_pairs = 15, got 8"),
        (["--nomonitor", "--monitor_rows=8"], "monitor_rows has no effect with monitor=false, got 8"),
        (["--monitor", "--limits=nowhere.json"], "nowhere.json"),
        (["--seeds=2", "--seed=2147483647"], "seed + seeds must be at most 2³¹"),
        (["--scale_rule=sqrt"], "scale_rule must be one of inverse_sqrt"),
        (["--task=digits", "--distance=0", "--length=0", "--batch_size=400"], "batch_size must be at most 360, the"),
        (["--model_width=4194304"], "the model is too large: Out of memory"),
        (["--layers=2"], "flag --layers is not known|Unknown command line flag 'layers'"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_nothing_is_written(flags, says, tmp_path, capsys):
    assert command(tmp_path / "run", *flags_of(SMALL), *flags) == 2
    captured = capsys.readouterr()
    assert re.search(says if "|" in says else re.escape(says), captured.err)
    assert re.fullmatch(r"error: [^\n]+\n", captured.err)
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, r"--text_file=\S+ cannot be read: No such file or directory"),
        (b"", r"must hold some text, and is empty"),
        (b" \n\t", r"must hold some text, and is empty"),
        (b"caf\xe9 au lait", r"must hold UTF-8 text, got invalid continuation byte at byte 3"),
        (b"abc", r"length must be less than the tokens of each part of the text, got 8 and"),
        (b"abcdefgh" * 12, r"batch_size must be at most 1, the sequences held out, got 4"),
    ],
)
def test_a_wrong_text_is_one_line_and_nothing_is_written(data, says, tmp_path, capsys):
    text = tmp_path / "text"
    if data is not None:
        text.write_bytes(data)
    assert command(tmp_path / "run", *flags_of({**TEXT, "text_file": text})) == 2
    error = capsys.readouterr().err
    assert re.search(says, error)
    assert str(text) in error or data in (b"abc", b"abcdefgh" * 12)
    assert re.fullmatch(r"error: [^\n]+\n", error)
    assert not (tmp_path / "run").exists()


def test_what_others_wrote_is_left_alone(tmp_path, capsys):
    (tmp_path / "figure.png").write_text("mine")
    assert command(tmp_path, *flags_of(SMALL)) == 2
    assert "holds a figure.png that no experiment wrote" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["figure.png"]
    (tmp_path / "figure.png").unlink()
    record = {"experiment": "walkthrough", "question": "", "command": "", "preset": "", "source": "", "seed": 0}
    record |= {name: {} for name in ("flags", "inputs", "versions", "device")}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert command(tmp_path, *flags_of(SMALL)) == 2
    assert "holds a run of walkthrough" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_directory_that_cannot_be_used_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command(tmp_path / "file" / "run", *flags_of(SMALL)) == 2
    assert re.fullmatch(r"error: the run cannot be kept in \S+: Not a directory\n", capsys.readouterr().err)
    with holding(tmp_path):
        assert command(tmp_path, *flags_of(SMALL)) == 2
    assert capsys.readouterr().err.endswith("another run uses it\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_read_only_directory_is_one_line():
    config = TrainConfig(**SMALL)
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        path.chmod(0o755)
        with read_only(path), pytest.raises(CommandError, match=r"^--out: \S+ cannot be written: Permission denied$"):
            train.keep_record(path, config, {"preset": "", "command": "", "inputs": {}})
        assert not list(path.iterdir())


DIVERGING = {
    "learning_rate": 30.0, "weight_decay": 1.0, "schedule": "constant", "warmup": 0.0, "positions": "none",
    "num_layers": 2, "checkpoint_every": 5,
}  # fmt: skip


def test_a_run_that_diverges_says_where_and_what_is_left(tmp_path, capsys):
    for _ in range(2):  # the same command continues, and ends the same
        assert command(tmp_path, *flags_of({**SMALL, **DIVERGING})) == 2
        found = re.fullmatch(
            rf"error: diverged at step (\d+): not finite from (.*) on; the last checkpoint is that of step (\d+); "
            rf"{tmp_path}/figure.png shows how\n",
            capsys.readouterr().err,
        )
        assert re.search(r"layer [01]$", found[2])
        assert int(found[3]) == (int(found[1]) - 1) // 5 * 5 >= 5
    measured = pd.read_csv(tmp_path / "measurements.csv").query("kind == 'train' and measure == 'loss'")
    assert measured["step"].max() == int(found[1])
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_of_many_runs_all_that_diverge_are_named(tmp_path, capsys):
    assert command(tmp_path, *flags_of({**SMALL, **DIVERGING, "seeds": 2})) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: all 2 runs diverged; {tmp_path}/figure.png shows how\n"
    assert {line[:14] for line in captured.out.splitlines() if "diverged" in line} == {
        "run 0 diverged",
        "run 1 diverged",
    }


def test_many_seeds_are_told_as_mean_and_range(tmp_path, capsys):
    found = small(tmp_path, seeds=2)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "loss, nats" in line)
    last = [row["loss"] for row in found.rows if row["kind"] == "evaluation"][-1]
    assert f"{np.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})" in line
    assert set(pd.read_csv(tmp_path / "measurements.csv")["seed"]) == {0, 1}
    alone = small(tmp_path / "alone", seed=1)
    assert alone.rows[0]["loss"] == pytest.approx(last_of(found, 1), rel=1e-6)


def last_of(found, run):
    """What a run of many measured before its first step."""
    return found.rows[0]["loss"][run]


def test_what_the_monitor_finds_is_told_and_tabled(tmp_path, capsys):
    limits = tmp_path / "limits.json"
    train_config.Limits(max_logit=1e-3).save(limits)
    assert command(tmp_path / "run", *flags_of({**SMALL, "monitor": True, "limits": limits})) == 0
    printed = capsys.readouterr().out
    assert "What the monitor found" in printed
    assert re.search(r"^step 1, (notice|serious): .*layer 0", printed, re.M)
    assert re.search(r"│ 1\s+│ (notice|serious)\s+│ max_logit", printed)


def test_a_full_disk_behind_standard_output_is_one_line(tmp_path, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert command(tmp_path, *flags_of(SMALL)) == 2
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


def test_help_names_every_flag_and_the_command(tmp_path, capsys):
    assert command(tmp_path / "run", "--help") == 0
    printed = capsys.readouterr().out
    assert "python -m experiments.train" in printed
    assert all(f"--{field.name}: " in printed for field in dataclasses.fields(TrainConfig))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_is_written_on_as_one_would_by_hand(temperature):
    config = TrainConfig(**SMALL).transformer(vocabulary_size=5, length=6)
    model = Transformer(config, rngs=nnx.Rngs(0))
    window, key = jnp.array([0, 1, 2, 3, 4, 0], jnp.int32), jax.random.key(3)
    written = continue_tokens(model, window, count=4, temperature=temperature, key=key)
    by_hand = window.tolist()
    for one in jax.random.split(key, 4):
        logits = model(jnp.array(by_hand[-6:]))[-1]
        choice = jax.random.categorical(one, logits / temperature) if temperature else jnp.argmax(logits)
        by_hand.append(int(choice))
    assert written.tolist() == by_hand[6:]


def start(out, cache, *flags):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", "experiments.train", f"--out={out}", *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


LONG = flags_of({**SMALL, "steps": 2000, "steps_per_call": 10})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(directory, cache) of a process that nobody ended."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start(folder / "run", folder / "cache", *LONG)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder / "run", folder / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_continues_to_the_same_log(number, tmp_path, undisturbed):
    whole, cache = undisturbed
    process = start(tmp_path, cache, *LONG)
    while process.poll() is None and not list(tmp_path.glob("checkpoints/0*")):
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert not (tmp_path / "measurements.csv").exists()
    again = start(tmp_path, cache, *LONG)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert "continuing from step" in out
    for name in ("log.jsonl", "measurements.csv", "figure.png"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes()
