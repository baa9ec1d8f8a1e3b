"""What `positions` sweeps and trains: its flags, and what every part of it holds."""

import dataclasses
from typing import Any

from attn_jax import positions
from experiments.arms import Budget
from experiments.config import Config, option

KINDS = (
    "rotary",
    "alibi",
    "learned",
    "none",
    "sinusoidal",
    "relative",
)  # of positions, as `TransformerConfig` has them
ALIKE = ("rotary", "alibi", "none", "sinusoidal")  # have the same parameters, and begin with them
SCALED = ("ntk", "linear", "dynamic", "yarn")  # rotary with one of the scalings of `attn_jax.positions`
SCORE_ARMS = {  # of what scores are computed with
    "fixed_float32": "fixed point, float32 q, k",
    "fixed_bfloat16": "fixed point, bfloat16 q, k",
    "table_float32": "float32 table",
    "table_bfloat16": "bfloat16 table",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionsConfig(Config):
    """Flags of this experiment."""

    score_width: int = option(64, "head width d_k of the simulated scores, even", least=2, most=1024)
    score_positions: tuple[int, ...] = option(
        (1, 16, 64, 256, 1024, 4096, 16384, 65536, 131072), "where keys sit, ascending", least=1, most=2**30
    )
    distances: tuple[int, ...] = option((0, 1, 16, 256), "from a key to a query", least=0, most=2**20)
    pairs: int = option(32, "pairs of q and k of a seed", least=2, most=4096)
    simulations: int = option(16, "independent seeds of the scores", least=2, most=1024)

    kinds: tuple[str, ...] = option(KINDS[:3], "of positions, of the language models", choices=KINDS)
    lookup_kinds: tuple[str, ...] = option(KINDS[:3], "of positions, of the recall task", choices=KINDS)
    scalings: tuple[str, ...] = option(SCALED, "that rotary models are read with past L", choices=SCALED)
    layers: int = option(2, "layers of the language models", least=2, most=16)
    model_width: int = option(32, "model width D, even", least=8, most=1024)
    num_heads: int = option(4, "heads", least=1, most=64)
    head_width: int = option(16, "head width d_k, even", least=4, most=256)
    length: int = option(32, "trained length L", least=8, most=1024)
    extension: int = option(
        4, "multiple of L up to which models are read, and factor of the scalings", least=2, most=64
    )
    rates: tuple[float, ...] = option((5e-3, 1e-2, 2e-2), "learning rates, extended at an edge", least=1e-6, most=1)
    steps: int = option(120, "steps of a run of the language model", least=2, most=100000)
    seeds: int = option(5, "independent runs of it", least=2, most=1024)
    batch_size: int = option(8, "sequences of a step", least=1, most=1024)
    evaluation_batches: int = option(8, "of an evaluation at the trained length", least=1, most=1024)
    sequences: int = option(128, "held-out sequences that are read past L", least=2, most=1024)
    every: int = option(4, "from one position whose loss is told to the next, a divisor of L", least=1, most=1024)
    probed: int = option(128, "held-out sequences to fit a probe, and as many to judge it", least=2, most=1024)

    lookup_steps: int = option(300, "steps of a run of the recall task", least=2, most=100000)
    lookup_seeds: int = option(10, "independent runs of it", least=2, most=1024)
    lookup_rate: float = option(1e-2, "learning rate of it", least=1e-6, most=1)
    lookup_sequences: int = option(128, "sequences of its evaluations", least=1, most=65536)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("score_positions", "distances"):
            values = getattr(self, name)
            if list(values) != sorted(values):
                raise ValueError(f"{name} must ascend, got {values}")
        if len(self.score_positions) < 2:
            raise ValueError(f"score_positions must hold at least two, got {self.score_positions}")
        for name in ("score_width", "model_width", "head_width"):
            if getattr(self, name) % 2:
                raise ValueError(f"{name} must be even, since positions turn pairs, got {getattr(self, name)}")
        for name in ("kinds", "lookup_kinds"):
            if "rotary" not in getattr(self, name):
                raise ValueError(f"{name} must hold rotary, with which others begin, got {getattr(self, name)}")
        if self.length % self.every:
            raise ValueError(f"every must divide length = {self.length}, got {self.every}")
        for part in ("language", "lookup"):
            self.budget(part)  # numbers that do not go together raise here

    def budget(self, part: str) -> Budget:
        """Of an arm of the language model ("language") or of the recall task ("lookup")."""
        language = part == "language"
        return Budget(
            steps=self.steps if language else self.lookup_steps,
            rates=self.rates if language else (self.lookup_rate,),
            seeds=self.seeds if language else self.lookup_seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=1,
            evaluation_batches=self.evaluation_batches,
        )

    def arms(self, kind: str) -> tuple[str, ...]:
        """What the trained models of a kind are read as: themselves and, of rotary ones, each scaling."""
        return (kind, *self.scalings) if kind == "rotary" else (kind,)

    @property
    def shifted(self) -> tuple[str, ...]:
        """The kinds whose positions are shifted: those of the language models, and sinusoidal ones."""
        return tuple(kind for kind in KINDS if kind in (*self.kinds, "sinusoidal"))

    def scaling(self, arm: str) -> Any:
        """Of an arm; None where there is none."""
        factor, length = self.extension, self.length
        return {
            "ntk": positions.NTK(factor),
            "linear": positions.Linear(factor),
            "dynamic": positions.DynamicNTK(factor, length),
            "yarn": positions.YaRN(factor, length),
        }.get(arm)

    @property
    def farthest(self) -> int:
        """How many tokens are read."""
        return self.extension * self.length

    @property
    def places(self) -> tuple[int, ...]:
        """The positions whose loss is told: the last of every so many, so that L − 1 is one."""
        return tuple(range(self.every - 1, self.farthest, self.every))
