"""Pretrained models: their files, tokenizers and weights, loaded into `attn_jax.nn.Transformer`."""

from attn_jax.models.chat import chat_prompt
from attn_jax.models.embed import embed
from attn_jax.models.generate import generate
from attn_jax.models.loading import CHECKPOINTS, LoadedModel, load

__all__ = ["CHECKPOINTS", "LoadedModel", "chat_prompt", "embed", "generate", "load"]
