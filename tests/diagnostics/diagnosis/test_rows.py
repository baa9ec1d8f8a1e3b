"""What is measured in a layer, against the definitions in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from attn_jax.diagnostics import sample_rows
from attn_jax.diagnostics.diagnosis import rows as measures
from attn_jax.diagnostics.diagnosis.rows import ALL, OF_HEADS
from tests import oracles

B, T, N, K, H, V = 3, 24, 4, 2, 8, 5
RNG = jax.random.key(3)
STATIC = ("names", "count", "is_causal", "local_window_size", "logits_soft_cap")
measure_layer = jax.jit(measures.measure_rows, static_argnames=STATIC)
NUMBERS = np.random.default_rng(0)


def draw(*shape, scale=1.0):
    return scale * NUMBERS.standard_normal(shape)


ARRAYS = {
    "plain": (draw(B, T, N, H, scale=2.0), draw(B, T, N, H), draw(B, T, N, V)),
    "grouped": (draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, V)),
    "sharp": (draw(B, T, N, H, scale=30.0), draw(B, T, N, H), draw(B, T, N, V)),
}
CASES = {
    "two-way": ("plain", {}),
    "causal": ("plain", {"is_causal": True}),
    "grouped with sinks": ("grouped", {"is_causal": True, "sinks": draw(N)}),
    "padded": (
        "grouped",
        {"is_causal": True, "query_seq_lengths": [24, 1, 15], "key_value_seq_lengths": [24, 1, 15]},
    ),
    "window and cap": ("plain", {"is_causal": True, "local_window_size": (5, 0), "logits_soft_cap": 3.0}),
    "sharp": ("sharp", {"is_causal": True}),
}


def expected(forward, without_first, rows):
    """Every measure by its definition, over the rows that see two keys."""

    def choosing(of):
        return np.moveaxis(of.visible[..., rows, :].sum(axis=-1) > 1, -1, -2).reshape(-1, N)  # [B R, N]

    def by_row(of):
        return {name: x[:, rows].reshape(-1, N) for name, x in oracles.statistics(of).items()}

    def mean(x, counted):
        return np.array([x[counted[:, n], n].mean() if counted[:, n].any() else np.nan for n in range(N)])

    s, counted = by_row(forward), choosing(forward)
    p = np.moveaxis(forward.key_weights[..., rows, :], 1, 2).reshape(-1, N, forward.key_weights.shape[-1])
    squares = (p**2).sum(axis=-1)
    norm = np.sqrt(np.maximum(squares - 2 * (p**3).sum(axis=-1) + squares**2, 0))
    measured = {name: mean(s[name], counted) for name in ALL if name in s}
    for name in ("max_logit", "max_abs_logit"):
        measured[name] = np.where(counted, s[name], -np.inf).max(axis=0)
    rest = by_row(without_first)["normalized_entropy"]
    known = counted & (s["visible_keys"] > 2) & (1 - s["first_key_mass"] > 1e-3)
    return measured | {
        "normalized_entropy_no_sink": mean(rest, known),
        "logit_sd": mean(np.sqrt(s["logit_variance"]), counted),
        "saturated": mean(s["max_weight"] > 0.95, counted),
        "sink_mass": mean(s["first_key_mass"], counted),
        "jacobian_norm": mean(norm, counted),
    }


def expected_of_heads(forward, rows):
    """What heads fetch, and the nearest one of each, pair by pair."""
    samples = [
        [
            (forward.key_weights[b, n, t], forward.output[b, t, n])
            for b, t in itertools.product(range(B), rows)
            if forward.visible[b, n, t].sum() > 1
        ]
        for n in range(N)
    ]
    found = {name: np.zeros(N) for name in OF_HEADS}
    for n in range(N):
        p, output = (np.array(x) for x in zip(*samples[n], strict=True))
        found["output_norm"][n] = np.sqrt((output**2).sum(axis=-1).mean())
        others = [m for m in range(N) if m != n]
        overlap = [np.sqrt(p * np.array([x for x, _ in samples[m]])).sum() for m in others]
        nearest = others[int(np.argmax(overlap))]
        q, other = (np.array(x) for x in zip(*samples[nearest], strict=True))
        x, y = output - output.mean(axis=0), other - other.mean(axis=0)
        cross, own, its = (np.linalg.norm(a.T @ b) for a, b in ((x, y), (x, x), (y, y)))
        found["nearest_head"][n] = nearest
        found["nearest_distance"][n] = jensen_shannon(p, q).mean()
        found["nearest_similarity"][n] = cross**2 / (own * its)
    return found


def jensen_shannon(p, q):
    def entropy(x):
        return -(x * np.log(np.where(x > 0, x, 1))).sum(axis=-1)

    return (entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2) / np.log(2)


@pytest.mark.parametrize(("case", "count"), [*((case, 12) for case in CASES), ("causal", None)])
def test_every_measure_is_that_of_its_definition(case, count):
    arrays, options = ARRAYS[CASES[case][0]], CASES[case][1]
    narrow = {name: jnp.asarray(x, jnp.float32) if name == "sinks" else x for name, x in options.items()}
    narrow |= {name: jnp.asarray(x) for name, x in options.items() if name.endswith("lengths")}
    given = [jnp.asarray(x, jnp.float32) for x in arrays]
    measured = measure_layer(*given, names=ALL, count=count, rng=RNG, **narrow)

    forward = oracles.attention(*arrays, **options)
    without_first = oracles.attention(*arrays, **options, mask=lambda q, k: k != 0)
    rows = np.arange(T) if count is None else np.asarray(sample_rows(RNG, T, count // B))
    compared = np.asarray(sample_rows(RNG, T, -(-min(count or 16, 16) // B)))
    wanted = expected(forward, without_first, rows) | expected_of_heads(forward, compared)
    assert set(measured) == set(ALL)
    for name in ALL:
        tolerance = 2e-4 if name in ("nearest_distance", "jacobian_norm", "normalized_entropy_no_sink") else 1e-5
        np.testing.assert_allclose(measured[name], wanted[name], rtol=1e-4, atol=tolerance, err_msg=name)


def test_rows_without_a_choice_are_left_out_and_a_head_without_a_row_is_not_known():
    query, key, value = (jnp.asarray(x[:2], jnp.float32) for x in ARRAYS["plain"])
    lengths = {"query_seq_lengths": jnp.array([1, 0]), "key_value_seq_lengths": jnp.array([1, 0])}
    measured = measure_layer(query, key, value, names=ALL, count=None, rng=RNG, is_causal=True, **lengths)
    for name in ALL:
        expected = -1 if name == "nearest_head" else np.nan
        np.testing.assert_array_equal(measured[name], np.full(N, expected), err_msg=name)


def test_a_row_that_is_not_finite_is_left_out():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in ARRAYS["plain"])
    options = {"names": ALL, "count": None, "rng": RNG, "is_causal": True}
    whole = measure_layer(query[:2], key[:2], value[:2], **options)
    broken = measure_layer(query.at[2].set(jnp.nan), key, value, **options)
    names = [name for name in ALL if name not in OF_HEADS]  # those draw fewer rows of more sequences
    for name in names:
        np.testing.assert_allclose(broken[name], whole[name], rtol=1e-5, err_msg=name)
    assert np.isfinite(broken["output_norm"]).all()


def test_one_head_has_no_nearest_one():
    query, key, value = (jnp.asarray(x[0, :, :1], jnp.float32) for x in ARRAYS["plain"])
    measured = measure_layer(query, key, value, names=ALL, count=8, rng=RNG)
    assert measured["nearest_head"] == -1
    assert np.isnan(measured["nearest_distance"])
    assert np.isnan(measured["nearest_similarity"])
    assert measured["output_norm"] > 0


def test_clones_are_found_whatever_turns_their_values():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in ARRAYS["plain"])
    turn = jnp.asarray(np.linalg.qr(draw(V, V))[0], jnp.float32)
    query, key = query.at[:, :, 3].set(query[:, :, 1]), key.at[:, :, 3].set(key[:, :, 1])
    value = value.at[:, :, 3].set(value[:, :, 1] @ turn)
    measured = measure_layer(query, key, value, names=OF_HEADS, count=24, rng=RNG, is_causal=True)
    assert measured["nearest_head"][1] == 3
    assert measured["nearest_head"][3] == 1
    assert (measured["nearest_distance"][jnp.array([1, 3])] < 1e-5).all()
    np.testing.assert_allclose(measured["nearest_similarity"][jnp.array([1, 3])], 1, rtol=1e-5)
    assert (measured["nearest_distance"][jnp.array([0, 2])] > 0.05).all()


def test_only_what_is_asked_for_is_measured():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in ARRAYS["plain"])
    measured = measure_layer(query, key, value, names=("saturated", "output_norm"), count=12, rng=RNG)
    assert set(measured) == {"saturated", "output_norm"}


def test_memory_grows_with_the_length_alone():
    length = 4096
    shapes = [jax.ShapeDtypeStruct((2, length, n, w), jnp.float32) for n, w in ((8, 16), (2, 16), (2, 16))]
    for count in (64, None):
        measure = functools.partial(measures.measure_rows, names=ALL, count=count, rng=RNG, is_causal=True)
        assert max(sizes(jax.make_jaxpr(measure)(*shapes).jaxpr)) < length**2 / 4


def sizes(jaxpr):
    """Of every array in a program and the programs inside it."""
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars if hasattr(out.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_more_rows_than_there_are_are_refused():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in ARRAYS["plain"])
    with pytest.raises(
        ValueError, match=r"^rows must be at most the 72 of a batch, 3 sequences of T = 24, got 73; None"
    ):
        measure_layer(query, key, value, names=ALL, count=73, rng=RNG)
