"""The flags of `tune`: the model, what it learns, and how long."""

import dataclasses
import functools

from attn_jax.nn import TransformerConfig
from attn_jax.training import tasks
from attn_jax.training.tasks import Task
from experiments.arms import Budget
from experiments.config import Config, option

HEAD_WIDTHS = (32, 64, 128)  # what practice knows to serve; others are a matter for `experiments.heads`


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """Flags of this experiment."""

    width: int = option(256, "model width D, a multiple of 32", least=32, most=4096)
    task: str = option("recall", "what is learned", choices=("recall", "copy", "text"))
    layers: int = option(2, "blocks", least=1, most=64)
    length: int = option(48, "tokens of a sequence", least=18, most=4096)
    symbols: int = option(16, "of copy; keys, and as many values, of recall", least=6, most=10_000)
    batch_size: int = option(8, "sequences of a step", least=1)
    steps: int = option(300, "of each run, a multiple of 4", least=4)
    rates: tuple[float, ...] = option((1e-3,), "largest learning rates, ascending by one factor", least=1e-8, most=1)
    seeds: int = option(3, "runs of each head width", least=2, most=64)
    long: int = option(2048, "tokens of the long sequence", least=64, most=65536)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % HEAD_WIDTHS[0]:
            raise ValueError(f"width must be a multiple of {HEAD_WIDTHS[0]}, got {self.width}")
        self.budget  # noqa: B018 - raises on steps and rates that do not fit
        self.make_task()

    @property
    def candidates(self) -> tuple[int, ...]:
        """Head widths that divide the model width: N = D / H heads."""
        return tuple(width for width in HEAD_WIDTHS if self.width % width == 0)

    @property
    def budget(self) -> Budget:
        """Of each head width."""
        return Budget(steps=self.steps, rates=self.rates, seeds=self.seeds, seed=self.seed, batch_size=self.batch_size)

    def make_task(self) -> Task:
        """What is learned."""
        return _task(self.task, self.length, self.symbols)

    def model(self, head_width: int) -> TransformerConfig:
        """Equal in all but the heads: projections of any split have the same size."""
        return TransformerConfig(
            vocabulary_size=self.make_task().vocabulary_size,
            num_layers=self.layers,
            model_width=self.width,
            num_heads=self.width // head_width,
            mlp_width=2 * self.width,
        )


@functools.cache
def _task(name: str, length: int, symbols: int) -> Task:
    if name == "text":
        return tasks.language_model(tasks.read_text(), length=length)[0]
    if name == "copy":
        return tasks.Copy(num_symbols=symbols, distance=length // 3, length=length)
    return tasks.Recall(num_pairs=min(symbols // 2, length // 6), num_keys=symbols, num_values=symbols, length=length)
