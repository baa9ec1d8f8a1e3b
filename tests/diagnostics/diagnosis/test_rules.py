"""Rules: each symptom, planted in measures of a healthy model, is named; the healthy measures are silent."""

import numpy as np
import pytest

from attn_jax.diagnostics.diagnosis import Limits
from attn_jax.diagnostics.diagnosis.rules import judge

L, N = 4, 4


def healthy(**changes):
    """Measures as a freshly initialised decoder of width 64 has them; a change is an array or a number for all."""
    of_heads = {
        "normalized_entropy": 0.9, "normalized_entropy_no_sink": 0.9, "max_logit": 4.0, "logit_sd": 1.0,
        "saturated": 0.01, "sink_mass": 0.05, "max_weight": 0.1, "distance_ratio": 1.0, "distance_ratio_no_sink": 1.1,
        "score_rank": 40.0, "non_finite": 0.0, "output_norm": 2.0, "nearest_distance": 0.2, "nearest_similarity": 0.4,
        "query_norm": 8.0, "key_norm": 8.0, "value_norm": 8.0, "scale_ratio": 1.0,
    }  # fmt: skip
    of_layers = {
        "token_cosine": 0.1, "future_keys": 0.0, "past_share": 1.0, "own_share": 1.0, "visible_keys": 64.0,
        "key_slots": 128.0, "head_width": 64.0,
    }  # fmt: skip
    measures = {name: np.full((L, N), x) for name, x in of_heads.items()}
    measures |= {name: np.full(L, x) for name, x in of_layers.items()}
    for name, x in changes.items():
        measures[name] = np.broadcast_to(np.asarray(x, float), measures[name].shape)
    return measures


def at(value, *places, usual):
    """`[L, N]` or `[L]` with a value at some places."""
    shape = (L, N) if isinstance(places[0], tuple) else (L,)
    array = np.full(shape, float(usual))
    for place in places:
        array[place] = value
    return array


def test_healthy_measures_are_silent():
    assert list(judge(healthy(), Limits())) == []


