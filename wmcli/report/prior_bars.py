"""The parameters that attention priors ended with, by head and layer, as bars.

Source: figure 5 of "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wmcli.report.plots import COLORS, new_figure, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARAMETERS = ("mean", "deviation", "span")
_INK = "#222222"


def prior_bars(
    groups: Mapping[str, Sequence[Mapping[str, np.ndarray]]], initial: Mapping[str, Mapping[str, float]]
) -> Figure:
    """Draw a row of panels for each parameter and a column for each group of runs, with a bar for each head of a layer.

    Bars are means over runs, with one sample standard deviation to either side; dashes are the initial values.

    Args:
        groups: For each group its runs: parameter -> values (layers, heads), alike in all runs of a group.
        initial: Initial value of each parameter of a group.
    """
    names = [name for name in PARAMETERS if any(name in runs[0] for runs in groups.values())]
    shapes = [np.shape(next(iter(runs[0].values()))) for runs in groups.values()]
    width = max(2.4, 0.16 * max(layers * (heads + 1) for layers, heads in shapes) + 0.8)
    figure = new_figure(width * len(groups), 1.7 * len(names) + 0.6)
    grid = figure.subplots(len(names), len(groups), squeeze=False, sharey="row")
    for column, (label, runs) in enumerate(groups.items()):
        layers, heads = shapes[column]
        places = (np.arange(layers)[:, None] * (heads + 1) + np.arange(heads)).ravel()
        grid[0, column].set_title(shortened(label, int(13 * width) - 7), fontsize=8, color=_INK, loc="left")
        for name, axes in zip(names, grid[:, column], strict=True):
            if name not in runs[0]:
                axes.set_axis_off()
                continue
            values = np.stack([run[name] for run in runs]).reshape(len(runs), -1)
            spread = values.std(0, ddof=1) if len(runs) > 1 else None
            colors = np.repeat(np.resize(COLORS, layers), heads)
            axes.bar(places, values.mean(0), yerr=spread, color=colors, error_kw={"linewidth": 0.8})
            axes.axhline(initial[label][name], color=_INK, linewidth=1, linestyle=(0, (4, 3)))
            axes.set_xticks(places, np.tile(np.arange(1, heads + 1), layers))
            axes.tick_params(labelsize=6, length=2, colors=_INK, labelleft=True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_ylabel(f"{name} [offsets]", fontsize=7, color=_INK)
            axes.set_xlabel(f"head, of layers 1 to {layers}", fontsize=7, color=_INK)
    return figure
