"""Where the chunks of a sequence lie, and that they get there from hand to hand."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from attn_jax.parallel import make_mesh
from attn_jax.parallel.zigzag import Ring, from_zigzag, to_zigzag

LETTERS = PartitionSpec("b", "t")


def ring_of(devices, pieces=2):
    return Ring(make_mesh(sequence=devices, devices=jax.devices()[:devices]), "sequence", pieces=pieces)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_each_device_holds_an_early_and_a_late_chunk(devices):
    ring = ring_of(devices)
    chunks = np.arange(2 * devices)  # of one token each
    x = np.stack([chunks, 100 + chunks])
    moved = jax.jit(lambda x: to_zigzag(x, LETTERS, ring))(x)
    expected = np.array([[d, 2 * devices - 1 - d] for d in range(devices)]).reshape(-1)
    np.testing.assert_array_equal(moved, np.stack([expected, 100 + expected]))
    for shard in moved.addressable_shards:
        assert shard.data.shape == (2, 2)  # the sequence stays shared
    held = [[int(ring.chunk(d, piece)) for piece in range(2)] for d in range(devices)]
    assert np.array(held).reshape(-1).tolist() == expected.tolist()


@pytest.mark.parametrize("devices", [3, 4])
def test_there_and_back(devices):
    """The inverse, and both are permutations: the transpose of one is the other."""
    ring = ring_of(devices)
    x = np.random.default_rng(0).standard_normal((2, 6 * devices, 3)).astype(np.float32)

    @jax.jit
    def run(x):
        moved, pull = jax.vjp(lambda x: to_zigzag(x, LETTERS, ring), x)
        return from_zigzag(moved, LETTERS, ring), pull(moved)[0], moved

    back, pulled, moved = run(x)
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(pulled, x)
    assert (np.asarray(moved) != x).any()


def test_chunks_go_from_device_to_device():
    ring = ring_of(4)
    sharding = jax.sharding.NamedSharding(ring.mesh, PartitionSpec(None, "sequence"))
    x = jax.ShapeDtypeStruct((2, 64), np.float32, sharding=sharding)
    text = jax.jit(lambda x: to_zigzag(x, LETTERS, ring)).lower(x).compile().as_text()
    assert "collective-permute" in text
    assert not any(name in text for name in ("all-gather", "all-to-all", "all-reduce"))


def test_in_order_nothing_moves():
    x = np.arange(8).reshape(1, 8)
    assert to_zigzag(x, LETTERS, ring_of(4, pieces=1)) is x


def test_arrays_without_a_sequence_stay():
    x = np.arange(3)
    assert to_zigzag(x, PartitionSpec("n"), ring_of(4)) is x


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "mesh must be a jax.sharding.Mesh, got NoneType", (None, "sequence")),
        (ValueError, "the mesh has no axis 'tokens', only 'data', 'heads', 'sequence'", ("mesh", "tokens")),
        (ValueError, "the mesh has no axis 'batch'", ("mesh", "sequence", "batch")),
        (ValueError, "the mesh has no axis 3", ("mesh", "sequence", None, 3)),
        (ValueError, "must be different axes, got .'sequence', 'sequence'", ("mesh", "sequence", "sequence")),
        (ValueError, "mesh must have automatic axes, as make_mesh makes them, got .*Explicit", ("explicit", "data")),
    ],
)
def test_axes_that_the_mesh_does_not_have(error, message, arguments):
    meshes = {
        "mesh": make_mesh(sequence=8),
        "explicit": jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)),
    }
    mesh, *axes = arguments
    with pytest.raises(error, match=message):
        Ring(meshes.get(mesh), *axes)
