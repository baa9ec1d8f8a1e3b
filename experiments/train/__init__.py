"""What does a transformer learn, and what does each choice change?

Claims: none; it trains one model, or a few seeds of it at once.
Command: python -m experiments.train --task=text --scale_rule=inverse_sqrt --positions=rotary --num_heads=4 --tie
Time: smoke 20 s, quick 90 s, full about 10 min on two cores.

Tasks: the next character or byte pair of a text, recall of key-value pairs, a directed relation, a copy at a distance,
the class of a digit. Interrupted (Ctrl-C, SIGTERM) it saves first, and the same command continues to the same bits.
It leaves config.json, log.jsonl and measurements.csv (what was measured), events.jsonl (what happened), checkpoints/,
figure.png and, of a text, sample.txt.

On several devices: --data, --heads, --sequence. On several machines the same command in each, with --coordinator,
--processes and a --process of its own; `experiments.launch_local` starts them on one. The first process writes.
"""

import dataclasses
import functools
import json
import pathlib
import re
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from tokenizers import Tokenizer

from attn_jax.nn import Transformer
from attn_jax.parallel import distributed
from attn_jax.training import (
    Console,
    DivergedError,
    Progress,
    RunError,
    Trained,
    TrainState,
    init_state,
    init_states,
    token_loss,
    train,
)
from attn_jax.training.files import holding
from attn_jax.training.identity import describe as describe_value
from attn_jax.training.identity import difference
from attn_jax.training.run_log import read_rows
from attn_jax.training.tasks import LanguageModel, Task
from experiments import artifacts, command_line, progress
from experiments.artifacts import OutputError, Store
from experiments.command_line import CommandError, printable, printing, say
from experiments.config import describe, parse
from experiments.harness import PRESETS
from experiments.train.config import PRESETS as CHANGES
from experiments.train.config import TrainConfig
from experiments.train.results import Run, sample

