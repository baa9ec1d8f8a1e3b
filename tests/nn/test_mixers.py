"""All mixers by one family of tests: their definition, padding, causality, states, transformations, sizes, bad input."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.nn.mixers import (
    GRU,
    MIXERS,
    WORDS,
    Convolution,
    LinearAttention,
    LSHAttention,
    MixerOptions,
    Retention,
    RoutingAttention,
    StateSpace,
    make_mixer,
)
from attn_jax.training import OptimizerConfig, init_states, token_loss, train_steps
from attn_jax.training.tasks import Copy
from tests.nn import reference
from tests.nn.mixer_oracles import ORACLES

D, T, LENGTHS = 8, 7, (7, 4)
OPTIONS = {
    "lsh": {"num_buckets": 4, "num_rounds": 2, "group_window": 2},
    "routing": {"num_clusters": 2, "group_window": 3},
    "convolution": {"convolution_width": 3},
    "state_space": {"state_width": 3, "short_convolution_width": 3},
}


def case(word, *, causal=True, options=None, **changes):
    """A configuration, small and with unequal sizes where the mixer has them."""
    sizes = {"head_width": 6, "value_width": 3} | ({} if word in ("lsh", "state_space") else {"num_kv_heads": 1})
    sizes = sizes if word not in ("convolution", "gru") else {}
    return TransformerConfig(
        vocabulary_size=3, num_layers=1, model_width=D, num_heads=2, mixer=word, causal=causal,
        mixer_options=MixerOptions(**(OPTIONS.get(word, {}) if options is None else options)), **sizes, **changes,
    )  # fmt: skip


CASES = {
    **{word: case(word) for word in MIXERS},
    **{f"{word}, two-way": case(word, causal=False) for word in ("linear", "lsh", "routing", "convolution")},
    **{f"{word}, biases": case(word, use_bias=True) for word in ("retention", "state_space", "convolution", "gru")},
    **{name: case("linear", options={"feature_map": name}) for name in ("relu", "exp")},
    "random": case("linear", options={"feature_map": "random", "num_features": 5}, use_bias=True),
}
CAUSAL = [name for name, config in CASES.items() if config.causal]


@functools.cache
def build(name, dtype="float64"):
    config = CASES[name]
    word = config.layer_mixers[0]
    with jax.enable_x64(dtype == "float64"):
        config = TransformerConfig(**{**vars_of(config), "param_dtype": dtype})
        return reference.randomized(lambda: make_mixer(word, config, rngs=nnx.Rngs(0)), seed=len(name))


def vars_of(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def tokens(name, seed=0):
    return np.random.default_rng([seed, len(name)]).standard_normal((2, T, D))


@jax.jit
def mix(mixer, x, lengths, cotangent):
    output, pullback = jax.vjp(lambda mixer, x: mixer(x, lengths=lengths), mixer, x)
    return output, *pullback(cotangent)


@jax.jit
def extend(mixer, x, state, lengths):
    return mixer.extend(x, state, lengths=lengths)


def oracle(name, p, x, length):
    """The rows that count, by the definition."""
    config = CASES[name]
    return ORACLES[config.layer_mixers[0]](p, x[:length], causal=config.causal, options=config.mixer_options)


@pytest.mark.parametrize("name", CASES)
def test_the_definition_and_padding_that_nobody_reads(name, x64):
    mixer, x = build(name), tokens(name)
    padded = x.copy()
    padded[1, LENGTHS[1] :] = np.nan
    cotangent = np.random.default_rng(1).standard_normal(x.shape)
    cotangent[1, LENGTHS[1] :] = 0
    output, by_parameters, by_x = mix(mixer, padded, np.array(LENGTHS), cotangent)
    assert output.dtype == jnp.float64
    assert jnp.isfinite(output).all()
    p = reference.parameters(mixer)
    for item, length in enumerate(LENGTHS):
        np.testing.assert_allclose(output[item, :length], oracle(name, p, x[item], length), rtol=0, atol=1e-11)

    assert (by_x[1, LENGTHS[1] :] == 0).all()
    if CASES[name].mixer == "routing":  # whose gradient is also that of the choice, which the output does not show
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((by_parameters, by_x)))
        assert jnp.any(by_parameters.centroids[...] != 0)
        return
    # Central differences of the definition, along one direction of all parameters and inputs at once.
    rng, gradients = np.random.default_rng(2), reference.parameters(by_parameters)
    along = {path: rng.standard_normal(value.shape) for path, value in p.items()}
    for fixed in ("random_features", "rotations"):
        if fixed in p:
            assert not gradients[fixed].any()
            along[fixed][:] = 0
    along_x = rng.standard_normal(x.shape)

    def total(step):
        moved = {path: value + step * along[path] for path, value in p.items()}
        items = (oracle(name, moved, x[i] + step * along_x[i], length) for i, length in enumerate(LENGTHS))
        return sum(np.sum(cotangent[i, :length] * y) for i, (length, y) in enumerate(zip(LENGTHS, items, strict=True)))

    expected = (total(1e-6) - total(-1e-6)) / 2e-6
    slope = sum(np.sum(gradients[path] * along[path]) for path in p) + np.sum(np.asarray(by_x) * along_x)
    assert slope == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_causal_mixers_never_see_the_future_and_others_do(name, x64):
    mixer, x = build(name), tokens(name)
    changed = x.copy()
    changed[:, 4:] = 10 * np.random.default_rng(3).standard_normal(changed[:, 4:].shape)
    zeros, lengths = np.zeros_like(x), np.full(2, T)
    before, after = (mix(mixer, one, lengths, zeros)[0] for one in (x, changed))
    differ = np.abs(np.asarray(before - after)) > 1e-12
    assert differ[:, 4:].any()
    assert differ[:, :4].any() == (not CASES[name].causal)


@pytest.mark.parametrize("name", CAUSAL)
def test_any_cutting_gives_what_one_call_gives(name, x64):
    """Three tokens a call, of which items count different numbers, and what does not count is NaN."""
    mixer, x = build(name), tokens(name)
    p, state, seen = reference.parameters(mixer), mixer.empty_state(2, dtype="float64"), np.zeros(2, int)
    for counts in ([3, 1], [0, 3], [1, 0], [3, 3]):
        given = np.full((2, 3, D), np.nan)
        for item, count in enumerate(counts):
            given[item, :count] = x[item, seen[item] : seen[item] + count]
        output, state = extend(mixer, given, state, np.array(counts))
        assert jnp.isfinite(output).all()
        for item, count in enumerate(counts):
            expected = oracle(name, p, x[item], seen[item] + count)[seen[item] :]
            np.testing.assert_allclose(output[item, :count], expected, rtol=0, atol=1e-11)
        seen += counts
        assert state.lengths.tolist() == seen.tolist()


@pytest.mark.parametrize("name", [*MIXERS, "exp"])
def test_a_scan_over_tokens_has_one_trace(name):
    mixer, x, traces = build(name, "float32"), tokens(name).astype(np.float32), []

    @jax.jit
    def steps(mixer, state, x):
        def step(state, one):
            traces.append(one.shape)
            output, state = mixer.extend(one[:, None], state)
            return state, output[:, 0]

        return jax.lax.scan(step, state, jnp.swapaxes(x, 0, 1))

    state = mixer.empty_state(2)
    for _ in range(2):
        state, outputs = steps(mixer, state, x)
    assert len(traces) == 1
    assert state.lengths.tolist() == [2 * T, 2 * T]
    p, twice = reference.parameters(mixer), np.concatenate([x, x], axis=1).astype(np.float64)
    for item in range(2):
        np.testing.assert_allclose(outputs[:, item], oracle(name, p, twice[item], 2 * T)[T:], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_has_one_size_and_dtype_whatever_it_has_seen(name, dtype):
    mixer = build(name, dtype)
    state = jax.eval_shape(lambda: mixer.empty_state((2, 3), dtype=dtype))
    assert state.lengths.dtype == jnp.int32
    assert all(leaf.shape[:2] == (2, 3) and not leaf.weak_type for leaf in jax.tree.leaves(state))
    for length in (1, 60):
        x = jax.ShapeDtypeStruct((2, 3, length, D), dtype)
        output, after = jax.eval_shape(lambda x, state: mixer.extend(x, state), x, state)
        chex.assert_trees_all_equal(
            *jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), (state, after))
        )
        assert (output.shape, output.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", ["linear", "retention", "state_space", "convolution", "gru", "routing"])
def test_items_mapped_are_items_of_a_batch(name, x64):
    mixer, x = build(name), tokens(name)
    mapped = jax.jit(jax.vmap(lambda x, length: mixer(x, lengths=length)))(x, np.array(LENGTHS))
    for item, length in enumerate(LENGTHS):
        expected = oracle(name, reference.parameters(mixer), x[item], length)
        np.testing.assert_allclose(mapped[item, :length], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["linear", "random", "retention", "state_space", "convolution", "gru"])
def test_bfloat16_is_float32_rounded(name):
    """Computed in bfloat16 and summed in float32: as near as the rounding of inputs and parameters allows."""
    mixer, x = build(name, "bfloat16"), jnp.asarray(tokens(name), jnp.bfloat16)
    output = jax.jit(lambda mixer, x: mixer(x))(mixer, x)
    assert output.dtype == jnp.bfloat16
    p = reference.parameters(mixer)
    expected = np.stack([oracle(name, p, np.asarray(one, np.float64), T) for one in x])
    error = np.asarray(output, np.float64) - expected
    assert np.sqrt(np.mean(error**2)) < 0.02 * np.sqrt(np.mean(expected**2))


N, H, V, K, R = 2, 6, 3, 1, 3
HEADS = D * N * H + D * K * (H + V) + N * V * D
COUNTS = {
    "linear": HEADS,
    "retention": HEADS + D * N * V + N * V,
    "state_space": D * N * V + D * (N * V + 2 * R) + D * N + N * V * D + (3 + 1) * (N * V + 2 * R) + 3 * N + N * V,
    "lsh": D * N * H + D * N * V + N * V * D + 2 * N * H * 4 // 2,
    "routing": HEADS + K * 2 * H,
    "convolution": 3 * D + D * D,
    "gru": 6 * D * D,
    "random": HEADS + 5 * H + N * H + K * (H + V) + D,
    "retention, biases": HEADS + 2 * (D * N * V + N * V) - D * N * V + N * H + K * (H + V) + D,
    "state_space, biases": D * N * V + D * (N * V + 2 * R) + D * N + N * V * D + (3 + 2) * (N * V + 2 * R)
    + 3 * N + 2 * N * V + D,
    "convolution, biases": 3 * D + D * D + 2 * D,
    "gru, biases": 6 * D * D + 4 * D,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_as_many_as_their_shapes_say(name):
    config = CASES[name]
    mixer = nnx.eval_shape(lambda: make_mixer(config.layer_mixers[0], config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(mixer, nnx.Param))
    assert len(leaves) == len(jax.tree.leaves(nnx.state(mixer)))  # nothing but parameters: a step would not carry it
    assert sum(math.prod(leaf.shape) for leaf in leaves) == COUNTS[name]


def test_every_mixer_has_a_word():
    assert {config.layer_mixers[0] for config in CASES.values()} == set(MIXERS) == set(ORACLES)
    assert ("softmax", "window", *MIXERS) == WORDS


def test_a_state_space_begins_as_in_its_paper():
    mixer = jax.jit(lambda: StateSpace(4, 512, value_width=1, rngs=nnx.Rngs(0)))()
    rates, steps = np.exp(mixer.log_rate[...]), np.log1p(np.exp(mixer.step_bias[...]))
    np.testing.assert_allclose(np.quantile(rates, [0, 0.5, 1]), [1, 8.5, 16], atol=1)  # uniform
    np.testing.assert_allclose(np.log(np.quantile(steps, [0, 0.5, 1])), np.log([0.001, 0.01, 0.1]), atol=0.4)


def test_many_seeds_train_at_once():
    """What is drawn once stays as it is to the bit, decay or not; everything else learns."""
    words = ("linear", "lsh")
    options = MixerOptions(feature_map="random", num_buckets=2, group_window=2)
    config = TransformerConfig(
        vocabulary_size=4, num_layers=len(words), model_width=D, num_heads=2, mlp_width=8, mixer=words,
        mixer_options=options,
    )  # fmt: skip
    optimizer = OptimizerConfig(weight_decay=0.1)
    begun = init_states(functools.partial(Transformer, config), optimizer, learning_rates=[0.01], seeds=[0, 1])
    before = jax.tree_util.tree_map(np.asarray, begun.params)
    state, metrics = train_steps(begun, Copy(4, 2, 6), loss=token_loss, batch_size=2, count=2)
    assert jnp.isfinite(metrics["loss"]).all()
    assert (metrics["loss"][0] != metrics["loss"][1]).all()
    for path, old in jax.tree.leaves_with_path(before):
        new = functools.reduce(lambda tree, key: tree[key.key], path, state.params)
        same = np.array_equal(new, old)
        assert same == (path[-1].key in ("random_features", "rotations")), path


BUILT = {name: build(name, "float32") for name in ("linear", "linear, two-way", "gru")}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: GRU(D, is_causal=False, rngs=r), "is_causal must be True for a GRU, which reads .* got False"),
        (lambda r: Retention(D, 2, is_causal=False, rngs=r), "is_causal must be True for retention"),
        (lambda r: StateSpace(D, 2, is_causal=False, rngs=r), "is_causal must be True for a state space"),
        (lambda r: Convolution(D, width=4, rngs=r), "width must be odd without is_causal, .* got 4"),
        (lambda r: Convolution(D, width=0, rngs=r), "width must be at least 1, got 0"),
        (lambda r: Convolution(D, use_bias=1, rngs=r), "use_bias must be True or False"),
        (lambda r: GRU(0, rngs=r), "model_width must be at least 1, got 0"),
        (lambda r: GRU(D, dtype="int32", rngs=r), "dtype must be a floating dtype, got 'int32'"),
        (lambda r: GRU(D, kernel_init="x", rngs=r), "kernel_init must be callable, got str"),
        (lambda r: LinearAttention(D, 3, rngs=r), "model_width must be a multiple of num_heads"),
        (lambda r: LinearAttention(D, 4, num_kv_heads=3, rngs=r), "num_heads must be a multiple of num_kv_heads"),
        (lambda r: LinearAttention(D, 2, feature_map="identity", rngs=r), "feature_map must be one of 'elu', 'relu'"),
        (lambda r: LinearAttention(D, 2, num_features=3, rngs=r), "num_features has no effect without feature_map='ra"),
        (lambda r: LinearAttention(D, 2, feature_map="random", num_features=0, rngs=r), "num_features must be at lea"),
        (lambda r: Retention(D, 2, head_width=3, rngs=r), "head_width must be even, since positions turn pairs, got 3"),
        (lambda r: Retention(D, 2, value_width=1, rngs=r), "value_width must be at least 2, got 1"),
        (lambda r: Retention(D, 2, norm_epsilon=0.0, rngs=r), "norm_epsilon must be positive and finite, got 0.0"),
        (lambda r: StateSpace(D, 2, state_width=0, rngs=r), "state_width must be at least 1, got 0"),
        (lambda r: LSHAttention(D, 2, num_buckets=3, rngs=r), "num_buckets must be 1 or even, got 3"),
        (lambda r: LSHAttention(D, 2, window=0, rngs=r), "window must be at least 1, got 0"),
        (lambda r: RoutingAttention(D, 2, num_clusters=0, rngs=r), "num_clusters must be at least 1, got 0"),
        (lambda r: make_mixer("softmax", CASES["gru"], rngs=r), "word must be one of 'linear', .* got 'softmax'"),
        (lambda r: make_mixer("lsh", CASES["linear"], rngs=r), "num_kv_heads must be num_heads = 2 .* got 1"),
        (lambda r: MixerOptions(num_buckets=3), "num_buckets must be 1 or even, .* got 3"),
        (lambda r: MixerOptions(window=0), "window must be at least 1, got 0"),
        (lambda r: MixerOptions(group_window=None), "group_window must be an integer, got None"),
        (lambda r: MixerOptions(feature_map="tanh"), "feature_map must be one of 'elu', .* got 'tanh'"),
        (lambda r: MixerOptions(num_features=4), "num_features has no effect without feature_map='random', got 4"),
        (lambda r: BUILT["gru"](jnp.zeros(D)), r"x must have at least 2 axes, \[\*B, T, D\]; got shape \(8,\)"),
        (lambda r: BUILT["gru"](jnp.zeros((2, 7))), r"x must have width 8 on its last axis, got shape \(2, 7\)"),
        (lambda r: BUILT["gru"](jnp.zeros((2, D), int)), "x must have a floating dtype, got int32"),
        (lambda r: BUILT["gru"](jnp.zeros((2, 3, D)), lengths=np.array([1, 4])), r"lengths must lie in 0\.\.3, got"),
        (lambda r: BUILT["gru"].empty_state(2, dtype="int8"), "dtype must be a floating dtype, got 'int8'"),
        (lambda r: BUILT["gru"].empty_state((2, -1)), "batch must be at least 1, got -1"),
        (lambda r: BUILT["linear, two-way"].empty_state(2), "empty_state needs is_causal=True"),
        (lambda r: BUILT["linear, two-way"].extend(jnp.zeros((2, 1, D)), None), "extend needs is_causal=True"),
        (
            lambda r: BUILT["gru"].extend(jnp.zeros((2, 1, D)), BUILT["linear"].empty_state(2)),
            "state must be a GRUState, as empty_state makes it, got MemoryState",
        ),
        (
            lambda r: BUILT["gru"].extend(jnp.zeros((3, 1, D)), BUILT["gru"].empty_state(2)),
            r"state.lengths must have shape \[\*B\] of x = \(3,\), got \(2,\)",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call(nnx.Rngs(0))
    assert "\n" not in str(raised.value)
