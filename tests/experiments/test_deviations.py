"""Blocks that keep small deviations, against the same blocks written plainly: in float64, and in 300 decimals."""

import decimal
import math

import numpy as np
import pytest

from attn_jax.diagnostics import rank_one_residual
from experiments.rank_collapse.deviations import Block, Tokens, Weights, advance, begin, relative_size

BLOCKS = [Block(), Block(norm=False), Block(skip=True), Block(mlp=True), Block(skip=True, mlp=True)]


def draw(*, seeds=2, tokens=5, width=6, heads=2):
    random = np.random.default_rng(3)
    x = random.standard_normal((seeds, tokens, width))
    return x, Weights.draw(random, seeds, width, heads)


def plain(x, weights, block, *, scale, causal):
    """One block of the tokens `[n, D]` of one seed; arrays of floats, or of Decimals."""

    def normed(x):
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True)) if block.norm else x

    def attention(x):
        outputs = []
        for query, key, value, output in zip(*weights[:4], strict=True):
            logits = scale * ((x @ query) @ (x @ key).T)
            exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
            if causal:
                exponentials = exponentials * np.tril(np.ones(logits.shape, int))
            outputs.append(exponentials / exponentials.sum(axis=1, keepdims=True) @ x @ value @ output)
        return sum(outputs)

    x = attention(normed(x)) + (x if block.skip else 0)
    if block.mlp:
        inner = normed(x) @ weights[4]
        x = inner * (inner > 0) @ weights[5] + (x if block.skip else 0)
    return x


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_tokens_are_those_of_the_plain_block(block, causal, size):
    x, weights = draw()
    x = x[:, :1] + size * (x - x[:, :1])
    tokens = begin(x)
    for scale in (1.0, 40.0):  # logits that deviate little, and much
        tokens = advance(tokens, weights, block, scale=scale, causal=causal)
        x = np.stack(
            [plain(seed, [w[i] for w in weights], block, scale=scale, causal=causal) for i, seed in enumerate(x)]
        )
        np.testing.assert_allclose(tokens.common[:, None] + tokens.deviation, x, atol=1e-10)
        np.testing.assert_allclose(tokens.deviation.mean(axis=1), 0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", ["1e-3", "1e-60"])
def test_small_deviations_keep_their_digits(block, causal, size):
    x, weights = draw(seeds=1, tokens=3, width=4)
    common, deviation = x[:, 0], x - x.mean(axis=1, keepdims=True)
    found = advance(Tokens(common, float(size) * deviation), weights, block, scale=0.75, causal=causal)

    exact = np.vectorize(decimal.Decimal, otypes=[object])
    with decimal.localcontext(prec=300):
        tokens = exact(common[0]) + decimal.Decimal(float(size)) * exact(deviation[0])
        expected = plain(tokens, [exact(w[0]) for w in weights], block, scale=decimal.Decimal("0.75"), causal=causal)
        away = (expected - expected.mean(axis=0)).astype(np.float64)
    np.testing.assert_allclose(found.deviation[0], away, rtol=1e-9, atol=1e-10 * np.abs(away).max())


def test_two_way_attention_cubes_deviations_and_causal_attention_scales_them():
    x, weights = draw()
    common, deviation = x[:, 0], x - x.mean(axis=1, keepdims=True)

    def after(size, causal):
        tokens = Tokens(common, size * deviation)
        return relative_size(advance(tokens, weights, Block(), scale=1.0, causal=causal), "frobenius")

    np.testing.assert_allclose(after(1e-40, False) / after(1e-30, False), 1e-30, rtol=1e-6)
    np.testing.assert_allclose(after(1e-40, True) / after(1e-30, True), 1e-10, rtol=1e-6)


@pytest.mark.parametrize("norm", ["frobenius", "l1_linf"])
def test_the_size_is_the_rank_one_residual(norm, x64):
    x, _ = draw()
    np.testing.assert_allclose(relative_size(begin(x), norm), rank_one_residual(x, norm=norm), rtol=1e-12)


@pytest.mark.parametrize("norm", ["frobenius", "l1_linf"])
def test_a_size_whose_square_underflows_is_still_measured(norm):
    x, _ = draw()
    tokens = Tokens(x[:, 0], 1e-250 * x)
    unit = Tokens(x[:, 0], 1e-9 * x)
    np.testing.assert_allclose(relative_size(tokens, norm) / relative_size(unit, norm), 1e-241, rtol=1e-6)
    assert (relative_size(Tokens(x[:, 0], 0 * x), norm) == 0).all()


def test_weights_keep_the_variance_of_what_they_read():
    weights = Weights.draw(np.random.default_rng(0), 4, 64, 4)
    assert weights.query.shape == weights.value.shape == (4, 4, 64, 16)
    variances = {name: w.var() for name, w in weights._asdict().items()}
    expected = dict.fromkeys(("query", "key", "value", "output", "up"), 1 / 64) | {"down": 2 / 256}
    for name, variance in variances.items():
        assert variance == pytest.approx(expected[name], rel=0.05)
    assert math.isclose(weights.down.shape[1], 256)
