"""Content routing: attention among tokens that hashing or clustering brings together."""

from attn_jax.routed.cache import GroupCache, empty_group_cache
from attn_jax.routed.lsh import draw_rotations, extend_lsh, hash_buckets, lsh_attention
from attn_jax.routed.routing import draw_centroids, extend_routing, routing_attention, update_centroids

__all__ = [
    "GroupCache",
    "draw_centroids",
    "draw_rotations",
    "empty_group_cache",
    "extend_lsh",
    "extend_routing",
    "hash_buckets",
    "lsh_attention",
    "routing_attention",
    "update_centroids",
]
