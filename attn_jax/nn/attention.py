"""Multi-head attention: the links of the chain, composed, with their parameters."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attn_jax import biases, checks, masks, scaling
from attn_jax import positions as position
from attn_jax.exact.attention import dot_product_attention
from attn_jax.exact.cache import KVCache, cached_attention
from attn_jax.nn import hooks, padding, parameters
from attn_jax.nn.dropout import dropout_key
from attn_jax.nn.options import AttentionConfig, fill_sizes
from attn_jax.nn.parameters import Initializer
from attn_jax.projections import project_out, project_qkv
from attn_jax.typing import ArrayLike, Float, Int


class MultiHeadAttention(nnx.Module):
    """Self- or cross-attention with N query heads over K key/value heads.

    q, k, v = project -> norm -> rotary -> temperature; output = merge(attention_fn(q, k, v)) W_O.

    The norm precedes the rotation, as in the published models that have both: with unequal weights inside a rotated
    pair the other order is another function.

    Parameters, with C the width of the context (D in self-attention); absent ones are None:

        query_weight [D, N, H]   key_weight [C, K, H]   value_weight [C, K, V]   output_weight [N, V, D]
            by `kernel_init`, LeCun by default: variance 1 / fan in. `key_weight` is absent if tied.
        query_bias [N, H]   key_bias [K, H]   value_bias [K, V]   output_bias [D]      0
        query_norm_weight [H]   key_norm_weight [H] (absent if tied)                   1, qk_norm="rms"
        log_temperature [N]                                                            0, temperature 1
        relative_table [buckets, N]                                                    0
        sinks [N]                                                                      0

    Args:
        model_width: D.
        num_heads: N.
        num_kv_heads: K, which divides N; None: N. K = 1 is multi-query attention.
        head_width: H; None: D / N.
        value_width: V; None: H.
        context_width: C; None: D.
        scale_rule: a rule of `attn_jax.scaling.scale_factor`, or a number, the factor on q · k.
        learned_temperature: whether each head divides its logits by a learned temperature.
        tie_query_key: whether keys are made by the query's weight, bias and norm (needs K = N and C = D).
        qk_norm: "rms" (a learned weight over H, one for all heads), "l2" (unit vectors: choose a scale to fit) or None.
        qk_norm_epsilon: ε of that norm.
        positions: "rotary", "alibi", "relative" (T5 buckets, learned) or None.
        rotary_base, rotary_interleaved, rotary_scaling: as in `attn_jax.positions.apply_rotary`. The length of
            `DynamicNTK` is S, the number of keys, whatever their positions and masks; it goes with no lengths.
        relative_buckets, relative_max_distance: as in `attn_jax.biases.RelativeBuckets`; bidirectional unless causal.
        is_causal: whether a query sees no later key.
        local_window_size: (left, right), both inclusive; an int w is (w, w).
        logits_soft_cap: c of `c tanh(logits / c)`.
        use_sinks: whether each head has a learned sink.
        use_bias: whether the four projections have biases.
        dropout_rate: rate on the attention weights.
        attention_fn: a function with the keywords of `attn_jax.dot_product_attention`; it is handed only those that
            are in use, so a function that lacks one of these raises. Build a `functools.partial` once: each is a
            new value under `jit`.
        dtype: of the computation; None: the one that input and parameters promote to.
        param_dtype: of the parameters.
        precision: of the matrix products.
        kernel_init: initializer of the weights, seen as matrices `[fan in, fan out]`.
        rngs: the stream `params` draws the weights. Nothing of it is kept: dropout takes its key at the call.

    Raises:
        ValueError, TypeError: on a size or choice that is none, options that exclude each other, or an option that
            has no effect beside the others and is not at its default.

    Reference: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (QK-norm).

    >>> import jax
    >>> from flax import nnx
    >>> from attn_jax.nn import MultiHeadAttention
    >>> layer = MultiHeadAttention(8, 2, num_kv_heads=1, is_causal=True, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (3, 8))
    >>> change = layer(x.at[2].set(0)) - layer(x)  # of the last token
    >>> (abs(change).max(axis=1) > 1e-4).tolist()  # those before do not see it
    [False, False, True]
    >>> layer.query_weight.shape, layer.key_weight.shape  # [D, N, H] and [D, K, H]
    ((8, 2, 4), (8, 1, 4))
    """

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        value_width: int | None = None,
        context_width: int | None = None,
        scale_rule: str | float = "inverse_sqrt",
        learned_temperature: bool = False,
        tie_query_key: bool = False,
        qk_norm: str | None = None,
        qk_norm_epsilon: float = 1e-6,
        positions: str | None = None,
        rotary_base: float = 10000.0,
        rotary_interleaved: bool = False,
        rotary_scaling: Any = None,
        relative_buckets: int = 32,
        relative_max_distance: int = 128,
        is_causal: bool = False,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Any] = dot_product_attention,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = "float32",
        precision: Any = None,
        kernel_init: Initializer = parameters.lecun,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = fill_sizes(model_width, num_heads, num_kv_heads, head_width, value_width, context_width)
        self.config = config = AttentionConfig(
            sizes=sizes,
            scale_rule=scale_rule,
            learned_temperature=learned_temperature,
            tie_query_key=tie_query_key,
            qk_norm=qk_norm,
            qk_norm_epsilon=qk_norm_epsilon,
            positions=positions,
            rotary_base=rotary_base,
            rotary_interleaved=rotary_interleaved,
            rotary_scaling=rotary_scaling,
            relative_buckets=relative_buckets,
            relative_max_distance=relative_max_distance,
            is_causal=is_causal,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            use_sinks=use_sinks,
            use_bias=use_bias,
            dropout_rate=dropout_rate,
            attention_fn=attention_fn,
        )
        self.dtype = None if dtype is None else parameters.floating_name("dtype", dtype)
        self.precision = precision

        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        draw = functools.partial(parameters.weight, rngs, kernel_init, dtype=param_dtype)
        zeros = functools.partial(parameters.constant, 0.0, dtype=param_dtype)
        ones = functools.partial(parameters.constant, 1.0, dtype=param_dtype)
        D, N, K, H, V, C = sizes
        untied, rms = not config.tie_query_key, config.qk_norm == "rms"
        self.query_weight = draw((D,), (N, H))
        self.key_weight = draw((C,), (K, H)) if untied else None
        self.value_weight = draw((C,), (K, V))
        self.output_weight = draw((N, V), (D,))
        self.query_bias = zeros((N, H)) if config.use_bias else None
        self.key_bias = zeros((K, H)) if config.use_bias and untied else None
        self.value_bias = zeros((K, V)) if config.use_bias else None
        self.output_bias = zeros((D,)) if config.use_bias else None
        self.query_norm_weight = ones((H,)) if rms else None
        self.key_norm_weight = ones((H,)) if rms and untied else None
        self.log_temperature = zeros((N,)) if config.learned_temperature else None
        self.relative_table = zeros((config.relative_buckets, N)) if config.positions == "relative" else None
        self.sinks = zeros((N,)) if config.use_sinks else None

    def __call__(
        self,
        x: Float[ArrayLike, "*b t d"],
        context: Float[ArrayLike, "*b s c"] | None = None,
        *,
        positions: Int[ArrayLike, "*#b t"] | None = None,
        context_positions: Int[ArrayLike, "*#b s"] | None = None,
        bias: biases.Bias | ArrayLike | None = None,
        mask: masks.Mask | ArrayLike | None = None,
        query_seq_lengths: Int[ArrayLike, "*b"] | None = None,
        key_value_seq_lengths: Int[ArrayLike, "*b"] | None = None,
        deterministic: bool = True,
        dropout_rng: jax.Array | None = None,
        return_statistics: bool | Collection[str] = False,
        observe: Callable[..., Any] | None = None,
        intervene: Callable[..., jax.Array] | None = None,
    ) -> Any:
        """Attention of `x` to `context`, or to itself.

        Args:
            x: `[*B, T, D]`.
            context: `[*B, S, C]`, where keys and values come from; None: `x`.
            positions: int `[T]` or `[*B, T]`, where the queries sit; None: 0..T-1.
            context_positions: int `[S]` or `[*B, S]`, where the keys sit; None: 0..S-1, or `positions` if there is
                no context.
            bias: added to the logits, besides the module's own; an array or one of `attn_jax.biases`.
            mask: True = may attend; an array or one of `attn_jax.masks`.
            query_seq_lengths: int `[*B]`; rows of `x` past it are not read as queries, and give 0 before the output
                projection.
            key_value_seq_lengths: int `[*B]`; rows of the context past it are neither read nor seen.
            deterministic: True in evaluation, where there is no dropout and no key is needed; False in training.
            dropout_rng: the key of dropout, needed if it is on.
            return_statistics: True, or names of statistics: also return the `AttentionStatistics` of these weights,
                from the same pass, before dropout. Needs `attn_jax.dot_product_attention` as the `attention_fn`; an
                `implementation` bound to it that has no statistics raises.
            observe: a function that is called as `observe(query, key, value, **options)` with what `attention_fn`
                gets (without dropout); its pytree is also returned.
            intervene: a function that is called in the place of `attention_fn`, with the same arguments; what it
                returns `[*B, T, N, V]` goes to the output projection. Not with `return_statistics`.

        Returns:
            The output `[*B, T, D]`, or a tuple `(output, statistics, observed)` of it and what was asked for.

        Raises:
            ValueError, TypeError: on an argument of a wrong shape, dtype or value.
        """
        self_attention = context is None
        x = checks.floating_array("x", x)
        context = x if context is None else checks.floating_array("context", context)
        config, sizes = self.config, self.config.sizes
        for name, array, width in (("x", x, sizes.model_width), ("context", context, sizes.context_width)):
            checks.minimum_rank(name, array, 2, "[*B, T, D]")
            parameters.check_width(name, array, width)
        if self_attention:
            if context_positions is not None:
                raise ValueError("context_positions go with a context: keys of self-attention sit at positions")
            context_positions = positions
        if observe is not None:
            parameters.check_function("observe", observe)
        if intervene is not None:
            parameters.check_function("intervene", intervene)
        check_lengths = functools.partial(padding.check_lengths, scaling=config.rotary_scaling)
        if query_seq_lengths is not None:
            query_seq_lengths = check_lengths("query_seq_lengths", query_seq_lengths, x.shape[:-2], x.shape[-2])
        if key_value_seq_lengths is not None:
            shape = context.shape
            key_value_seq_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, shape[:-2], shape[-2])
        query, key, value = self.project(
            padding.without_padding(x, query_seq_lengths), padding.without_padding(context, key_value_seq_lengths)
        )
        length = max(context.shape[-2], 1)  # an empty context has nothing to turn
        query, key = self._rotate(query, positions, length), self._rotate(key, context_positions, length)
        if self.log_temperature is not None:
            query = scaling.temperature(query, self.log_temperature[...])

        options = self._options(query.dtype)
        if bias is not None:
            options["bias"] = options["bias"] + bias if "bias" in options else bias
        given = {
            "mask": mask,
            "query_positions": positions,
            "key_positions": context_positions,
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
        }
        options |= {name: option for name, option in given.items() if option is not None}
        dropout_rng = dropout_key(deterministic, dropout_rng, config.dropout_rate)
        output, *extras = hooks.attend(
            config.attention_fn,
            query,
            key,
            value,
            options=options,
            dropout={} if dropout_rng is None else {"dropout_rate": config.dropout_rate, "dropout_rng": dropout_rng},
            statistics=hooks.statistics_names(return_statistics),
            observe=observe,
            intervene=intervene,
        )
        output = self._merge(output)
        return (output, *extras) if extras else output

    def extend(
        self, x: Float[ArrayLike, "*b t d"], cache: KVCache, *, lengths: Int[ArrayLike, "*b"] | None = None
    ) -> tuple[Float[jax.Array, "*b t d"], tuple[Float[jax.Array, "*b t k h"], Float[jax.Array, "*b t k v"]]]:
        """Attention of `x` that continues a cached sequence: to what is cached and to itself, for `is_causal`.

        The cache is read and not written; `cache.append(key, value, lengths)` of the new keys and values does that.
        There is no dropout.

        Args:
            x: `[*B, T, D]`, at the positions that follow the cached ones.
            cache: the keys, already rotated, and values of the tokens before.
            lengths: int `[*B]`, rows of `x` that count; None: all.

        Returns:
            `(output [*B, T, D], (key [*B, T, K, H], value [*B, T, K, V]))`.

        Raises:
            ValueError, TypeError: on an argument of a wrong shape, dtype or value; on a module that is not causal; on
                `DynamicNTK` with a rolling cache. With a full one all keys have the frequencies of its capacity.
        """
        config = self.config
        x = checks.floating_array("x", x)
        checks.minimum_rank("x", x, 2, "[*B, T, D]")
        parameters.check_width("x", x, config.sizes.model_width)
        if not config.is_causal:
            raise ValueError("extend needs is_causal=True: tokens that are cached have not seen those that follow")
        if isinstance(config.rotary_scaling, position.DynamicNTK) and cache.window is not None:
            raise ValueError(
                "cache must not roll with a rotary_scaling of DynamicNTK, which turns keys by its capacity"
            )
        if lengths is not None:
            lengths = padding.check_lengths("lengths", lengths, x.shape[:-2], x.shape[-2], None)
        x = padding.without_padding(x, lengths)
        query, key, value = self.project(x, x)
        positions = cache.lengths[..., None] + jnp.arange(x.shape[-2]).reshape((1,) * (x.ndim - 2) + (-1,))
        query, key = (self._rotate(y, positions, cache.capacity) for y in (query, key))
        if self.log_temperature is not None:
            query = scaling.temperature(query, self.log_temperature[...])
        options = self._options(query.dtype)
        output = cached_attention(query, key, value, cache, counts=lengths, attention_fn=config.attention_fn, **options)
        return self._merge(output), (key, value)

    def project(
        self, x: Float[jax.Array, "*b t d"], context: Float[jax.Array, "*b s c"]
    ) -> tuple[Float[jax.Array, "*b t n h"], Float[jax.Array, "*b s k h"], Float[jax.Array, "*b s k v"]]:
        """Queries of `x`, keys and values of `context`, normalised if the module has a QK-norm, not yet rotated."""
        tied = self.key_weight is None
        x, context, *arrays = parameters.values(
            x, context,
            self.query_weight, self.key_weight, self.value_weight, self.query_bias,
            self.query_bias if tied else self.key_bias, self.value_bias,
            dtype=self.dtype,
        )  # fmt: skip
        query, key, value = project_qkv(x, *arrays, context=context, precision=self.precision)
        epsilon = self.config.qk_norm_epsilon
        if self.config.qk_norm == "l2":
            query, key = scaling.l2_norm(query, epsilon=epsilon), scaling.l2_norm(key, epsilon=epsilon)
        elif self.query_norm_weight is not None:
            key_norm_weight = self.query_norm_weight if self.key_norm_weight is None else self.key_norm_weight
            query = scaling.rms_norm(query, self.query_norm_weight[...], epsilon=epsilon)
            key = scaling.rms_norm(key, key_norm_weight[...], epsilon=epsilon)
        return query, key, value

    def _rotate(
        self, x: Float[jax.Array, "*b t n h"], positions: Int[ArrayLike, "*#b t"] | None, length: int
    ) -> Float[jax.Array, "*b t n h"]:
        """`x` turned by its positions, 0..T-1 if None; itself without rotary positions."""
        config = self.config
        if config.positions != "rotary":
            return x
        return position.apply_rotary(
            x,
            jnp.arange(x.shape[-3]) if positions is None else positions,
            base=config.rotary_base,
            scaling=config.rotary_scaling,
            length=length,
            interleaved=config.rotary_interleaved,
        )

    def _options(self, dtype: DTypeLike) -> dict[str, Any]:
        """What the module itself asks of `attention_fn`: only what is in use.

        So a function that lacks an option fails only where the option matters.
        """
        config = self.config
        options = {
            "bias": self._position_bias(),
            "scale": None
            if config.scale == scaling.scale_factor("inverse_sqrt", config.sizes.head_width)
            else config.scale,
            "is_causal": config.is_causal or None,
            "local_window_size": config.local_window_size,
            "logits_soft_cap": config.logits_soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...].astype(dtype),
            "precision": self.precision,
        }
        return {name: option for name, option in options.items() if option is not None}

    def _merge(self, output: Float[jax.Array, "*b t n v"]) -> Float[jax.Array, "*b t d"]:
        """The output projection."""
        output, weight, offset = parameters.values(output, self.output_weight, self.output_bias, dtype=self.dtype)
        return project_out(output, weight, offset, precision=self.precision)

    def _position_bias(self) -> biases.Bias | None:
        config = self.config
        if config.positions == "alibi":
            return biases.Alibi(config.sizes.num_heads)
        if self.relative_table is None:
            return None
        return biases.RelativeBuckets(
            self.relative_table[...], bidirectional=not config.is_causal, max_distance=config.relative_max_distance
        )
