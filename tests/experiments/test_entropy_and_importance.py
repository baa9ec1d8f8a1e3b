"""entropy_and_importance: which heads are at the ends, and how entropy is held against what heads are worth."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments import entropy_and_importance, head_removal
from experiments.claims.removal import D2A_FIELDS, ENDS
from experiments.entropy_and_importance import EXPERIMENT, ImportanceConfig, results
from tests.models import llama_files

L, N = llama_files.LAYERS, llama_files.N


def test_rank_correlation_is_within_layers():
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((L, N)), rng.standard_normal((3, L, N))
    first[1] += 100  # between layers nothing is compared
    found = results.within_layers(first, second)
    for one, value in zip(second, found, strict=True):
        ranks = [np.concatenate([stats.rankdata(layer) for layer in x]) for x in (first, one)]
        assert value == pytest.approx(np.corrcoef(*ranks)[0, 1])
    np.testing.assert_allclose(results.within_layers(first, -second), -found)
    assert results.within_layers(first, np.ones((L, N))) == 0


def test_a_head_changes_the_cost_if_its_interval_says_so():
    cost = np.array([[0.1, -0.1, 0.1], [0.11, -0.12, -0.1], [0.09, -0.11, 0.12]])
    np.testing.assert_array_equal(results.changes(cost), [1, -1, 0])


def test_the_difference_is_paired_by_document():
    rows = [
        {"part": "pairs", "checkpoint": "a", "arm": "model", "end": end, "set": which, "document": i, "value": x}
        for end, which, values in (
            ("sharp", "chosen", (0.1, 0.4)), ("sharp", "matched", (0.3, 0.5)), ("diffuse", "chosen", (9.0, 9.0)),
        )
        for i, x in enumerate(values)
    ]  # fmt: skip
    np.testing.assert_allclose(results.difference(pd.DataFrame(rows), end="sharp"), [-0.2, -0.1])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("importance")
    llama_files.write(folder / "small.gguf")
    (folder / "text.txt").write_text("heads that a small model may lose, or may not; " * 8, "utf-8")
    return ImportanceConfig(
        model=(str(folder / "small.gguf"),), text_file=str(folder / "text.txt"), max_tokens=20, documents=6, fitted=2,
        share=0.15, draws=2, singles=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(config):
    return entropy_and_importance.run(config)


def test_the_ends_are_the_sharpest_and_the_most_diffuse(config, result):
    (name,) = config.model
    entropy = head_removal.heads_of(config, name, "model").normalized_entropy
    pairs = result.measurements.query("part == 'pairs' and arm == 'model' and set == 'chosen'")
    assert set(pairs["end"]) == {"sharp", "diffuse", "sharp_no_sink", "diffuse_no_sink"}
    for end, at in (("sharp", entropy.argmin()), ("diffuse", entropy.argmax())):
        alone = (np.arange(entropy.size) == at).reshape(entropy.shape)
        expected = head_removal.costs(config, name, "model", [alone])[0]
        found = head_removal.by_document(pairs, end=end)
        np.testing.assert_allclose(found, expected, atol=1e-6)
    control = result.measurements.query("arm == 'random_weights'")
    assert set(control["end"]) == set(ENDS)


def test_every_head_has_entropy_and_importance_and_some_have_a_cost(config, result):
    (name,) = config.model
    rows = result.measurements
    heads = head_removal.heads_of(config, name, "model")
    np.testing.assert_allclose(
        results.cube(rows, name, "normalized_entropy_no_sink"), heads.normalized_entropy_no_sink, rtol=1e-6
    )
    importance, cost = (results.cube(rows, name, measure) for measure in ("importance", "cost"))
    np.testing.assert_allclose(importance, head_removal.importance(config, name), rtol=1e-5)
    removed = np.argwhere(~np.isnan(cost[0]))
    assert len(removed) == 4
    layer, head = removed[0]
    alone = np.zeros((L, N), bool)
    alone[layer, head] = True
    expected = head_removal.costs(config, name, "model", [alone])[0]
    np.testing.assert_allclose(cost[:, layer, head], expected, atol=1e-6)
    agreement = results.agreement(rows, name)
    at = tuple(removed.T)
    expected = [stats.spearmanr(importance[d][at], np.abs(cost[d][at])).statistic for d in range(6)]
    np.testing.assert_allclose(agreement, expected)


def test_the_outcome_and_what_is_told(result):
    (outcome,) = result.claims
    assert outcome.claim.id == "D2a"
    found = {field: outcome.evidence[f"{field}_1"] for field in D2A_FIELDS}
    assert {x.count for x in found.values()} == {6}
    assert all(np.isfinite(x.value) for x in found.values())
    assert np.isnan(outcome.evidence["sharp_2"].value)
    ends, singles = result.tables
    assert len(ends.rows) == 6
    assert singles.rows[0][2] == "4"
    assert len(result.figure().axes) == 4


def test_a_run_on_a_real_encoder_has_no_gradient():
    result = entropy_and_importance.run(EXPERIMENT.preset("smoke"))
    (outcome,) = result.claims
    assert outcome.verdict == "inconclusive"  # two documents
    assert np.isnan(outcome.evidence["agreement_1"].value)
    cost, importance = (results.cube(result.measurements, "minilm", measure) for measure in ("cost", "importance"))
    removed = ~np.isnan(cost[0])
    assert removed.sum() == 3
    np.testing.assert_allclose(cost[:, removed], importance[:, removed], atol=1e-6)
