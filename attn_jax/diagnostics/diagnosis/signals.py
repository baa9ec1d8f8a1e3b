"""What can go wrong with the heads of a layer, by what it shows in the measurements."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attn_jax.diagnostics.diagnosis.limits import Limits
from attn_jax.diagnostics.diagnosis.rows import ALL

Array = np.ndarray

SEVERITIES = (None, "information", "notice", "serious")
INFORMATION, NOTICE, SERIOUS = 1, 2, 3
UNIFORM, IDLE = 0.9, 0.9  # heads of such an entropy, or with so much weight on the first key, look alike anyway


class Sight(dict[str, Array]):
    """One row of measurements by name: `[runs, L, N]` of heads, `[runs, L]` of layers; NaN is not known.

    Attributes:
        many: whether the row is of many runs, or `runs` is 1.
        means: `[runs, L]`, running means of the rows before, of the mean entropy and the largest logit of a layer.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        arrays = {name: np.array(row[name], np.float64) for name in row if name not in ("step", "kind")}
        self.many = any(x.ndim == 3 for name, x in arrays.items() if name in ALL)
        self.means: dict[str, Array] = {}
        super().__init__({name: x if self.many else x[None] for name, x in arrays.items()})


@dataclasses.dataclass(frozen=True)
class Signal:
    """What can go beyond a limit.

    Attributes:
        name: which is also that of its limit.
        needs: the measures that it is made of.
        above: whether it goes beyond its limit upwards.
        values: from a `Sight`, `[runs, L, N]` of heads or `[runs, L, 1]` of the layer, NaN where it does not apply.
        grade: from a `Sight` and what is beyond, the severity of each layer, `[runs, L]`, that has something beyond.
        says: what the value is.
        link, mend: which link of the chain it concerns, and what to look at or to do.
        second: the limit beyond which it is serious, if there is one.
    """

    name: str
    needs: tuple[str, ...]
    above: bool
    values: Callable[[Sight, Limits], Array]
    grade: Callable[[Sight, Limits, Array], Array | int]
    says: str
    link: str
    mend: str
    second: str | None = None

    def limit(self, limits: Limits, level: int = 0) -> float | None:
        """What its value is compared with, or what made it so severe."""
        return getattr(limits, self.second if self.second and level == SERIOUS else self.name)

    def judge(self, sight: Sight, limits: Limits) -> tuple[Array, Array]:
        """The severity of each layer, `[runs, L]`, and which of its heads are beyond the limit."""
        values, limit = self.values(sight, limits), self.limit(limits)
        beyond = values > limit if self.above else values < limit
        return np.where(beyond.any(axis=-1), self.grade(sight, limits, beyond), 0), beyond


def _of_layer(x: Array) -> Array:
    return x[..., None]


def mean(x: Array) -> Array:
    """Over the heads that are known."""
    known = np.isfinite(x)
    total = np.where(known, x, 0).sum(axis=-1)
    return np.where(known.any(axis=-1), total / np.maximum(known.sum(axis=-1), 1), np.nan)


