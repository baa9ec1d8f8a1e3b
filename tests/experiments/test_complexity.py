"""The smoke run, its readers on made-up rows, and the layer's FLOPs. No time is judged here."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments import complexity, counting
from experiments.complexity import EXPERIMENT, ComplexityConfig
from experiments.complexity import results as complexity_results
from experiments.mechanisms import MECHANISMS, apply_layer, bare, make_layer

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return complexity.run(CONFIG)


def made_up(config: ComplexityConfig, seconds) -> pd.DataFrame:
    """Timed rows of every sweep: `seconds(mechanism, stage, vary, size)`, times a factor that a round shares."""
    sweeps = {"n": config.lengths, "d": config.widths, "layer": config.layer_lengths}
    rows = []
    for vary, sizes in sweeps.items():
        names, stages = config.mechanisms, complexity.STAGES
        if vary == "layer":
            names, stages = ("bare", *names), ("forward",)
        for name, stage, size, number in itertools.product(names, stages, sizes, range(config.rounds)):
            where = {"vary": vary, "mechanism": name, "stage": stage, "n" if vary == "layer" else vary: size}
            rows.append({**where, "round": number, "seconds": seconds(name, stage, vary, size) * (1 + number % 3)})
    return pd.DataFrame(rows)


def test_too_few_rounds_say_nothing_about_time_and_memory_needs_none(result):
    time, memory = result.claims
    assert (time.claim.id, time.verdict) == ("C1", "inconclusive")
    assert "7 independent runs" in time.because
    assert (memory.claim.id, memory.verdict) == ("C1b", "refuted")


def test_memory_of_scores_is_a_square_of_n_whatever_d_is(result):
    found = result.claims[1].evidence
    assert found["scores_n"].value == pytest.approx(2, abs=0.05)
    assert found["scores_d"].value == pytest.approx(0, abs=0.1)
    assert found["scores_h"].value == pytest.approx(1, abs=0.05)
    for vary in "ndh":
        assert found[f"activations_{vary}"].value == pytest.approx(1, abs=0.05)


def test_the_flops_of_a_layer_cross_near_six_times_its_width(result):
    assert result.claims[0].evidence["crossing_counted"].value == pytest.approx(1, abs=0.05)


def test_what_is_kept_for_backward_is_counted_in_bytes():
    array = jax.ShapeDtypeStruct((8, 2, 4), jnp.float32)
    kept = complexity._kept_bytes(lambda query, key, value: query * key + value, array)
    assert kept == 2 * 4 * 8 * 2 * 4  # query and key; a sum needs nothing


def test_exponents_are_read_from_rows():
    table = made_up(CONFIG, lambda name, stage, vary, size: size ** (2.0 if vary == "n" else 0.5))
    for name, stage in itertools.product(CONFIG.mechanisms, complexity.STAGES):
        for vary, exponent in (("n", 2), ("d", 0.5)):
            found = complexity_results.time_exponent(table, vary, name, stage)
            assert (found.value, found.low, found.high) == pytest.approx((exponent,) * 3)
            assert found.count == CONFIG.rounds


@pytest.mark.parametrize("where", [0.6, 1.0, 1.7, 0.1, 9.0])
def test_the_crossing_is_where_a_layer_takes_twice_what_is_left_without_attention(where):
    half = 6 * CONFIG.model_width * where

    def seconds(name, stage, vary, size):
        return size if name == "bare" else size * (1 + size / half)

    found = complexity_results.crossing_timed(CONFIG, made_up(CONFIG, seconds), "dense")
    expected = where if 0.5 <= where <= 2 else 0 if where < 0.5 else np.inf
    assert found.value == pytest.approx(expected, rel=1e-6)


def test_flops_of_the_layer():
    layer, x = make_layer(jax.random.key(0), 2, 16), jnp.ones((256, 32))
    flops = {
        name: counting.xla_cost(lambda layer, x, attend=attend: apply_layer(layer, x, attend), layer, x).flops
        for name, attend in (("bare", bare), ("dense", MECHANISMS["dense"].attend))
    }
    assert flops["bare"] == pytest.approx(24 * 256 * 32**2, rel=0.03)
    assert flops["dense"] - flops["bare"] == pytest.approx(
        4 * 256**2 * 32, rel=0.12
    )  # the softmax, with so narrow heads


def test_all_is_shown(result):
    assert len(result.figure().axes) == 4
    assert [len(table.rows) for table in result.tables] == [4, 3, 6]
    timed = result.measurements["seconds"].notna()
    assert set(result.measurements[timed]["round"]) == set(range(7))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lengths": (64,)}, "lengths must hold two sizes"),
        ({"memory_heads": (2,)}, "memory_heads must hold two sizes"),
        ({"mechanisms": ("dense", "xla")}, "mechanisms must hold dense and blockwise"),
        ({"layer_shares": (0.5, 1.0)}, "layer_shares must hold two up to 1 and one above it"),
    ],
)
def test_flags_that_settle_nothing_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        ComplexityConfig(**fields)
