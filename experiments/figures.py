"""How every figure looks: one style, colours that stay apart for colour-blind readers, no global state."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito
MARKERS = "osD^vPX"


def panels(rows: int, columns: int, *, width: float = 5.0, height: float = 4.0) -> tuple[Figure, np.ndarray]:
    """A figure of rows × columns axes, `[rows, columns]`."""
    figure = Figure(figsize=(width * columns, height * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.grid(visible=True, color="#dddddd", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def curve(axes: Axes, index: int, x: Any, y: Any, label: str, **style: Any) -> None:
    """One line of a family; `index` chooses colour and marker."""
    look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
    axes.plot(x, y, label=label, **{**look, **style})


def powers(axes: Axes, values: Any, *, base: int = 2) -> None:
    """A logarithmic x axis whose ticks are the values that were measured."""
    axes.set_xscale("log", base=base)
    axes.set_xticks(list(values))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=60)
