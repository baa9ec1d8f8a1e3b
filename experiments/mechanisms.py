"""The attention mechanisms whose cost is measured, and the layer around them.

To add one: a row of `MECHANISMS`. All experiments about cost then measure it, and the claims judge it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import attn_jax
from attn_jax.typing import Array, Float

Attend = Callable[[Array, Array, Array], Array]  # query, key, value `[n, h, d]` to the output


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A way to attend.

    Attributes:
        attend: query, key and value to the output.
        exponent: what is said of its time, n to this power.
    """

    attend: Attend
    exponent: int


MECHANISMS = {
    name: Mechanism(functools.partial(attn_jax.dot_product_attention, implementation=name), exponent=2)
    for name in ("dense", "blockwise", "xla")
}


class Layer(NamedTuple):
    """The weights of a transformer layer without its norms: attention, then an MLP of four times the width."""

    query: Float[Array, "d n h"]
    key: Float[Array, "d n h"]
    value: Float[Array, "d n h"]
    out: Float[Array, "n h d"]
    up: Float[Array, "d m"]
    down: Float[Array, "m d"]


def make_layer(key: Array, heads: int, width: int) -> Layer:
    """Normal weights that keep the size of what passes; D = heads · width."""
    model = heads * width
    shapes = [(model, heads, width)] * 3 + [(heads, width, model), (model, 4 * model), (4 * model, model)]
    keys = jax.random.split(key, len(shapes))
    return Layer(*(jax.random.normal(k, shape) / model**0.5 for k, shape in zip(keys, shapes, strict=True)))


def apply_layer(layer: Layer, x: Float[Array, "t d"], attend: Attend) -> Float[Array, "t d"]:
    """The layer's output with `attend` in the middle."""
    query, key, value = attn_jax.project_qkv(x, layer.query, layer.key, layer.value)
    x = x + attn_jax.project_out(attend(query, key, value), layer.out)
    return x + jnp.maximum(x @ layer.up, 0) @ layer.down


def bare(query: Array, key: Array, value: Array) -> Array:
    """No attention: each position keeps its own value. Query and key are used, or their projections would not run."""
    return value + 1e-6 * (query + key)
