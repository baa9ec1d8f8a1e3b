"""The flags of `attention_explanation`."""

import dataclasses
from typing import Any

from attn_jax.nn import TransformerConfig
from attn_jax.training.tasks import Lookup, Task
from experiments.arms import Budget
from experiments.attention_explanation.task import Keyword
from experiments.attention_explanation.uniform import uniform_attention
from experiments.claims.explanation import ARMS
from experiments.config import Config, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplanationConfig(Config):
    """Flags of this experiment."""

    arms: tuple[str, ...] = option(tuple(ARMS), "tasks and depths", choices=tuple(ARMS))
    classes: int = option(8, "classes of keywords, and as many fillers", least=2, most=64)
    pairs: int = option(4, "pairs of a look-up", least=2, most=64)
    keys: int = option(16, "keys of a look-up, and as many values, at least pairs", least=2, most=64)
    length: int = option(12, "tokens of a sequence T", least=4, most=1024)
    model_width: int = option(32, "model width D", least=4, most=1024)
    num_heads: int = option(2, "heads", least=1, most=64)
    rates: tuple[float, ...] = option((1e-2,), "learning rates; several are extended at an edge", least=1e-6, most=1)
    steps: int = option(400, "steps of a run", least=2, most=100000)
    seeds: int = option(5, "independent runs", least=2, most=1024)
    batch_size: int = option(32, "sequences of a step", least=1, most=1024)
    evaluation_batches: int = option(4, "of an evaluation", least=1, most=1024)
    examples: int = option(12, "held-out sequences whose weights are changed", least=1, most=1024)
    epsilon: float = option(0.01, "largest change of a prediction, total variation", least=0, most=1)
    climbs: int = option(80, "steps of a search for other weights", least=1, most=10000)
    starts: int = option(4, "of the search", least=1, most=64)
    permutations: int = option(50, "of each row", least=1, most=10000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for arm in ARMS:
            self.transformer(arm)  # numbers that do not go together raise here
        self.budget()

    def task(self, arm: str) -> Task:
        """What an arm learns."""
        if arm == "keyword":
            return Keyword(num_classes=self.classes, length=self.length)
        return Lookup(num_pairs=self.pairs, num_keys=self.keys, num_values=self.keys, length=self.length)

    def transformer(self, arm: str, *, uniform: bool = False) -> TransformerConfig:
        """Its models: without positions, so that a token that is left out leaves no gap."""
        own: dict[str, Any] = {"attention_fn": uniform_attention} if uniform else {}
        return TransformerConfig(
            vocabulary_size=max(self.task(name).vocabulary_size for name in ARMS),  # so that arms share compiles
            num_layers=2 if arm == "deep_lookup" else 1,
            model_width=self.model_width,
            num_heads=self.num_heads,
            mlp_width=2 * self.model_width,
            positions=None,
            head="untied",
            **own,
        )

    def budget(self) -> Budget:
        """Of an arm."""
        return Budget(
            steps=self.steps,
            rates=self.rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=1,
            evaluation_batches=self.evaluation_batches,
        )
