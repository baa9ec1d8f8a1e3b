"""What the mixers of a transformer are made of, besides the sizes that they share with attention."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from attn_jax import checks

# Which words read which choice, of their own or of the sizes of heads.
READERS = {
    "num_kv_heads": {"softmax", "window", "linear", "retention", "routing"},
    "head_width": {"softmax", "window", "linear", "retention", "state_space", "lsh", "routing"},
    "value_width": {"softmax", "window", "linear", "retention", "state_space", "lsh", "routing"},
    "window": {"window"},
    "feature_map": {"linear"},
    "num_features": {"linear"},
    "convolution_width": {"convolution"},
    "state_width": {"state_space"},
    "short_convolution_width": {"state_space"},
    "num_buckets": {"lsh"},
    "num_rounds": {"lsh"},
    "num_clusters": {"routing"},
    "group_window": {"lsh", "routing"},
}
ATTENTION_WORDS = ("softmax", "window")
MIXERS = ("linear", "retention", "state_space", "lsh", "routing", "convolution", "gru")
WORDS = ATTENTION_WORDS + MIXERS
FEATURE_MAPS = ("elu", "relu", "exp", "squared", "random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerOptions:
    """Choices of the mixers; each reads its own. A frozen value that is checked when it is built.

    Attributes:
        window: of "window": keys that a token sees, itself included; without causality as many on each side.
        feature_map: of "linear": "elu", "relu", "exp", "squared", or "random" (positive orthogonal random features).
        num_features: R, of the random features; None: twice the head width.
        convolution_width: of "convolution": tokens that one sees; odd without causality.
        state_width: R of "state_space", rows of each head's state; None: the head width.
        short_convolution_width: of "state_space": tokens that the convolution before the recurrence sees.
        num_buckets, num_rounds: of "lsh": buckets of a round of hashing, 1 or even; rounds that are combined.
        num_clusters: of "routing".
        group_window: of "lsh" and "routing": members of its own bucket or cluster that a token sees, itself included.

    >>> from attn_jax.nn import MixerOptions, TransformerConfig
    >>> sizes = {"vocabulary_size": 9, "num_layers": 2, "model_width": 8, "num_heads": 2}
    >>> config = TransformerConfig(**sizes, mixer="window", mixer_options=MixerOptions(window=3))
    >>> config.layer_attention[0].window  # the token itself and two before it
    (2, 0)
    >>> TransformerConfig(**sizes, mixer="gru", mixer_options=MixerOptions(window=3))
    Traceback (most recent call last):
    ValueError: mixer_options.window has no effect without mixer window, got 3
    """

    window: int = 64
    feature_map: str = "elu"
    num_features: int | None = None
    convolution_width: int = 7
    state_width: int | None = None
    short_convolution_width: int = 4
    num_buckets: int = 8
    num_rounds: int = 2
    num_clusters: int = 8
    group_window: int = 64

    def __post_init__(self) -> None:
        checks.one_of("feature_map", self.feature_map, FEATURE_MAPS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "feature_map" and (value is not None or field.default is not None):
                self._set(field.name, checks.positive_int(field.name, value))
        if self.num_features is not None and self.feature_map != "random":
            raise ValueError(f"num_features has no effect without feature_map='random', got {self.num_features}")
        if self.num_buckets > 1 and self.num_buckets % 2:
            raise ValueError(f"num_buckets must be 1 or even, two for each direction, got {self.num_buckets}")

    def check_read(self, words: Iterable[str]) -> None:
        """Raises if a choice that none of the words reads is not at its default."""
        for field in dataclasses.fields(self):
            readers = READERS[field.name]
            if getattr(self, field.name) != field.default and readers.isdisjoint(words):
                raise ValueError(
                    f"mixer_options.{field.name} has no effect without mixer {' or '.join(sorted(readers))}, "
                    f"got {getattr(self, field.name)!r}"
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
