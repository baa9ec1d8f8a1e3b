"""head_roles: a head that does one thing perfectly scores 1 on its probe; one that goes by place scores 0."""

import functools

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from attn_jax import models
from experiments import head_roles
from experiments.claims.diagnosis import ROLE_LINES
from experiments.harness import InputError
from experiments.head_roles import RolesConfig, probes
from tests import oracles

DOCUMENTS = np.random.default_rng(0).integers(0, 50, (3, 40))


@functools.cache
def tokenizer():
    return models.load("smollm2").tokenizer


def score(probe, weights):
    """Of one pattern `[T, T]` for every example."""
    return np.einsum("ts,xyts->xy", weights, probe.target)


def looking_back(length, steps):
    return np.eye(length)[np.maximum(np.arange(length) - steps, 0)]


def test_kinds_that_go_by_distance():
    before = looking_back(40, 1)
    assert score(probes.previous_token(DOCUMENTS), before) == pytest.approx(1)
    assert score(probes.local(DOCUMENTS), before) == pytest.approx(1)
    assert score(probes.local(DOCUMENTS), looking_back(40, 7)) == pytest.approx(1)
    assert score(probes.local(DOCUMENTS), looking_back(40, 8)) == pytest.approx(0)
    assert score(probes.previous_token(DOCUMENTS), looking_back(40, 2)) == pytest.approx(0)
    to_the_first = np.eye(40)[np.zeros(40, int)]  # a sink is not near
    assert score(probes.local(DOCUMENTS), to_the_first) == pytest.approx(0)


def test_induction():
    probe = probes.induction(np.arange(100, 200), 5, 12, seed=0)
    assert probe.token_ids.shape == (5, 1, 24)
    once, again = probe.token_ids[:, 0, :12], probe.token_ids[:, 0, 12:]
    np.testing.assert_array_equal(once, again)
    assert all(len(set(row)) == 12 for row in once.tolist())
    assert score(probe, looking_back(24, 11)) == pytest.approx(1)  # what followed the last time
    assert score(probe, looking_back(24, 12)) == pytest.approx(0)  # the same token


@pytest.mark.parametrize("make", [probes.syntax, probes.coreference])
def test_sentences_ask_where_they_say(make):
    probe, words = make(tokenizer()), tokenizer()
    assert probe.token_ids.shape[:2] == (32, 4)
    answered = {"she": {n for n, _ in probes.NAMES}, "he": {n for _, n in probes.NAMES}}
    nouns = {word for pair in probes.NOUNS for word in pair}
    for at in np.ndindex(probe.lengths.shape):
        ids, target = probe.token_ids[at], probe.target[at]
        (row,), (right,), (other,) = (set(found.tolist()) for found in (
            np.nonzero(target)[0], np.nonzero(target == 1)[1], np.nonzero(target == -1)[1]
        ))  # fmt: skip
        asking = words.decode([int(ids[row])]).strip()
        text = words.decode([int(i) for i in ids[: right + 1]]), words.decode([int(i) for i in ids[: other + 1]])
        assert max(right, other) < row < probe.lengths[at]
        if make is probes.syntax:
            assert asking in probes.VERBS
            assert {one.split()[-1] for one in text} <= nouns
            # "near the tree" stands before one of the two, and that is not the subject
            assert text[1].split()[-3:-1] == ["near", "the"]
            assert text[0].split()[-3] != "near"
        else:
            assert text[0].split()[-1] in answered[asking]
            assert text[1].split()[-1] not in answered[asking]
            assert text[1].split()[-1] in answered["she"] | answered["he"]


@pytest.mark.parametrize("make", [probes.syntax, probes.coreference])
def test_a_head_that_goes_by_place_scores_nothing(make):
    """The first of the two words, the second, or one and the same word wherever it stands."""
    probe = make(tokenizer())
    flat = probe.target.reshape(-1, *probe.target.shape[2:])
    first = np.array([t[t.any(axis=1)][0][np.nonzero(t.any(axis=0))[0][0]] for t in flat]).reshape(32, 4)
    np.testing.assert_array_equal(first.sum(axis=1), 0)
    for sentences, ids, targets in zip(first, probe.token_ids, probe.target, strict=True):
        assert sorted(sentences.tolist()) == [-1, -1, 1, 1]
        columns = [np.nonzero(t.any(axis=0))[0] for t in targets]
        by_word = {}
        for token_ids, t, places in zip(ids, targets, columns, strict=True):
            for place in places:
                by_word.setdefault(int(token_ids[place]), []).append(t[:, place].sum())
        assert all(sum(values) == 0 for values in by_word.values())


def test_scores_are_of_the_weights():
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 5, 6, 4)), rng.standard_normal((2, 5, 3, 4))
    target = rng.standard_normal((2, 5, 5))
    weights = oracles.attention(query, key, key, is_causal=True).weights
    found = head_roles.scores(*map(jnp.asarray, (target, query, key, key)), is_causal=True)
    np.testing.assert_allclose(found, np.einsum("bnts,bts->bn", weights, target), rtol=1e-4, atol=1e-5)


def test_chosen_and_judged_on_different_examples():
    values = np.zeros((6, 2, 3))
    values[::2, 1, 2] = 1.0  # where it is chosen; elsewhere it is no better than others
    values[1::2, 0, 1] = 9.0
    head, judged = head_roles.best_head(values)
    assert head == (1, 2)
    np.testing.assert_array_equal(judged, np.zeros(3))


def test_a_real_model_has_induction_heads():
    rows = head_roles.measure(RolesConfig(documents=4, max_tokens=32), "model", "induction")
    assert len(rows) == 4 * 30 * 9
    _, judged = head_roles.best_head(head_roles.cube(pd.DataFrame(rows), "model", "induction"))
    assert judged.min() > ROLE_LINES["induction"]


@pytest.mark.slow
def test_a_run_on_a_real_model():
    result = head_roles.run(RolesConfig(documents=10, max_tokens=32))
    rows = result.measurements
    assert len(rows) == 2 * 30 * 9 * (3 * 10 + 2 * 32)
    (outcome,) = result.claims
    assert outcome.claim.id == "H8"
    assert outcome.evidence["induction"].value > ROLE_LINES["induction"]
    assert abs(outcome.evidence["syntax_random"].value) < ROLE_LINES["syntax"]
    titles = {axis.get_title() for axis in result.figure().axes}
    assert {role.replace("_", " ") for role in ROLE_LINES} <= titles


def test_a_model_that_cannot_be_probed():
    with pytest.raises(InputError, match="--model=nonsense: name_or_path must be one of"):
        head_roles.run(RolesConfig(model="nonsense"))
    with pytest.raises(InputError, match="--model=minilm: must be a decoder"):
        head_roles.run(RolesConfig(model="minilm"))
