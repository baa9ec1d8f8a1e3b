"""Where what is shown comes from: a checkpoint, a step of a training run, or a file of captured arrays."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from attn_jax.diagnostics.diagnosis import read_captures
from attn_jax.training import RunError, take_run
from attn_jax.training.checkpoints import Checkpoints
from experiments import artifacts, texts, train
from experiments.checkpoints import load
from experiments.harness import InputError
from experiments.model_report.config import ModelReportConfig
from experiments.model_report.subjects import Subject, subject_of_captures, subject_of_model
from experiments.train.config import TrainConfig


def subjects(config: ModelReportConfig) -> list[Subject]:
    """What the flags ask for, looked at.

    Raises:
        InputError: something the user named cannot be used; the message says why in one line.
        ValueError: a window that lies outside what was read.
    """
    if config.capture != ("",):
        return [_capture(config, path) for path in config.capture]
    if config.run:
        return [_step(config, step) for step in config.steps]
    return [_checkpoint(config, name) for name in config.model]


def _checkpoint(config: ModelReportConfig, name: str) -> Subject:
    """A checkpoint that reads the first tokens of a text."""
    text_name, text = texts.read(config.text_file)
    loaded = load(name)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None  # `load` has seen to it
    length = min(config.max_tokens, loaded.config.max_length or config.max_tokens)
    token_ids = texts.documents(text, tokenizer, count=1, length=length, special=True)[0]
    return subject_of_model(
        loaded.model, token_ids, _texts(tokenizer, token_ids), name=name, text=text_name, window=config.positions
    )


def _capture(config: ModelReportConfig, path: str) -> Subject:
    """Arrays of a model of any framework."""
    try:
        return subject_of_captures(read_captures(path), name=path, window=config.positions)
    except (ValueError, OSError) as error:
        raise InputError(f"--capture={path}: {error}") from error


def _step(config: ModelReportConfig, step: int) -> Subject:
    """A model while it was trained, that reads what was held out."""
    directory = pathlib.Path(config.run)
    trained, checkpoints = _training(directory), Checkpoints(directory / "checkpoints", run=None)
    try:
        task, tokenizer = trained.make_task()
        there = checkpoints.steps()
        if not there:
            raise InputError(f"--run={config.run} holds no checkpoint")
        step = step or there[-1]
        state = checkpoints.read(step, train.begin(trained, task))
    except (ValueError, OSError, RunError) as error:
        raise InputError(f"--run={config.run}: {error}") from error
    model = state.model if state.runs is None else take_run(state, 0).model
    token_ids = np.asarray(task.evaluation(1, 1).inputs[0, 0])[: config.max_tokens]
    return subject_of_model(
        model,
        token_ids,
        _texts(tokenizer, token_ids),
        name=f"{directory.resolve().name}, step {step}",
        text=f"{trained.task}, held out",
        window=config.positions,
    )


def _training(directory: pathlib.Path) -> TrainConfig:
    """The flags of a run. Raises InputError if there is none."""
    try:
        record = artifacts.read_record(directory)
    except (artifacts.OutputError, OSError) as error:
        raise InputError(f"--run={directory}: {error}") from error
    if record is None or record["experiment"] != train.NAME:
        raise InputError(f"--run={directory} is not the directory of a run of experiments.train")
    try:
        flags: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in record["flags"].items()}
        return TrainConfig(**flags)
    except (TypeError, ValueError) as error:
        raise InputError(f"--run={directory}: its config.json cannot be used: {error}") from error


def _texts(tokenizer: Tokenizer | None, token_ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each token; its number where there is no tokenizer."""
    if tokenizer is None:
        return [str(int(token)) for token in token_ids]
    return [tokenizer.decode([int(token)], skip_special_tokens=False) for token in token_ids]
