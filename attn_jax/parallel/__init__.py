"""From one device to many: meshes, training steps on them, attention round a ring, several processes.

    mesh = make_mesh(data=2, heads=2, sequence=2)
    step = shard_train_step(functools.partial(train_step, loss=token_loss), mesh)

A device holds a part of each array, and the program is that of one device.
"""

from attn_jax.parallel.layout import Layout
from attn_jax.parallel.meshes import make_mesh
from attn_jax.parallel.pmap import pmap_train_step
from attn_jax.parallel.ring import ring_attention
from attn_jax.parallel.ring_linear import ring_linear_attention, ring_recurrence
from attn_jax.parallel.sharding import shard_train_step

__all__ = [
    "Layout",
    "make_mesh",
    "pmap_train_step",
    "ring_attention",
    "ring_linear_attention",
    "ring_recurrence",
    "shard_train_step",
]
