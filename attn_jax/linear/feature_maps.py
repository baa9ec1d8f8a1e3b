"""Feature maps: what takes the place of exp(q·k) as φ(q)·φ(k).

Each is applied to queries and to keys. Those that are exponentials are given by their logarithm, so that what is
common to a row can be taken out before it overflows or underflows.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attn_jax import checks
from attn_jax.typing import Array, ArrayLike, Float


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """A map of one's own, on the last axis.

    Attributes:
        function: `[..., H]` to features `[..., R]`.
        positive: whether no feature is ever below 0, so that weights can be normalised.

    >>> from attn_jax.linear import FeatureMap, linear_attention
    >>> same = FeatureMap(lambda x: jnp.ones_like(x))  # whatever is in x: every weight is the same
    >>> x, value = jnp.array([[[1.0]], [[2.0]]]), jnp.array([[[3.0]], [[5.0]]])
    >>> linear_attention(x, x, value, feature_map=same)[:, 0, 0].tolist()
    [4.0, 4.0]
    """

    function: Callable[[Array], Array]
    positive: bool = True


@dataclasses.dataclass(frozen=True)
class LogFeatureMap:
    """A map whose features are exponentials.

    Attributes:
        logarithm: `[..., H]` to the logarithms of the features, `[..., R]`.
    """

    logarithm: Callable[[Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomFeatures:
    """Positive random features, whose mean over draws is the softmax kernel: FAVOR+.

        φ(x)_r = exp(ω_r·x' − |x'|²/2) / √R,   x' = x / H^¼,   so that E φ(q)·φ(k) = exp(q·k / √H)

    The relative variance of an estimate grows as exp(|q' + k'|²). So the error falls as 1/√R while |q' + k'|² is about
    2 or less, as for components of standard deviation 0.35 at H = 64, where 4,096 features err by 3%. At 4 it falls
    more slowly; at unit variance and H = 64, where it is 16, 16,384 features err by more than the output.

    Attributes:
        directions: ω, `[R, H]`; made by `draw_features`.

    Reference: Choromanski et al. 2021, lemma 1 and section 2.4.

    >>> from attn_jax.linear import draw_features
    >>> features = draw_features(jax.random.key(0), width=4, count=4096)
    >>> query, key = jnp.exp(features.logarithm(jnp.array([[0.5, 0.0, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]])))
    >>> bool(jnp.allclose(query @ key, jnp.exp(0.25 / 2), rtol=0.05))  # q·k / √H = 0.25 / 2
    True
    """

    directions: Float[Array, "r h"]

    def logarithm(self, x: Float[Array, "*b h"]) -> Float[Array, "*b r"]:
        """Logarithms of the features."""
        count, width = self.directions.shape
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        x = x.astype(dtype) * width**-0.25
        matches = jnp.einsum("...h,rh->...r", x, self.directions.astype(dtype), precision="highest")
        return matches - jnp.sum(x * x, axis=-1, keepdims=True) / 2 - math.log(count) / 2


def draw_features(key: ArrayLike, width: int, count: int, *, orthogonal: bool = True) -> RandomFeatures:
    """Draws the directions of `RandomFeatures`: standard normal, and at right angles within blocks of H.

    Draw again to redraw. Orthogonal directions have the same distribution one by one, and an estimate of smaller
    variance together.

    Args:
        key: PRNG key.
        width: H.
        count: R, the number of features.
        orthogonal: at right angles within blocks, or independent.

    Returns:
        The features, whose `directions` are `[R, H]`.

    Raises:
        ValueError, TypeError: a number below 1 or no integer, or no key.

    Reference: Choromanski et al. 2021, section 2.4.

    >>> from attn_jax.linear import draw_features
    >>> block = draw_features(jax.random.key(0), width=4, count=4096).directions[:4]
    >>> products = block @ block.T
    >>> bool(jnp.allclose(products, jnp.diag(jnp.diag(products)), atol=1e-5))  # at right angles
    True
    """
    key = checks.prng_key("key", key)
    width, count = checks.positive_int("width", width), checks.positive_int("count", count)
    normal = jax.random.normal(jax.random.fold_in(key, 0), (-(-count // width), width, width))
    if not checks.boolean("orthogonal", orthogonal):
        return RandomFeatures(normal.reshape(-1, width)[:count])
    rotation, upper = jnp.linalg.qr(jnp.swapaxes(normal, -1, -2))
    # QR fixes the signs of R's diagonal as it likes; with them positive the rotation is uniform
    signs = jnp.where(jnp.diagonal(upper, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    rotation = rotation * signs[:, None, :]
    lengths = jnp.linalg.norm(jax.random.normal(jax.random.fold_in(key, 1), normal.shape), axis=-1)
    return RandomFeatures((jnp.swapaxes(rotation, -1, -2) * lengths[..., None]).reshape(-1, width)[:count])


def _elu(x: Array) -> Array:
    """elu(x) + 1; by its branches, since 1 + (eˣ − 1) loses a small eˣ."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


FEATURE_MAPS: dict[str, FeatureMap | LogFeatureMap] = {
    "elu": FeatureMap(_elu),
    "relu": FeatureMap(lambda x: jnp.maximum(x, 0)),
    "exp": LogFeatureMap(lambda x: x),
    "squared": FeatureMap(jnp.square),
    "identity": FeatureMap(lambda x: x, positive=False),
}


def get_feature_map(feature_map: "str | FeatureMap | RandomFeatures", width: int, *, normalize: bool):
    """The map by its name or itself, if it suits heads of this width and a normaliser."""
    if isinstance(feature_map, str):
        checks.one_of("feature_map", feature_map, tuple(FEATURE_MAPS))
        found = FEATURE_MAPS[feature_map]
    elif isinstance(feature_map, RandomFeatures):
        checks.rank("feature_map.directions", feature_map.directions, 2, "[R, H]")
        checks.shape(
            "feature_map.directions", feature_map.directions, (feature_map.directions.shape[0], width), "[R, H]"
        )
        return feature_map
    elif isinstance(feature_map, FeatureMap):
        found = feature_map
    else:
        raise TypeError(
            f"feature_map must be one of {', '.join(FEATURE_MAPS)}, a RandomFeatures or a FeatureMap, got "
            f"{type(feature_map).__name__}"
        )
    if normalize and isinstance(found, FeatureMap) and not found.positive:
        raise ValueError(
            f"feature_map must be positive where normalize is True, got {feature_map!r}: its weights can sum to 0"
        )
    return found
