"""The oracle itself: against three-line loops and finite differences, so that nothing else has to be believed."""

import math

import numpy as np
import pytest

from tests import oracles


def draw(seed, *, batch=(2,), T=3, S=5, N=4, K=2, H=3, V=2):
    rng = np.random.default_rng(seed)
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, V)
    return rng, *(rng.standard_normal(shape) for shape in shapes)


def test_output_is_the_weighted_mean_of_the_values():
    rng, q, k, v = draw(0)
    allowed = rng.random((2, 4, 3, 5)) < 0.6
    allowed[0, 1, 2] = False
    sinks = rng.standard_normal(4)
    forward = oracles.attention(q, k, v, mask=allowed, scale=0.7, logits_soft_cap=2.0, sinks=sinks)
    for b, n, t in np.ndindex(2, 4, 3):
        logits = [2.0 * math.tanh(0.7 * float(q[b, t, n] @ k[b, s, n // 2]) / 2.0) for s in range(5)]
        mass = [math.exp(x) if allowed[b, n, t, s] else 0.0 for s, x in enumerate(logits)]
        denominator = sum(mass) + math.exp(sinks[n])
        expected = sum(m / denominator * v[b, s, n // 2] for s, m in enumerate(mass))
        np.testing.assert_allclose(forward.output[b, t, n], expected if any(mass) else 0, atol=1e-14)
        lse = math.log(sum(mass)) if any(mass) else -math.inf
        np.testing.assert_allclose(forward.logsumexp[b, t, n], lse, atol=1e-14)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_match_finite_differences(soft_cap, with_sinks):
    rng, q, k, v = draw(1)
    bias = rng.standard_normal((2, 1, 3, 5))
    bias[0, 0, 1, 2] = -np.inf
    inputs = {"query": q, "key": k, "value": v, "bias": bias, "scale": rng.random(4)} | (
        {"sinks": rng.standard_normal(4)} if with_sinks else {}
    )
    allowed = rng.random((2, 4, 3, 5)) < 0.7
    allowed[1, 2, 0] = False
    options = {"mask": allowed, "logits_soft_cap": soft_cap, "dropout_keep": rng.random((2, 4, 3, 5)) < 0.8}
    options["dropout_rate"] = 0.2
    d_output, d_lse = rng.standard_normal((2, 3, 4, 2)), rng.standard_normal((2, 3, 4))

    def loss(**changed):
        forward = oracles.attention(**(inputs | changed), **options)
        lse = np.where(np.isinf(forward.logsumexp), 0, forward.logsumexp)
        return np.sum(forward.output * d_output) + np.sum(lse * d_lse)

    pulled = oracles.gradients(oracles.attention(**inputs, **options), d_output, d_lse)
    for name, x in inputs.items():
        expected = oracles.sum_to(pulled[name], x.shape)
        assert expected.shape == x.shape
        for at in np.ndindex(x.shape):
            step = np.zeros(x.shape)
            step[at] = 1e-6
            difference = (loss(**{name: x + step}) - loss(**{name: x - step})) / 2e-6
            np.testing.assert_allclose(expected[at], difference, atol=2e-8, err_msg=f"{name}{at}")


def test_what_nobody_sees_reaches_nothing():
    rng, q, k, v = draw(2)
    clean = oracles.attention(q, k, v, is_causal=True, query_seq_lengths=[2, 3])
    k[:, 3:], v[:, 3:], q[0, 2] = np.nan, np.nan, np.nan
    forward = oracles.attention(q, k, v, is_causal=True, query_seq_lengths=[2, 3])
    np.testing.assert_array_equal(forward.output, clean.output)
    pulled = oracles.gradients(forward, rng.standard_normal(forward.output.shape))
    assert all(np.isfinite(x).all() for x in pulled.values())


def test_uniform_causal_statistics():
    zeros = np.zeros((4, 1, 2))
    fields = oracles.statistics(oracles.attention(zeros, zeros, zeros, is_causal=True))
    np.testing.assert_allclose(fields["entropy"][:, 0], np.log([1, 2, 3, 4]))
    np.testing.assert_allclose(fields["normalized_entropy"][:, 0], 1)
    np.testing.assert_allclose(fields["mean_distance"][:, 0], [0, 0.5, 1, 1.5])
    np.testing.assert_allclose(fields["tail_p2"][:, 0], [0, 1 / 4, 2 / 9, 3 / 16])


def test_known_slopes_and_buckets():
    np.testing.assert_allclose(oracles.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(oracles.alibi_slopes(3), [1 / 16, 1 / 256, 1 / 4])
    one_way = {"buckets": 32, "bidirectional": False, "max_distance": 128}
    assert [int(oracles.relative_bucket(q, 0, **one_way)) for q in (-3, 0, 1, 15, 16, 127, 128, 999)] == [
        0, 0, 1, 15, 16, 31, 31, 31
    ]  # fmt: skip
    two_way = {"buckets": 32, "bidirectional": True, "max_distance": 128}
    assert [int(oracles.relative_bucket(0, k, **two_way)) for k in (-200, -8, 0, 1, 8, 16, 128)] == [
        15, 8, 0, 17, 24, 26, 31
    ]  # fmt: skip
