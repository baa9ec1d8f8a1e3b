"""Projections and heads against loops over heads in float64 NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from attn_jax import projections

B, T, S, N, K, H, V, D, E = 2, 3, 5, 4, 2, 6, 7, 8, 9


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def project_oracle(x, weight, bias=None):
    """Head by head, so that no reshape can hide the order of heads."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    heads = [
        x @ weight[:, n] + (0.0 if bias is None else np.asarray(bias, np.float64)[n]) for n in range(len(weight[0]))
    ]
    return np.stack(heads, axis=-2)


X, CONTEXT = draw(0, B, T, D), draw(1, B, S, E)
W_Q, W_K, W_V, W_O = draw(2, D, N, H), draw(3, D, K, H), draw(4, D, K, V), draw(5, N, V, D)
B_Q, B_K, B_V, B_O = draw(6, N, H), draw(7, K, H), draw(8, K, V), draw(9, D)


class ProjectionsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_heads_are_contiguous_columns(self):
        x = np.arange(B * T * N * H, dtype=np.float32).reshape(B, T, N * H)
        heads = self.variant(lambda x: projections.split_heads(x, N))(x)
        for n in range(N):
            np.testing.assert_array_equal(heads[:, :, n], x[:, :, n * H : (n + 1) * H])
        np.testing.assert_array_equal(self.variant(projections.merge_heads)(heads), x)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(True, False)
    def test_separate(self, with_bias):
        biases = (B_Q, B_K, B_V) if with_bias else (None, None, None)
        query, key, value = self.variant(projections.project_qkv)(X, W_Q, W_K, W_V, *biases)
        np.testing.assert_allclose(query, project_oracle(X, W_Q, biases[0]), atol=1e-5)
        np.testing.assert_allclose(key, project_oracle(X, W_K, biases[1]), atol=1e-5)
        np.testing.assert_allclose(value, project_oracle(X, W_V, biases[2]), atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.parameters(True, False)
    def test_fused_is_separate(self, with_bias):
        weight = np.concatenate([w.reshape(D, -1) for w in (W_Q, W_K, W_V)], axis=1)
        bias = np.concatenate([b.reshape(-1) for b in (B_Q, B_K, B_V)]) if with_bias else None
        fused = self.variant(
            lambda x, w, b: projections.project_qkv_fused(
                x, w, b, num_heads=N, num_kv_heads=K, head_width=H, value_width=V
            )
        )(X, weight, bias)
        biases = (B_Q, B_K, B_V) if with_bias else ()
        chex.assert_trees_all_close(fused, projections.project_qkv(X, W_Q, W_K, W_V, *biases), atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_fused_square_matrix_is_cut_on_the_output_axis(self):
        # one row per input: with D = N*H a wrong transpose keeps every shape
        weight = np.arange(4 * 12, dtype=np.float32).reshape(4, 12)
        query, key, value = self.variant(lambda x: projections.project_qkv_fused(x, weight, num_heads=2, head_width=2))(
            np.eye(4, dtype=np.float32)
        )
        np.testing.assert_array_equal(query[:, 1], weight[:, 2:4])
        np.testing.assert_array_equal(key[:, 0], weight[:, 4:6])
        np.testing.assert_array_equal(value[:, 1], weight[:, 10:12])

    @chex.variants(with_jit=True, without_jit=True)
    def test_tied_key_is_the_query(self):
        weight_v = draw(10, D, N, V)
        query, key, _ = self.variant(projections.project_qkv)(X, W_Q, None, weight_v)
        np.testing.assert_array_equal(query, key)
        _, biased, _ = self.variant(projections.project_qkv)(X, W_Q, None, weight_v, None, B_Q)
        np.testing.assert_allclose(biased, project_oracle(X, W_Q, B_Q), atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_context_feeds_keys_and_values(self):
        weight_k, weight_v = draw(11, E, K, H), draw(12, E, K, V)
        query, key, value = self.variant(projections.project_qkv)(X, W_Q, weight_k, weight_v, context=CONTEXT)
        np.testing.assert_allclose(query, project_oracle(X, W_Q), atol=1e-5)
        np.testing.assert_allclose(key, project_oracle(CONTEXT, weight_k), atol=1e-5)
        np.testing.assert_allclose(value, project_oracle(CONTEXT, weight_v), atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_project_out_sums_over_heads(self):
        heads = draw(13, B, T, N, V)
        expected = sum(heads[:, :, n].astype(np.float64) @ W_O[n] for n in range(N)) + B_O
        np.testing.assert_allclose(self.variant(projections.project_out)(heads, W_O, B_O), expected, atol=1e-5)
        np.testing.assert_allclose(self.variant(projections.project_out)(heads, W_O), expected - B_O, atol=1e-5)

    @chex.variants(with_jit=True, without_jit=True)
    def test_low_precision_is_summed_wide_and_rounded_once(self):
        # 257 rounds to 256 in bfloat16, and so does 256 + 1: only the wide sum gives 258
        x, weight = jnp.ones((1, 257), jnp.bfloat16), jnp.ones((257, 1, 1), jnp.bfloat16)
        y = self.variant(projections.project)(x, weight, jnp.ones((1, 1), jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        assert y[0, 0, 0] == 258.0


def test_gradients_reach_every_matrix_and_tying_adds_them():
    def loss(query_weight, key_weight):
        query, key, _ = projections.project_qkv(X, query_weight, key_weight, draw(10, D, N, V))
        return jnp.sum(query * jnp.sin(key))

    grad_q, grad_k = jax.grad(loss, (0, 1))(W_Q, W_Q)
    tied = jax.grad(lambda w: loss(w, None))(W_Q)
    np.testing.assert_allclose(tied, grad_q + grad_k, atol=1e-4)


def test_float64_stays_float64(x64):
    y = projections.project(X.astype(np.float64), W_Q.astype(np.float64), B_Q.astype(np.float64))
    np.testing.assert_allclose(y, project_oracle(X, W_Q, B_Q), rtol=1e-13)


def test_unbatched_and_more_batch_axes_agree():
    whole = projections.project(X[None], W_Q)
    np.testing.assert_allclose(whole[0, 1], projections.project(X[1], W_Q), atol=1e-6)


FUSED = {"num_heads": N, "num_kv_heads": K, "head_width": H, "value_width": V}


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        (ValueError, lambda: projections.split_heads(X, 3), "multiple of num_heads = 3, got shape"),
        (ValueError, lambda: projections.split_heads(X, 0), "num_heads must be at least 1, got 0"),
        (TypeError, lambda: projections.split_heads(X, 2.0), "num_heads must be an integer"),
        (ValueError, lambda: projections.split_heads(X[0, 0], 2), "x must have at least 2 axes"),
        (ValueError, lambda: projections.merge_heads(X[0]), "x must have at least 3 axes"),
        (TypeError, lambda: projections.project(np.ones((T, D), int), W_Q), "x must have a floating dtype"),
        (ValueError, lambda: projections.project(X[..., :5], W_Q), r"weight must have .* D = 5 as in x \(2, 3, 5\)"),
        (ValueError, lambda: projections.project(X, W_Q.reshape(D, -1)), "weight must have rank 3"),
        (ValueError, lambda: projections.project(X, W_Q, B_Q[0]), r"bias must have shape \[heads, width\] = \(4, 6\)"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K[..., :5], W_V), "one head width H, got 6 and 5"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K, W_V[:, :1]), "one number of heads K, got 2 and 1"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, None, W_V), "tied.*one number of heads K, got 4 and 2"),
        (
            ValueError,
            lambda: projections.project_qkv(X, W_Q[:, :3], W_K, W_V),
            "got 3 query heads and 2 key/value heads",
        ),
        (
            ValueError,
            lambda: projections.project_qkv(X, W_Q, W_K[:, :0], W_V[:, :0]),
            "got 4 query heads and 0 key/value heads",
        ),
        (ValueError, lambda: projections.project_qkv(X, W_Q[:-1], W_K, W_V), "query_weight must have .* D = 8"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K[:-1], W_V), "key_weight must have .* D = 8"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K, W_V[:-1]), "value_weight must have .* D = 8"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K, W_V, None, B_Q), "key_bias must have shape"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K, W_V, context=CONTEXT), "D = 9 as in context"),
        (ValueError, lambda: projections.project_qkv(X, W_Q, W_K, W_V, context=X[:1]), "context must have the batch"),
        (TypeError, lambda: projections.project_qkv(X, W_Q, W_K, None), "value_weight must be an array, got NoneType"),
        (
            ValueError,
            lambda: projections.project_qkv_fused(X, np.ones((D, 49)), **FUSED),
            r"weight must have shape .* = \(8, 50\), got \(8, 49\)",
        ),
        (
            ValueError,
            lambda: projections.project_qkv_fused(X, np.ones((D, 50)), **FUSED | {"num_kv_heads": 3}),
            "got 4 query heads and 3 key/value heads",
        ),
        (
            ValueError,
            lambda: projections.project_qkv_fused(X, np.ones((D, 50)), np.ones(49), **FUSED),
            r"bias must have shape .* = \(50,\), got \(49,\)",
        ),
        (ValueError, lambda: projections.project_out(X[..., None], W_O), r"N, V = \(8, 1\) as in x"),
        (ValueError, lambda: projections.project_out(draw(0, T, N, V), W_O, B_O[:-1]), r"bias must have shape \[D\]"),
    ],
)
def test_wrong_widths_ranks_and_counts_raise(error, call, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
