"""The benchmark of a training step, at sizes that say nothing about speed: who takes part, and that all do the same."""

import jax
import numpy as np
import pandas as pd
import pytest

from attn_jax.nn import TransformerConfig
from experiments.benchmarks import sides, training
from experiments.benchmarks.race import PATTERN, PRODUCT
from experiments.benchmarks.sides import Contestant
from experiments.benchmarks.training import EXPERIMENT, TrainingConfig
from experiments.benchmarks.training_sides import SIDES, Problem, Side, count_parameters, flax_state

SMALL = {
    "num_layers": 2, "model_width": 16, "num_heads": 2, "mlp_width": 24, "vocabulary_size": 11, "length": 24,
    "batch_size": 2, "steps_per_call": 3, "rows": 8,
}  # fmt: skip
HERE = {name for name, side in SIDES.items() if all(map(sides.installed, side.packages))}


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "LEAST_SECONDS", 1e-3)
        return training.run(TrainingConfig(**SMALL))


def test_all_that_are_here_have_the_losses_and_the_parameters_of_their_base(result):
    assert {"ours", "sinusoidal", "flax.nnx", "monitor_rows", "monitor_all"} <= HERE
    found = result.measurements.query("measure == 'difference'").set_index("side")["value"]
    assert set(found.index) == {name for name in HERE if SIDES[name].base != name}
    assert (found < 1e-5).all(), found
    assert found["monitor_rows"] == found["monitor_all"] == 0  # who watches changes nothing


def test_all_that_are_here_are_timed_and_the_others_are_named(result):
    rows = result.measurements
    timed = rows[rows["seconds"].notna()]
    assert set(timed["side"]) - {"matrix product (torch)"} == HERE | {PRODUCT}
    assert (timed.groupby("side")["round"].nunique() == 7).all()
    steps, products, *rest = result.tables
    assert [row[0] for row in steps.rows] == [name for name in SIDES if name in HERE]
    assert "2 × 24 tokens, " in steps.title
    assert products.rows[0][0] == PRODUCT
    missing = [row for table in rest for row in table.rows]
    assert {row[0] for row in missing} == set(SIDES) - HERE
    assert all(row[1].startswith("absent: ") for row in missing)
    assert len(result.figure().axes) == 1


def test_who_has_other_losses_is_not_timed(monkeypatch):
    def build(problem: Problem) -> Contestant:
        return Contestant(lambda: None, lambda: [np.array([1.0, 1.0, 1.0]), np.array(5)], None)

    monkeypatch.setitem(SIDES, "flax.nnx", Side(("flax",), build))
    found = training.run(TrainingConfig(**SMALL, sides=("ours", "flax.nnx")))
    assert found.tables[-1].rows[0][0] == "flax.nnx"
    assert found.tables[-1].rows[0][1].startswith("returns other numbers")
    assert [row[0] for row in found.tables[0].rows] == ["ours"]


def test_a_base_that_is_not_timed_is_built_all_the_same(monkeypatch):
    monkeypatch.setattr(sides, "installed", lambda package: package == "flax")
    found = training.run(TrainingConfig(**SMALL, sides=("flax.nnx", "torch")))
    (row,), ((side, why),) = found.tables[0].rows, found.tables[-1].rows
    assert row[0] == "flax.nnx"
    assert row[4:7] == ("–", "–", "–")  # nothing to compare its time with
    assert float(row[7]) < 1e-5  # but its losses
    assert (side, why) == ("torch", "absent: torch and transformers not installed")
    assert EXPERIMENT.inputs(TrainingConfig(sides=("torch",))) == {"torch": "absent", "transformers": "absent"}


def test_ratios_are_of_steps_whatever_a_call_does():
    seconds = {PRODUCT: 1e-3, "ours": 5.0, "monitor_all": 10.5, "torch": 5.5, "sinusoidal": 5.0, "flax.nnx": 7.5}
    rows = [{"side": side, "round": i, "seconds": s * (1 + i / 100)} for side, s in seconds.items() for i in range(7)]
    values = {"flops": 2**31 * 100, "parameters": 10_000_000}
    rows += [{"side": PATTERN, "measure": measure, "value": value} for measure, value in values.items()]
    steps, _ = training.tables(TrainingConfig(), pd.DataFrame(rows))
    found = {row[0]: row for row in steps.rows}
    assert steps.title == "A step on 1 × 1024 tokens, 10,000,000 parameters on every side"
    assert found["monitor_all"][4:7] == ("ours", "1.050 [1.050, 1.050]", "at most 1.10")
    assert found["flax.nnx"][4:7] == ("sinusoidal", "1.500 [1.500, 1.500]", "at least 1.5")
    assert found["ours"][1:5] == ("1.03e+03", "994", "10%", "–")


def test_the_default_is_a_decoder_of_ten_million_parameters():
    config = TrainingConfig()
    state = jax.eval_shape(lambda: config.problem().state)
    assert count_parameters(state) == pytest.approx(10e6, rel=0.01)
    assert (config.length, config.rows) == (1024, 64)


def test_the_work_is_counted_as_the_products_are():
    model = TransformerConfig(vocabulary_size=11, num_layers=2, model_width=16, num_heads=2, mlp_width=24)
    problem = Problem(model, length=3, batch_size=5, steps_per_call=3, rows=1, seed=0)
    per_token = 2 * (4 * 16 * 16 + 3 * 16 * 24) + 11 * 16
    attention = 2 * 2 * (1 + 2 + 3) * 16 * 2  # q·k and weights · v, of what is seen
    assert problem.flops == 3 * 5 * (2 * 3 * per_token + attention)


def test_flax_gets_our_parameters():
    problem = TrainingConfig(**SMALL).problem()
    state = flax_state(problem)
    assert count_parameters(state) == count_parameters(problem.state)
    kernel = state.model.layers.attention.inner.query.kernel[...]
    np.testing.assert_array_equal(kernel, problem.state.params["layers"]["attention"]["query_weight"])


def test_flags_that_cannot_be_honoured_are_refused():
    for fields, says in (
        ({"rows": 65, "length": 64}, "rows must be at most length = 64, got 65"),
        ({"num_heads": 3}, "model_width must be a multiple of num_heads"),
        ({"rounds": 3}, "rounds must be at least 7"),
        ({"sides": ("tf",)}, "sides must be one of ours"),
    ):
        with pytest.raises(ValueError, match=says):
            TrainingConfig(**fields)
