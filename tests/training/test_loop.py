"""The loop: the same bits whatever interrupted it, and one line for whatever ends it."""

import dataclasses
import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.training.checkpoints import CheckpointError
from attn_jax.training.divergence import DivergedError
from attn_jax.training.files import RunError
from attn_jax.training.loop import LoopConfig, train
from attn_jax.training.objectives import token_loss
from attn_jax.training.state import init_states, take_run
from tests.training import toy


class Reporter:
    """Notes what is told, and does something at a step."""

    def __init__(self, at=None, action=lambda: None):
        self.at, self.action, self.told, self.notes = at, action, [], []

    def progress(self, progress):
        self.told.append(progress)
        if progress.step == self.at:
            self.action()

    def note(self, text):
        self.notes.append(text)


class Interruption(Exception):
    pass


def interrupt():
    raise Interruption


def run(directory=None, *, state=None, make=toy.make_bigrams, **options):
    state = toy.begin(make) if state is None else state
    options = {"task": toy.TASK, "config": toy.CONFIG, "loss": token_loss, **options}
    return train(state, directory=directory, **options)


def log_of(directory):
    return (directory / "log.jsonl").read_bytes()


def events_of(directory):
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("many", [False, True])
def test_a_run_interrupted_anywhere_ends_in_the_same_bits(tmp_path, many):
    if many:
        state = init_states(toy.make_transformer, toy.OPTIMIZER, seeds=[0, 1], learning_rates=[0.01, 0.03])
    else:
        state = toy.begin(toy.make_transformer)
    whole = run(tmp_path / "whole", state=state)
    in_memory = run(state=state)
    assert in_memory.rows == whole.rows
    assert toy.bits(in_memory.state) == toy.bits(whole.state)
    for at in (2, 4, 6, 10, 12):
        directory = tmp_path / str(at)
        with pytest.raises(Interruption):
            run(directory, state=state, reporter=Reporter(at, interrupt))
        reporter = Reporter()
        resumed = run(directory, state=state, reporter=reporter)
        assert reporter.notes == ([f"continuing from step {at // 4 * 4}"] if at >= 4 else [])
        assert toy.bits(resumed.state) == toy.bits(whole.state)
        assert log_of(directory) == log_of(tmp_path / "whole")
        assert resumed.rows == whole.rows


def test_what_is_logged(tmp_path):
    reporter = Reporter()
    result = run(tmp_path, reporter=reporter)
    evaluated = [row["step"] for row in result.rows if row["kind"] == "evaluation"]
    trained = [row for row in result.rows if row["kind"] == "train"]
    assert evaluated == [0, 4, 8, 12]
    assert [row["step"] for row in trained] == list(range(1, 13))
    assert list(trained[0]) == ["step", "kind", "loss", "accuracy", "gradient_norm", "learning_rate", "update_norm"]
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]
    assert [json.loads(line) for line in log_of(tmp_path).splitlines()] == result.rows
    assert [event["event"] for event in events_of(tmp_path)] == ["begun", "saved", "saved", "saved"]
    assert [p.step for p in reporter.told] == [2, 4, 6, 8, 10, 12]
    assert reporter.told[0].tokens_per_second is None
    assert all(p.tokens_per_second > 0 for p in reporter.told[1:])
    assert result.diverged == ()


def test_the_callers_state_stays_as_it_is():
    state = toy.begin(toy.make_bigrams)
    before = toy.bits(state)
    run(state=state)
    assert toy.bits(state) == before


def test_a_finished_run_is_not_done_again(tmp_path):
    first = run(tmp_path)
    second = run(tmp_path)
    assert toy.bits(second.state) == toy.bits(first.state)
    assert second.rows == first.rows
    assert [event["event"] for event in events_of(tmp_path)][-2:] == ["resumed", "note"]


def test_a_run_can_be_made_longer(tmp_path):
    longer = dataclasses.replace(toy.CONFIG, steps=20)
    run(tmp_path / "in two")
    assert toy.bits(run(tmp_path / "in two", config=longer).state) == toy.bits(run(config=longer).state)


def test_no_evaluation_if_none_is_asked_for():
    rows = run(config=dataclasses.replace(toy.CONFIG, evaluate_every=None)).rows
    assert {row["kind"] for row in rows} == {"train"}


def test_the_last_step_is_evaluated_and_saved(tmp_path):
    config = dataclasses.replace(toy.CONFIG, steps=10, evaluate_every=4, checkpoint_every=8)
    rows = run(tmp_path, config=config).rows
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [0, 4, 8, 10]
    assert [event["step"] for event in events_of(tmp_path) if event["event"] == "saved"] == [8, 10]


