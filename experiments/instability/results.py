"""What the measurements of `instability` say: when runs diverge, what told before, verdict, tables and the figure."""

import dataclasses
import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import claims, estimates, figures
from experiments.estimates import Estimate
from experiments.instability.config import ARMS, MEASURES, InstabilityConfig
from experiments.progress import Table, cells
from experiments.verdicts import Outcome

WORSE = 0.5  # nats above the run at the lowest rate: diverged
LEAST = 1e-30  # of a signal that may be 0
FALSE_ALARMS = 0.05  # of the stable runs
SIGNALS = ("logit", "entropy", "gradient", "loss", "output")
LABELS = ("largest attention logit", "smallest entropy", "gradient norm", "loss above its lowest", "output logit")
ATTENTION = SIGNALS[:2]


@dataclasses.dataclass(frozen=True)
class Watch:
    """The plain runs, the lines of the signals, and how early each was passed.

    Attributes:
        signals: logarithms by name, `[rates, seeds, looks]`, the larger the worse.
        diverged: the look at which a run diverged, `[rates, seeds]`; the number of looks for one that did not.
        lines: of each signal.
        leads: steps from the alarm to the divergence, 0 without one, `[rates, seeds]`; NaN where a run did not diverge.
    """

    signals: dict[str, np.ndarray]
    diverged: np.ndarray
    lines: dict[str, float]
    leads: dict[str, np.ndarray]

    @property
    def stable(self) -> np.ndarray:
        """The runs that did not diverge, `[rates, seeds]`."""
        return self.diverged == next(iter(self.signals.values())).shape[-1]

    def by_seed(self, name: str) -> np.ndarray:
        """The mean lead of each seed that has a run that diverged."""
        some = ~self.stable.all(axis=0)
        return np.nanmean(self.leads[name][:, some], axis=0)


def watch(config: InstabilityConfig, measurements: pd.DataFrame) -> Watch:
    """Lines that as many stable runs pass, whatever the signal, and the leads that they give."""
    signals, diverged = signals_of(config, measurements), divergence(config, measurements, "plain")
    stable = diverged == config.looks
    lines, leads = {}, {}
    for name, x in signals.items():
        x[..., : config.first] = -np.inf  # what is large because training begins is no alarm
        lines[name] = float(np.quantile(x[stable].max(axis=-1), 1 - FALSE_ALARMS)) if stable.any() else np.nan
        passed = x > lines[name]
        first = np.where(passed.any(axis=-1), passed.argmax(axis=-1), config.looks)
        leads[name] = np.where(stable, np.nan, config.look * np.maximum(diverged - first, 0))
    return Watch(signals, diverged, lines, leads)


def signals_of(config: InstabilityConfig, measurements: pd.DataFrame, arm: str = "plain") -> dict[str, np.ndarray]:
    """The logarithms of the five signals of an arm, `[rates, seeds, looks]`; what is not finite alarms nobody."""
    loss, logit, entropy, gradient, output = (runs(config, measurements, arm, name) for name in MEASURES)
    above = loss - np.fmin.accumulate(loss, axis=-1)
    logs = (np.log(np.maximum(x, LEAST)) for x in (logit, entropy, gradient, above, output))
    found = dict(zip(SIGNALS, logs, strict=True))
    found["entropy"] = -found["entropy"]
    return {name: np.where(np.isnan(x), -np.inf, x) for name, x in found.items()}


def divergence(config: InstabilityConfig, measurements: pd.DataFrame, arm: str) -> np.ndarray:
    """The look at which each run diverged, `[rates, seeds]`; the number of looks for one that did not."""
    loss = runs(config, measurements, arm, "loss")
    lost = ~(loss - loss[:1] <= WORSE)  # NaN is lost, too
    return np.where(lost.any(axis=-1), lost.argmax(axis=-1), config.looks)


def runs(config: InstabilityConfig, measurements: pd.DataFrame, arm: str, measure: str) -> np.ndarray:
    """`[rates, seeds, looks]`."""
    table = measurements.query("arm == @arm").sort_values(["rate", "seed", "step"])
    return table[measure].to_numpy(np.float64).reshape(len(config.rates), config.seeds, config.looks)


def sensitivity(config: InstabilityConfig, measurements: pd.DataFrame, arm: str) -> np.ndarray:
    """What a wrong learning rate costs in nats, of each seed: Wortsman et al. 2023, section 2.2.

    The mean over the rates of min(loss, loss at the start) less the loss at the best rate; the start is the first look
    at the lowest rate, and a loss that is not finite costs as much as the start.
    """
    loss = runs(config, measurements, arm, "loss")  # [rates, seeds, looks]
    capped = np.fmin(loss[..., -1], loss[0, :, 0])
    return capped.mean(axis=0) - capped.min(axis=0)


def judge(config: InstabilityConfig, measurements: pd.DataFrame) -> list[Outcome]:
    found = watch(config, measurements)
    leads = {name: found.by_seed(name) for name in SIGNALS}
    best = max(SIGNALS[2:], key=lambda name: leads[name].mean() if leads[name].size else 0)
    evidence = {f"{name}_ahead": estimates.difference(leads[name], leads[best]) for name in ATTENTION}
    evidence |= {f"lead_{name}": estimates.mean(x) for name, x in leads.items()}
    shares = {arm: divergence(config, measurements, arm) < config.looks for arm in ARMS}
    edge = edge_of(shares["plain"])
    unknown = Estimate(np.nan, np.nan, np.nan, config.seeds)
    if edge is None:
        evidence |= dict.fromkeys(("plain", "normed", "rescued"), unknown)
    else:
        plain, normed = shares["plain"][edge], shares["qk_norm"][edge]
        evidence |= {"plain": estimates.share(plain), "normed": estimates.share(normed)}
        evidence["rescued"] = estimates.share_difference(plain, normed)
    evidence["normed_top"] = estimates.share(shares["qk_norm"][-1])
    outcome = claims.judge(
        "D5",
        evidence,
        layers=config.num_layers,
        width=config.model_width,
        heads=config.num_heads,
        length=config.length,
        text="pydoc_data.topics",
        batch=config.batch_size,
        steps=config.steps,
        rates=", ".join(f"{rate:g}" for rate in config.rates),
        seeds=config.seeds,
        diverged=int(shares["plain"].sum()),
        edge="no rate" if edge is None else f"{config.rates[edge]:g}",
    )
    return [outcome]


