"""The flags of `diagnose`, and what is measured of each head."""

import dataclasses

from attn_jax import models
from experiments import texts
from experiments.config import Config, option

INSTALLED = "installed"  # every named checkpoint that is
MOST_MODELS = 3  # whose verdicts are put together
CONTROLS = ("random_weights", "shuffled_tokens", "other_first_token")
MEASURES = {  # and how a heat map is scaled
    "normalized_entropy": ("entropy / ln n", (0, 1)),
    "normalized_entropy_no_sink": ("entropy / ln n, without the sink", (0, 1)),
    "sink_mass": ("mass on the first token", (0, 1)),
    "max_weight": ("mean largest weight", (0, 1)),
    "logit_sd": ("standard deviation of the logits", (0, None)),
    "max_logit": ("largest logit", (None, None)),
    "distance_ratio": ("distance / that of uniform weights", (0, None)),
    "score_rank": ("effective rank of the centred scores", (0, None)),
}
SINK_LINE = 0.3  # a head that gives more to the first token is a sink head
FIRST = 4  # tokens that a window keeps in sight besides its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(Config):
    """Flags of this experiment."""

    model: tuple[str, ...] = option(
        (INSTALLED,),
        f"at most {MOST_MODELS} checkpoints ({', '.join(models.CHECKPOINTS)}) or paths; {INSTALLED}: those there are",
    )
    capture: str = option("", "a file of captured arrays (.npz, .safetensors) to diagnose in place of checkpoints")
    limits: str = option("", "a file of limits, as a monitor saves them; empty: the starting values")
    text_file: str = option("", f"UTF-8 text to read; empty: {texts.DEFAULT_NAME}, which comes with Python")
    max_tokens: int = option(256, "tokens of a document", least=16, most=8192)
    documents: int = option(5, "documents, evenly spread over the text", least=1, most=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capture and self.model != (INSTALLED,):
            raise ValueError(f"capture stands in the place of model, got {self.capture!r} and {self.model}")
        if len(self.model) > MOST_MODELS:
            raise ValueError(f"model must name at most {MOST_MODELS} checkpoints, got {self.model}")

    @property
    def window(self) -> int:
        """Tokens that a window keeps in sight: an eighth of a document."""
        return self.max_tokens // 8
