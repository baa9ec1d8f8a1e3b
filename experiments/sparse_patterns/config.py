"""The flags of `sparse_patterns`."""

import dataclasses

from attn_jax import models
from attn_jax.training.tasks import Lookup
from experiments import texts
from experiments.arms import Budget
from experiments.claims.sparse import LEARNED
from experiments.config import Config, option

ARMS = ("model", "random_weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """Flags of this experiment."""

    model: str = option("smollm2", f"a decoder ({', '.join(models.CHECKPOINTS)}) or the path of its file")
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    documents: int = option(5, "documents that are judged", least=1, most=256)
    fitted: int = option(2, "other documents, to which centroids are fitted", least=1, most=256)
    max_tokens: int = option(256, "tokens of each", least=16, most=2048)
    windows: tuple[int, ...] = option((8, 16, 24, 48, 96), "windows, ascending", least=1, most=2048)
    window: int = option(24, "the window that is judged, one of them", least=1, most=2048)
    first: int = option(4, "global tokens at the start", least=1, most=1024)
    buckets: int = option(16, "buckets of a round of hashing, even", least=2, most=1024)
    rounds: int = option(4, "rounds of hashing", least=1, most=64)
    clusters: int = option(4, "clusters", least=1, most=1024)
    iterations: int = option(10, "of k-means", least=1, most=1000)
    tile: int = option(16, "queries and keys of a tile, to count what is touched", least=1, most=1024)

    learn: tuple[str, ...] = option(tuple(LEARNED), "how centroids learn", choices=tuple(LEARNED))
    pairs: int = option(8, "pairs of the look-up task", least=2, most=64)
    length: int = option(32, "its tokens", least=4, most=1024)
    routed: int = option(4, "clusters of its routing", least=1, most=64)
    model_width: int = option(32, "model width D", least=4, most=1024)
    head_width: int = option(16, "head width d_k", least=2, most=256)
    temperature: float = option(0.1, "of the probabilities of clusters", least=1e-3, most=100)
    auxiliary: float = option(1.0, "weight of the auxiliary loss", least=0, most=1000)
    rates: tuple[float, ...] = option((1e-2,), "learning rates; several are extended at an edge", least=1e-6, most=1)
    steps: int = option(300, "steps of a run", least=2, most=100000)
    seeds: int = option(5, "independent runs", least=2, most=1024)
    batch_size: int = option(32, "sequences of a step", least=1, most=1024)
    evaluation_batches: int = option(4, "of an evaluation", least=1, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.windows) != sorted(self.windows):
            raise ValueError(f"windows must ascend, got {self.windows}")
        if self.window not in self.windows:
            raise ValueError(f"window must be one of windows = {self.windows}, got {self.window}")
        if self.buckets % 2:
            raise ValueError(f"buckets must be even, got {self.buckets}")
        self.budget()  # numbers that do not go together raise here
        self.task()

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

    def task(self) -> Lookup:
        """What routing is trained on."""
        return Lookup(num_pairs=self.pairs, num_keys=2 * self.pairs, num_values=2 * self.pairs, length=self.length)
