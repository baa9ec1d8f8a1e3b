"""What a look measures, against plain gradients; verdicts on series made by hand; and the smoke run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training import losses
from experiments import entropy_over_training
from experiments.entropy_over_training import EXPERIMENT, looked_at, texts
from experiments.entropy_over_training import results as entropy_results
from experiments.entropy_over_training.config import EntropyConfig
from experiments.entropy_over_training.results import quantity, rank_correlation

SMOKE = EXPERIMENT.preset("smoke")
MADE = EntropyConfig(text_sizes=(100, 1000, 10_000), steps=40, evaluations=4, seeds=5, num_layers=1)


@pytest.fixture(scope="module")
def result():
    return entropy_over_training.run(SMOKE)


def made(*, entropy_follows_gap: bool, share_follows_entropy: bool, collapse_starves: bool = False) -> pd.DataFrame:
    """Runs whose entropy falls by heads, whose gap grows on smaller texts, and whose shares follow the entropy or not."""
    rows = []
    for place, size in enumerate(MADE.sizes):
        for seed in range(5):
            for look, step in enumerate(MADE.looks):
                where = {"size": size, "rate": 0.01, "seed": seed, "step": step}
                gap = look * (3 - place) / 10
                rows.append({**where, "measure": "loss", "head": -1, "value": 3.0 - look / 10})
                rows.append({**where, "measure": "held_out", "head": -1, "value": 3.0 - look / 10 + gap})
                for head in range(4):
                    drop = gap if entropy_follows_gap else look * place / 10
                    entropy = 0.9 - drop / 2 - head / 100 - seed / 1000
                    share = np.exp(entropy if share_follows_entropy else -entropy)
                    rows.append({**where, "measure": "entropy", "head": head, "value": entropy})
                    rows.append({**where, "measure": "share", "head": head, "value": share})
                if place == 2:
                    collapsed = [{**row, "rate": 0.1} for row in rows[-10:]]
                    for row in collapsed:
                        row["value"] *= {"entropy": 0.05, "share": 0.01 if collapse_starves else 2}.get(
                            row["measure"], 1
                        )
                    rows += collapsed
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


@pytest.mark.parametrize(
    ("follows", "verdict", "because"),
    [
        ((True, True, False), "confirmed", "correlation of entropy with the gap -1.00 over texts"),
        ((True, False, False), "refined", "no sign of starved gradients"),
        ((False, True, False), "refined", "no sign of overfitting"),
        ((False, False, True), "refined", "the share is ×0.01"),
        ((False, False, False), "refuted", "no sign of overfitting; it is no sign of starved gradients"),
    ],
)
def test_verdicts_follow_from_what_goes_together(follows, verdict, because):
    names = ("entropy_follows_gap", "share_follows_entropy", "collapse_starves")
    table = made(**dict(zip(names, follows, strict=True)))
    (outcome,) = entropy_results.judge(MADE, table)
    assert outcome.verdict == verdict
    assert because in outcome.because


def test_quantities_are_of_texts_seeds_and_looks():
    table = made(entropy_follows_gap=True, share_follows_entropy=True)
    gap = quantity(MADE, table, "gap")
    assert gap.shape == (3, 5, 5)
    np.testing.assert_allclose(gap[:, 0, -1], [1.2, 0.8, 0.4])
    entropy = quantity(MADE, table, "entropy")
    np.testing.assert_allclose(entropy[0, 2], 0.9 - np.arange(5) * 0.15 - 0.015 - 0.002)
    np.testing.assert_allclose(quantity(MADE, table, "share"), entropy)


@pytest.mark.parametrize(
    ("second", "expected"), [([1, 4, 9], 1.0), ([3, 2, 1], -1.0), ([2, 2, 2], 0.0), ([1, 3, 2], 0.5)]
)
def test_rank_correlations(second, expected):
    assert rank_correlation(np.arange(3.0), np.asarray(second, float)) == pytest.approx(expected)


def test_a_small_text_is_repeated_and_known_by_heart():
    task, seen = texts(50, 8)
    np.testing.assert_array_equal(task.training[:50], task.training[50:100])
    np.testing.assert_array_equal(seen.held_out[:100], task.training[:100])
    assert task.held_out.shape == seen.held_out.shape
    whole, _ = texts(100_000, 8)
    assert whole.training.shape == task.training.shape
    np.testing.assert_array_equal(whole.held_out, task.held_out)
    assert not np.array_equal(whole.training[:100], task.training[:100])


def test_a_text_cannot_be_larger_than_it_is():
    with pytest.raises(ValueError, match=r"text_sizes must be at most \d+, what the text has, got 9000000"):
        texts(9_000_000, 8)


def test_a_look_measures_each_head():
    task, _ = texts(1000, 8)
    config = TransformerConfig(vocabulary_size=task.vocabulary_size, num_layers=2, model_width=8, num_heads=2)
    model, batch = Transformer(config, rngs=nnx.Rngs(0)), task.batch(jax.random.key(0), 0, 3)
    loss, measured = jax.jit(functools.partial(looked_at, key=None))(model, batch)

    def objective(model):
        logits, layers = model(batch.inputs, return_statistics=("normalized_entropy",))
        return losses.cross_entropy(logits, batch.targets)[0], layers

    (expected, layers), gradient = nnx.value_and_grad(objective, has_aux=True)(model)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    attention = gradient.layers.attention
    for layer in range(2):
        for head in range(2):
            query, key, value = (
                jnp.linalg.norm(getattr(attention, f"{name}_weight")[...][layer, :, head])
                for name in ("query", "key", "value")
            )
            np.testing.assert_allclose(measured["share"][layer, head], (query + key) / value, rtol=1e-5)
    rows = np.asarray(layers[1].normalized_entropy)  # [B, T, N]; the first row sees one key and reads 1
    assert (rows[:, 0] == 1).all()
    np.testing.assert_allclose(measured["entropy"][1], rows[:, 1:].mean(axis=(0, 1)), rtol=1e-6)


def test_small_texts_are_overfitted_and_large_ones_are_not(result):
    gap = quantity(SMOKE, result.measurements, "gap")
    assert (gap[0, :, -1] > 1).all()
    assert (gap[0, :, -1] > gap[-1, :, -1] + 0.5).all()
    assert (np.abs(gap[:, :, 0]) < 0.5).all()  # before the first step


def test_runs_of_a_seed_begin_alike(result):
    start = result.measurements.query("step == 0 and measure == 'held_out'").groupby("seed")["value"]
    assert (start.nunique() == 1).all()
    assert start.first().nunique() == SMOKE.seeds


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    heads = SMOKE.num_layers * SMOKE.num_heads
    assert len(result.measurements) == 4 * 5 * 4 * (2 + 2 * heads)
    assert not result.measurements["value"].isna().any()
    assert len(result.figure().axes) == 4
    assert [len(table.rows) for table in result.tables] == [4]
    assert len(result.claims) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 10, "evaluations": 4}, "steps must be a multiple of evaluations = 4, got 10"),
        ({"text_sizes": (1000, 2000)}, "text_sizes must hold at least three sizes"),
        ({"model_width": 12, "num_heads": 4}, "model_width must be a multiple of 2 num_heads = 8, got 12"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EntropyConfig(**changes)