HALF = [(1, 0), (1, 1)]  # of the heads of layer 1
CASES = {
    # name: (changes, signal, link, severity, layers, heads)
    "a large logit": ({"max_logit": at(150, (2, 1), usual=4)}, "max_logit", "projections", "notice", (2,), ((2, 1),)),
    "a huge logit": ({"max_logit": at(2000, (2, 1), usual=4)}, "max_logit", "projections", "serious", (2,), None),
    "a huge logit of a large scale": (
        {"max_logit": at(2000, (2, 1), usual=4), "scale_ratio": 8.0}, "max_logit", "scale", "serious", (2,), None,
    ),
    "a sharp head": (
        {"normalized_entropy_no_sink": at(0.01, (3, 2), usual=0.9)}, "sharp_entropy", "scale", "information", (3,), ((3, 2),),
    ),
    "sharp heads of ordinary logits": (
        {"normalized_entropy_no_sink": at(0.01, *HALF, usual=0.9)}, "sharp_entropy", "mask", "notice", (1,), tuple(HALF),
    ),
    "sharp heads of large logits": (
        {"normalized_entropy_no_sink": at(0.01, *HALF, usual=0.9), "max_logit": at(200, (1, 0), usual=4), "logit_sd": 9.0},
        "sharp_entropy", "projections", "serious", (1,), tuple(HALF),
    ),
    "a saturated layer": ({"saturated": at(0.6, *[(0, n) for n in range(N)], usual=0)}, "saturated", "softmax", "notice", (0,), ()),
    "spread logits": ({"logit_sd": at(20, *[(0, n) for n in range(N)], usual=1)}, "logit_sd", "projections", "notice", (0,), ()),
    "a sink": ({"sink_mass": at(0.9, (2, 2), usual=0.1)}, "sink_mass", "softmax", "information", (2,), ((2, 2),)),
    "clones": (
        {"nearest_distance": at(0.01, *HALF, usual=0.2), "nearest_similarity": at(0.99, *HALF, usual=0.4),
         "normalized_entropy": 0.6},
        "clone_distance", "heads", "notice", (1,), tuple(HALF),
    ),
    "a dead head": ({"output_norm": at(1e-3, (3, 1), usual=2)}, "dead_output", "heads", "notice", (3,), ((3, 1),)),
    "a dead layer": (
        {"output_norm": at(1e-3, *[(3, n) for n in range(N)], usual=2)}, "dead_output", "values", "serious", (3,), None,
    ),
    "a scale that is meant": ({"scale_ratio": 0.125}, "scale_ratio", "scale", "notice", (0, 1, 2, 3), None),
    "no scale": ({"scale_ratio": 8.0, "logit_sd": 12.0}, "scale_ratio", "scale", "serious", (0, 1, 2, 3), None),
    "uniform rows": (
        {"normalized_entropy": 0.999, "logit_sd": 0.05}, "uniform_entropy", "projections", "information", (0, 1, 2, 3), (),
    ),
    "uniform rows for good": (
        {"normalized_entropy": 1.0, "logit_sd": 1e-4}, "uniform_entropy", "projections", "notice", (0, 1, 2, 3), (),
    ),
    "uniform rows of a small scale": (
        {"normalized_entropy": 1.0, "logit_sd": 1e-4, "scale_ratio": 0.1}, "uniform_entropy", "scale", "notice", (0, 1, 2, 3), (),
    ),
    "scores of no rank": ({"score_rank": at(1.1, *HALF, usual=40)}, "score_rank", "projections", "notice", (1,), tuple(HALF)),
    "tokens alike from the start": ({"token_cosine": 0.95}, "token_cosine", "softmax", "notice", (0, 1, 2, 3), ()),
    "tokens alike with depth": (
        {"token_cosine": [0.1, 0.6, 0.95, 0.999], "normalized_entropy": 0.999}, "token_cosine", "softmax", "serious", (2, 3), (),
    ),
    "distances that are those of uniform weights": (
        {"distance_ratio_no_sink": 1.005, "normalized_entropy_no_sink": 0.5}, "distance_ratio", "positions", "information", (), (),
    ),
    "one key ahead": ({"future_keys": 1.0}, "future_keys", "mask", "serious", (0, 1, 2, 3), ()),
    "a layer that sees all": ({"future_keys": at(60, 2, usual=0)}, "future_keys", "mask", "serious", (2,), ()),
    "without one's own key": ({"own_share": 0.0}, "own_share", "mask", "notice", (0, 1, 2, 3), ()),
    "one key": ({"visible_keys": 1.0}, "visible_keys", "mask", "notice", (0, 1, 2, 3), ()),
    "narrow heads": ({"head_width": 8.0}, "head_width", "heads", "information", (0, 1, 2, 3), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_symptom_is_named(case):
    changes, signal, link, severity, layers, heads = CASES[case]
    (found,) = [one for one in judge(healthy(**changes), Limits()) if one.signal == signal]
    assert (found.link, found.severity, found.layers) == (link, severity, layers)
    assert heads is None or found.heads == heads
    assert all((found.evidence, found.cause, found.check, found.mend, found.origin))


def test_the_worst_head_comes_first():
    measures = healthy(max_logit=at(150, (0, 1), (2, 0), usual=4) + at(50, (2, 0), usual=0))
    (found,) = [one for one in judge(measures, Limits()) if one.signal == "max_logit"]
    assert found.heads == ((2, 0), (0, 1))
    assert found.value == 200
    assert "layer 2, head 0; also 1 head of layers 0, 2" in found.evidence


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"max_logit": 150.0}, {"max_logit": 200.0}),
        ({"max_logit": 1e5}, {"max_logit": None}),
        ({"token_cosine": 0.95}, {"token_cosine": 0.99}),
        ({"sink_mass": 0.9}, {"sink_mass": None}),
    ],
)
def test_lines_can_be_moved_and_taken_away(changes, limits):
    assert list(judge(healthy(**changes), Limits())) != []
    assert list(judge(healthy(**changes), Limits(**limits))) == []


HEALTHY = {
    "most heads are sinks": {"sink_mass": 0.8},
    "unit vectors with a scale of their own": {"query_norm": 1.0, "key_norm": 1.0, "scale_ratio": 20.0},
    "an encoder": {"future_keys": 64.0},
    "a causal window": {"past_share": 0.2},
    "a window both ways": {"future_keys": 2.0, "past_share": 0.1},
    "a head without a choice": {"normalized_entropy": at(np.nan, (0, 0), usual=0.9)},
    "sharp heads that learned a task": {"normalized_entropy_no_sink": 0.01, "saturated": 0.95, "max_logit": 40.0},
    "late tokens that are alike, and told apart": {"token_cosine": [0.1, 0.6, 0.95, 0.999]},
    "small logits": {"logit_sd": 0.05, "normalized_entropy": 0.999},
}


@pytest.mark.parametrize("case", HEALTHY)
def test_what_healthy_models_show_is_no_alarm(case):
    assert [one for one in judge(healthy(**HEALTHY[case]), Limits()) if one.severity == "serious"] == []


def test_measures_that_are_not_there_are_not_missed():
    measures = healthy(max_logit=150.0)
    few = {name: measures[name] for name in ("max_logit", "token_cosine")}
    assert [one.signal for one in judge(few, Limits())] == ["max_logit"]
