"""Linear mechanisms on a mesh against the definition, and what goes along the ring."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attn_jax.linear import LinearState, draw_features, linear_attention, retention
from attn_jax.parallel import ring_linear_attention, ring_recurrence
from tests import oracles
from tests.linear.problems import Geometry, assert_near, cast, draw, expected, joined, to_state
from tests.parallel.test_ring import on_mesh

GEOMETRY = Geometry()  # 13 steps, which no ring divides


@pytest.mark.parametrize(
    ("decay", "normalize", "sizes"),
    [
        ("none", True, {"sequence": 8}),
        ("per head", False, {"data": 2, "heads": 2, "sequence": 2}),
        ("per step", True, {"data": 2, "sequence": 4}),
        ("per feature", False, {"heads": 2, "sequence": 4}),
    ],
)
def test_the_recurrence_is_the_definition(decay, normalize, sizes):
    """Output, state after, and every gradient, that of the state before too; some keys are masked."""

    @jax.jit
    def run(arrays, mask, state, cotangent):
        def call(arrays, state):
            return ring_recurrence(
                **arrays, **on_mesh(**sizes), key_mask=mask, normalize=normalize, chunk_size=2, initial_state=state,
                return_state=True,
            )  # fmt: skip

        output, pull, after = jax.vjp(call, arrays, state, has_aux=True)
        return output, after, *pull(cotangent)

    for seed in range(3):
        arrays, rng = draw(seed, GEOMETRY, decay, positive=normalize, masked=True), np.random.default_rng(seed)
        cotangent = rng.standard_normal((2, 13, 4, 3)).astype(np.float32)
        state = to_state(np.abs(rng.standard_normal((2, 4, 5, 3 + normalize))), np.float32, normalize=normalize)
        if decay == "none":  # one memory for each key/value head, which the definition does not know
            state = jax.tree.map(lambda x: np.zeros_like(x[:, ::2]), state)
        given = cast(arrays, np.float32)
        mask = given.pop("key_mask")
        output, after, found, of_state = run(given, mask, state, cotangent)
        exact = cast(given, np.float64) | {"key_mask": mask}
        memory = None if decay == "none" else joined(state)
        forward, gradients = expected(exact, cotangent, memory=memory, normalize=normalize)
        assert_near(output, forward.output, 2e-6, "output")
        last = forward.memories[-1]
        assert_near(joined(after), last[:, ::2] if decay == "none" else last, 2e-6, "state")
        for name in given:
            assert_near(found[name], gradients[name], 2e-6, name)
        if memory is not None:
            assert_near(joined(of_state), gradients["memory"], 2e-6, "initial state")


@pytest.mark.parametrize("is_causal", [True, False])
def test_exponentials_that_are_shifted(is_causal):
    """Features that overflow by themselves: states fade by how the largest key grows, from device to device."""
    arrays = cast(draw(0, GEOMETRY), np.float32)
    arrays["key"] += np.linspace(98, 102, 13, dtype=np.float32)[:, None, None]
    if not is_causal:
        arrays["query"] = arrays["query"][:, :6]
    cotangent = np.random.default_rng(1).standard_normal((*arrays["query"].shape[:-1], 3)).astype(np.float32)

    @jax.jit
    def run(arrays, cotangent):
        def call(arrays):
            return ring_linear_attention(
                **arrays, **on_mesh(data=2, heads=2, sequence=2), feature_map="exp", is_causal=is_causal,
                return_state=True,
            )  # fmt: skip

        output, pull, after = jax.vjp(call, arrays, has_aux=True)
        return output, after, pull(cotangent)[0]

    output, after, found = run(arrays, cotangent)
    query, key, value = (arrays[name].astype(np.float64) for name in ("query", "key", "value"))
    forward = oracles.recurrence(np.exp(query), np.exp(key), value, is_causal=is_causal, normalize=True)
    assert_near(output, forward.output, 1e-5)
    np.testing.assert_allclose(after.shift, key.max(axis=(1, 3)), rtol=1e-6)
    of_features = oracles.recurrence_gradients(forward, cotangent)
    for name, x in (("query", query), ("key", key)):
        assert_near(found[name], of_features[name] * np.exp(x), 1e-5, name)
    assert_near(found["value"], of_features["value"], 1e-5, "value")


def test_lengths_and_drawn_features():
    """All that `linear_attention` takes, on a mesh of which one axis is not named."""
    arrays = cast(draw(0, GEOMETRY, masked=True), np.float32)
    lengths = {"query_seq_lengths": np.array([3, 13]), "key_value_seq_lengths": np.array([13, 7])}
    options = {**lengths, "feature_map": draw_features(jax.random.key(0), 5, 8), "return_state": True}
    mesh = on_mesh(data=2, sequence=4) | {"batch_axis": None}
    for is_causal in (True, False):
        options["is_causal"] = is_causal
        output, state = jax.jit(lambda arrays: linear_attention(**arrays, **options))(arrays)
        on_ring, state_on_ring = ring_linear_attention(**arrays, **options, **mesh)
        assert (on_ring[0, 3:] == 0).all()
        np.testing.assert_allclose(on_ring, output, atol=2e-6)
        # Of the same shift, though steps that do not count lie on other devices.
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), state_on_ring, state)


def test_retention_is_a_recurrence():
    arrays = cast(draw(0, GEOMETRY), np.float32)
    decay = np.array([0.5, 0.9, 0.99, 1.0], np.float32)
    expected = jax.jit(lambda arrays: retention(**arrays, decay=decay))(arrays)
    on_ring = ring_recurrence(**arrays, log_decay=np.log(decay), **on_mesh(sequence=4))
    np.testing.assert_allclose(on_ring, expected, rtol=1e-5, atol=1e-5)


def test_one_device():
    arrays = cast(draw(0, GEOMETRY, "per step", positive=True), np.float32)
    output, state = ring_recurrence(**arrays, **on_mesh(sequence=1), normalize=True, return_state=True)
    forward, _ = expected(cast(arrays, np.float64), np.zeros(output.shape), normalize=True)
    assert_near(output, forward.output, 2e-6)
    assert_near(joined(state), forward.memories[-1], 2e-6)


def test_only_states_go_along_the_ring():
    """Whatever the length: log2(D) + 1 messages of one state, and how it fades."""
    options = on_mesh(sequence=4)
    parts = NamedSharding(options["mesh"], PartitionSpec(None, "sequence"))
    x = jax.ShapeDtypeStruct((1, 256, 2, 8), np.float32, sharding=parts)
    decay = jax.ShapeDtypeStruct((1, 256, 2), np.float32, sharding=parts)
    text = jax.jit(lambda *x: ring_recurrence(*x, **options)).lower(x, x, x, decay).compile().as_text()
    sent = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute(?:-start)?\(", text)
    sizes = sorted(int(np.prod([int(n) for n in shape.split(",")])) for shape in sent)
    assert sizes == [2] + [2 * 8 * 8] * 3  # the fading before the last message reaches nobody
    assert not re.search(r"\b(all-gather|all-reduce|all-to-all)(-start)?\(", text)


STATE = LinearState(jnp.zeros((2, 2, 5, 4)))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("the mesh has no axis 'tokens'", {"axis_name": "tokens"}),
        ("the first batch axis must be a multiple of the 2 devices along 'data', got 3", {"batch": (3,)}),
        ("key/value heads must be a multiple of the 2 devices along 'heads', got 1", {"K": 1}),
        ("log_decay must be finite and at most 0", {"log_decay": np.ones(4, np.float32)}),
        ("log_decay must be None where is_causal is False", {"log_decay": np.zeros(4), "is_causal": False}),
        ("form must be one of 'chunkwise', 'recurrent', 'parallel'; got 'tree'", {"form": "tree"}),
        (r"initial_state.memory must have shape \[\*B, K, R, V\]", {"initial_state": STATE}),
    ],
)
def test_bad_input(message, options):
    geometry = Geometry(**{name: options.pop(name) for name in ("batch", "K") if name in options})
    arrays = cast(draw(0, geometry), np.float32)
    with pytest.raises(ValueError, match=message):
        ring_recurrence(**arrays, **on_mesh(data=2, heads=2, sequence=2) | options)


@pytest.mark.parametrize("is_causal", [True, False])
def test_an_empty_sequence_has_no_output_and_an_empty_state(is_causal):
    x = jnp.zeros((2, 0, 2, 4))
    output, state = ring_linear_attention(x, x, x, **on_mesh(sequence=4), is_causal=is_causal, return_state=True)
    assert output.shape == (2, 0, 2, 4)
    assert not np.asarray(state.memory).any()
