"""What is shown of a model is its routing, held against NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.diagnostics.diagnosis import Captures, Diagnosis
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.training.checkpoints import Checkpoints
from experiments import train
from experiments.model_report import sources, subjects
from experiments.model_report.config import ModelReportConfig
from experiments.model_report.page import compare, encode, render
from experiments.model_report.subjects import Look, Window, subject_of_captures, subject_of_model
from experiments.train.config import TrainConfig
from tests.experiments.report_subjects import unpacked

LENGTH, LAYERS, HEADS, WIDTH = 12, 2, 4, 4
SHAPE = {"vocabulary_size": 17, "num_layers": LAYERS, "model_width": 16, "num_heads": HEADS, "num_kv_heads": 2}
TOKENS = np.random.default_rng(0).integers(0, 17, LENGTH)


@pytest.fixture
def undiagnosed(monkeypatch):
    """Without the seconds that a diagnosis takes, which is another's to test."""
    monkeypatch.setattr(subjects, "diagnose", lambda *_, name: Diagnosis(name, (), {"sink_mass": np.zeros((1, 1))}))


def model_of(**options):
    """A small model whose heads differ."""
    return Transformer(TransformerConfig(**SHAPE, **options), rngs=nnx.Rngs(0))


def looked_at(model, window=(4, 9)):
    return subject_of_model(model, TOKENS, [f"t{i}" for i in range(LENGTH)], name="m", text="x", window=window)


def routing(model, *, causal=True):
    """Logits and weights `[L, N, T, T]` of the model in float64, and its queries and keys."""
    _, (query, key) = model(jnp.asarray(TOKENS), observe=observe_both)
    query, key = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in (query, key))  # [L, N, T, H]
    key = np.repeat(key, HEADS // key.shape[1], axis=1)
    logits = query @ np.swapaxes(key, -1, -2) / WIDTH**0.5
    seen = np.tril(np.ones((LENGTH, LENGTH), bool)) | (not causal)
    p = np.where(seen, np.exp(logits), 0)
    return p / p.sum(-1, keepdims=True), seen.sum(-1), query, key


def observe_both(query, key, value, **options):
    return query, key


def observe_all(query, key, value, **options):
    return {"query": query, "key": key, "value": value}


@pytest.mark.parametrize("causal", [True, False])
def test_a_look_is_the_routing_of_the_model(causal, undiagnosed):
    model = model_of(causal=causal)
    p, count, query, key = routing(model, causal=causal)
    found = looked_at(model)
    expected = np.concatenate(
        [p[..., 4:9, 4:9], p[..., 4:9, :4].sum(-1)[..., None], p[..., 4:9, 9:].sum(-1)[..., None]], -1
    )
    np.testing.assert_allclose(found.look.pattern, expected, atol=1e-6)
    assert (found.look.pattern[..., -1] > 0).all() == (not causal)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1) / np.log(np.maximum(count, 2))
    entropy = np.where(count > 1, entropy, 1)
    np.testing.assert_allclose(found.look.entropy, entropy, atol=1e-5)
    assert found.positions.tolist() == list(range(LENGTH))
    centred = query @ np.swapaxes(key - key.mean(axis=-2, keepdims=True), -1, -2) / WIDTH**0.5
    expected = np.linalg.svd(centred, compute_uv=False)[..., :WIDTH]
    np.testing.assert_allclose(found.look.spectrum, expected, rtol=1e-3, atol=1e-5)
    assert found.tokens == ("t4", "t5", "t6", "t7", "t8")
    assert (found.start, found.length) == (4, LENGTH)
    assert found.look.choosing.all()
    assert found.diagnosis == Diagnosis("m", (), found.diagnosis.measures)


def test_heads_that_look_alike_are_put_together(undiagnosed):
    """Head 1 of the last layer is made head 0, of the same keys: no query tells them apart."""
    model = model_of(causal=True)
    weight = model.layers.attention.query_weight
    weight[...] = weight[...].at[1, :, 1].set(weight[...][1, :, 0])
    found = looked_at(model)
    first, copy = HEADS, HEADS + 1
    assert found.divergence[first, copy] < 1e-6
    assert found.clusters[first] == found.clusters[copy]
    assert len(set(found.clusters)) > 1
    assert found.divergence.shape == (LAYERS * HEADS,) * 2
    p = found.look.pattern.astype(np.float64).reshape(LAYERS * HEADS, 5, 7)

    def entropy(x):
        return -np.where(x > 0, x * np.log(np.where(x > 0, x, 1)), 0).sum(-1)

    expected = (entropy((p[0] + p[5]) / 2) - (entropy(p[0]) + entropy(p[5])) / 2).mean() / np.log(2)
    np.testing.assert_allclose(found.divergence[0, 5], expected, rtol=1e-4)


