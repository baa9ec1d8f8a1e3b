"""The transformer: embeddings, positions, a stack of equal blocks under one scan, a norm, a head."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attn_jax import checks
from attn_jax import positions as position
from attn_jax.nn import padding, parameters
from attn_jax.nn.attention import statistics_names
from attn_jax.nn.block import TransformerBlock, drop, split_dropout_key
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.norms import make_norm
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import ArrayLike, Float, Int


class Transformer(nnx.Module):
    """A decoder (`config.causal`, with a head) or an encoder.

    The layers are one `TransformerBlock` whose parameters have a leading axis of length L, run by `lax.scan`: the
    time to compile does not grow with depth.

    Parameters, by path; what a configuration does not have is absent (None):

        embedding                            [vocabulary, D]      N(0, 1/D)
        position_embedding                   [max_length, D]      N(0, 0.02²), positions="learned"
        layers.attention_norm.scale, .bias   [L, D]               1, 0; bias with norm="layer"
        layers.attention.query_weight        [L, D, N, H]         LeCun
        layers.attention.key_weight          [L, D, K, H]         LeCun, absent if tied to the query's
        layers.attention.value_weight        [L, D, K, V]         LeCun
        layers.attention.output_weight       [L, N, V, D]         LeCun, fan in N V
        layers.attention.query_bias          [L, N, H]            0, use_bias; key_bias [L, K, H],
                                                                  value_bias [L, K, V], output_bias [L, D]
        layers.attention.query_norm_weight   [L, H]               1, qk_norm="rms"; key_norm_weight [L, H]
        layers.attention.log_temperature     [L, N]               0, learned_temperature
        layers.attention.relative_table      [L, buckets, N]      0, positions="relative"
        layers.attention.sinks               [L, N]               0, use_sinks
        layers.mlp_norm.scale, .bias         [L, D]               1, 0
        layers.mlp.gate_weight, .up_weight   [L, D, F]            LeCun, gate with mlp="gated"
        layers.mlp.down_weight               [L, F, D]            LeCun
        layers.mlp.gate_bias, .up_bias       [L, F]               0, use_bias; down_bias [L, D]
        final_norm.scale, .bias              [D]                  1, 0, norm_position="pre"
        head_weight                          [D, vocabulary]      LeCun, head="untied"

    Args:
        config: the sizes and choices.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`; LeCun by default.
        rngs: the stream `params` draws the weights. `nnx.eval_shape` of the constructor draws nothing.

    Reference: Vaswani et al. 2017; Touvron et al. 2023 (Llama: the defaults); Devlin et al. 2019 (encoder).
    """

    def __init__(
        self, config: TransformerConfig, *, kernel_init: Initializer = parameters.lecun, rngs: nnx.Rngs
    ) -> None:
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config must be a TransformerConfig, got {config!r}")
        parameters.check_function("kernel_init", kernel_init)
        self.config = config
        width, vocabulary, dtype = config.model_width, config.vocabulary_size, config.param_dtype
        normal = jax.nn.initializers.normal
        self.embedding = nnx.Param(normal(width**-0.5)(rngs.params(), (vocabulary, width), dtype))
        learned = config.positions == "learned"
        self.position_embedding = (
            nnx.Param(normal(0.02)(rngs.params(), (config.max_length, width), dtype)) if learned else None
        )

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs: nnx.Rngs) -> TransformerBlock:
            return TransformerBlock(config, kernel_init=kernel_init, rngs=rngs)

        self.layers = stack(rngs)
        norm = {"epsilon": config.norm_epsilon, "dtype": config.dtype, "param_dtype": dtype, "rngs": rngs}
        self.final_norm = make_norm(config.norm, width, **norm) if config.norm_position == "pre" else None
        untied = config.head == "untied"
        self.head_weight = parameters.weight(rngs, kernel_init, (width,), (vocabulary,), dtype) if untied else None

    def __call__(
        self,
        token_ids: Int[ArrayLike, "*b t"],
        lengths: Int[ArrayLike, "*b"] | None = None,
        *,
        positions: Int[ArrayLike, "*#b t"] | None = None,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        return_statistics: bool | Collection[str] = False,
        observe: Callable[..., Any] | None = None,
    ) -> Any:
        """Logits of every position, or hidden states where the configuration has no head.

        The computation is compiled, and equal configurations, shapes and options share the trace.

        Args:
            token_ids: int `[*B, T]`, each in 0..vocabulary-1. Under `jit`, where values cannot be checked, an id
                outside turns its row to NaN; it is never read as another token.
            lengths: int `[*B]`, tokens of each row that count; ids past it are not read and not attended to, and what
                comes out there means nothing. None: all. Not with a `rotary_scaling` of `DynamicNTK`, which has one
                length for all.
            positions: int `[T]` or `[*B, T]`, where the tokens sit; None: 0..T-1.
            deterministic: True in evaluation, where there is no dropout and no key is needed; False in training.
            dropout_rng: the key of dropout, needed if it is on.
            return_statistics: True, or names of statistics: also return `AttentionStatistics`, one per layer.
            observe: a function that every layer calls as `observe(query, key, value, **options)` with what its
                attention gets; its pytree is also returned, stacked: leaves `[L, ...]`. It is part of the trace: a
                function made anew for each call compiles anew; what changes goes into a `jax.tree_util.Partial`.

        Returns:
            Logits `[*B, T, vocabulary]`, at least float32, or hidden states `[*B, T, D]`; or a tuple
            `(those, statistics, observed)` of them and what was asked for.

        Raises:
            ValueError, TypeError: on ids, lengths or positions of a wrong shape, dtype or value; dropout without key.
        """
        token_ids = checks.integer_array("token_ids", token_ids)
        checks.minimum_rank("token_ids", token_ids, 1, "[*B, T]")
        batch, length = token_ids.shape[:-1], token_ids.shape[-1]
        if length == 0:
            raise ValueError(f"token_ids must hold at least one token, [*B, T]; got shape {token_ids.shape}")
        if lengths is not None:
            lengths = padding.check_lengths("lengths", lengths, batch, length, self.config.rotary_scaling)
            token_ids = jnp.where(padding.counts(lengths, length), token_ids, 0)
        checks.within("token_ids", token_ids, 0, self.config.vocabulary_size - 1)
        positions = self._check_positions(positions, batch, length)
        dropping = not checks.boolean("deterministic", deterministic) and self.config.dropout_rate > 0
        keys = split_dropout_key(dropout_rng, self.config.dropout_rate, 2) if dropping else None
        wanted = statistics_names(return_statistics)
        if observe is not None and not isinstance(observe, jax.tree_util.Partial):
            parameters.check_function("observe", observe)
            observe = jax.tree_util.Partial(observe)
        outputs = _compute(self, token_ids, lengths, positions, keys, statistics=wanted, observe=observe)
        return outputs if wanted or observe is not None else outputs[0]

    def _check_positions(self, positions: ArrayLike | None, batch: tuple[int, ...], length: int) -> jax.Array | None:
        rows = self.config.max_length
        if positions is None:
            if rows is not None and length > rows:
                raise ValueError(f"token_ids must have T <= max_length = {rows}, got T = {length}")
            return None
        positions = checks.integer_array("positions", positions)
        if positions.shape != (length,):
            checks.shape("positions", positions, (*batch, length), "[T] or [*B, T]")
        checks.within("positions", positions, 0, None if rows is None else rows - 1)
        return positions

    def embed(self, token_ids: Int[jax.Array, "*b t"], positions: Int[jax.Array, "*#b t"] | None = None) -> jax.Array:
        """What enters the first layer, `[*B, T, D]`: embeddings of the tokens, plus those of positions if they add."""
        config = self.config
        (table,) = parameters.values(self.embedding, dtype=config.dtype)
        x = table.at[token_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if config.scale_embedding:
            x = x * jnp.asarray(config.model_width**0.5, x.dtype)
        if config.positions not in ("sinusoidal", "learned"):
            return x
        positions = jnp.arange(token_ids.shape[-1]) if positions is None else positions
        if self.position_embedding is None:
            added = position.sinusoidal(positions, config.model_width, dtype=x.dtype)
        else:
            added = position.learned(self.position_embedding[...], positions).astype(x.dtype)
        return x + added.reshape((1,) * (x.ndim - added.ndim) + added.shape)

    def head(self, x: Float[jax.Array, "*b t d"]) -> Float[jax.Array, "*b t vocabulary"]:
        """Logits `[*B, T, vocabulary]` of what leaves the last norm, summed in float32 or better and kept so."""
        tied = self.head_weight is None
        x, matrix = parameters.values(x, self.embedding if tied else self.head_weight, dtype=self.config.dtype)
        equation = "...td,vd->...tv" if tied else "...td,dv->...tv"
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.einsum(equation, x, matrix, precision=self.config.precision, preferred_element_type=wide)


@functools.partial(jax.jit, static_argnames="statistics")
def _compute(
    model: Transformer,
    token_ids: jax.Array,
    lengths: jax.Array | None,
    positions: jax.Array | None,
    keys: jax.Array | None,
    *,
    statistics: tuple[str, ...],
    observe: Callable[..., Any] | None,
) -> tuple[Any, ...]:
    """The outputs asked for. Jitted here, by value of the configuration, so that a plain call compiles only once."""
    config = model.config
    x = model.embed(token_ids, positions)
    layer_keys = None
    if keys is not None:
        x = drop(x, config.dropout_rate, keys[0])
        layer_keys = jax.random.split(keys[1], config.num_layers)

    def step(x: jax.Array, layer: tuple[TransformerBlock, jax.Array | None]) -> tuple[jax.Array, tuple[Any, ...]]:
        block, key = layer
        outputs = block(
            x,
            positions=positions,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            deterministic=key is None,
            dropout_rng=key,
            return_statistics=statistics or False,
            observe=observe,
        )
        output, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
        return output.astype(x.dtype), tuple(extras)

    x, extras = jax.lax.scan(step, x, (model.layers, layer_keys))
    if model.final_norm is not None:
        x = model.final_norm(x)
    if statistics:
        layers = range(config.num_layers)
        extras = (tuple(jax.tree.map(lambda leaf, i=i: leaf[i], extras[0]) for i in layers), *extras[1:])
    return (x if config.head is None else model.head(x), *extras)
