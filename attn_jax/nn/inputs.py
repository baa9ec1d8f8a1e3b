"""What a transformer is called with, checked: token ids, lengths, positions, types of tokens."""

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.nn import padding
from attn_jax.nn.config import TransformerConfig
from attn_jax.positions import DynamicNTK
from attn_jax.typing import ArrayLike


def check_tokens(
    config: TransformerConfig, token_ids: ArrayLike, lengths: ArrayLike | None, *, dynamic: DynamicNTK | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Token ids `[*B, T]`, 0 past their lengths, and the lengths `[*B]`, which a `dynamic` scaling refuses."""
    token_ids = checks.integer_array("token_ids", token_ids)
    checks.minimum_rank("token_ids", token_ids, 1, "[*B, T]")
    batch, length = token_ids.shape[:-1], token_ids.shape[-1]
    if length == 0:
        raise ValueError(f"token_ids must hold at least one token, [*B, T]; got shape {token_ids.shape}")
    if lengths is not None:
        lengths = padding.check_lengths("lengths", lengths, batch, length, dynamic)
        token_ids = jnp.where(padding.counts(lengths, length), token_ids, 0)
    checks.within("token_ids", token_ids, 0, config.vocabulary_size - 1)
    return token_ids, lengths


def dynamic_scaling(config: TransformerConfig) -> DynamicNTK | None:
    """The rotary scaling of a layer that is a `DynamicNTK`, if there is one."""
    scalings = [layer.rotary_scaling for layer in config.layer_attention if layer is not None]
    return next((scaling for scaling in scalings if isinstance(scaling, DynamicNTK)), None)


def check_positions(
    config: TransformerConfig, positions: ArrayLike | None, batch: tuple[int, ...], length: int
) -> jax.Array | None:
    """Positions `[T]` or `[*B, T]` that the tables of the model reach; None: 0..T-1, which they reach too."""
    rows = config.max_length
    if positions is None:
        if rows is not None and length > rows:
            raise ValueError(f"token_ids must have T <= max_length = {rows}, got T = {length}")
        return None
    positions = checks.integer_array("positions", positions)
    if positions.shape != (length,):
        checks.shape("positions", positions, (*batch, length), "[T] or [*B, T]")
    checks.within("positions", positions, 0, None if rows is None else rows - 1)
    return positions


def check_token_types(
    config: TransformerConfig, token_types: ArrayLike | None, shape: tuple[int, ...]
) -> jax.Array | None:
    """Types of tokens, of the shape of the token ids, each in 0..num_token_types-1."""
    if token_types is None:
        return None
    if config.num_token_types is None:
        raise ValueError("token_types go with a config of num_token_types, got None there")
    token_types = checks.integer_array("token_types", token_types)
    checks.shape("token_types", token_types, shape, "[*B, T]")
    checks.within("token_types", token_types, 0, config.num_token_types - 1)
    return token_types
