"""attention_explanation: the task, what is changed in an answer by hand, and what becomes of it in the claims."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from flax import nnx

from attn_jax.nn import Transformer
from experiments import attention_explanation
from experiments.attention_explanation import EXPERIMENT, changed, results
from experiments.attention_explanation.task import Keyword
from experiments.attention_explanation.uniform import uniform_attention
from experiments.claims.explanation import ARMS
from tests.nn import reference

CONFIG = EXPERIMENT.preset("smoke", length=5, climbs=30, starts=2, permutations=3)


def test_a_keyword_stands_among_fillers_and_the_halves_share_nothing():
    task = Keyword(num_classes=4, length=6)
    train = task.batch(jax.random.key(0), 0, 64)
    held_out = jax.tree.map(lambda x: x[0], task.evaluation(1, 64))
    for batch, odd in ((train, 1), (held_out, 0)):
        tokens, targets = np.asarray(batch.inputs), np.asarray(batch.targets)
        np.testing.assert_array_equal(tokens[:, -1], 0)
        np.testing.assert_array_equal(np.asarray(batch.weights), np.tile([0, 0, 0, 0, 0, 1], (64, 1)))
        is_keyword = (tokens >= 1) & (tokens <= 4)
        np.testing.assert_array_equal(is_keyword.sum(axis=1), 1)
        np.testing.assert_array_equal(tokens[is_keyword], targets[:, -1])
        assert set(targets[:, -1]) == {1, 2, 3, 4}
        assert set(np.argwhere(is_keyword)[:, 1]) == {0, 1, 2, 3, 4}
        values = np.where(is_keyword, tokens - 1, tokens - 5)[:, :-1]
        np.testing.assert_array_equal(values.sum(axis=1) % 2, odd)
    with pytest.raises(ValueError, match="num_classes must be even, got 3"):
        Keyword(num_classes=3, length=6)


def test_uniform_attention_is_the_mean_of_what_is_seen():
    query, key, value = np.random.default_rng(0).normal(size=(3, 4, 2, 3)).astype(np.float32)
    found = uniform_attention(query, key, value, is_causal=True)
    expected = np.cumsum(value, axis=0) / np.arange(1, 5)[:, None, None]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def sequence():
    """A model with one layer and a sequence, and everything that is measured of it."""
    config = CONFIG.transformer("lookup")
    model = reference.randomized(lambda: Transformer(config, rngs=nnx.Rngs(0)), seed=3)
    inputs = jnp.array([5, 6, 0, 1, 2])
    asked = jnp.array([0.0, 0.0, 0.0, 1.0, 0.0])  # the last question is not the last token
    targets = jnp.array([0, 0, 0, 3, 0])
    measure = jax.jit(lambda *one: changed.of_sequence(CONFIG, model, *one))
    return model, inputs, {k: np.asarray(x) for k, x in measure(inputs, targets, asked, jax.random.key(0)).items()}


def answer_with(model, inputs, row):
    """Probabilities at token 3, whose weights are `row` `[N, T]`, in NumPy float64."""
    p = reference.parameters(model)
    x = p["embedding"][np.asarray(inputs)]
    block = {path.removeprefix("layers."): value[0] for path, value in p.items() if path.startswith("layers.")}
    z = reference.rms(x, block["attention_norm.scale"], 1e-6)
    value = np.einsum("td,dnv->tnv", z, block["attention.value_weight"])
    x = x[3] + np.einsum("nt,tnv,nvd->d", row, value, block["attention.output_weight"])
    z = reference.rms(x, block["mlp_norm.scale"], 1e-6)
    up, gate = z @ block["mlp.up_weight"], z @ block["mlp.gate_weight"]
    x = x + (up * gate / (1 + np.exp(-gate))) @ block["mlp.down_weight"]
    logits = reference.rms(x, p["final_norm.scale"], 1e-6) @ p["head_weight"]
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def own_row(model, inputs):
    return np.asarray(model(inputs, observe=changed.weights_of)[1], np.float64)[-1, :, 3]


def test_what_a_row_is_worth_by_hand():
    model, inputs, found = sequence()
    row = own_row(model, inputs)
    before = answer_with(model, inputs, row)
    np.testing.assert_allclose(before, jax.nn.softmax(model(inputs)[3]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["weights"], row.mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(found["before"], [True, True, True, False, False])
    assert found["right"] == (before.argmax() == 3)
    uniform = np.broadcast_to(np.array([1, 1, 1, 1, 0]) / 4, row.shape)
    moved = np.abs(answer_with(model, inputs, uniform) - before).sum() / 2
    np.testing.assert_allclose(found["flattened"], moved, rtol=1e-3)
    # A ⊙ ∂y/∂A of the answer, by differences.
    slopes = np.zeros_like(row)
    for at in np.ndindex(row.shape):
        step = np.zeros_like(row)
        step[at] = 1e-5
        slopes[at] = (answer_with(model, inputs, row + step) - answer_with(model, inputs, row - step))[3] / 2e-5
    np.testing.assert_allclose(found["gradient"], np.abs((row * slopes).sum(axis=0)), rtol=2e-3, atol=1e-6)
    # Along the way from no weights at all.
    shares = (np.arange(400) + 0.5) / 400
    total = answer_with(model, inputs, row)[3] - answer_with(model, inputs, 0 * row)[3]
    by_key = np.zeros(5)
    for share in shares:
        for key in range(5):
            step = np.zeros_like(row)
            step[:, key] = 1e-5 * row[:, key]
            ends = (answer_with(model, inputs, share * row + sign * step)[3] for sign in (1, -1))
            by_key[key] += (next(ends) - next(ends)) / 2e-5 / len(shares)
    np.testing.assert_allclose(by_key.sum(), total, rtol=1e-3)
    np.testing.assert_allclose(found["integrated"], np.abs(by_key), rtol=1e-2, atol=1e-5)


def test_a_token_is_left_out_of_the_sequence():
    model, inputs, found = sequence()
    before = jax.nn.softmax(model(inputs)[3])
    for token in range(3):
        rest = jnp.delete(inputs, token)
        moved = np.abs(np.asarray(jax.nn.softmax(model(rest)[2]) - before)).sum() / 2
        np.testing.assert_allclose(found["left_out"][token], moved, rtol=1e-3, atol=1e-6)


def test_other_weights_are_found_and_take_from_the_largest():
    _, _, found = sequence()
    assert 0 < found["layer"] <= 1
    assert 0 < found["head"] <= 1
    model, inputs, _ = sequence()
    np.testing.assert_allclose(found["largest"], own_row(model, inputs).max(axis=1).mean(), rtol=1e-5)
    assert found["kept"] < found["largest"]


def test_only_what_is_answered_rightly_counts():
    rng = np.random.default_rng(0)
    right = np.array([True, False, True, True])
    before = np.tile(np.arange(6) < 5, (4, 1))
    weights = rng.uniform(size=(4, 6))
    opposite = np.where(right[:, None], -weights, weights)
    names = ("layer", "head", "kept", "largest", "flattened", "permuted", "completeness")
    found = {name: np.array([0.2, 9.0, 0.4, 0.6]) for name in names}
    found |= {"right": right, "before": before, "weights": weights, "gradient": weights, "integrated": opposite}
    found["left_out"] = rng.uniform(size=(4, 6))
    values = changed.by_run(found, seed=0)
    assert values["answered"] == 0.75
    assert values["layer"] == pytest.approx(0.4)
    assert (values["gradient"], values["integrated"]) == (pytest.approx(1), pytest.approx(-1))
    assert values["gradient_null"] < 0.9
    none = changed.by_run({**found, "right": np.zeros(4, bool)}, seed=0)
    assert np.isnan([none["layer"], none["gradient"], none["left_out_null"]]).all()


def test_a_best_rate_at_an_edge_settles_nothing():
    def rows(arm, losses):
        return [
            {"part": "training", "arm": arm, "rate": rate, "seed": seed, "step": 1, "measure": measure, "value": value}
            for rate, loss in losses.items()
            for seed in range(2)
            for measure, value in (("loss", loss), ("accuracy", 1 - loss - 0.1 * seed))
        ]

    inside, edge = {0.1: 0.5, 0.2: 0.1, 0.4: 0.5}, {0.1: 0.1, 0.2: 0.4, 0.4: 0.5}
    paired = results.short_of_learned(pd.DataFrame(rows("a", inside) + rows("a_uniform", {0.1: 0.6})), "a")
    assert (paired.value, paired.low, paired.high) == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5))
    assert np.isnan(results.short_of_learned(pd.DataFrame(rows("a", edge) + rows("a_uniform", inside)), "a").value)


def test_a_run():
    result = attention_explanation.run(CONFIG)
    assert [outcome.claim.id for outcome in result.claims] == ["D3", "D3b"]
    assert {outcome.verdict for outcome in result.claims} == {"inconclusive"}  # two seeds, one task
    rows = result.measurements
    assert set(rows["arm"]) == {"keyword", "keyword_uniform"}
    assert len(rows.query("part == 'changed' and measure == 'layer'")) == 2
    assert len(result.figure().axes) == 3
    assert [len(table.rows) for table in result.tables] == [1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 3}, "num_classes must be even"),
        ({"keys": 2, "pairs": 4}, "num_keys must be at least 4, got 2"),
        ({"length": 4, "pairs": 4, "keys": 4}, "length must be at least 8, got 4"),
        ({"num_heads": 3}, "model_width"),
        ({"epsilon": 1.5}, "epsilon must be at most 1"),
        ({"arms": ("lookups",)}, f"arms must be one of {', '.join(ARMS)}"),
    ],
)
def test_numbers_that_do_not_go_together(changes, message):
    with pytest.raises(ValueError, match=message):
        EXPERIMENT.preset("quick", **changes)
