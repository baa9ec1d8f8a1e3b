"""Arms of a comparison: paired seeds, a rate for each, and grids whose best rate is at the edge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import token_loss
from experiments.arms import Arm, Best, Budget, Constrained, begin, best_of, train_arm
from tests.training.toy import TASK, Bigrams

BUDGET = Budget(steps=8, rates=(0.01, 0.1, 1.0), seeds=3, batch_size=3, evaluations=2, evaluation_batches=1)
TRANSFORMER = functools.partial(
    Transformer, TransformerConfig(vocabulary_size=5, num_layers=2, model_width=8, num_heads=2, mlp_width=8)
)


def table(losses: dict[float, list[float]], *, accuracy: float = 0.5) -> pd.DataFrame:
    return pd.DataFrame(
        {"arm": "a", "rate": rate, "seed": seed, "step": step, "measure": measure, "value": value}
        for rate, values in losses.items()
        for seed, loss in enumerate(values)
        for step in (0, 8)
        for measure, value in (("loss", loss if step else 9.0), ("accuracy", accuracy + rate))
    )


def test_every_rate_and_seed_is_measured_at_every_evaluation():
    trained = {}
    rows = pd.DataFrame(train_arm(Arm("bigrams", Bigrams), TASK, BUDGET, trained=trained))
    assert set(rows["measure"]) == {"loss", "accuracy"}
    assert set(trained) == set(rows["rate"])
    last = rows.query("step == 8 and measure == 'loss'").groupby("rate")["value"].apply(list)
    assert {rate: found.rows[-1]["loss"] for rate, found in trained.items()} == dict(last)
    counts = rows.query("measure == 'loss'").groupby(["rate", "step"]).size()
    assert (counts == 3).all()
    assert set(rows["step"]) == {0, 4, 8}
    assert set(BUDGET.rates) <= set(rows["rate"])


def test_one_seed_begins_and_goes_on_alike_in_every_arm_and_rate():
    rows = pd.DataFrame(train_arm(Arm("a", Bigrams), TASK, BUDGET) + train_arm(Arm("b", Bigrams), TASK, BUDGET))
    begun = rows.query("step == 0 and measure == 'loss'").groupby("seed")["value"].nunique()
    assert (begun == 1).all()
    pairs = rows.query("measure == 'loss'").groupby(["rate", "seed", "step"])["value"].nunique()
    assert (pairs == 1).all()


def test_an_arm_goes_on_from_the_state_it_is_given():
    arm, one = Arm("a", Bigrams), dataclasses.replace(BUDGET, rates=(0.1,))
    begun = begin(arm, one)
    assert train_arm(arm, TASK, one, begun=begun) == train_arm(arm, TASK, one)
    other = dataclasses.replace(begun, params=jax.tree.map(lambda x: x + jnp.eye(5)[None], begun.params))
    assert train_arm(arm, TASK, one, begun=other) != train_arm(arm, TASK, one)


def test_another_seed_is_another_run():
    one = Budget(steps=4, rates=(0.1,), seeds=2, seed=0, batch_size=3, evaluations=1, evaluation_batches=1)
    other = Budget(steps=4, rates=(0.1,), seeds=2, seed=1, batch_size=3, evaluations=1, evaluation_batches=1)
    first, second = (pd.DataFrame(train_arm(Arm("a", Bigrams), TASK, budget)) for budget in (one, other))
    last = {seed: rows.query("step == 4 and measure == 'loss'").set_index("seed")["value"] for seed, rows in
            (("first", first), ("second", second))}  # fmt: skip
    assert last["first"][1] == last["second"][1]  # seed 1 of both
    assert last["first"][0] != last["second"][2]


def test_a_grid_is_extended_towards_the_edge_that_holds_the_best_rate():
    slow = Budget(steps=8, rates=(1e-7, 1e-6), seeds=2, batch_size=3, evaluations=1, evaluation_batches=1)
    rates = sorted({row["rate"] for row in train_arm(Arm("a", Bigrams), TASK, slow)})
    np.testing.assert_allclose(rates, [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2], rtol=1e-6)  # four times, and no more


def test_one_rate_is_not_searched():
    one = Budget(steps=4, rates=(0.1,), seeds=2, batch_size=3, evaluations=1, evaluation_batches=1)
    assert {row["rate"] for row in train_arm(Arm("a", Bigrams), TASK, one)} == {0.1}


def explosive(model, batch, *, key):
    """A loss that is not finite once the table has moved far."""
    loss, measured = token_loss(model, batch, key=key)
    far = abs(model.table[...]).max() > 6.0
    return loss * nnx.relu(1.0) / (1 - far), measured


def test_a_run_that_diverged_has_no_result():
    budget = Budget(steps=8, rates=(0.01, 1.0, 100.0), seeds=2, batch_size=3, evaluations=2, evaluation_batches=1)
    rows = pd.DataFrame(train_arm(Arm("a", Bigrams, explosive), TASK, budget))
    fast = rows.query("rate == 100.0 and measure == 'loss'").set_index(["seed", "step"])["value"]
    assert fast.xs(8, level="step").isna().all()
    assert fast.xs(0, level="step").notna().all()
    assert best_of(rows, "a").rate in (0.01, 1.0)


def test_the_best_rate_has_the_lowest_mean_loss_at_the_end():
    losses = {0.1: [3.0, 2.0], 0.3: [1.0, 1.5], 1.0: [0.5, 4.0]}
    found = best_of(table(losses), "a")
    assert (found.rate, found.inside) == (0.3, True)
    np.testing.assert_array_equal(found.values, [1.0, 1.5])
    accuracy = best_of(table(losses), "a", measure="accuracy")
    assert accuracy.rate == 0.3
    np.testing.assert_allclose(accuracy.values, [0.8, 0.8])


@pytest.mark.parametrize(
    ("losses", "rate", "inside"),
    [
        ({0.1: [1.0], 0.3: [2.0]}, 0.1, False),
        ({0.1: [2.0], 0.3: [1.0]}, 0.3, False),
        ({0.1: [2.0]}, 0.1, True),
        ({0.1: [2.0, 2.0], 0.3: [1.0, np.nan], 1.0: [3.0, 3.0]}, 0.1, False),  # one seed diverged at 0.3
    ],
)
def test_an_edge_is_told(losses, rate, inside):
    found = best_of(table(losses), "a")
    assert (found.rate, found.inside) == (rate, inside)


def test_what_is_learned_by_heart_is_judged_where_it_was_best():
    """At the middle step rate 2 is best, at the last rate 1; and a run that diverged by then still counts before."""
    losses = {1.0: {4: 3.0, 8: 2.0}, 2.0: {4: 1.0, 8: 5.0}, 3.0: {4: 2.5, 8: np.nan}}
    rows = pd.DataFrame(
        {"arm": "a", "rate": rate, "seed": seed, "step": step, "measure": measure, "value": value}
        for rate, found in losses.items()
        for step, loss in {0: 0.5, **found}.items()
        for seed in range(2)
        for measure, value in (("loss", loss), ("accuracy", 10 * rate + step + seed))
    )
    early = best_of(rows, "a", measure="accuracy", stop_early=True)
    assert (early.rate, early.inside, early.step, early.values.tolist()) == (2.0, True, 4, [24, 25])
    late = best_of(rows, "a", measure="accuracy")
    assert (late.rate, late.inside, late.step, late.values.tolist()) == (1.0, False, 8, [18, 19])


def test_an_arm_that_diverges_everywhere_has_no_best_rate():
    found = best_of(table({0.1: [np.nan, 1.0], 0.3: [np.nan, np.nan]}), "a")
    assert isinstance(found, Best)
    assert np.isnan(found.rate)
    assert not found.inside
    assert np.isnan(found.values).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 9}, "steps must be a multiple of evaluations = 2, got 9"),
        ({"rates": (0.1, 0.01)}, "rates must ascend by one factor"),
        ({"rates": (0.1, 0.2, 2.0)}, "rates must ascend by one factor"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Budget(**{"steps": 8, "rates": (0.1,), "evaluations": 2, **changes})


def tie(params):
    attention = params["layers"]["attention"]
    attention["key_weight"] = attention["query_weight"]


def test_a_constraint_holds_in_training_and_evaluation_and_leaves_the_model_as_it_is():
    arms = [Arm("tied", TRANSFORMER, Constrained(tie)), Arm("free", TRANSFORMER)]
    budget = Budget(steps=4, rates=(0.01,), seeds=2, batch_size=3, evaluations=1, evaluation_batches=1)
    rows = pd.DataFrame(row for arm in arms for row in train_arm(arm, TASK, budget))
    losses = rows.query("measure == 'loss'").pivot_table(index=["seed", "step"], columns="arm", values="value")
    assert (losses["tied"] != losses["free"]).all()  # at step 0 already: evaluation obeys
    model = TRANSFORMER(rngs=nnx.Rngs(0))
    before = np.asarray(model.layers.attention.key_weight[...])
    Constrained(tie)(model, TASK.batch(jax.random.key(0), 0, 2), key=None)
    np.testing.assert_array_equal(np.asarray(model.layers.attention.key_weight[...]), before)
