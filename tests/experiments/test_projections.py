"""The smoke run against what algebra says, arms that are paired and of one size, and verdicts on made-up training."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax import masks
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.tasks import Batch
from experiments import projections
from experiments.projections import EXPERIMENT
from experiments.projections.config import LANGUAGE_ARMS, MODEL_WIDTH, RELATION_ARMS, TRAINED, ProjectionsConfig
from experiments.projections.measured import by_width, condition, predicted_half, simulated
from experiments.projections.results import judge
from experiments.projections.trained import (
    LANGUAGE_TIES,
    OTHERS,
    free_parameters,
    language_arm,
    loss_and_diagonal,
    query_is_key_but_for_signs,
    relation_arm,
)

CONFIG = EXPERIMENT.preset("smoke")
EXACT = 1e-5


@pytest.fixture(scope="module")
def result():
    return projections.run(CONFIG)


def mean(result, part, measure, **where):
    return simulated(result.measurements, part, measure, **where).mean()


def test_what_needs_no_training_is_settled(result):
    verdicts = {x.claim.id: x.verdict for x in result.claims}
    open_ones = dict.fromkeys(("P2", "P3", "P6", "P7"), "inconclusive")
    assert verdicts == {"P1": "refined", "P4": "confirmed", "P5": "refined", **open_ones}


def test_of_tokens_of_one_norm_none_has_a_larger_product_than_the_own(result):
    for n in CONFIG.lengths:
        for arm in ("spread 0.0", "variance 0.25", "unscaled"):
            assert (by_width(result.measurements, arm, "largest", n) == 1).all()
        assert (by_width(result.measurements, "spread 1.0", "largest", n)[:, 0] < 1).any()


def test_the_scale_and_the_variance_are_one_factor(result):
    # unscaled at d = 16 is scaled by 1/√16 with four times the variance
    unscaled, four = (by_width(result.measurements, arm, "weight", 128) for arm in ("unscaled", "variance 4.0"))
    np.testing.assert_allclose(unscaled[:, 1], four[:, 1], rtol=1e-5)


def test_the_diagonal_takes_over_where_the_own_logit_outweighs_the_sum(result):
    for arm in ("spread 0.0", "W_Q = W_K"):
        assert condition(CONFIG, result.measurements, arm).mean() == pytest.approx(1, abs=0.15)
    assert predicted_half("unscaled", math.e**4) == pytest.approx(8)
    separate = by_width(result.measurements, "W_Q, W_K", "weight", 128)
    np.testing.assert_allclose(separate.mean(axis=0), 1 / 128, rtol=0.3)


def test_tied_scores_are_symmetric_and_only_rotary_positions_turn_a_cycle(result):
    for kind in ("none", "additive", "rotary"):
        assert mean(result, "symmetry", "cycle", arm="tied", positions=kind) < EXACT
        assert mean(result, "symmetry", "cycle", arm="separate", positions=kind) == pytest.approx(1, abs=0.1)
        assert mean(result, "symmetry", "asymmetry", arm="tied", positions=kind) > 1e-3
    swap, ring = (
        {kind: mean(result, "symmetry", name, arm="tied", positions=kind) for kind in ("none", "additive", "rotary")}
        for name in ("swap", "ring")
    )
    assert swap["none"] < EXACT < 0.1 < min(swap["additive"], swap["rotary"])
    assert max(ring["none"], ring["additive"]) < EXACT < 0.1 < ring["rotary"]


def test_weights_follow_the_key_and_the_output_follows_both(result):
    planted = functools.partial(mean, result, "planted")
    assert planted("value swap, weights") == 0
    assert planted("either swap, output") < EXACT < 1 < planted("value swap, output")
    assert planted("hard, rich, weight") == planted("hard, weight")
    assert planted("easy, weight, one vector") == pytest.approx(planted("easy, weight"))
    assert mean(result, "determined", "one head") == pytest.approx(1 / 4, abs=0.03)  # H / D
    assert mean(result, "determined", "all heads") == pytest.approx(1)


def test_a_row_is_a_budget_of_one_that_a_sink_shares(result):
    budget = functools.partial(mean, result, "budget")
    assert budget("softmax error", arm="none") < EXACT
    assert budget("sink error", arm="none") < EXACT
    assert budget("dropout", arm="none") == pytest.approx(1, abs=0.05)
    # A match is 4 above ln n and the sink 2: e⁴ / (e⁴ + e²) of the two, and the other keys add a little.
    assert 0 < budget("beside a sink", arm="match") - 1 / (1 + math.exp(-2)) < 0.03
    assert budget("twin, softmax", arm="match") == pytest.approx(
        1 / (1 + mean(result, "planted", "easy, weight")), abs=0.01
    )
    assert budget("twin, sigmoid", arm="match") == pytest.approx(1)


def test_biases_cancel_or_are_constants_or_matter(result):
    change = functools.partial(mean, result, "biases", "change")
    assert change(arm="key", positions="none") < EXACT < 0.1 < change(arm="key", positions="rotary")
    for kind in ("none", "rotary"):
        assert change(arm="query", positions=kind) > 0.1
        assert change(arm="value, beyond b_V W_O", positions=kind) < EXACT < change(arm="value", positions=kind)


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert set(result.measurements["unit"]) == set(result.seconds)
    assert not result.measurements[["unit", "part", "measure", "seed", "value"]].isna().any(axis=None)
    assert len(result.figure().axes) == 8
    assert len(result.tables) == 5


def made(losses, accuracies, *, edge=(), diagonal=0.2):
    """Rows of training: the loss of an arm over separate projections, and the accuracy of runs of the relation task."""

    def rows(part, arm, step, measure, values):
        for rate in (0.01, 0.02, 0.03):
            # 0.02 is the best rate, unless the best is to be at the edge
            worse = 0.0 if rate == (0.01 if arm in edge else 0.02) else 0.5
            for seed, value in enumerate(values):
                found = value + worse if measure == "loss" else value
                yield {
                    "part": part,
                    "arm": arm,
                    "rate": rate,
                    "seed": seed,
                    "step": step,
                    "measure": measure,
                    "value": found,
                }

    found = []
    for arm in LANGUAGE_ARMS:
        noise = 2 + 0.1 * np.arange(5)
        found += rows("language", arm, 300, "accuracy", noise)
        found += rows("language", arm, 300, "loss", losses.get(arm, 0.0) + noise + 1e-3 * np.arange(5))
        for step, value in ((0, 0.6), (300, diagonal)):
            found += rows("language", arm, step, "diagonal", value + 0.01 * np.arange(5))
    for arm in RELATION_ARMS:
        found += rows("relation", arm, 600, "loss", np.arange(10) / 10)
        found += rows("relation", arm, 600, "accuracy", accuracies[arm])
    return pd.DataFrame(found)


LEARNED = {**dict.fromkeys(RELATION_ARMS, [1.0] * 10), "qk": [0.5] * 10, "qk_signed": [0.8] * 10}


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({"losses": {"qkv": 0.1, "qk": 0.08}}, {"P2": "refined", "P3": "refined", "P6": "refined", "P7": "refined"}),
        ({"losses": {"qkv": 0.1, "qk": 0.08, "kv": 0.05, "biases": -0.1}}, {"P6": "refuted", "P7": "confirmed"}),
        ({"losses": {}, "edge": ("qkv",)}, {"P2": "refined", "P7": "inconclusive"}),
        ({"losses": {}, "edge": ("separate",)}, dict.fromkeys(("P2", "P3", "P6", "P7"), "inconclusive")),
        ({"losses": {}, "accuracies": {**LEARNED, "qk": [1.0] * 10}}, {"P3": "refuted", "P7": "refuted"}),
        ({"losses": {}, "accuracies": {**LEARNED, "qk": [1.0, 0.5] * 5}}, {"P3": "inconclusive"}),
    ],
)
def test_training_settles_what_rests_on_it(result, changes, verdicts):
    config = EXPERIMENT.preset("smoke", trained=TRAINED)
    simulations = result.measurements.query("part != 'language'")
    told = {x.claim.id: x for x in judge(config, pd.concat([simulations, made(**{"accuracies": LEARNED, **changes})]))}
    assert {claim: told[claim].verdict for claim in verdicts} == verdicts
    assert told["P2"].evidence["begun"].value == pytest.approx(0.62)


def test_every_arm_is_told_and_drawn(result):
    config = EXPERIMENT.preset("smoke", trained=TRAINED)
    simulations = result.measurements.query("part != 'language'")
    measurements = pd.concat([simulations, made({"qkv": 0.1}, LEARNED, edge=("kv",))])
    *_, table = EXPERIMENT.tables(config, measurements)
    assert [row[1] for row in table.rows] == [*RELATION_ARMS.values(), *LANGUAGE_ARMS.values()]
    assert {row[1] for row in table.rows if row[4] == "no"} == {"K = V"}
    assert len(EXPERIMENT.figure(config, measurements).axes) == 8


def test_arms_of_the_language_model_have_one_number_of_parameters():
    counts = {arm: free_parameters(language_arm(arm, 2, 50)) for arm in LANGUAGE_ARMS}
    with_biases = counts.pop("biases")
    assert len(set(counts.values())) == 1
    assert with_biases == counts["separate"] + 2 * 3 * MODEL_WIDTH
    d, f = MODEL_WIDTH, 4 * MODEL_WIDTH
    assert counts["separate"] == 50 * d + 2 * (4 * d * d + 2 * d * f + 2 * d) + d
    whole = free_parameters(relation_arm("separate"))
    assert {free_parameters(relation_arm(arm)) for arm in RELATION_ARMS if arm != "separate"} == {whole - d * d}


def test_seeds_begin_with_the_same_matrices_in_every_arm():
    models = [language_arm(arm, 1, 50).make_model(rngs=nnx.Rngs(3)) for arm in ("separate", "qkv", "biases")]
    for name in ("query_weight", "key_weight", "value_weight", "output_weight"):
        first, *others = (np.asarray(getattr(model.layers.attention, name)[...]) for model in models)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("arm", "same"),
    [
        ("qk", {("query", "key")}),
        ("kv", {("key", "value")}),
        ("qkv", {("query", "key"), ("key", "value"), ("query", "value")}),
    ],
)
def test_a_tie_makes_one_matrix_of_those_it_names_and_no_other(arm, same):
    names = ("query", "key", "value")
    attention = {f"{name}_weight": object() for name in names}
    LANGUAGE_TIES[arm][0]({"layers": {"attention": attention}})
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    assert {(a, b) for a, b in pairs if attention[f"{a}_weight"] is attention[f"{b}_weight"]} == same


def test_signs_leave_the_scores_symmetric_and_let_the_own_be_negative():
    rng = np.random.default_rng(0)
    attention = {"query_weight": rng.standard_normal((2, 6, 3, 4))}  # [L, D, N, H]
    query_is_key_but_for_signs({"layers": {"attention": attention}})
    x = rng.standard_normal((5, 6))
    query, keys = (np.einsum("td,ldnh->lnth", x, attention[f"{name}_weight"]) for name in ("query", "key"))
    scores = query @ np.swapaxes(keys, -1, -2)
    np.testing.assert_allclose(scores, np.swapaxes(scores, -1, -2), rtol=1e-5, atol=1e-5)
    own = np.diagonal(scores, axis1=-2, axis2=-1)
    assert own.min() < 0 < own.max()


def test_tokens_that_may_not_see_themselves_see_all_before_and_the_first_itself():
    seen = masks.materialize(masks.Causal() & OTHERS.keywords["mask"], 4, 4)
    np.testing.assert_array_equal(seen.reshape(4, 4), [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])


def test_the_weight_of_a_token_on_itself_is_told_in_evaluation_alone():
    def tiny(window):
        sizes = {"vocabulary_size": 5, "num_layers": 2, "model_width": 8, "num_heads": 2, "mlp_width": 8}
        return Transformer(TransformerConfig(**sizes, local_window_size=window, scale_rule=0.0), rngs=nnx.Rngs(0))

    tokens = jnp.arange(4)[None, :]
    batch = Batch(tokens, tokens, jnp.ones((1, 4)))
    for window, expected in (((0, 0), 1.0), (None, (1 / 2 + 1 / 3 + 1 / 4) / 3)):  # a scale of 0: all alike
        _, measured = loss_and_diagonal(tiny(window), batch, key=None)
        assert float(measured["diagonal"]) == pytest.approx(expected, rel=1e-5)
    _, measured = loss_and_diagonal(tiny(None), batch, key=jax.random.key(0))
    assert set(measured) == {"accuracy"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (8, 4)}, "widths must hold at least two numbers, ascending"),
        ({"lengths": (16,)}, "lengths must hold at least two numbers, ascending"),
        ({"rows": 17}, "rows must be at most tokens = 32 and the shortest n = 16, got 17"),
        ({"tokens": 8}, "rows must be at most tokens = 8"),
        ({"rates": (0.1, 0.01)}, "rates must ascend by one factor"),
        ({"stream_width": 36}, "stream_width must be a multiple of 2 · heads = 8"),
        ({"trained": ("relation_qk",)}, "trained must hold relation_separate beside other arms of its kind"),
        ({"steps": 3}, "steps must be a multiple of evaluations = 2, got 3"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ProjectionsConfig(**changes)
