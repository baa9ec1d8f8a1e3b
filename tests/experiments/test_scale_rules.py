"""The smoke run, models whose scale is a parameter against those whose scale is a constant, and verdicts on made runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.tasks import Copy
from experiments import scale_rules
from experiments.claims.scale import BLIND, EDGE
from experiments.scale_rules import EXPERIMENT
from experiments.scale_rules import results as scale_rules_results
from experiments.scale_rules.config import FIXED, OTHERS, RECALLED, ScaleRulesConfig
from experiments.scale_rules.model import Scaled, make_arm, observe, scaled_loss

CONFIG = EXPERIMENT.preset("smoke")
TASK = Copy(num_symbols=5, distance=1, length=6)
SIZES = {"vocabulary_size": 5, "num_layers": 2, "model_width": 8, "num_heads": 2, "head_width": 4, "mlp_width": 16}
MADE = ScaleRulesConfig(head_dims=(8, 32), seeds=5, recall=True, recall_seeds=16)
RATES = (0.01, 0.02, 0.04)


@pytest.fixture(scope="module")
def result():
    return scale_rules.run(CONFIG)


def scaled(factor, *, fold=1.0, learns=False):
    config = TransformerConfig(**SIZES, scale_rule="none", learned_temperature=True)
    return Scaled(config, factor=factor, fold=fold, learns=learns, rngs=nnx.Rngs(0))


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert set(result.measurements["arm"]) == {"inverse_sqrt", "folded"}
    assert not result.measurements.isna().any(axis=None)
    assert len(result.figure().axes) == 6
    assert [len(table.rows) for table in result.tables] == [2]
    assert {x.verdict for x in result.claims} == {"inconclusive"}  # two seeds


def test_a_folded_scale_begins_as_the_same_function(result):
    begun = result.measurements.query("step == 0").pivot_table(index=["measure", "seed"], columns="arm", values="value")
    for measure in ("loss", "max_logit", "logit_variance", "alignment"):
        both = begun.loc[measure]
        np.testing.assert_allclose(both["folded"], both["inverse_sqrt"], rtol=1e-4)
    ended = result.measurements.query("step == step.max() and measure == 'loss'").pivot_table("value", "seed", "arm")
    assert (ended["folded"] != ended["inverse_sqrt"]).all()


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("half_inverse", 1 / 8)])
def test_a_scale_that_is_a_parameter_is_that_scale(rule, factor):
    constant = Transformer(TransformerConfig(**SIZES, scale_rule=rule), rngs=nnx.Rngs(0))
    token_ids = jnp.asarray([[0, 1, 2, 3, 4, 0]])
    np.testing.assert_allclose(scaled(factor)(token_ids), constant(token_ids), rtol=1e-5, atol=1e-5)


def test_a_factor_is_moved_only_if_it_learns():
    batch = TASK.batch(jax.random.key(0), 0, 3)

    @nnx.jit
    def gradient(model):
        found = nnx.grad(lambda model: scaled_loss(model, batch, key=jax.random.key(1))[0])(model)
        attention = found.layers.attention
        return attention.log_temperature[...], attention.query_weight[...], found.factor_learns[...]

    fixed, learned = gradient(scaled(0.5)), gradient(scaled(0.5, learns=True))
    assert not fixed[0].any()
    assert learned[0].all()
    np.testing.assert_allclose(fixed[1], learned[1], rtol=1e-6)
    assert fixed[2] == learned[2] == 0


def test_what_is_seen_of_the_logits_is_what_they_are():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 7, 2, 4)) * 2  # batch 3, 7 tokens, 2 heads of width 4
    seen = observe(jnp.asarray(query, jnp.float32), jnp.asarray(key, jnp.float32), None, is_causal=True, scale=0.7)
    visible = np.tril(np.ones((7, 7), bool))
    pairs = 0.7 * np.einsum("btnh,bsnh->nbts", query, key)[:, :, visible]  # [heads, batch, visible pairs]
    variance, squares = pairs.var(axis=(1, 2)), [np.square(x).mean(axis=(0, 1, 3)) for x in (query, key)]
    expected = {
        "max_logit": np.abs(pairs).max(),
        "logit_variance": variance.mean(),
        "query_square": squares[0].mean(),
        "key_square": squares[1].mean(),
        "alignment": np.mean(variance / (0.7**2 * 4 * squares[0] * squares[1])),
    }
    assert 0 < seen.pop("entropy") < 1
    assert set(seen) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(seen[name], value, rtol=1e-5)
    unscaled = observe(jnp.asarray(query, jnp.float32), jnp.asarray(key, jnp.float32), None, is_causal=True)
    np.testing.assert_allclose(unscaled["alignment"], expected["alignment"], rtol=1e-5)


def test_rules_of_the_same_number_are_one_arm():
    narrow, wide = (MADE.arms(width) for width in (8, 32))
    assert narrow["inverse_sqrt"] == ["inverse_sqrt", "inverse_base"]
    assert narrow["half_inverse_sqrt"] == ["half_inverse_sqrt", "inverse_sqrt_model"]  # four heads
    assert wide["half_inverse_sqrt"] == ["half_inverse_sqrt", "inverse_base"]  # four times as wide
    assert sorted(rule for rules in narrow.values() for rule in rules) == sorted(FIXED + OTHERS)
    assert "half_inverse" not in wide
    fewer = ScaleRulesConfig(head_dims=(8, 32), rules=("inverse_sqrt", "inverse_sqrt_model"))
    assert list(fewer.arms(8)) == ["inverse_sqrt", "inverse_sqrt_model"]
    assert [unit.name for unit in scale_rules.units(fewer)] == [
        "text_d8_inverse_sqrt",
        "text_d8_inverse_sqrt_model",
        "text_d32_inverse_sqrt",
    ]


def test_an_arm_begins_by_its_rule():
    for rule, factor, fold, learns in (
        ("none", 1, 1, 0),
        ("inverse_base", math.sqrt(8) / 32, 1, 0),
        ("folded", 1, 32**-0.5, 0),
        ("temperature", 32**-0.5, 1, 1),
    ):
        parts = make_arm(MADE, rule, 32, 5).make_model.keywords
        assert (parts["factor"], parts["fold"], parts["learns"]) == pytest.approx((factor, fold, learns))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rules": ("none",)}, "rules must hold inverse_sqrt"),
        ({"head_dims": (8, 15)}, "head_dims must be even"),
        ({"recall_dim": 5}, "recall_dim must be even"),
        ({"steps": 101}, "steps must be a multiple of evaluations"),
        ({"recall": True, "recall_rates": (1e-2, 1e-3)}, "rates must ascend"),
    ],
)
def test_a_configuration_that_cannot_be_measured_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        ScaleRulesConfig(**fields)


def made(config, excess, *, best=None, solved=None):
    """Runs as they would come out: `excess` nats above 1/√d_k by (arm, width), `best` rates, `solved` seeds by rule."""
    numbers = {"query_square": 1 / 8, "key_square": 1.0, "logit_variance": 4.0, "alignment": 4.0, "entropy": 0.5}

    def rows(part, arm, width, seeds, right):
        above = (excess or {}).get((arm, width), 0.0)
        for rate in RATES:
            distance = abs(math.log2(rate / (best or {}).get((arm, width), 0.02)))
            for seed in range(seeds):
                for step in (0, 100):
                    where = {"part": part, "arm": arm, "head_dim": width, "rate": rate, "seed": seed, "step": step}
                    jitter = 1e-3 * math.sin(seed * 7 + width)
                    loss = 2 + above + 0.1 * distance + 0.05 * seed + jitter if step else 5.0
                    values = {"loss": loss, "accuracy": float(seed < right), "max_logit": 3.0, **numbers}
                    if not step:
                        values |= {"logit_variance": 1.0}
                    yield from ({**where, "measure": name, "value": x} for name, x in values.items())

    text = [row for d in config.widths for arm in config.arms(d) for row in rows("text", arm, d, config.seeds, 0)]
    recall = [
        row
        for rule in RECALLED
        for row in rows("recall", rule, config.recall_dim, config.recall_seeds, (solved or {}).get(rule, 16))
    ]
    return pd.DataFrame(text + recall)


def judged(**runs):
    table = made(MADE, **runs)
    return {x.claim.id: x for x in scale_rules_results.judge(MADE, table)}, table


WORSE = {("none", 32): 0.1, ("half_inverse", 8): 0.1, ("uniform", 8): 0.3, ("qk_norm", 32): -0.1}


def test_verdicts_follow_from_the_runs():
    found, table = judged(excess=WORSE, best={("folded", 32): 0.02}, solved={"half_inverse_sqrt": 4, "none": 0})
    assert {name: x.verdict for name, x in found.items()} == {
        "S3-trained": "refined",  # q and k kept their size and the logits did not
        "S6a": "refined",
        "S6b": "refined",
        "S6b-recall": "refined",
        "S6c": "confirmed",
        "S7-trained": "refined",
    }
    assert found["S6a"].evidence["none_growth"].value == pytest.approx(0.1)
    assert found["S6a"].evidence["none_rate"].value == 1
    assert "better is QK-norm" in found["S6b"].because
    assert found["S3-trained"].evidence["query"].value == pytest.approx(1)
    assert found["S3-trained"].evidence["logit_start"].value == pytest.approx(1)
    assert found["S6b-recall"].evidence["half"].value == pytest.approx(-0.75)
    assert found["S7-trained"].evidence["model"].value == pytest.approx(0, abs=1e-9)
    figure = scale_rules_results.figure(MADE, table)
    assert len(figure.axes) == 6
    tables = scale_rules_results.tables(MADE, table)
    assert [len(table.rows) for table in tables] == [9, 7, 7]
    assert tables[0].rows[0][0] == "1/√d_k = 1/d_k from the narrowest"


def test_a_best_rate_at_the_edge_settles_nothing():
    found, _ = judged(excess=WORSE, best={("folded", 32): 0.04, ("qk_norm", 8): 0.01, ("qk_norm", 32): 0.01})
    assert (found["S6c"].verdict, found["S6c"].because) == ("inconclusive", EDGE)
    assert (found["S6b"].verdict, found["S6b"].because) == ("inconclusive", EDGE)
    assert found["S7-trained"].verdict == "refined"


def test_the_initialisation_is_all_only_at_the_same_rate():
    found, _ = judged(excess={**WORSE, ("folded", 32): -0.1}, best={})
    assert found["S6c"].verdict == "refuted"
    table = made(MADE, WORSE)
    at_rate = (table["arm"] == "folded") & (table["head_dim"] == 32) & (table["measure"] == "loss")
    moved = at_rate & (table["rate"] == 0.02) & (table["step"] == 100)
    slower = at_rate & (table["rate"] == 0.01) & (table["step"] == 100)
    table.loc[moved, "value"] += 0.1
    table.loc[slower, "value"] -= 0.1
    early = table.loc[slower].assign(rate=0.005)
    early["value"] += 0.2
    found = {x.claim.id: x for x in scale_rules_results.judge(MADE, pd.concat([table, early]))}
    assert found["S6c"].verdict == "refined"
    assert found["S6c"].evidence["folded_rate"].value == pytest.approx(0.5)
    assert found["S6c"].evidence["folded_same_rate"].value == pytest.approx(0.1)


def test_a_text_that_does_not_reward_routing_settles_nothing():
    found, _ = judged(excess={})
    assert {found[name].because for name in ("S6b", "S6c", "S7-trained")} == {BLIND}


def test_runs_that_diverge_have_no_rate():
    table = made(MADE, WORSE)
    table.loc[(table["arm"] == "none") & (table["step"] == 100), "value"] = np.nan
    found = {x.claim.id: x for x in scale_rules_results.judge(MADE, table)}
    assert (found["S6a"].verdict, found["S6a"].because) == ("inconclusive", EDGE)
    rows = scale_rules_results.tables(MADE, table)[1].rows
    assert {row[0]: row[-1] for row in rows}["none"] == "100%"
