"""Squares whose positions are written out."""

from attn_jax.lazy import Square


def whole(shape, query_positions, key_positions, *, query_indices=None, keys_in_place=True):
    """The tile that covers a square, or the rows `query_indices` of it; `query_positions` `[T]` or `[*B, T]`."""
    square = Square(shape)
    return Square(
        shape,
        None,
        square.per_query("query_positions", query_positions),
        square.per_key("key_positions", key_positions),
        query_indices,
        keys_in_place,
    ).whole()
