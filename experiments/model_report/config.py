"""The flags of `model_report`."""

import dataclasses
import re

from attn_jax import models
from experiments import texts
from experiments.config import Config, option

PRESETS = {"smoke": {"max_tokens": 64}, "quick": {}, "full": {"max_tokens": 2048}}
MOST_SUBJECTS = 2
MOST_SHOWN = 64  # tokens of the window: their patterns are most of the page


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReportConfig(Config):
    """Flags of this command."""

    model: tuple[str, ...] = option(
        ("smollm2",), f"a checkpoint ({', '.join(models.CHECKPOINTS)}) or the path of one, or two to compare"
    )
    capture: tuple[str, ...] = option(
        ("",), "in place of a model: a file of captured arrays (.npz, .safetensors), or two to compare; empty: none"
    )
    run: str = option("", "in place of a model: the directory of a run of experiments.train; empty: none")
    steps: tuple[int, ...] = option(
        (0,), "of the run, whose checkpoint is shown, or two to compare; 0: the last", least=0
    )
    text_file: str = option("", f"UTF-8 text that a model reads; empty: {texts.DEFAULT_NAME}, which comes with Python")
    max_tokens: int = option(512, "tokens of the text that a model reads", least=2, most=8192)
    window: str = option("0:48", f"positions START:STOP that are shown token by token, {MOST_SHOWN} at most")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model", "capture", "steps"):
            if len(getattr(self, name)) > MOST_SUBJECTS:
                raise ValueError(f"{name} must hold at most {MOST_SUBJECTS}, got {len(getattr(self, name))}")
        given = [name for name in ("capture", "run") if getattr(self, name) not in ("", ("",))]
        given += ["model"] if self.model != ModelReportConfig.model else []
        if len(given) > 1:
            raise ValueError(f"only one of model, capture and run can be shown, got {' and '.join(given)}")
        if self.steps != (0,) and not self.run:
            raise ValueError(f"steps has no effect without run, got {self.steps}")
        if self.text_file and ("capture" in given or "run" in given):
            raise ValueError(f"text_file has no effect with {given[0]}, got {self.text_file}")
        self.positions  # noqa: B018 - it checks the window

    @property
    def positions(self) -> tuple[int, int]:
        """First and last (not included) position of the window."""
        found = re.fullmatch(r"(\d+):(\d+)", self.window)
        start, stop = (int(found[1]), int(found[2])) if found else (0, 0)
        if not start < stop <= start + MOST_SHOWN:
            raise ValueError(f"window must be START:STOP with 1 to {MOST_SHOWN} positions, got {self.window!r}")
        return start, stop