def test_a_query_without_a_choice_does_not_make_heads_alike():
    """Of two queries the first sees one key: the heads differ by what the other does."""
    weights = np.zeros((1, 2, 2, 4), np.float32)
    weights[0, :, 0, 0] = weights[0, 0, 1, 0] = weights[0, 1, 1, 1] = 1
    choosing = np.array([[[False, True]] * 2])
    shown = Look(jnp.asarray(weights), jnp.asarray(choosing), jnp.ones((1, 2, 2)), jnp.ones((1, 2, 1)))
    found = Window((0, 2), 2).subject(shown, Diagnosis("m", (), {}), ["a", "b"], name="m", text="x")
    np.testing.assert_allclose(found.divergence, [[0, 1], [1, 0]], atol=1e-6)
    assert found.clusters.tolist() == [0, 1]
    alone = dataclasses.replace(shown, choosing=jnp.zeros((1, 2, 2), bool))
    found = Window((0, 2), 2).subject(alone, Diagnosis("m", (), {}), ["a", "b"], name="m", text="x")
    np.testing.assert_array_equal(found.divergence, [[0, 1], [1, 0]])  # nothing in common is known


def test_curves_have_so_many_points_and_windows_end_with_the_text():
    window = Window((590, 640), 600)
    assert window.positions[[0, -1]].tolist() == [0, 599]
    assert len(window.positions) == 256
    assert window.rows.tolist() == list(range(590, 600))
    assert Window((0, 4), 5).positions.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="window must hold tokens of the 600 that were read, got 600:610"):
        Window((600, 610), 600)


def test_captured_arrays_are_looked_at_as_the_model_they_come_from(undiagnosed, tmp_path):
    model = model_of(causal=True)
    _, kept = model(jnp.asarray(TOKENS), observe=observe_all)
    arrays = {f"layers.{i}.{name}": np.asarray(x[i]) for name, x in kept.items() for i in range(LAYERS)}
    arrays |= {f"layers.{i}.mask": np.tril(np.ones((LENGTH, LENGTH), bool)) for i in range(LAYERS)}
    np.savez(tmp_path / "c.npz", **arrays)
    config = ModelReportConfig(capture=(str(tmp_path / "c.npz"),), window="4:9")
    expected, (found,) = looked_at(model), sources.subjects(config)
    for field in ("pattern", "entropy", "spectrum", "choosing"):
        np.testing.assert_allclose(getattr(found.look, field), getattr(expected.look, field), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.divergence, expected.divergence, atol=1e-4)
    assert found.tokens == ("t4", "t5", "t6", "t7", "t8")


def test_layers_of_captures_may_differ_in_heads_but_not_in_length(undiagnosed):
    rng = np.random.default_rng(0)

    def layer(i, length, heads, width):
        return {f"layers.{i}.{x}": rng.standard_normal((1, length, heads, width)) for x in ("query", "key", "value")}

    found = subject_of_captures(Captures.of(layer(0, 5, 2, 3) | layer(4, 5, 1, 2)), name="c", window=(0, 9))
    assert found.look.pattern.shape == (2, 2, 5, 7)
    assert np.isnan(found.look.pattern[1, 1]).all()
    assert np.isnan(found.look.spectrum[1, 0, 2])
    assert np.isfinite(found.look.spectrum[0]).all()
    assert unpacked(encode(found)["pattern"]).shape == (2, 2, 5, 5)
    render([found])
    with pytest.raises(ValueError, match=r"layers must have 5 queries and 5 keys, got \(6, 6\) in layer 1"):
        subject_of_captures(Captures.of(layer(0, 5, 2, 3) | layer(1, 6, 2, 3)), name="c", window=(0, 9))


def test_two_steps_of_a_run(undiagnosed, tmp_path):
    trained = TrainConfig(task="copy", distance=2, length=LENGTH, num_layers=1, model_width=8, num_heads=2)
    task, _ = trained.make_task()
    state = train.begin(trained, task)
    moved = dataclasses.replace(state, params=jax.tree.map(lambda x: 3 * x, state.params))
    train.keep_record(tmp_path, trained, {"preset": "quick", "command": "", "inputs": {}})
    kept = Checkpoints(tmp_path / "checkpoints", run={})
    kept.save(10, state)
    kept.save(20, moved)
    config = ModelReportConfig(run=str(tmp_path), steps=(10, 0), window="4:9")
    before, after = sources.subjects(config)
    assert (before.name, after.name) == (f"{tmp_path.name}, step 10", f"{tmp_path.name}, step 20")
    token_ids = np.asarray(task.evaluation(1, 1).inputs[0, 0])
    assert before.tokens == after.tokens == tuple(map(str, token_ids[4:9]))
    for found, model in ((before, state.model), (after, moved.model)):
        expected = subject_of_model(model, token_ids, ["t"] * LENGTH, name="", text="", window=(4, 9))
        np.testing.assert_array_equal(found.look.pattern, expected.look.pattern)
    assert (before.look.pattern != after.look.pattern).any()
    assert compare([before, after]) == {"heads": True, "window": True}
    with pytest.raises(sources.InputError, match=r"there is no checkpoint of step 7 in .*, only of 10, 20"):
        sources.subjects(dataclasses.replace(config, steps=(7,)))
    (tmp_path / "checkpoints" / "00000020" / "manifest.json").write_text("{}")
    with pytest.raises(sources.InputError, match=r"cannot be read: manifest\.json is not what was written"):
        sources.subjects(dataclasses.replace(config, steps=(20,)))
