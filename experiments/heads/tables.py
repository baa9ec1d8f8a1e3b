"""The tables of `heads`."""

import functools

import numpy as np
import pandas as pd

from experiments import estimates
from experiments.arms import Best
from experiments.claims.heads import PATTERNS
from experiments.claims.trained_heads import MIXINGS, SETTINGS
from experiments.heads.config import HeadsConfig
from experiments.heads.measured import COUNTED, Measured
from experiments.heads.trained import output_name, split_name
from experiments.progress import Table, cells


def tables(config: HeadsConfig, measurements: pd.DataFrame) -> list[Table]:
    found = Measured(config, measurements)
    return [*_simulated_tables(found), *_trained_tables(found)]


def _simulated_tables(found: Measured) -> list[Table]:
    config, heads = found.config, sorted(found.config.cost_heads)
    seconds = np.median(found.seconds(), axis=0) * 1e3
    rows = [
        (h, config.cost_width // h, *(f"{found.cost(name)[i]:,.0f}" for name in COUNTED), float(seconds[i]))
        for i, h in enumerate(heads)
    ]
    names = ("h", "d_k", "parameters", "FLOPs of products", "all operations", "temporary bytes", "ms")
    cost = Table(f"One layer of width {config.cost_width}, n = {config.cost_length}", names, cells(rows))
    rows = []
    for length in sorted(config.fit_lengths):
        for name, what in PATTERNS.items():
            left = found.fit("left", name, length).mean(axis=0)
            rows.append((length, what, *(f"{x:.2%}" for x in left), float(found.narrowest_fit(name, length).mean())))
    names = ("n", "pattern", *(f"d_k = {width}" for width in sorted(config.fit_dims)), "d_k that fits")
    return [cost, Table("KL left of uniform's, q and k fitted", names, cells(rows))]


def _trained_tables(found: Measured) -> list[Table]:
    config, rows = found.config, []
    for arm in config.arms:
        best = found.best(split_name(*arm))
        above = found.loss(split_name(*arm)) - found.loss(split_name(*config.base))
        rows.append((*arm, _rate(best), f"{best.values.mean():.3f}", str(estimates.mean(above))))
    names = ("h", "d_k", "best rate", "loss", "above the base")
    base = "h = {}, d_k = {}".format(*config.base)
    grid = Table(f"Language model at its best rate; base: {base}", names, cells(rows))
    rows = []
    for setting, where in SETTINGS.items():
        for mixing in ("trained", *MIXINGS):
            best = found.best(output_name(config, mixing, setting))
            above = estimates.mean(found.without(mixing, setting))
            rows.append(
                (MIXINGS.get(mixing, "a trained W_O"), where, _rate(best), f"{best.values.mean():.3f}", str(above))
            )
    output = Table(f"W_O at {base}", ("W_O", "MLP", "best rate", "loss", "above a trained one"), cells(rows))
    rows = []
    for heads in config.compared:
        for when in ("before", "after"):
            read = functools.partial(found.pattern, heads, when)
            share = [float(found.difference(heads, when, pair).mean()) for pair in ("within", "between")]
            plain = [float(read("within", name).mean()) for name in ("entropy", "divergence", "shuffled")]
            rows.append((heads, when, *plain, *share))
    names = ("h", "training", "entropy / ln n", "JS / ln 2", "of shuffled rows", "share", "share, two models")
    return [grid, output, Table("How far apart heads of a layer look", names, cells(rows))]


def _rate(best: Best) -> str:
    return f"{best.rate:.3g}" + ("" if best.inside else " (edge)")