def test_a_damaged_newest_checkpoint_changes_nothing_but_is_said(tmp_path):
    whole = run(tmp_path / "whole")
    with pytest.raises(Interruption):
        run(tmp_path / "cut", reporter=Reporter(10, interrupt))
    (tmp_path / "cut" / "checkpoints" / "00000008" / "state" / "_METADATA").write_text("")
    reporter = Reporter()
    resumed = run(tmp_path / "cut", reporter=reporter)
    assert reporter.notes == [
        "the checkpoint of step 8 is damaged (state/_METADATA is not what was written)",
        "continuing from that of step 4",
        "continuing from step 4",
    ]
    assert toy.bits(resumed.state) == toy.bits(whole.state)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_calls_share_their_compiled_programs(tmp_path):
    traced = []

    def loss(model, batch, *, key):
        traced.append(key)
        return token_loss(model, batch, key=key)

    with pytest.raises(Interruption):
        run(tmp_path, loss=loss, reporter=Reporter(6, interrupt))
    assert len(traced) == 2  # one for training, one for evaluation
    run(tmp_path, loss=loss)
    run(state=toy.begin(toy.make_bigrams, toy.OPTIMIZER, seed=9), loss=loss)
    assert len(traced) == 2


@pytest.fixture
def terminations():
    """SIGTERMs that reach whoever started the training."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def kill(number):
    os.kill(os.getpid(), number)


def test_sigterm_saves_first(tmp_path, terminations):
    whole = run(tmp_path / "whole")
    # Sent while step 6 is reported, too late to be saved with it: it waits for the next call.
    with pytest.raises(RunError, match=r"^stopped by SIGTERM at step 8, which is saved$"):
        run(
            tmp_path / "cut",
            config=dataclasses.replace(toy.CONFIG, checkpoint_every=12),
            reporter=Reporter(6, lambda: (kill(signal.SIGTERM), terminations.append("not yet"))),
        )
    assert terminations == ["not yet", signal.SIGTERM]
    assert (tmp_path / "cut" / "checkpoints" / "00000008").is_dir()
    assert events_of(tmp_path / "cut")[-1]["event"] == "stopped"
    resumed = run(tmp_path / "cut")
    assert toy.bits(resumed.state) == toy.bits(whole.state)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_ctrl_c_saves_first_and_is_still_a_keyboard_interrupt(tmp_path):
    reporter = Reporter(2, lambda: kill(signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, config=dataclasses.replace(toy.CONFIG, checkpoint_every=12), reporter=reporter)
    assert reporter.notes == ["SIGINT: saved step 4, the same call continues"]
    assert (tmp_path / "checkpoints" / "00000004").is_dir()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, reporter=Reporter(2, lambda: (kill(signal.SIGINT), kill(signal.SIGINT))))
    assert not (tmp_path / "checkpoints").exists()


def test_without_a_directory_signals_do_not_wait():
    with pytest.raises(KeyboardInterrupt):
        run(reporter=Reporter(2, lambda: (kill(signal.SIGINT), pytest.fail("waited"))))


def test_signals_get_their_handlers_back(tmp_path, terminations):
    run(tmp_path)
    kill(signal.SIGTERM)
    assert terminations == [signal.SIGTERM]


def falling(model, batch, *, key):
    """Falls by SGD through 0, where it has no logarithm: NaN after a few steps, the sooner the higher the rate."""
    x = jnp.abs(model.table[0, 0]) + 1 - 10 * model.table[0, 1]
    return jnp.where(model.table[0, 1] > 0.5, jnp.nan, x), {}


def steep(learning_rates):
    """Runs whose entry [0, 1] grows from 0 at their learning rate in a step."""
    optimizer = dataclasses.replace(toy.OPTIMIZER, name="sgd", beta1=0.0, clip_norm=None, weight_decay=0.0)
    optimizer = dataclasses.replace(optimizer, schedule="constant", total_steps=None, warmup_steps=0)
    states = init_states(toy.make_bigrams, optimizer, seeds=[0], learning_rates=learning_rates)
    return dataclasses.replace(states, params={"table": jnp.zeros_like(states.params["table"])})


def test_a_run_that_diverges_stops_with_its_step_and_keeps_the_last_good_checkpoint(tmp_path):
    states = steep([0.0082])  # above 0.5 after 7 steps: the eighth cannot be done
    for attempt in (0, 1):  # the same again on resuming
        with pytest.raises(DivergedError) as error:
            run(tmp_path, state=take_run(states, 0), loss=falling)
        assert str(error.value) == (
            "diverged at step 8: not finite from the loss on; the last checkpoint is that of step 4"
        )
        rows = [json.loads(line) for line in log_of(tmp_path).splitlines()]
        assert [(row["step"], row["kind"]) for row in rows[-2:]] == [(8, "train"), (8, "divergence")]
        assert rows[-2]["loss"] is None
        assert rows[-1]["where"] == "the loss"
        assert [event["event"] for event in events_of(tmp_path)][-1] == "diverged", attempt
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["00000004"]


def test_of_many_runs_those_that_diverge_are_left_behind(tmp_path):
    states = steep([0.0001, 0.0082, 0.03])
    options = {"state": states, "loss": falling}
    reporter = Reporter()
    whole = run(tmp_path / "whole", reporter=reporter, **options)
    assert [(d.run, d.step, d.where) for d in whole.diverged] == [(2, 3, "the loss"), (1, 8, "the loss")]
    assert reporter.notes == [
        "run 2 diverged at step 3: not finite from the loss on",
        "run 1 diverged at step 8: not finite from the loss on",
    ]
    assert whole.state.step.tolist() == [12, 7, 2]
    last = [row for row in whole.rows if row["kind"] == "train"][-1]
    assert last["loss"][0] is not None
    assert last["loss"][1:] == [None, None]
    for at in (2, 4, 8, 10):
        with pytest.raises(Interruption):
            run(tmp_path / str(at), reporter=Reporter(at, interrupt), **options)
        resumed = run(tmp_path / str(at), **options)
        assert resumed.diverged == whole.diverged
        assert toy.bits(resumed.state) == toy.bits(whole.state)
        assert log_of(tmp_path / str(at)) == log_of(tmp_path / "whole")


def test_training_ends_when_no_run_is_left():
    states = steep([0.03, 0.03])
    reporter = Reporter()
    result = run(state=states, loss=falling, reporter=reporter)
    assert [d.step for d in result.diverged] == [3, 3]
    assert [p.step for p in reporter.told] == [2, 4]


def test_a_disk_without_room_ends_the_run_in_one_line(tmp_path, monkeypatch):
    def full(fd, offset, size):
        raise OSError(28, os.strerror(28))

    with pytest.raises(Interruption):
        run(tmp_path, reporter=Reporter(4, interrupt))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        expected = f"the checkpoint of step 8 cannot be written to {tmp_path / 'checkpoints'}: No space left on device"
        with pytest.raises(CheckpointError) as error:
            run(tmp_path)
    assert str(error.value) == f"{expected}; that of step 4 is intact"
    assert toy.bits(run(tmp_path).state) == toy.bits(run().state)


def test_other_choices_in_the_same_directory_are_refused(tmp_path):
    run(tmp_path)
    optimizer = dataclasses.replace(toy.OPTIMIZER, weight_decay=0.2)
    with pytest.raises(CheckpointError, match=r"of another run: optimizer.weight_decay is 0.1 there, 0.2 here"):
        run(tmp_path, state=toy.begin(toy.make_bigrams, optimizer))
    with pytest.raises(
        CheckpointError, match=r"of another run: task is Copy\(.*distance=1.* there, Copy\(.*distance=2"
    ):
        run(tmp_path, task=dataclasses.replace(toy.TASK, distance=2))
    with pytest.raises(CheckpointError, match=r"of another run: text is absent there, a.txt here"):
        run(tmp_path, record={"text": "a.txt"})
    with pytest.raises(CheckpointError, match=r"of another architecture: model is "):
        run(tmp_path, make=toy.make_transformer)
    with pytest.raises(ValueError, match=r"steps must be at least 12, which .* holds, got 8"):
        run(tmp_path, config=dataclasses.replace(toy.CONFIG, steps=8))


def test_a_state_that_was_trained_is_refused():
    with pytest.raises(ValueError, match=r"state must be one before the first step, got one after 12"):
        run(state=run().state)


def test_a_directory_in_use_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"another run uses it"):
        run(tmp_path, reporter=Reporter(2, lambda: run(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 15}, "steps must be a multiple of steps_per_call = 10, got 15"),
        ({"steps": 20, "evaluate_every": 15}, "evaluate_every must be a multiple of steps_per_call = 10, got 15"),
        ({"steps": 20, "checkpoint_every": 5}, "checkpoint_every must be a multiple of steps_per_call = 10, got 5"),
        ({"steps": 20, "batch_size": 0}, "batch_size must be at least 1"),
        ({"steps": 20, "keep": 1}, "keep must be at least 2"),
        ({"steps": 20, "evaluate_every": 0}, "evaluate_every must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(**options)


def test_learning_rates_that_differ_learn_differently():
    states = init_states(toy.make_bigrams, toy.OPTIMIZER, seeds=[0], learning_rates=[1e-4, 0.1])
    slow, fast = np.array([row["loss"] for row in run(state=states).rows if row["kind"] == "evaluation"]).T
    assert fast[-1] < slow[-1] < slow[0] == fast[0]
