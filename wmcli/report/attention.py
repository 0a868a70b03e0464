"""Attention as matrices: priors as they are applied, and the weights that were paid.

Axes: T elements, as queries from top to bottom and as keys from left to right.

Source: figure 2 of "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.report.plots import new_figure, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_INK, _MASKED = "#222222", "#dcdcdc"
_PANEL = 1.6  # inches
_TICKS = 20  # at most, along an axis
MOST = 400  # panels of a picture


class AttentionMatrices(NamedTuple):
    """Matrices of one run, or means over several."""

    label: str
    """Name of the row."""
    factor: np.ndarray
    """(layers, heads, T, T): factors by which the prior changes weights or scores, NaN at masked keys."""
    about: str
    """The prior, and what its factors multiply."""
    weights: np.ndarray
    """(layers, heads, T, T), NaN at masked keys."""
    elements: Sequence[str]
    """Names of the T elements, such as o0 and a0; an empty one gets no tick."""


def attention_figure(rows: Sequence[AttentionMatrices]) -> Figure:
    """Draw matrices: for each run and layer a line with the priors of all heads, and below it one with the weights.

    The two color scales are the same in all panels. That of the weights grows with their root, so that small ones show.
    It ends at the largest weight of all queries but the first quarter, which have few keys to share among.

    Raises:
        UsageError: There are too many panels to see one.
    """
    from matplotlib.colors import PowerNorm

    heads = max(row.factor.shape[1] for row in rows)
    parts = [(row, layer) for row in rows for layer in range(len(row.factor))]
    if 2 * len(parts) * heads > MOST:
        raise UsageError(
            f"these runs have {2 * len(parts) * heads} matrices, of which a picture holds {MOST}: give fewer runs."
        )
    largest = max(float(np.nanmax(row.weights[:, :, row.weights.shape[2] // 4 :])) for row in rows)
    width = _PANEL * heads + 1.2
    figure = new_figure(width, (2 * _PANEL + 0.5) * len(parts) + 0.3)
    for part, (row, layer) in zip(figure.subfigures(len(parts), 1, squeeze=False).flat, parts, strict=True):
        grid = part.subplots(2, heads, squeeze=False)
        title = f"{row.label}, layer {layer + 1}"
        part.suptitle(shortened(title, int(14 * width)), x=0.01, horizontalalignment="left", fontsize=8, color=_INK)
        drawn: list[Any] = [
            [
                _draw(axes, row.factor[layer, head], {"vmin": 0.0, "vmax": 1.0}, row.elements)
                for head, axes in enumerate(grid[0, : row.factor.shape[1]])
            ],
            [
                _draw(axes, row.weights[layer, head], {"norm": PowerNorm(0.5, 0.0, largest)}, row.elements)
                for head, axes in enumerate(grid[1, : row.weights.shape[1]])
            ],
        ]
        for axes in grid[:, row.factor.shape[1] :].flat:
            axes.set_axis_off()
        for head, axes in enumerate(grid[0, : row.factor.shape[1]]):
            axes.set_title(f"head {head + 1}", fontsize=7, color=_INK, pad=2)
        for line, name, extend in ((0, row.about, "neither"), (1, "attention, mean over windows", "max")):
            grid[line, 0].set_ylabel("query", fontsize=6, color=_INK)
            bar = part.colorbar(drawn[line][0], ax=grid[line].tolist(), fraction=0.04, pad=0.01, extend=extend)
            bar.set_label(name, fontsize=6, color=_INK)
            bar.ax.tick_params(labelsize=5, length=1.5)
    figure.supxlabel(
        "key: o observation, a action, oa both, with their time step; gray: masked", fontsize=8, color=_INK
    )
    return figure


def _draw(axes: Axes, matrix: np.ndarray, scale: dict[str, Any], elements: Sequence[str]) -> AxesImage:
    """Draw a matrix, and name elements along both axes as far as there is room."""
    image = axes.imshow(matrix, cmap="viridis", **scale)
    axes.set_facecolor(_MASKED)
    named = [place for place, element in enumerate(elements) if element]
    shown = named[:: -(-len(named) // _TICKS)]
    texts = [elements[place] for place in shown]
    axes.set_xticks(shown, texts, rotation=90)
    axes.set_yticks(shown, texts)
    axes.tick_params(length=1, labelsize=4, colors=_INK, pad=0.5, width=0.4)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image
