"""Blocks whose links give something else than their parameters: the mistake is named at its link, from arrays alone."""

import re

import numpy as np
import pytest

from attn_jax.diagnostics import Limits, reference
from attn_jax.diagnostics.diagnosis.blocks import BRANCHES, Step, examine
from attn_jax.diagnostics.diagnosis.layer_arrays import LayerArrays

B, T, N, H, D = 2, 6, 4, 8, 16
COUNTED = np.arange(T)[None, :] < np.array([[T], [T - 1]])  # the second item has a token of padding


def turned(x, **options):
    return reference.rotate(x, **{"base": 1e4, "interleaved": False} | options)


def cut_by_reshape(x):
    """Heads read out of `[B, T, N H]` as if it lay as `[B, N, T, H]`; a module sets padding to 0."""
    kept = np.where(COUNTED[..., None, None], x, 0)
    return np.swapaxes(kept.reshape(B, N, T, H), 1, 2)


def healthy(layer=0):
    """A layer with rotary positions that gives what it should."""
    rng = np.random.default_rng(layer)
    raw_query, raw_key, value = rng.standard_normal((3, B, T, N, H))
    x, branch, attended = rng.standard_normal((3, B, T, D))
    expected = {
        "raw_query": raw_query, "raw_key": raw_key, "value": value, "query": turned(raw_query), "key": turned(raw_key),
        "attended": attended,
    }  # fmt: skip
    branches = {}
    for says, (first, second) in BRANCHES.items():
        middle = first * x + branch
        branches[says] = second * middle + np.tanh(middle)  # an MLP
    given = {"x": x, "branch": branch, "attended": attended, "out": branches[""]}
    return Step(layer, LayerArrays(expected["query"], expected["key"], value), expected, given, branches)


def got(step, **roles):
    """The same layer, with other queries, keys or values than expected."""
    arrays = {role: getattr(step.arrays, role) for role in ("query", "key", "value")} | roles
    return step._replace(arrays=LayerArrays(**arrays))


def found(*steps, limits=None):
    return list(examine(list(steps), [step.arrays for step in steps], COUNTED, limits or Limits()))


def test_nothing_is_said_of_healthy_blocks():
    assert found(healthy(0), healthy(1)) == []
    assert found() == []


NOISE = np.random.default_rng(9).standard_normal((B, T, N, H))
MISTAKES = {
    "not turned": ("query", lambda e: e["raw_query"], "positions", "Queries are not turned by positions"),
    "another base": ("key", lambda e: turned(e["raw_key"], base=1e5), "positions", "Keys .* of base 100000, .* halves"),
    "pairs of neighbours": (
        "query", lambda e: turned(e["raw_query"], interleaved=True), "positions", "base 10000, pairs of neighbours"
    ),
    "one too far": ("key", lambda e: turned(e["raw_key"], at=np.arange(T) + 1), "positions", "counted one too far"),
    "from the end": ("query", lambda e: turned(e["raw_query"], at=np.arange(T)[::-1]), "positions", "from the end"),
    "queries by W_K": ("query", lambda e: e["key"], "projections", "Queries are made by W_K"),
    "keys by W_Q": ("key", lambda e: e["query"], "projections", "Keys are made by W_Q"),
    "values are keys": ("value", lambda e: e["raw_key"], "projections", "Values are the keys"),
    "values turned": ("value", lambda e: turned(e["value"]), "values", "Values are turned by rotary positions"),
    "values of the token before": ("value", lambda e: np.roll(e["value"], 1, axis=1), "values", "the token 1 before"),
    "reshaped, then turned": ("query", lambda e: turned(cut_by_reshape(e["raw_query"])), "heads", "cut by a reshape"),
    "reshaped values": ("value", lambda e: cut_by_reshape(e["value"]), "heads", "Values are cut by a reshape"),
    "heads turned round": ("key", lambda e: e["key"][:, :, ::-1], "heads", "in the opposite order"),
    "the next head's": ("value", lambda e: np.roll(e["value"], -1, axis=2), "heads", "those of another head"),
    "queries twice": ("query", lambda e: 2 * e["query"], "scale", "Queries are 2 times what the parameters give"),
    "values halved": ("value", lambda e: e["value"] / 2, "values", "Values are 0.5 times"),
    "other queries": ("query", lambda e: NOISE, "projections", "Queries are not what the parameters give"),
    "other values": ("value", lambda e: NOISE, "values", "Values are not what the parameters give"),
    "fewer heads": ("key", lambda e: e["key"][:, :, :2], "projections", "Keys are not what the parameters give"),
    "not finite": ("query", lambda e: np.where(NOISE > 1, np.nan, e["query"]), "projections", "Queries are not what"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_at_its_link(name):
    role, make, link, says = MISTAKES[name]
    (one,) = found(*(got(step, **{role: make(step.expected)}) for step in (healthy(0), healthy(1))))
    assert (one.signal, one.link, one.severity, one.layers) == (f"layer_{role}", link, "serious", (0, 1))
    assert np.size(one.value) == 1
    assert re.search(says, one.evidence), one.evidence


def test_what_the_call_itself_had_counts_too():
    """A model may build its own first layer right here, and another one inside its call."""
    step = healthy()
    called = got(step, query=step.expected["raw_query"]).arrays
    (one,) = examine([step], [called], COUNTED, Limits())
    assert (one.signal, one.link) == ("layer_query", "positions")


def test_what_follows_a_fault_is_none_of_its_own():
    step = healthy()
    expected = {**step.expected, "key": np.full_like(step.expected["key"], np.nan)}
    assert found(step._replace(expected=expected)) == []


def test_padding_is_not_compared():
    step = healthy()
    query = np.where(COUNTED[..., None, None], step.expected["query"], 99.0)
    assert found(got(step, query=query)) == []


def test_an_output_that_is_not_merged_by_its_parameters():
    steps = [healthy(0), healthy(1)]
    steps[1] = steps[1]._replace(given={**steps[1].given, "attended": -steps[1].given["attended"]})
    (one,) = found(*steps)
    assert (one.signal, one.link, one.layers) == ("layer_output", "output", (1,))
    assert one.value == pytest.approx(2)


@pytest.mark.parametrize("says", [name for name in BRANCHES if name])
def test_a_residual_path_that_is_cut(says):
    step = healthy()
    (one,) = found(step._replace(given={**step.given, "out": step.branches[says]}))
    assert (one.signal, one.layers) == ("skip", (0,))
    assert one.evidence.startswith(says)


def test_a_block_that_gives_something_else():
    step = healthy()
    (one,) = found(step._replace(given={**step.given, "out": step.given["x"]}))
    assert one.signal == "block"
    assert one.evidence.startswith("What leaves the block is not its input and its branches")


def test_attention_that_adds_next_to_nothing():
    step = healthy()
    given = {**step.given, "branch": 1e-5 * step.given["branch"]}
    (one,) = found(step._replace(given=given))
    assert (one.layers, one.severity == "serious") == ((0,), False)
    assert found(step._replace(given=given), limits=Limits(update_ratio=None)) == []
