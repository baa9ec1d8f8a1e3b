"""What `instability` sweeps: its flags, its arms, and what is watched."""

import dataclasses

from experiments.config import Config, option

ARMS = {"plain": None, "qk_norm": "rms"}  # the QK-norm of each
MEASURES = ("loss", "logit", "entropy", "gradient_norm", "output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstabilityConfig(Config):
    """Flags of this experiment."""

    learning_rates: tuple[float, ...] = option((0.01, 0.03, 0.1, 0.3, 1.0), "largest learning rates", least=1e-6)
    steps: int = option(400, "steps of a run, a multiple of look", least=8, most=100_000)
    look: int = option(8, "steps that a measurement is the mean of", least=1, most=1000)
    seeds: int = option(16, "independent seeds", least=2, most=1024)
    batch_size: int = option(4, "sequences of a step", least=1, most=1024)
    length: int = option(32, "characters of a sequence", least=2, most=4096)
    num_layers: int = option(2, "layers", least=1, most=64)
    model_width: int = option(32, "model width D", least=4, most=1024)
    num_heads: int = option(2, "heads", least=1, most=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps % self.look:
            raise ValueError(f"steps must be a multiple of look = {self.look}, got {self.steps}")
        if len(self.rates) < 2:
            raise ValueError(f"learning_rates must hold at least two rates, got {self.learning_rates}")
        if self.model_width % (2 * self.num_heads):
            raise ValueError(
                f"model_width must be a multiple of 2 num_heads = {2 * self.num_heads}, got {self.model_width}"
            )

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates, ascending; at the lowest no run is judged, the others are held against it."""
        return tuple(sorted(self.learning_rates))

    @property
    def looks(self) -> int:
        """Measurements of a run."""
        return self.steps // self.look

    @property
    def first(self) -> int:
        """The first look that may alarm: a tenth of the steps, where what is large because training begins is over."""
        return max(self.looks // 10, 1)