NAME = "train"
DEFAULT_OUT = f"results/{NAME}"
OURS = ("log.jsonl", "events.jsonl", "checkpoints", "tensorboard", "measurements.csv", "figure.png", "sample.txt")
# Flags that may differ when a run is continued: a text is known by what it holds, a sample is written at the end.
FREE = ("text_file", "keep", "sample", "temperature")
# Where it runs is no part of a run either, and who is who is not for the command that is written down.
WHERE = ("data", "heads", "sequence", "shard_parameters", "coordinator", "processes", "process")
CONNECTION = WHERE[-3:]
SHOWN = ("loss", "accuracy")  # on the line of progress


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line. Wrong flags end with one line and status 2, and nothing is written."""
    try:
        status = command_line.run(_main, argv)
    except Exception:  # whatever it was: the others must not wait for this process
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    distributed.leave(status)


def _main(argv: Sequence[str]) -> int:
    with command_line.refusing():
        asked = parse(TrainConfig, argv, presets=PRESETS, out=DEFAULT_OUT)
    if asked.help:
        say(f"{(__doc__ or '').strip()}\n\nFlags:\n{describe(TrainConfig, CHANGES, out=DEFAULT_OUT)}")
        return 0
    with command_line.refusing():
        config = asked.configuration(TrainConfig, CHANGES)
        if config.coordinator:
            several = config.coordinator != distributed.AUTO or config.processes or config.process
            who = {"processes": config.processes, "process": config.process} if several else {}
            distributed.join(config.coordinator, **who)
    given = {name: value for name, value in asked.given.items() if name not in CONNECTION}
    command = dataclasses.replace(asked, given=given).command(NAME)
    run(config, pathlib.Path(asked.out), preset=asked.preset, command=command)
    return 0


def run(config: TrainConfig, out: pathlib.Path, *, preset: str = "", command: str = "") -> Trained:
    """Trains what `config` says in `out`, from where it was interrupted if it was, and writes what came out.

    Args:
        config: the flags.
        out: directory of the run.
        preset, command: how it was asked for, for config.json.

    Raises:
        CommandError: in one line, if it cannot be trained or kept, or diverged.
    """
    screen, loss = Screen(), functools.partial(token_loss, z_loss=config.z_loss) if config.z_loss else token_loss
    with command_line.refusing():  # all that flags can have wrong, before anything is written
        task, tokenizer = config.make_task()
        loop = config.loop_config(task.num_held_out)
    try:
        with command_line.refusing():
            monitor, state = config.attention_monitor(task.length), jax.block_until_ready(begin(config, task))
            layout, first = config.layout(), distributed.is_first()
            placed = state if layout is None else layout.place(state)
        asked = {"preset": preset, "command": command, "inputs": {"data": describe_value(task)}}
        distributed.in_first(lambda: keep_record(out, config, asked))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params)) // config.seeds
        if first:
            say(f"{parameters:,} parameters, {task.vocabulary_size} tokens, sequences of {task.length}")
        trained = train(
            placed, task, config=loop, loss=loss, monitor=monitor, directory=out, reporter=screen, layout=layout
        )
        if layout is not None:
            trained = dataclasses.replace(trained, state=layout.fetch(trained.state))
    except DivergedError as error:
        if not distributed.is_first():
            raise CommandError(str(error)) from error
        rows, _ = read_rows((out / "log.jsonl").read_bytes())
        write(out, Run(config, task, tokenizer, rows, (error.divergence,)))
        raise CommandError(f"{error}; {out / 'figure.png'} shows how") from error
    except RunError as error:
        raise CommandError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if not (found := re.search(r"Out of memory.*", str(error), re.IGNORECASE)):
            if jax.process_count() == 1:
                raise
            raise CommandError(f"another process of the run was lost, the same command continues: {error}") from error
        raise CommandError(f"the model is too large: {found[0]}") from error
    finally:
        screen.close()
    if not first:
        return trained
    if screen.last is None:
        say(f"all {config.steps} steps were done before: nothing was left to train")
    found = Run(config, task, tokenizer, trained.rows, trained.diverged)
    write(out, found)
    if not found.survivors:
        raise CommandError(f"all {config.seeds} runs diverged; {out / 'figure.png'} shows how")
    if tokenizer is not None and isinstance(task, LanguageModel) and config.sample:
        write_sample(out, config, trained.state, task, tokenizer, found.survivors[0])
    for table in found.tables(screen.speed):
        progress.show(table)
    say(f"wrote {out}")
    return trained


def begin(config: TrainConfig, task: Task) -> TrainState:
    """The state before the first step, of one run or of many."""
    model = config.transformer(vocabulary_size=task.vocabulary_size, length=task.length)
    make_model, optimizer = functools.partial(Transformer, model), config.optimizer_config(config.steps)
    if config.seeds == 1:
        return init_state(make_model, optimizer, learning_rate=config.learning_rate, seed=config.seed)
    return init_states(make_model, optimizer, learning_rates=[config.learning_rate], seeds=config.run_seeds)


def keep_record(out: pathlib.Path, config: TrainConfig, asked: dict[str, Any]) -> None:
    """Writes config.json, unless the directory is of another run; then nothing is.

    Raises:
        OutputError, RunError: in one line that names what differs, or why it cannot be written.
    """
    question = (__doc__ or "").splitlines()[0]
    about = {"experiment": NAME, "question": question, "seed": config.seed, "flags": config.as_dict()}
    record = json.loads(artifacts.to_json({**about, **asked, **artifacts.describe_machine()}))
    with holding(out):
        old = artifacts.read_record(out)
        if old is None:
            for name in OURS:
                if (out / name).exists():
                    raise artifacts.foreign(out, name)
        elif old["experiment"] != NAME:
            raise OutputError(f"--out={out} holds a run of {old['experiment']}; choose another directory")
        elif found := _changes(old, record, config):
            raise OutputError(f"--out={out} holds another run: {found}; choose another directory")
        if old is None or old["flags"] != record["flags"] or not (out / "checkpoints").exists():
            artifacts.write_atomic(out / "config.json", artifacts.to_json(record).encode())


def _changes(old: dict[str, Any], new: dict[str, Any], config: TrainConfig) -> str:
    """What must not change in a run and does. It may become longer, where that changes no step that was done."""
    free, begun = {*FREE, *WHERE}, old["flags"].get("steps")
    if isinstance(begun, int) and 0 < begun <= config.steps:
        same = config.optimizer_config(begun) == config.optimizer_config(config.steps)
        free |= {"steps"} if same else set()
    kept = ({name: x for name, x in of["flags"].items() if name not in free} | of["inputs"] for of in (old, new))
    return difference(*kept)


def write(out: pathlib.Path, found: Run) -> None:
    """The measurements and the figure."""
    store = Store(out, NAME)
    store.write_table("measurements.csv", found.measurements)
    store.write_figure("figure.png", found.figure())


def write_sample(
    out: pathlib.Path, config: TrainConfig, state: TrainState, task: LanguageModel, tokenizer: Tokenizer, run: int
) -> None:
    """What a model of text writes, to the screen and to a file."""
    before, after = sample(config, state, task, tokenizer, run)
    artifacts.write_atomic(out / "sample.txt", f"{before}|{after}\n".encode())
    say(printable(f"A held-out passage, and after the bar what the model writes:\n{before}|{after}\n"))


class Screen:
    """A `Console` that shows the loss and remembers what it was told last."""

    def __init__(self) -> None:
        self._console = Console()
        self.last: Progress | None = None

    @property
    def speed(self) -> float | None:
        """Tokens per second, if this process has trained."""
        return None if self.last is None else self.last.tokens_per_second

    def progress(self, progress: Progress) -> None:
        """Shows it."""
        self.last = progress
        shown = {name: value for name, value in progress.metrics.items() if name in SHOWN}
        with printing():
            self._console.progress(dataclasses.replace(progress, metrics=shown))

    def note(self, text: str) -> None:
        """Shows it on a line of its own."""
        with printing():
            self._console.note(printable(text))

    def close(self) -> None:
        """Ends the line that is open."""
        with printing():
            self._console.close()
