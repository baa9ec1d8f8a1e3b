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
from attn_jax.diagnostics.statistics import DEFAULT, attention_with_statistics
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import parameters
from attn_jax.nn.parameters import Initializer
from attn_jax.projections import project_out, project_qkv
from attn_jax.typing import ArrayLike, Float, Int

POSITIONS = ("rotary", "alibi", "relative", None)


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
        rotary_base, rotary_interleaved, rotary_scaling: as in `attn_jax.positions.apply_rotary`.
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
        ValueError, TypeError: on a size or choice that is none, or options that exclude each other.

    Reference: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (QK-norm).
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
        sizes = _sizes(model_width, num_heads, num_kv_heads, head_width, value_width, context_width)
        self.model_width, self.num_heads, self.num_kv_heads, self.head_width, value_width, context_width = sizes
        self.context_width = context_width
        checks.one_of("positions", positions, POSITIONS)
        checks.one_of("qk_norm", qk_norm, ("rms", "l2", None))
        if positions == "rotary":
            if self.head_width % 2:
                raise ValueError(f"head_width must be even for positions='rotary', got {self.head_width}")
            position.rotary_frequencies(self.head_width, base=rotary_base, scaling=rotary_scaling, length=1)
        if checks.boolean("tie_query_key", tie_query_key):
            for name, this, other in (
                ("num_kv_heads", self.num_kv_heads, self.num_heads),
                ("context_width", self.context_width, self.model_width),
            ):
                if this != other:
                    raise ValueError(f"{name} must be {other} where tie_query_key shares one projection, got {this}")
        self.scale = scaling.scale_factor(scale_rule, self.head_width, self.model_width)
        self.has_default_scale = self.scale == scaling.scale_factor("inverse_sqrt", self.head_width)
        self.qk_norm = qk_norm
        self.qk_norm_epsilon = checks.finite_number("qk_norm_epsilon", qk_norm_epsilon, positive=True)
        self.positions = positions
        self.rotary_base = checks.finite_number("rotary_base", rotary_base, positive=True)
        self.rotary_interleaved = checks.boolean("rotary_interleaved", rotary_interleaved)
        self.rotary_scaling = rotary_scaling
        self.relative_max_distance = checks.positive_int("relative_max_distance", relative_max_distance)
        self.is_causal = checks.boolean("is_causal", is_causal)
        self.local_window_size = window_pair(local_window_size)
        self.logits_soft_cap = logits_soft_cap
        if logits_soft_cap is not None:
            self.logits_soft_cap = checks.finite_number("logits_soft_cap", logits_soft_cap, positive=True)
        self.dropout_rate = checks.rate("dropout_rate", dropout_rate)
        if not callable(attention_fn):
            raise TypeError(f"attention_fn must be callable, got {attention_fn!r}")
        self.attention_fn = attention_fn
        self.dtype = None if dtype is None else parameters.floating_name("dtype", dtype)
        self.precision = precision

        param_dtype = parameters.floating_name("param_dtype", param_dtype)
        draw = functools.partial(parameters.weight, rngs, kernel_init, dtype=param_dtype)
        zeros = functools.partial(parameters.constant, 0.0, dtype=param_dtype)
        ones = functools.partial(parameters.constant, 1.0, dtype=param_dtype)
        queries, keys = (self.num_heads, self.head_width), (self.num_kv_heads, self.head_width)
        values, outputs = (self.num_kv_heads, value_width), (self.num_heads, value_width)
        untied, with_bias, rms = not tie_query_key, checks.boolean("use_bias", use_bias), qk_norm == "rms"
        self.query_weight = draw((self.model_width,), queries)
        self.key_weight = draw((self.context_width,), keys) if untied else None
        self.value_weight = draw((self.context_width,), values)
        self.output_weight = draw(outputs, (self.model_width,))
        self.query_bias = zeros(queries) if with_bias else None
        self.key_bias = zeros(keys) if with_bias and untied else None
        self.value_bias = zeros(values) if with_bias else None
        self.output_bias = zeros((self.model_width,)) if with_bias else None
        self.query_norm_weight = ones((self.head_width,)) if rms else None
        self.key_norm_weight = ones((self.head_width,)) if rms and untied else None
        temperature = checks.boolean("learned_temperature", learned_temperature)
        self.log_temperature = zeros((self.num_heads,)) if temperature else None
        buckets = checks.positive_int("relative_buckets", relative_buckets)
        self.relative_table = zeros((buckets, self.num_heads)) if positions == "relative" else None
        self.sinks = zeros((self.num_heads,)) if checks.boolean("use_sinks", use_sinks) else None
        self._position_bias()  # so that buckets that make no sense fail here

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
            query_seq_lengths: int `[*B]`; queries past it give 0 before the output projection.
            key_value_seq_lengths: int `[*B]`; keys past it are not seen.
            deterministic: True in evaluation, where there is no dropout and no key is needed; False in training.
            dropout_rng: the key of dropout, needed if it is on.
            return_statistics: True, or names of statistics: also return the `AttentionStatistics` of these weights,
                from the same pass, before dropout. Needs `attn_jax.dot_product_attention` as the `attention_fn`.
            observe: a function that is called as `observe(query, key, value, **options)` with what `attention_fn`
                gets (without dropout); its pytree is also returned.

        Returns:
            The output `[*B, T, D]`, or a tuple `(output, statistics, observed)` of it and what was asked for.

        Raises:
            ValueError, TypeError: on an argument of a wrong shape, dtype or value.
        """
        self_attention = context is None
        x = checks.floating_array("x", x)
        context = x if context is None else checks.floating_array("context", context)
        for name, array, width in (("x", x, self.model_width), ("context", context, self.context_width)):
            checks.minimum_rank(name, array, 2, "[*B, T, D]")
            parameters.check_width(name, array, width)
        if self_attention:
            if context_positions is not None:
                raise ValueError("context_positions go with a context: keys of self-attention sit at positions")
            context_positions = positions
        query, key, value = self.project(x, context)
        if self.positions == "rotary":
            rotate = functools.partial(
                position.apply_rotary,
                base=self.rotary_base,
                scaling=self.rotary_scaling,
                length=context.shape[-2],
                interleaved=self.rotary_interleaved,
            )
            query = rotate(query, jnp.arange(x.shape[-2]) if positions is None else positions)
            key = rotate(key, jnp.arange(context.shape[-2]) if context_positions is None else context_positions)
        if self.log_temperature is not None:
            query = scaling.temperature(query, self.log_temperature[...])

        own_bias = self._position_bias()
        options = {
            "bias": bias if own_bias is None else own_bias if bias is None else own_bias + bias,
            "mask": mask,
            "scale": None if self.has_default_scale else self.scale,
            "is_causal": self.is_causal or None,
            "local_window_size": self.local_window_size,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...].astype(query.dtype),
            "query_positions": positions,
            "key_positions": context_positions,
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
            "precision": self.precision,
        }
        # Only what is in use is handed on: a function that lacks an option fails only where the option matters.
        options = {name: option for name, option in options.items() if option is not None}
        dropout = self._dropout(deterministic, dropout_rng)
        extras = ()
        names = statistics_names(return_statistics)
        if names:
            measured = functools.partial(attention_with_statistics, statistics=names, **self._fixed_options())
            output, statistics = measured(query, key, value, **options, **dropout)
            extras += (statistics,)
        else:
            output = self.attention_fn(query, key, value, **options, **dropout)
        if observe is not None:
            extras += (observe(query, key, value, **options),)
        output, weight, offset = parameters.values(output, self.output_weight, self.output_bias, dtype=self.dtype)
        output = project_out(output, weight, offset, precision=self.precision)
        return (output, *extras) if extras else output

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
        epsilon = self.qk_norm_epsilon
        if self.qk_norm == "l2":
            query, key = scaling.l2_norm(query, epsilon=epsilon), scaling.l2_norm(key, epsilon=epsilon)
        elif self.query_norm_weight is not None:
            key_norm_weight = self.query_norm_weight if self.key_norm_weight is None else self.key_norm_weight
            query = scaling.rms_norm(query, self.query_norm_weight[...], epsilon=epsilon)
            key = scaling.rms_norm(key, key_norm_weight[...], epsilon=epsilon)
        return query, key, value

    def _position_bias(self) -> biases.Bias | None:
        if self.positions == "alibi":
            return biases.Alibi(self.num_heads)
        if self.relative_table is None:
            return None
        return biases.RelativeBuckets(
            self.relative_table[...], bidirectional=not self.is_causal, max_distance=self.relative_max_distance
        )

    def _dropout(self, deterministic: bool, dropout_rng: jax.Array | None) -> dict[str, Any]:
        if checks.boolean("deterministic", deterministic) or self.dropout_rate == 0.0:
            return {}
        if dropout_rng is None:
            raise ValueError(f"dropout_rng must be a key where dropout is on (rate {self.dropout_rate}), got None")
        return {"dropout_rate": self.dropout_rate, "dropout_rng": checks.prng_key("dropout_rng", dropout_rng)}

    def _fixed_options(self) -> dict[str, Any]:
        """The options bound into `attention_fn`, if it is our attention; the statistics of another are not known."""
        fixed, function = {}, self.attention_fn
        if isinstance(function, functools.partial) and not function.args:
            fixed, function = function.keywords, function.func
        if function is not dot_product_attention:
            raise ValueError(
                "return_statistics describes attn_jax.dot_product_attention (or a functools.partial of it), "
                f"got attention_fn {self.attention_fn!r}: measure its queries and keys by observe"
            )
        return {name: option for name, option in fixed.items() if name != "implementation"}  # the same numbers by any


def statistics_names(return_statistics: bool | Collection[str]) -> tuple[str, ...]:
    """The names asked for by `return_statistics`: none, the default ones, or those named."""
    if isinstance(return_statistics, str) or not isinstance(return_statistics, (bool, Collection)):
        raise TypeError(f"return_statistics must be True, False or names of statistics, got {return_statistics!r}")
    if isinstance(return_statistics, bool):
        return tuple(DEFAULT) if return_statistics else ()
    return tuple(return_statistics)


def window_pair(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """A window as (left, right), from an int or a pair, or None."""
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or (left, right), got {window!r}")
    left, right = (checks.positive_int("local_window_size", side, least=0) for side in sides)
    return left, right


def _sizes(
    model_width: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_width: int | None,
    value_width: int | None,
    context_width: int | None,
) -> tuple[int, int, int, int, int, int]:
    """D, N, K, H, V and C, with the defaults filled in."""
    model_width = checks.positive_int("model_width", model_width)
    num_heads = checks.positive_int("num_heads", num_heads)
    num_kv_heads = num_heads if num_kv_heads is None else checks.positive_int("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_width is None and model_width % num_heads:
        raise ValueError(
            f"model_width must be a multiple of num_heads where head_width is not given, "
            f"got {model_width} and {num_heads}"
        )
    head_width = model_width // num_heads if head_width is None else checks.positive_int("head_width", head_width)
    value_width = head_width if value_width is None else checks.positive_int("value_width", value_width)
    context_width = model_width if context_width is None else checks.positive_int("context_width", context_width)
    return model_width, num_heads, num_kv_heads, head_width, value_width, context_width
