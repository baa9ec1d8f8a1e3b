"""The engine against the definition, token by token: forms, decays, lengths, chunks, states, masks and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attn_jax.linear import LinearState, linear_recurrence
from tests.linear.problems import (
    DECAYS,
    Geometry,
    assert_near,
    call,
    cast,
    draw,
    expected,
    joined,
    to_state,
)

FORMS = {"chunkwise": 5, "recurrent": None, "parallel": None}
NORMALIZED = {"none": True, "per head": False, "per step": True, "per feature": False}


def check(arrays, geometry, *, form, chunk, normalize, tolerance, dtype, memory=None, is_causal=True, seed=0):
    """Output, state and gradients of one problem."""
    cotangent = np.random.default_rng(seed).standard_normal((*arrays["query"].shape[:-1], geometry.V))
    given = cast(arrays, dtype)
    state = None if memory is None else to_state(memory, dtype, normalize=normalize)
    options = {"normalize": normalize, "is_causal": is_causal}
    output, after, found = call(given, state, cotangent.astype(dtype), form=form, chunk_size=chunk, **options)
    assert output.dtype == dtype
    exactly = cast(given, np.float64)  # what the program was given
    if memory is not None:
        memory = joined(state)
    forward, gradients = expected(exactly, cotangent.astype(dtype), memory=memory, **options)
    assert_near(output, forward.output, tolerance, "output")
    G = geometry.N // geometry.K
    last = forward.memories[-1]
    if after.memory.shape[-3] == geometry.K:
        last = last[..., ::G, :, :]
    assert_near(joined(after), last, tolerance, "state")
    for name in ("query", "key", "value", *(["log_decay"] if "log_decay" in arrays else [])):
        assert_near(found[name], gradients[name], tolerance, name)
    if memory is not None and after.memory.shape[-3] == geometry.N:
        assert_near(joined(found["state"]), gradients["memory"], tolerance, "initial state")


EVERY = [("chunkwise", decay) for decay in DECAYS]
EVERY += [(form, decay) for form in ("recurrent", "parallel") for decay in ("none", "per step", "per feature")]


@pytest.mark.parametrize(("form", "decay"), EVERY)
def test_every_form_is_the_definition(form, decay):
    """Masked keys, a state before, grouped queries, a chunk that does not divide the length."""
    geometry, normalize = Geometry(), NORMALIZED[decay]
    for seed in range(4):
        arrays = draw(seed, geometry, decay, positive=normalize, masked=True)
        heads = geometry.K if decay == "none" else geometry.N
        rng = np.random.default_rng(seed)
        memory = np.abs(rng.standard_normal((2, heads, geometry.R, geometry.V + normalize)))
        if decay == "none":  # the definition knows query heads only
            memory = None
        check(
            arrays, geometry, form=form, chunk=FORMS[form], normalize=normalize, tolerance=2e-6, dtype=np.float32,
            memory=memory, seed=seed,
        )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_without_causality_every_query_reads_all(form):
    geometry = Geometry()
    for seed in range(2):
        arrays = draw(seed, geometry, positive=True, masked=True)
        arrays["query"] = arrays["query"][:, :6]  # fewer queries than keys
        check(
            arrays, geometry, form=form, chunk=5, normalize=True, tolerance=2e-6, dtype=np.float32, is_causal=False,
        )  # fmt: skip


LONG = [(1, 256), (2, 1), (97, 7), (4096, 256), (4097, 100)]


@pytest.mark.parametrize(("length", "chunk"), LONG)
def test_any_length_and_chunk(length, chunk):
    """Decays of 1, of 1 less a little, and down to ½ at every step: nothing overflows, nothing is lost."""
    geometry = Geometry((1,), length, 2, 2, 4, 3)
    arrays = draw(length, geometry, "per step", levels=np.log([1.0, 0.999, 0.9, 0.5]))
    arrays["log_decay"][..., 1] = np.log(0.5)
    check(arrays, geometry, form="chunkwise", chunk=chunk, normalize=False, tolerance=1e-5, dtype=np.float32)


@pytest.mark.parametrize(
    ("form", "decay", "length"),
    [("recurrent", "per head", 4096), ("parallel", "per step", 1000), ("chunkwise", "per feature", 4096)],
)
def test_long_sequences_by_every_form(form, decay, length):
    geometry = Geometry((), length, 2, 1, 4, 3)
    arrays = draw(0, geometry, decay, levels=np.log([1.0, 0.5]))
    check(arrays, geometry, form=form, chunk=32, normalize=False, tolerance=1e-5, dtype=np.float32)


@pytest.mark.parametrize(
    ("form", "decay", "length"),
    [
        ("chunkwise", "per step", 4097),
        ("chunkwise", "per feature", 61),
        ("recurrent", "none", 997),
        ("recurrent", "per feature", 997),
        ("parallel", "per step", 997),
    ],
)
def test_float64(form, decay, length, x64):
    geometry = Geometry((), length, 2, 1, 4, 3)
    arrays = draw(0, geometry, decay, levels=np.log([1.0, 0.999, 0.5]), positive=True)
    check(arrays, geometry, form=form, chunk=16, normalize=True, tolerance=1e-11, dtype=np.float64)


def test_near_steps_keep_their_decay_behind_far_ones():
    """Behind a running sum of -177, float32 knows a difference of two neighbours to 1e-5 only."""
    geometry = Geometry((1,), 256, 1, 1, 2, 1)
    arrays = draw(0, geometry, "per step", levels=[np.log(0.5), -0.7, -0.001])
    for value in ("query", "key", "value"):
        arrays[value] = np.abs(arrays[value])
    found = linear_recurrence(**cast(arrays, np.float32), chunk_size=256)
    forward, _ = expected(cast(cast(arrays, np.float32), np.float64), np.zeros(found.shape))
    np.testing.assert_allclose(found, forward.output, rtol=1e-6)  # each entry by itself


@pytest.mark.parametrize("decay", ["none", "per head", "per feature"])
def test_any_cutting_gives_the_whole(decay):
    geometry, normalize = Geometry((2,), 12), NORMALIZED[decay]
    arrays = cast(draw(0, geometry, decay, positive=normalize, masked=True), np.float32)
    options = {"normalize": normalize, "chunk_size": 5, "return_state": True}
    whole, last = linear_recurrence(**arrays, **options)

    @jax.jit
    def step(piece, state):
        return linear_recurrence(**piece, **options, initial_state=state)

    for size in (1, 4):
        outputs = []
        heads = geometry.K if decay == "none" else geometry.N
        state = LinearState.empty((2,), heads, geometry.R, geometry.V, normalize=normalize)
        for start in range(0, 12, size):
            cut = slice(start, start + size)
            piece = {name: x if x.ndim == 1 else x[:, cut] for name, x in arrays.items()}
            output, state = step(piece, state)
            outputs.append(output)
        assert_near(np.concatenate(outputs, 1), whole, 1e-6)
        assert_near(joined(state), joined(last), 1e-6)
    assert step._cache_size() == 2  # one trace a size, whatever the step


def test_what_does_not_count_may_hold_anything():
    geometry = Geometry()
    for decay in ("none", "per step"):
        arrays = cast(draw(0, geometry, decay, levels=[-0.1], masked=True), np.float32)
        cotangent = np.ones((2, geometry.T, geometry.N, geometry.V), np.float32)
        clean = call(arrays, None, cotangent, form="chunkwise", chunk_size=5)
        spoiled = dict(arrays)
        out = ~arrays["key_mask"]
        assert out.any()
        spoiled["key"] = np.where(out[..., None, None], np.nan, arrays["key"])
        spoiled["value"] = np.where(out[..., None, None], np.inf, arrays["value"])
        if decay == "per step":
            spoiled["log_decay"] = np.where(out[..., None], np.nan, arrays["log_decay"])
        found = call(spoiled, None, cotangent, form="chunkwise", chunk_size=5)
        jax.tree.map(np.testing.assert_array_equal, clean, found)


def test_heads_of_a_group_that_share_a_decay_share_a_memory():
    geometry = Geometry()
    arrays = cast(draw(0, geometry, "per step", levels=[-0.1, -0.5]), np.float32)
    shared = arrays["log_decay"][..., ::2]
    output, state = linear_recurrence(**(arrays | {"log_decay": shared}), return_state=True)
    repeated, each = linear_recurrence(**(arrays | {"log_decay": np.repeat(shared, 2, -1)}), return_state=True)
    assert state.memory.shape[1] == geometry.K
    assert each.memory.shape[1] == geometry.N
    assert_near(output, np.asarray(repeated), 1e-6)
    assert_near(np.repeat(state.memory, 2, 1), np.asarray(each.memory), 1e-6)


def test_axes_without_entries():
    for batch, length in (((0,), 5), ((2,), 0), ((2, 0), 0)):
        geometry = Geometry(batch, length)
        for form, decay in (("chunkwise", "per feature"), ("recurrent", "per step"), ("parallel", "none")):
            arrays = cast(draw(0, geometry, decay, levels=[-0.1], masked=True), np.float32)
            output, state = linear_recurrence(**arrays, form=form, normalize=True, return_state=True)
            assert output.shape == (*batch, length, geometry.N, geometry.V)
            assert (np.asarray(state.memory) == 0).all()


def test_leading_axes_and_vmap_are_one():
    geometry = Geometry((2, 3), 7)
    arrays = cast(draw(0, geometry, "per step", levels=[-0.1, -1.0]), np.float32)
    whole = jax.jit(lambda arrays: linear_recurrence(**arrays, chunk_size=3))(arrays)
    partly = arrays | {name: arrays[name][0, 0] for name in ("key", "value")}
    axes = {"query": 0, "log_decay": 0, "key": None, "value": None}

    @jax.jit
    def mapped(arrays, partly):
        def run(arrays):
            return linear_recurrence(**arrays, chunk_size=3)

        return jax.vmap(jax.vmap(run))(arrays), jax.vmap(jax.vmap(run, (axes,)), (axes,))(partly)

    both, of_queries = mapped(arrays, partly)
    assert_near(both, np.asarray(whole), 1e-6)
    assert_near(of_queries[0, 0], np.asarray(whole)[0, 0], 1e-6)


def test_half_precision_sums_in_float32():
    geometry = Geometry((1,), 4096, 1, 1, 1, 1)
    ones = {name: jnp.ones_like(x, jnp.bfloat16) for name, x in draw(0, geometry).items()}
    for form in ("chunkwise", "recurrent"):
        output, state = linear_recurrence(**ones, form=form, return_state=True)
        assert output.dtype == jnp.bfloat16
        assert state.memory.dtype == jnp.float32
        np.testing.assert_array_equal(output[0, :, 0, 0], np.arange(1, 4097).astype(jnp.bfloat16))


@pytest.mark.parametrize(("form", "training"), [("chunkwise", False), ("chunkwise", True), ("recurrent", True)])
def test_memory_is_linear(form, training):
    def bytes_of(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        decay = jax.ShapeDtypeStruct((1, length, 2), jnp.float32)

        def loss(q, k, v, a):
            return (linear_recurrence(q, k, v, a, form=form, normalize=True) ** 2).sum()

        program = jax.jit(jax.grad(loss, (0, 1, 2, 3)) if training else loss)
        return program.lower(x, x, x, decay).compile().memory_analysis().temp_size_in_bytes

    short, long = bytes_of(2048), bytes_of(16384)
    assert long < 8.8 * short
    assert long < (14 if training else 5) * 4 * 16384 * 2 * (3 * 16 + 1)  # of the bytes of the inputs


BAD = [
    ({"form": "fast"}, ValueError, "form must be one of 'chunkwise', 'recurrent', 'parallel'; got 'fast'"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
    ({"chunk_size": 2.0}, TypeError, "chunk_size must be an integer"),
    ({"normalize": 1}, TypeError, "normalize must be True or False"),
    ({"log_decay": np.full(4, 0.1)}, ValueError, r"log_decay must be finite and at most 0, for decays in \(0, 1\]"),
    ({"log_decay": np.array([0, 0, 0, -np.inf])}, ValueError, "log_decay must be finite and at most 0"),
    ({"log_decay": np.array([0, 0, 0, np.nan])}, ValueError, "log_decay must be finite and at most 0"),
    ({"log_decay": np.zeros(3)}, ValueError, r"log_decay must have shape \[N\]"),
    ({"log_decay": np.zeros(4, int)}, TypeError, "log_decay must have a floating dtype"),
    ({"log_decay": np.zeros(4), "is_causal": False}, ValueError, "log_decay must be None where is_causal is False"),
    ({"key_mask": np.ones((2, 13))}, TypeError, "key_mask must have dtype bool"),
    ({"key_mask": np.ones((2, 12), bool)}, ValueError, r"key_mask must have shape \[\*B, S\] = \(2, 13\)"),
    ({"query": np.ones((2, 12, 4, 5))}, ValueError, "key must have as many steps as query where is_causal is True"),
    ({"query": np.ones((2, 13, 3, 5))}, ValueError, "got 3 query heads and 2 key/value heads"),
    ({"key": np.ones((2, 13, 2, 6))}, ValueError, r"key must have shape \[\*B, S, K, H\]"),
    ({"value": np.ones((2, 12, 2, 3))}, ValueError, r"value must have shape \[\*B, S, K, V\]"),
    ({"value": np.ones((13, 2, 3))}, ValueError, "value must have rank 4"),
    ({"query": np.ones((2, 13, 4, 5), int)}, TypeError, "query must have a floating dtype"),
    ({"initial_state": 0}, TypeError, "initial_state must be a LinearState, got int"),
    ({"initial_state": LinearState(jnp.zeros((2, 4, 5, 3)))}, ValueError, r"initial_state.memory must have shape"),
    (
        {"initial_state": LinearState(jnp.zeros((2, 2, 5, 3))), "normalize": True},
        ValueError,
        "initial_state.normalizer must be an array where normalize is True, got None",
    ),
    (
        {"initial_state": LinearState.empty((2,), 2, 5, 3, shifted=True)},
        ValueError,
        "initial_state.shift must be None where features are not exponentials, got an array",
    ),
    (
        {"initial_state": LinearState(jnp.zeros((2, 2, 5, 3)), jnp.zeros((2, 2, 5)))},
        ValueError,
        "initial_state.normalizer must be None where normalize is False, got an array",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[", ".join(x[0]) for x in BAD])
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        linear_recurrence(**(draw(0, Geometry()) | change))
