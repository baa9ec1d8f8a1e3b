"""The smoke run against what algebra says of positions, and the parts it is made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax import positions as library
from attn_jax.nn import Transformer
from attn_jax.training import losses, take_run
from attn_jax.training.tasks import LanguageModel, Lookup
from experiments import positions
from experiments.claims.positions import EVALUATED
from experiments.positions import EXPERIMENT, results, simulated
from experiments.positions.config import KINDS, SCALED, PositionsConfig
from experiments.positions.measured import Measured
from experiments.positions.trained import Models, all_tokens, answered, last_tokens, told_of_position, told_with_squares

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return positions.run(CONFIG)


@pytest.fixture(scope="module")
def measured(result):
    return Measured(CONFIG, result.measurements)


@pytest.fixture(scope="module")
def models():
    text = jax.random.randint(jax.random.key(0), (300,), 0, 5, jnp.int32)
    return Models(CONFIG, "language", LanguageModel(text, text, 5, CONFIG.length))


def test_scores_are_settled_and_what_needs_training_is_not(result):
    verdicts = {x.claim.id: x.verdict for x in result.claims}
    assert verdicts == {"X1": "inconclusive", "X2": "refined", "X3": "inconclusive"}


def test_only_a_bfloat16_table_loses_the_distance(measured):
    fixed, rounded, table, coarse = (measured.scores(arm) for arm in simulated.SCORE_ARMS)
    assert fixed.shape == (CONFIG.simulations, len(CONFIG.score_positions))
    assert fixed.max() < 1e-5
    assert rounded.max() < 0.01
    np.testing.assert_allclose(rounded.mean(axis=0), rounded.mean(), rtol=0.3)  # at every position alike
    assert 1e-4 < table[:, -1].min() < table[:, -1].max() < 0.01
    assert coarse[:, -1].min() > 0.1
    assert (results.reach(CONFIG, coarse) < 1024).all()


def test_exact_scores_are_those_of_rotation_matrices():
    query, key = np.random.default_rng(0).standard_normal((2, 3, 4))
    for at, distance in ((0, 0), (5, 1), (1000, 37)):
        turned = []
        for x, p in ((query, at + distance), (key, at)):
            y = np.empty_like(x)
            for i, frequency in enumerate((1.0, 0.01)):  # 10000^(-2i/4), pairs (i, i + 2)
                c, s = np.cos(p * frequency), np.sin(p * frequency)
                y[:, [i, i + 2]] = x[:, [i, i + 2]] @ np.array([[c, s], [-s, c]])
            turned.append(y)
        expected = np.sum(turned[0] * turned[1], axis=-1)
        np.testing.assert_allclose(simulated.exact_scores(query, key, np.array([distance]))[0], expected, rtol=1e-12)


def test_a_table_is_right_where_its_dtype_holds_the_phase():
    x = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    at = np.array([0, 1, 7, 100])
    np.testing.assert_allclose(simulated.rotate_by_table(x, at), simulated.rotate_fixed(x, at), atol=1e-5)
    half = x.astype(jnp.bfloat16)
    turned = simulated.rotate_by_table(half, np.array([256, 257]))
    np.testing.assert_array_equal(turned[0], turned[1])  # bfloat16 has no 257
    assert not np.array_equal(*simulated.rotate_fixed(half, np.array([256, 257])))


@pytest.mark.parametrize(
    ("row", "expected"), [([0.5, 0.5, 0.5], 0), ([0, 0.5, 0], 4), ([0, 0, 0.01], 16), ([0, 0, 0], 64)]
)
def test_a_table_reaches_up_to_its_first_wrong_score(row, expected):
    config = PositionsConfig(score_positions=(4, 16, 64))
    assert results.reach(config, np.array([row, row])).tolist() == [expected] * 2


def test_a_shift_turns_rotary_queries_and_no_bit_of_the_values_of_the_first_layer(measured):
    assert (measured.shift("rotary", "value", 0, "largest") == 0).all()
    assert measured.shift("rotary", "query", 0).min() > 0.1
    assert measured.shift("rotary", "value", 1).max() < 1e-4  # scores depend on the distance, and so do outputs
    for of in ("query", "key", "value"):
        assert measured.shift("sinusoidal", of, 0).min() > 0.1
    assert np.isnan(measured.shift("learned", "value", 0)).all()  # not asked for


def test_what_was_left_out_is_not_known(measured):
    assert measured.probe("none", 1, "before").shape == (CONFIG.seeds,)  # which took no training
    for values in (measured.probe("none", 1), measured.accuracy("alibi", "beyond"), measured.excess("yarn")):
        assert np.isnan(values).all()
    assert np.isnan(measured.harm("yarn").value)
    assert np.isnan(measured.recalls("rotary").value)  # two seeds are no share
    assert measured.accuracy("ntk", "beyond").shape == (CONFIG.lookup_seeds,)


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert set(result.measurements["unit"]) == {"scores", "language_rotary", "lookup_rotary"}
    assert not result.measurements["value"].isna().any()
    assert len(result.figure().axes) == 8
    scores, trained = result.tables
    assert len(scores.rows) == len(CONFIG.score_positions)
    assert [row[0] for row in trained.rows] == [EVALUATED["ntk"], EVALUATED["rotary"]]


def test_given_the_last_tokens_a_model_reads_a_window_from_position_zero(models):
    state = models.read_as(models.rotary, "sinusoidal")  # whose positions are not relative
    text = jax.tree.map(lambda x: x[0], dataclasses.replace(models.task, length=CONFIG.farthest).evaluation(1, 2))
    last = np.asarray(last_tokens(state, text, length=CONFIG.length, every=CONFIG.every))
    every = np.asarray(all_tokens(state, text, every=CONFIG.every))
    assert every.shape == (CONFIG.seeds, len(CONFIG.places))
    at = [place - CONFIG.length for place in CONFIG.places if place >= CONFIG.length - 1]
    assert last.shape == (CONFIG.seeds, len(at))
    np.testing.assert_allclose(last[:, 0], every[:, CONFIG.places.index(CONFIG.length - 1)], rtol=1e-5)
    model = take_run(state, 1).model
    end = CONFIG.places[-2]
    window = text.inputs[:, end + 1 - CONFIG.length : end + 1]
    expected = losses.token_losses(model(window)[:, -1], text.targets[:, end]).mean()
    assert last[1, -2] == pytest.approx(float(expected), rel=1e-5)
    expected = losses.token_losses(model(text.inputs)[:, end], text.targets[:, end]).mean()
    assert every[1, -2] == pytest.approx(float(expected), rel=1e-5)


def test_a_scaling_comes_at_evaluation_and_changes_no_parameter(models):
    changes = {"factor": CONFIG.extension, "original_length": CONFIG.length}
    assert CONFIG.scaling("dynamic") == library.DynamicNTK(**changes)
    assert CONFIG.scaling("yarn") == library.YaRN(**changes)
    assert (CONFIG.scaling("ntk"), CONFIG.scaling("linear")) == (library.NTK(4), library.Linear(4))
    assert {CONFIG.scaling(kind) for kind in KINDS} == {None}
    for arm in SCALED:
        state = models.read_as(models.rotary, arm)
        assert state.params is models.rotary.params
        assert take_run(state, 0).model.config == dataclasses.replace(
            models.of("rotary"), rotary_scaling=CONFIG.scaling(arm)
        )


def test_every_kind_begins_with_the_same_parameters(models):
    def leaves(kind):
        return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(models.begun(kind).params)}

    rotary = leaves("rotary")
    added = {"learned": ["['position_embedding']"], "relative": ["['layers']['attention']['relative_table']"]}
    for kind in ("alibi", "learned", "relative", "none"):
        others = leaves(kind)
        assert sorted(set(others) - set(rotary)) == added.get(kind, [])
        for name, x in rotary.items():
            np.testing.assert_array_equal(x, others[name])


def test_learned_positions_of_a_table_of_the_trained_length_are_refused(models):
    table = models.of("learned")
    assert table.max_length == CONFIG.extension * CONFIG.length  # what is read, of which training reads L
    short = dataclasses.replace(table, max_length=CONFIG.length)
    model = nnx.eval_shape(lambda: Transformer(short, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="token_ids must have T <= max_length = 8, got T = 9"):
        model(jnp.zeros((1, CONFIG.length + 1), jnp.int32))


def test_a_probe_tells_what_is_linear_in_values_it_was_not_fitted_to():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((8, 16, 1, 4))
    at = np.arange(16.0).reshape(1, 16, 1, 1)
    mixed = noise @ rng.standard_normal((4, 4)) + 0.01 * at
    assert told_of_position(noise) < 0.1
    assert told_of_position(noise + 100 * at) > 0.99
    # half of the variance is noise: r² of position + noise of equal variance
    assert told_of_position(np.concatenate([at + 21.25**0.5 * rng.standard_normal((2000, 16, 1, 1))])) == pytest.approx(
        0.5, abs=0.02
    )
    many = rng.standard_normal((8, 16, 1, 60))  # nearly as many as rows: fits what it sees, tells nothing
    assert told_of_position(many) < 0
    assert told_of_position(mixed) < 0.5
    means = rng.standard_normal((400, 16, 1, 4)) / np.sqrt(1 + at)  # of 1 + at numbers each: larger where they are few
    assert told_of_position(means) < 0.05 < 0.2 < told_with_squares(means)


def test_answers_are_right_where_the_largest_logit_is_the_target(models):
    task = Lookup(length=CONFIG.length)
    looked_up = Models(CONFIG, "lookup", task)
    batch = jax.tree.map(lambda x: x[0], task.evaluation(1, 3))
    right = np.asarray(answered(looked_up.rotary, batch))
    logits = take_run(looked_up.rotary, 1).model(batch.inputs)
    np.testing.assert_array_equal(right[1], np.argmax(logits, axis=-1) == batch.targets)


def made(harm, beyond, *, edge=()):
    """Rows of training: loss over that of the last tokens from the trained length on, accuracy on what is far back."""
    config, rows = PositionsConfig(), []
    rows += [
        {"part": "probe", "arm": "none", "seed": seed, "layer": 1, "when": "before", "measure": "values", "value": 0.5}
        for seed in range(config.seeds)
    ]
    for kind in config.kinds:
        for seed in range(config.seeds):
            for rate in config.rates:
                # 0.01 is the best rate, unless the best is to be at the edge
                loss = 2 + seed / 10 + (rate != (0.005 if kind in edge else 0.01))
                rows.append({"part": "language", "arm": kind, "rate": rate, "seed": seed, "step": 9, "value": loss})
                rows[-1]["measure"] = "loss"
            for when in ("before", "after"):
                for layer in (0, 1):
                    where = {"part": "probe", "arm": kind, "seed": seed, "layer": layer, "when": when}
                    rows.append({**where, "measure": "values", "value": 0.3 * layer + 0.01 * seed})
                    rows.append({**where, "measure": "squares", "value": 0.9})
            for place in config.places:
                last = seed + place
                if place >= config.length - 1:
                    rows.append({"part": "length", "arm": kind, "seed": seed, "position": place, "measure": "last"})
                    rows[-1]["value"] = last
                for arm in config.arms(kind):
                    above = (harm.get(arm, 0.0) + 1e-3 * seed) if place >= config.length else 7.0
                    rows.append({"part": "length", "arm": arm, "seed": seed, "position": place, "measure": "all"})
                    rows[-1]["value"] = last + above
        for of in ("query", "key", "value"):
            for layer, measure in ((0, "change"), (0, "largest"), (1, "change")):
                for seed in range(config.seeds):
                    still = of == "value" and kind not in ("learned", "sinusoidal")
                    rows.append({"part": "shift", "arm": kind, "of": of, "layer": layer, "measure": measure})
                    rows[-1] |= {"seed": seed, "value": 0.0 if still else 0.5}
    rows += [{**row, "arm": "sinusoidal"} for row in rows if row["part"] == "shift" and row["arm"] == "learned"]
    for kind in config.lookup_kinds:
        for arm in config.arms(kind):
            for seed in range(config.lookup_seeds):
                where = {"part": "lookup", "arm": arm, "seed": seed}
                rows.append({**where, "measure": "within", "value": 1.0})
                rows.append({**where, "measure": "beyond", "value": beyond.get(arm, [1.0] * 10)[seed]})
                rows += [{**where, "measure": "found", "least": 1 + 16 * i, "value": 0.5} for i in range(8)]
    return config, pd.DataFrame(rows)


LOST = {"rotary": [0.3] * 10, "learned": [0.2] * 10}


@pytest.mark.parametrize(
    ("harm", "beyond", "edge", "verdicts"),
    [
        ({"rotary": 0.1, "learned": 0.5}, LOST, (), {"X1": "refined", "X3": "confirmed"}),
        ({"rotary": 0.1, "learned": 0.5, "alibi": 0.03}, LOST, (), {"X3": "refined"}),
        ({"rotary": 0.1, "learned": 0.5}, {**LOST, "ntk": [1.0, 0.3] * 5}, (), {"X3": "inconclusive"}),
        ({}, {}, (), {"X3": "refuted"}),
        ({"rotary": 0.1, "learned": 0.5}, LOST, ("rotary",), {"X1": "inconclusive", "X3": "inconclusive"}),
        ({"rotary": 0.1, "learned": 0.5}, LOST, ("alibi",), {"X1": "refined", "X3": "inconclusive"}),
    ],
)
def test_training_settles_what_rests_on_it(result, harm, beyond, edge, verdicts):
    config, rows = made(harm, beyond, edge=edge)
    rows = pd.concat([result.measurements.query("part == 'scores'"), rows])
    told = {x.claim.id: x for x in EXPERIMENT.judge(config, rows)}
    assert {claim: told[claim].verdict for claim in verdicts} == verdicts
    found = told["X3"].evidence
    if not edge:  # what lies within L is not read
        assert found["harm_rotary"].value == pytest.approx(harm.get("rotary", 0.0) + 2e-3)
        assert found["recall_yarn"].value == 1
        assert found["near_ntk"].value == pytest.approx(harm.get("ntk", 0.0) + 2e-3)
    assert np.isnan(found["harm_relative"].value)
    assert len(EXPERIMENT.figure(config, rows).axes) == 8
    assert len(EXPERIMENT.tables(config, rows)[1].rows) == 7


def test_a_run_that_diverged_settles_nothing(result):
    config, rows = made({"rotary": 0.1, "learned": 0.5}, {**LOST, "alibi": [*[1.0] * 9, np.nan]})
    found = Measured(config, rows)
    assert np.isnan(found.recalls("alibi").value)
    assert found.recalls("rotary").value == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("alibi",)}, "kinds must hold rotary"),
        ({"lookup_kinds": ("alibi",)}, "lookup_kinds must hold rotary"),
        ({"score_positions": (16, 4)}, "score_positions must ascend"),
        ({"score_positions": (16,)}, "score_positions must hold at least two"),
        ({"distances": (1, 0)}, "distances must ascend"),
        ({"score_width": 5}, "score_width must be even"),
        ({"head_width": 5}, "head_width must be even"),
        ({"model_width": 33}, "model_width must be even"),
        ({"length": 30}, "every must divide length = 30, got 4"),
        ({"rates": (0.1, 0.01)}, "rates must ascend by one factor"),
        ({"kinds": ("rotary", "learnt")}, "kinds must be one of"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PositionsConfig(**changes)
