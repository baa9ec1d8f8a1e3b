"""What `entropy_over_training` trains: its flags, and what is measured."""

import dataclasses

from experiments.config import Config, option

BY_HEAD = ("entropy", "share")  # measured for each head; `loss` and `held_out` are not


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyConfig(Config):
    """Flags of this experiment."""

    text_sizes: tuple[int, ...] = option(
        (2_000, 8_000, 32_000, 128_000), "characters that are trained on", least=100, most=10**7
    )
    steps: int = option(1200, "steps of a run, a multiple of evaluations", least=2, most=10**6)
    evaluations: int = option(12, "looks at the model after the first, at equal distances", least=2, most=1000)
    evaluation_batches: int = option(8, "batches of a look", least=1, most=1000)
    learning_rate: float = option(0.01, "largest learning rate", least=1e-6, most=10)
    seeds: int = option(5, "independent seeds", least=2, most=1024)
    batch_size: int = option(8, "sequences of a step", least=1, most=1024)
    length: int = option(32, "characters of a sequence", least=2, most=4096)
    num_layers: int = option(2, "layers", least=1, most=64)
    model_width: int = option(32, "model width D, a multiple of 2 num_heads", least=4, most=1024)
    num_heads: int = option(4, "heads", least=2, most=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps % self.evaluations:
            raise ValueError(f"steps must be a multiple of evaluations = {self.evaluations}, got {self.steps}")
        if len(self.sizes) < 3:
            raise ValueError(f"text_sizes must hold at least three sizes, got {self.text_sizes}")
        if self.model_width % (2 * self.num_heads):
            raise ValueError(
                f"model_width must be a multiple of 2 num_heads = {2 * self.num_heads}, got {self.model_width}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the texts, ascending."""
        return tuple(sorted(self.text_sizes))

    @property
    def looks(self) -> tuple[int, ...]:
        """The steps at which the model is looked at."""
        return tuple(range(0, self.steps + 1, self.steps // self.evaluations))

    @property
    def collapse_rate(self) -> float:
        """The learning rate of the runs whose entropy is to collapse."""
        return 10 * self.learning_rate
