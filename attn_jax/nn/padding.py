"""Padded batches: items of which only the first few entries count."""

from typing import Any

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.positions import DynamicNTK
from attn_jax.typing import Array, ArrayLike, Bool, Float, Int


def check_lengths(name: str, lengths: ArrayLike, batch: tuple[int, ...], most: int, scaling: Any) -> Int[Array, "*b"]:
    """`lengths` as int `[*B]`, each in 0..most; refused with a rotary `scaling` that is a `DynamicNTK`."""
    if isinstance(scaling, DynamicNTK):
        # Its frequencies are those of one length, which is known when the program is traced.
        raise ValueError(
            f"{name} must be None with a rotary_scaling of DynamicNTK, which turns all items by the length of the "
            "padded batch: pass items of one length together, without padding"
        )
    array = checks.wide_integers(name, lengths)
    if not batch and array.shape == (1,):  # as `dot_product_attention` takes them for unbatched arrays
        array = array.reshape(())
    if array.ndim:
        checks.shape(name, array, batch, "[*B]")
    checks.within(name, array, 0, most)
    return jnp.broadcast_to(array, batch)


def counts(lengths: Int[Array, "*b"], length: int) -> Bool[Array, "*b t"]:
    """Which of `length` entries of each item count."""
    steps = jnp.arange(length, dtype=lengths.dtype)
    return steps.reshape((1,) * lengths.ndim + (-1,)) < lengths[..., None]


def without_padding(x: Float[Array, "*b t d"], lengths: Int[Array, "*b"] | None) -> Float[jax.Array, "*b t d"]:
    """`x` with 0 past the lengths, lest a NaN there reach the gradients of the weights by `0 · NaN`."""
    return x if lengths is None else jnp.where(counts(lengths, x.shape[-2])[..., None], x, 0)
