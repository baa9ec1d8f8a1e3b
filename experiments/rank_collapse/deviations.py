"""Transformer blocks in float64 that keep how tokens deviate from each other, however little that is.

Tokens X = 1 cᵀ + R have a common part c and deviations R. The blocks map (c, R) to (c, R) by differences that are
written out, never by subtracting what is nearly equal: so R keeps its digits at 1e-200 of c, and only underflow ends
it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

SMALL = 0.5  # logits that deviate by less are exponentiated by their differences


class Tokens(NamedTuple):
    """c `[seeds, D]` and R `[seeds, n, D]`, whose mean over tokens is 0."""

    common: np.ndarray
    deviation: np.ndarray


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block has besides attention: an RMS norm before each branch, skips around them, a perceptron."""

    norm: bool = True
    skip: bool = False
    mlp: bool = False


class Weights(NamedTuple):
    """Of one layer: query, key, value `[seeds, N, D, H]`, output `[seeds, N, H, D]`, up and down `[seeds, D, F]`."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @classmethod
    def draw(cls, random: np.random.Generator, seeds: int, width: int, heads: int) -> Self:
        """LeCun's: variance 1 / fan in; twice that where a rectifier halves what comes in."""
        head, inner = width // heads, 4 * width
        shapes = [*[(heads, width, head)] * 3, (heads, head, width), (width, inner), (inner, width)]
        variances = [*[1 / width] * 3, 1 / width, 1 / width, 2 / inner]
        return cls(
            *(v**0.5 * random.standard_normal((seeds, *shape)) for shape, v in zip(shapes, variances, strict=True))
        )


def begin(x: np.ndarray) -> Tokens:
    """Tokens `[seeds, n, D]` as common part and deviations."""
    return _centred(np.zeros_like(x[:, 0]), x)


def advance(tokens: Tokens, weights: Weights, block: Block, *, scale: float, causal: bool) -> Tokens:
    """The tokens after one block."""

    def branch(tokens: Tokens, apply: Callable[[Tokens], Tokens]) -> Tokens:
        added = apply(_normed(tokens) if block.norm else tokens)
        if block.skip:
            added = Tokens(*(a + b for a, b in zip(tokens, added, strict=True)))
        return _centred(*added)

    tokens = branch(tokens, lambda x: _attention(x, weights, scale, causal))
    return branch(tokens, lambda x: _perceptron(x, weights)) if block.mlp else tokens


def relative_size(tokens: Tokens, norm: str) -> np.ndarray:
    """‖R‖ / ‖X‖ in the norm "frobenius" or "l1_linf", sqrt(l1 · l∞), `[seeds]`."""
    whole = tokens.common[:, None] + tokens.deviation
    return _size(tokens.deviation, norm) / _size(whole, norm)


def _size(x: np.ndarray, norm: str) -> np.ndarray:
    largest = np.abs(x).max(axis=(1, 2))  # squares of small numbers underflow first
    unit = np.abs(x) / np.where(largest == 0, 1, largest)[:, None, None]
    if norm == "frobenius":
        return largest * np.sqrt((unit**2).sum(axis=(1, 2)))
    return largest * np.sqrt(unit.sum(axis=1).max(axis=1) * unit.sum(axis=2).max(axis=1))


def _centred(common: np.ndarray, deviation: np.ndarray) -> Tokens:
    mean = deviation.mean(axis=1)
    return Tokens(common + mean, deviation - mean[:, None])


def _normed(tokens: Tokens) -> Tokens:
    """RMS norm. 1/√b − 1/√a = −(b − a) / (√a √b (√a + √b)), with b − a = mean of 2 c·r + r·r."""
    c, r = tokens.common[:, None], tokens.deviation
    root = np.sqrt((c**2).mean(axis=2, keepdims=True))
    roots = np.sqrt(((c + r) ** 2).mean(axis=2, keepdims=True))
    change = -((2 * c + r) * r).mean(axis=2, keepdims=True) / (root * roots * (root + roots))
    return Tokens((c / root)[:, 0], c * change + r / roots)


def _attention(tokens: Tokens, weights: Weights, scale: float, causal: bool) -> Tokens:
    """Σ_h A_h X W_V W_O. Rows of A sum to 1, so A X = 1 cᵀ + A R; what a query adds to all its keys cancels."""
    c, r = tokens.common[:, None, None], tokens.deviation[:, None]  # [seeds, 1, 1 or n, D]
    keys = np.swapaxes(r @ weights.key, -1, -2)
    shared, own = scale * ((c @ weights.query) @ keys), scale * ((r @ weights.query) @ keys)
    if causal:
        there = np.tril(np.ones(own.shape[-2:], bool))
        fetched = Tokens(c, _softmax(np.where(there, shared + own, -np.inf)) @ r)
    else:
        p = _softmax(shared)
        fetched = Tokens(c + p @ r, _deviating_weights(p, shared, own) @ r)
    through = [(x @ weights.value @ weights.output).sum(axis=1) for x in fetched]
    return Tokens(through[0][:, 0], through[1])


def _deviating_weights(p: np.ndarray, shared: np.ndarray, own: np.ndarray) -> np.ndarray:
    """softmax(shared + own) − p, p = softmax(shared): p (e − p·e) / (1 + p·e) with e = exp(own) − 1."""
    small = np.abs(own).max(axis=(-2, -1), keepdims=True) < SMALL
    grown = np.expm1(np.where(small, own, 0.0))
    mean = (p * grown).sum(axis=-1, keepdims=True)
    return np.where(small, p * (grown - mean) / (1 + mean), _softmax(shared + own) - p)


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def _perceptron(tokens: Tokens, weights: Weights) -> Tokens:
    """relu(X up) down; relu(a + b) − relu(a) is max(b, −a) where a > 0 and max(a + b, 0) elsewhere."""
    a, b = tokens.common[:, None] @ weights.up, tokens.deviation @ weights.up
    deviation = np.where(a > 0, np.maximum(b, -a), np.maximum(a + b, 0.0))
    return Tokens((np.maximum(a, 0.0) @ weights.down)[:, 0], deviation @ weights.down)
