"""Tokens that continue cached ones: any cutting of a sequence into calls gives what one call gives."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.exact.cache import KVCache
from attn_jax.positions import DynamicNTK
from tests.nn import reference
from tests.nn.test_transformer import DECODER, ENCODER, GEMMA, model

IDS = np.random.default_rng(0).integers(0, 17, (2, 9))
CONFIGS = {
    "rotary, full caches": dataclasses.replace(DECODER, num_layers=2),
    "gemma: rings and full caches, a rest": GEMMA,
    "learned positions, biases, layer norm": dataclasses.replace(
        ENCODER, causal=True, head="untied", norm_position="pre", embedding_norm=True, num_layers=1, max_length=9
    ),
    "alibi, sinks, temperature, multi-query": dataclasses.replace(
        DECODER,
        positions="alibi",
        rotary_base=10000.0,
        num_kv_heads=1,
        use_sinks=True,
        learned_temperature=True,
        num_layers=1,
    ),
    "relative, cap": dataclasses.replace(
        DECODER, positions="relative", rotary_base=10000.0, relative_buckets=4, relative_max_distance=3,
        logits_soft_cap=2.0, num_layers=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cuts", [(9,), (4, 1, 1, 3), (1,) * 9], ids=str)
def test_any_cutting_gives_what_one_call_gives(name, cuts):
    config = CONFIGS[name]
    built = model(config)
    expected, _ = reference.transformer(reference.parameters(built), IDS, config)
    caches, start = built.empty_cache(2, 9), 0
    for count in cuts:
        logits, caches = built.extend(IDS[:, start : start + count], caches)
        np.testing.assert_allclose(logits, expected[:, start : start + count], rtol=1e-4, atol=2e-4)
        start += count
    assert all((cache.lengths == 9).all() and not cache.overflowed.any() for cache in caches)


def test_items_of_different_lengths():
    """Prompts of 5 and 2 tokens, then 1 and 3 more: each item as if alone."""
    built = model(GEMMA)
    caches = built.empty_cache(2, 9)
    padded = np.where(np.arange(5) < [[5], [2]], IDS[:, :5], -1)
    first, caches = built.extend(padded, caches, np.array([5, 2]), last=True)
    more = np.stack([np.r_[IDS[0, 5], -1, -1], IDS[1, 2:5]])
    logits, caches = built.extend(more, caches, np.array([1, 3]))
    assert first.shape == (2, 17)
    for item, (before, count) in enumerate([(5, 1), (2, 3)]):
        alone = built(IDS[item, : before + count])
        chex.assert_trees_all_close(first[item], alone[before - 1], rtol=1e-4, atol=1e-4)
        chex.assert_trees_all_close(logits[item, :count], alone[before:], rtol=1e-4, atol=1e-4)
    assert [cache.lengths[0].tolist() for cache in caches] == [[6, 5]] * 3
    nothing, after = built.extend(more, caches, np.array([0, 2]), last=True)
    assert jnp.isnan(nothing[0]).all()
    assert jnp.isfinite(nothing[1]).all()
    assert after[0].lengths[0].tolist() == [6, 7]


def test_caches_of_each_kind_of_layer():
    caches = model(GEMMA).empty_cache((2, 3), 7, dtype="bfloat16")
    assert [cache.window for cache in caches] == [2, 2, None]
    assert [cache.key.shape for cache in caches] == [(3, 2, 3, 2, 2, 4), (3, 2, 3, 2, 2, 4), (2, 2, 3, 2, 7, 4)]
    assert {cache.key.dtype.name for cache in caches} == {"bfloat16"}
    assert all(isinstance(cache, KVCache) for cache in caches)
    short = model(GEMMA).empty_cache(1, 2)  # a window that reaches past the capacity needs no ring
    assert [cache.window for cache in short] == [None] * 3


def test_a_scan_over_steps_has_one_trace():
    built, traces = model(DECODER), []

    @functools.partial(jax.jit, donate_argnums=1)
    def steps(built, caches, token_ids):
        def step(caches, token_id):
            traces.append(token_id.shape)
            logits, caches = built.extend(token_id[:, None], caches, last=True)
            return caches, logits

        return jax.lax.scan(step, caches, token_ids.T)

    for _ in range(2):
        caches, logits = steps(built, built.empty_cache(2, 9), IDS)
    assert len(traces) == 1
    chex.assert_trees_all_close(logits.swapaxes(0, 1), built(IDS), rtol=1e-4, atol=1e-4)
    caches, _ = steps(built, built.empty_cache(2, 4), IDS)  # past the capacity, where nobody could see it
    assert caches[0].overflowed.all()
    assert caches[0].lengths.max() == 4


def test_dynamic_ntk_turns_all_keys_by_the_capacity():
    config = dataclasses.replace(DECODER, num_layers=1, rotary_scaling=DynamicNTK(2.0, 4))
    built = model(config)
    caches, start = built.empty_cache(2, 9), 0
    for count in (4, 5):
        logits, caches = built.extend(IDS[:, start : start + count], caches)
        chex.assert_trees_all_close(logits, built(IDS)[:, start : start + count], rtol=1e-4, atol=1e-4)
        start += count
    rolling = model(dataclasses.replace(config, local_window_size=(2, 0)))
    with pytest.raises(ValueError, match="cache must not roll with a rotary_scaling of DynamicNTK"):
        rolling.extend(IDS, rolling.empty_cache(2, 9))


@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        (DECODER, lambda m: m.extend(IDS, m.empty_cache(2, 8)), "cache must have room .* capacity is 8, .* have 9"),
        (DECODER, lambda m: m.extend(IDS, m.empty_cache(3, 9)), r"must have shape .* got"),
        (DECODER, lambda m: m.extend(IDS, m.empty_cache(2, 9)[0]), "caches must be a tuple of 1 KVCache"),
        (GEMMA, lambda m: m.extend(IDS, m.empty_cache(2, 9)[:1]), "caches must be a tuple of 3 KVCache"),
        (DECODER, lambda m: m.extend(IDS + 17, m.empty_cache(2, 9)), r"token_ids must lie in 0\.\.16, got values in"),
        (DECODER, lambda m: m.extend(IDS[:, :0], m.empty_cache(2, 9)), "token_ids must hold at least one token"),
        (DECODER, lambda m: m.extend(IDS, m.empty_cache(2, 9), last=1), "last must be True or False"),
        (
            DECODER,
            lambda m: m.extend(IDS, m.empty_cache(2, 9), np.array([10, 1])),
            r"lengths must lie in 0\.\.9, got values in 1\.\.10",
        ),
        (DECODER, lambda m: m.empty_cache(1.5, 4), "batch must be an integer"),
        (DECODER, lambda m: m.empty_cache(2, 0), "capacity must be at least 1, got 0"),
        (ENCODER, lambda m: m.extend(IDS[:, :8], m.empty_cache(2, 8)), "extend needs is_causal=True"),
        (ENCODER, lambda m: m.empty_cache(2, 9), "capacity must be at most max_length = 8, got 9"),
    ],
)
def test_wrong_calls(config, call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call(model(config))
    assert "\n" not in str(raised.value)
