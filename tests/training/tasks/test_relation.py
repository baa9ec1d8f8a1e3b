"""A directed relation: solved with direction, and by no symmetric scores."""

import itertools

import numpy as np
import pytest

from attn_jax.training.tasks import Relation
from tests.training.tasks.test_copying import drawn

TASK = Relation(num_cycles=5, num_shown=3, num_payloads=4)
PAYLOADS, ENTITIES, FACTS = 4, 3 * TASK.num_cycles, 3 * TASK.num_shown


def points_to(entity):
    return entity // 3 * 3 + (entity % 3 + 1) % 3


def answer(scores, row):
    """What a scorer answers to the questions of a row: the payload of the token of largest score.

    `scores[i, j]` of entities; every token of the row may be looked up, questions included.
    """
    entities, payloads = row // PAYLOADS, row % PAYLOADS
    return payloads[scores[entities[FACTS:]][:, entities].argmax(-1)]


def accuracy(scores, batch):
    """Of a scorer, on what a batch asks."""
    right = [
        answer(scores, row) == target[FACTS:] - PAYLOADS * ENTITIES
        for row, target in zip(batch.inputs, batch.targets, strict=True)
    ]
    return np.mean(right)


def accuracy_on_every_question(scores):
    """The same, in expectation: the three questions of each cycle, payloads all different."""
    found = [scores[x].argmax() == points_to(x) for x in range(ENTITIES)]
    return np.mean(found)


def directed():
    scores = np.zeros((ENTITIES, ENTITIES))
    scores[np.arange(ENTITIES), points_to(np.arange(ENTITIES))] = 1
    return scores


def test_solved_with_direction():
    for batch in drawn(TASK):
        assert accuracy(directed(), batch) == 1
        assert (batch.weights[:, :FACTS] == 0).all()
        assert (batch.weights[:, FACTS:] == 1).all()
        assert accuracy(directed().T, batch) == 0


def test_the_best_of_all_symmetric_scores():
    """One cycle, every order of its three scores: two of three questions at most, and some reach it."""
    reached = []
    for xy, yz, zx in itertools.permutations([1.0, 2.0, 3.0]):
        reached.append((xy > zx) + (yz > xy) + (zx > yz))
    assert max(reached) / 3 == TASK.symmetric_limit
    assert set(reached) == {1, 2}


@pytest.mark.parametrize("terms", ["none", "key", "query", "both"])
def test_symmetric_scores_stay_below_the_limit(terms):
    """Gram matrices, as W_Q = W_K gives, with terms of the key or the query alone; self scores and all others free."""
    rng = np.random.default_rng(0)
    for width in (1, 3, 50):
        for _ in range(300):
            x = rng.normal(size=(ENTITIES, width))
            scores = x @ x.T + rng.normal(size=ENTITIES) * (terms in ("key", "both"))
            scores += rng.normal(size=(ENTITIES, 1)) * (terms in ("query", "both"))
            assert accuracy_on_every_question(scores) <= TASK.symmetric_limit + 1e-12


def test_the_limit_on_what_is_drawn():
    """Symmetric scores made to be right twice in each cycle: at the limit, not above, in training and evaluation."""
    scores = np.zeros((ENTITIES, ENTITIES))
    for cycle in range(TASK.num_cycles):
        x, y, z = 3 * cycle + np.arange(3)
        scores[[x, y], [y, x]], scores[[y, z], [z, y]], scores[[z, x], [x, z]] = 1, 2, 3
    assert accuracy_on_every_question(scores) == pytest.approx(2 / 3)
    for batch in drawn(TASK):
        deviation = 5 * np.sqrt(2 / 9 / batch.weights.sum())
        assert abs(accuracy(scores, batch) - TASK.symmetric_limit) < deviation


def test_a_guess_without_looking_up():
    for batch in drawn(TASK):
        own = batch.inputs[:, FACTS:] % PAYLOADS
        wanted = batch.targets[:, FACTS:] - PAYLOADS * ENTITIES
        assert (own != wanted).all()
        for blind in range(1, PAYLOADS):  # its own and so many more
            deviation = 5 * np.sqrt(2 / 9 / wanted.size)
            assert abs(((own + blind) % PAYLOADS == wanted).mean() - 1 / 3) < deviation
        either = accuracy(np.kron(np.eye(TASK.num_cycles), 1 - np.eye(3)), batch)  # whichever of the two stands first
        assert abs(either - TASK.chance) < 5 * np.sqrt(1 / 4 / wanted.size)


def test_what_is_shown():
    both_orders = []
    for batch in drawn(TASK):
        facts, questions = batch.inputs[:, :FACTS], batch.inputs[:, FACTS:]
        assert batch.inputs.max() < PAYLOADS * ENTITIES
        cycles = facts // (3 * PAYLOADS)
        for row, row_cycles, asked in zip(facts, cycles, questions, strict=True):
            assert sorted(row // PAYLOADS) == sorted(
                3 * c + m for c in set(row_cycles) for m in range(3)
            )  # whole cycles
            for cycle in set(row_cycles):
                assert len(set(row[row_cycles == cycle] % PAYLOADS)) == 3  # payloads differ
            assert set(asked) <= set(row)  # the same tokens again
            assert sorted(asked // (3 * PAYLOADS)) == sorted(set(row_cycles))  # one of each cycle
        entities = facts // PAYLOADS
        for x in range(ENTITIES):
            shown = (entities == x).any(1)
            first = (entities == x).argmax(1) < (entities == points_to(x)).argmax(1)
            both_orders.append(first[shown].mean())
        members = np.bincount(questions.ravel() // PAYLOADS % 3, minlength=3)
        assert np.abs(members - questions.size / 3).max() < 5 * np.sqrt(questions.size / 3)
    assert 0.3 < min(both_orders) < max(both_orders) < 0.7  # x before y as often as after it


def test_no_choice_of_payloads_is_in_training_and_evaluation():
    """All 36 of two cycles: 18 each, in whatever order they stand."""
    choices = []
    for batch in drawn(Relation(num_cycles=2, num_shown=2, num_payloads=3)):
        choices.append({tuple(sorted(row)) for row in batch.inputs[:, :6].tolist()})
        last = [tuple(sorted(row))[3:] for row in batch.inputs[:, :6].tolist()]
        assert len(set(last)) == 6  # one cycle alone shows all there is
    assert len(choices[0]) == len(choices[1]) == 18
    assert not choices[0] & choices[1]
