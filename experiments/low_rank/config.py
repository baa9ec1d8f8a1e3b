"""The flags of `low_rank`, and how wide each mechanism may be for its FLOPs."""

import dataclasses
from collections.abc import Callable

from attn_jax import models
from attn_jax.diagnostics import costs
from attn_jax.diagnostics.costs import Work
from experiments import texts
from experiments.config import Config, option

ARMS = ("model", "random_weights")
MECHANISMS = ("linformer", "nystrom", "performer")
MEASURES = ("output_error", "mass_kept", "top_k_recall", "entropy_shift", "variance")  # of the approximation report
STEP = 8  # ranks are multiples of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig(Config):
    """Flags of this experiment."""

    model: str = option("smollm2", f"a checkpoint ({', '.join(models.CHECKPOINTS)}) or the path of its file")
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    documents: int = option(5, "documents, evenly spread over the text", least=2, most=256)
    max_tokens: int = option(512, "tokens of a document", least=32, most=2048)
    layers: int = option(4, "layers, evenly spread over the depth", least=1, most=1024)
    budget: float = option(0.5, "FLOPs of each mechanism, of those of exact attention", least=0.01, most=4.0)
    ranks: tuple[int, ...] = option((16, 32, 64, 128, 256), "ranks of the curve of errors", least=1, most=2048)
    fit_documents: int = option(3, "other documents that Linformer's projections are fitted to", least=1, most=64)
    fit_steps: int = option(60, "steps of that fit", least=1, most=10000)
    draws: int = option(3, "draws of random features", least=2, most=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.ranks) > self.max_tokens:
            raise ValueError(f"ranks must be at most max_tokens = {self.max_tokens}, got {self.ranks}")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the heads that are measured."""

    length: int
    heads: int
    kv_heads: int
    width: int

    def work(self, mechanism: str, rank: int) -> Work:
        """What a mechanism of this rank costs, not causal."""
        counted: dict[str, Callable[..., Work]] = {
            "linformer": costs.linformer,
            "nystrom": costs.nystrom,
            "performer": lambda *sizes, **heads: costs.linear(*sizes, drawn=True, **heads),
        }
        return counted[mechanism](self.length, rank, heads=self.heads, kv_heads=self.kv_heads, width=self.width)

    @property
    def exact(self) -> Work:
        """What exact attention costs."""
        heads = {"heads": self.heads, "kv_heads": self.kv_heads}
        tile = costs.tile_of(None, self.length, **heads)
        return costs.tile_loop("forward", None, self.length, tile, width=self.width, **heads)

    def affordable(self, mechanism: str, budget: float) -> int:
        """The largest rank, a multiple of `STEP` and at most n, whose FLOPs are within `budget` of the exact ones."""
        allowed = budget * costs.dense_flops("forward", self.length, heads=self.heads, width=self.width)
        ranks = range(STEP, self.length + 1, STEP)
        return max((rank for rank in ranks if self.work(mechanism, rank).flops <= allowed), default=STEP)
