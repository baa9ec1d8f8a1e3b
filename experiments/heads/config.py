"""The flags of `heads`: what is counted, fitted and trained."""

import dataclasses

from experiments.arms import Budget
from experiments.benchmarks.timing import LEAST_ROUNDS
from experiments.config import Config, option

COMMON = (32, 128)  # the head widths that are said to be best
LAYERS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsConfig(Config):
    """Flags of this experiment."""

    cost_width: int = option(512, "model width D whose cost is counted", least=2, most=8192)
    cost_heads: tuple[int, ...] = option((1, 2, 4, 8, 16, 32, 64), "numbers of heads, divisors of it", least=1)
    cost_length: int = option(256, "tokens whose cost is counted", least=2, most=8192)
    rounds: int = option(9, "rounds of time", least=LEAST_ROUNDS, most=1000)

    fit_lengths: tuple[int, ...] = option(
        (64,), "sizes n of the patterns that a head is fitted to", least=32, most=1024
    )
    fit_dims: tuple[int, ...] = option((2, 4, 8, 16, 32), "head widths d_k of the fits", least=1, most=1024)
    fit_steps: int = option(500, "steps of a fit", least=10, most=100000)
    hot: int = option(4, "k of k keys out of n", least=2, most=16)

    seen_width: int = option(512, "model width D of the Jacobians", least=2, most=4096)
    seen_heads: int = option(8, "heads of the Jacobians, a divisor of it", least=2, most=64)
    seen_length: int = option(8, "tokens of the Jacobians", least=2, most=64)
    simulations: int = option(16, "independent seeds of fits and Jacobians", least=2, most=1024)

    model_width: int = option(32, "model width D of the language model", least=32, most=1024)
    splits: tuple[int, ...] = option((1, 4, 16), "numbers of heads h at h·d_k = D", least=1)
    num_heads: int = option(4, "h where only d_k differs, one of the splits", least=2, most=64)
    grid_heads: tuple[int, ...] = option((4,), "numbers of heads that are tried with every one of grid_dims", least=1)
    grid_dims: tuple[int, ...] = option((32,), "head widths d_k, even", least=2, most=1024)
    length: int = option(32, "characters of a sequence", least=4, most=1024)
    rates: tuple[float, ...] = option((5e-3, 1e-2, 2e-2), "learning rates, extended at an edge", least=1e-6, most=1)
    steps: int = option(100, "steps of a run", least=2, most=100000)
    seeds: int = option(5, "independent runs", least=2, most=1024)
    batch_size: int = option(8, "sequences of a step", least=1, most=1024)
    evaluation_batches: int = option(8, "of an evaluation", least=1, most=1024)
    sequences: int = option(2, "held out, whose patterns are compared", least=1, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, heads, width in (
            ("cost_heads", self.cost_heads, self.cost_width),
            ("seen_heads", (self.seen_heads,), self.seen_width),
            ("splits", self.splits, self.model_width),
        ):
            if wrong := [h for h in heads if width % h]:
                raise ValueError(f"{name} must divide the width, {width}; got {wrong[0]}")
        if len(self.cost_heads) < 2:
            raise ValueError(f"cost_heads must hold at least two numbers, got {self.cost_heads}")
        for n in self.fit_lengths:
            if n % 8 or n // 8 not in self.fit_dims or 2 * self.hot > n // 8:
                raise ValueError(
                    f"fit_lengths must hold n with n/8 among fit_dims, {self.fit_dims}, and at least 2·hot = "
                    f"{2 * self.hot}; got {n}"
                )
        for name, heads in (("splits", self.splits), ("grid_heads", self.grid_heads)):
            if self.num_heads not in heads:
                raise ValueError(f"{name} must hold num_heads = {self.num_heads}, got {heads}")
        if odd := [width for _, width in self.arms if width % 2]:
            raise ValueError(f"head widths must be even, as rotary positions need, got {odd[0]}")
        _ = self.budget  # numbers that do not go together raise here

    @property
    def arms(self) -> tuple[tuple[int, int], ...]:
        """All `(h, d_k)` that are trained."""
        split = {(heads, self.model_width // heads) for heads in self.splits}
        return tuple(sorted(split | {(heads, width) for heads in self.grid_heads for width in self.grid_dims}))

    @property
    def split_widths(self) -> dict[int, tuple[int, int]]:
        """The arms at h·d_k = D by head width, ascending."""
        split = sorted((width, heads) for heads, width in self.arms if heads * width == self.model_width)
        return {width: (heads, width) for width, heads in split}

    @property
    def alone_widths(self) -> dict[int, tuple[int, int]]:
        """The arms at h = num_heads by head width, ascending."""
        return self.row(self.num_heads)

    def row(self, heads: int) -> dict[int, tuple[int, int]]:
        """The arms of so many heads by head width, ascending."""
        return {width: (h, width) for h, width in self.arms if h == heads}

    @property
    def base(self) -> tuple[int, int]:
        """The arm whose W_O is changed."""
        return self.num_heads, self.model_width // self.num_heads

    @property
    def compared(self) -> tuple[int, ...]:
        """The numbers of heads whose patterns are compared, ascending."""
        return tuple(sorted(heads for heads in self.splits if heads > 1))

    @property
    def budget(self) -> Budget:
        """Of every arm."""
        return Budget(
            steps=self.steps,
            rates=self.rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=1,
            evaluation_batches=self.evaluation_batches,
        )


def is_common(width: int) -> bool:
    """Whether a head width is one of those that are said to be best."""
    return COMMON[0] <= width <= COMMON[1]
