"""The tuning guide: what it takes, and that each of its steps measures what it says."""

import dataclasses

import numpy as np
import pytest

import attn_jax
from experiments import tune
from experiments.tune import chosen, results
from experiments.tune.config import TuneConfig
from experiments.tune.widths import choose

CONFIG = TuneConfig(width=64, layers=1, steps=8, seeds=2, length=18, symbols=8, long=768, rates=(3e-3,))


@pytest.fixture(scope="module")
def result():
    return tune.run(CONFIG)


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ({32: [1.0, 1.1, 0.9], 64: [2.0, 2.1, 1.9], 128: [3.0, 3.1, 2.9]}, 32),  # the best, and all others worse
        ({32: [1.0, 1.1, 0.9], 64: [1.05, 1.0, 1.0], 128: [3.0, 3.1, 2.9]}, 64),  # 64 cannot be told from it
        ({32: [1.0, 1.1, 0.9], 64: [2.0, 2.1, 1.9], 128: [1.05, 1.0, 1.0]}, 128),  # nor 128, though 64 can
        ({32: [np.nan, 1.1, 0.9], 64: [2.0, 2.1, 1.9]}, 64),  # one that diverges is not taken
    ],
)
def test_the_widest_that_cannot_be_told_from_the_best_is_taken(losses, taken):
    assert choose({width: np.array(x) for width, x in losses.items()}) == taken


def test_nothing_is_taken_where_all_diverge():
    with pytest.raises(RuntimeError, match="diverged"):
        choose({32: np.array([np.nan, 1.0])})


def test_every_step_says_what_it_found(result):
    losses = results.final_losses(CONFIG, result.measurements)
    assert {width: x.shape for width, x in losses.items()} == {32: (2,), 64: (2,)}
    heads = CONFIG.width // choose(losses)
    scales = result.measurements.query("measure == 'scale'")
    assert len(scales) == heads
    np.testing.assert_allclose(scales["value"], choose(losses) ** -0.5, rtol=1e-2)
    assert set(scales["note"]) == {"inverse_sqrt"}
    assert result.measurements.query("measure == 'faults'")["value"].tolist() == [0.0]
    entropy = results.per_head(result.measurements, "normalized_entropy")
    assert entropy.shape == (1, heads)
    assert ((entropy > 0) & (entropy <= 1 + 1e-6)).all()
    value = result.measurements.set_index("measure")["value"]
    assert value["gradient_apart"] < 1e-5
    assert value["memory_tiled"] < value["memory_dense"]
    assert [table.title[:2] for table in result.tables] == ["1.", "2.", "3.", "4.", "5."]
    assert len(result.figure().axes) == 2


def test_a_wrong_scale_is_read_off():
    config = TuneConfig(width=64, layers=1, steps=4, seeds=2, length=18, symbols=8, long=64, rates=(3e-3,))

    def halved(query, key, value, **options):
        return attn_jax.dot_product_attention(query, key, value, **{**options, "scale": 0.5 * query.shape[-1] ** -0.5})

    model = tune.widths.train(config, 64).model
    model.config = dataclasses.replace(model.config, attention_fn=halved)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen, "_model", lambda config: model)
        rows = chosen.scale(config)
    assert {row["note"] for row in rows if row["measure"] == "scale"} == {"half_inverse_sqrt"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"width": 100}, "width must be a multiple of 32"),
        ({"steps": 6}, "multiple of evaluations"),
        ({"rates": (1e-3, 1e-3)}, "rates must"),
        ({"task": "sorting"}, "task must be one of"),
    ],
)
def test_bad_flags(flags, says):
    with pytest.raises(ValueError, match=says):
        TuneConfig(**flags)
