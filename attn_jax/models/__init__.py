"""Pretrained models: their files, tokenizers and weights, loaded into `attn_jax.nn.Transformer`."""

from attn_jax.models.loading import CHECKPOINTS, LoadedModel, load

__all__ = ["CHECKPOINTS", "LoadedModel", "load"]
