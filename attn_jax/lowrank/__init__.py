"""Attention through a few rows in place of all keys: linear in the length, not causal."""

from attn_jax.lowrank.linformer import draw_projection, linformer_attention
from attn_jax.lowrank.nystrom import nystrom_attention

__all__ = ["draw_projection", "linformer_attention", "nystrom_attention"]
