"""What a caller asks of attention besides its output, and what it puts in its place.

    return_statistics    statistics of the weights, from the same pass
    observe              a function of what attention gets, beside it
    intervene            a function of what attention gets, instead of it

`MultiHeadAttention` calls them by `attend`; `Transformer` hands them to every layer.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.diagnostics.statistics import DEFAULT, attention_with_statistics
from attn_jax.exact.attention import dot_product_attention
from attn_jax.nn import parameters
from attn_jax.typing import Array


def statistics_names(return_statistics: bool | Collection[str]) -> tuple[str, ...]:
    """The names asked for by `return_statistics`: none, the default ones, or those named."""
    if isinstance(return_statistics, str) or not isinstance(return_statistics, (bool, Collection)):
        raise TypeError(f"return_statistics must be True, False or names of statistics, got {return_statistics!r}")
    if isinstance(return_statistics, bool):
        return tuple(DEFAULT) if return_statistics else ()
    return tuple(return_statistics)


def attend(
    attention_fn: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    *,
    options: dict[str, Any],
    dropout: dict[str, Any],
    statistics: tuple[str, ...],
    observe: Callable[..., Any] | None,
    intervene: Callable[..., jax.Array] | None,
) -> tuple[Any, ...]:
    """The output of attention, or of what intervenes, `[*B, T, N, V]`, then the statistics and what was observed.

    Args:
        attention_fn: of the module.
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, V]`.
        options: what `attention_fn` is called with, and so are the others.
        dropout: the same of dropout, which `observe` does not get.
        statistics: names; none where there are none.
        observe, intervene: as in `MultiHeadAttention`.
    """
    extras = ()
    if intervene is not None:
        if statistics:
            raise ValueError("return_statistics describes the attention that intervene replaces: use observe")
        output = intervene(query, key, value, **options, **dropout)
        checks.shape("what intervene returns", output, (*query.shape[:-1], value.shape[-1]), "[*B, T, N, V]")
    elif statistics:
        given = {**_bound_options(attention_fn), **options, **dropout}
        output, measured = attention_with_statistics(query, key, value, statistics=statistics, **given)
        extras += (measured,)
    else:
        output = attention_fn(query, key, value, **options, **dropout)
    if observe is not None:
        extras += (observe(query, key, value, **options),)
    return output, *extras


def _bound_options(attention_fn: Callable[..., Any]) -> dict[str, Any]:
    """The options bound into `attention_fn`, if it is our attention; the statistics of another are not known."""
    bound, function = {}, attention_fn
    if isinstance(function, functools.partial) and not function.args:
        bound, function = function.keywords, function.func
    if function is not dot_product_attention:
        raise ValueError(
            "return_statistics describes attn_jax.dot_product_attention (or a functools.partial of it), "
            f"got attention_fn {function!r}: measure its queries and keys by observe"
        )
    return dict(bound)


def as_partial(name: str, function: Callable[..., Any] | None) -> jax.tree_util.Partial | None:
    """A function as a pytree, which `jit` takes for data: equal functions share the trace."""
    if function is None or isinstance(function, jax.tree_util.Partial):
        return function
    parameters.check_function(name, function)
    return jax.tree_util.Partial(function)


def check_interventions(interventions: Any, intervene: Callable[..., Any] | None, num_layers: int) -> None:
    """Raises unless `interventions` are None, or a pytree with leaves `[L, ...]` for an `intervene` that reads it."""
    if intervene is None and interventions is not None:
        raise ValueError("interventions go with intervene, which reads them; got None there")
    for leaf in jax.tree.leaves(interventions):
        if jnp.shape(leaf)[:1] != (num_layers,):
            raise ValueError(f"interventions must have leaves [L, ...] with L = {num_layers}, got {jnp.shape(leaf)}")
