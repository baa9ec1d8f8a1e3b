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
from attn_jax.exact.cache import KVCache, empty_cache
from attn_jax.nn import padding, parameters
from attn_jax.nn.attention import statistics_names
from attn_jax.nn.block import TransformerBlock, drop, split_dropout_key
from attn_jax.nn.config import TransformerConfig
from attn_jax.nn.layers import by_kind, in_order, scan_layers
from attn_jax.nn.mixers import ATTENTION_WORDS, Mixer
from attn_jax.nn.norms import make_norm
from attn_jax.nn.parameters import Initializer, floating_name
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
        scalings = [layer.rotary_scaling for layer in self.config.layer_attention if layer is not None]
        dynamic = next((scaling for scaling in scalings if isinstance(scaling, position.DynamicNTK)), None)
        token_ids, lengths = self._check_tokens(token_ids, lengths, dynamic)
        positions = self._check_positions(positions, token_ids.shape[:-1], token_ids.shape[-1])
        token_types = self._check_token_types(token_types, token_ids.shape)
        dropping = not checks.boolean("deterministic", deterministic) and self.config.dropout_rate > 0
        keys = split_dropout_key(dropout_rng, self.config.dropout_rate, 2) if dropping else None
        wanted = statistics_names(return_statistics)
        self._check_attention(
            return_statistics=wanted or None, observe=observe, intervene=intervene, positions=positions
        )
        if intervene is None and interventions is not None:
            raise ValueError("interventions go with intervene, which reads them; got None there")
        for leaf in jax.tree.leaves(interventions):
            if jnp.shape(leaf)[:1] != (self.config.num_layers,):
                raise ValueError(
                    f"interventions must have leaves [L, ...] with L = {self.config.num_layers}, got {jnp.shape(leaf)}"
                )
        observe, intervene = _as_partial("observe", observe), _as_partial("intervene", intervene)
        outputs = _compute(
            self, token_ids, token_types, lengths, positions, keys, (intervene, interventions),
            statistics=wanted, observe=observe,
        )  # fmt: skip
        return outputs if wanted or observe is not None else outputs[0]

    def layer(self, index: int) -> TransformerBlock:
        """The block of one layer, cut out of its stack."""
        checks.within("index", jnp.asarray(index), 0, self.config.num_layers - 1)
        if isinstance(self.layers, TransformerBlock):
            stack, at = self.layers, index
        else:
            at, kind = divmod(index, len(self.layers))
            stack = self.layers[kind]
        block = jax.tree.map(lambda leaf: leaf[at], stack)
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
        config = self.config
        batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        capacity = checks.positive_int("capacity", capacity)
        if config.max_length is not None and capacity > config.max_length:
            raise ValueError(f"capacity must be at most max_length = {config.max_length}, got {capacity}")
        dtype = floating_name("dtype", dtype or config.dtype or config.param_dtype)
        caches = []
        for kind, attention in enumerate(config.layer_attention):
            count = len(range(kind, config.num_layers, len(config.layer_attention)))
            if attention is None:
                caches.append(self._mixer(kind).empty_state((count, *batch), dtype=dtype))
                continue
            window = None if attention.window is None else attention.window[0] + 1
            window = None if window is None or window >= capacity else window
            caches.append(
                empty_cache(
                    (count, *batch),
                    window or capacity,
                    attention.sizes.num_kv_heads,
                    attention.sizes.head_width,
                    value_width=attention.sizes.value_width,
                    dtype=dtype,
                    window=window,
                )
            )
        return tuple(caches)

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
        token_ids, lengths = self._check_tokens(token_ids, lengths, None)
        checks.boolean("last", last)
        self._check_caches(caches, token_ids.shape[:-1])
        for cache in caches:
            if isinstance(cache, KVCache):
                cache.check_room(token_ids.shape[-1], lengths)
        return _extend(self, token_ids, lengths, caches, last=last)

    def _mixer(self, kind: int) -> Mixer[Any]:
        """The mixers of the layers of a kind that has no attention, stacked."""
        mixer = (self.layers if isinstance(self.layers, TransformerBlock) else self.layers[kind]).mixer
        assert mixer is not None
        return mixer

    def _check_caches(self, caches: Any, batch: tuple[int, ...]) -> None:
        """Raises unless `caches` are those of `empty_cache` for this batch, by their types and lengths."""
        kinds = self.config.layer_attention
        types = [KVCache if own is not None else self._mixer(kind).state_type for kind, own in enumerate(kinds)]
        if not isinstance(caches, tuple) or [type(cache) for cache in caches] != types:
            names = " or ".join(dict.fromkeys(one.__name__ for one in types))
            raise TypeError(
                f"caches must be a tuple of {len(types)} {names}, as empty_cache makes it, got {type(caches).__name__}"
            )
        for kind, cache in enumerate(caches):
            count = len(range(kind, self.config.num_layers, len(kinds)))
            checks.shape("caches", cache.lengths, (count, *batch), "[layers, *B]")

    def _check_attention(self, **options: Any) -> None:
        """Raises if an option is given that is one of attention, and a layer has another mixer."""
        other = next((word for word in self.config.layer_mixers if word not in ATTENTION_WORDS), None)
        given = next((name for name, option in options.items() if option is not None), None)
        if other is not None and given is not None:
            raise ValueError(f"{given} belongs to attention, and this model has layers of mixer={other!r}")

    def _check_tokens(
        self, token_ids: ArrayLike, lengths: ArrayLike | None, dynamic: position.DynamicNTK | None
    ) -> tuple[jax.Array, jax.Array | None]:
        token_ids = checks.integer_array("token_ids", token_ids)
        checks.minimum_rank("token_ids", token_ids, 1, "[*B, T]")
        batch, length = token_ids.shape[:-1], token_ids.shape[-1]
        if length == 0:
            raise ValueError(f"token_ids must hold at least one token, [*B, T]; got shape {token_ids.shape}")
        if lengths is not None:
            lengths = padding.check_lengths("lengths", lengths, batch, length, dynamic)
            token_ids = jnp.where(padding.counts(lengths, length), token_ids, 0)
        checks.within("token_ids", token_ids, 0, self.config.vocabulary_size - 1)
        return token_ids, lengths

    def _check_token_types(self, token_types: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array | None:
        count = self.config.num_token_types
        if token_types is None:
            return None
        if count is None:
            raise ValueError("token_types go with a config of num_token_types, got None there")
        token_types = checks.integer_array("token_types", token_types)
        checks.shape("token_types", token_types, shape, "[*B, T]")
        checks.within("token_types", token_types, 0, count - 1)
        return token_types

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


def _as_partial(name: str, function: Callable[..., Any] | None) -> jax.tree_util.Partial | None:
    """A function as a pytree, which `jit` takes for data: equal functions share the trace."""
    if function is None or isinstance(function, jax.tree_util.Partial):
        return function
    parameters.check_function(name, function)
    return jax.tree_util.Partial(function)


@functools.partial(jax.jit, static_argnames="statistics")
def _compute(
    model: Transformer,
    token_ids: jax.Array,
    token_types: jax.Array | None,
    lengths: jax.Array | None,
    positions: jax.Array | None,
    keys: jax.Array | None,
    intervention: tuple[Callable[..., jax.Array] | None, Any],
    *,
    statistics: tuple[str, ...],
    observe: Callable[..., Any] | None,
) -> tuple[Any, ...]:
    """The outputs asked for. Jitted here, by value of the configuration, so that a plain call compiles only once."""
    config = model.config
    x = model.embed(token_ids, positions, token_types)
    layer_keys = None
    if keys is not None:
        x = drop(x, config.dropout_rate, keys[0])
        layer_keys = jax.random.split(keys[1], config.num_layers)

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
    caches = tuple(
        cache.append(one[0], one[1], lengths) if isinstance(cache, KVCache) else one
        for cache, one in zip(caches, new, strict=True)
    )
    if last:
        at = jnp.full(token_ids.shape[:-1], length) if lengths is None else lengths
        x = jnp.take_along_axis(x, jnp.where(at == 0, length, at - 1)[..., None, None], axis=-2, mode="fill")
    if model.final_norm is not None:
        x = model.final_norm(x)
    x = x if config.head is None else model.head(x)
    return (x[..., 0, :] if last else x), caches
