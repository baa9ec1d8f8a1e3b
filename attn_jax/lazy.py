"""Lazy objects: pytrees that evaluate themselves on a tile of the `[*B, N, T, S]` square when it is needed.

Masks and biases are lazy. What is a number in them is static: hashable and compared by value, so that a freshly built
equal mask shares the trace. What is an array in them (lengths, segment ids, learned tables) is a leaf: it may be
traced, mapped and differentiated.

    Square   the whole problem, and where its queries and keys sit
    Tile     a box of it: a lazy object evaluates itself there
    Grid     all of it cut in tiles: a lazy object says there which are empty and which are full
"""

import dataclasses
import functools
import typing
from typing import Any, Literal, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import checks
from attn_jax.typing import Array, Int

_NUMBERS = (bool, int, float, str, type(None))
Bounds = tuple[Array | np.ndarray, Array | np.ndarray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Square:
    """The `[*B, N, T, S]` square of one problem, and where its queries and keys sit.

    Positions that follow each other from a static number are not stored: they are known before any value is.

    Attributes:
        shape: `(*B, N, T, S)`.
        first_query: the position of query 0, the others follow; None where `query_positions` says it.
        query_positions: int `[*B or 1, 1, T, 1]`, or None.
        key_positions: int `[*B or 1, 1, 1, S]`, or None: key j sits at j.
        rows: int `[R]`, the queries to keep; None keeps all.
        keys_in_place: whether key j sits at position j, so that S is the length of the sequence.
        part_of: the shape of the larger square that this one is a box of, or None.
        origin: int, one for each axis: where it begins there.
    """

    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    first_query: int | None = dataclasses.field(default=0, metadata={"static": True})
    query_positions: Int[Array, "*#b 1 t 1"] | None = None
    key_positions: Int[Array, "*#b 1 1 s"] | None = None
    rows: Int[Array, " r"] | None = None
    keys_in_place: bool = dataclasses.field(default=True, metadata={"static": True})
    part_of: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    origin: Int[Array, " axes"] | None = None

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of the whole problem, of which this may be a part."""
        return self.shape if self.part_of is None else self.part_of

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes `*B`."""
        return self.shape[:-3]

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape that is left when only `rows` are kept."""
        return self.shape if self.rows is None else (*self.shape[:-2], self.rows.shape[0], self.shape[-1])

    def whole(self) -> "Tile":
        """The tile that covers it."""
        return Tile(self, (0,) * len(self.shape), self.kept)

    def keep_rows(self, x: Any) -> Any:
        """`x`, whose axes are those of the square or 1, with only `rows` kept."""
        return x if self.rows is None or x.shape[-2] == 1 else jnp.take(jnp.asarray(x), self.rows, axis=-2)

    def align(self, x: Array, axes: tuple[int, ...], tail: tuple[int, ...]) -> Array:
        """`x`, whose axes are the last of `axes`, with 1 for those it lacks, then `tail`."""
        return x.reshape((1,) * (len(axes) - x.ndim) + x.shape + tail)

    def full_rank(self, name: str, x: Array) -> Array:
        """`x`, `[T, S]` or of full rank and broadcastable to `[*B, N, T, S]`, in full rank.

        Any other rank raises: `[B, T, S]` could as well mean heads.
        """
        checks.rank(name, x, {2, len(self.shape)}, "[T, S] or broadcastable to [*B, N, T, S]")
        if x.ndim == 2:
            x = x.reshape((1,) * (len(self.shape) - 2) + x.shape)
        checks.broadcastable(name, x, self.shape, "[*B, N, T, S]")
        return x

    def per_item(self, name: str, x: Array) -> Array:
        """`x`, a scalar or `[*B]`, as `[*B or 1, 1, 1, 1]`."""
        if x.ndim:
            checks.shape(name, x, self.batch, "[] or [*B]")
        return self.align(x, self.batch, (1, 1, 1))

    def per_query(self, name: str, x: Array) -> Array:
        """`x`, `[T]` or `[*B, T]`, as `[*B or 1, 1, T, 1]`."""
        return self._along(name, x, -2)

    def per_key(self, name: str, x: Array) -> Array:
        """`x`, `[S]` or `[*B, S]`, as `[*B or 1, 1, 1, S]`."""
        return self._along(name, x, -1)

    def per_head(self, name: str, x: Array) -> Array:
        """`x`, `[N]`, as `[1, ..., N, 1, 1]`."""
        checks.shape(name, x, (self.shape[-3],), "[N]")
        return self.align(x, self.shape[:-2], (1, 1))

    def _along(self, name: str, x: Array, axis: int) -> Array:
        length, letter = self.shape[axis], "TS"[axis]
        if x.shape != (length,):
            checks.shape(name, x, (*self.batch, length), f"[{letter}] or [*B, {letter}]")
        aligned = self.align(x, (*self.batch, length), ())
        return jnp.expand_dims(aligned, (-3, -1) if axis == -2 else (-3, -2))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A box of a square, on which a lazy object is evaluated.

    Everything a tile hands out has the full rank of the square, with 1 where an axis does not matter, so that
    pieces combine by plain broadcasting.

    Attributes:
        square: what it is a part of.
        starts, sizes: where the box begins, and how large it is, per axis of the square; starts may be traced.
    """

    square: Square
    starts: tuple[int | Array, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def query_positions(self) -> Int[Array, "*#b 1 t 1"]:
        """Where the tile's queries sit."""
        if self.square.query_positions is not None:
            return self.take(self.square.query_positions)
        assert self.square.first_query is not None
        return self._axis(-2, self.query_indices + self.square.first_query)

    @functools.cached_property
    def key_positions(self) -> Int[Array, "*#b 1 1 s"]:
        """Where the tile's keys sit."""
        if self.square.key_positions is not None:
            return self.take(self.square.key_positions)
        return self._axis(-1, self.key_indices)

    @property
    def query_indices(self) -> Int[Array, " t"]:
        """Which of the T queries these are."""
        rows = self.indices(-2)
        return rows if self.square.rows is None else self.square.rows[rows]

    @property
    def key_indices(self) -> Int[Array, " s"]:
        """Which of the S keys these are."""
        return self.indices(-1)

    def indices(self, axis: int) -> Int[Array, " size"]:
        """Where the tile lies along `axis` of the whole problem (of the kept rows of its square)."""
        indices = jnp.arange(self.sizes[axis], dtype=jnp.int32) + jnp.asarray(self.starts[axis], jnp.int32)
        return indices if self.square.origin is None else indices + self.square.origin[axis]

    def take(self, x: Array) -> Array:
        """The tile's part of `x`, whose axes are those of the square or 1."""
        x = self.square.keep_rows(x)
        starts = tuple(0 if length == 1 else start for length, start in zip(x.shape, self.starts, strict=True))
        sizes = tuple(1 if length == 1 else size for length, size in zip(x.shape, self.sizes, strict=True))
        return x if sizes == x.shape else dynamic_box(x, starts, sizes)

    def full_rank(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, as `Square.full_rank`."""
        return self.take(self.square.full_rank(name, x))

    def per_item(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, as `Square.per_item`."""
        return self.take(self.square.per_item(name, x))

    def per_query(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, as `Square.per_query`."""
        return self.take(self.square.per_query(name, x))

    def per_key(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, as `Square.per_key`."""
        return self.take(self.square.per_key(name, x))

    def per_head(self, name: str, x: Array) -> Array:
        """The tile's part of `x`, as `Square.per_head`."""
        return self.take(self.square.per_head(name, x))

    def _axis(self, axis: int, x: Array) -> Array:
        shape = [1] * len(self.sizes)
        shape[axis] = x.shape[0]
        return x.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A square cut in tiles of `(queries, keys)`, on which a lazy object says which tiles are empty and which full.

    The last tile of an axis ends where the axis ends, so it may overlap the one before: any length will do. What is
    known before any value is (positions that follow each other) is NumPy here, and so is what is derived from it.
    """

    square: Square
    tile: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """How many tiles there are along the queries and along the keys."""
        *_, queries, keys = self.square.kept
        return -(-queries // max(self.tile[0], 1)), -(-keys // max(self.tile[1], 1))

    @functools.cached_property
    def query_range(self) -> Bounds:
        """The smallest and the largest query position of each tile, `[*B or 1, 1, nq, 1]`."""
        positions = self.square.query_positions
        if positions is None:
            assert self.square.first_query is not None
            positions = self._axis(-2, np.arange(self.square.shape[-2], dtype=np.int64) + self.square.first_query)
        positions = self.square.keep_rows(positions)
        return self.reduce(positions, "min"), self.reduce(positions, "max")

    @functools.cached_property
    def key_range(self) -> Bounds:
        """The smallest and the largest key position of each tile, `[*B or 1, 1, 1, nk]`."""
        positions = self.square.key_positions
        if positions is None:
            positions = self._axis(-1, np.arange(self.square.shape[-1], dtype=np.int64))
        return self.reduce(positions, "min"), self.reduce(positions, "max")

    @property
    def queries_follow(self) -> bool:
        """Whether the queries of a tile are known to follow each other without gaps."""
        return self.square.query_positions is None and self.square.rows is None

    def constant(self, value: bool) -> np.ndarray:
        """`value` for every tile."""
        return np.full((1,) * len(self.square.shape), value)

    def some_and_every(self, x: Array) -> Bounds:
        """Whether boolean `x`, whose axes are those of the square or 1, holds somewhere and everywhere in a tile."""
        x = self.square.keep_rows(x)
        return self.reduce(x, "any"), self.reduce(x, "all")

    def reduce(self, x: Any, how: Literal["min", "max", "any", "all"]) -> Any:
        """`x`, whose last two axes are queries and keys (or 1), reduced over each tile."""
        for axis, size in ((x.ndim - 2, self.tile[0]), (x.ndim - 1, self.tile[1])):
            length = x.shape[axis]
            if length <= 1:
                continue
            library = jnp if isinstance(x, jax.Array) else np
            whole = length // size
            head, tail = (slice(None),) * axis, (slice(None),) * (x.ndim - 1 - axis)
            shape = (*x.shape[:axis], whole, size, *x.shape[axis + 1 :])
            parts = getattr(x[(*head, slice(0, whole * size), *tail)].reshape(shape), how)(axis=axis + 1)
            if whole * size < length:
                last = getattr(x[(*head, slice(max(length - size, 0), length), *tail)], how)(axis=axis, keepdims=True)
                parts = library.concatenate([parts, last], axis=axis)
            x = parts
        return x

    def _axis(self, axis: int, x: np.ndarray) -> np.ndarray:
        shape = [1] * len(self.square.shape)
        shape[axis] = x.shape[0]
        return x.reshape(shape)


def dynamic_box(x: Array, starts: tuple[int | Array, ...], sizes: tuple[int, ...]) -> Array:
    """`x` from `starts` on; the box must lie inside, since JAX would move it there in silence."""
    return jax.lax.dynamic_slice(x, _indices(starts), sizes, allow_negative_indices=False)


def put_box(x: Array, box: Array, starts: tuple[int | Array, ...]) -> Array:
    """`x` with `box` from `starts` on; it must fit there."""
    return jax.lax.dynamic_update_slice(x, box, _indices(starts), allow_negative_indices=False)


def _indices(starts: tuple[int | Array, ...]) -> list[Array]:
    return [jnp.asarray(start, jnp.int32) for start in starts]


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
