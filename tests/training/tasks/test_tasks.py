"""What every task promises: batches that are functions of key and step, and an evaluation that training never sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.training import tasks

TEXT = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 3000)))  # repeats nothing of length 8
GENERATED = {
    "recall": tasks.Recall(num_pairs=4, num_keys=6, num_values=7, length=14),
    "relation": tasks.Relation(num_cycles=3, num_shown=2, num_payloads=4),
    "copy": tasks.Copy(num_symbols=5, distance=3, length=8),
}
WITH_DATA = {
    "characters": tasks.language_model(TEXT, length=8)[0],
    "byte pairs": tasks.language_model(TEXT, length=8, vocabulary_size=280)[0],
    "digits": tasks.digits(jax.random.key(5), num_training=100),
}
TASKS = {**GENERATED, **WITH_DATA}
everywhere = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def same(a, b):
    return all(bool((x == y).all()) for x, y in zip(a, b, strict=True))


@everywhere
def test_shapes_and_ranges(task):
    batch, evaluation = task.batch(jax.random.key(0), 0, 6), task.evaluation(2, 3)
    for drawn, shape in ((batch, (6, task.length)), (evaluation, (2, 3, task.length))):
        assert [x.dtype for x in drawn] == [jnp.int32, jnp.int32, jnp.float32]
        assert [x.shape for x in drawn] == [shape] * 3
        for ids in drawn[:2]:
            assert int(ids.min()) >= 0
            assert int(ids.max()) < task.vocabulary_size
        assert set(np.unique(drawn.weights)) <= {0.0, 1.0}
        assert (drawn.weights.sum(-1) > 0).all()
    assert task.chance is None or 0 < task.chance < 1


@everywhere
def test_a_function_of_key_and_step(task):
    key = jax.random.key(0)
    batch = task.batch(key, 3, 6)
    assert same(batch, task.batch(key, 3, 6))
    assert same(batch, task.batch(jax.random.key_data(key), jnp.int32(3), 6))
    assert not same(batch, task.batch(key, 4, 6))
    assert not same(batch, task.batch(jax.random.key(1), 3, 6))
    with jax.enable_x64(True):
        assert same(batch, task.batch(key, np.int64(3), 6))


@everywhere
def test_in_jit_scan_and_under_vmap_over_seeds(task):
    @jax.jit
    def run(task, keys, first):
        def step(key, i):
            return key, task.batch(key, first + i, 6)

        return jax.vmap(lambda key: jax.lax.scan(step, key, jnp.arange(3))[1])(keys)

    drawn = run(task, jax.random.split(jax.random.key(7)), jnp.int32(10))
    for seed, key in enumerate(jax.random.split(jax.random.key(7))):
        for i in range(3):
            assert same([x[seed, i] for x in drawn], task.batch(key, 10 + i, 6))


@everywhere
def test_evaluation_is_fixed(task):
    first = task.evaluation(2, 3)
    assert same(first, task.evaluation(2, 3))
    assert same(first, jax.jit(lambda task: task.evaluation(2, 3))(task))
    assert same([x[:1] for x in first], task.evaluation(1, 3))  # whatever comes after
    assert same([x.reshape(1, 6, -1) for x in first], task.evaluation(1, 6))
    assert len({row.tobytes() for row in np.asarray(first.inputs).reshape(6, -1)}) == 6
    with jax.enable_x64(True):
        assert same(first, task.evaluation(2, 3))
    with jax.default_prng_impl("rbg"):
        assert same(first, task.evaluation(2, 3))


@everywhere
def test_evaluation_shares_nothing_with_training(task):
    seen = {row.tobytes() for i in range(3) for row in np.asarray(task.batch(jax.random.key(1), i, 100).inputs)}
    count = min(task.num_held_out or 300, 300)
    held_out = {row.tobytes() for row in np.asarray(task.evaluation(1, count).inputs)[0]}
    assert len(seen) > 60
    assert not seen & held_out


@everywhere
def test_a_pytree_and_hashable(task):
    leaves, structure = jax.tree.flatten(task)
    rebuilt = jax.tree.unflatten(structure, leaves)
    assert same(rebuilt.evaluation(1, 2), task.evaluation(1, 2))
    assert isinstance(hash(task), int)
    assert hash(structure) == hash(jax.tree.structure(rebuilt))
    jax.tree.unflatten(structure, [object()] * len(leaves))  # as JAX does with placeholders
    with pytest.raises(AttributeError, match="cannot assign"):
        task.length = 3


def test_generated_tasks_are_equal_by_value():
    assert tasks.Copy(5, 3, 8) == GENERATED["copy"]
    assert hash(tasks.Copy(np.int64(5), 3, 8)) == hash(GENERATED["copy"])
    assert tasks.Copy(5, 2, 8) != GENERATED["copy"]
    assert not jax.tree.leaves(GENERATED["recall"])
    traces = []

    def batch(task):
        traces.append(task)
        return task.batch(jax.random.key(0), 0, 2).inputs

    for task in (tasks.Copy(5, 3, 8), tasks.Copy(5, 3, 8)):
        jax.jit(batch)(task)
    assert len(traces) == 1


def test_the_data_of_a_task_is_no_constant_of_the_program():
    texts = [tasks.language_model(text, length=8)[0] for text in (TEXT, TEXT[::-1])]
    traces = []

    @jax.jit
    def batch(task):
        traces.append(task)
        return task.batch(jax.random.key(0), 0, 2).inputs

    assert not (batch(texts[0]) == batch(texts[1])).all()
    assert len(traces) == 1


@pytest.mark.parametrize("task", WITH_DATA.values(), ids=WITH_DATA)
def test_no_more_evaluation_than_is_held_out(task):
    most = task.num_held_out
    inputs = np.asarray(task.evaluation(1, most).inputs)[0]
    assert inputs.shape == (most, task.length)
    with pytest.raises(ValueError, match=rf"num_batches · size must be at most {most}, .*; got 2 · {most}"):
        task.evaluation(2, most)


@everywhere
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.batch(0, 0, 1), TypeError, "key must be one key"),
        (lambda t: t.batch(jax.random.key(0), 1.0, 1), TypeError, "step must have an integer dtype"),
        (lambda t: t.batch(jax.random.key(0), -1, 1), ValueError, "step must be at least 0"),
        (lambda t: t.batch(jax.random.key(0), jnp.arange(2), 1), ValueError, r"step must have rank 0, \[\]"),
        (lambda t: t.batch(jax.random.key(0), 0, 0), ValueError, "size must be at least 1, got 0"),
        (lambda t: t.evaluation(0, 1), ValueError, "num_batches must be at least 1, got 0"),
        (lambda t: t.evaluation(1, 1.5), TypeError, "size must be an integer, got float 1.5"),
    ],
)
def test_errors(task, call, error, message):
    with pytest.raises(error, match=message):
        call(task)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tasks.Copy(num_symbols=1), ValueError, "num_symbols must be at least 2, got 1"),
        (lambda: tasks.Copy(distance=0), ValueError, "distance must be at least 1, got 0"),
        (lambda: tasks.Copy(distance=8, length=8), ValueError, "length must be more than distance = 8, got 8"),
        (lambda: tasks.Copy(num_symbols=2**30, length=64), ValueError, r"length · num_symbols must be below 2³¹"),
        (lambda: tasks.Copy(length=8.0), TypeError, "length must be an integer, got float 8.0"),
        (lambda: tasks.Recall(num_pairs=2), ValueError, "num_pairs must be at least 3, got 2"),
        (lambda: tasks.Recall(num_keys=7), ValueError, "num_keys must be at least num_pairs = 8, got 7"),
        (lambda: tasks.Recall(num_values=7), ValueError, "num_values must be at least num_pairs = 8, got 7"),
        (lambda: tasks.Recall(length=23), ValueError, "length must be at least 3 · num_pairs = 24, got 23"),
        (lambda: tasks.Recall(num_pairs=True), TypeError, "num_pairs must be an integer, got bool True"),
        (lambda: tasks.Relation(num_shown=1), ValueError, "num_shown must be at least 2, got 1"),
        (lambda: tasks.Relation(num_payloads=2), ValueError, "num_payloads must be at least 3, got 2"),
        (lambda: tasks.Relation(num_cycles=3), ValueError, "num_cycles must be at least num_shown = 4, got 3"),
    ],
)
def test_sizes_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()