def edge_of(diverged: np.ndarray) -> int | None:
    """The lowest rate at which half of the runs `[rates, seeds]` diverge, by its place."""
    half = diverged.mean(axis=1) >= 0.5
    return int(half.argmax()) if half.any() else None


def figure(config: InstabilityConfig, measurements: pd.DataFrame) -> Figure:
    drawn, axes = figures.panels(2, 2)
    shares, excess, before, leads = axes.flat
    found = watch(config, measurements)
    steps = config.look * (1 + np.arange(config.looks))
    for index, arm in enumerate(ARMS):
        by_rate = [estimates.share(x < config.looks) for x in divergence(config, measurements, arm)]
        middle = np.asarray([x.value for x in by_rate])
        errors = [middle - [x.low for x in by_rate], np.asarray([x.high for x in by_rate]) - middle]
        figures.curve(shares, index, config.rates, middle, arm)
        shares.errorbar(config.rates, middle, yerr=errors, fmt="none", color=figures.COLOURS[index], capsize=3)
        loss = runs(config, measurements, arm, "loss")
        for rate, more in zip(config.rates[1:], (loss - loss[:1])[1:], strict=True):
            colour = figures.COLOURS[config.rates.index(rate) % len(figures.COLOURS)]
            label = f"rate {rate:g}" if arm == "plain" else "_nolegend_"
            line = "-" if arm == "plain" else ":"
            excess.plot(steps, np.nanmedian(more, axis=0), color=colour, linestyle=line, label=label)
    shares.set(title="Runs that diverge (Wilson 95%)", xlabel="learning rate", ylabel="share of seeds", xscale="log")
    excess.axhline(WORSE, color="black", linewidth=1, linestyle="--", label="diverged")
    excess.set(title=f"Loss − loss at rate {config.rates[0]:g} (dotted: QK-norm)", xlabel="step", ylabel="nats, median")
    excess.set(ylim=(-1.5, 3))

    edge = edge_of(~found.stable)
    edge = len(config.rates) - 1 if edge is None else edge
    for index, (name, label) in enumerate(zip(SIGNALS, LABELS, strict=True)):
        there = found.signals[name][edge, :, config.first :]
        times = np.exp(np.median(there, axis=0) - found.lines[name])
        figures.curve(before, index, steps[config.first :], times, label, markersize=2)
        lead = estimates.mean(found.by_seed(name))
        errors = [[lead.value - lead.low], [lead.high - lead.value]]
        look = {"color": figures.COLOURS[index], "marker": figures.MARKERS[index], "capsize": 3}
        leads.errorbar([lead.value], [index], xerr=errors, **look)
    before.axhline(1, color="black", linewidth=1, linestyle="--", label="alarm")
    diverging = steps[np.minimum(found.diverged[edge], config.looks - 1)]
    before.axvline(np.median(diverging), color="black", linewidth=1, linestyle=":", label="diverged (median)")
    before.set(title=f"Signals at rate {config.rates[edge]:g}, plain", xlabel="step", yscale="log", ylim=(3e-4, 100))
    before.set(ylabel="times the alarm's line (entropy: inverse)")
    leads.set(title="How early each line is passed (95%)", xlabel="steps before the divergence", ylim=(4.6, -0.6))
    leads.set_yticks(range(len(SIGNALS)), LABELS)
    for one in (shares, excess):
        one.legend(fontsize=8)
    before.legend(fontsize=8, loc="lower right")
    return drawn


def tables(config: InstabilityConfig, measurements: pd.DataFrame) -> list[Table]:
    rows = []
    for arm in ARMS:
        diverged = divergence(config, measurements, arm)
        last = {m: runs(config, measurements, arm, m)[..., -1] for m in ("loss", "logit", "entropy")}
        for index, rate in enumerate(config.rates):
            told = [float(np.median(x[index])) for x in last.values()]
            rows.append((arm, f"{rate:g}", str(estimates.share(diverged[index] < config.looks)), *told))
    found, signals = watch(config, measurements), []
    for name, label in zip(SIGNALS, LABELS, strict=True):
        leads, x = found.leads[name][~found.stable], found.signals[name][found.stable]
        line = math.exp(-found.lines[name] if name == "entropy" else found.lines[name])
        alarmed = (x > found.lines[name]).any(axis=-1)
        signals.append((label, line, float(alarmed.mean()), float((leads > 0).mean()), float(np.median(leads))))
    costs = [sensitivity(config, measurements, arm) for arm in ARMS]
    sensitivities = [(arm, str(estimates.mean(cost))) for arm, cost in zip(ARMS, costs, strict=True)]
    sensitivities.append(("difference", str(estimates.difference(*costs))))
    return [
        Table("Runs", ("arm", "rate", "diverged", "loss", "largest logit", "smallest entropy"), cells(rows)),
        Table(
            "Signals of the plain runs",
            ("signal", "line", "false alarms", "told before", "median lead, steps"),
            cells(signals),
        ),
        Table("What a wrong learning rate costs (Wortsman et al. 2023, 2.2)", ("arm", "nats"), cells(sensitivities)),
    ]
