"""What `path_length` trains: its flags, and what every part of it holds."""

import dataclasses
from typing import Any

from attn_jax.nn import TransformerConfig
from attn_jax.nn.mixers import MixerOptions
from experiments.arms import Budget
from experiments.claims.inductive import ARMS
from experiments.config import Config, option
from experiments.path_length.task import Reach

WORDS = {"attention": "softmax", "gru": "gru", "convolution": "convolution"}  # of `TransformerConfig.mixer`


@dataclasses.dataclass(frozen=True, kw_only=True)
class PathLengthConfig(Config):
    """Flags of this experiment."""

    arms: tuple[str, ...] = option(tuple(ARMS), "what mixes tokens", choices=tuple(ARMS))
    distances: tuple[int, ...] = option((3, 20), "from a symbol to where it is asked, ascending", least=1, most=4096)
    num_symbols: int = option(8, "symbols of the tasks", least=2, most=256)
    length: int = option(24, "tokens of a sequence T", least=4, most=4096)
    layers: int = option(2, "layers L", least=1, most=16)
    model_width: int = option(32, "model width D", least=8, most=1024)
    num_heads: int = option(2, "heads of attention", least=1, most=64)
    width: int = option(7, "tokens k that a convolution sees", least=2, most=64)
    rates: tuple[float, ...] = option((1e-2,), "learning rates; several are extended at an edge", least=1e-6, most=1)
    steps: int = option(400, "steps of a run", least=2, most=100000)
    seeds: int = option(10, "independent runs", least=2, most=1024)
    batch_size: int = option(8, "sequences of a step", least=1, most=1024)
    evaluation_batches: int = option(16, "of an evaluation", least=1, most=1024)
    sequences: int = option(16, "held-out sequences whose gradients are taken", least=1, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.distances) < 2 or list(self.distances) != sorted(set(self.distances)):
            raise ValueError(f"distances must ascend and be two or more, got {self.distances}")
        if self.length <= self.far:
            raise ValueError(f"length must be more than the largest distance, {self.far}, got {self.length}")
        if self.reach >= self.length - 1:
            raise ValueError(
                f"length must be more than the convolution's reach and one, {self.reach + 1}, got {self.length}"
            )
        self.transformer("attention")  # numbers that do not go together raise here
        _ = self.budget

    @property
    def near(self) -> int:
        """The smallest distance."""
        return self.distances[0]

    @property
    def far(self) -> int:
        """The largest."""
        return self.distances[-1]

    @property
    def reach(self) -> int:
        """How far back the convolutions see."""
        return self.layers * (self.width - 1)

    @property
    def budget(self) -> Budget:
        """Of an arm on a task."""
        return Budget(
            steps=self.steps,
            rates=self.rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=1,
            evaluation_batches=self.evaluation_batches,
        )

    @property
    def tasks(self) -> list[tuple[str, int]]:
        """What is trained: copying at each distance, and holding over the largest."""
        return [("copy", distance) for distance in self.distances] + [("hold", self.far)]

    def task(self, kind: str, distance: int) -> Reach:
        """Copying ("copy") or holding ("hold") over a distance; all of them share their compiles."""
        return Reach.of(kind, distance, num_symbols=self.num_symbols, length=self.length)

    def transformer(self, arm: str) -> TransformerConfig:
        """The models of an arm."""
        word = WORDS[arm]
        own: dict[str, Any] = {"use_bias": "attention", "positions": None} if arm == "gru" else {}
        if arm == "convolution":
            own = {"mixer_options": MixerOptions(convolution_width=self.width), "positions": None}
        return TransformerConfig(
            vocabulary_size=2 * self.num_symbols,
            num_layers=self.layers,
            model_width=self.model_width,
            num_heads=self.num_heads,
            mlp_width=2 * self.model_width,
            mixer=word,
            head="untied",  # so that the embedding can be exchanged for what gradients are taken of
            **own,
        )