def _median(x: Array, *, upper: bool = False) -> Array:
    """The lower one, or the upper, over the heads that are known."""
    ranked, known = np.sort(x, axis=-1), np.isfinite(x).sum(axis=-1, keepdims=True)  # NaN last
    middle = np.clip((known - (0 if upper else 1)) // 2, 0, x.shape[-1] - 1)
    return np.take_along_axis(ranked, middle, axis=-1)[..., 0]


def _divide(x: Array, y: Array) -> Array:
    return np.where(y > 0, x / np.where(y > 0, y, 1), np.nan)


def largest(x: Array) -> Array:
    """Over the heads that are known; -inf where none is."""
    return np.where(np.isfinite(x), x, -np.inf).max(axis=-1)


def _clones(sight: Sight, limits: Limits) -> Array:
    """The distance of heads whose outputs are alike, and whose patterns would not be alike anyway."""
    chooses = (sight["normalized_entropy"] < UNIFORM) & (sight["sink_mass"] < IDLE)
    alike = sight["nearest_similarity"] > limits.clone_similarity
    return np.where(chooses & alike, sight["nearest_distance"], np.nan)


def _dead(sight: Sight, limits: Limits) -> Array:
    norms = sight["output_norm"]
    return _divide(norms, _median(norms.reshape(len(norms), -1), upper=True)[:, None, None])


def _gradient_ratio(sight: Sight, limits: Limits) -> Array:
    query = sight["query_gradient"]
    both = np.hypot(query, sight.get("key_gradient", np.zeros_like(query)))  # W_K is absent where it is tied
    return _of_layer(_divide(both, sight["value_gradient"]))


def _information(sight: Sight, limits: Limits, beyond: Array) -> int:
    return INFORMATION


def _notice(sight: Sight, limits: Limits, beyond: Array) -> int:
    return NOTICE


def _by_second_limit(sight: Sight, limits: Limits, beyond: Array) -> Array | int:
    if limits.serious_max_logit is None:
        return NOTICE
    return np.where(largest(sight["max_logit"]) > limits.serious_max_logit, SERIOUS, NOTICE)


def _with_growing_logits(sight: Sight, limits: Limits, beyond: Array) -> Array:
    """Entropy that falls while large logits grow is the collapse of Zhai et al.; alone it may be a head that learns."""
    grown = _large_logits(sight, limits)
    if limits.logit_growth is not None and "max_logit" in sight:
        grown = grown & (largest(sight["max_logit"]) > limits.logit_growth * sight.means["max_logit"])
    return np.where(grown, SERIOUS, NOTICE)


def _by_heads(sight: Sight, limits: Limits, beyond: Array) -> Array:
    return np.where(_many(limits, beyond), SERIOUS, NOTICE)


def _by_heads_and_logits(sight: Sight, limits: Limits, beyond: Array) -> Array:
    """One sharp head is ordinary, and half of them may have learned a sharp task: large logits must agree."""
    many = _many(limits, beyond)
    return np.where(many & _large_logits(sight, limits), SERIOUS, np.where(many, NOTICE, INFORMATION))


def _many(limits: Limits, beyond: Array) -> Array:
    """A part of the heads, and never one alone."""
    share = np.inf if limits.share_of_heads is None else limits.share_of_heads
    return (beyond.sum(axis=-1) > 1) & (beyond.mean(axis=-1) >= share)


def _large_logits(sight: Sight, limits: Limits) -> Array | np.bool_:
    if limits.max_logit is None or "max_logit" not in sight:
        return np.False_
    return largest(sight["max_logit"]) > limits.max_logit


SIGNALS = (
    Signal(
        "max_logit", ("max_logit",), True,
        lambda sight, limits: sight["max_logit"], _by_second_limit,
        "largest logit", "projections", "QK-norm, clipping, spectral reparametrisation, a lower rate",
        second="serious_max_logit",
    ),
    Signal(
        "sharp_entropy", ("normalized_entropy_no_sink",), False,
        lambda sight, limits: sight["normalized_entropy_no_sink"], _by_heads_and_logits,
        "normalized entropy without the first key", "scale, mask", "the scale, and what the mask leaves visible",
    ),
    Signal(
        "entropy_ratio", ("normalized_entropy",), False,
        lambda sight, limits: _of_layer(_divide(mean(sight["normalized_entropy"]), sight.means["normalized_entropy"])),
        _with_growing_logits,
        "mean entropy as a part of its running mean", "projections, softmax",
        "spectral norms of W_Q and W_K; QK-norm, clipping, a lower rate",
    ),
    Signal(
        "saturated", ("saturated",), True,
        lambda sight, limits: _of_layer(mean(sight["saturated"])), _notice,
        "share of rows with nearly all weight on one key", "softmax",
        "the scale, QK-norm; what the mask leaves visible",
    ),
    Signal(
        "logit_sd", ("logit_sd",), True,
        lambda sight, limits: _of_layer(_median(sight["logit_sd"])), _notice,
        "logit sd of the median head", "scale, projections", "the scale, the norms of queries and keys",
    ),
    Signal(
        "sink_mass", ("sink_mass",), True,
        lambda sight, limits: sight["sink_mass"], _information,
        "mean weight on the first key", "softmax", "usually nothing; a gate or a sink logit",
    ),
    Signal(
        "clone_distance", ("nearest_distance", "nearest_similarity", "normalized_entropy", "sink_mass"), False,
        _clones, _notice,
        "divergence from the nearest head, whose output is alike,", "heads", "fewer heads, or wider ones; shared keys",
    ),
    Signal(
        "dead_output", ("output_norm",), False,
        _dead, _by_heads,
        "output as a part of the median head's", "values, output",
        "value norms, the sink; initialisation of W_V and W_O",
    ),
    Signal(
        "gradient_ratio", ("query_gradient", "value_gradient"), False,
        _gradient_ratio, _notice,
        "gradient of W_Q and W_K as a part of W_V's", "softmax, depth",
        "rank-1 residual by depth; skips, pre-norm, residual scale",
    ),
)  # fmt: skip
