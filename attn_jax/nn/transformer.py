"""The transformer: embeddings, positions, a stack of equal blocks under one scan, a norm, a head."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import checks
from attn_jax import positions as position
from attn_jax.nn import hooks, inputs, parameters
from attn_jax.nn.block import TransformerBlock
from attn_jax.nn.caches import append, check_caches, empty_caches
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.dropout import drop, dropout_key
from attn_jax.nn.layers import by_kind, in_order, scan_layers, stacks_of
from attn_jax.nn.mixers import ATTENTION_WORDS
from attn_jax.nn.norms import make_norm
from attn_jax.nn.parameters import Initializer
from attn_jax.typing import ArrayLike, Float, Int


class Transformer(nnx.Module):
    """A decoder (`config.causal`, with a head) or an encoder.

    The layers are one `TransformerBlock` whose parameters have a leading axis of length L, run by `lax.scan`: the
    time to compile does not grow with depth. Layers that differ in window or rotary positions (`config.layer_pattern`)
    have equal parameters: the scan runs over whole periods of the pattern. Where `config.mixer` names several words,
    `layers` is a list, a stack for each place in its period: `layers.0.attention.query_weight`, …, `layers.1.mixer.…`.

    Parameters, by path; what a configuration does not have is absent (None):

        embedding                            [vocabulary, D]      N(0, 1/D)
        position_embedding                   [max_length, D]      N(0, 0.02²), positions="learned"
        token_type_embedding                 [types, D]           N(0, 0.02²), num_token_types
        embedding_norm.scale, .bias          [D]                  1, 0; embedding_norm
        layers.attention_norm.scale, .bias   [L, D]               1, 0; bias with norm="layer"
        layers.attention_output_norm.scale   [L, D]               1, norm_position="both"; also mlp_output_norm
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
        final_norm.scale, .bias              [D]                  1, 0, but with norm_position="post"
        head_weight                          [D, vocabulary]      LeCun, head="untied"

    Args:
        config: the sizes and choices.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`; LeCun by default.
        rngs: the stream `params` draws the weights. `nnx.eval_shape` of the constructor draws nothing.

    Raises:
        TypeError: if `config` is no `TransformerConfig`, or `kernel_init` no function.

    Reference: Vaswani et al. 2017; Touvron et al. 2023 (Llama: the defaults); Devlin et al. 2019 (encoder).

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from attn_jax.nn import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocabulary_size=9, num_layers=2, model_width=8, num_heads=2)
    >>> model = Transformer(config, rngs=nnx.Rngs(0))
    >>> logits, other = model(jnp.array([[3, 1, 4, 1]])), model(jnp.array([[3, 1, 4, 5]]))
    >>> logits.shape, (abs(logits - other).max(axis=-1) > 1e-4).tolist()  # [B, T, vocabulary]; nobody sees the future
    ((1, 4, 9), [[False, False, False, True]])
    >>> model(jnp.array([[3, 1, 4, 9]]))
    Traceback (most recent call last):
    ValueError: token_ids must lie in 0..8, got values in 1..9
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

        def table(rows: int | None) -> nnx.Param | None:
            return None if rows is None else nnx.Param(normal(0.02)(rngs.params(), (rows, width), dtype))

        self.position_embedding = table(config.max_length)
        self.token_type_embedding = table(config.num_token_types)
        norm = functools.partial(
            make_norm,
            config.norm,
            width,
            epsilon=config.norm_epsilon,
            dtype=config.dtype,
            param_dtype=dtype,
            rngs=rngs,
        )
        self.embedding_norm = norm() if config.embedding_norm else None

        def stack(kind: int, count: int) -> TransformerBlock:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=0, out_axes=0)
            def draw(rngs: nnx.Rngs) -> TransformerBlock:
                return TransformerBlock(config, kind=kind, kernel_init=kernel_init, rngs=rngs)

            return draw(rngs)

        words = len(config.layer_mixers)
        counts = [len(range(kind, config.num_layers, words)) for kind in range(words)]
        stacks = [stack(kind, count) for kind, count in enumerate(counts)]
        self.layers: Any = stacks[0] if words == 1 else nnx.List(stacks)
        self.final_norm = norm() if config.norm_position != "post" else None
        untied = config.head == "untied"
        self.head_weight = parameters.weight(rngs, kernel_init, (width,), (vocabulary,), dtype) if untied else None

    def __call__(
        self,
        token_ids: Int[ArrayLike, "*b t"],
        lengths: Int[ArrayLike, "*b"] | None = None,
        *,
        positions: Int[ArrayLike, "*#b t"] | None = None,
        token_types: Int[ArrayLike, "*b t"] | None = None,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        return_statistics: bool | Collection[str] = False,
        observe: Callable[..., Any] | None = None,
        intervene: Callable[..., jax.Array] | None = None,
        interventions: Any = None,
    ) -> Any:
        """Logits of every position, or hidden states where the configuration has no head.

        The computation is compiled, and equal configurations, shapes and options share the trace.

        Args:
            token_ids: int `[*B, T]`, each in 0..vocabulary-1. Under `jit`, where values cannot be checked, an id
                outside turns its row to NaN; it is never read as another token.
            lengths: int `[*B]`, tokens of each row that count; ids past it are not read and not attended to, and what
                comes out there means nothing. None: all. Not with a `rotary_scaling` of `DynamicNTK`, which has one
                length for all.
            positions: int `[T]` or `[*B, T]`, where the tokens sit; None: 0..T-1. Needs attention in all layers, as
                do `return_statistics`, `observe` and `intervene`: other mixers take tokens in their order.
            token_types: int `[*B, T]`, the segment of each token, each in 0..num_token_types-1; None: 0.
            deterministic: True in evaluation, where there is no dropout and no key is needed; False in training.
            dropout_rng: the key of dropout, needed if it is on.
            return_statistics: True, or names of statistics: also return `AttentionStatistics`, one per layer.
            observe: a function that every layer calls as `observe(query, key, value, **options)` with what its
                attention gets; its pytree is also returned, stacked: leaves `[L, ...]`. It is part of the trace: a
                function made anew for each call compiles anew; what changes goes into a `jax.tree_util.Partial`.
            intervene: a function that every layer calls in the place of its attention, as
                `intervene(own, query, key, value, **options)` with what that would get; its output `[*B, T, N, V]` goes
                to the output projection. It is part of the trace, as `observe` is. Not with `return_statistics`.
            interventions: a pytree with leaves `[L, ...]`, of which `own` is the layer's part: gates of heads, say.

        Returns:
            Logits `[*B, T, vocabulary]`, at least float32, or hidden states `[*B, T, D]`; or a tuple
            `(those, statistics, observed)` of them and what was asked for.

        Raises:
            ValueError, TypeError: on ids, lengths or positions of a wrong shape, dtype or value; dropout without key.
        """
        config = self.config
        token_ids, lengths = inputs.check_tokens(config, token_ids, lengths, dynamic=inputs.dynamic_scaling(config))
        positions = inputs.check_positions(config, positions, token_ids.shape[:-1], token_ids.shape[-1])
        token_types = inputs.check_token_types(config, token_types, token_ids.shape)
        key = dropout_key(deterministic, dropout_rng, config.dropout_rate)
        wanted = hooks.statistics_names(return_statistics)
        self._check_attention(
            return_statistics=wanted or None, observe=observe, intervene=intervene, positions=positions
        )
        hooks.check_interventions(interventions, intervene, config.num_layers)
        observe, intervene = hooks.as_partial("observe", observe), hooks.as_partial("intervene", intervene)
        outputs = _compute(
            self, token_ids, token_types, lengths, positions, key, (intervene, interventions),
            statistics=wanted, observe=observe,
        )  # fmt: skip
        return outputs if wanted or observe is not None else outputs[0]

    def layer(self, index: int) -> TransformerBlock:
        """The block of one layer, cut out of its stack."""
        checks.within("index", jnp.asarray(index), 0, self.config.num_layers - 1)
        stacks = stacks_of(self.layers)
        at, kind = divmod(index, len(stacks))
        block = jax.tree.map(lambda leaf: leaf[at], stacks[kind])
        own = self.config.layer_attention[index % len(self.config.layer_attention)]
        if own is not None:
            block.attention.config = own
        return block

    def empty_cache(
        self, batch: int | tuple[int, ...], capacity: int, *, dtype: DTypeLike | None = None
    ) -> tuple[Any, ...]:
        """Caches for `extend`, one of each kind of layer: `[layers of the kind, *B, ...]`.

        A layer whose window reaches a number of tokens back keeps as many (a ring); another keeps `capacity`; a mixer
        that is not attention has a state of a fixed size, whatever the capacity.

        Args:
            batch: B, or the batch axes.
            capacity: tokens of an item.
            dtype: of keys and values; None: that of the computation.

        Returns:
            A tuple, in the order of `config.layer_pattern` or of the period of `config.mixer`: a `KVCache` for
            attention, the mixer's own state for another.
        """
        return empty_caches(self.config, self.layers, batch, capacity, dtype=dtype)

    def extend(
        self,
        token_ids: Int[ArrayLike, "*b t"],
        caches: tuple[Any, ...],
        lengths: Int[ArrayLike, "*b"] | None = None,
        *,
        last: bool = False,
    ) -> tuple[Float[jax.Array, "..."], tuple[Any, ...]]:
        """Logits of tokens that continue the cached ones, and the caches with them added.

        Any cutting of a sequence into calls gives what one call gives. One trace serves every place in the sequence.

        Args:
            token_ids: int `[*B, T]`, as in the call of the model.
            caches: of `empty_cache`, or what `extend` returned.
            lengths: int `[*B]`, tokens of each row that count and are added; None: all.
            last: whether only the logits after each row's last counted token are computed, `[*B, vocabulary]`; those
                of a row without one are NaN.

        Returns:
            `(logits [*B, T, vocabulary], caches)`.

        Raises:
            ValueError, TypeError: as the call of the model; on a full cache that has no room for the tokens. Under
                `jit`, where that is not seen, they are not stored, nothing stored changes, and `overflowed` is set.
        """
        token_ids, lengths = inputs.check_tokens(self.config, token_ids, lengths)
        checks.boolean("last", last)
        check_caches(self.config, self.layers, caches, token_ids, lengths)
        return _extend(self, token_ids, lengths, caches, last=last)

    def _check_attention(self, **options: Any) -> None:
        """Raises if an option is given that is one of attention, and a layer has another mixer."""
        other = next((word for word in self.config.layer_mixers if word not in ATTENTION_WORDS), None)
        given = next((name for name, option in options.items() if option is not None), None)
        if other is not None and given is not None:
            raise ValueError(f"{given} belongs to attention, and this model has layers of mixer={other!r}")

    def embed(
        self,
        token_ids: Int[jax.Array, "*b t"],
        positions: Int[jax.Array, "*#b t"] | None = None,
        token_types: Int[jax.Array, "*b t"] | None = None,
    ) -> Float[jax.Array, "*b t d"]:
        """What enters the first layer: embeddings of the tokens, plus those of types and positions, and their norm."""
        config = self.config
        (table,) = parameters.values(self.embedding, dtype=config.dtype)
        x = table.at[token_ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        if config.scale_embedding:
            x = x * jnp.asarray(config.model_width**0.5, x.dtype)
        if self.token_type_embedding is not None:
            token_types = jnp.zeros_like(token_ids) if token_types is None else token_types
            x = x + position.learned(self.token_type_embedding[...], token_types).astype(x.dtype)
        if config.positions in ("sinusoidal", "learned"):
            positions = jnp.arange(token_ids.shape[-1]) if positions is None else positions
            if self.position_embedding is None:
                added = position.sinusoidal(positions, config.model_width, dtype=x.dtype)
            else:
                added = position.learned(self.position_embedding[...], positions).astype(x.dtype)
            x = x + added.reshape((1,) * (x.ndim - added.ndim) + added.shape)
        return x if self.embedding_norm is None else self.embedding_norm(x)

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
    token_types: jax.Array | None,
    lengths: jax.Array | None,
    positions: jax.Array | None,
    key: jax.Array | None,
    intervention: tuple[Callable[..., jax.Array] | None, Any],
    *,
    statistics: tuple[str, ...],
    observe: Callable[..., Any] | None,
) -> tuple[Any, ...]:
    """The outputs asked for. Jitted here, by value of the configuration, so that a plain call compiles only once."""
    config = model.config
    x = model.embed(token_ids, positions, token_types)
    layer_keys = None
    if key is not None:
        key_of_embeddings, key_of_layers = jax.random.split(key)
        x = drop(x, config.dropout_rate, key_of_embeddings)
        layer_keys = jax.random.split(key_of_layers, config.num_layers)

    intervene, interventions = intervention

    def run(
        x: jax.Array, block: TransformerBlock, own: tuple[jax.Array | None, Any]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        key, change = own
        outputs = block(
            x,
            positions=positions,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            deterministic=key is None,
            dropout_rng=key,
            return_statistics=statistics or False,
            observe=observe,
            intervene=None if intervene is None else functools.partial(intervene, change),
        )
        output, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
        return output.astype(x.dtype), tuple(extras)

    kinds = config.layer_attention
    x, extras = scan_layers(run, x, model.layers, by_kind((layer_keys, interventions), len(kinds)), kinds)
    extras = in_order(extras)
    if model.final_norm is not None:
        x = model.final_norm(x)
    if statistics:
        layers = range(config.num_layers)
        extras = (tuple(jax.tree.map(lambda leaf, i=i: leaf[i], extras[0]) for i in layers), *extras[1:])
    return (x if config.head is None else model.head(x), *extras)


@functools.partial(jax.jit, static_argnames="last")
def _extend(
    model: Transformer,
    token_ids: jax.Array,
    lengths: jax.Array | None,
    caches: tuple[Any, ...],
    *,
    last: bool,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Every layer reads its cache; the new keys and values of all layers are added at the end, in one go.

    A mixer that is not attention hands out its new state.
    """
    config = model.config
    start, length = caches[0].lengths[0], token_ids.shape[-1]
    positions = start[..., None] + jnp.arange(length).reshape((1,) * (token_ids.ndim - 1) + (-1,))
    x = model.embed(token_ids, positions)

    def run(x: jax.Array, block: TransformerBlock, cache: Any) -> tuple[jax.Array, Any]:
        output, new = block.extend(x, cache, lengths=lengths)
        return output.astype(x.dtype), new

    x, new = scan_layers(run, x, model.layers, caches, config.layer_attention, by_index=True)
    caches = append(caches, new, lengths)
    if last:
        at = jnp.full(token_ids.shape[:-1], length) if lengths is None else lengths
        x = jnp.take_along_axis(x, jnp.where(at == 0, length, at - 1)[..., None, None], axis=-2, mode="fill")
    if model.final_norm is not None:
        x = model.final_norm(x)
    x = x if config.head is None else model.head(x)
    return (x[..., 0, :] if last else x), caches
