"""Lazy objects: pytrees that evaluate themselves on a tile of the `[*B, N, T, S]` square when it is needed.

Masks and biases are lazy. What is a number in them is static: hashable and compared by value, so that a freshly built
equal mask shares the trace. What is an array in them (lengths, segment ids, learned tables) is a leaf: it may be
traced, mapped and differentiated.
"""

import dataclasses
import typing
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, Int

_NUMBERS = (bool, int, float, str, type(None))


@dataclasses.dataclass(frozen=True)
class Tile:
    """The queries and keys on which a lazy object is evaluated, and where they sit.

    Everything a tile hands out has the full rank of the square, with 1 where an axis does not matter, so that
    pieces combine by plain broadcasting.

    Attributes:
        square: shape `(*B, N, T, S)` of the whole problem, of which this is a part.
        keys_in_place: whether key j sits at position j, so that S is the length of the sequence.
        query_positions: int `[*B or 1, 1, t, 1]`, the positions of the tile's queries.
        key_positions: int `[*B or 1, 1, 1, s]`.
        query_indices: int `[t]`, which of the T queries these are; None for all of them.
        key_indices: int `[s]`, which of the S keys; None for all of them.
    """

    square: tuple[int, ...]
    query_positions: Int[Array, "*#b 1 t 1"]
    key_positions: Int[Array, "*#b 1 1 s"]
    query_indices: Int[Array, " t"] | None = None
    key_indices: Int[Array, " s"] | None = None
    keys_in_place: bool = True

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes `*B`."""
        return self.square[:-3]

    def take(self, x: Array) -> Array:
        """The tile's part of `x`, whose axes are those of the square or 1."""
        if self.query_indices is not None and x.shape[-2] != 1:
            x = jnp.take(x, self.query_indices, axis=-2)
        if self.key_indices is not None and x.shape[-1] != 1:
            x = jnp.take(x, self.key_indices, axis=-1)
        return x

    def full_rank(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, an array `[T, S]` or of full rank, broadcastable to `[*B, N, T, S]`.

        Any other rank raises: `[B, T, S]` could as well mean heads.
        """
        checks.rank(name, x, {2, len(self.square)}, "[T, S] or broadcastable to [*B, N, T, S]")
        if x.ndim == 2:
            x = x.reshape((1,) * (len(self.square) - 2) + x.shape)
        checks.broadcastable(name, x, self.square, "[*B, N, T, S]")
        return self.take(x)

    def per_item(self, name: str, x: Array) -> Array:
        """`x`, a scalar or `[*B]`, as `[*B or 1, 1, 1, 1]`."""
        if x.ndim:
            checks.shape(name, x, self.batch, "[] or [*B]")
        return _align(x, self.batch, (1, 1, 1))

    def per_query(self, name: str, x: Array) -> Array:
        """`x`, `[T]` or `[*B, T]`, as `[*B or 1, 1, t, 1]`."""
        return self.take(_along(name, x, self.square, -2))

    def per_key(self, name: str, x: Array) -> Array:
        """`x`, `[S]` or `[*B, S]`, as `[*B or 1, 1, 1, s]`."""
        return self.take(_along(name, x, self.square, -1))

    def per_head(self, name: str, x: Array) -> Array:
        """`x`, `[N]`, as `[1, ..., N, 1, 1]`."""
        checks.shape(name, x, (self.square[-3],), "[N]")
        return _align(x, (*self.batch, self.square[-3]), (1, 1))


def whole(
    square: tuple[int, ...],
    query_positions: Int[Array, "*#b t"],
    key_positions: Int[Array, "*#b s"],
    *,
    query_indices: Int[Array, " r"] | None = None,
    keys_in_place: bool = True,
) -> Tile:
    """The tile that covers the square, or the rows `query_indices` of it.

    Args:
        square: `(*B, N, T, S)`.
        query_positions: int `[T]` or `[*B, T]`, for every query of the square.
        key_positions: int `[S]` or `[*B, S]`.
        query_indices: int `[R]`, the rows to keep; None keeps all.
        keys_in_place: as in `Tile`.

    Raises:
        ValueError: positions of another shape.
    """
    queries = _along("query_positions", query_positions, square, -2)
    keys = _along("key_positions", key_positions, square, -1)
    if query_indices is not None:
        queries = jnp.take(queries, query_indices, axis=-2)
    return Tile(square, queries, keys, query_indices, keys_in_place=keys_in_place)


def _along(name: str, x: Array, square: tuple[int, ...], axis: int) -> Array:
    """`x`, `[T]` or `[*B, T]`, in the square's rank along its T (axis -2) or S (axis -1)."""
    length, letter = square[axis], "TS"[axis]
    if x.shape != (length,):
        checks.shape(name, x, (*square[:-3], length), f"[{letter}] or [*B, {letter}]")
    aligned = _align(x, (*square[:-3], length), ())
    return jnp.expand_dims(aligned, (-3, -1) if axis == -2 else (-3, -2))


def _align(x: Array, axes: tuple[int, ...], tail: tuple[int, ...]) -> Array:
    """`x`, whose axes are the last of `axes`, with 1 for those it lacks, then `tail`."""
    return x.reshape((1,) * (len(axes) - x.ndim) + x.shape + tail)


@dataclass_transform(frozen_default=True, eq_default=False)
class Lazy:
    """Base of masks and biases: makes each subclass a frozen dataclass and a pytree.

    A field annotated as a number is static, one annotated as a mask, a bias or an array is a child. One annotated as
    either is what it holds when it is built.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, lambda static, children: _build(cls, static, children)
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, my_structure = jax.tree_util.tree_flatten(self)
        theirs, their_structure = jax.tree_util.tree_flatten(other)
        return my_structure == their_structure and all(a is b for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        return hash(jax.tree_util.tree_structure(self))

    def __bool__(self) -> bool:
        raise TypeError(f"{type(self).__name__} has no truth value: combine masks by &, | and ~, and biases by +")


def _static_names(lazy: Lazy) -> tuple[str, ...]:
    if not hasattr(lazy, "_static"):
        names = []
        for field in dataclasses.fields(lazy):  # pyright: ignore[reportArgumentType]
            kinds = typing.get_args(field.type) or (field.type,)
            number = [kind in _NUMBERS for kind in kinds]
            if all(number) or (any(kind is int for kind in kinds) and isinstance(getattr(lazy, field.name), int)):
                names.append(field.name)
        object.__setattr__(lazy, "_static", tuple(names))
    return lazy._static  # pyright: ignore[reportAttributeAccessIssue]


def _flatten_with_keys(lazy: Lazy) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, Any], ...]]:
    static, children = _static_names(lazy), []
    for field in dataclasses.fields(lazy):  # pyright: ignore[reportArgumentType]
        if field.name not in static:
            children.append((jax.tree_util.GetAttrKey(field.name), getattr(lazy, field.name)))
    return children, tuple((name, getattr(lazy, name)) for name in static)


def _build(cls: type[Lazy], static: tuple[tuple[str, Any], ...], children: Any) -> Lazy:
    # Past the constructor and its checks: JAX also unflattens with placeholders in place of arrays.
    lazy = object.__new__(cls)
    names = [name for name, _ in static]
    others = [field.name for field in dataclasses.fields(cls) if field.name not in names]  # pyright: ignore[reportArgumentType]
    for name, value in [*static, *zip(others, children, strict=True), ("_static", tuple(names))]:
        object.__setattr__(lazy, name, value)
    return lazy
