"""How large is q·k, and which rule keeps it in range?

Claims: S1, S2, S3 (the initialisation half).
Command: python -m experiments.score_variance --preset=quick --out=results/score_variance
Time: smoke 8 s, quick 13 s, full 3 min on two cores.

The variance of q·k against the width d_k, for independent components, for correlated ones and for heavy tails; what
each scaling rule leaves of it; and what LayerNorm and the initialiser make of q before any training.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attn_jax import projections, scaling
from attn_jax.typing import Array
from experiments import claims, estimates, figures, harness
from experiments.artifacts import Row
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells
from experiments.sampling import cut_to_widths, each_seed, measure_rows, rows_of
from experiments.verdicts import Outcome

COMPONENTS = ("independent", "one_white", "both_correlated", "heavy_tailed")
RULES = ("none", "inverse_sqrt", "inverse", "half_inverse_sqrt")
INPUT_RULES = ("temperature", "qk_norm")  # these act on q and k, then divide by √d_k
INITIALIZERS = ("lecun", "xavier", "normal", "mup", "without")
SCORES = ("total_variance", "normalized_entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreVarianceConfig(Config):
    """Flags of this experiment."""

    head_dims: tuple[int, ...] = option(
        (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), "head widths d_k", least=1, most=16384
    )
    length: int = option(128, "queries and keys of a seed", least=2, most=8192)
    seeds: int = option(32, "independent seeds", least=2, most=4096)
    correlation: float = option(0.3, "correlation ρ between the components of a correlated vector", least=0, most=1)
    tail_degrees: int = option(3, "degrees of freedom of the heavy-tailed components", least=3, most=64)
    model_width: int = option(512, "model width D of the initialisers; d_k = 64 or D if smaller", least=8, most=8192)
    stream_variance: float = option(16.0, "variance of the stream before LayerNorm", least=1e-6, most=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.head_dims) < 2:
            raise ValueError(f"head_dims must hold at least two widths to fit a slope, got {self.head_dims}")
        if self.model_width % self.head_width:
            raise ValueError(f"model_width must be a multiple of {self.head_width}, got {self.model_width}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The head widths, ascending."""
        return tuple(sorted(self.head_dims))

    @property
    def head_width(self) -> int:
        """Of the projected heads."""
        return min(64, self.model_width)


def units(config: ScoreVarianceConfig) -> list[Unit]:
    by_components = [Unit(kind, lambda kind=kind: _components(config, kind)) for kind in COMPONENTS]
    return [*by_components, Unit("rules", lambda: _rules(config)), Unit("initializers", lambda: _initializers(config))]


def _components(config: ScoreVarianceConfig, kind: str) -> list[Row]:
    """Var(q·k) of unscaled scores at every width, for one kind of components."""
    shape = (config.length, config.widths[-1])

    def correlated(key: Array) -> Array:
        own, shared = jax.random.split(key)
        rho = config.correlation  # unit variance, every pair of components correlated by ρ
        factor = jax.random.normal(shared, (config.length, 1))
        return np.sqrt(1 - rho) * jax.random.normal(own, shape) + np.sqrt(rho) * factor

    def heavy(key: Array) -> Array:
        # Student t, scaled to unit variance: a normal over the root of a mean of squares. With 3 degrees of freedom the
        # variance exists and the fourth moment does not.
        degrees, (numerator, denominator) = config.tail_degrees, jax.random.split(key)
        mean_square = jnp.square(jax.random.normal(denominator, (degrees, *shape))).mean(axis=0)
        return np.sqrt((degrees - 2) / degrees) * jax.random.normal(numerator, shape) / jnp.sqrt(mean_square)

    def white(key: Array) -> Array:
        return jax.random.normal(key, shape)

    query_of, key_of = {
        "independent": (white, white),
        "one_white": (correlated, white),
        "both_correlated": (correlated, correlated),
        "heavy_tailed": (heavy, heavy),
    }[kind]

    def measure(key: Array) -> Array:
        for_query, for_key = jax.random.split(key)
        query, keys = cut_to_widths(query_of(for_query), config.widths), key_of(for_key)[:, None, :]
        return measure_rows(query, keys, "total_variance", scale=1.0)["total_variance"]

    values = each_seed(measure, config.seed, config.seeds, stream=kind)
    return rows_of(values, {"head_dim": config.widths}, part="components", arm=kind, measure="variance")


