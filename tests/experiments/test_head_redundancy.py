"""head_redundancy: which heads count as alike, which of them go, and what is told of it."""

import numpy as np
import pandas as pd
import pytest

from experiments import head_redundancy
from experiments.claims.removal import H5_FIELDS
from experiments.head_redundancy import RedundancyConfig, measured, results
from experiments.head_redundancy.config import ORDERS
from experiments.head_removal import ARMS, Heads
from tests.models import llama_files

L, N = llama_files.LAYERS, llama_files.N


def heads(divergence, cka):
    nothing = np.zeros(np.shape(divergence)[:2])
    return Heads(nothing[..., None], nothing, nothing, nothing, np.asarray(divergence), np.asarray(cka))


def pair(x):
    return np.array([[[0, x], [x, 0]]])


@pytest.mark.parametrize(
    ("divergence", "cka", "expected"),
    [
        (0.05, 1.0, 1.0),
        (0.0, 0.95, 1.0),
        (0.2, 0.99, 2.0),  # alike in what they bring, not in where they look
        (0.01, 0.55, 3.0),  # the other way round
        (np.nan, 1.0, np.sqrt(20)),
        (0.0, np.nan, np.sqrt(20)),
        (0.0, 1 + 1e-6, 0.0),
    ],
)
def test_a_redundant_pair_is_alike_in_both_ways(divergence, cka, expected):
    found = measured.distance(heads(pair(divergence), pair(cka) + np.eye(2)))
    np.testing.assert_allclose(found, pair(expected), atol=1e-12)


# Three heads close together, one of them in the middle; two others; one alone. Another layer without neighbours.
PLACES = np.array([[0.0, 0.3, 0.55, 10.0, 10.2, 20.0], [0.0, 7.0, 14.0, 21.0, 28.0, 35.0]])
APART = np.abs(PLACES[:, :, None] - PLACES[:, None, :])


def test_of_each_cluster_the_most_central_head_stays():
    labels = measured.clusters(APART, 1.0)
    left_over = measured.surplus(APART, labels)
    np.testing.assert_array_equal(np.flatnonzero(left_over[0]), [0, 2, 4])
    assert not left_over[1].any()
    np.testing.assert_array_equal(measured.alone(labels)[0], [False] * 5 + [True])
    assert measured.alone(labels)[1].all()


@pytest.mark.parametrize(("share", "expected"), [(0.05, []), (1 / 12, [4]), (0.25, [0, 2, 4]), (0.3, [0, 2, 4])])
def test_the_tightest_clusters_leave_a_share_over(share, expected):
    left_over = measured.surplus(APART, measured.tightest(APART, share))
    np.testing.assert_array_equal(np.flatnonzero(left_over[0]), expected)
    assert not left_over[1].any()


def test_the_gain_is_paired_by_document():
    costs = {
        ("chosen", 0): (0.1, 0.3),
        ("chosen", 1): (0.2, 0.2),
        ("matched", 0): (0.5, 0.5),
        ("matched", 1): (0.3, 0.9),
    }
    rows = [
        {"part": "pairs", "checkpoint": "a", "arm": arm, "set": which, "draw": draw, "document": i, "value": sign * x}
        for (which, draw), values in costs.items()
        for i, x in enumerate(values)
        for arm, sign in (("model", 1), ("random_weights", -1))
    ]
    np.testing.assert_allclose(results.gain(pd.DataFrame(rows), checkpoint="a", arm="model"), [0.25, 0.45])


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Of a small model whose heads 0 and 1 of the first layer, which share a key/value head, have equal queries."""
    folder = tmp_path_factory.mktemp("redundancy")
    weights = llama_files.tensors()
    query = weights["blk.0.attn_q.weight"]
    query[llama_files.H : 2 * llama_files.H] = query[: llama_files.H]
    llama_files.write(folder / "twins.gguf", weights=weights)
    (folder / "text.txt").write_text("heads that a small model may lose, or may not; " * 8, "utf-8")
    config = RedundancyConfig(
        model=(str(folder / "twins.gguf"),), text_file=str(folder / "text.txt"), max_tokens=20, documents=6, fitted=2,
        share=0.15, shares=(0.15, 0.5), draws=2,
    )  # fmt: skip
    return head_redundancy.run(config)


def test_twins_are_found_and_one_of_them_goes(result):
    rows = result.measurements
    (name,) = results.measured_checkpoints(rows)
    assert results.redundant(rows, name, "model") == 1 / (L * N)
    assert results.redundant(rows, name, "random_weights") == 0
    nearest = rows.query("part == 'nearest' and arm == 'model' and layer == 0 and head == 0")
    values = dict(zip(nearest["measure"], nearest["value"], strict=True))
    assert values["divergence"] == pytest.approx(0, abs=1e-6)
    assert values["cka"] == pytest.approx(1, abs=1e-5)
    pairs = rows.query("part == 'pairs' and arm == 'model'")
    assert set(pairs["heads"]) == {1}


def test_the_outcome_and_what_is_told(result):
    (outcome,) = result.claims
    assert outcome.claim.id == "H5"
    found = {field: outcome.evidence[f"{field}_1"] for field in H5_FIELDS}
    assert found["gain"].count == found["cost"].count == 6
    assert found["removed"].value == 1
    assert all(np.isfinite(x.value) for x in found.values())
    assert np.isnan(outcome.evidence["gain_2"].value)
    assert "6 documents of 20 tokens" in outcome.scope
    assert "15% of the heads at once, 2 draws" in outcome.scope
    beside, shares = result.tables
    assert [row[1] for row in beside.rows] == [arm.replace("_", " ") for arm in ARMS]
    assert [row[1] for row in shares.rows] == list(ORDERS.values())
    assert len(result.figure().axes) == 3


def test_as_many_heads_go_in_every_order(result):
    more = result.measurements.query("part == 'more'")
    counts = more.groupby(["order", "share"])["heads"].unique()
    assert {order: counts[order, 0.5].tolist() for order in ("importance", "chance")} == {
        "importance": [4],
        "chance": [4],
    }
    assert counts["similar", 0.15].tolist() == [1]
    assert 1 <= counts["similar", 0.5][0] <= 4
    least = more.query("order == 'importance' and share == 0.15")["value"]
    assert len(least) == 6


def test_shares_ascend():
    with pytest.raises(ValueError, match="shares must ascend"):
        RedundancyConfig(shares=(0.2, 0.1))
