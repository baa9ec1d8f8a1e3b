"""The tables of the five steps, and the figure."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attn_jax.training import Limits
from experiments import estimates, figures
from experiments.progress import Table
from experiments.tune.config import TuneConfig
from experiments.tune.widths import choose


def final_losses(config: TuneConfig, measurements: pd.DataFrame) -> dict[int, np.ndarray]:
    """Of each head width at its best rate, `[seeds]`."""
    final = measurements.query("measure == 'final_loss'").sort_values("seed")
    return {width: final.query("head_width == @width")["value"].to_numpy(np.float64) for width in config.candidates}


def per_head(measurements: pd.DataFrame, measure: str) -> np.ndarray:
    """`[L, N]`."""
    rows = measurements.query("measure == @measure").sort_values(["layer", "head"])
    return rows["value"].to_numpy(np.float64).reshape(len(rows["layer"].unique()), -1)


def tables(config: TuneConfig, measurements: pd.DataFrame) -> list[Table]:
    """One a step."""
    return [
        _widths(config, measurements),
        _scale(config, measurements),
        _entropy(measurements),
        _redundancy(measurements),
        _tiles(config, measurements),
    ]


def _widths(config: TuneConfig, measurements: pd.DataFrame) -> Table:
    losses = final_losses(config, measurements)
    taken = choose(losses)
    rates = measurements.query("measure == 'final_loss'").groupby("head_width")["rate"].first()
    rows = tuple(
        (
            f"{width}{' (taken)' if width == taken else ''}",
            str(config.width // width),
            f"{rates[width]:g}",
            str(estimates.mean(x)),
            "–" if width == taken else str(estimates.difference(x, losses[taken])),
        )
        for width, x in losses.items()
    )
    title = f"1. Head width at width {config.width}: the widest that cannot be told from the best"
    return Table(title, ("head width d_k", "heads h", "rate", "held-out loss, nats", "less the taken one's"), rows)


def _scale(config: TuneConfig, measurements: pd.DataFrame) -> Table:
    rows = []
    found = measurements.query("measure == 'scale'")
    taken = choose(final_losses(config, measurements))
    for layer in sorted(found["layer"].unique()):
        heads = found.query("layer == @layer")
        audit = measurements.query("measure == 'faults' and layer == @layer")["note"].iloc[0]
        rules = ", ".join(dict.fromkeys(heads["note"]))
        values = heads["value"]
        rows.append((str(int(layer)), f"{values.min():.5g} to {values.max():.5g}", rules, str(audit)))
    title = f"2. The scale in use, read off the outputs; 1/√{taken} = {taken**-0.5:.5g}"
    return Table(title, ("layer", "scale of its heads", "nearest rule", "audit of the layer"), tuple(rows))


def _entropy(measurements: pd.DataFrame) -> Table:
    limits = Limits()
    entropy, sinkless = (per_head(measurements, x) for x in ("normalized_entropy", "normalized_entropy_no_sink"))
    logits, sink = (per_head(measurements, x) for x in ("max_logit", "sink_mass"))
    rows = []
    for layer in range(len(entropy)):
        sharp = int((sinkless[layer] < (limits.sharp_entropy or 0)).sum())
        told = f"{sharp} sharp" if sharp else "within"
        told += "; logits large" if logits[layer].max() > (limits.max_logit or np.inf) else ""
        ranges = (f"{x[layer].min():.2f} to {x[layer].max():.2f}" for x in (entropy, sinkless))
        rows.append((str(layer), *ranges, f"{logits[layer].max():.3g}", f"{sink[layer].max():.2f}", told))
    title = (
        f"3. Entropy / ln n by layer; a head is sharp below {limits.sharp_entropy}, logits are large above "
        f"{limits.max_logit:g}"
    )
    columns = ("layer", "entropy of its heads", "without the first token", "largest logit", "largest sink", "limits")
    return Table(title, columns, tuple(rows))


def _redundancy(measurements: pd.DataFrame) -> Table:
    limits = Limits()
    cost, distance, likeness = (
        per_head(measurements, x) for x in ("removal_cost", "nearest_distance", "nearest_likeness")
    )
    nearest = measurements.query("measure == 'nearest_distance'").sort_values(["layer", "head"])["note"]
    partner = nearest.to_numpy().reshape(cost.shape)
    redundant = (distance < (limits.clone_distance or 0)) & (likeness > limits.clone_similarity)
    order = np.dstack(np.unravel_index(np.argsort(cost, axis=None), cost.shape))[0][:8]
    rows = tuple(
        (
            f"{layer}.{head}",
            f"{cost[layer, head]:.4f}",
            *(
                (f"{layer}.{partner[layer, head]}", f"{distance[layer, head]:.3f}", f"{likeness[layer, head]:.2f}")
                if cost.shape[1] > 1
                else ("–", "–", "–")
            ),
            "redundant" if redundant[layer, head] else "",
        )
        for layer, head in order.tolist()
    )
    title = (
        f"4. The cheapest heads to remove; a pair is redundant where patterns are nearer than {limits.clone_distance} "
        f"and outputs more alike than {limits.clone_similarity}"
    )
    return Table(title, ("head", "loss added", "nearest head", "divergence", "CKA of outputs", ""), rows)


def _tiles(config: TuneConfig, measurements: pd.DataFrame) -> Table:
    value = measurements.dropna(subset=["value"]).set_index("measure")["value"]
    rows = (
        ("loss, relative difference", f"{value['loss_apart']:.1e}"),
        ("gradient of any parameter, relative difference", f"{value['gradient_apart']:.1e}"),
        ("temporary memory, dense", f"{value['memory_dense'] / 2**20:.0f} MiB"),
        ("temporary memory, tiles", f"{value['memory_tiled'] / 2**20:.0f} MiB"),
    )
    return Table(f"5. A sequence of {config.long} tokens by tiles", ("measured", "value"), rows)


def figure(config: TuneConfig, measurements: pd.DataFrame) -> Figure:
    """The losses that decide, and the entropies that result."""
    drawn, axes = figures.panels(1, 2)
    left, right = axes[0]
    losses = final_losses(config, measurements)
    taken = choose(losses)
    for width, x in losses.items():
        figures.curve(left, 0, [width] * len(x), x, "", linestyle="none")
    left.plot([taken], [losses[taken].mean()], "o", markersize=14, markerfacecolor="none", color=figures.COLOURS[1])
    figures.powers(left, config.candidates)
    left.set_xlabel("head width d_k")
    left.set_ylabel("held-out loss, nats")
    for i, (measure, label) in enumerate(
        (("normalized_entropy", "all tokens"), ("normalized_entropy_no_sink", "without the first"))
    ):
        values = per_head(measurements, measure)
        for head in range(values.shape[1]):
            figures.curve(right, i, range(len(values)), values[:, head], label if head == 0 else "", linestyle="none")
    right.axhline(Limits().sharp_entropy or 0, color="#777777", linestyle="--", label="limit of a sharp head")
    right.set_ylim(-0.02, 1.02)
    right.set_xticks(range(config.layers))
    right.set_xlabel("layer")
    right.set_ylabel("entropy / ln n of each head")
    right.legend()
    return drawn
