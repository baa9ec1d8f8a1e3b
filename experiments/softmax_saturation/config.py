"""What `softmax_saturation` sweeps: its flags, and what every sweep holds."""

import dataclasses

from experiments.config import Config, option

SCALES = ("none", "inverse_sqrt")
SATURATION = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)  # r = sd / √(2 ln n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaturationConfig(Config):
    """Flags of this experiment."""

    head_dims: tuple[int, ...] = option(
        (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), "head widths d_k", least=1, most=16384
    )
    lengths: tuple[int, ...] = option((16, 64, 256, 1024, 4096), "numbers of keys n", least=4, most=65536)
    gradient_length: int = option(256, "n of the gradients (one of lengths)", least=4, most=65536)
    jacobian_length: int = option(64, "n of the full Jacobian", least=4, most=1024)
    rows: int = option(32, "queries of a seed", least=2, most=4096)
    seeds: int = option(16, "independent seeds", least=2, most=4096)
    model_width: int = option(512, "model width D, for 1/√D and the projections", least=8, most=8192)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.head_dims) < 2:
            raise ValueError(f"head_dims must hold at least two widths, got {self.head_dims}")
        if len(self.lengths) < 2:
            raise ValueError(f"lengths must hold at least two numbers of keys, got {self.lengths}")
        if not self.projected:
            raise ValueError(
                f"head_dims must hold a width of at most model_width = {self.model_width}, got {self.head_dims}"
            )
        if self.gradient_length not in self.lengths:
            raise ValueError(f"gradient_length must be one of lengths, {self.lengths}; got {self.gradient_length}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The head widths, ascending."""
        return tuple(sorted(self.head_dims))

    @property
    def common(self) -> int:
        """The widest head in common use that is swept."""
        return max((width for width in self.widths if width <= 128), default=self.widths[0])

    @property
    def projected(self) -> tuple[int, ...]:
        """The widths that a model of width D can have."""
        return tuple(width for width in self.widths if width <= self.model_width)
