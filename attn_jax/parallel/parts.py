"""Which axes of the `[*B, N, T, S]` square an array has, and how a part is cut from it.

The jaxtyping letters of a field say it: `lengths: Int[ArrayLike, "*b"]` of a mask has an entry for each item of the
batch, `key_ids: Int[ArrayLike, "*#b s"]` one for each key. So masks and biases need not know of devices. Here an axis
is spelled by a letter in a `PartitionSpec`, and by None if each device has all of it:

    b   items of the batch       n   heads
    t   queries: a device has its own
    k   keys and values: a device has those that visit it
    s   what masks and biases say of keys: a device has all of it, and cuts out that of the visiting keys
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attn_jax import masks
from attn_jax.exact.steps import Differentiable, Fixed
from attn_jax.lazy import Square, dynamic_box, put_box
from attn_jax.typing import Array

Place = Mapping[Any, tuple[Array | int, int]]  # by letter: where a part begins along that axis, and its size


def letters_of(differentiable: Differentiable, fixed: Fixed) -> tuple[Any, Any]:
    """The letters of every array, in the structure of both."""
    square, scale = fixed.square, differentiable.scale
    batch = ("b", *(None,) * (len(square.batch) - 1)) if square.batch else ()
    query, key = (PartitionSpec(*batch, letter, "n") for letter in "tk")
    return (
        dataclasses.replace(
            differentiable,
            query=query,
            key=key,
            value=key,
            bias=spelled(differentiable.bias, square),
            scale=None if scale is None else PartitionSpec(*"n" * scale.ndim),
        ),
        Fixed(
            spelled(fixed.mask, square),
            spelled(square, square),
            None if fixed.dropout_key is None else PartitionSpec(),  # pyright: ignore[reportArgumentType]
        ),
    )


def with_ids_of_keys(mask: masks.Mask | None) -> masks.Mask | None:
    """The same mask, in which segments of queries that serve the keys too are written twice, to be cut both ways."""

    def one(mask: masks.Mask) -> masks.Mask:
        if isinstance(mask, masks.Segments) and mask.key_ids is None:
            return masks.Segments(mask.query_ids, mask.query_ids)
        return mask

    return jax.tree.map(one, mask, is_leaf=lambda x: isinstance(x, masks.Segments))


def letters_of_gradients(differentiable: Differentiable, letters: Any) -> dict[str, Any]:
    """The letters of what `blockwise.backward` returns: of a bias its floating leaves, of a scale one for each head."""
    leaves, spellings = jax.tree.leaves(differentiable.bias), jax.tree.leaves(letters.bias)
    return {
        "query": letters.query,
        "key": letters.key,
        "value": letters.value,
        "bias": [s for x, s in zip(leaves, spellings, strict=True) if jnp.issubdtype(jnp.result_type(x), jnp.floating)],
        "scale": None if differentiable.scale is None else PartitionSpec("n"),
        "sinks": None,
    }


def spelled(tree: Any, square: Square) -> Any:
    """The letters of the arrays in a mask, a bias or a square."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    found = []
    for path, leaf in leaves:
        owner = functools.reduce(lambda x, key: getattr(x, key.name), path[:-1], tree)
        field = next(field for field in dataclasses.fields(owner) if field.name == path[-1].name)
        found.append(_letters(f"{type(owner).__name__}.{field.name}", field.type, jnp.shape(leaf)))
    return jax.tree.unflatten(structure, found)


def _letters(name: str, annotation: Any, shape: tuple[int, ...]) -> PartitionSpec:
    kinds = typing.get_args(annotation) or (annotation,)
    spelling = next((kind.dim_str for kind in kinds if hasattr(kind, "dim_str")), None)
    if spelling is None and shape:
        raise TypeError(
            f"{name} must be annotated with its axes to be cut, as Bool[Array, '*b s'] is, got {annotation}"
        )
    if spelling == "...":  # as `Square.full_rank` reads it
        spelling = "t s" if len(shape) == 2 else "*b n t s"
    tokens = (spelling or "").replace("*", "").replace("#", "").split()
    letters: list[str | None] = []
    for token in tokens:
        if token == "b":
            lead = len(shape) - len(tokens) + 1
            letters += ["b", *[None] * lead][:lead]  # of several axes the first is shared
        else:
            letters.append(token if token in ("n", "t", "s") else None)
    return PartitionSpec(*(None if length == 1 else letter for letter, length in zip(letters, shape, strict=True)))


def pad(x: Array, letters: PartitionSpec, lengths: Mapping[str, int]) -> Array:
    """`x` with zeros up to these lengths of its axes."""
    missing = [(0, lengths.get(letter, length) - length) for letter, length in zip(letters, x.shape, strict=False)]
    if not any(after for _, after in missing):
        return x
    return jnp.pad(x, missing + [(0, 0)] * (x.ndim - len(missing)))


def cut(x: Array, letters: PartitionSpec, place: Place) -> Array:
    """The part of `x` at a place."""
    box = _box(x, letters, place)
    return x if box is None else dynamic_box(x, *box)


def put(total: Array, x: Array, letters: PartitionSpec, place: Place) -> Array:
    """`total` with `x` at a place."""
    box = _box(total, letters, place)
    return x if box is None else put_box(total, x, box[0])


def add(total: Array, x: Array, letters: PartitionSpec, place: Place) -> Array:
    """`total` with `x` added at a place."""
    return put(total, cut(total, letters, place) + x, letters, place)


def _box(x: Array, letters: PartitionSpec, place: Place) -> tuple[tuple, tuple] | None:
    """Starts and sizes of the part; None if it is the whole."""
    if not any(letter in place for letter in letters):
        return None
    letters_of_all = (*letters, *(None,) * (x.ndim - len(letters)))
    boxes = [place.get(letter, (0, length)) for letter, length in zip(letters_of_all, x.shape, strict=True)]
    return tuple(start for start, _ in boxes), tuple(size for _, size in boxes)