def _rules(config: ScoreVarianceConfig) -> list[Row]:
    """Variance and entropy that each rule leaves, on the same white vectors at every width."""
    widths, shape = config.widths, (config.length, config.widths[-1])
    by_rule = [[scaling.scale_factor(rule, width) for width in widths] for rule in RULES]
    inverse_sqrt = jnp.asarray(by_rule[RULES.index("inverse_sqrt")])

    def measure(key: Array) -> dict[str, Array]:
        for_query, for_key = jax.random.split(key)
        query, raw_keys = cut_to_widths(jax.random.normal(for_query, shape), widths), jax.random.normal(for_key, shape)
        keys = raw_keys[:, None, :]
        scored = [measure_rows(query, keys, *SCORES, scale=jnp.asarray(factors)) for factors in by_rule]
        softened = scaling.temperature(query, jnp.zeros(len(widths)))  # its initial value: temperature 1
        scored.append(measure_rows(softened, keys, *SCORES, scale=inverse_sqrt))
        # RMS norm over a width is unit length times √width; the zeros beyond the width do not count.
        roots = jnp.sqrt(jnp.asarray(widths, jnp.float32))[None, :, None]
        normed_query, normed_keys = (
            scaling.l2_norm(x, epsilon=0.0) * roots for x in (query, cut_to_widths(raw_keys, widths))
        )
        scored.append(measure_rows(normed_query, normed_keys, *SCORES, scale=inverse_sqrt))
        return {
            "variance": jnp.stack([fields["total_variance"] for fields in scored]),
            "normalized_entropy": jnp.stack([fields["normalized_entropy"].mean(axis=0) for fields in scored]),
        }

    values = each_seed(measure, config.seed, config.seeds, stream="rules")
    axes = {"arm": (*RULES, *INPUT_RULES), "head_dim": widths}
    return [row for name, array in values.items() for row in rows_of(array, axes, part="rules", measure=name)]


def _initializers(config: ScoreVarianceConfig) -> list[Row]:
    """Variance of q, k and the scaled score from a LayerNormed stream, per initialiser of W_Q and W_K."""
    width, head = config.model_width, config.head_width
    make = {
        "lecun": jax.nn.initializers.lecun_normal(),
        "xavier": jax.nn.initializers.glorot_normal(),
        "normal": jax.nn.initializers.normal(0.02),
        "mup": jax.nn.initializers.lecun_normal(),
        "without": jax.nn.initializers.lecun_normal(),
    }

    def measure(key: Array) -> dict[str, Array]:
        for_stream, for_query, for_key = jax.random.split(key, 3)
        stream = jnp.sqrt(config.stream_variance) * jax.random.normal(for_stream, (config.length, width))
        found = {"query_variance": [], "key_variance": [], "logit_variance": []}
        for name in INITIALIZERS:
            x = stream if name == "without" else jax.nn.standardize(stream, axis=-1)  # LayerNorm at its initial gain
            heads = [make[name](k, (width, width)).reshape(width, -1, head) for k in (for_query, for_key)]
            query, keys = (projections.project(x, weight) for weight in heads)
            scale = scaling.scale_factor("inverse" if name == "mup" else "inverse_sqrt", head)
            scores = measure_rows(query, keys, "total_variance", scale=scale)
            found["query_variance"].append(query.var())
            found["key_variance"].append(keys.var())
            found["logit_variance"].append(scores["total_variance"].mean())
        return {name: jnp.stack(values) for name, values in found.items()}

    values = each_seed(measure, config.seed, config.seeds, stream="initializers")
    fixed = {"part": "initializers", "head_dim": head}
    return [row for name, x in values.items() for row in rows_of(x, {"arm": INITIALIZERS}, measure=name, **fixed)]


