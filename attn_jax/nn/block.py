"""One transformer block: attention, then the MLP, each with its residual path and its norm."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from attn_jax import checks
from attn_jax.nn import parameters
from attn_jax.nn.attention import MultiHeadAttention
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.dropout import drop, dropout_key
from attn_jax.nn.mixers import make_mixer
from attn_jax.nn.mlp import MLP
from attn_jax.nn.norms import make_norm, normalize
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import ArrayLike, Float, Int


class TransformerBlock(nnx.Module):
    """A block with its norms before the branches or after them; attention may be another mixer of tokens.

        pre:   x = x + attention(attention_norm(x));  x = x + mlp(mlp_norm(x))
        post:  x = attention_norm(x + attention(x));  x = mlp_norm(x + mlp(x))
        both:  x = x + attention_output_norm(attention(attention_norm(x)));
               x = x + mlp_output_norm(mlp(mlp_norm(x)))

    Sub-modules: `attention_norm`, `attention` (`MultiHeadAttention`), `mlp_norm`, `mlp` (`MLP`), and with both the two
    output norms, else None. With another word in `config.mixer` there is `mixer` in the place of `attention`, which is
    None.

    Args:
        config: the sizes and choices.
        kind: which layer of the period of `config.layer_mixers`.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`; LeCun by default.
        rngs: the stream `params` draws the weights.

    Raises:
        TypeError: if `config` is no `TransformerConfig`.

    Reference: Vaswani et al. 2017, section 3.1 (post); Xiong et al. 2020 (pre).

    >>> import jax
    >>> from flax import nnx
    >>> from attn_jax.nn import TransformerBlock, TransformerConfig
    >>> config = TransformerConfig(vocabulary_size=9, num_layers=1, model_width=8, num_heads=2)
    >>> block = TransformerBlock(config, kernel_init=jax.nn.initializers.zeros, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (3, 8))
    >>> bool((block(x) == x).all())  # with weights of 0 both branches add nothing
    True
    """

    def __init__(
        self, config: TransformerConfig, *, kind: int = 0, kernel_init: Initializer = parameters.lecun, rngs: nnx.Rngs
    ) -> None:
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config must be a TransformerConfig, got {config!r}")
        self.norm_position = config.norm_position
        self.dropout_rate = config.dropout_rate
        dtypes = {"dtype": config.dtype, "param_dtype": config.param_dtype}
        norm = {"epsilon": config.norm_epsilon, "rngs": rngs, **dtypes}
        both = config.norm_position == "both"
        self.attention_norm = make_norm(config.norm, config.model_width, **norm)
        self.attention_output_norm = make_norm(config.norm, config.model_width, **norm) if both else None
        own, attention, mixer = config.layer_attention[kind], None, None
        if own is None:
            mixer = make_mixer(config.layer_mixers[kind], config, kernel_init=kernel_init, rngs=rngs)
        else:
            attention = MultiHeadAttention(
                config.model_width,
                config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_width=config.head_width,
                value_width=config.value_width,
                precision=config.precision,
                kernel_init=kernel_init,
                rngs=rngs,
                **dtypes,
                **own.options(),
            )
        self.attention, self.mixer = attention, mixer
        self.mlp_norm = make_norm(config.norm, config.model_width, **norm)
        self.mlp_output_norm = make_norm(config.norm, config.model_width, **norm) if both else None
        self.mlp = MLP(
            config.model_width,
            config.mlp_width,
            kind=config.mlp,
            activation=config.activation,
            use_bias=config.use_bias in (True, "mlp"),
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
            **options: of `MultiHeadAttention.__call__`: positions, bias, mask, lengths, return_statistics, observe,
                intervene.
                Another mixer takes the lengths, which are the same of queries and keys.

        Returns:
            The output, or a tuple `(output, statistics, observed)` of it and what was asked for.

        Raises:
            ValueError, TypeError: on a wrong argument; on one that the mixer does not have.
        """
        key = dropout_key(deterministic, dropout_rng, self.dropout_rate)
        keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
        if self.mixer is not None:
            attend = functools.partial(self.mixer, lengths=self._mixer_lengths(**options))
        else:
            assert self.attention is not None
            attend = functools.partial(self.attention, deterministic=deterministic, dropout_rng=keys[0], **options)
        x, extras = self._branches(checks.floating_array("x", x), attend, keys[1:])
        return (x, *extras) if extras else x

    def extend(
        self, x: Float[ArrayLike, "*b t d"], cache: Any, *, lengths: Int[ArrayLike, "*b"] | None = None
    ) -> tuple[Float[jax.Array, "*b t d"], Any]:
        """The block of `x` that continues a sequence, and what `MultiHeadAttention.extend` returns besides its output,
        keys and values, or the state of another mixer after `x`."""
        mixer = self.attention or self.mixer
        assert mixer is not None
        x, (new,) = self._branches(checks.floating_array("x", x), lambda x: mixer.extend(x, cache, lengths=lengths))
        return x, new

    def _mixer_lengths(
        self,
        *,
        query_seq_lengths: Int[ArrayLike, "*b"] | None = None,
        key_value_seq_lengths: Int[ArrayLike, "*b"] | None = None,
        **options: Any,
    ) -> Int[ArrayLike, "*b"] | None:
        """The lengths among the options of attention; a mixer has no others."""
        given = [name for name, option in options.items() if option is not None and option is not False]
        if given:
            raise ValueError(f"{given[0]} belongs to attention, which this block does not have: {self.mixer!r}")
        if query_seq_lengths is not key_value_seq_lengths:
            raise ValueError("query_seq_lengths and key_value_seq_lengths must be the same array for a mixer")
        return query_seq_lengths

    def _branches(
        self, x: jax.Array, attend: Callable[[jax.Array], Any], keys: Sequence[jax.Array | None] = (None, None)
    ) -> tuple[jax.Array, list[Any]]:
        """Both branches with their residual paths and norms, and what attention returns besides its output."""
        before, after = self.norm_position != "post", self.norm_position == "post"
        attended = attend(normalize(self.attention_norm, x) if before else x)
        attended, *extras = attended if isinstance(attended, tuple) else (attended,)
        if self.attention_output_norm is not None:
            attended = normalize(self.attention_output_norm, attended)
        x = x + drop(attended, self.dropout_rate, keys[0])
        if after:
            x = normalize(self.attention_norm, x)
        added = self.mlp(normalize(self.mlp_norm, x) if before else x)
        if self.mlp_output_norm is not None:
            added = normalize(self.mlp_output_norm, added)
        x = x + drop(added, self.dropout_rate, keys[1])
        if after:
            x = normalize(self.mlp_norm, x)
        return x, extras
