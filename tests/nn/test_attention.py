"""MultiHeadAttention against a NumPy recomputation, and its promises one by one."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attn_jax
from attn_jax import biases, masks, positions
from attn_jax.diagnostics.statistics import ALL, attention_statistics
from attn_jax.nn import MultiHeadAttention
from tests import oracles
from tests.nn import reference

B, T, S, D, C, N, H = 2, 5, 7, 12, 10, 6, 4
rng = np.random.default_rng(0)
X, CONTEXT = rng.standard_normal((B, T, D)), rng.standard_normal((B, S, C))
MASK = rng.random((B, 1, T, T)) < 0.7
BIAS = rng.standard_normal((N, T, T))[None]
LENGTHS = np.array([3, 5])
POSITIONS = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 12, 30]])


def module(seed=1, **options):
    options = {"head_width": H, "param_dtype": "float64", **options}
    return reference.randomized(lambda: MultiHeadAttention(D, N, rngs=nnx.Rngs(0), **options), seed)


@functools.partial(jax.jit, static_argnames=("deterministic", "return_statistics", "observe"))
def run(attend, x, context=None, **arguments):
    """A call, compiled as one program: op by op it takes ten times as long."""
    return attend(x, context, **arguments)


def queries_and_keys(query, key, value, **_):
    return query, key


# Module options, call arguments, and what the reference is told.
CASES = {
    "plain": ({}, {}, {}),
    "causal with biases": ({"is_causal": True, "use_bias": True}, {}, {"causal": True}),
    "grouped, rotary": (
        {"num_kv_heads": 2, "positions": "rotary", "rotary_base": 100.0},
        {},
        {"positions": "rotary", "base": 100.0},
    ),
    "multi-query, interleaved, at positions, wide values": (
        {"num_kv_heads": 1, "positions": "rotary", "rotary_interleaved": True, "is_causal": True, "value_width": 3},
        {"positions": POSITIONS},
        {
            "positions": "rotary",
            "interleaved": True,
            "causal": True,
            "query_positions": POSITIONS,
            "key_positions": POSITIONS,
        },
    ),
    "rms norm before rotary": (
        {"qk_norm": "rms", "qk_norm_epsilon": 1e-3, "positions": "rotary"},
        {},
        {"qk_norm": "rms", "epsilon": 1e-3, "positions": "rotary"},
    ),
    "unit vectors, learned temperature": (
        {"qk_norm": "l2", "scale_rule": 3.0, "learned_temperature": True},
        {},
        {"qk_norm": "l2", "scale": 3.0},
    ),
    "tied, with its norm and bias": (
        {"tie_query_key": True, "qk_norm": "rms", "use_bias": True, "scale_rule": "inverse"},
        {},
        {"qk_norm": "rms", "scale": 1 / H},
    ),
    "alibi, window, sinks, cap": (
        {"positions": "alibi", "local_window_size": (2, 1), "use_sinks": True, "logits_soft_cap": 2.0},
        {},
        {"positions": "alibi", "local_window_size": (2, 1), "logits_soft_cap": 2.0},
    ),
    "relative buckets, causal": (
        {"positions": "relative", "relative_buckets": 4, "relative_max_distance": 4, "is_causal": True},
        {},
        {"positions": "relative", "max_distance": 4, "causal": True},
    ),
    "mask, bias, lengths": (
        {"num_kv_heads": 3},
        {"mask": MASK, "bias": BIAS, "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
        {"mask": MASK, "bias": BIAS, "query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_self_attention_equals_the_reference(case, x64):
    options, arguments, told = CASES[case]
    attend = module(**options)
    output = run(attend, jnp.asarray(X), **arguments)
    expected, _ = reference.attention(reference.parameters(attend), X, **told)
    assert output.dtype == jnp.float64
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_cross_attention_equals_the_reference(x64):
    attend = module(context_width=C, num_kv_heads=2, positions="rotary", use_bias=True)
    places = np.arange(S) + 3
    output = run(attend, jnp.asarray(X), jnp.asarray(CONTEXT), context_positions=places)
    expected, _ = reference.attention(
        reference.parameters(attend), X, CONTEXT, positions="rotary", key_positions=places
    )
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 3e-2)])
def test_compute_dtype(dtype, tolerance):
    attend = module(param_dtype="float32", dtype=dtype, num_kv_heads=2, positions="rotary")
    output = run(attend, jnp.asarray(X, jnp.float32))
    expected, _ = reference.attention(reference.parameters(attend), X, positions="rotary")
    assert output.dtype == dtype
    error = np.linalg.norm(np.asarray(output, np.float64) - expected) / np.linalg.norm(expected)
    assert error <= tolerance


def test_query_head_reads_its_group():
    """Query heads 0 and 1 read key/value head 0, heads 2 and 3 head 1, whatever the queries are."""
    attend = MultiHeadAttention(8, 4, num_kv_heads=2, head_width=2, use_bias=True, rngs=nnx.Rngs(0))
    attend.value_weight[...] = jnp.zeros_like(attend.value_weight[...])
    attend.value_bias[...] = jnp.array([[0.0, 0.0], [1.0, 1.0]])
    attend.output_weight[...] = jnp.eye(8).reshape(4, 2, 8)
    output = run(attend, jnp.asarray(X[..., :8], jnp.float32))
    np.testing.assert_allclose(output, np.broadcast_to([0, 0, 0, 0, 1, 1, 1, 1], output.shape), atol=1e-6)


def test_norm_comes_before_rotation():
    """x = [1, 0, 0, 0] at position 1 under weights [1, 2, 3, 4]: norm, then turn."""
    attend = MultiHeadAttention(4, 1, qk_norm="rms", qk_norm_epsilon=1e-12, positions="rotary", rngs=nnx.Rngs(0))
    for weight in (attend.query_weight, attend.key_weight):
        weight[...] = jnp.eye(4)[:, None, :]
    for weight in (attend.query_norm_weight, attend.key_norm_weight):
        weight[...] = jnp.array([1.0, 2.0, 3.0, 4.0])
    x = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    _, (query, key) = run(attend, x, positions=jnp.array([1]), observe=queries_and_keys)
    for turned in (query, key):
        np.testing.assert_allclose(turned[0, 0], [1.0806, 0, 1.6829, 0], atol=1e-4)


def test_tied_scores_are_symmetric():
    attend = module(tie_query_key=True, qk_norm="rms", use_bias=True, param_dtype="float32")
    _, (query, key) = run(attend, jnp.asarray(X, jnp.float32), observe=queries_and_keys)
    chex.assert_trees_all_equal(query, key)
    assert attend.key_weight is None
    assert attend.key_bias is None


def test_zero_input_has_finite_gradients_under_qk_norm():
    for kind in ("rms", "l2"):
        attend = module(qk_norm=kind, param_dtype="float32")
        gradient = jax.grad(lambda x, attend=attend: run(attend, x).sum())(jnp.zeros((T, D)))
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    "options", [{}, {"tie_query_key": True, "qk_norm": "rms"}, {"use_bias": True, "num_kv_heads": 2}]
)
def test_nan_in_the_padding_reaches_no_gradient(options):
    attend = module(param_dtype="float32", **options)
    clean = jnp.asarray(X, jnp.float32)
    dirty = jnp.where((np.arange(T) < LENGTHS[:, None])[..., None], clean, jnp.nan)

    @jax.jit
    def outputs(attend, x):
        def loss(attend, x):
            output = attend(x, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS)
            return jnp.square(output).sum(), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(attend, x)

    (of_parameters, of_x), output = outputs(attend, dirty)
    (expected_of_parameters, _), expected = outputs(attend, clean)
    chex.assert_trees_all_equal(nnx.state(of_parameters), nnx.state(expected_of_parameters))
    chex.assert_trees_all_equal(output, expected)
    assert (of_x[0, 3:] == 0).all()


def test_nan_in_the_padding_of_a_context_reaches_no_gradient():
    attend = module(param_dtype="float32", context_width=C)
    x, context = jnp.asarray(X, jnp.float32), jnp.asarray(CONTEXT, jnp.float32).at[0, 3:].set(jnp.nan)
    gradient = jax.grad(lambda attend: run(attend, x, context, key_value_seq_lengths=np.array([3, 7])).sum())(attend)
    assert all(np.isfinite(g).all() for g in reference.parameters(gradient).values())


def test_dynamic_ntk_refuses_lengths():
    """The length that sets its frequencies is one number for all items, and known when the program is traced."""
    attend = module(param_dtype="float32", positions="rotary", rotary_scaling=positions.DynamicNTK(2.0, 4))
    x = jnp.asarray(X, jnp.float32)
    turned = run(attend, x)
    assert not np.allclose(turned, run(module(param_dtype="float32", positions="rotary"), x), atol=1e-3)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        with pytest.raises(ValueError, match=f"^{name} must be None with a rotary_scaling of DynamicNTK") as raised:
            run(attend, x, **{name: LENGTHS})
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["rotary", "alibi", "relative", None])
def test_nothing_in_nothing_out(kind):
    options = {"rotary_scaling": positions.DynamicNTK(2.0, 4)} if kind == "rotary" else {}
    attend = module(param_dtype="float32", positions=kind, **options)
    assert attend(jnp.zeros((B, 0, D))).shape == (B, 0, D)
    assert (attend(jnp.ones((B, T, D)), jnp.ones((B, 0, D))) == 0).all()


def test_dropout_is_off_in_evaluation_whatever_the_key():
    x = jnp.asarray(X, jnp.float32)
    plain, dropping = module(param_dtype="float32"), module(param_dtype="float32", dropout_rate=0.5)
    expected = run(plain, x)
    for key in (None, jax.random.key(0), jax.random.key(1)):
        chex.assert_trees_all_equal(run(dropping, x, deterministic=True, dropout_rng=key), expected)
    first, second = (run(dropping, x, deterministic=False, dropout_rng=jax.random.key(seed)) for seed in (0, 1))
    assert not np.allclose(first, second)
    assert not np.allclose(first, expected)
    chex.assert_trees_all_equal(first, run(dropping, x, deterministic=False, dropout_rng=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"dropout_rng must be a key .*rate 0\.5.*None"):
        run(dropping, x, deterministic=False)
    chex.assert_trees_all_equal(run(plain, x, deterministic=False), expected)  # nothing to drop, so no key is needed


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_rate_outside_of_its_range(rate):
    with pytest.raises(ValueError, match=r"dropout_rate must lie in \[0, 1\)"):
        module(dropout_rate=rate)


def test_statistics_are_those_of_the_captured_queries_and_keys():
    attend = module(param_dtype="float32", num_kv_heads=2, positions="alibi", is_causal=True, use_sinks=True)
    x = jnp.asarray(X, jnp.float32)
    output, statistics, (query, key) = run(
        attend,
        x,
        key_value_seq_lengths=LENGTHS,
        return_statistics=ALL,
        observe=queries_and_keys,
    )
    measure = jax.jit(functools.partial(attention_statistics, statistics=ALL, is_causal=True, bias=biases.Alibi(N)))
    expected = measure(query, key, sinks=attend.sinks[...], key_value_seq_lengths=LENGTHS)
    chex.assert_trees_all_close(statistics, expected, rtol=1e-6)
    chex.assert_trees_all_close(output, run(attend, x, key_value_seq_lengths=LENGTHS), rtol=1e-6)
    forward = reference.attention(
        reference.parameters(attend), X, positions="alibi", causal=True, key_value_seq_lengths=LENGTHS
    )[1]
    for name, expected in oracles.statistics(forward).items():
        np.testing.assert_allclose(getattr(statistics, name), expected, rtol=2e-5, atol=2e-6, err_msg=name)


def test_statistics_are_before_dropout():
    attend = module(param_dtype="float32", dropout_rate=0.5)
    x = jnp.asarray(X, jnp.float32)
    _, evaluated = run(attend, x, return_statistics=True)
    dropped, trained = run(attend, x, return_statistics=True, deterministic=False, dropout_rng=jax.random.key(0))
    chex.assert_trees_all_equal(trained, evaluated)
    chex.assert_trees_all_close(dropped, run(attend, x, deterministic=False, dropout_rng=jax.random.key(0)), rtol=1e-6)


def test_any_attention_function():
    x = jnp.asarray(X, jnp.float32)
    options = {"param_dtype": "float32", "is_causal": True, "scale_rule": "none"}
    expected = run(module(**options), x)
    for function in (jax.nn.dot_product_attention, functools.partial(attn_jax.dot_product_attention, precision="high")):
        chex.assert_trees_all_close(run(module(attention_fn=function, **options), x), expected, atol=1e-5)
    with pytest.raises(TypeError, match="sinks"):
        run(module(attention_fn=jax.nn.dot_product_attention, use_sinks=True, **options), x)
    with pytest.raises(ValueError, match=r"return_statistics describes attn_jax\.dot_product_attention"):
        run(module(attention_fn=jax.nn.dot_product_attention, **options), x, return_statistics=True)


def test_options_bound_to_the_attention_function_reach_the_statistics():
    x = jnp.asarray(X, jnp.float32)
    capped = functools.partial(attn_jax.dot_product_attention, logits_soft_cap=0.5, implementation="dense")
    _, statistics = run(module(param_dtype="float32", attention_fn=capped), x, return_statistics=("max_logit",))
    _, expected = run(module(param_dtype="float32", logits_soft_cap=0.5), x, return_statistics=("max_logit",))
    chex.assert_trees_all_close(statistics, expected)


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        ("nonsense", {}, "implementation must be one of"),
        ("xla", {"logits_soft_cap": 3.0}, "implementation='xla' cannot do this: it does not take logits_soft_cap"),
        ("cudnn", {"is_causal": True}, "implementation='cudnn' cannot do this"),
    ],
)
def test_an_implementation_is_refused_with_statistics_as_without(implementation, options, message):
    function = functools.partial(attn_jax.dot_product_attention, implementation=implementation)
    attend = module(param_dtype="float32", attention_fn=function, **options)
    for arguments in ({}, {"return_statistics": True}):
        with pytest.raises(ValueError, match=message):
            attend(jnp.asarray(X, jnp.float32), **arguments)


def test_lazy_mask_and_own_bias_add_up():
    x = jnp.asarray(X, jnp.float32)
    attend = module(param_dtype="float32", positions="alibi")
    told = {"positions": "alibi", "mask": oracles.sliding_window(2)}
    expected, _ = reference.attention(reference.parameters(attend), X, **told)
    np.testing.assert_allclose(run(attend, x, mask=masks.SlidingWindow(2)), expected, rtol=1e-5, atol=1e-5)
    shifted = run(attend, x, mask=masks.SlidingWindow(2), bias=jnp.full((T, T), 3.0))  # a constant bias changes nothing
    np.testing.assert_allclose(shifted, expected, rtol=1e-5, atol=1e-5)


def test_one_trace_for_equal_modules():
    x = jnp.asarray(X, jnp.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(attend, x):
        return attend(x)

    for seed in range(3):
        run(module(seed, param_dtype="float32", local_window_size=2, qk_norm="rms", positions="rotary"), x)


def test_initial_values():
    attend = MultiHeadAttention(256, 4, num_kv_heads=2, use_bias=True, use_sinks=True, learned_temperature=True,
                                qk_norm="rms", positions="relative", rngs=nnx.Rngs(0))  # fmt: skip
    values = reference.parameters(attend)
    for name, fan_in in [("query_weight", 256), ("key_weight", 256), ("value_weight", 256), ("output_weight", 256)]:
        assert values[name].std() == pytest.approx(fan_in**-0.5, rel=0.05), name
    for name in ("query_norm_weight", "key_norm_weight"):
        assert (values.pop(name) == 1).all()
    for name in values.keys() - {"query_weight", "key_weight", "value_weight", "output_weight"}:
        assert (values[name] == 0).all(), name
    chosen = MultiHeadAttention(8, 2, kernel_init=jax.nn.initializers.constant(0.5), rngs=nnx.Rngs(0))
    assert (chosen.query_weight[...] == 0.5).all()


def test_gradients_reach_every_parameter():
    attend = module(param_dtype="float32", num_kv_heads=2, use_sinks=True, learned_temperature=True, qk_norm="rms",
                    positions="relative", use_bias=True, is_causal=True)  # fmt: skip
    gradient = jax.grad(lambda attend, x: jnp.square(run(attend, x)).sum())(attend, jnp.asarray(X, jnp.float32))
    for path, g in reference.parameters(gradient).items():
        assert np.isfinite(g).all()
        assert np.abs(g).max() > 0, path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"head_width": None, "num_kv_heads": 6, "model_width": 13}, "model_width must be a multiple of num_heads"),
        ({"head_width": 3, "positions": "rotary"}, "head_width must be even for positions='rotary', got 3"),
        ({"positions": "rotary", "rotary_base": 0.5}, "base"),
        ({"positions": "rotary", "rotary_scaling": "linear"}, "scaling must be None or one of"),
        ({"positions": "rope"}, "positions must be one of 'rotary', 'alibi', 'relative', None; got 'rope'"),
        ({"positions": "relative", "relative_buckets": 1}, "buckets"),
        ({"qk_norm": "layer"}, "qk_norm must be one of 'rms', 'l2', None; got 'layer'"),
        ({"qk_norm_epsilon": 0}, "qk_norm_epsilon must be positive and finite"),
        ({"tie_query_key": True, "num_kv_heads": 2}, "num_kv_heads must be 6 where tie_query_key"),
        ({"tie_query_key": True, "context_width": 3}, "context_width must be 12 where tie_query_key"),
        ({"scale_rule": "sqrt"}, "rule must be one of"),
        ({"scale_rule": float("nan")}, "rule must be finite, got nan"),
        ({"local_window_size": -1}, "local_window_size must be at least 0, got -1"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size must be an int or \(left, right\)"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be positive and finite, got 0.0"),
        ({"dtype": "int32"}, "dtype must be a floating dtype, got 'int32'"),
        ({"param_dtype": None}, "param_dtype must be a floating dtype, got None"),
        ({"attention_fn": "dense"}, "attention_fn must be callable, got str"),
        ({"attention_fn": np.ones((3, 3))}, "attention_fn must be callable, got ndarray"),
        ({"kernel_init": "x"}, "kernel_init must be callable, got str"),
        ({"rotary_scaling": "foo"}, "rotary_scaling must be None or one of"),
        ({"rotary_base": 0.5}, "rotary_base must be greater than 1, got 0.5"),
        ({"rotary_base": 5.0}, "rotary_base has no effect without positions='rotary', got 5.0"),
        ({"rotary_interleaved": True, "positions": "alibi"}, "rotary_interleaved has no effect without"),
        ({"rotary_scaling": positions.NTK(2.0)}, "rotary_scaling has no effect without positions='rotary'"),
        ({"relative_buckets": 1}, "relative_buckets has no effect without positions='relative', got 1"),
        ({"relative_max_distance": 9, "positions": "rotary"}, "relative_max_distance has no effect without"),
        ({"qk_norm_epsilon": 1e-3}, "qk_norm_epsilon has no effect without a qk_norm, got 0.001"),
        ({"is_causal": 1}, "is_causal must be True or False"),
    ],
)
def test_wrong_options(options, message):
    options = {"head_width": H, "model_width": D} | options
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        MultiHeadAttention(num_heads=N, rngs=nnx.Rngs(0), **options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": np.zeros((2, 5, 11))}, re.escape("x must have width 12 on its last axis, got shape (2, 5, 11)")),
        ({"x": np.zeros(12)}, "x must have at least 2 axes"),
        ({"x": np.zeros((2, 5, 12), int)}, "x must have a floating dtype"),
        ({"context": np.zeros((2, 7, 11))}, "context must have width 12"),
        ({"context": np.zeros((3, 7, 12))}, "context must have the batch axes of x"),
        ({"context_positions": np.arange(5)}, "context_positions go with a context"),
        ({"positions": np.arange(4)}, "positions must have shape"),
        ({"mask": np.ones((2, 5, 5), bool)}, "mask must have rank"),
        ({"deterministic": None}, "deterministic must be True or False"),
        ({"return_statistics": "entropy"}, "return_statistics must be True, False or names"),
        ({"return_statistics": ["entrpy"]}, "statistics must be one of"),
        ({"key_value_seq_lengths": np.array([3, 6])}, "key_value_seq_lengths must lie in 0..5"),
        ({"query_seq_lengths": np.array([3, 4, 5])}, r"query_seq_lengths must have shape \[\*B\] = \(2,\), got \(3,\)"),
        ({"query_seq_lengths": np.array([3.0, 4.0])}, "query_seq_lengths must have an integer dtype"),
        ({"observe": 3}, "observe must be callable, got int"),
    ],
)
def test_wrong_arguments(arguments, message):
    attend = module(param_dtype="float32", positions="rotary")
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        attend(**{"x": jnp.asarray(X, jnp.float32), **arguments})
    assert "\n" not in str(raised.value)
