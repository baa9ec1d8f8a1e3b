"""Our attention inside stock Flax modules, by one argument: `attention_fn=as_attention_fn()`.

For `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`. Every argument these modules send is
honoured, or raises when it asks for what our attention does not do.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes

from attn_jax import checks, masks
from attn_jax.diagnostics.statistics import AttentionStatistics, attention_statistics, attention_with_statistics
from attn_jax.exact.arguments import prepare
from attn_jax.exact.attention import choose_implementation, dot_product_attention
from attn_jax.typing import ArrayLike

# What the Flax module says itself at each call, and what would change the kind of the result.
_RESERVED = ("query", "key", "value", "dropout_rate", "dropout_rng", "precision", "return_residual")
_FIELDS = ("entropy", "normalized_entropy", "max_logit", "max_weight", "visible_keys")


def as_attention_fn(
    *, statistics: bool = False, observe: Callable[..., Any] | None = None, **options: Any
) -> Callable[..., jax.Array]:
    """`attn_jax.dot_product_attention` as the `attention_fn` of a stock Flax module.

    What differs from Flax's own function: softmax and sums are at least float32; a query that may see nothing gives
    0; dropout draws other bits of the same law (one mask shared over batch and heads where `broadcast_dropout` is on).

    Args:
        statistics: whether a call that is handed the module (`sow_weights=True`) sows, in `intermediates`, four
            numbers per head `[N]` over the queries that see something: `attention_entropy`,
            `attention_normalized_entropy`, `attention_max_weight` (means) and `attention_max_logit` (the largest). The
            n×n weights are never made; an `implementation` that has no statistics raises.
        observe: a function that such a call makes, as `observe(query, key, value, **options)` with what the attention
            gets; its pytree is sown as `attention_measures`. `attn_jax.diagnostics.measure_layer` leaves what
            `attn_jax.diagnostics.diagnose` reads. Without `statistics` and `observe` such a call raises.
        **options: of `attn_jax.dot_product_attention`, fixed for all calls: `scale`, `is_causal`,
            `local_window_size`, `logits_soft_cap`, `mask`, `bias`, `implementation`, ... Masks combine with the
            module's by AND. They must be hashable, since Flax keeps the function as a static attribute: no arrays.

    Returns:
        A function that is equal to any other made of equal options.

    Raises:
        TypeError: on an option that `dot_product_attention` lacks, that the module gives itself, or that is no static
            value.

    >>> from flax import nnx
    >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, attention_fn=as_attention_fn(), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 3, 8)), is_causal=True).shape
    (1, 3, 8)
    """
    accepted = [name for name in inspect.signature(dot_product_attention).parameters if name not in _RESERVED]
    for name, option in options.items():
        if name not in accepted:
            raise TypeError(f"{name} is no option of as_attention_fn; it takes {', '.join(accepted)}")
        arrays = [leaf for leaf in jax.tree.leaves(option) if hasattr(leaf, "shape")]
        if arrays or not _is_hashable(option):
            held = "".join(f", with an array of dtype {x.dtype} and shape {tuple(x.shape)}" for x in arrays[:1])
            raise TypeError(
                f"{name} must be a static, hashable value here, since Flax keeps it so; "
                f"got {type(option).__name__}{held}"
            )
    if observe is not None and not callable(observe):
        raise TypeError(f"observe must be callable, got {type(observe).__name__}")
    return _FlaxAttention(checks.boolean("statistics", statistics), observe, tuple(sorted(options.items())))


@dataclasses.dataclass(frozen=True)
class _FlaxAttention:
    """The adapted function; its parameters are spelled out because Linen drops the arguments it cannot see."""

    statistics: bool
    observe: Callable[..., Any] | None
    options: tuple[tuple[str, Any], ...]

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., Any] | None = None,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
    ) -> jax.Array:
        """Attention with the arguments of Flax's `dot_product_attention`."""
        replaced = {
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        for name, function in replaced.items():
            if function is not None:
                raise ValueError(f"{name} must be None: this attention has no einsum to replace, got {function!r}")
        if module is not None and not self.statistics and self.observe is None:
            raise ValueError(
                "sow_weights asks for the n×n weights, which are never made: build as_attention_fn(statistics=True) "
                "or observe= to sow a few numbers per head instead, or leave sow_weights False"
            )
        checks.boolean("force_fp32_for_softmax", force_fp32_for_softmax)  # the softmax is at least float32 anyway
        rate = checks.rate("dropout_rate", dropout_rate)
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        options = dict(self.options)
        mask = _both(options.pop("mask", None), _flax_mask(mask, query.ndim))
        bias = _both(options.pop("bias", None), None if bias is None else _full_rank("bias", bias, query.ndim))
        options["is_causal"] = checks.boolean("is_causal", is_causal) or options.get("is_causal", False)
        options["precision"] = precision
        options = {name: option for name, option in options.items() if option is not None}
        dropout = {}
        if rate > 0 and not checks.boolean("deterministic", deterministic):
            dropout = {"dropout_rate": rate, "dropout_rng": dropout_rng}

        if module is not None and self.observe is not None:
            seen = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
            given = {name: option for name, option in options.items() if name != "implementation"}
            module.sow("intermediates", "attention_measures", self.observe(query, key, value, **seen, **given))
        shared = bool(dropout) and checks.boolean("broadcast_dropout", broadcast_dropout)
        sowing = module is not None and self.statistics
        if not sowing and not shared:
            return dot_product_attention(query, key, value, bias, mask, **options, **dropout)
        if shared:
            output = _with_shared_dropout(query, key, value, bias, mask, options, dropout)
            if sowing:
                _sow(module, attention_statistics(query, key, bias, mask, statistics=_FIELDS, **options))
            return output
        output, measured = attention_with_statistics(
            query, key, value, bias, mask, statistics=_FIELDS, **options, **dropout
        )
        _sow(module, measured)
        return output


def _with_shared_dropout(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Any,
    mask: Any,
    options: dict[str, Any],
    dropout: dict[str, Any],
) -> jax.Array:
    """Attention whose dropout mask `[T, S]` is one for all batch items and heads.

    The bits of our dropout hash the indices of an entry, and an axis that `vmap` maps has no index: so mapping over
    batch and heads with one key draws one mask. All that may differ between items or heads is mapped with them.
    """
    implementation = choose_implementation(query, key, value, bias, mask, **options, **dropout).implementation
    problem = prepare(query, key, value, bias, mask, **{k: x for k, x in options.items() if k != "implementation"})
    square = problem.square.shape
    matrices = math.prod(square[:-2])
    groups = checks.grouped_heads(query.shape[-2], key.shape[-2])

    def heads(x: jax.Array) -> jax.Array:
        """`[*B, T, N, H]` as `[B N, T, H]`."""
        return jnp.swapaxes(x, -2, -3).reshape(matrices, x.shape[-3], x.shape[-1])

    def squares(x: jax.Array) -> jax.Array:
        """What broadcasts to `[*B, N, T, S]` as `[B N, T, S]`."""
        return jnp.broadcast_to(x, square).reshape(matrices, *square[-2:])

    def per_head(x: jax.Array) -> jax.Array:
        """`[]` or `[N]` as `[B N]`."""
        return jnp.broadcast_to(x.reshape((1,) * (len(square) - 2 - x.ndim) + x.shape), square[:-2]).reshape(matrices)

    mapped = {
        "query": heads(problem.query),
        "key": heads(jnp.repeat(problem.key, groups, axis=-2)),
        "value": heads(jnp.repeat(value, groups, axis=-2)),
        "scale": per_head(jnp.asarray(problem.scale, problem.accumulation_dtype)),
    }
    if problem.bias is not None:
        mapped["bias"] = squares(problem.bias.evaluate(problem.tile, problem.accumulation_dtype))
    if problem.mask is not None:
        mapped["mask"] = squares(problem.mask.evaluate(problem.tile))
    if problem.sinks is not None:
        mapped["sinks"] = per_head(problem.sinks)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **mapped: jax.Array) -> jax.Array:
        if "sinks" in mapped:
            mapped["sinks"] = mapped["sinks"][None]
        output = dot_product_attention(
            query[:, None], key[:, None], value[:, None], **mapped, **dropout,
            logits_soft_cap=problem.logits_soft_cap, precision=problem.precision, implementation=implementation,
        )  # fmt: skip
        return output[:, 0]

    output = jax.vmap(lambda x: attend(**x))(mapped).reshape(*square[:-1], value.shape[-1])
    return jnp.swapaxes(output, -2, -3)


