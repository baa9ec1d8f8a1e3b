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
from attn_jax import linear, lowrank, masks, routed
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


RANK = 64  # of what is kept in place of all keys: features, projected keys, landmarks
WINDOW = 128  # keys that a query sees where it sees no more


def random_features(query: Array, key: Array, value: Array) -> Array:
    """Linear attention with random features, which cost their drawing, too."""
    features = linear.draw_features(jax.random.key(0), query.shape[-1], RANK)
    return attn_jax.linear_attention(query, key, value, feature_map=features, is_causal=True)


def state_space(query: Array, key: Array, value: Array) -> Array:
    """A state space whose decays are those of a key's first component."""
    return attn_jax.state_space(query, key, value, -jax.nn.softplus(key[..., 0]))


def lsh(query: Array, key: Array, value: Array) -> Array:
    """Two rounds of hashing into 32 buckets; queries and keys are one."""
    rotations = routed.draw_rotations(jax.random.key(0), *query.shape[-2:], num_buckets=32, num_rounds=2)
    return attn_jax.lsh_attention(query + key, value, rotations, window=WINDOW, is_causal=True)


def routing(query: Array, key: Array, value: Array) -> Array:
    """16 clusters, whose centroids are drawn."""
    centroids = routed.draw_centroids(jax.random.key(0), key.shape[-2], 16, key.shape[-1])
    return attn_jax.routing_attention(query, key, value, centroids, window=WINDOW, is_causal=True)


def linformer(query: Array, key: Array, value: Array) -> Array:
    """Keys and values projected to as many as the rank, by a matrix that is drawn."""
    projection = lowrank.draw_projection(jax.random.key(0), RANK, key.shape[-3])
    return attn_jax.linformer_attention(query, key, value, projection)


EXACT = ("dense", "blockwise", "xla")
MECHANISMS = {
    **{
        name: Mechanism(functools.partial(attn_jax.dot_product_attention, implementation=name), exponent=2)
        for name in EXACT
    },
    "window": Mechanism(functools.partial(attn_jax.dot_product_attention, mask=masks.SlidingWindow(WINDOW)), 1),
    "linear": Mechanism(functools.partial(attn_jax.linear_attention, is_causal=True), 1),
    "random_features": Mechanism(random_features, 1),
    "retention": Mechanism(attn_jax.retention, 1),
    "state_space": Mechanism(state_space, 1),
    "lsh": Mechanism(lsh, 1),
    "routing": Mechanism(routing, 1),
    "linformer": Mechanism(linformer, 1),
    "nystrom": Mechanism(functools.partial(attn_jax.nystrom_attention, landmarks=RANK), 1),
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
