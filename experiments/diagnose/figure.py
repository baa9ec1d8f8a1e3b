"""The figure: heat maps of layers × heads, means over documents."""

import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments import figures
from experiments.diagnose.config import MEASURES, DiagnoseConfig
from experiments.diagnose.results import cube, finite_mean, names


def draw(config: DiagnoseConfig, measurements: pd.DataFrame) -> Figure:
    """Two rows of four maps for each checkpoint."""
    del config
    found = names(measurements)
    drawn, axes = figures.panels(2 * len(found), 4, width=3.3, height=4.0)
    colour_map = colormaps["viridis"].with_extremes(bad=figures.COLOURS[1])  # where nothing is finite
    for name, pair in zip(found, axes.reshape(len(found), 2, 4), strict=True):
        for axis, (measure, (label, (low, high))) in zip(pair.flat, MEASURES.items(), strict=True):
            axis.grid(visible=False)
            values = finite_mean(cube(measurements, name, "model", measure), 0)
            colours = axis.imshow(values, aspect="auto", cmap=colour_map, vmin=low, vmax=high)
            axis.set_title(label, fontsize=9)
            drawn.colorbar(colours, ax=axis)
        for axis in pair[:, 0]:
            axis.set_ylabel(f"{name}: layer")
    for axis in axes[-1]:
        axis.set_xlabel("head")
    return drawn
