"""What `projections` sweeps and trains: its flags, and what every part of it holds."""

import dataclasses

from attn_jax.training.tasks import Relation
from experiments.arms import Budget
from experiments.config import Config, option

SPREADS = (0.0, 0.25, 0.5, 1.0)  # standard deviation of the logarithm of a token's norm
VARIANCES = (0.25, 0.5, 2.0, 4.0)  # of a component of a token, besides 1
POSITIONS = ("none", "additive", "rotary")
BIASES = ("query", "key", "value")
# What is trained, by what is one matrix. `masked` cannot attend to the token itself; `biases` are on Q, K and V; of
# `qk_signed` every other column of W_K has the other sign: symmetric scores of which the own is not the largest.
LANGUAGE_ARMS = {
    "separate": "separate",
    "qk": "Q = K",
    "qk_masked": "Q = K, self masked",
    "kv": "K = V",
    "qkv": "Q = K = V",
    "biases": "separate, biases",
    "masked": "separate, self masked",
}
RELATION_ARMS = {
    "separate": "separate",
    "qk": "Q = K",
    "qk_signed": "Q = ±K",
    "qk_rotary": "Q = K, rotary",
    "kv": "K = V",
}
TRAINED = (*(f"relation_{arm}" for arm in RELATION_ARMS), *(f"language_{arm}" for arm in LANGUAGE_ARMS))
NO_VERDICT = ("relation_qk_rotary", "relation_kv", "language_masked")  # told beside what the rules read
SOLVED = 0.9  # accuracy: well above 2/3, the most that symmetric scores reach by look-up

# Small enough that separate projections solve it in some hundred steps.
RELATION = Relation(num_cycles=3, num_shown=2, num_payloads=8)
MODEL_WIDTH, NUM_HEADS, LENGTH = 32, 2, 32  # of what is trained; n of the language model
MLP_WIDTH = 4 * MODEL_WIDTH
EVALUATIONS, EVALUATION_BATCHES = 2, 16
DROPOUT = 0.1  # of the simulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectionsConfig(Config):
    """Flags of this experiment."""

    widths: tuple[int, ...] = option((4, 8, 16, 32, 64, 128, 256, 512), "widths d and d_k", least=1, most=4096)
    lengths: tuple[int, ...] = option((16, 64, 256, 1024), "numbers of tokens n", least=4, most=16384)
    rows: int = option(16, "queries of a seed (at most tokens and the shortest n)", least=2, most=4096)
    seeds: int = option(16, "independent seeds of the simulations", least=2, most=4096)
    stream_width: int = option(64, "model width of the simulated layer", least=4, most=1024)
    heads: int = option(4, "heads of the simulated layer (dividing stream_width)", least=1, most=64)
    tokens: int = option(32, "tokens of the simulated layer", least=8, most=1024)

    trained: tuple[str, ...] = option(
        tuple(arm for arm in TRAINED if arm not in NO_VERDICT), "arms that are trained", choices=TRAINED
    )
    layers: int = option(1, "layers of the language model", least=1, most=8)
    steps: int = option(300, "training steps of the language model", least=2, most=100_000)
    runs: int = option(5, "seeds of the language model", least=2, most=64)
    relation_steps: int = option(600, "training steps of the relation task", least=2, most=100_000)
    relation_runs: int = option(10, "seeds of the relation task", least=2, most=64)
    rates: tuple[float, ...] = option((0.005, 0.01, 0.02), "learning rates, extended at an edge", least=1e-6, most=1.0)
    batch: int = option(8, "sequences of a step", least=1, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("widths", "lengths"):
            values = getattr(self, name)
            if len(values) < 2 or list(values) != sorted(set(values)):
                raise ValueError(f"{name} must hold at least two numbers, ascending, got {values}")
        if self.rows > min(self.tokens, *self.lengths):
            raise ValueError(
                f"rows must be at most tokens = {self.tokens} and the shortest n = {self.lengths[0]}, got {self.rows}"
            )
        if self.stream_width % (2 * self.heads):
            raise ValueError(
                f"stream_width must be a multiple of 2 · heads = {2 * self.heads}, for heads of even width; "
                f"got {self.stream_width}"
            )
        for part in ("language", "relation"):
            if (arms := self.arms(part)) and "separate" not in arms:
                raise ValueError(f"trained must hold {part}_separate beside other arms of its kind, got {self.trained}")
        for part in ("language", "relation"):
            self.budget(part)

    def arms(self, part: str) -> tuple[str, ...]:
        """What is trained of "language" or of "relation"."""
        return tuple(arm.removeprefix(f"{part}_") for arm in self.trained if arm.startswith(part))

    def budget(self, part: str) -> Budget:
        """Of an arm of the language model or of the relation task."""
        steps, seeds = (self.steps, self.runs) if part == "language" else (self.relation_steps, self.relation_runs)
        return Budget(
            steps=steps,
            rates=self.rates,
            seeds=seeds,
            seed=self.seed,
            batch_size=self.batch,
            evaluations=EVALUATIONS,
            evaluation_batches=EVALUATION_BATCHES,
        )

    @property
    def head_width(self) -> int:
        """H of the simulated layer."""
        return self.stream_width // self.heads
