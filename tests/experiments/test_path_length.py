"""The smoke run against what is known of paths, and the task and gradients it is made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.training import take_run
from attn_jax.training.tasks import Copy
from experiments import path_length
from experiments.arms import begin
from experiments.path_length import EXPERIMENT, results
from experiments.path_length.config import PathLengthConfig
from experiments.path_length.results import Measured
from experiments.path_length.task import Reach
from experiments.path_length.trained import gradients, make_arm

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return path_length.run(CONFIG)


@pytest.fixture(scope="module")
def measured(result):
    return Measured(CONFIG, result.measurements)


def test_the_smoke_run_settles_nothing_and_measures_all(result):
    assert [x.verdict for x in result.claims] == ["inconclusive"]
    assert not result.measurements["value"].isna().any()
    asked = result.measurements.query("part == 'training'")[["task", "distance"]].drop_duplicates()
    assert [*asked.itertuples(index=False, name=None)] == [("copy", 1), ("copy", 5), ("hold", 5)]
    assert len(result.figure().axes) == 3
    assert len(result.tables[0].rows) == 3
    scope = result.claims[0].scope
    assert "distances 1 and 5 among 2 symbols" in scope
    assert "rotary positions" in scope


def test_a_convolution_has_no_path_beyond_its_reach(measured):
    assert CONFIG.reach == 4
    for when in ("before", "after"):
        found = measured.gradient("convolution", when)
        assert (found[:, 5:] == 0).all()
        assert (found[:, :5] > 0).all()
    assert np.isnan(measured.gradient("gru")).all()  # not asked for


def test_a_gru_has_a_path_to_every_token_and_loses_by_the_step():
    config = dataclasses.replace(CONFIG, length=20)
    state = begin(make_arm(config, "gru"), config.budget)
    found = np.asarray(gradients(state, jnp.zeros((1, 20), jnp.int32)))[:, ::-1]
    assert (found > 0).all()
    assert (found[:, 19] < 0.1 * found[:, 1]).all()


def test_the_evidence_is_read_at_the_distances_that_the_rule_names():
    """Gradients of powers of the distance, so that a wrong one shows."""
    rows = [
        {
            "part": "gradient",
            "arm": arm,
            "when": when,
            "seed": seed,
            "distance": d,
            "value": base**d * (when == "before"),
        }
        for arm, base in (("attention", 0.9), ("gru", 0.5), ("convolution", 0.8))
        for when in ("before", "after")
        for seed in range(2)
        for d in range(CONFIG.length)
    ]
    rows += [
        {"part": "training", "arm": arm, "task": task, "distance": d, "rate": 0.01, "seed": seed, "step": 2,
         "measure": measure, "value": (d == 1) + (task == "hold") / 2}
        for arm in ("attention", "gru", "convolution")
        for task, d in CONFIG.tasks
        for seed in range(12)
        for measure in ("loss", "accuracy")
    ]  # fmt: skip
    config = dataclasses.replace(CONFIG, arms=("attention", "gru", "convolution"), seeds=12)
    evidence = results.judge(config, pd.DataFrame(rows))[0].evidence
    assert evidence["kept_attention"].value == pytest.approx(0.9**4)
    assert evidence["kept_gru"].value == pytest.approx(0.5**4)
    assert evidence["beyond_convolution"].value == pytest.approx(0.8**5)
    assert evidence["reach_convolution"].value == pytest.approx(0.8**3)
    for arm in config.arms:
        assert [evidence[f"{kind}_{arm}"].value for kind in ("near", "far", "held")] == [1, 0, 0]
    few = Measured(dataclasses.replace(config, seeds=9), pd.DataFrame(rows).query("not seed > 8"))
    assert np.isnan(few.solved("gru", "copy", 1).value)  # nine runs are no share
    for accuracy, share in ((0, np.nan), (1, 1)):  # at a rate that is worse, where nothing lies below the better one
        worse = {"loss": 2, "accuracy": accuracy}
        more = [{**row, "rate": 0.02, "value": worse[row["measure"]] * row["value"]} for row in rows if "rate" in row]
        edge = Measured(config, pd.DataFrame(rows + more))
        np.testing.assert_equal(edge.solved("gru", "copy", 1).value, share)  # which matters unless all rates agree
        assert edge.solved("gru", "copy", 5).value == 0


def test_gradients_are_differences_of_the_model():
    """The convolution's last logits, moved along one coordinate of one input, by an embedding of that token alone."""
    state = begin(make_arm(CONFIG, "convolution"), CONFIG.budget)
    tokens = jnp.array([[0, 1, 2, 3, 0, 1, 2]])
    found = np.asarray(gradients(state, tokens))[0]
    model = take_run(state, 0).model
    table = model.embedding[...][tokens[0]]
    graphdef, params = nnx.split(model)

    @jax.jit
    def last(x):
        moved = nnx.merge(graphdef, params)
        moved.embedding = nnx.Param(x)
        return moved(jnp.arange(7))[-1]

    for t in (6, 4, 1):
        columns = [
            (last(table.at[t, i].add(0.01)) - last(table.at[t, i].add(-0.01))) / 0.02 for i in range(CONFIG.model_width)
        ]
        assert np.linalg.norm(columns) == pytest.approx(found[t], rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("held_out", [False, True])
def test_the_task_asks_what_it_says(held_out):
    length, count = 9, 64
    keys = jax.random.split(jax.random.key(0), count)

    @jax.jit
    def draw(task):
        return jax.vmap(lambda key: task.draw(key, held_out=held_out))(keys)

    copied, held = (
        jax.tree.map(np.asarray, draw(Reach.of(kind, 3, num_symbols=4, length=length))) for kind in ("copy", "hold")
    )
    reference = jax.vmap(lambda key: Copy(4, 3, length).draw(key, held_out=held_out))(keys)
    for ours, theirs in zip(copied, reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)

    assert (held.weights == (np.arange(length) == length - 1)).all()
    marked = held.inputs >= 4
    assert (marked == (np.arange(length) == length - 1 - 3)).all()
    np.testing.assert_array_equal(held.inputs - 4 * marked, copied.inputs)
    np.testing.assert_array_equal(held.targets[:, -1], held.inputs[marked] - 4)
    assert set(held.targets[:, -1]) == {0, 1, 2, 3}


def test_all_tasks_share_a_compile():
    traces = []

    @jax.jit
    def draw(task):
        traces.append(task.length)
        return task.evaluation(1, 2)

    for kind, distance in CONFIG.tasks:
        draw(CONFIG.task(kind, distance))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distances": (3,)}, r"distances must ascend and be two or more, got \(3,\)"),
        ({"distances": (5, 3)}, r"distances must ascend and be two or more"),
        ({"distances": (1, 24)}, "length must be more than the largest distance, 24, got 24"),
        ({"width": 13}, r"length must be more than the convolution's reach and one, 25, got 24"),
        ({"num_heads": 3}, "model_width must be a multiple of num_heads"),
        ({"arms": ("lstm",)}, "arms"),
    ],
)
def test_wrong_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        PathLengthConfig(**changes)
