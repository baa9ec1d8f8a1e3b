"""Ring attention against the NumPy oracle, and what its devices send, hold and visit."""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import attn_jax
from attn_jax import masks
from attn_jax.exact.steps import Sweep
from attn_jax.parallel import make_mesh, ring_attention
from attn_jax.typing import Array, Int
from tests.exact.conformance import EXACT, Implementation
from tests.exact.problems import arguments
from tests.exact.programs import STRUCTURES, Geometry, Program
from tests.exact.test_conformance import check_draws


def mesh_of(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def on_mesh(**sizes):
    """The mesh and the names of its axes, those of one device left out."""
    names = {"batch_axis": "data", "head_axis": "heads", "axis_name": "sequence"}
    return {"mesh": mesh_of(**sizes)} | {name: axis if axis in sizes else None for name, axis in names.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class RingImplementation(Implementation):
    """A row of the table of implementations that runs on a mesh."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cache  # noqa: B019 - lives as long as its test
    def compiled(self, program):
        def run(differentiable, others, cotangents):
            self.traces[program] += 1

            def forward(differentiable):
                call = arguments(program, differentiable | others)
                return ring_attention(**call, **self.options, return_residual=True)

            results, pull = jax.vjp(forward, differentiable)
            return results, pull(cotangents)[0]

        return jax.jit(run)


SELF, CROSS, LONG = (
    Geometry((2,), 13, 13, 4, 2, 4, 4),
    Geometry((2,), 9, 14, 4, 2, 4, 6),
    Geometry((2,), 32, 32, 4, 2, 8, 8),
)
SIZES = (
    {"sequence": 8}, {"sequence": 4}, {"data": 2, "heads": 2, "sequence": 2}, {"sequence": 2},
    {"data": 2, "sequence": 4}, {"heads": 2, "sequence": 4}, {"data": 2, "heads": 2},
)  # fmt: skip
TILES = attn_jax.Blockwise(queries=3, keys=2, entries=50)  # which divide no chunk
# Every structure once, in turn on each mesh, in each geometry and dtype: the names of those that are not slow.
FAST = {3: "float32", 7: "float64", 11: "bfloat16", 17: "float32"}
DTYPES = ("float32", "float32", "float64", "float32", "bfloat16")


@pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=() if i in FAST else pytest.mark.slow, id=str(s)) for i, s in enumerate(STRUCTURES)],
)
def test_every_kind_of_mask_agrees_with_the_oracle(number):
    """Output, log-sum-exp and every gradient, with NaN and infinity in all that nobody may see."""
    geometry = (SELF, CROSS, LONG)[number % 3]
    program = Program(geometry, STRUCTURES[number], FAST.get(number, DTYPES[number % 5]))
    options = on_mesh(**SIZES[number % 7]) | {"implementation": TILES if number % 2 else None}
    check_draws(RingImplementation("ring", lambda program: None, EXACT, options=options), program, 5)


class Marked(masks.Mask):
    """A mask of one's own: what it asks of items and keys, by arrays that say which axes they have."""

    items: Int[Array, "*b"]
    keys: Int[Array, "*#b s"]

    def evaluate(self, tile):
        return tile.per_key("keys", self.keys) >= tile.per_item("items", self.items)


def draw(*, batch=(2,), T=21, S=21, N=4, K=2, H=8, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, H)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def test_the_whole_is_known_to_its_parts():
    """What is counted in the whole square: dropout by its indices, random blocks by its length."""
    rng = np.random.default_rng(1)
    own = Marked(jnp.array([1, 2]), jnp.asarray(rng.integers(0, 4, 21)))
    options = {"mask": own | masks.RandomBlocks(0, 2, 3), "dropout_rate": 0.3}
    dense = jax.jit(lambda rng, *inputs: attn_jax.dot_product_attention(*inputs, **options, dropout_rng=rng))
    expected = dense(jax.random.key(3), *draw())
    options |= {"dropout_rng": jax.random.key(3), **on_mesh(data=2, heads=2, sequence=2)}
    np.testing.assert_allclose(ring_attention(*draw(), **options), expected, atol=1e-6)
    assert np.abs(dense(jax.random.key(4), *draw()) - expected).max() > 0.1  # other weights are not as good


def test_in_a_loop_over_layers_that_are_computed_again():
    """As the `attention_fn` of a model: bound by `partial`, under jit, scan, remat and grad."""
    attend = functools.partial(ring_attention, **on_mesh(data=2, heads=2, sequence=2))
    query, key, value = draw(T=16, S=16)

    def loss(inputs, attend):
        @jax.checkpoint
        def layer(x, _):
            return x + attend(x, key, value, is_causal=True, key_value_seq_lengths=np.array([16, 5])), None

        return (jax.lax.scan(layer, inputs, None, length=2)[0] ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)  # both are hashed
    plain = functools.partial(attn_jax.dot_product_attention, implementation="dense")
    np.testing.assert_allclose(gradient(query, attend), gradient(query, plain), rtol=1e-4, atol=1e-5)


def test_no_keys_and_no_queries():
    query, key, value = draw()
    options = on_mesh(sequence=4) | {"is_causal": True, "return_residual": True}
    output, logsumexp = ring_attention(query, key[:, :0], value[:, :0], **options)
    assert output.shape == query.shape
    assert (output == 0).all()
    assert (logsumexp == -np.inf).all()
    assert ring_attention(query[:, :0], key, value, **options)[0].shape == (2, 0, 4, 8)


def test_a_ring_of_one_device():
    query, key, value = draw(T=9, S=14)
    options = {"is_causal": True, "query_offset": 5, "sinks": np.ones(4, np.float32)}
    expected = jax.jit(lambda *x: attn_jax.dot_product_attention(*x, **options))(query, key, value)
    np.testing.assert_allclose(ring_attention(query, key, value, **options, **on_mesh(sequence=1)), expected, atol=1e-6)


@functools.cache
def program(devices, length):
    """The compiled forward and backward pass of a causal call, with an array mask and arrays in parts."""
    options = on_mesh(sequence=devices) | {"is_causal": True, "implementation": attn_jax.Blockwise(64, 64)}
    by_sequence = NamedSharding(options["mesh"], PartitionSpec(None, "sequence"))

    def run(query, key, value, cotangent):
        output, pull = jax.vjp(functools.partial(ring_attention, **options), query, key, value)
        return output, pull(cotangent)

    x = jax.ShapeDtypeStruct((1, length, 4, 16), np.float32, sharding=by_sequence)
    return jax.jit(run).lower(x, x, x, x).compile()


def test_keys_go_from_device_to_device_and_are_nowhere_together():
    text = program(4, 8192).as_text()
    names = r"\b(all-gather|all-reduce|all-to-all|reduce-scatter|collective-broadcast|collective-permute)(?:-start)?\("
    assert set(re.findall(names, text)) == {"collective-permute"}
    # The longest array on a device has its share of the sequence, or a tile.
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    assert max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes) == 8192 // 4 * 4 * 16


def test_memory_falls_with_the_devices():
    few, many = (program(devices, 8192).memory_analysis() for devices in (2, 4))
    assert many.argument_size_in_bytes == few.argument_size_in_bytes // 2
    assert many.temp_size_in_bytes < 0.55 * few.temp_size_in_bytes


@pytest.mark.parametrize(
    ("devices", "length", "mask"),
    [(2, 64, masks.Causal()), (8, 61, masks.documents(np.zeros(61, int))), (4, 64, masks.SlidingWindow(9))],
)
def test_every_device_visits_its_share_of_the_tiles(devices, length, mask, monkeypatch):
    visited, visit_keys = collections.Counter(), Sweep.visit_keys

    def counting(self, visit, carry):
        def counted(index, mixed, carry):
            jax.debug.callback(lambda device: visited.update([int(device)]), jax.lax.axis_index("sequence"))
            return visit(index, mixed, carry)

        return visit_keys(self, counted, carry)

    monkeypatch.setattr(Sweep, "visit_keys", counting)
    x = np.ones((1, length, 1, 4), np.float32)
    ring_attention(x, x, x, mask=mask, **on_mesh(sequence=devices), implementation=attn_jax.Blockwise(4, 4))
    jax.effects_barrier()
    touched = masks.count_tiles(mask, length, tile=(4, 4))
    share = (touched.full + touched.mixed) / devices
    assert sorted(visited) == list(range(devices))
    assert max(visited.values()) <= 1.15 * share


def test_only_first_derivatives():
    query, key, value = draw(T=8, S=8)

    def slope(query):
        return jax.grad(lambda x: ring_attention(x, key, value, **on_mesh(sequence=2)).sum())(query).sum()

    with pytest.raises(ValueError, match="ring_attention has first derivatives, in reverse mode; 'dense' has all"):
        jax.grad(slope)(query)


class Unmarked(masks.Mask):
    keys: Any

    def evaluate(self, tile):
        return tile.per_key("keys", self.keys)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "the mesh has no axis 'tokens', only 'data', 'heads', 'sequence'", {"axis_name": "tokens"}),
        (TypeError, "mesh must be a jax.sharding.Mesh, got str", {"mesh": "cpu"}),
        (ValueError, "first batch axis must be a multiple of the 2 devices along 'data', got 3", {"batch": (3,)}),
        (ValueError, "query must have a batch axis for batch_axis='data', got ", {"batch": ()}),
        (ValueError, "key/value heads must be a multiple of the 2 devices along 'heads', got 1", {"K": 1}),
        (ValueError, "implementation must be one of None, 'blockwise'; got 'dense'", {"implementation": "dense"}),
        (TypeError, r"Unmarked.keys must be annotated with its axes", {"mask": Unmarked(np.ones(21, bool))}),
        (TypeError, "ring_attention does not take rows; it takes ", {"rows": np.arange(3)}),
        (ValueError, r"key_value_seq_lengths must lie in 0..21", {"key_value_seq_lengths": np.array([22, 1])}),
        (ValueError, r"mask must broadcast to", {"mask": np.ones((21, 20), bool)}),
    ],
)
def test_bad_input(error, message, options):
    shapes = {name: options.pop(name) for name in ("batch", "K") if name in options}
    with pytest.raises(error, match=message):
        ring_attention(*draw(**shapes), **on_mesh(data=2, heads=2, sequence=2) | options)
