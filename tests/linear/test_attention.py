"""Linear attention: the definition, each feature map, denominators that vanish, and shifts that couple nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.linear import FeatureMap, LinearState, RandomFeatures, draw_features, linear_attention
from tests import oracles
from tests.linear.problems import Geometry, assert_near, cast, draw

FORMS = ("chunkwise", "recurrent", "parallel")
MAPS = {
    "elu": oracles.elu_plus_one,
    "relu": lambda x: np.maximum(x, 0),
    "exp": np.exp,
    "squared": np.square,
    "identity": lambda x: x,
}


def inputs(seed, geometry=None, dtype=np.float32):
    return cast(draw(seed, geometry or Geometry()), dtype)


def definition(arrays, features, **options):
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    return oracles.recurrence(features(query), features(key), value, **options)


@pytest.mark.parametrize(
    ("name", "is_causal", "normalize"),
    [
        ("elu", True, True), ("elu", False, True), ("relu", True, True), ("squared", False, True),
        ("identity", True, False), ("exp", True, True), ("exp", False, True), ("exp", True, False),
    ],
)  # fmt: skip
def test_each_map_is_the_definition(name, is_causal, normalize):
    """Outputs, for some in every form, and gradients, which the shifts of exponentials must not touch."""
    arrays, features = inputs(0), MAPS[name]
    options = {"is_causal": is_causal, "normalize": normalize}
    forward = definition(arrays, features, **options)
    cotangent = np.random.default_rng(1).standard_normal(forward.output.shape).astype(np.float32)
    others = FORMS[1:] if normalize and is_causal and name in ("elu", "exp") else ()

    def attend(arrays, form):
        return linear_attention(**arrays, feature_map=name, form=form, chunk_size=4, **options)

    @jax.jit
    def whole(arrays, cotangent):
        output, pull = jax.vjp(lambda arrays: attend(arrays, "chunkwise"), arrays)
        return (output, *(attend(arrays, form) for form in others)), pull(cotangent)[0]

    outputs, found = whole(arrays, cotangent)
    for output in outputs:
        assert_near(output, forward.output, 1e-5)
    of_features = oracles.recurrence_gradients(forward, cotangent)
    for side in ("query", "key"):
        x, step = arrays[side].astype(np.float64), 1e-6
        slope = (features(x + step) - features(x - step)) / (2 * step)
        assert_near(found[side], of_features[side] * slope, 1e-5, side)
    assert_near(found["value"], of_features["value"], 1e-5)


def test_the_running_mean():
    """Features of 1: output t is the mean of the values so far, in every head; and the state is their sum and count."""
    zeros, value = jnp.zeros((4, 3, 1)), jnp.tile(jnp.array([1.0, 3, 5, 7])[:, None, None], (1, 3, 1))
    for name, form in (("elu", "chunkwise"), ("elu", "recurrent"), ("elu", "parallel"), ("exp", "chunkwise")):
        options = {"feature_map": name, "form": form, "is_causal": True, "chunk_size": 2, "return_state": True}
        output, state = jax.jit(functools.partial(linear_attention, **options))(zeros, zeros, value)
        np.testing.assert_allclose(output, np.tile(np.arange(1.0, 5)[:, None, None], (1, 3, 1)), rtol=1e-6)
        np.testing.assert_array_equal(state.memory, np.full((3, 1, 1), 16.0))
        np.testing.assert_array_equal(state.normalizer, np.full((3, 1), 4.0))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_a_causal_state_is_carried(chunk):
    """Any chunk, and 4 + 2 tokens: outputs and the two sums."""
    geometry = Geometry((), 6, 3, 3, 4, 4)
    arrays = inputs(0, geometry)
    forward = definition(arrays, oracles.elu_plus_one, normalize=True)
    attend = functools.partial(linear_attention, is_causal=True, chunk_size=chunk, return_state=True)

    @jax.jit
    def both(arrays):
        first, middle = attend(**{name: x[:4] for name, x in arrays.items()})
        second, last = attend(**{name: x[4:] for name, x in arrays.items()}, initial_state=middle)
        return attend(**arrays), (first, second, last)

    (whole, state), (first, second, last) = both(arrays)
    assert_near(whole, forward.output, 1e-6)
    assert_near(np.concatenate([first, second]), forward.output, 1e-6)
    for found in (state, last):
        assert_near(found.memory, forward.memories[-1][..., :-1], 1e-6)
        assert_near(found.normalizer, forward.memories[-1][..., -1], 1e-6)


@pytest.mark.parametrize(("name", "is_causal"), [("exp", False), ("exp", True), ("random", True)])
def test_exponentials_carry_their_shift(name, is_causal):
    """Keys that grow from piece to piece: the state is put in their scale. One trace for all pieces."""
    arrays = inputs(0, Geometry((2,), 12))
    arrays["key"] *= np.linspace(0.1, 8, 12, dtype=np.float32)[:, None, None]
    features = draw_features(jax.random.key(0), 5, 16) if name == "random" else name

    @jax.jit
    def step(arrays, state):
        return linear_attention(
            **arrays, feature_map=features, is_causal=is_causal, initial_state=state, return_state=True
        )

    width = 16 if name == "random" else 5
    empty = LinearState.empty((2,), 2, width, 3, normalize=True, shifted=True)
    whole, last = step(arrays, empty)
    assert_near(linear_attention(**arrays, feature_map=features, is_causal=is_causal), np.asarray(whole), 1e-5)
    for size in (1, 4):
        state, outputs = empty, []
        for start in range(0, 12, size):
            output, state = step({name: x[:, start : start + size] for name, x in arrays.items()}, state)
            outputs.append(output)
        for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
            assert_near(found, np.asarray(expected), 1e-5)
        if is_causal:
            assert_near(np.concatenate(outputs, 1), np.asarray(whole), 1e-5)
    assert_near(outputs[-1], np.asarray(whole)[:, -4:], 1e-5)
    assert step._cache_size() == 3


def test_lengths_and_masks_leave_out():
    geometry = Geometry((2,), 9)
    arrays = inputs(0, geometry)
    lengths, mask = np.array([4, 7]), np.random.default_rng(0).random((2, 9)) < 0.7
    counted = mask & (np.arange(9) < lengths[:, None])
    spoiled = {name: np.where(counted[..., None, None], x, np.nan) for name, x in arrays.items()}
    spoiled["query"] = np.where((np.arange(9) < lengths[:, None])[..., None, None], arrays["query"], np.nan)
    for name, is_causal in (("elu", False), ("exp", True)):

        def attend(arrays, is_causal=is_causal, name=name):
            return linear_attention(
                **arrays, feature_map=name, is_causal=is_causal, key_mask=mask, chunk_size=4,
                query_seq_lengths=lengths, key_value_seq_lengths=lengths,
            )  # fmt: skip

        output, found = jax.jit(lambda arrays, attend=attend: jax.vjp(attend, arrays))(spoiled)
        (found,) = found(jnp.ones_like(output))
        forward = definition(arrays, MAPS[name], normalize=True, is_causal=is_causal, counted=counted)
        seen = np.where((np.arange(9) < lengths[:, None])[..., None, None], forward.output, 0)
        assert_near(output, seen, 1e-5)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        assert (found["key"][~counted] == 0).all()
        assert (found["value"][~counted] == 0).all()


# Denominators


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_zero_denominator_gives_zero_and_no_gradient(dtype):
    random = {name: jnp.asarray(x, dtype) for name, x in draw(0, Geometry((2,), 8)).items()}
    dead = {name: -jnp.ones_like(x) for name, x in random.items()}

    @jax.jit
    def both(query, key, value):
        def attend(*x):
            return linear_attention(*x, feature_map="relu", is_causal=True, chunk_size=4)

        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(jnp.ones_like(output))

    for query, key in ((dead, random), (random, dead), (dead, dead)):
        output, gradients = both(query["query"], key["key"], random["value"])
        assert (output == 0).all()
        assert all((x == 0).all() for x in gradients)
    # Only some rows are dead.
    query = random["query"].at[:, ::2].set(-1)
    output, gradients = both(query, random["key"], random["value"])
    assert (output[:, ::2] == 0).all()
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert (gradients[0][:, ::2] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_small_denominators_are_not_shrunk(dtype):
    small = jnp.full((8, 1, 4), 1e-4, dtype)
    for is_causal in (False, True):
        attend = jax.jit(functools.partial(linear_attention, feature_map="relu", is_causal=is_causal))
        output = attend(small, small, jnp.ones((8, 1, 2), dtype))
        np.testing.assert_allclose(np.asarray(output, np.float64), 1, rtol=1e-6)  # exact in half precision
    random = {name: jnp.asarray(x * 1e-4, dtype) for name, x in draw(0, Geometry((), 8)).items()}
    random["value"] = random["value"] * 1e4
    exact = {name: np.asarray(x, np.float64) for name, x in random.items()}
    found = jax.jit(functools.partial(linear_attention, feature_map="relu", is_causal=True))(**random)
    tolerance = 1e-6 if dtype == jnp.float32 else 4e-3  # an output rounded to bfloat16
    assert_near(found, definition(exact, MAPS["relu"], normalize=True).output, tolerance)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("form", "name", "is_causal"),
    [("chunkwise", "elu", True), ("chunkwise", "exp", True), ("recurrent", "elu", True), ("parallel", "elu", False)],
)
def test_sums_do_not_stall_in_half_precision(form, name, is_causal, dtype):
    """A sum of ones in bfloat16 would stop at 256."""
    zeros, ones = jnp.zeros((4096, 1, 8), dtype), jnp.ones((4096, 1, 8), dtype)
    attend = jax.jit(functools.partial(linear_attention, feature_map=name, is_causal=is_causal, form=form))
    output = attend(zeros, zeros, ones)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, ones)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_within_two_units(dtype):
    arrays = {name: jnp.asarray(x, dtype) for name, x in draw(0, Geometry((), 8192, 1, 1, 8, 8)).items()}
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    found = np.asarray(jax.jit(functools.partial(linear_attention, is_causal=True))(**arrays), np.float64)
    forward = definition(exact, oracles.elu_plus_one, normalize=True)
    unit = float(jnp.finfo(dtype).eps) * np.maximum(np.abs(forward.output), 2.0**-14)
    assert (np.abs(found - forward.output) <= 2 * unit + 1e-6).all()


# Random features


@pytest.fixture(scope="module")
def features():
    return draw_features(jax.random.key(0), 8, 64)


LOUD = {"random": 30, "exp": 100}  # e^(100 · 2) is beyond float32, and so is what a shift by it would leave


@pytest.mark.parametrize(("name", "is_causal"), [("random", True), ("random", False), ("exp", True), ("exp", False)])
def test_a_loud_item_leaves_the_others_alone(features, name, is_causal):
    arrays = inputs(0, Geometry((2,), 6, 2, 2, 8, 3))
    loud = arrays | {"key": arrays["key"] * np.array([1, LOUD[name]], np.float32)[:, None, None, None]}
    feature_map = features if name == "random" else name
    attend = jax.jit(functools.partial(linear_attention, feature_map=feature_map, is_causal=is_causal))
    quiet, found = attend(**arrays), attend(**loud)
    assert_near(found[0], np.asarray(quiet[0]), 1e-6)
    assert np.isfinite(found).all()
    for item in (slice(0, 1), slice(1, 2)):
        alone = attend(**{name: x[item] for name, x in loud.items()})
        assert_near(found[item], np.asarray(alone), 1e-6)


@pytest.mark.parametrize(("name", "form"), [("random", "chunkwise"), ("exp", "chunkwise"), ("exp", "recurrent")])
def test_a_loud_late_key_leaves_the_past_alone(features, name, form):
    arrays = inputs(0, Geometry((2,), 6, 2, 2, 8, 3))
    loud = arrays["key"].copy()
    loud[:, 4] *= LOUD[name]
    options = {"feature_map": features if name == "random" else name, "is_causal": True, "form": form}
    attend = jax.jit(functools.partial(linear_attention, **options, chunk_size=8))
    quiet, found = attend(**arrays), attend(**(arrays | {"key": loud}))
    np.testing.assert_allclose(found[:, :4], quiet[:, :4], atol=1e-6)
    assert np.isfinite(found).all()
    assert np.abs(found[:, 4:] - quiet[:, 4:]).max() > 0.01  # it is heard


def test_huge_keys_in_half_precision_keep_rows_that_sum_to_one(features):
    arrays = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs(0, Geometry((2,), 6, 2, 2, 8, 3)).items()}
    ones = jnp.ones_like(arrays["value"])
    for is_causal in (False, True):
        found = linear_attention(arrays["query"], arrays["key"] * 1e3, ones, feature_map=features, is_causal=is_causal)
        np.testing.assert_array_equal(found, ones)


def test_exponentials_match_the_definition_far_from_zero():
    """Logits of 2 · 60: e^120 overflows float32; the sum over features is still what it is in float64."""
    arrays = inputs(0, Geometry((2,), 6))
    arrays["query"], arrays["key"] = arrays["query"] * 20 + 60, arrays["key"] * 20 - 60
    for is_causal in (False, True):
        attend = jax.jit(functools.partial(linear_attention, feature_map="exp", is_causal=is_causal, chunk_size=4))
        found = attend(**arrays)
        assert_near(found, definition(arrays, np.exp, normalize=True, is_causal=is_causal).output, 1e-4)


def softmax_error(count, width, *, spread=0.35, seeds=8, orthogonal=True):
    """Relative error of the output, root mean square over draws of the features."""
    geometry = Geometry((), 64, 1, 1, width, 16)
    errors = []
    attend = jax.jit(lambda arrays, features: linear_attention(**arrays, feature_map=features))
    for seed in range(seeds):
        arrays = inputs(seed, geometry)
        arrays = arrays | {name: arrays[name] * np.float32(spread) for name in ("query", "key")}
        exact = oracles.attention(**arrays).output
        features = draw_features(jax.random.key(seed), width, count, orthogonal=orthogonal)
        found = np.asarray(attend(arrays, features))
        errors.append(np.sqrt(((found - exact) ** 2).sum() / (exact**2).sum()))
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize("width", [16, 64])
def test_random_features_near_the_softmax_as_one_over_the_root_of_their_number(width):
    few, many = softmax_error(256, width), softmax_error(4096, width)
    assert many < 0.05
    assert 2.5 < few / many < 6.5  # 4, up to the spread of 8 draws


def test_orthogonal_directions_err_less():
    assert softmax_error(64, 64, seeds=16) < softmax_error(64, 64, seeds=16, orthogonal=False)


def test_the_mean_over_draws_is_the_softmax_kernel():
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((3, 8)).astype(np.float32) * 0.5 for _ in range(2))
    draws = jax.vmap(lambda key: draw_features(key, 8, 16).directions)(jax.random.split(jax.random.key(0), 4000))

    def estimate(directions):
        by_query, by_key = (RandomFeatures(directions).logarithm(jnp.asarray(x)) for x in (query, key))
        return jnp.exp(by_query[:, None] + by_key[None]).sum(-1)

    estimates = jax.jit(jax.vmap(estimate))(draws)
    spread = np.asarray(estimates).std(0) / np.sqrt(4000)
    np.testing.assert_array_less(np.abs(np.asarray(estimates).mean(0) - np.exp(query @ key.T / np.sqrt(8))), 4 * spread)


def test_directions_are_orthogonal_with_normal_lengths():
    directions = np.asarray(draw_features(jax.random.key(0), 32, 3200).directions).reshape(100, 32, 32)
    lengths = np.linalg.norm(directions, axis=-1)
    products = directions @ np.swapaxes(directions, -1, -2) / (lengths[:, :, None] * lengths[:, None, :])
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(32), products.shape), atol=1e-5)
    assert abs((lengths**2).mean() - 32) < 1
    assert abs(directions.mean()) < 0.02
    again = draw_features(jax.random.key(1), 32, 3200).directions
    assert not np.allclose(again, directions.reshape(-1, 32))


# Traces


def test_equal_maps_share_a_trace():
    arrays, traces = inputs(0), []

    @jax.jit
    def attend(arrays, features):
        traces.append(1)
        return linear_attention(**arrays, feature_map=features, is_causal=True)

    for seed in range(3):
        attend(arrays, draw_features(jax.random.key(seed), 5, 8))
    assert len(traces) == 1


def test_decoding_steps_share_a_trace():
    """`lax.scan` over steps: the state keeps its structure, shapes and dtypes."""
    arrays = cast(draw(0, Geometry((2,), 6)), jnp.bfloat16)
    for name, options in (("elu", {}), ("exp", {"shifted": True})):
        state = LinearState.empty((2,), 2, 5, 3, normalize=True, **options)

        def step(state, token, name=name):
            token = jax.tree.map(lambda x: x[:, None], token)
            output, state = linear_attention(
                **token, feature_map=name, is_causal=True, initial_state=state, return_state=True
            )
            return state, output[:, 0]

        _, outputs = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), arrays))
        whole = linear_attention(**arrays, feature_map=name, is_causal=True)
        assert_near(jnp.swapaxes(outputs, 0, 1), np.asarray(whole, np.float64), 0.01)


# Wrong arguments

BAD = [
    ({"feature_map": "identity"}, ValueError, "feature_map must be positive where normalize is True, got 'identity'"),
    ({"feature_map": FeatureMap(jnp.sin, positive=False)}, ValueError, "feature_map must be positive"),
    ({"feature_map": "softmax"}, ValueError, "feature_map must be one of 'elu', 'relu', 'exp'"),
    ({"feature_map": jnp.sin}, TypeError, "feature_map must be one of elu.* or a FeatureMap, got"),
    ({"feature_map": draw_features(jax.random.key(0), 4, 8)}, ValueError, r"feature_map.directions must have shape"),
    ({"key_value_seq_lengths": np.array([3, 14])}, ValueError, "key_value_seq_lengths must lie in 0..13"),
    ({"query_seq_lengths": np.array([3])}, ValueError, r"query_seq_lengths must have shape \[\] or \[\*B\]"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1"),
    ({"is_causal": True, "query": np.ones((2, 3, 4, 5))}, ValueError, "as many steps as query where is_causal"),
    ({"initial_state": LinearState(jnp.zeros((2, 2, 5, 3)))}, ValueError, "initial_state.normalizer must be an array"),
    (
        {"feature_map": "exp", "initial_state": LinearState.empty((2,), 2, 5, 3, normalize=True)},
        ValueError,
        "initial_state.shift must be an array for the exponentials of exp, got None",
    ),
    (
        {"initial_state": LinearState.empty((2,), 2, 5, 3, normalize=True, shifted=True)},
        ValueError,
        "initial_state.shift must be None where features are not exponentials, got an array",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        linear_attention(**(draw(0, Geometry()) | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4), "width must be at least 1, got 0"), ((4, 0), "count must be at least 1, got 0")],
)
def test_features_of_no_size_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_features(jax.random.key(0), *arguments)
    with pytest.raises(TypeError, match="key must be one key"):
        draw_features(0, 4, 4)
