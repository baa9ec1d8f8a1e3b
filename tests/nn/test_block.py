"""TransformerBlock against a NumPy recomputation: where the norms stand, and what it hands on."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import TransformerBlock, TransformerConfig
from tests.nn import reference

CONFIG = TransformerConfig(17, 1, 12, 6, num_kv_heads=2, head_width=4, mlp_width=10)
X = np.random.default_rng(0).standard_normal((2, 5, 12))
MASK = np.random.default_rng(1).random((5, 5)) < 0.7


def block(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return reference.randomized(lambda: TransformerBlock(config, rngs=nnx.Rngs(0)), 1), config


@pytest.mark.parametrize(("norm_position", "norm"), [("pre", "rms"), ("post", "layer")])
def test_equals_the_reference(norm_position, norm, x64):
    built, config = block(norm_position=norm_position, norm=norm, param_dtype="float64")
    output = jax.jit(lambda m, x: m(x, mask=MASK))(built, jnp.asarray(X))
    expected, _ = reference.block(reference.parameters(built), X, config, mask=MASK)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_extras_come_in_order():
    built, _ = block()
    x = jnp.asarray(X, jnp.float32)
    run = jax.jit(lambda m, x: m(x, return_statistics=("entropy",), observe=lambda query, key, value, **_: value))
    output, statistics, observed = run(built, x)
    chex.assert_trees_all_close(output, jax.jit(lambda m, x: m(x))(built, x), atol=1e-5)
    assert statistics.entropy.shape == (2, 5, 6)
    assert observed.shape == (2, 5, 2, 4)


def test_dropout_falls_on_what_a_branch_adds():
    """Without weights the MLP adds its bias: half of it is dropped, the rest doubled, and x itself is kept."""
    built, _ = block(dropout_rate=0.5, use_bias=True)
    built = jax.tree.map(jnp.zeros_like, built)
    built.mlp.down_bias[...] = jnp.ones(12)
    x = jnp.full((50, 12), 7.0)
    chex.assert_trees_all_equal(built(x), x + 1)
    added = built(x, deterministic=False, dropout_rng=jax.random.key(0)) - x
    assert set(np.unique(added).tolist()) == {0.0, 2.0}
    assert 0.4 < float((added == 0).mean()) < 0.6
    with pytest.raises(ValueError, match=r"dropout_rng must be a key where dropout is on \(rate 0\.5\), got None"):
        built(x, deterministic=False)