def _sow(module: Any, measured: AttentionStatistics) -> None:
    """Sows each statistic as one number per head, `[N]`, over the rows that see a key."""
    sees = jnp.asarray(measured.visible_keys) > 0
    rows = tuple(range(sees.ndim - 1))
    for name in ("entropy", "normalized_entropy", "max_weight"):
        module.sow("intermediates", f"attention_{name}", jnp.mean(getattr(measured, name), axis=rows, where=sees))
    module.sow("intermediates", "attention_max_logit", jnp.max(jnp.asarray(measured.max_logit), axis=rows))


def _both(fixed: Any, given: Any) -> Any:
    """The option fixed beforehand and the one of this call: masks by AND, biases by sum."""
    if fixed is None or given is None:
        return given if fixed is None else fixed
    return fixed & given if isinstance(fixed, masks.Mask) else fixed + given


def _flax_mask(mask: Any, rank: int) -> Any:
    """A mask as Flax makes it, of numbers (0 = hidden), as a boolean array of full rank. Lazy masks pass."""
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    return _full_rank("mask", mask, rank) != 0


def _full_rank(name: str, x: Any, rank: int) -> jax.Array:
    """`x` with leading axes of 1, which is how Flax broadcasts it to `[*B, N, T, S]`."""
    x = checks.as_array(name, x)
    if x.ndim > rank:
        raise ValueError(f"{name} must broadcast to [*B, N, T, S], {rank} axes; got shape {x.shape}")
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
