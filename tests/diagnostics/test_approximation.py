"""The report against naive float64 row by row; every mechanism of the library as a candidate."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attn_jax
from attn_jax import linear, lowrank, routed
from attn_jax.diagnostics import Approximation, Candidate, Work, approximation_report
from tests import oracles

FIELDS = ("output_error", "mass_kept", "top_k_recall", "entropy_shift", "negative_mass", "variance")


def problem(batch=(2,), queries=6, keys=9, heads=4, key_heads=2, width=5, value_width=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(queries, heads, width), (keys, key_heads, width), (keys, key_heads, value_width)]
    return [rng.standard_normal((*batch, *shape)) for shape in shapes]


def fetch(weights):
    """The candidate that has these weights, `[*B, N, T, S]`."""

    def attend(query, key, value, rng=None):
        shown = jnp.asarray(weights, value.dtype)
        if rng is not None:
            shown = shown * noise(rng, shown.shape)
        return jnp.einsum("...nts,...snv->...tnv", shown, jnp.repeat(value, shown.shape[-3] // value.shape[-2], -2))

    return attend


def noise(rng, shape):
    return 1 + 0.5 * jax.random.normal(rng, shape)


def naive(exact, implied, values, top_k):
    """The definitions, for one head: weights `[T, S]`, values `[S, V]`."""
    kept, recall, shift, negative, rows = 0.0, 0.0, 0.0, 0.0, 0
    for p, other in zip(exact, implied, strict=True):
        if p.sum() == 0:
            continue
        rows += 1
        positive = np.maximum(other, 0)
        kept += sum(min(a, b) for a, b in zip(p, positive, strict=True))
        negative += -np.minimum(other, 0).sum()
        wanted = [j for j in np.argsort(-p, kind="stable")[:top_k] if p[j] > 0]
        found = [j for j in np.argsort(-positive, kind="stable")[:top_k] if positive[j] > 0]
        recall += len(set(wanted) & set(found)) / len(wanted)
        shift += entropy(positive) - entropy(p)
    if not rows:
        return dict.fromkeys(FIELDS[:5], math.nan)
    error = np.linalg.norm(implied @ values - exact @ values) / np.linalg.norm(exact @ values)
    return dict(zip(FIELDS, (error, *(x / rows for x in (kept, recall, shift, negative))), strict=False))


def entropy(weights):
    total = weights.sum()
    return -sum(w / total * math.log(w / total) for w in weights if w > 0) if total else 0.0


def expected(exact, implied, value, top_k):
    """Of every item and head, `[*B, N]`."""
    group = exact.shape[-3] // value.shape[-2]
    found = {name: np.zeros(exact.shape[:-2]) for name in FIELDS[:5]}
    for *item, n in np.ndindex(exact.shape[:-2]):
        values = value[tuple(item)][:, n // group]
        for name, x in naive(exact[(*item, n)], implied[(*item, n)], values, top_k).items():
            found[name][(*item, n)] = x
    return found


@pytest.mark.parametrize("columns", [2, 4, 128])
def test_definitions(x64, columns):
    """Negative weights, rows that do not sum to 1, weights of 0, causal rows that see few keys; S not of whole blocks."""
    inputs, rng = problem(), np.random.default_rng(1)
    exact = oracles.attention(*inputs, is_causal=True, key_value_seq_lengths=[9, 2])
    implied = exact.weights * rng.uniform(0.2, 2, exact.weights.shape) + 0.05 * rng.standard_normal(exact.weights.shape)
    implied[..., rng.integers(0, 9, 4)] = 0
    found = approximation_report(
        *map(jnp.asarray, inputs), {"one": fetch(implied)}, is_causal=True, columns=columns, top_k=3,
        key_value_seq_lengths=jnp.array([9, 2]),
    )["one"]  # fmt: skip
    for name, x in expected(exact.weights, implied, inputs[2], 3).items():
        np.testing.assert_allclose(getattr(found, name), x, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(found.variance, 0)


def test_draws(x64):
    """Means and variance over draws, each with the same key for all its columns and its output."""
    inputs = problem()
    exact = oracles.attention(*inputs).weights
    draws, rng_key = 3, jax.random.key(5)
    options = {"columns": 4, "top_k": 2, "rng_key": rng_key, "draws": draws}
    candidates = {"one": Candidate(fetch(exact), random=True)}
    report = jax.jit(lambda *inputs: approximation_report(*inputs, candidates, **options)["one"])
    found = report(*map(jnp.asarray, inputs))
    drawn = [exact * np.asarray(noise(key, exact.shape)) for key in jax.random.split(rng_key, draws)]
    each = [expected(exact, implied, inputs[2], 2) for implied in drawn]
    for name in FIELDS[:5]:
        np.testing.assert_allclose(getattr(found, name), np.mean([x[name] for x in each], axis=0), rtol=1e-9)
    values = np.repeat(inputs[2], 2, axis=-2)
    outputs = np.stack([np.einsum("bnts,bsnv->btnv", implied, values) for implied in drawn])
    variance = outputs.var(axis=0, ddof=1).sum((1, 3)) / (np.einsum("bnts,bsnv->btnv", exact, values) ** 2).sum((1, 3))
    np.testing.assert_allclose(found.variance, variance, rtol=1e-9)


def test_the_exact_one_is_perfect():
    inputs = [jnp.asarray(x, jnp.float32) for x in problem()]
    window = {"local_window_size": (2, 1)}
    attend = functools.partial(attn_jax.dot_product_attention, **window)
    found = approximation_report(*inputs, {"exact": attend}, **window, top_k=9)["exact"]
    for name, x in {
        "output_error": 0,
        "mass_kept": 1,
        "top_k_recall": 1,
        "entropy_shift": 0,
        "negative_mass": 0,
    }.items():
        np.testing.assert_allclose(getattr(found, name), x, atol=1e-6)


def test_attention_over_some_of_the_keys_keeps_their_weight():
    inputs = problem()
    exact = oracles.attention(*inputs)
    near = np.abs(np.arange(6)[:, None] - np.arange(9)[None, :]) <= 2
    attend = functools.partial(attn_jax.dot_product_attention, local_window_size=2)
    found = approximation_report(*(jnp.asarray(x, jnp.float32) for x in inputs), {"window": attend})["window"]
    np.testing.assert_allclose(found.mass_kept, (exact.weights * near).sum(-1).mean(-1), rtol=1e-5)
    assert (np.asarray(found.entropy_shift) < 0).all()


def test_heads_without_a_row_are_marked():
    inputs = [jnp.asarray(x, jnp.float32) for x in problem()]
    lengths = {"key_value_seq_lengths": jnp.array([9, 0])}
    attend = functools.partial(attn_jax.dot_product_attention, **lengths)
    found = approximation_report(*inputs, {"exact": attend}, **lengths)["exact"]
    assert all(
        np.isfinite(getattr(found, name)[0]).all() and np.isnan(getattr(found, name)[1]).all() for name in FIELDS
    )


def test_it_runs_where_layers_are_scanned_and_keeps_the_cost():
    inputs = [jnp.asarray(x, jnp.float32) for x in problem()]
    candidates = {
        "window": Candidate(functools.partial(attn_jax.dot_product_attention, local_window_size=1), cost=Work(3, 4))
    }

    def run(*inputs):
        return approximation_report(*inputs, candidates)["window"]

    _, stacked = jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, [x[None] for x in inputs])
    assert stacked.cost == Work(3, 4)
    assert stacked.output_error.shape == (1, 2, 4)
    np.testing.assert_allclose(stacked.mass_kept[0], run(*inputs).mass_kept, rtol=1e-6)


def test_memory_is_linear_in_the_length():
    def bytes_of(length):
        x = jax.ShapeDtypeStruct((length, 1, 8), jnp.float32)
        run = functools.partial(approximation_report, candidates={"one": attn_jax.dot_product_attention}, columns=64)
        return jax.jit(run).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(4096) < 4.5 * bytes_of(1024)


# Every mechanism.


def mechanisms(width, heads, keys):
    def performer(query, key, value, rng):
        return linear.linear_attention(query, key, value, feature_map=linear.draw_features(rng, width, 64))

    def linformer(query, key, value, rng):
        return lowrank.linformer_attention(query, key, value, lowrank.draw_projection(rng, 4, keys))

    def routing(query, key, value, rng):
        return routed.routing_attention(query, key, value, routed.draw_centroids(rng, heads, 2, width))

    return {
        "elu": linear.linear_attention,
        "nystrom": functools.partial(lowrank.nystrom_attention, landmarks=4),
        "performer": Candidate(performer, random=True),
        "linformer": Candidate(linformer, random=True),
        "routing": Candidate(routing, random=True),
    }


def test_every_mechanism_is_a_candidate():
    """Weights read column by column are those that make the output; what must sum to 1 does."""
    inputs = [0.35 * jnp.asarray(x, jnp.float32) for x in problem((), 12, 12, 2, 2, 8, 12)]
    candidates = mechanisms(8, 2, 12)
    found = jax.jit(lambda *inputs: approximation_report(*inputs, candidates, columns=5, top_k=3, draws=2))(*inputs)
    for name, x in found.items():
        assert isinstance(x, Approximation)
        for field in FIELDS:
            assert jnp.isfinite(getattr(x, field)).all(), (name, field)
        assert (x.output_error > 1e-4).all(), name
        assert (x.mass_kept <= 1 + 1e-5).all(), name
        assert (x.variance > 0).all() == (name in ("performer", "linformer", "routing")), name
    assert (found["performer"].output_error < 0.3).all()
    assert (found["performer"].mass_kept > 0.85).all()
    assert (found["routing"].negative_mass == 0).all()
    assert (found["nystrom"].output_error < 0.2).all()


def test_hashing_is_a_candidate():
    """Query and key in one, so that exact attention leaves out the token itself."""
    inputs = [jnp.asarray(x, jnp.float32) for x in problem((), 12, 12, 2, 2, 8, 3)]
    query, value = inputs[0], inputs[2]
    key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)

    def hashed(query, key, value, rng, buckets=4):
        return routed.lsh_attention(query, value, routed.draw_rotations(rng, 2, 8, buckets, num_rounds=2))

    others = ~jnp.eye(12, dtype=bool)
    candidates = {
        "lsh": Candidate(hashed, random=True),
        "one": Candidate(functools.partial(hashed, buckets=1), random=True),
    }
    report = jax.jit(
        lambda *inputs: approximation_report(*inputs, candidates, mask=others, top_k=2, draws=2, columns=12)
    )
    found = report(query, key, value)
    np.testing.assert_allclose(found["one"].output_error, 0, atol=1e-5)  # one bucket holds all
    assert ((found["lsh"].mass_kept > 0.1) & (found["lsh"].mass_kept < 0.95)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": {}}, "candidates must map names to functions, at least one, got {}"),
        ({"candidates": [len]}, "candidates must map names to functions"),
        ({"candidates": {1: len}}, "candidates must have names that are non-empty texts, got 1"),
        ({"candidates": {"x": 3}}, r"candidates\['x'\] must be a function or a Candidate, got 3"),
        ({"candidates": {"x": lambda q, k, v: q}}, r"output of 'x' must have shape \[\*B, T, N, V\] = \(2, 6, 4, 3\), got"),
        ({"top_k": 10}, "top_k must be at most the number of keys S = 9, got 10"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"draws": 1}, "draws must be at least 2, got 1"),
        ({"columns": 0}, "columns must be at least 1, got 0"),
        ({"rng_key": 3}, "rng_key must be one key"),
        ({"dropout_rate": 0.5}, "approximation_report does not take dropout_rate"),
    ],
)  # fmt: skip
def test_wrong_arguments(change, message):
    inputs = [jnp.asarray(x, jnp.float32) for x in problem()]
    arguments = {"candidates": {"exact": attn_jax.dot_product_attention}, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        approximation_report(*inputs, **arguments)
