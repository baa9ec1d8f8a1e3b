"""What `scale_rules` compares: its flags, and the number that each rule puts before q·k."""

import dataclasses
import math

from attn_jax import scaling
from attn_jax.training.tasks import Recall
from experiments.arms import Budget
from experiments.config import Config, option

# Rules that are a number. It lies among the parameters, so that all rules of one head width share one program.
FIXED = (
    "inverse_sqrt",
    "half_inverse_sqrt",
    "none",
    "inverse",
    "inverse_base",
    "inverse_sqrt_model",
    "half_inverse",
    "uniform",
)
OTHERS = ("folded", "temperature", "qk_norm")
STANDARD = ("inverse_sqrt_model", "half_inverse", "uniform")  # measured at the narrowest head only, where D = N d_k
RECALLED = ("inverse_sqrt", "half_inverse_sqrt", "none", "inverse", *OTHERS)
UNIFORM = 1e-9  # a factor that leaves nothing of the logits
LAYERS = 2
RECALL = Recall(num_pairs=3, num_keys=8, num_values=8, length=12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRulesConfig(Config):
    """Flags of this experiment."""

    rules: tuple[str, ...] = option(FIXED + OTHERS, "rules, inverse_sqrt among them", choices=FIXED + OTHERS)
    head_dims: tuple[int, ...] = option((8, 32), "head widths d_k, even", least=2, most=1024)
    num_heads: int = option(4, "heads, at every width", least=1, most=64)
    length: int = option(32, "characters of a sequence", least=4, most=1024)
    rates: tuple[float, ...] = option((1e-2, 2e-2, 4e-2), "learning rates, extended at an edge", least=1e-6, most=1)
    steps: int = option(100, "steps of a run, a multiple of evaluations", least=2, most=100000)
    seeds: int = option(5, "independent seeds", least=2, most=1024)
    batch_size: int = option(8, "sequences of a step", least=1, most=1024)
    evaluations: int = option(2, "evaluations after the first", least=1, most=100)
    evaluation_batches: int = option(16, "of an evaluation", least=1, most=1024)

    recall: bool = option(False, "whether recall is trained, too")
    recall_dim: int = option(32, "head width of recall, even", least=2, most=1024)
    recall_rates: tuple[float, ...] = option((1e-3, 2e-3, 4e-3), "its learning rates", least=1e-6, most=1)
    recall_steps: int = option(600, "its steps, a multiple of evaluations", least=2, most=100000)
    recall_seeds: int = option(16, "its seeds", least=2, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "inverse_sqrt" not in self.rules:
            raise ValueError(f"rules must hold inverse_sqrt, which all are compared with, got {', '.join(self.rules)}")
        for name, widths in (("head_dims", self.head_dims), ("recall_dim", (self.recall_dim,))):
            if odd := [width for width in widths if width % 2]:
                raise ValueError(f"{name} must be even, as rotary positions need, got {odd[0]}")
        _ = self.budget, self.recall and self.recall_budget  # numbers that do not go together raise here

    @property
    def widths(self) -> tuple[int, ...]:
        """The head widths, ascending."""
        return tuple(sorted(self.head_dims))

    @property
    def model_width(self) -> int:
        """D, which is that of the usual geometry at the narrowest head, and the same at all."""
        return self.num_heads * self.widths[0]

    @property
    def budget(self) -> Budget:
        """Of the language model."""
        return Budget(
            steps=self.steps,
            rates=self.rates,
            seeds=self.seeds,
            seed=self.seed,
            batch_size=self.batch_size,
            evaluations=self.evaluations,
            evaluation_batches=self.evaluation_batches,
        )

    @property
    def recall_budget(self) -> Budget:
        """Of recall."""
        return dataclasses.replace(
            self.budget, steps=self.recall_steps, rates=self.recall_rates, seeds=self.recall_seeds, batch_size=16
        )

    def arms(self, head_dim: int) -> dict[str, list[str]]:
        """What is trained at a head width, and the rules that each arm stands for: those of the same number."""
        found: dict[str, list[str]] = {}
        for rule in FIXED + OTHERS:
            if rule in self.rules and (rule not in STANDARD or head_dim == self.widths[0]):
                found.setdefault(self.arm_of(rule, head_dim), []).append(rule)
        return found

    def arm_of(self, rule: str, head_dim: int) -> str:
        """The arm that stands for a rule: the first of `rules` that has the same number."""
        factor, numbers = self.factor(rule, head_dim), [other for other in FIXED if other in self.rules]
        same = [other for other in numbers if rule in FIXED and math.isclose(self.factor(other, head_dim), factor)]
        return same[0] if same else rule

    def factor(self, rule: str, head_dim: int) -> float:
        """What multiplies q·k at first, and for good under a rule that is a number."""
        if rule == "inverse_base":
            return math.sqrt(self.widths[0]) / head_dim
        if rule == "uniform":
            return UNIFORM
        if rule == "folded":
            return 1.0
        named = rule if rule in FIXED else "inverse_sqrt"
        return scaling.scale_factor(named, head_dim, self.model_width)

    def fold(self, rule: str, head_dim: int) -> float:
        """What multiplies the initial W_Q."""
        return head_dim**-0.5 if rule == "folded" else 1.0