def judge(config: ScoreVarianceConfig, measurements: pd.DataFrame) -> list[Outcome]:
    widths = np.asarray(config.widths, dtype=np.float64)
    logs = np.log(widths)
    variance = {arm: _by_width(measurements, arm, "components", "variance") for arm in COMPONENTS}
    ruled = {arm: _by_width(measurements, arm, "rules", "variance") for arm in RULES}
    entropy = _by_width(measurements, "inverse", "rules", "normalized_entropy")
    trace = widths * (1 + (widths - 1) * config.correlation**2)  # tr Σ² of a correlation matrix with ρ off its diagonal

    # How far one run's estimate strays from d_k, averaged over widths.
    error = {arm: np.abs(np.log(variance[arm] / widths)).mean(axis=1) for arm in ("heavy_tailed", "independent")}
    listed = ", ".join(map(str, config.widths))
    first = claims.judge(
        "S1",
        {
            "slope": estimates.slope(logs, np.log(variance["independent"])),
            "ratio": estimates.mean((variance["independent"] / widths).mean(axis=1)),
            "one_white_ratio": estimates.mean((variance["one_white"] / widths).mean(axis=1)),
            "both_slope": estimates.slope(logs, np.log(variance["both_correlated"])),
            "trace_ratio": estimates.mean((variance["both_correlated"] / trace).mean(axis=1)),
            "heavy_ratio": estimates.mean((variance["heavy_tailed"] / widths).mean(axis=1)),
            "heavy_spread": estimates.ratio(error["heavy_tailed"], error["independent"]),
        },
        widths=listed,
        seeds=config.seeds,
        pairs=config.length**2,
        correlation=config.correlation,
        degrees=config.tail_degrees,
    )
    second = claims.judge(
        "S2",
        {
            "sqrt_slope": estimates.slope(logs, np.log(ruled["inverse_sqrt"])),
            "sqrt_ratio": estimates.mean(ruled["inverse_sqrt"].mean(axis=1)),
            "inverse_slope": estimates.slope(logs, np.log(ruled["inverse"])),
            "inverse_entropy_wide": estimates.mean(entropy[:, -1]),
            "inverse_entropy_narrow": estimates.mean(entropy[:, 0]),
            "correlated_ratio": estimates.mean(variance["both_correlated"][:, -1] / widths[-1]),
        },
        widths=listed,
        length=config.length,
        seeds=config.seeds,
    )
    third = claims.judge(
        "S3",
        {name: estimates.mean(_initial(measurements, name, "query_variance")) for name in INITIALIZERS},
        model_width=config.model_width,
        head_width=config.head_width,
        tokens=config.length,
        seeds=config.seeds,
        stream_variance=config.stream_variance,
    )
    return [first, second, third]


