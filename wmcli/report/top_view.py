"""Walks of episodes on boards seen from above.

Source: figure 2 of S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from wmcli.report.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL, _WIDEST = 0.32, 9.5  # inches of a cell, and of the widest board
_INK = "#222222"
_CONTEXT, _QUERY, _JUMP = "#ffffff", "#e69f00", "#56b4e9"
_ASIDE = 0.14  # cells between the lines of context and query on one way


class Walk(Protocol):
    """An episode from above: positions are cells, (x, y) with y to the south, from the board's north-west corner."""

    @property
    def board(self) -> np.ndarray:
        """uint8 (H, W, 3), a picture."""

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of the board."""

    @property
    def position(self) -> np.ndarray:
        """Where the agent is in each frame, (T, 2)."""

    @property
    def context(self) -> int:
        """Leading frames that belong to the context."""

    @property
    def jumps(self) -> np.ndarray:
        """bool (T,): a teleport led to the frame."""


def top_views(walks: Mapping[str, Walk]) -> Figure:
    """Draw boards one below the other, each with the agent's walk: the context, then the query, and teleports between.

    Args:
        walks: Episodes by title.
    """
    from matplotlib.lines import Line2D

    sizes = []
    for walk in walks.values():
        rows, columns = walk.cells
        cell = min(_CELL, _WIDEST / columns)
        sizes.append((rows * cell, columns * cell))
    figure = new_figure(max(4.5, *(width for _, width in sizes)) + 0.3, sum(height + 0.4 for height, _ in sizes) + 0.5)
    grid = figure.subplots(len(walks), 1, squeeze=False, gridspec_kw={"height_ratios": [each for each, _ in sizes]})
    for (title, walk), axes in zip(walks.items(), grid[:, 0], strict=True):
        _draw(axes, walk)
        axes.set_title(title, fontsize=8, color=_INK, loc="left")
    handles = [Line2D([], [], color=_CONTEXT, label="context"), Line2D([], [], color=_QUERY, label="query")]
    if any(walk.jumps.any() for walk in walks.values()):
        handles.append(Line2D([], [], color=_JUMP, linestyle=":", marker="D", markersize=4, label="teleport"))
    handles.append(Line2D([], [], color=_CONTEXT, linestyle="", marker="o", label="start"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=4, fontsize=8, facecolor="#5a5a66", labelcolor="#ffffff"
    )
    return figure


def _draw(axes: Axes, walk: Walk) -> None:
    rows, columns = walk.cells
    axes.imshow(walk.board, extent=(0, columns, rows, 0), interpolation="nearest")
    axes.set_axis_off()
    for begin, end, color, aside in (
        (0, walk.context, _CONTEXT, -_ASIDE / 2),
        (walk.context - 1, len(walk.position), _QUERY, _ASIDE / 2),
    ):
        places = walk.position[begin:end] + aside
        broken = np.insert(places, np.flatnonzero(walk.jumps[begin:end]), np.nan, axis=0)
        axes.plot(*broken.T, color=color, linewidth=1.1)
    for frame in np.flatnonzero(walk.jumps):
        axes.plot(*walk.position[frame - 1 : frame + 1].T, color=_JUMP, linewidth=1.4, linestyle=":")
        axes.plot(*walk.position[frame], color=_JUMP, marker="D", markersize=4)
    axes.plot(*walk.position[0], color="#ffffff", marker="o", markersize=4.5)
