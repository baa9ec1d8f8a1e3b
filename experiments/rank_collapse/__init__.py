"""How fast does attention lose rank with depth, and what prevents it?

Claims: D4.
Command: python -m experiments.rank_collapse --preset=quick --out=results/rank_collapse
Time: smoke 2 s, quick 13 s, full about 5 min on two cores.

The distance from rank one after every layer of blocks at random weights, two-way and causal, at logits of several
sizes, with skips, perceptrons and norms and without. It falls far below what float64 keeps beside the mean token, so
the mean and what deviates from it are propagated apart.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, estimates, figures, harness
from experiments.artifacts import Row
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells
from experiments.rank_collapse.deviations import Block, Weights, advance, begin, relative_size
from experiments.sampling import rows_of
from experiments.verdicts import Outcome

BLOCKS = {
    "pure": Block(),
    "pure_no_norm": Block(norm=False),
    "skip": Block(skip=True),
    "mlp": Block(mlp=True),
    "skip_mlp": Block(skip=True, mlp=True),
}
LABELS = dict(zip(BLOCKS, ("pure", "pure, no norms", "skips", "MLPs", "skips and MLPs"), strict=True))
MASKS = ("two-way", "causal")
MEASURES = ("l1_linf", "frobenius")
SMALLEST = 1e-280  # below it products of deviations begin to underflow
COLLAPSED = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollapseConfig(Config):
    """Flags of this experiment."""

    depth: int = option(32, "layers", least=4, most=1024)
    length: int = option(32, "tokens n", least=2, most=1024)
    model_width: int = option(64, "model width D, a multiple of num_heads", least=2, most=1024)
    num_heads: int = option(4, "heads", least=1, most=64)
    logit_scales: tuple[float, ...] = option((0.25, 1.0, 4.0, 16.0), "sd of the first layer's logits", least=0.01)
    seeds: int = option(16, "independent seeds", least=2, most=1024)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_width % self.num_heads:
            raise ValueError(f"model_width must be a multiple of num_heads = {self.num_heads}, got {self.model_width}")
        if 1.0 not in self.logit_scales:
            raise ValueError(f"logit_scales must hold 1, got {self.logit_scales}")

    @property
    def scales(self) -> tuple[float, ...]:
        """The sizes of the logits, ascending."""
        return tuple(sorted(self.logit_scales))


def units(config: CollapseConfig) -> list[Unit]:
    return [
        Unit(f"{name}_{mask}", lambda name=name, mask=mask: _propagated(config, name, mask))
        for name in BLOCKS
        for mask in MASKS
    ]


def _propagated(config: CollapseConfig, name: str, mask: str) -> list[Row]:
    """The distance from rank one after 0, 1, … layers; every arm gets the same tokens and the same weights."""
    random = np.random.default_rng(config.seed)
    block, head_width = BLOCKS[name], config.model_width // config.num_heads
    tokens = begin(random.standard_normal((config.seeds, config.length, config.model_width)))
    streams = dict.fromkeys(config.scales, tokens)
    found = {measure: np.empty((config.seeds, len(streams), config.depth + 1)) for measure in MEASURES}
    for depth, weights in enumerate(_layers(config, random)):
        for index, (scale, stream) in enumerate(streams.items()):
            for measure, values in found.items():
                values[:, index, depth] = relative_size(stream, measure)
            factor = scale / math.sqrt(head_width)
            streams[scale] = advance(stream, weights, block, scale=factor, causal=mask == "causal")
    axes = {"scale": config.scales, "depth": range(config.depth + 1)}
    return [row for measure, x in found.items() for row in rows_of(x, axes, part=mask, arm=name, measure=measure)]


def _layers(config: CollapseConfig, random: np.random.Generator) -> Iterator[Weights]:
    """The weights of each layer, and once more for the look at what leaves the last."""
    for _ in range(config.depth + 1):
        yield Weights.draw(random, config.seeds, config.model_width, config.num_heads)


def judge(config: CollapseConfig, measurements: pd.DataFrame) -> list[Outcome]:
    def last(name: str) -> estimates.Estimate:
        return estimates.mean(by_depth(measurements, name, "two-way", 1.0)[:, -1])

    pure = fits(by_depth(measurements, "pure", "two-way", 1.0))
    causal = fits(by_depth(measurements, "pure", "causal", 1.0))
    outcome = claims.judge(
        "D4",
        {
            "slope": estimates.mean(pure.slope),
            "gain": estimates.mean(pure.gain),
            "gain_bare": estimates.mean(fits(by_depth(measurements, "pure_no_norm", "two-way", 1.0)).gain),
            "gain_causal": estimates.mean(causal.gain),
            "gain_sharp": estimates.mean(fits(by_depth(measurements, "pure", "two-way", config.scales[-1])).gain),
            "causal_factor": estimates.mean(causal.factor),
            "skip": last("skip"),
            "skip_power": power(by_depth(measurements, "skip", "two-way", 1.0)),
            "mlp": last("mlp"),
            "both": last("skip_mlp"),
        },
        heads=config.num_heads,
        width=config.model_width,
        length=config.length,
        depth=config.depth,
        scales=", ".join(f"{scale:g}" for scale in config.scales),
        seeds=config.seeds,
    )
    return [outcome]


@dataclasses.dataclass(frozen=True)
class Fits:
    """Two lines through the residual ρ of each seed, over the layers where it has not underflowed, each `[seeds]`.

    Attributes:
        slope: of ln(−ln ρ) on depth; ln 3 where each layer cubes the residual.
        gain: R² of that line − R² of the line of ln ρ.
        factor: e to the slope of ln ρ, ρ of a layer over that of the layer before.
    """

    slope: np.ndarray
    gain: np.ndarray
    factor: np.ndarray


def fits(residuals: np.ndarray) -> Fits:
    """The lines of ρ `[seeds, layers]` after the first layer, where ρ < 1; NaN where fewer than three layers are left.

    The composite norm of the residual can exceed that of the tokens, before it falls.
    """
    found = []
    for values in residuals:
        depth = np.flatnonzero((values > SMALLEST) & (values < 1))
        depth = depth[depth > 0]
        if len(depth) < 3:
            found.append((np.nan, np.nan, np.nan))
            continue
        y = -np.log(values[depth])
        gain = np.corrcoef(depth, np.log(y))[0, 1] ** 2 - np.corrcoef(depth, y)[0, 1] ** 2
        found.append((np.polyfit(depth, np.log(y), 1)[0], gain, math.exp(-np.polyfit(depth, y, 1)[0])))
    return Fits(*np.asarray(found).T)


def power(residuals: np.ndarray) -> estimates.Estimate:
    """Slope of ln ρ on ln depth over the deeper half of the layers."""
    depths = np.arange(residuals.shape[1])[residuals.shape[1] // 2 :]
    return estimates.slope(np.log(depths), np.log(residuals[:, depths]))


def figure(config: CollapseConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(2, 2)
    depths = np.arange(config.depth + 1)
    for column, mask in enumerate(MASKS):
        falls, remedies = axes[:, column]
        for index, scale in enumerate(config.scales):
            y = -np.log(np.maximum(median(by_depth(measurements, "pure", mask, scale)), SMALLEST))
            shown = y < -math.log(SMALLEST)
            figures.curve(falls, index, depths[shown], y[shown], f"logits of sd {scale:g}")
        bare = -np.log(np.maximum(median(by_depth(measurements, "pure_no_norm", mask, 1.0)), SMALLEST))
        shown = bare < -math.log(SMALLEST)
        falls.plot(depths[shown], bare[shown], color="black", linestyle="--", label="sd 1, no norms")
        falls.set(title=f"Pure attention, {mask}", xlabel="layer", ylabel="−ln ρ", yscale="log")
        for index, name in enumerate(name for name, block in BLOCKS.items() if block.norm):
            figures.curve(remedies, index, depths, median(by_depth(measurements, name, mask, 1.0)), LABELS[name])
        remedies.set(title=f"What prevents it, {mask}, logits of sd 1", xlabel="layer", ylabel="residual ρ")
        remedies.set(yscale="log", ylim=(1e-16, 2))
        for one in (falls, remedies):
            one.legend(fontsize=8)
    return drawn


def tables(config: CollapseConfig, measurements: pd.DataFrame) -> list[Table]:
    rows = []
    for name in BLOCKS:
        for mask in MASKS:
            found = [by_depth(measurements, name, mask, scale) for scale in config.scales]
            rows.append((LABELS[name], mask, *(_until(x) for x in found), *(float(median(x)[-1]) for x in found)))
    scales = [f"sd {scale:g}" for scale in config.scales]
    columns = ("block", "mask", *(f"ρ < 1e-6, {s}" for s in scales), *(f"last ρ, {s}" for s in scales))
    return [Table("Layers until the tokens are one, and what is left", columns, cells(rows))]


def _until(residuals: np.ndarray) -> str:
    below = median(residuals) < COLLAPSED
    return str(int(np.argmax(below))) if below.any() else "never"


def median(residuals: np.ndarray) -> np.ndarray:
    """Over seeds, `[layers]`."""
    return np.median(residuals, axis=0)


def by_depth(measurements: pd.DataFrame, arm: str, mask: str, scale: float, measure: str = "l1_linf") -> np.ndarray:
    """`[seeds, depth + 1]`."""
    chosen = measurements.query("arm == @arm and part == @mask and scale == @scale and measure == @measure")
    return estimates.by_run(chosen, "depth")


EXPERIMENT = Experiment(
    name="rank_collapse",
    question="How fast does attention lose rank with depth, and what prevents it?",
    config=CollapseConfig,
    presets={
        "smoke": {"depth": 12, "length": 12, "model_width": 16, "num_heads": 2},
        "quick": {},
        "full": {"length": 64, "model_width": 128, "num_heads": 8, "seeds": 64},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Four panels, two-way on the left and causal on the right. Above, −ln of the residual of pure attention on a "
    "logarithmic axis against depth: two-way it is a straight line, so the fall is doubly exponential; causal it bends "
    "over. Below, the residual itself: with MLPs it falls as without, with skips it stays.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: CollapseConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)
