"""The arguments of exact attention, checked once and brought to the one form that every implementation reads."""

import dataclasses
import math
from typing import TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import biases, checks, masks, scaling
from attn_jax.lazy import Bounds, Grid, Square, Tile
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


class AttentionOptions(TypedDict, total=False):
    """The keyword options that shape the weights; each is explained at `dot_product_attention`."""

    scale: float | ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    query_offset: int | ArrayLike
    query_positions: ArrayLike | None
    key_positions: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    precision: jax.lax.PrecisionLike


def only_attention_options(function: str, options: AttentionOptions) -> AttentionOptions:
    """`options` as they are, or a TypeError that names what `function` does not take (dropout, say)."""
    unknown = sorted(set(options) - set(AttentionOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"{function} does not take {', '.join(unknown)}; it takes {', '.join(AttentionOptions.__annotations__)}"
        )
    return options


_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of weights: the rate and the key that draws it."""

    rate: float = dataclasses.field(metadata=_STATIC)
    key: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """One attention problem in normal form, and a pytree of its arrays.

    Attributes:
        query, key: `[*B, T, N, H]`, `[*B, S, K, H]`.
        value: `[*B, S, K, V]`, or None where only weights are wanted.
        bias, mask: lazy, or None. `mask` holds everything that says who may see whom, except biases of `-inf`.
        scale: a number, a scalar array or `[N]`.
        is_causal, window: what `mask` holds of them, for implementations that take them as they are.
        square: `[*B, N, T, S]`, where its queries and keys sit, and which rows of it are kept.
        accumulation_dtype: of logits, softmax and sums: float32, or float64 for float64 inputs.
        given: the names of the arguments that were set to something, for implementations that take only some.
    """

    query: Float[Array, "*b t n h"]
    key: Float[Array, "*b s k h"]
    value: Float[Array, "*b s k v"] | None
    bias: biases.Bias | None
    mask: masks.Mask | None
    scale: float | Array
    logits_soft_cap: float | None = dataclasses.field(metadata=_STATIC)
    sinks: Float[Array, " n"] | None
    dropout: Dropout | None
    precision: jax.lax.PrecisionLike = dataclasses.field(metadata=_STATIC)
    is_causal: bool = dataclasses.field(metadata=_STATIC)
    window: tuple[int, int] | None = dataclasses.field(metadata=_STATIC)
    square: Square
    given: frozenset[str] = dataclasses.field(metadata=_STATIC)

    @property
    def accumulation_dtype(self) -> jnp.dtype:
        return jnp.promote_types(self.query.dtype, jnp.float32)

    @property
    def tile(self) -> Tile:
        """The whole square."""
        return self.square.whole()

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[-2]


def prepare(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    bias: biases.Bias | ArrayLike | None,
    mask: masks.Mask | ArrayLike | None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_offset: int | ArrayLike = 0,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    rows: ArrayLike | None = None,
) -> Problem:
    """Checks every argument and returns the normal form. `rows`, int `[R]`, keeps these queries only."""
    arrays = _arrays(query, key, value)
    *batch, query_length, num_heads, _ = arrays["query"].shape
    shape = (*batch, num_heads, query_length, arrays["key"].shape[-3])
    rows = None if rows is None else _rows(rows, query_length)
    square, empty_slots = _square(shape, query_offset, query_positions, key_positions, rows)
    window = window_pair(local_window_size)
    terms = [
        None if mask is None else masks.as_mask("mask", mask),
        masks.Causal() if checks.boolean("is_causal", is_causal) else None,
        None if window is None else masks.LocalWindow(*window),
        _lengths(shape, query_seq_lengths, key_value_seq_lengths),
        empty_slots,
    ]
    combined = None
    for term in terms:
        combined = term if combined is None else combined if term is None else combined & term
    lazy_bias = None if bias is None else biases.as_bias("bias", bias)
    _check_squares(lazy_bias, combined, square.whole())
    given = {
        "bias": bias is not None,
        "mask": mask is not None,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths is not None,
        "key_value_seq_lengths": key_value_seq_lengths is not None,
        "local_window_size": window is not None,
        "query_offset": not (isinstance(query_offset, int) and query_offset == 0),
        "query_positions": query_positions is not None,
        "key_positions": key_positions is not None,
        "logits_soft_cap": logits_soft_cap is not None,
        "sinks": sinks is not None,
        "dropout_rate": dropout_rate != 0,
        "precision": precision is not None,
    }
    return Problem(
        query=arrays["query"] if rows is None else jnp.take(arrays["query"], rows, axis=-3),
        key=arrays["key"],
        value=arrays.get("value"),
        bias=lazy_bias,
        mask=combined,
        scale=_scale(scale, arrays["query"]),
        logits_soft_cap=None if logits_soft_cap is None else scaling.check_cap("logits_soft_cap", logits_soft_cap),
        sinks=None if sinks is None else _sinks(sinks, num_heads),
        dropout=_dropout(dropout_rate, dropout_rng),
        precision=_precision(precision),
        is_causal=bool(is_causal),
        window=window,
        square=square,
        given=frozenset(name for name, is_given in given.items() if is_given),
    )


def _arrays(query: ArrayLike, key: ArrayLike, value: ArrayLike | None) -> dict[str, Array]:
    shapes = {"query": "[*B, T, N, H]", "key": "[*B, S, K, H]", "value": "[*B, S, K, V]"}
    arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
    arrays = {name: checks.floating_array(name, x) for name, x in arrays.items()}
    for name, x in arrays.items():
        checks.minimum_rank(name, x, 3, shapes[name])
        if x.dtype != arrays["query"].dtype:
            raise TypeError(f"{name} must have the query's dtype {arrays['query'].dtype}, got {x.dtype}")
        if x.shape[:-3] != arrays["query"].shape[:-3]:
            raise ValueError(
                f"{name} must have the query's leading axes *B = {arrays['query'].shape[:-3]}, got shape {x.shape}"
            )
    query_shape, key_shape = arrays["query"].shape, arrays["key"].shape
    if query_shape[-1] != key_shape[-1] or query_shape[-1] == 0:
        raise ValueError(f"query and key must have one head width H >= 1, got {query_shape[-1]} and {key_shape[-1]}")
    checks.grouped_heads(query_shape[-2], key_shape[-2])
    if "value" in arrays and arrays["value"].shape[-3:-1] != key_shape[-3:-1]:
        raise ValueError(f"value must have the key's [S, K] = {key_shape[-3:-1]}, got shape {arrays['value'].shape}")
    return arrays


def _rows(rows: ArrayLike, length: int) -> Int[Array, " r"]:
    rows = checks.integer_array("rows", rows)
    checks.rank("rows", rows, 1, "[R]")
    checks.within("rows", rows, 0, length - 1)
    return rows


class Slots(masks.Mask):
    """Entries that are there at all, by a flag for each query and each key (None: all are)."""

    queries: Bool[Array, "*#b t"] | None
    keys: Bool[Array, "*#b s"] | None

    def evaluate(self, tile: Tile) -> Array:
        there = jnp.ones((1,) * len(tile.sizes), bool)
        for flags in self._flags(tile.square):
            there &= tile.take(flags)
        return there

    def bounds(self, grid: Grid) -> Bounds:
        some = every = grid.constant(True)
        for flags in self._flags(grid.square):
            any_of_them, all_of_them = grid.some_and_every(flags)
            some, every = some & any_of_them, every & all_of_them
        return some, every

    def _flags(self, square: Square) -> list[Array]:
        queries = [] if self.queries is None else [square.per_query("queries", self.queries)]
        return queries + ([] if self.keys is None else [square.per_key("keys", self.keys)])


def _square(
    shape: tuple[int, ...],
    offset: int | ArrayLike,
    query_positions: ArrayLike | None,
    key_positions: ArrayLike | None,
    rows: Array | None,
) -> tuple[Square, masks.Mask | None]:
    """The square with its positions, and the mask of slots that are not empty."""
    *batch, _, query_length, key_length = shape
    square = Square(shape)
    explicit = {
        name: None if x is None else _explicit_positions(name, x, tuple(batch), length)
        for name, x, length in (
            ("query_positions", query_positions, query_length),
            ("key_positions", key_positions, key_length),
        )
    }
    starts = checks.wide_integers("query_offset", offset)
    if starts.ndim:
        checks.shape("query_offset", starts, tuple(batch), "[] or [*B]")
    checks.within("query_offset", starts, -(2**30), 2**31 - 1 - query_length)  # distances fit int32
    queries, keys = explicit["query_positions"], explicit["key_positions"]
    first = offset if isinstance(offset, int) else None  # a number is static: tiles are planned by it
    if queries is not None:
        if first != 0:
            raise ValueError("query_offset and query_positions both say where the queries sit: give one of them")
        first = None
    elif first is None:
        steps = jnp.arange(query_length, dtype=starts.dtype)
        queries = starts[..., None] + steps.reshape((1,) * starts.ndim + (-1,))
    slots = None
    if any(x is not None for x in explicit.values()):
        slots = Slots(*(None if x is None else x >= 0 for x in explicit.values()))
    square = Square(
        shape,
        first,
        None if queries is None else square.per_query("query_positions", queries),
        None if keys is None else square.per_key("key_positions", keys),
        rows,
        keys_in_place=keys is None,
    )
    return square, slots


def _explicit_positions(name: str, x: ArrayLike, batch: tuple[int, ...], length: int) -> Array:
    positions = checks.wide_integers(name, x)
    letter = "T" if name == "query_positions" else "S"
    if positions.shape != (length,):
        checks.shape(name, positions, (*batch, length), f"[{letter}] or [*B, {letter}]")
    checks.within(name, positions, -1, 2**31 - 1)  # -1 is an empty slot
    return positions


def window_pair(window: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """`local_window_size` as (left, right), or None."""
    if window is None:
        return None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"local_window_size must be an int or (left, right), got {window!r}")
        left, right = (checks.positive_int("local_window_size", side, least=0) for side in window)
        return left, right
    width = checks.positive_int("local_window_size", window, least=0)
    return width, width


def _lengths(square: tuple[int, ...], queries: ArrayLike | None, keys: ArrayLike | None) -> masks.Mask | None:
    if queries is None and keys is None:
        return None
    flags = []
    for name, lengths, most in (
        ("query_seq_lengths", queries, square[-2]),
        ("key_value_seq_lengths", keys, square[-1]),
    ):
        if lengths is None:
            flags.append(None)
            continue
        lengths = checks.wide_integers(name, lengths)
        if not square[:-3] and lengths.shape == (1,):  # as jax.nn takes them for unbatched arrays
            lengths = lengths.reshape(())
        if lengths.ndim:
            checks.shape(name, lengths, square[:-3], "[] or [*B]")
        checks.within(name, lengths, 0, most)
        entries = jnp.arange(most, dtype=lengths.dtype).reshape((1,) * lengths.ndim + (-1,))
        flags.append(entries < lengths[..., None])
    return Slots(*flags)


def _check_squares(bias: biases.Bias | None, mask: masks.Mask | None, tile: Tile) -> None:
    """Evaluates shapes only, so that a lazy object of another size is refused by every implementation."""
    if mask is not None:
        jax.eval_shape(lambda: mask.evaluate(tile))
    if bias is not None:
        jax.eval_shape(lambda: bias.evaluate(tile, jnp.float32))


def _scale(scale: float | ArrayLike | None, query: Float[Array, "*b t n h"]) -> float | Array:
    num_heads, head_width = query.shape[-2:]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    if scale is None:
        return 1.0 / math.sqrt(head_width)
    if np.ndim(scale) == 0 and checks.is_concrete(scale):
        number = checks.finite_number("scale", scale)
        if abs(number) > float(jnp.finfo(dtype).max):
            raise ValueError(f"scale must be finite in {dtype}, got {number}")
        return number
    scale = checks.floating_array("scale", scale)
    if scale.ndim:
        checks.shape("scale", scale, (num_heads,), "[] or [N]")
    if checks.is_concrete(scale) and not np.isfinite(np.asarray(scale, np.float64)).all():
        raise ValueError(f"scale must be finite, got {np.asarray(scale)}")
    return scale


def _precision(precision: jax.lax.PrecisionLike) -> jax.lax.PrecisionLike:
    """As it is, if the matrix product takes it; a pair as a tuple, which can be hashed."""
    if precision is not None:
        x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        try:
            jax.eval_shape(lambda a, b: jax.lax.dot(a, b, precision=precision), x, x)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"precision must be None, 'default', 'high', 'highest' or as in jax.lax.dot_general; got {precision!r}"
            ) from error
    return cast(jax.lax.PrecisionLike, tuple(precision) if isinstance(precision, list) else precision)


def _sinks(sinks: ArrayLike, num_heads: int) -> Float[Array, " n"]:
    sinks = checks.floating_array("sinks", sinks)
    checks.shape("sinks", sinks, (num_heads,), "[N]")
    return sinks


def _dropout(rate: float, key: ArrayLike | None) -> Dropout | None:
    rate = checks.rate("dropout_rate", rate)
    if rate == 0.0:
        return None
    if key is None:
        raise ValueError(f"dropout_rng must be a key where dropout_rate > 0, got None at dropout_rate {rate}")
    return Dropout(rate, checks.prng_key("dropout_rng", key))
