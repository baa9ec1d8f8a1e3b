"""What `associative_recall` stores and trains: its flags, and the mechanisms that it compares."""

import dataclasses
from typing import Any

from attn_jax.nn import MixerOptions
from experiments.arms import Budget
from experiments.config import Config, option

PARTS = ("capacity", "one_layer", "multi_query")
STORES = ("softmax", "elu", "relu", "exp", "squared", "identity", "random_features", "retention", "window")
QUICK_STORES = ("softmax", "elu", "identity", "random_features", "retention", "window")
Layers = tuple[tuple[str, ...], dict[str, Any]]  # words, repeated over the layers, and what these leave open
MIXERS: dict[str, Layers] = {  # arms of the trained parts
    "softmax": (("softmax",), {}),
    "linear": (("linear",), {}),
    "random_features": (("linear",), {"feature_map": "random"}),
    "retention": (("retention",), {}),
    "state_space": (("state_space",), {}),
    "window": (("window",), {}),
    "linear_softmax": (("linear", "softmax"), {}),
    "state_space_softmax": (("state_space", "softmax"), {}),
    "window_softmax": (("window", "softmax"), {}),
}
LAYERS = 2  # of the models of multi-query recall
ALONE = tuple(name for name, (words, _) in MIXERS.items() if len(words) == 1)
HYBRIDS = tuple(name for name in MIXERS if name not in ALONE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig(Config):
    """Flags of this experiment."""

    parts: tuple[str, ...] = option(PARTS[:2], "what is measured", choices=PARTS)

    stores: tuple[str, ...] = option(QUICK_STORES, "mechanisms of the capacity without training", choices=STORES)
    widths: tuple[int, ...] = option((16, 32, 64), "head widths d_k of the capacity", least=2, most=256)
    most_pairs: int = option(4096, "most pairs stored, a power of two", least=4, most=2**16)
    queries: int = option(64, "pairs that are asked for, of each number stored", least=8, most=4096)
    features: int = option(256, "random features R", least=2, most=8192)
    simulations: int = option(16, "independent seeds of the capacity", least=2, most=1024)

    arms: tuple[str, ...] = option(
        tuple(name for name in ALONE if name != "window"), "mixers of the one trained layer", choices=ALONE
    )
    pairs: tuple[int, ...] = option((16,), "pairs of a sequence of the one layer, ascending", least=4, most=1024)
    window: int = option(8, "tokens that a window sees", least=1, most=4096)
    model_width: int = option(32, "model width D", least=8, most=1024)
    num_heads: int = option(1, "heads of the one layer", least=1, most=64)
    head_width: int = option(8, "their width d_k, even: with ELU features, each has d_k of them", least=2, most=256)
    rate: float = option(1e-2, "learning rate of the one layer", least=1e-6, most=1)
    steps: int = option(600, "steps of a run of the one layer", least=2, most=100000)
    seeds: int = option(10, "independent runs", least=2, most=1024)
    batch_size: int = option(16, "sequences of a step", least=1, most=1024)

    query_arms: tuple[str, ...] = option(tuple(MIXERS), "mixers of multi-query recall", choices=tuple(MIXERS))
    query_pairs: int = option(4, "pairs of a sequence of multi-query recall", least=3, most=256)
    query_heads: int = option(2, "heads of its models, of width D / h", least=1, most=64)
    query_length: int = option(24, "tokens of it", least=9, most=4096)
    query_rates: tuple[float, ...] = option((3e-3,), "its learning rates", least=1e-6, most=1)
    query_steps: int = option(1500, "steps of a run of it", least=2, most=100000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_pairs & (self.most_pairs - 1):
            raise ValueError(f"most_pairs must be a power of two, got {self.most_pairs}")
        for name, needed in (("stores", ("softmax", "elu")), ("arms", ("softmax", "linear"))):
            if not set(needed) <= set(getattr(self, name)):
                raise ValueError(f"{name} must hold {' and '.join(needed)}, got {getattr(self, name)}")
        if not {"softmax", "linear", "linear_softmax"} <= set(self.query_arms):
            raise ValueError(f"query_arms must hold softmax, linear and linear_softmax, got {self.query_arms}")
        if list(self.pairs) != sorted(set(self.pairs)):
            raise ValueError(f"pairs must ascend, got {self.pairs}")
        if self.query_length < 3 * self.query_pairs:
            raise ValueError(f"query_length must be at least 3 · query_pairs, got {self.query_length}")
        for part in ("one_layer", "multi_query"):
            self.budget(part)  # numbers that do not go together raise here

    @property
    def stored(self) -> tuple[int, ...]:
        """Numbers of pairs, by factors of about √2."""
        powers = [2**i for i in range(2, self.most_pairs.bit_length())]
        between = [3 * 2 ** (i - 1) for i in range(2, self.most_pairs.bit_length() - 1)]
        return tuple(sorted(powers + between))

    def budget(self, part: str) -> Budget:
        """Of an arm of the one layer or of multi-query recall."""
        one = part == "one_layer"
        return Budget(
            steps=self.steps if one else self.query_steps,
            rates=(self.rate,) if one else self.query_rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=2,
        )

    def options(self, arm: str) -> MixerOptions:
        """What the words of an arm leave open."""
        words, own = MIXERS[arm]
        return MixerOptions(**{**own, **({"window": self.window} if "window" in words else {})})
