"""What it costs to remove heads: on a small decoder against NumPy, and on a real encoder."""

import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import models
from experiments import head_removal
from experiments.harness import InputError
from experiments.head_removal import RemovalConfig
from tests.models import llama_files

L, N = llama_files.LAYERS, llama_files.N
TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("removal")
    llama_files.write(folder / "small.gguf")
    (folder / "text.txt").write_text("heads that a small model may lose, or may not; " * 8, "utf-8")
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return RemovalConfig(
        model=(str(folder / "small.gguf"),), text_file=str(folder / "text.txt"), max_tokens=TOKENS, documents=6,
        fitted=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def name(config):
    return config.model[0]


@pytest.fixture
def encoder():
    return RemovalConfig(model=("minilm",), max_tokens=TOKENS, documents=2, fitted=2)


def run(weights, token_ids, *, removed=None, mean=None):
    """The small model in float64, some heads at their means: weights `[L, N, T, T]`, outputs `[L, T, N, V]`, loss."""
    f, steps = llama_files, len(token_ids)
    w = {key: values.astype(np.float64) for key, values in weights.items()}
    x, every_p, every_output = w["token_embd.weight"][token_ids], [], []
    for i in range(L):
        layer = {key.split(".")[2]: values for key, values in w.items() if key.startswith(f"blk.{i}.")}
        y = f.rms(x) * layer["attn_norm"]
        query = f.rotate((y @ layer["attn_q"].T).reshape(steps, N, f.H))
        key = np.repeat(f.rotate((y @ layer["attn_k"].T).reshape(steps, f.K, f.H)), N // f.K, axis=1)
        value = np.repeat((y @ layer["attn_v"].T).reshape(steps, f.K, f.V), N // f.K, axis=1)
        e = np.tri(steps) * np.exp(np.einsum("tnh,snh->nts", query, key) / np.sqrt(f.H))
        every_p.append(e / e.sum(-1, keepdims=True))
        output = np.einsum("nts,snv->tnv", every_p[-1], value)
        if removed is not None:
            output[1:] = np.where(removed[i][:, None], mean[i], output[1:])
        every_output.append(output)
        x = x + output.reshape(steps, -1) @ layer["attn_output"].T
        y = f.rms(x) * layer["ffn_norm"]
        gate = y @ layer["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["ffn_up"].T)) @ layer["ffn_down"].T
    logits = (f.rms(x) * w["output_norm.weight"] @ w["token_embd.weight"].T)[:-1]
    loss = np.log(np.exp(logits).sum(-1)) - logits[np.arange(steps - 1), token_ids[1:]]
    return np.stack(every_p), np.stack(every_output), loss.mean()


def entropies(p, first=0):
    """Normalised entropy `[N]` of causal weights without the first keys, mean over rows with two keys or more."""
    rows = []
    for t in range(first + 1, p.shape[-1]):
        q = p[:, t, first : t + 1] / p[:, t, first : t + 1].sum(-1, keepdims=True)
        rows.append(-(q * np.log(q)).sum(-1) / np.log(t + 1 - first))
    return np.mean(rows, axis=0)


def test_the_oracle_is_the_model(config, name):
    token_ids = head_removal.documents(config, name, "model")[1][0]
    weights = llama_files.tensors()
    logits = llama_files.logits(weights, token_ids)[:-1]
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(TOKENS - 1), token_ids[1:]]
    assert run(weights, token_ids)[2] == pytest.approx(expected.mean(), rel=1e-12)


def test_heads_are_measured_on_the_fitted_documents(config, name):
    heads = head_removal.heads_of(config, name, "model")
    found = [run(llama_files.tensors(), token_ids) for token_ids in head_removal.documents(config, name, "model")[0]]
    p = np.stack([one[0] for one in found], axis=1)  # [L, documents, N, T, T]
    output = np.concatenate([one[1] for one in found], axis=1)  # [L, documents · T, N, V]
    without_first = np.concatenate([one[1][:, 1:] for one in found], axis=1)
    np.testing.assert_allclose(heads.mean, without_first.mean(axis=1), atol=1e-5)
    np.testing.assert_allclose(heads.sink_mass, p[..., 0].mean(axis=(1, 3)), atol=1e-5)
    for field, first in (("normalized_entropy", 0), ("normalized_entropy_no_sink", 1)):
        expected = np.mean([[entropies(one, first) for one in layer] for layer in p], axis=1)
        np.testing.assert_allclose(getattr(heads, field), expected, atol=1e-5)
    divergences = []
    for a, b in ((p[1, d, 0, t, : t + 1], p[1, d, 3, t, : t + 1]) for d in range(2) for t in range(1, TOKENS)):
        m = (a + b) / 2
        divergences.append(((a * np.log(a / m)).sum() + (b * np.log(b / m)).sum()) / 2 / np.log(2))
    assert heads.divergence[1, 0, 3] == pytest.approx(np.mean(divergences), abs=1e-5)
    x, y = (output[1, :, n] - output[1, :, n].mean(axis=0) for n in (0, 3))
    cka = np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
    assert heads.cka[1, 0, 3] == pytest.approx(cka, abs=1e-5)


def test_the_cost_is_what_the_loss_grows_by(config, name):
    judged = head_removal.documents(config, name, "model")[1]
    mean = np.asarray(head_removal.heads_of(config, name, "model").mean, np.float64)
    sets = np.zeros((3, L, N), bool)
    sets[1, 0, 2] = sets[2, 1] = True
    expected = [
        [
            run(llama_files.tensors(), ids, removed=one, mean=mean)[2] - run(llama_files.tensors(), ids)[2]
            for ids in judged
        ]
        for one in sets
    ]
    found = head_removal.costs(config, name, "model", list(sets))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found[1]).max() > 1e-3
    assert (found[0] == 0).all()


def test_batches_of_documents_are_put_together(config, name, monkeypatch):
    removed = [np.arange(L * N).reshape(L, N) % 3 == 0]
    whole = head_removal.costs(config, name, "model", removed)
    monkeypatch.setattr(head_removal, "BATCH", 3)
    np.testing.assert_allclose(head_removal.costs(config, name, "model", removed), whole, atol=1e-6)


def test_importance_is_the_gradient_of_the_loss(config, name):
    judged = head_removal.documents(config, name, "model")[1]
    found = head_removal.importance(config, name)
    assert found.shape == (len(judged), L, N)
    step = 1e-4
    for layer, head in ((0, 1), (1, 3)):
        losses = []
        for gate in (1 + step, 1 - step):
            weights = llama_files.tensors()
            weights = {key: values.astype(np.float64) for key, values in weights.items()}
            columns = slice(head * llama_files.V, (head + 1) * llama_files.V)
            weights[f"blk.{layer}.attn_output.weight"][:, columns] *= gate
            losses.append(run(weights, judged[2])[2])
        assert found[2, layer, head] == pytest.approx(abs(losses[0] - losses[1]) / (2 * step), rel=1e-3)


def test_an_encoder_loses_cosine_and_no_nats(encoder):
    loaded, judged = models.load("minilm"), head_removal.documents(encoder, "minilm", "model")[1]
    removed = np.zeros((6, 12), bool)
    removed[2, 3:8] = True
    mean = head_removal.heads_of(encoder, "minilm", "model").mean
    hidden = []
    for gone in (removed, np.zeros_like(removed)):
        ablation = head_removal.Ablation(jnp.asarray(1.0 - gone), jnp.asarray(mean))
        found = loaded.model(judged, intervene=head_removal.remove_heads, interventions=ablation)
        hidden.append(np.asarray(found, np.float64).mean(axis=1))
    cut, whole = hidden
    cosine = (cut * whole).sum(-1) / np.linalg.norm(cut, axis=-1) / np.linalg.norm(whole, axis=-1)
    found = head_removal.costs(encoder, "minilm", "model", [removed])
    np.testing.assert_allclose(found[0], 1 - cosine, atol=1e-6)
    assert (found > 1e-3).all()


def test_importance_of_an_encoder_is_the_cost_of_each_head(encoder):
    alone = np.zeros((6, 12), bool)
    alone[4, 7] = True
    found = head_removal.importance(encoder, "minilm")
    assert found.shape == (2, 6, 12)
    np.testing.assert_allclose(found[:, 4, 7], head_removal.costs(encoder, "minilm", "model", [alone])[0], atol=1e-6)
    of_fitted = head_removal.costs(encoder, "minilm", "model", [alone], fitted=True)[0]
    np.testing.assert_allclose(head_removal.importance(encoder, "minilm", fitted=True)[:, 4, 7], of_fitted, atol=1e-6)
    assert np.abs(of_fitted - found[:, 4, 7]).max() > 1e-5


def test_matched_heads_are_of_the_same_layers_and_alike():
    rng = np.random.default_rng(0)
    chosen = np.zeros((2, 6), bool)
    chosen[0, :2] = chosen[1, 0] = True
    others = np.ones((2, 6), bool) & ~chosen
    alike = np.ones((2, 6, 6), bool)
    alike[0, 1, :5] = alike[1, 0] = False  # head 1 of layer 0 has one that is alike, that of layer 1 has none
    seen = set()
    for _ in range(40):
        kept, drawn = head_removal.matched(rng, chosen, others, alike)
        assert (kept <= chosen).all()
        assert (drawn <= others).all()
        np.testing.assert_array_equal(kept.sum(axis=1), drawn.sum(axis=1))
        assert not kept[1].any()
        assert kept[0, 0]
        assert drawn[0, 5] or not kept[0, 1]
        seen.add(tuple(np.flatnonzero(drawn[0])))
    assert seen == {(5,), (2, 5), (3, 5), (4, 5)}  # drawn, and not always the same


def test_rows_of_pairs(config, name):
    chosen = np.arange(L * N).reshape(L, N) % N == 1
    rows = head_removal.pair_rows(config, name, "model", chosen, ~chosen, end="sharp")
    assert len(rows) == config.draws * 2 * 6
    assert {row["heads"] for row in rows} == {2}
    cost = head_removal.costs(config, name, "model", [chosen])[0]
    for row in rows:
        if row["set"] == "chosen":
            assert row["value"] == pytest.approx(cost[row["document"]], abs=1e-6)
    assert rows == head_removal.pair_rows(config, name, "model", chosen, ~chosen, end="sharp")


def test_documents_to_fit_and_to_judge_are_apart(config, name):
    fitted, judged = head_removal.documents(config, name, "model")
    assert fitted.shape == (2, TOKENS)
    assert judged.shape == (6, TOKENS)
    both = {tuple(x) for x in fitted} & {tuple(x) for x in judged}
    assert not both
    shuffled = head_removal.documents(config, name, "shuffled_tokens")[1]
    assert (shuffled != judged).any()
    np.testing.assert_array_equal(np.sort(shuffled), np.sort(judged))


def test_the_lowest_share_of_the_heads():
    values = np.array([[3.0, 1.0], [2.0, 0.0], [5.0, 4.0]])
    np.testing.assert_array_equal(head_removal.lowest(values, 0.5), values < 2.5)
    assert not head_removal.lowest(values, 0.1).any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": ("nonsense",)}, "--model=nonsense"),
        ({"fitted": 40}, "the text has .* documents of 20 tokens, --fitted=40"),
    ],
)
def test_what_cannot_be_read_is_named(config, change, says):
    flags = {**config.as_dict(), "model": config.model, **change}
    with pytest.raises(InputError, match=says):
        head_removal.inputs(RemovalConfig(**flags))


def test_too_many_checkpoints():
    with pytest.raises(ValueError, match="model must name at most 3 checkpoints"):
        RemovalConfig(model=("a", "b", "c", "d"))