def figure(config: ScoreVarianceConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 3)
    components, rules, initial = axes[0]
    widths = np.asarray(config.widths)
    labels = ("independent", "one side correlated", "both sides correlated", "heavy tails")
    for index, (arm, label) in enumerate(zip(COMPONENTS, labels, strict=True)):
        values = _by_width(measurements, arm, "components", "variance").mean(axis=0)
        figures.curve(components, index, widths, values, label)
    components.plot(widths, widths, color="black", linewidth=1, linestyle="--", label="d_k")
    components.set(title="Variance of q·k", xlabel="head width d_k", ylabel="variance of the scores", yscale="log")
    names = ("none", "1/√d_k", "1/d_k", "1/(2√d_k)", "learned temperature, at its start", "QK-norm")
    for index, (arm, label) in enumerate(zip((*RULES, *INPUT_RULES), names, strict=True)):
        # Three rules agree at the start: nested marker sizes keep all of them in sight.
        size = {"inverse_sqrt": 9, "temperature": 6, "qk_norm": 3}.get(arm, 4)
        values = _by_width(measurements, arm, "rules", "variance").mean(axis=0)
        figures.curve(rules, index, widths, values, label, markersize=size)
    rules.set(title="What each rule leaves", xlabel="head width d_k", ylabel="variance of the logits", yscale="log")
    for one in (components, rules):
        figures.powers(one, widths)
    components.legend(fontsize=8, loc="upper left")
    rules.set_ylim(top=1e4 * widths[-1])  # room for the legend
    rules.legend(fontsize=8, loc="upper left")
    found = [estimates.mean(_initial(measurements, arm, "query_variance")) for arm in INITIALIZERS]
    names = ("LeCun\n1/D", "Xavier\n2/(2D)", "N(0, 0.02²)", "muP-like\n1/D", "LeCun,\nno norm")
    heights = [estimate.value for estimate in found]
    bars = initial.bar(names, heights, color=[*figures.COLOURS[:1] * 4, figures.COLOURS[1]])
    initial.bar_label(bars, labels=[f"{height:.3g}" for height in heights], fontsize=8)
    initial.axhline(1, color="black", linewidth=1, linestyle="--")
    initial.set(
        title=f"Variance of q at initialisation, D = {config.model_width}", ylabel="variance of q", yscale="log"
    )
    initial.tick_params(axis="x", labelsize=8)
    return drawn


def tables(config: ScoreVarianceConfig, measurements: pd.DataFrame) -> list[Table]:
    names = ("independent", "sd", "1/√d_k", "1/d_k", "1/(2√d_k)", "QK-norm", "H/ln n under 1/d_k", "H/ln n under none")
    raw = _by_width(measurements, "independent", "components", "variance").mean(axis=0)
    ruled = [
        _by_width(measurements, arm, "rules", "variance").mean(axis=0)
        for arm in ("inverse_sqrt", "inverse", "half_inverse_sqrt", "qk_norm")
    ]
    entropies = [
        _by_width(measurements, arm, "rules", "normalized_entropy").mean(axis=0) for arm in ("inverse", "none")
    ]
    columns = [raw, np.sqrt(raw), *ruled, *entropies]
    rows = [(width, *(float(column[i]) for column in columns)) for i, width in enumerate(config.widths)]
    return [Table("Variance of q·k, and what each rule leaves", ("d_k", *names), cells(rows))]


def _by_width(measurements: pd.DataFrame, arm: str, part: str, measure: str) -> np.ndarray:
    """`[seeds, widths]`."""
    chosen = measurements.query("part == @part and arm == @arm and measure == @measure")
    return estimates.by_run(chosen, "head_dim")


def _initial(measurements: pd.DataFrame, arm: str, measure: str) -> np.ndarray:
    """`[seeds]`."""
    return estimates.by_run(measurements.query("part == 'initializers' and arm == @arm and measure == @measure"))


EXPERIMENT = Experiment(
    name="score_variance",
    question="How large is q·k, and which rule keeps it in range?",
    config=ScoreVarianceConfig,
    presets={
        "smoke": {"head_dims": (4, 16, 64, 256), "length": 64, "seeds": 16, "model_width": 128},
        "quick": {},
        "full": {"seeds": 256, "length": 256},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Three panels. Left: the variance of q·k against the head width on logarithmic axes; it follows d_k for "
    "independent components, for one correlated side and for heavy tails, and rises faster with two correlated "
    "sides. Middle: the variance left by each scaling rule; flat at 1 under 1/√d_k and QK-norm, falling under 1/d_k. "
    "Right: bars of the variance of q per initialiser, with and without LayerNorm.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: ScoreVarianceConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
