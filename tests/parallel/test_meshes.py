"""Meshes fit their devices, and a layout cuts what can be cut."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.parallel import Layout, make_mesh
from attn_jax.parallel.meshes import axis_size
from attn_jax.training import OptimizerConfig, init_state

CONFIG = TransformerConfig(vocabulary_size=11, num_layers=3, model_width=16, num_heads=4, num_kv_heads=2, mlp_width=24)


@pytest.fixture(scope="module")
def state():
    return init_state(functools.partial(Transformer, CONFIG), OptimizerConfig(), learning_rate=1e-3)


def test_a_mesh_has_all_devices_in_order():
    mesh = make_mesh(data=2, sequence=4)
    assert dict(mesh.shape) == {"data": 2, "heads": 1, "sequence": 4}
    assert set(mesh.axis_types) == {AxisType.Auto}
    # Devices of a process follow each other: `data` is what crosses machines.
    assert [d.id for d in mesh.devices.flat] == [d.id for d in jax.devices()]
    some = make_mesh(heads=2, devices=jax.devices()[3:5])
    assert [d.id for d in some.devices.flat] == [d.id for d in jax.devices()[3:5]]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"data": 3}, ValueError, "a mesh of data 3 · heads 1 · sequence 1 takes 3 devices, got 8"),
        ({"data": 4, "heads": 4}, ValueError, "data 4 · heads 4 · sequence 1 takes 16 devices, got 8"),
        ({"sequence": 0}, ValueError, "sequence must be at least 1, got 0"),
        ({"heads": 2.0}, TypeError, "heads must be an integer"),
    ],
)
def test_a_mesh_that_does_not_match_the_devices(sizes, error, message):
    with pytest.raises(error, match=message):
        make_mesh(**sizes)


def test_an_axis_that_is_not_there():
    mesh = Mesh(np.asarray(jax.devices()), ("batch",))
    with pytest.raises(ValueError, match="the mesh has no axis 'data', only 'batch'"):
        Layout(mesh)
    with pytest.raises(ValueError, match="the mesh has no axis 'rows', only 'data', 'heads', 'sequence'"):
        axis_size(make_mesh(data=8), "rows")
    with pytest.raises(TypeError, match="mesh must be a Mesh, as make_mesh makes it, got int"):
        Layout(8)


def test_what_lies_on_each_device(state):
    """Every part is on as many devices as the layout says, moments like their parameter, and nothing is lost."""
    layout = Layout(make_mesh(data=2, heads=2, sequence=2), shard_parameters=True)
    placed = layout.place(state)
    params, moments = placed.params, placed.optimizer_state[1].mu
    for tree in (params, moments):
        attention, mlp = tree["layers"]["attention"], tree["layers"]["mlp"]
        specs = {name: x.sharding.spec for name, x in {**attention, **mlp, "embedding": tree["embedding"]}.items()}
        assert specs == {
            "query_weight": PartitionSpec(None, "data", "heads", None),
            "key_weight": PartitionSpec(None, "data", "heads", None),
            "value_weight": PartitionSpec(None, "data", "heads", None),
            "output_weight": PartitionSpec(None, "heads", None, "data"),
            "gate_weight": PartitionSpec(None, "data", "heads"),
            "up_weight": PartitionSpec(None, "data", "heads"),
            "down_weight": PartitionSpec(None, "heads", "data"),
            "embedding": PartitionSpec(None, "data"),
        }
        shard = attention["query_weight"].addressable_shards[0].data
        assert shard.shape == (3, 8, 2, 4)
    copied = Layout(layout.mesh).place(state).params["layers"]["attention"]["query_weight"]
    assert copied.addressable_shards[0].data.shape == (3, 16, 2, 4)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert placed.key == state.key
    back = layout.fetch(placed)
    assert {x.sharding.num_devices for x in jax.tree.leaves(back)} == {1}
    jax.tree.map(np.testing.assert_array_equal, state.params, back.params)


def test_sizes_that_cannot_be_cut(state):
    layout = Layout(make_mesh(data=4, sequence=2))
    batch = np.zeros((6, 8), np.int32)
    with pytest.raises(
        ValueError, match="sequences of a batch must be a multiple of the 4 devices along 'data', got 6"
    ):
        layout.place_batch(batch)
    with pytest.raises(ValueError, match=r"batch must have at least 2 axes, \[B, T, ...\]; got shape \(6,\)"):
        layout.place_batch(batch[:, 0])
    with pytest.raises(
        ValueError, match="heads of key_weight must be a multiple of the 4 devices along 'heads', got 2"
    ):
        Layout(make_mesh(data=2, heads=4)).place(state)
    wide = dataclasses.replace(CONFIG, num_heads=8, num_kv_heads=8, mlp_width=20)
    made = init_state(functools.partial(Transformer, wide), OptimizerConfig(), learning_rate=1e-3)
    with pytest.raises(ValueError, match=r"inner width of down_weight must be a multiple of the 8 devices .*, got 20"):
        Layout(make_mesh(heads=8)).place(made)


def test_a_length_that_does_not_divide_is_on_all():
    layout = Layout(make_mesh(data=4, sequence=2))
    even, odd = (layout.place_batch(np.arange(4 * t).reshape(4, t)) for t in (8, 7))
    assert even.addressable_shards[0].data.shape == (1, 4)
    assert odd.addressable_shards[0].data.shape == (1, 7)
