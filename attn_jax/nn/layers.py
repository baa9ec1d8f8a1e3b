"""The layers of a stack, one after another: a scan over whole periods of layers that differ.

Layers that differ in their options (a window, a rotary base) have equal parameters, one stack `[L, ...]`; layers that
differ in their mixer have a stack for each place in the period. A period is run out in the body of the scan, each layer
with its own options, so 18 layers in a pattern of 6 are compiled as 6. Layers past the last whole period follow it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax.nn.block import TransformerBlock
from attn_jax.nn.options import AttentionConfig
from attn_jax.typing import Array, ArrayLike, Float

Run = Callable[[Array, TransformerBlock, Any], tuple[Array, Any]]


def scan_layers(
    run: Run,
    x: Float[Array, "*b t d"],
    layers: TransformerBlock | Sequence[TransformerBlock],
    inputs: Sequence[Any],
    kinds: Sequence[AttentionConfig | None],
    *,
    by_index: bool = False,
) -> tuple[Float[Array, "*b t d"], tuple[Any, ...]]:
    """Runs `x, output = run(x, block, input)` for every layer in turn.

    Args:
        run: what one layer does.
        x: what enters the first layer, `[*B, T, D]`.
        layers: the blocks, stacked: leaves `[L, ...]`; or a stack for each kind of layer.
        inputs: for each kind of layer a pytree or None, stacked over the layers of that kind: layer i is of kind
            i mod period (`by_kind` makes them of a pytree `[L, ...]`).
        kinds: the attention's choices for each kind, None for another mixer; their number is the period.
        by_index: how a period of several layers finds its parameters. False cuts the stack into periods, a copy that
            training does not notice; True reads each layer where it lies, for decoding, which reads a weight only once
            (its gradient would go over the whole stack in every period).

    Returns:
        What leaves the last layer, and the outputs, for each kind a pytree stacked over its layers (`in_order` puts
        them in the order of the layers).
    """
    period = len(kinds)
    stacks = stacks_of(layers)
    apart = len(stacks) > 1
    full, rest = divmod(sum(jax.tree.leaves(stack)[0].shape[0] for stack in stacks), period)

    def some(x: Array, blocks: Sequence[TransformerBlock], inputs: Sequence[Any]) -> tuple[Array, tuple[Any, ...]]:
        outputs = []
        for block, options, one in zip(blocks, kinds, inputs, strict=False):
            if block.attention is not None and options is not None:
                block.attention.config = options
            x, output = run(x, block, one)
            outputs.append(output)
        return x, tuple(outputs)

    def layer(index: ArrayLike, kind: int) -> TransformerBlock:
        """That of a kind in the period `index`."""
        stack, at = (stacks[kind], index) if apart else (stacks[0], index * period + kind)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), stack)

    def step(x: Array, one: tuple[Any, Sequence[Any]]) -> tuple[Array, tuple[Any, ...]]:
        blocks, given = one
        if period == 1:
            blocks = [blocks]
        elif by_index:
            blocks = [layer(blocks, kind) for kind in range(period)]
        elif not apart:
            blocks = [jax.tree.map(lambda leaf, kind=kind: leaf[kind], blocks) for kind in range(period)]
        return some(x, blocks, given)

    if period == 1:
        blocks = stacks[0]
    elif by_index:
        blocks = jnp.arange(full)
    elif apart:
        blocks = [jax.tree.map(lambda leaf: leaf[:full], stack) for stack in stacks]
    else:
        blocks = jax.tree.map(lambda leaf: leaf[: full * period].reshape(full, period, *leaf.shape[1:]), stacks[0])
    x, outputs = jax.lax.scan(step, x, (blocks, jax.tree.map(lambda leaf: leaf[:full], tuple(inputs))))
    if rest:
        blocks = [layer(full, kind) for kind in range(rest)]
        x, last = some(x, blocks, jax.tree.map(lambda leaf: leaf[full], tuple(inputs[:rest])))
        joined = (
            jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), many, one)
            for many, one in zip(outputs, last, strict=False)
        )
        outputs = (*joined, *outputs[rest:])
    return x, outputs


def stacks_of(layers: TransformerBlock | Sequence[TransformerBlock]) -> list[TransformerBlock]:
    """The stacks of the layers: one, or where mixers differ one for each place in the period."""
    return [layers] if isinstance(layers, TransformerBlock) else list(layers)


def by_kind(tree: Any, period: int) -> tuple[Any, ...]:
    """A pytree `[L, ...]` cut into those of the kinds of layers: kind i has layers i, i + period, …"""
    return tuple(jax.tree.map(lambda leaf, kind=kind: leaf[kind::period], tree) for kind in range(period))


def in_order(outputs: Sequence[Any]) -> Any:
    """The inverse of `by_kind`: pytrees of the kinds of layers, put together in the order of the layers, `[L, ...]`."""

    def weave(*leaves: Array) -> Array:
        full = leaves[-1].shape[0]
        whole = jnp.stack([leaf[:full] for leaf in leaves], axis=1)
        rest = [leaf[full:] for leaf in leaves if leaf.shape[0] > full]
        return jnp.concatenate([whole.reshape(-1, *leaves[0].shape[1:]), *rest])

    return outputs[0] if len(outputs) == 1 else jax.tree.map(weave, *outputs)
