"""What is the rank of one head's attention: of the scores, and of the weights?

Claims: H2.
Command: python -m experiments.attention_rank --preset=quick --out=results/attention_rank
Time: smoke 7 s, quick 9 s, full 40 s on two cores.

Numerical, stable and effective rank of S = q kᵀ and of A = softmax(S) against d_k, scaled and not, masked and not; and
the same three numbers for patterns whose ranks are known, since rank alone cannot tell a uniform pattern from a sink.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import attn_jax
from attn_jax import scaling
from attn_jax.diagnostics.ranks import count_above, default_tolerance, effective_rank_of, stable_rank_of
from attn_jax.typing import Array, Float
from experiments import claims, estimates, figures, harness
from experiments.artifacts import Row
from experiments.config import Config, option
from experiments.harness import Experiment, Result, Unit
from experiments.progress import Table, cells
from experiments.sampling import cut_to_widths, each_seed, rows_of
from experiments.verdicts import Outcome

RANKS = ("numerical", "stable", "effective")
MATRICES = ("scores", "weights", "causal_weights")
SCALES = ("none", "inverse_sqrt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankConfig(Config):
    """Flags of this experiment."""

    head_dims: tuple[int, ...] = option((2, 4, 8, 16, 32, 64, 128), "head widths d_k", least=1, most=4096)
    length: int = option(128, "queries and keys n", least=8, most=2048)
    seeds: int = option(16, "independent seeds", least=2, most=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.head_dims) > self.length // 2:
            raise ValueError(f"head_dims must hold a width of at most n/2 = {self.length // 2}, got {self.head_dims}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The head widths, ascending."""
        return tuple(sorted(self.head_dims))

    @property
    def narrow(self) -> tuple[int, ...]:
        """The widths up to n/2, where a bound of d_k says something."""
        return tuple(width for width in self.widths if width <= self.length // 2)


def units(config: RankConfig) -> list[Unit]:
    matrices = [Unit(matrix, lambda matrix=matrix: _simulated(config, matrix)) for matrix in MATRICES]
    return [*matrices, Unit("reference", lambda: _reference(config))]


def _simulated(config: RankConfig, matrix: str) -> list[Row]:
    """The three ranks of one kind of matrix at every scale and width; no scale changes those of the scores."""
    scales = SCALES[:1] if matrix == "scores" else SCALES
    factors = jnp.asarray([scaling.scale_factor(scale, width) for scale in scales for width in config.widths])
    shape = (config.length, config.widths[-1])

    def make(key: Array) -> Array:
        for_query, for_key = jax.random.split(key)
        query = cut_to_widths(jax.random.normal(for_query, shape), config.widths * len(scales))
        keys = jax.random.normal(for_key, shape)
        if matrix == "scores":
            return jnp.einsum("tnh,sh->nts", query, keys)
        causal = matrix == "causal_weights"
        return attn_jax.attention_weights(query, keys[:, None, :], scale=factors, is_causal=causal)

    matrices = each_seed(make, config.seed, config.seeds, stream="rank")  # the same q and k for every kind of matrix
    found = jax.jit(_three_ranks)(matrices)
    values = {name: x.reshape(config.seeds, len(scales), len(config.widths)) for name, x in found.items()}
    axes = {"arm": scales, "head_dim": config.widths}
    return [row for name, x in values.items() for row in rows_of(x, axes, part=matrix, measure=name)]


def _reference(config: RankConfig) -> list[Row]:
    """The three ranks of patterns that need no simulation."""
    found = jax.jit(_three_ranks)(jnp.stack(list(patterns(config.length).values())))
    axes = {"arm": list(patterns(config.length))}
    return [row for name, x in found.items() for row in rows_of(x[None, :], axes, part="reference", measure=name)]


def patterns(n: int) -> dict[str, Float[Array, "n n"]]:
    """Attention patterns of known rank."""
    visible = jnp.tril(jnp.ones((n, n)))
    first = jnp.zeros((n, n)).at[:, 0].set(1.0)
    return {
        "identity": jnp.eye(n),
        "uniform, two-way": jnp.full((n, n), 1 / n),
        "uniform, causal": visible / visible.sum(axis=-1, keepdims=True),
        "all on one key": first,
        "0.9 on one key, 0.1 on itself": 0.9 * first + 0.1 * jnp.eye(n),
    }


def _three_ranks(matrices: Float[Array, "*b t s"]) -> dict[str, Float[Array, "*b"]]:
    """`numerical_rank`, `stable_rank` and `effective_rank` from one decomposition."""
    sigma = jnp.linalg.svd(matrices, compute_uv=False)
    rows, columns = matrices.shape[-2:]
    tolerance = default_tolerance(sigma, rows, columns, matrices.dtype)
    numerical = count_above(sigma, tolerance).astype(sigma.dtype)
    return {"numerical": numerical, "stable": stable_rank_of(sigma), "effective": effective_rank_of(sigma)}


def judge(config: RankConfig, measurements: pd.DataFrame) -> list[Outcome]:
    bounds, count = np.asarray(config.narrow, dtype=np.float64), len(config.narrow)
    weights = _by_width(measurements, "weights", "inverse_sqrt", "numerical")[:, :count]
    scores = _by_width(measurements, "scores", "none", "numerical")[:, :count]
    effective = _by_width(measurements, "weights", "inverse_sqrt", "effective")
    outcome = claims.judge(
        "H2",
        {
            "weight_excess_least": estimates.mean((weights - bounds).min(axis=1)),
            "weight_excess_most": estimates.mean((weights - bounds).max(axis=1)),
            "score_excess": estimates.mean((scores - bounds).max(axis=1)),
            "weight_rank_narrow": estimates.mean(weights[:, 0]),
            "weight_effective_narrow": estimates.mean(effective[:, 0]),
        },
        length=config.length,
        widths=", ".join(map(str, config.narrow)),
        seeds=config.seeds,
    )
    return [outcome]


def figure(config: RankConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(1, 3)
    labels = {
        ("scores", "none"): "scores S",
        ("weights", "inverse_sqrt"): "weights A, scaled",
        ("weights", "none"): "weights A, unscaled",
        ("causal_weights", "inverse_sqrt"): "causal A, scaled",
        ("causal_weights", "none"): "causal A, unscaled",
    }
    for one, name in zip(axes[0], RANKS, strict=True):
        for index, ((part, arm), label) in enumerate(labels.items()):
            found = _by_width(measurements, part, arm, name)
            figures.curve(one, index, config.widths, found.mean(axis=0), label, alpha=0.85)
        within = [min(width, config.length) for width in config.widths]
        one.plot(config.widths, within, color="black", linewidth=1, linestyle="--", label="min(d_k, n)")
        figures.powers(one, config.widths)
        one.set(title=f"{name.capitalize()} rank, n = {config.length}", xlabel="head width d_k", ylabel="rank")
        one.set(yscale="log", ylim=(0.8, config.length * 1.4))
        one.legend(fontsize=8)
    return drawn


def tables(config: RankConfig, measurements: pd.DataFrame) -> list[Table]:
    def triple(part: str, arm: str, index: int) -> str:
        ranks = [_by_width(measurements, part, arm, name)[:, index].mean() for name in RANKS]
        return " / ".join(f"{rank:.3g}" for rank in ranks)

    columns = [("scores", "none"), *((part, arm) for part in MATRICES[1:] for arm in SCALES)]
    rows = [(w, *(triple(part, arm, i) for part, arm in columns)) for i, w in enumerate(config.widths)]
    names = ("d_k", "S", "A unscaled", "A scaled", "causal A unscaled", "causal A scaled")
    reference = measurements.query("part == 'reference'").set_index(["arm", "measure"])["value"].to_dict()
    known = [(name, *(float(reference[name, rank]) for rank in RANKS)) for name in patterns(1)]
    return [
        Table(f"Numerical / stable / effective rank, n = {config.length}", names, cells(rows)),
        Table(f"Patterns of known rank, n = {config.length}", ("pattern", *RANKS), cells(known)),
    ]


def _by_width(measurements: pd.DataFrame, part: str, arm: str, measure: str) -> np.ndarray:
    """`[seeds, widths]`."""
    chosen = measurements.query("part == @part and arm == @arm and measure == @measure")
    return estimates.by_run(chosen, "head_dim")


EXPERIMENT = Experiment(
    name="attention_rank",
    question="What is the rank of one head's attention: of the scores, and of the weights?",
    config=RankConfig,
    presets={
        "smoke": {"head_dims": (2, 8, 32), "length": 32},
        "quick": {},
        "full": {"length": 256, "head_dims": (2, 4, 8, 16, 32, 64, 128, 256), "seeds": 64},
    },
    units=units,
    judge=judge,
    figure=figure,
    alt="Three panels: numerical, stable and effective rank against the head width. The scores keep to d_k. The "
    "numerical rank of the weights is far above it and reaches n at narrow heads; their stable rank stays small when "
    "scaled.",
    tables=tables,
    documentation=__doc__ or "",
)


def run(config: RankConfig) -> Result:
    """Measures and judges; writes nothing."""
    return harness.run(EXPERIMENT, config)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
