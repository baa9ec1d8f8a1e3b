"""The axis legend, once, and the array aliases of every signature.

    B  batch: any number of leading axes, written `*b` in a shape
    T  query length                 S  key/value length
    N  query heads                  K  key/value heads        G = N // K
    H  query/key head width         V  value head width
    D  model width                  R  feature or rank width

A query is `[*B, T, N, H]`, a key `[*B, S, K, H]`, a value `[*B, S, K, V]`: the layout of
`jax.nn.dot_product_attention`. Logits, weights and masks are `[*B, N, T, S]`.

jaxtyping shapes in a signature use the same letters in lower case: `Float[Array, "*b t n h"]`.
"""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Num, UInt8

__all__ = ["Array", "ArrayLike", "Bool", "Float", "Int", "Num", "UInt8"]
