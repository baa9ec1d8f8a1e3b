"""What the benchmark of several devices measures: a training step on a mesh, its memory, the ring's, its tiles."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import masks
from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.parallel import Layout, make_mesh, pmap_train_step, ring_attention, shard_train_step
from attn_jax.parallel.zigzag import Ring
from attn_jax.training import OptimizerConfig, TrainState, init_state, token_loss, train_step
from attn_jax.training.objectives import SpreadLoss
from attn_jax.training.tasks import Batch

OPTIMIZER = OptimizerConfig(clip_norm=None)
STEPS = 20
Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


def sizes_of(mesh: str) -> dict[str, int]:
    """The sizes that a word like 2x2x2 says: data, heads, sequence. Raises ValueError if it says none."""
    parts = mesh.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"meshes must hold words like 2x2x2 (data, heads, sequence), got {mesh!r}")
    return dict(zip(("data", "heads", "sequence"), map(int, parts), strict=True))


def begin(config: TransformerConfig) -> TrainState:
    """The state of a run before its first step."""
    return init_state(functools.partial(Transformer, config), OPTIMIZER, learning_rate=3e-3)


def step_on(mesh: str, *, shard_parameters: bool = False) -> Step:
    """A training step on the first devices there are; "pmap": on all, by `pmap`."""
    if mesh == "pmap":
        return pmap_train_step(functools.partial(train_step, loss=token_loss))
    layout = _layout(mesh, shard_parameters)
    step = functools.partial(train_step, loss=SpreadLoss(token_loss, layout.mesh))
    return shard_train_step(step, layout.mesh, shard_parameters=shard_parameters)


def _layout(mesh: str, shard_parameters: bool = False) -> Layout:
    sizes = sizes_of(mesh)
    return Layout(make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))]), shard_parameters)


def draw(number: int, vocabulary_size: int, batch_size: int, length: int) -> Batch:
    """Sequences of which other numbers of tokens count: a mean of the devices' means would be another number."""
    ids, kept = (jax.random.fold_in(jax.random.key(7), 2 * number + i) for i in range(2))
    inputs = jax.random.randint(ids, (batch_size, length), 0, vocabulary_size)
    share = (jnp.arange(batch_size)[:, None] + 1) / batch_size
    weights = (jax.random.uniform(kept, (batch_size, length)) < share).astype(jnp.float32)
    return Batch(inputs, jnp.roll(inputs, 3, axis=1), weights)


def follow(step: Step, config: TransformerConfig, batch_size: int, length: int) -> tuple[Any, np.ndarray]:
    """The gradient of the first step, and the losses of all."""
    batches = [draw(i, config.vocabulary_size, batch_size, length) for i in range(STEPS)]
    state, metrics = step(begin(config), batches[0])
    # The first moment of Adam after one step is the gradient, but for a factor.
    gradient, losses = jax.tree.map(np.asarray, state.optimizer_state[1].mu), [metrics["loss"]]
    for batch in batches[1:]:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return gradient, np.array(losses)


def differences(found: tuple[Any, np.ndarray], expected: tuple[Any, np.ndarray]) -> dict[str, float]:
    """Of what `follow` returns: of the first loss, of the gradient over each array's largest entry, of all losses."""
    arrays = zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True)
    losses = np.abs(found[1] - expected[1]) / expected[1]
    return {
        "loss": float(losses[0]),
        "gradient": max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in arrays),
        f"loss, {STEPS} steps": float(losses.max()),
    }


def step_memory(
    config: TransformerConfig, mesh: str, batch_size: int, length: int, *, shard_parameters: bool
) -> dict[str, int]:
    """Of a device in a compiled step, which is not run: what it holds between steps, and what it takes besides."""
    layout = _layout(mesh, shard_parameters)
    state = begin(config)
    batch = jax.eval_shape(lambda: draw(0, config.vocabulary_size, batch_size, length))
    step = functools.partial(train_step, loss=SpreadLoss(token_loss, layout.mesh))

    def placed(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, shardings)

    arguments = placed(state, layout.state_shardings(state)), placed(batch, layout.batch_shardings(batch))
    found: Any = jax.jit(functools.partial(layout.run, step)).lower(*arguments).compile().memory_analysis()
    shares = (x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(arguments[0].params))
    return {
        "temporary_bytes": found.temp_size_in_bytes,
        "argument_bytes": found.argument_size_in_bytes,
        "parameters": sum(int(np.prod(shape)) for shape in shares),
    }


def kept_by_a_token(config: TransformerConfig, heads: int) -> float:
    """Floats that the backward pass needs of a token in a layer, on one of so many devices along `heads`.

    As docs/scaling_out.md has it, for as many key/value heads as query heads: of the width of the model what enters
    and leaves both norms; of the heads, which devices share, turned queries and keys, values, output and log-sum-exp;
    of the MLP gate, up and their product.
    """
    width, inner = config.model_width, config.mlp_width or 0
    return 5 * width + (4 * width + 3 * inner + config.num_heads) / heads


def ring_memory(devices: int, length: int, heads: int, head_dim: int) -> int:
    """Temporary bytes of a device in causal ring attention, forward and backward, compiled and not run."""
    layout = _layout(f"1x1x{devices}")
    x = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.tree.leaves(layout.batch_shardings(x))[0])
    attend = functools.partial(ring_attention, mesh=layout.mesh, axis_name="sequence", is_causal=True)

    def run(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        output, pull = jax.vjp(attend, query, key, value)
        return output, pull(cotangent)

    found: Any = jax.jit(run).lower(x, x, x, x).compile().memory_analysis()
    return found.temp_size_in_bytes


def tiles(devices: int, length: int, tile: int) -> list[int]:
    """Tiles of the causal square that each device of a ring works on: those of its two chunks' rows."""
    ring = Ring(make_mesh(sequence=devices, devices=jax.devices()[:devices]), axis_name="sequence", pieces=2)
    ends = np.arange(ring.chunks + 1) * length // ring.chunks
    counts = [masks.count_tiles(masks.Causal(), int(end), length, tile=(tile, tile)) if end else None for end in ends]
    rows = np.diff([count.full + count.mixed if count else 0 for count in counts])
    return [int(sum(rows[int(ring.chunk(device, piece))] for piece in range(2))) for device in range(devices)]
