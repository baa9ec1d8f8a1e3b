"""The smoke run, the equal sizes of its models, and the data and evidence it is made of."""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

from experiments import inductive_bias
from experiments.inductive_bias import EXPERIMENT, results, trained
from experiments.inductive_bias.config import PARTS, InductiveBiasConfig, count_parameters
from experiments.inductive_bias.results import Measured
from experiments.inductive_bias.series import MEMORY, NOISE, PERIODS, draw_series
from experiments.inductive_bias.trained import Data

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return inductive_bias.run(CONFIG)


def test_the_smoke_run_settles_nothing_and_measures_all(result):
    assert {x.claim.id: x.verdict for x in result.claims} == {"C5": "inconclusive", "C5b": "inconclusive"}
    assert not result.measurements["value"].isna().any()
    assert set(result.measurements["unit"]) == {"nearest", "digits_convolution", "series_convolution"}
    sizes = result.measurements.query("measure == 'loss'").groupby("part")["size"].apply(set)
    assert dict(sizes) == {"digits": {5, 10}, "series": {2, 4}}
    assert len(result.figure().axes) == 2
    assert [len(table.rows) for table in result.tables] == [2, 1]
    assert np.isnan(Measured(CONFIG, result.measurements).lead("digits", "gru", 5)).all()  # not asked for


def test_models_have_equal_parameters():
    config = EXPERIMENT.preset("quick")
    for part in PARTS:
        counts = [count_parameters(config.transformer(arm, part)) for arm in config.arms]
        assert max(counts) < 1.01 * min(counts)
        assert config.transformer("attention", part).mlp_width == 2 * config.model_width
    assert config.layers * (config.width - 1) >= 15  # the last of 16 patches sees the first
    mixers = [config.transformer(arm, "digits").mixer for arm in config.arms]
    assert mixers == ["softmax", "gru", "convolution"]


def test_a_training_set_is_the_first_of_the_largest():
    for part in PARTS:
        data = Data(InductiveBiasConfig(series=(3, 7), images=(3, 7), arms=("gru",)), part)
        few, many = (jax.tree.map(np.asarray, data.of(size)) for size in (3, 7))
        rows = [0, 1, 2, 0, 1, 2, 0]
        name = "training_patches" if part == "digits" else "training"
        np.testing.assert_array_equal(getattr(few, name), getattr(many, name)[rows])
        if part == "digits":
            np.testing.assert_array_equal(few.training_labels, many.training_labels[rows])
        assert few.num_held_out == many.num_held_out >= 240


def test_series_have_their_season_and_noise():
    levels = 4096  # as good as none
    task = draw_series(0, training=2000, held_out=8, length=40, levels=levels)
    assert task.training.shape == (2000, 41)
    assert task.held_out.shape == (8, 41)
    batch = task.evaluation(2, 4)
    np.testing.assert_array_equal(batch.targets[..., :-1], batch.inputs[..., 1:])
    assert batch.inputs.shape == (2, 4, 40)
    assert (batch.weights == 1).all()
    drawn = np.asarray(jax.jit(lambda: task.batch(jax.random.key(0), step=0, size=64))().inputs)
    known = {row.tobytes() for row in np.asarray(task.training[:, :-1])}
    assert all(row.tobytes() in known for row in drawn)

    values = (np.asarray(task.training) + 0.5) / levels * 4 - 2
    assert np.var(values) == pytest.approx(0.5 + NOISE**2, rel=0.05)
    # Best sinusoid of each series over a grid of periods: what is left is noise that remembers.
    t, best, rest = np.arange(41), np.full(200, np.inf), np.zeros((200, 41))
    for period in np.linspace(*PERIODS, 141):
        basis = np.stack([np.sin(2 * np.pi * t / period), np.cos(2 * np.pi * t / period)], 1)
        left = values[:200] - (np.linalg.lstsq(basis, values[:200].T, rcond=None)[0].T @ basis.T)
        better = (left**2).sum(1) < best
        best[better], rest[better] = (left**2).sum(1)[better], left[better]
    assert np.std(rest) == pytest.approx(NOISE, rel=0.15)
    assert np.mean(rest[:, 1:] * rest[:, :-1]) / np.var(rest) == pytest.approx(MEMORY, abs=0.12)


def test_the_nearest_image_is_found_by_looking_at_every_one():
    data = Data(CONFIG, "digits")
    task = data.whole
    for row in trained.nearest(data):
        size, right = row["size"], []
        for patches, label in zip(task.held_out_patches[: CONFIG.held_out], task.held_out_labels, strict=False):
            pixels = np.asarray(task.pixels(patches))
            distances = [np.sum((np.asarray(task.pixels(p)) - pixels) ** 2) for p in task.training_patches[:size]]
            right.append(int(task.training_labels[int(np.argmin(distances))]) == int(label))
        assert row["value"] == pytest.approx(np.mean(right))


def test_the_evidence_is_paired_and_signed():
    """Attention is worse by 0.3 of the convolution and 0.2 of the GRU with few, by 0.1 and 0.05 with many."""
    behind = {"attention": (0.0, 0.0), "convolution": (0.3, 0.1), "gru": (0.2, 0.05)}
    rows = [
        {"part": part, "size": size, "arm": arm, "rate": rate, "seed": seed, "step": 2, "measure": measure,
         "value": 0.1 * seed + (ahead if measure == "accuracy" else 9 - ahead) + (measure == "loss") * abs(rate - 0.01)}
        for part in PARTS
        for arm, aheads in behind.items()
        for size, ahead in zip(CONFIG.sizes(part), aheads, strict=True)
        for rate in (0.005, 0.01, 0.02)
        for seed in range(5)
        for measure in ("accuracy", "loss")
    ]  # fmt: skip
    config = dataclasses.replace(CONFIG, arms=tuple(behind), seeds=5)
    digits, series = results.judge(config, pd.DataFrame(rows))
    for outcome in (digits, series):
        assert outcome.verdict == "confirmed"
        found = {name: outcome.evidence[name] for name in ("little_convolution", "little_gru", "much_convolution")}
        assert [x.value for x in found.values()] == pytest.approx([0.3, 0.2, 0.1])
        assert max(x.high - x.low for x in found.values()) < 1e-6  # paired: what seeds differ by cancels
    assert digits.evidence["shrinks_gru"].value == pytest.approx(0.15)
    edge = pd.DataFrame(rows).query("not (rate == 0.02 and arm == 'gru')")
    assert {x.verdict for x in results.judge(config, edge)} == {"inconclusive"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (5,)}, r"images must ascend and be two or more, got \(5,\)"),
        ({"series": (5, 4)}, "series must ascend and be two or more"),
        ({"held_out": 250}, "held_out must be a multiple of batch_size = 16, got 250"),
        ({"num_heads": 5}, "model_width must be a multiple of num_heads"),
    ],
)
def test_wrong_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        InductiveBiasConfig(**changes)
