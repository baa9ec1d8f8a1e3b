"""One transformer block: attention, then the MLP, each with its residual path and its norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.attention import MultiHeadAttention
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.mlp import MLP
from attn_jax.nn.norms import make_norm
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import ArrayLike, Float


class TransformerBlock(nnx.Module):
    """A block with its norms before the branches or after them.

        pre:   x = x + attention(attention_norm(x));  x = x + mlp(mlp_norm(x))
        post:  x = attention_norm(x + attention(x));  x = mlp_norm(x + mlp(x))

    Sub-modules: `attention_norm`, `attention` (`MultiHeadAttention`), `mlp_norm`, `mlp` (`MLP`).

    Args:
        config: the sizes and choices.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`; LeCun by default.
        rngs: the stream `params` draws the weights.

    Reference: Vaswani et al. 2017, section 3.1 (post); Xiong et al. 2020 (pre).
    """

    def __init__(
        self, config: TransformerConfig, *, kernel_init: Initializer = parameters.lecun, rngs: nnx.Rngs
    ) -> None:
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config must be a TransformerConfig, got {config!r}")
        self.norm_position = config.norm_position
        self.dropout_rate = config.dropout_rate
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        norm = {"epsilon": config.norm_epsilon, "rngs": rngs, **dtypes}
        self.attention_norm = make_norm(config.norm, config.model_width, **norm)
        self.attention = MultiHeadAttention(
            config.model_width,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_width=config.head_width,
            value_width=config.value_width,
            precision=config.precision,
            kernel_init=kernel_init,
            rngs=rngs,
            **dtypes,
            **config.attention_options(),
        )
        self.mlp_norm = make_norm(config.norm, config.model_width, **norm)
        self.mlp = MLP(
            config.model_width,
            config.mlp_width,
            kind=config.mlp,
            activation=config.activation,
            use_bias=config.use_bias,
            precision=config.precision,
            kernel_init=kernel_init,
            rngs=rngs,
            **dtypes,
        )

    def __call__(
        self,
        x: Float[ArrayLike, "*b t d"],
        *,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        **options: Any,
    ) -> Any:
        """The block of `x` `[*B, T, D]`, of the same shape.

        Args:
            x: `[*B, T, D]`.
            deterministic: True in evaluation; False in training, where dropout is on.
            dropout_rng: the key of dropout, needed if it is on.
            **options: of `MultiHeadAttention.__call__`: positions, bias, mask, lengths, return_statistics, observe.

        Returns:
            The output, or a tuple `(output, statistics, observed)` of it and what was asked for.
        """
        dropping = not checks.boolean("deterministic", deterministic) and self.dropout_rate > 0
        keys = split_dropout_key(dropout_rng, self.dropout_rate) if dropping else (None, None, None)
        pre = self.norm_position == "pre"
        attended = self.attention(
            self.attention_norm(x) if pre else x, deterministic=deterministic, dropout_rng=keys[0], **options
        )
        attended, *extras = attended if isinstance(attended, tuple) else (attended,)
        x = x + drop(attended, self.dropout_rate, keys[1])
        if not pre:
            x = self.attention_norm(x)
        x = x + drop(self.mlp(self.mlp_norm(x) if pre else x), self.dropout_rate, keys[2])
        if not pre:
            x = self.mlp_norm(x)
        return (x, *extras) if extras else x


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """`x / (1 - rate)` where kept, else 0; `x` itself without a key."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1.0 - rate, x.shape), x / (1.0 - rate), 0.0)


def split_dropout_key(dropout_rng: jax.Array | None, rate: float, count: int = 3) -> jax.Array:
    """`count` keys of one, or a clear error where there is none."""
    if dropout_rng is None:
        raise ValueError(f"dropout_rng must be a key where dropout is on (rate {rate}), got None")
    return jax.random.split(checks.prng_key("dropout_rng", dropout_rng), count)
