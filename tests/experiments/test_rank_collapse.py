"""The smoke run against what theory says of each arm, and the lines against series that are known."""

import math

import numpy as np
import pytest

from experiments import rank_collapse
from experiments.rank_collapse import EXPERIMENT, CollapseConfig, by_depth, fits

CONFIG = EXPERIMENT.preset("smoke")


@pytest.fixture(scope="module")
def result():
    return rank_collapse.run(CONFIG)


def residuals(result, arm, mask, scale=1.0, measure="l1_linf"):
    return by_depth(result.measurements, arm, mask, scale, measure)


def test_collapse_is_doubly_exponential_only_where_all_tokens_see_the_same(result):
    (outcome,) = result.claims
    assert outcome.verdict == "refined"
    assert "under a causal mask it is exponential" in outcome.because
    assert "MLPs do not prevent it" in outcome.because
    assert outcome.evidence["slope"].value == pytest.approx(math.log(3), abs=0.2)


def test_each_layer_cubes_the_residual_of_pure_two_way_attention(result):
    for arm in ("pure", "pure_no_norm", "mlp"):
        rho = residuals(result, arm, "two-way", measure="frobenius")
        for values in rho:
            logs = np.log(values[(values < 1e-5) & (values > 1e-250)])
            assert len(logs) >= 2
            np.testing.assert_allclose(logs[1:] / logs[:-1], 3, atol=0.5)  # up to a constant beside the cube


def test_the_first_token_never_mixes_under_a_causal_mask(result):
    rho = residuals(result, "pure", "causal")
    assert (rho[:, -1] > 1e-6).all()
    assert (rho[:, -1] < 0.1).all()


def test_skips_keep_tokens_apart(result):
    for arm in ("skip", "skip_mlp"):
        for mask in rank_collapse.MASKS:
            assert (residuals(result, arm, mask)[:, -1] > 0.2).all()


def test_larger_logits_delay_the_collapse(result):
    layers = [np.argmax(np.median(residuals(result, "pure", "two-way", s), axis=0) < 1e-6) for s in CONFIG.scales]
    assert layers == sorted(layers)
    assert layers[0] < layers[-1]


def test_arms_begin_with_the_same_tokens(result):
    start = result.measurements.query("depth == 0").groupby(["seed", "measure"])["value"].nunique()
    assert (start == 1).all()


def test_lines_tell_doubly_exponential_from_exponential():
    depth = np.arange(7.0)
    doubly = fits(np.exp(-(3**depth) / 10)[None])
    assert doubly.slope[0] == pytest.approx(math.log(3))
    assert doubly.gain[0] > 0.1
    single = fits(np.exp(-0.1 - depth / 2)[None])
    assert single.gain[0] < 0
    assert single.factor[0] == pytest.approx(math.exp(-0.5))


def test_lines_leave_out_what_says_nothing():
    depth = np.arange(7.0)
    clean = np.exp(-0.1 - depth / 2)
    spoiled = np.concatenate([clean, [0.0, 0.0]])
    spoiled[0] = 1.1  # the input
    assert fits(spoiled[None]).slope[0] == pytest.approx(fits(clean[None]).slope[0])
    assert np.isnan(fits(np.array([[0.9, 1.2, 0.5, 0.1, 0.0]])).gain[0])  # two layers are no line


def test_all_that_was_asked_for_is_measured_and_drawn(result):
    assert len(result.measurements) == 5 * 2 * 4 * 13 * 2 * 16
    assert len(result.figure().axes) == 4
    assert [len(table.rows) for table in result.tables] == [10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_width": 10, "num_heads": 4}, "model_width must be a multiple of num_heads = 4, got 10"),
        ({"logit_scales": (2.0,)}, "logit_scales must hold 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        CollapseConfig(**changes)
