"""Interventions: what each puts in the place of attention, by the oracle, and what changes nothing."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax import biases
from attn_jax.nn import Transformer, TransformerConfig, interventions
from attn_jax.nn.interventions import Ablation, Permutation, Replacement
from tests import oracles
from tests.nn import reference

B, T, N, K, H, V = 2, 5, 4, 2, 3, 6
RNG = np.random.default_rng(0)
ARRAYS = tuple(RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, N, H), (B, T, K, H), (B, T, K, V)))
LENGTHS = np.array([5, 3])
BIAS = np.where(RNG.uniform(size=(1, N, T, T)) < 0.2, -np.inf, RNG.normal(size=(1, N, T, T))).astype(np.float32)
OPTIONS = {
    "is_causal": True,
    "bias": BIAS,
    "query_seq_lengths": LENGTHS,
    "key_value_seq_lengths": LENGTHS,
    "logits_soft_cap": 2.0,
}
HALF = np.array([0, 1, 0, 1], np.float32)  # heads that an intervention reaches


@functools.cache
def expected():
    return oracles.attention(*ARRAYS, **OPTIONS)


def fetched(weights):
    """`[B, T, N, V]` by given weights, head by head."""
    value = np.repeat(np.float64(ARRAYS[2]), N // K, axis=2)
    return np.einsum("bnts,bsnv->btnv", weights, value)


def run(function, own):
    """An intervention on the arrays of one layer."""
    return np.asarray(jax.jit(lambda own: function(own, *ARRAYS, **OPTIONS))(own))


def close(actual, wanted):
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)


def test_gates_multiply_the_output_of_a_head():
    gates = np.array([0.0, 1.0, 0.5, -2.0], np.float32)
    close(run(interventions.gate_heads, gates), expected().output * gates[:, None])


def test_an_ablated_head_brings_its_mean():
    mean = RNG.normal(size=(N, V)).astype(np.float32)
    found = run(interventions.ablate_heads, Ablation(HALF, mean))
    close(found[:, :, HALF == 1], expected().output[:, :, HALF == 1])
    close(found[:, :, HALF == 0], np.broadcast_to(mean[HALF == 0], (B, T, 2, V)))
    close(run(interventions.ablate_heads, Ablation(HALF == 1, mean)), found)


def test_means_are_over_rows_that_see_a_key():
    found = jax.jit(lambda: interventions.output_means(*ARRAYS, **OPTIONS))()
    seeing = expected().visible.any(axis=-1)  # [B, N, T]
    assert not seeing.all()
    for b, n in np.ndindex(B, N):
        close(found[b, n], expected().output[b, seeing[b, n], n].mean(axis=0))
    nobody = interventions.output_means(*ARRAYS, mask=np.zeros((T, T), bool))
    np.testing.assert_array_equal(nobody, np.zeros((B, N, V)))


def test_uniform_weights_are_over_the_keys_that_are_seen():
    visible = expected().visible
    uniform = visible / np.maximum(visible.sum(axis=-1, keepdims=True), 1)
    share = np.array([0.0, 1.0, 0.25, 1.0], np.float32)
    mixed = (1 - share[:, None, None]) * expected().weights + share[:, None, None] * uniform
    close(run(interventions.flatten_weights, share), fetched(mixed))


def test_weights_are_shifted_or_replaced_before_they_fetch():
    other = RNG.uniform(size=(B, N, T, T)).astype(np.float32)
    close(run(interventions.shift_weights, other), fetched(expected().weights + other))
    chosen = np.where(HALF[:, None, None] == 1, other, expected().weights)
    close(run(interventions.replace_weights, Replacement(HALF, other)), fetched(chosen))


def test_permuted_weights_stay_among_the_keys_that_are_seen():
    permuted = Permutation(HALF, jax.random.key(0))
    # Values that tell the keys apart: what comes out is the weights themselves.
    eye = np.broadcast_to(np.eye(T, dtype=np.float32)[:, None], (B, T, K, T))
    found = jax.jit(lambda: interventions.permute_weights(permuted, *ARRAYS[:2], eye, **OPTIONS))()
    found = np.moveaxis(np.asarray(found), 1, 2)  # [B, N, T, S]
    weights, visible = expected().weights, expected().visible
    close(found[:, HALF == 0], weights[:, HALF == 0])
    close(np.sort(found, axis=-1), np.sort(weights, axis=-1))
    np.testing.assert_array_equal(found[~visible], 0)
    assert np.abs(found - weights)[:, HALF == 1].max() > 0.1


def test_who_sees_whom():
    found = jax.jit(lambda: interventions.visible_pairs(*ARRAYS[:2], **OPTIONS))()
    np.testing.assert_array_equal(found, expected().visible)
    assert interventions.visible_pairs(*ARRAYS[:2]).all()
    alibi = interventions.visible_pairs(*ARRAYS[:2], biases.Alibi(N), local_window_size=1)
    np.testing.assert_array_equal(
        alibi, np.broadcast_to(np.abs(np.subtract.outer(range(T), range(T))) <= 1, (B, N, T, T))
    )


def test_a_sink_keeps_its_share_but_of_uniform_weights():
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    oracle = oracles.attention(*ARRAYS, sinks=sinks)
    close(interventions.shift_weights(np.zeros((B, N, T, T), np.float32), *ARRAYS, sinks=sinks), oracle.output)
    close(
        interventions.flatten_weights(np.ones(N, np.float32), *ARRAYS, sinks=sinks),
        fetched(np.full((B, N, T, T), 1 / T)),
    )


L = 3
CONFIG = TransformerConfig(
    vocabulary_size=11, num_layers=L, model_width=12, num_heads=N, num_kv_heads=K, head_width=4, mlp_width=8
)
IDS = RNG.integers(0, 11, (B, T))
NEUTRAL = {
    "gates": (interventions.gate_heads, jnp.ones((L, N))),
    "ablation": (interventions.ablate_heads, Ablation(jnp.ones((L, N)), jnp.ones((L, N, 4)))),
    "uniform": (interventions.flatten_weights, jnp.zeros((L, N))),
    "shift": (interventions.shift_weights, jnp.zeros((L, B, N, T, T))),
    "replacement": (interventions.replace_weights, Replacement(jnp.zeros((L, N)), jnp.ones((L, B, N, T, T)))),
    "permutation": (
        interventions.permute_weights,
        Permutation(jnp.zeros((L, N)), jax.random.split(jax.random.key(0), L)),
    ),
}


@pytest.fixture(scope="module")
def model():
    return reference.randomized(lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)), seed=1)


@pytest.mark.parametrize("name", NEUTRAL)
def test_in_a_model_the_neutral_value_changes_nothing_and_one_head_something(model, name):
    intervene, neutral = NEUTRAL[name]
    plain = model(IDS, LENGTHS)
    logits = model(IDS, LENGTHS, intervene=intervene, interventions=neutral)
    real = np.arange(T) < LENGTHS[:, None]
    np.testing.assert_allclose(logits[real], plain[real], rtol=1e-4, atol=1e-4)
    leaves, tree = jax.tree.flatten(neutral)
    leaves[0] = leaves[0].at[L - 1, ..., N - 1].add(-1.0 if name in ("gates", "ablation") else 1.0)
    if name == "shift":
        leaves[0] = neutral.at[L - 1, :, N - 1].add(0.1)
    changed = model(IDS, LENGTHS, intervene=intervene, interventions=jax.tree.unflatten(tree, leaves))
    assert np.abs(changed - plain)[real].max() > 1e-2


def test_a_shift_by_the_difference_is_a_replacement(model):
    rng = np.random.default_rng(2)
    weights = np.tril(rng.uniform(size=(B, N, T, T))).astype(np.float32)
    replaced = Replacement(jnp.zeros((L, N)).at[1].set(1), jnp.zeros((L, B, N, T, T)).at[1].set(weights))
    by_replacement = model(IDS, intervene=interventions.replace_weights, interventions=replaced)

    def observe(query, key, value, **options):
        return interventions.attention_weights(query, key, **options)

    _, own = model(IDS, observe=observe)
    shift = jnp.zeros((L, B, N, T, T)).at[1].set(weights - own[1])
    by_shift = model(IDS, intervene=interventions.shift_weights, interventions=shift)
    chex.assert_trees_all_close(by_shift, by_replacement, rtol=1e-4, atol=1e-4)
    assert np.abs(by_shift - model(IDS)).max() > 0.1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: interventions.gate_heads(np.ones(3), *ARRAYS), ValueError, r"own must have shape \[N\] = \(4,\)"),
        (
            lambda: interventions.ablate_heads(Ablation(np.ones(N), np.ones((N, 2))), *ARRAYS),
            ValueError,
            r"mean must have shape \[N, V\] = \(4, 6\)",
        ),
        (lambda: interventions.shift_weights(np.ones((N, T, T)), *ARRAYS), ValueError, r"own must have shape \[\*B, N"),
        (
            lambda: interventions.replace_weights(Replacement(np.ones(N), np.ones((N, T, T))), *ARRAYS),
            ValueError,
            r"weights must have shape \[\*B, N, T, S\]",
        ),
        (
            lambda: interventions.flatten_weights(np.ones(N), *ARRAYS, dropout_rate=0.1),
            TypeError,
            "attention_weights does not take dropout_rate",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
