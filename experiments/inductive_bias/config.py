"""What `inductive_bias` trains: its flags, and models of equal parameters."""

import dataclasses
import math
from typing import Any

import jax
from flax import nnx

from attn_jax.nn import Transformer, TransformerConfig
from attn_jax.nn.mixers import MixerOptions
from attn_jax.training.tasks.images import LENGTH
from experiments.arms import Budget
from experiments.claims.inductive import ARMS
from experiments.config import Config, option

PARTS = ("digits", "series")
WORDS = {"attention": "softmax", "gru": "gru", "convolution": "convolution"}  # of `TransformerConfig.mixer`


@dataclasses.dataclass(frozen=True, kw_only=True)
class InductiveBiasConfig(Config):
    """Flags of this experiment."""

    arms: tuple[str, ...] = option(tuple(ARMS), "what mixes tokens", choices=tuple(ARMS))
    images: tuple[int, ...] = option((100, 1437), "training images, ascending", least=1, most=1437)
    series: tuple[int, ...] = option((64, 1024), "training series, ascending", least=1, most=65536)
    held_out: int = option(240, "held-out images, and series, of an evaluation", least=1, most=360)
    levels: int = option(16, "levels of the series", least=2, most=256)
    series_length: int = option(20, "steps of a series", least=2, most=1024)
    layers: int = option(2, "layers", least=1, most=16)
    model_width: int = option(24, "model width D", least=8, most=1024)
    num_heads: int = option(2, "heads of attention", least=1, most=64)
    width: int = option(9, "steps that a convolution sees", least=2, most=64)
    rates: tuple[float, ...] = option((2e-3, 6e-3, 2e-2), "learning rates, extended at an edge", least=1e-6, most=1)
    steps: int = option(240, "steps of a run on digits", least=2, most=100000)
    series_steps: int = option(160, "steps of a run on series", least=2, most=100000)
    evaluations: int = option(8, "of a run, at the best of which it is judged", least=1, most=100)
    seeds: int = option(5, "independent runs", least=2, most=1024)
    batch_size: int = option(16, "sequences of a step", least=1, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("images", "series"):
            sizes = getattr(self, name)
            if len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must ascend and be two or more, got {sizes}")
        if self.held_out % self.batch_size:
            raise ValueError(f"held_out must be a multiple of batch_size = {self.batch_size}, got {self.held_out}")
        for part in PARTS:  # numbers that do not go together raise here
            self.budget(part)
            for arm in self.arms:
                self.transformer(arm, part)

    def sizes(self, part: str) -> tuple[int, ...]:
        """Of the training sets."""
        return self.images if part == "digits" else self.series

    def budget(self, part: str) -> Budget:
        """Of an arm on a training set."""
        return Budget(
            steps=self.steps if part == "digits" else self.series_steps,
            rates=self.rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=self.evaluations,
            evaluation_batches=self.held_out // self.batch_size,
            stop_early=True,  # few images are learned by heart
        )

    def transformer(self, arm: str, part: str) -> TransformerConfig:
        """The models of an arm, with an MLP as wide as makes them as large as those of attention."""
        wanted = count_parameters(self._sized("attention", part, 2 * self.model_width))
        narrow = self._sized(arm, part, 1)
        each = 3 * self.model_width * self.layers  # parameters of one more column of every MLP
        width = 1 + round((wanted - count_parameters(narrow)) / each)
        if width < 1:
            raise ValueError(
                f"model_width must be larger for {arm} to be as small as attention, got {self.model_width}"
            )
        return dataclasses.replace(narrow, mlp_width=width)

    def _sized(self, arm: str, part: str, mlp_width: int) -> TransformerConfig:
        length = LENGTH if part == "digits" else self.series_length
        own: dict[str, Any] = {
            "attention": {"positions": "learned", "max_length": length},
            "gru": {"positions": None, "use_bias": "attention"},
            "convolution": {"positions": None, "mixer_options": MixerOptions(convolution_width=self.width)},
        }[arm]
        return TransformerConfig(
            vocabulary_size=3**4 + 10 if part == "digits" else self.levels,
            num_layers=self.layers,
            model_width=self.model_width,
            num_heads=self.num_heads,
            mlp_width=mlp_width,
            mixer=WORDS[arm],
            **own,
        )


def count_parameters(config: TransformerConfig) -> int:
    """Of a transformer, by the shapes that it would have."""
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
