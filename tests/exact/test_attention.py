"""The entry: which implementation runs, what it refuses, what bad arguments say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax import attention_weights, biases, choose_implementation, dot_product_attention, masks
from attn_jax.diagnostics import attention_statistics
from attn_jax.exact.arguments import AttentionOptions
from tests import oracles

rng = np.random.default_rng(0)
QUERY, KEY = rng.standard_normal((2, 5, 4, 8), np.float32), rng.standard_normal((2, 7, 2, 8), np.float32)
VALUE = rng.standard_normal((2, 7, 2, 8), np.float32)
HALF = [x.astype(jnp.bfloat16) for x in (QUERY, KEY, VALUE)]


def test_the_default_is_dense():
    choice = choose_implementation(QUERY, KEY, VALUE)
    assert (choice.implementation, sorted(choice.refused)) == ("dense", ["cudnn"])
    assert "float16 and bfloat16" in choice.refused["cudnn"]
    assert choose_implementation(QUERY, KEY, VALUE, implementation="xla").reason == "asked for"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": np.zeros((5, 7), np.float32)}, "it does not take bias"),
        ({"mask": masks.Causal(), "query_offset": 1}, "it does not take mask, query_offset"),
        ({"query_seq_lengths": np.array([1, 2])}, "it does not take query_seq_lengths"),
        ({"key_value_seq_lengths": np.array([1, 2])}, "it does not take key_value_seq_lengths"),
        ({"query_positions": np.arange(5)}, "it does not take query_positions"),
        ({"key_positions": np.arange(7)}, "it does not take key_positions"),
        ({"logits_soft_cap": 3.0}, "it does not take logits_soft_cap"),
        ({"sinks": np.zeros(4, np.float32)}, "it does not take sinks"),
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "it does not take dropout_rate"),
        ({"precision": "highest"}, "it does not take precision"),
        ({"return_residual": True}, "its residual has no gradient"),
        ({"scale": np.ones(4, np.float32)}, "it takes one scale for all heads"),
        ({"is_causal": True}, "a key that no query sees"),  # S > T, top-left: the last keys are unseen
        ({"local_window_size": (3, 0)}, "a key that no query sees"),
    ],
)
@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_what_jax_nn_cannot_do_raises(name, options, reason):
    arrays = (QUERY, KEY, VALUE) if name == "xla" else HALF
    message = f"implementation='{name}' cannot do this: {reason}.*; 'dense', 'blockwise'.* can"
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*arrays, implementation=name, **options)


def test_what_jax_nn_cannot_do_by_shape_raises():
    with pytest.raises(ValueError, match="it needs V = H, got V = 3 and H = 8"):
        dot_product_attention(QUERY, KEY, VALUE[..., :3], implementation="xla")
    with pytest.raises(ValueError, match="a query would see nothing"):
        dot_product_attention(KEY, QUERY[:, :2, :2], QUERY[:, :2, :2], local_window_size=1, implementation="xla")
    with pytest.raises(ValueError, match="does not take arrays without entries"):
        dot_product_attention(QUERY, KEY[:, :0], VALUE[:, :0], implementation="xla")
    with pytest.raises(ValueError, match="aligned with ours only where T = S"):
        dot_product_attention(HALF[1], HALF[0][:, :, :2], HALF[0][:, :, :2], is_causal=True, implementation="cudnn")
    with pytest.raises(ValueError, match="no right end without is_causal"):
        dot_product_attention(*[HALF[1]] * 3, local_window_size=(1, 0), implementation="cudnn")


def test_float64_stays_float64(x64):
    arrays = [x.astype(np.float64) for x in (QUERY, KEY, VALUE)]
    assert dot_product_attention(*arrays).dtype == np.float64
    with pytest.raises(ValueError, match="its softmax is float32 for float64 inputs"):
        dot_product_attention(*arrays, implementation="xla")


def test_cudnn_hands_over():
    attend = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"))
    x = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
    # jax.nn looks for the library while tracing: our checks let the problem through, and here there is none.
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attend.trace(x, x, x).lower(lowering_platforms=("cuda",))


def test_weights_are_those_of_the_output():
    options = {"is_causal": True, "query_offset": 2, "logits_soft_cap": 2.0, "sinks": np.zeros(4, np.float32)}
    expected = oracles.attention(QUERY, KEY, VALUE, **options)
    weights = attention_weights(QUERY, KEY, **options)
    np.testing.assert_allclose(weights, expected.weights, atol=1e-6)
    with pytest.raises(TypeError, match="dropout_rate"):
        attention_weights(QUERY, KEY, dropout_rate=0.1)


def test_concrete_arguments_inside_jit_are_checked():
    def attend(lengths, positions):
        options = {"key_value_seq_lengths": lengths, "query_positions": positions, "scale": np.ones(4, np.float32)}
        return jax.jit(lambda query: dot_product_attention(query, KEY, VALUE, **options))(QUERY)

    assert attend(jnp.array([1, 2]), np.arange(5)).shape == QUERY.shape
    for kind in (jnp.array, np.array, lambda x: np.array(x, np.uint8)):
        with pytest.raises(ValueError, match=r"key_value_seq_lengths must lie in 0..7, got values in 1..8"):
            attend(kind([1, 8]), np.arange(5))
    with pytest.raises(ValueError, match="query_positions must lie in -1"):
        attend(jnp.array([1, 2]), jnp.arange(5) - 3)
    with pytest.raises(ValueError, match=r"rows must lie in 0..4, got values in 0..5"):
        jax.jit(lambda query: attention_statistics(query, KEY, rows=np.array([0, 5])))(QUERY)
    with pytest.raises(ValueError, match=r"lengths must be at least 0, got values in -1..2"):
        jax.jit(lambda query: dot_product_attention(query, KEY, VALUE, mask=masks.Padding(np.array([-1, 2]))))(QUERY)
    with pytest.raises(ValueError, match="scale must be finite"):
        jax.jit(lambda query: dot_product_attention(query, KEY, VALUE, scale=np.full(4, np.nan, np.float32)))(QUERY)


@pytest.mark.parametrize("cap", [1.2e-38, 1e-30, 1e30, 1.1e30, 3.4e38, 1e39, 1e300])
def test_soft_caps_at_the_ends_of_the_range(cap):
    mask = np.tri(5, 7, k=1, dtype=bool)
    output, gradient = jax.value_and_grad(
        lambda q: (dot_product_attention(q, KEY, VALUE, mask=mask, logits_soft_cap=cap) ** 2).sum()
    )(jnp.asarray(QUERY).at[0, 0].set(0.0))
    assert np.isfinite(output)
    assert np.isfinite(gradient).all()
    if cap >= 1e30:
        capped = dot_product_attention(QUERY, KEY, VALUE, logits_soft_cap=cap)
        np.testing.assert_allclose(capped, dot_product_attention(QUERY, KEY, VALUE), rtol=1e-5, atol=1e-6)


def test_choose_checks_its_arguments():
    with pytest.raises(TypeError, match="return_residual must be True or False, got str 'no'"):
        choose_implementation(QUERY, KEY, VALUE, return_residual="no")


def test_options_are_those_of_the_signature():
    import inspect

    parameters = inspect.signature(dot_product_attention).parameters
    own = {"query", "key", "value", "bias", "mask", "dropout_rate", "dropout_rng", "implementation", "return_residual"}
    assert set(parameters) - own == set(AttentionOptions.__annotations__)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": QUERY[0, 0]}, r"query must have at least 3 axes, \[\*B, T, N, H\]; got shape \(4, 8\)"),
        ({"query": QUERY.astype(int)}, "query must have a floating dtype, got int32"),
        ({"query": None}, "query must be an array, got NoneType None"),
        ({"value": None}, "value must be an array, got None"),
        ({"key": KEY.astype(np.float16)}, "key must have the query's dtype float32, got float16"),
        ({"key": KEY[:1]}, r"key must have the query's leading axes \*B = \(2,\), got shape \(1, 7, 2, 8\)"),
        ({"key": KEY[..., :4]}, "query and key must have one head width H >= 1, got 8 and 4"),
        ({"query": QUERY[:, :, :3]}, "3 query heads and 2 key/value heads"),
        ({"key": KEY[:, :, :0], "value": VALUE[:, :, :0]}, "4 query heads and 0 key/value heads"),
        ({"value": VALUE[:, :3]}, r"value must have the key's \[S, K\] = \(7, 2\), got shape \(2, 3, 2, 8\)"),
        ({"mask": np.ones((2, 5, 7), bool)}, "mask must have rank 2 or 4"),
        ({"mask": np.ones((5, 7))}, "mask must be boolean, True = may attend; got dtype float32"),
        ({"mask": np.ones((2, 2, 5, 7), bool)}, r"mask must broadcast to \[\*B, N, T, S\] = \(2, 4, 5, 7\)"),
        ({"mask": biases.Alibi(4)}, "mask must be a mask"),
        ({"bias": masks.Causal()}, "bias must be a bias"),
        ({"bias": np.ones((7, 5), np.float32)}, r"bias must broadcast to \[\*B, N, T, S\]"),
        ({"bias": np.ones((5, 7), int)}, "bias must have a floating dtype, got int32"),
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": "big"}, "scale must be .* number, got str 'big'"),
        ({"scale": np.ones(3, np.float32)}, r"scale must have shape \[\] or \[N\] = \(4,\), got \(3,\)"),
        ({"scale": np.array([1, 1, np.inf, 1], np.float32)}, "scale must be finite"),
        ({"is_causal": 1}, "is_causal must be True or False, got int 1"),
        ({"return_residual": None}, "return_residual must be True or False, got NoneType None"),
        ({"query_seq_lengths": np.array([1, 6])}, r"query_seq_lengths must lie in 0..5, got values in 1..6"),
        ({"key_value_seq_lengths": np.array([-1, 2])}, r"key_value_seq_lengths must lie in 0..7, got values in -1..2"),
        ({"key_value_seq_lengths": np.array([1.0, 2.0])}, "key_value_seq_lengths must have an integer dtype"),
        ({"key_value_seq_lengths": np.array([1, 2, 3])}, r"key_value_seq_lengths must have shape \[\] or \[\*B\]"),
        ({"local_window_size": -1}, "local_window_size must be at least 0, got -1"),
        ({"local_window_size": (1, -2)}, "local_window_size must be at least 0, got -2"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size must be an int or \(left, right\), got \(1, 2, 3\)"),
        ({"local_window_size": 1.5}, "local_window_size must be an integer, got float 1.5"),
        ({"query_offset": 1.0}, "query_offset must have an integer dtype, got float32"),
        ({"query_offset": np.zeros(3, int)}, r"query_offset must have shape \[\] or \[\*B\] = \(2,\), got \(3,\)"),
        ({"query_offset": 1, "query_positions": np.arange(5)}, "give one of them"),
        ({"query_positions": np.arange(4)}, r"query_positions must have shape \[T\] or \[\*B, T\] = \(2, 5\), got \(4,\)"),
        ({"key_positions": np.arange(7) - 2}, "key_positions must lie in -1..2147483647, got values in -2..4"),
        ({"key_positions": np.arange(7.0)}, "key_positions must have an integer dtype"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive and finite, got 0.0"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap must be positive and finite"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap must be positive and finite"),
        ({"sinks": np.zeros(2, np.float32)}, r"sinks must have shape \[N\] = \(4,\), got \(2,\)"),
        ({"sinks": np.zeros(4, int)}, "sinks must have a floating dtype"),
        ({"query_offset": 2**31 - 3}, "query_offset must lie in -1073741824..2147483642, got values in 2147483645..2147483645"),
        ({"scale": 1e39}, "scale must be finite in float32, got 1e[+]39"),
        ({"scale": 10**400}, "scale must be finite, got inf"),
        ({"precision": "exact"}, "precision must be None, 'default', 'high', 'highest' or as in .*; got 'exact'"),
        ({"logits_soft_cap": 1e-39}, "logits_soft_cap must be at least 1.17549e-38, got 1e-39"),
        ({"query": jnp.zeros(QUERY.shape, jnp.float8_e4m3fn)}, "query must have a floating dtype of 16 bits or more, got float8_e4m3fn"),
        ({"implementation": "flash"}, "implementation must be one of 'dense', 'blockwise', 'pallas', 'xla', 'cudnn', None; got 'flash'"),
    ],
)  # fmt: skip
def test_bad_arguments(options, message):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE} | options
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        dot_product_attention(**arguments)
    assert "\n" not in str(caught.value)
