"""Recall: the rule, the layout, the split, the distribution."""

import itertools

import jax
import numpy as np
import pytest

from attn_jax.training.tasks import Recall
from tests.training.tasks.test_copying import drawn

TASK = Recall(num_pairs=4, num_keys=5, num_values=6, length=16)


def look_up(row, task):
    """What a dictionary of the pairs says wherever a key comes again, and None elsewhere."""
    pairs = dict(zip(row[: 2 * task.num_pairs : 2], row[1 : 2 * task.num_pairs : 2], strict=True))
    return [None] * (2 * task.num_pairs) + [pairs.get(token) for token in row[2 * task.num_pairs :]]


def sign(mapping):
    """Of the permutation from the order of keys to the order of values, by its cycles."""
    ranks = np.argsort(np.argsort([value for _, value in sorted(mapping)]))
    seen, cycles = set(), 0
    for start in range(len(ranks)):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = ranks[start]
    return (-1) ** (len(ranks) - cycles)


@pytest.mark.parametrize("task", [TASK, Recall(5, 9, 7, 15)])
def test_solved_by_a_dictionary(task):
    for batch in drawn(task):
        for row, target, weight in zip(*(x[:100].tolist() for x in batch), strict=True):
            for answer, wanted, asked in zip(look_up(row, task), target, weight, strict=True):
                assert (answer is not None) == (asked == 1)
                assert wanted == (answer or 0)


def test_layout():
    inputs, _, weights = drawn(TASK)[0]
    keys, values, queries = inputs[:, 0:8:2], inputs[:, 1:8:2], np.where(weights == 1, inputs, 0)[:, 8:]
    assert keys.min() == 1
    assert keys.max() == 5
    assert values.min() == 6
    assert values.max() == 11 == TASK.vocabulary_size - 1
    assert (inputs[:, 8:] == queries).all()  # all else is filler
    for key, value, query in zip(keys, values, queries, strict=True):
        assert len(set(key)) == len(set(value)) == 4
        assert sorted(query[query > 0]) == sorted(key)  # each once


def test_no_map_is_in_training_and_evaluation():
    """All 6 maps of three keys to three values: three each, in whatever order the pairs stand."""
    maps = []
    for inputs, _, _ in drawn(Recall(3, 3, 3, 9)):
        pairs = inputs[:, :6].reshape(-1, 3, 2).tolist()
        maps.append({tuple(sorted(map(tuple, rows))) for rows in pairs})
        assert len({str(rows) for rows in pairs}) == 18  # three maps in six orders
    assert len(maps[0]) == len(maps[1]) == 3
    assert not maps[0] & maps[1]
    assert {sign(m) for m in maps[0]} == {-1}
    assert {sign(m) for m in maps[1]} == {1}
    for (inputs, _, _), expected in zip(drawn(Recall(5, 9, 7, 15)), (-1, 1), strict=True):
        assert {sign(rows) for rows in inputs[:200, :10].reshape(-1, 5, 2).tolist()} == {expected}


def test_uniform_in_all_that_a_guess_could_use():
    for inputs, targets, weights in drawn(TASK):
        n = len(inputs)
        for column, count in [(0, 5), (6, 5), (1, 6), (7, 6)]:
            shares = np.bincount(inputs[:, column], minlength=12)
            assert np.abs(shares[shares > 0] - n / count).max() < 5 * np.sqrt(n / count)
        for (a, b), (i, j) in itertools.product([(1, 3), (5, 7)], [(0, 1), (3, 2)]):  # two values, n − 2 = 2
            pair = ((inputs[:, a] == 6 + i) & (inputs[:, b] == 6 + j)).sum()
            assert abs(pair - n / 30) < 5 * np.sqrt(n / 30)
        places = weights.sum(0)
        assert (places[:8] == 0).all()
        assert np.abs(places[8:] - n / 2).max() < 5 * np.sqrt(n / 4)
        asked = targets[weights == 1].reshape(n, 4)
        for slot, query in itertools.product(range(4), range(4)):  # the value of one slot, whatever is asked
            right = (asked[:, query] == inputs[:, 2 * slot + 1]).mean()
            assert abs(right - TASK.chance) < 5 * np.sqrt(TASK.chance * (1 - TASK.chance) / n)


def test_many_pairs():
    task = Recall(num_pairs=64, num_keys=4096, num_values=4096, length=256)
    inputs, _, weights = jax.tree.map(np.asarray, task.batch(jax.random.key(0), 0, 2))
    assert (weights.sum(1) == 64).all()
    assert inputs.max() < task.vocabulary_size == 8193
