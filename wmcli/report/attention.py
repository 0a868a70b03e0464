"""Attention as matrices: priors as they are applied, and the weights that were paid.

Axes: T elements, as queries from top to bottom and as keys from left to right.

Source: figure 2 of "Learning to Focus" (De Dios Allegue, He, Oliehoek 2025, arXiv 2511.06946).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wmcli.errors import UsageError
from wmcli.report.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _MASKED = "#222222", "#dcdcdc"
_PANEL = 1.35  # inches
_TICKS = 13  # at most, along an axis
_PANELS = 400  # in a picture


class AttentionMatrices(NamedTuple):
    """Matrices of one run, or means over several."""

    label: str
    """Name of the row."""
    factor: np.ndarray
    """(layers, heads, T, T): factors by which the prior changes weights or scores, NaN at masked keys."""
    about: str
    """What the factors multiply."""
    weights: np.ndarray
    """(layers, heads, T, T), NaN at masked keys."""
    elements: Sequence[str]
    """Names of the T elements, such as o0 and a0; an empty one gets no tick."""


def attention_figure(rows: Sequence[AttentionMatrices]) -> Figure:
    """Draw matrices: for each run and layer a line with the priors of all heads, and below it one with the weights.

    The two color scales are the same in all panels. That of the weights grows with their root, so that small ones show.

    Raises:
        UsageError: There are too many panels to see one.
    """
    from matplotlib.colors import PowerNorm

    heads = max(row.factor.shape[1] for row in rows)
    lines = [(row, layer) for row in rows for layer in range(len(row.factor))]
    if 2 * len(lines) * heads > _PANELS:
        raise UsageError(
            f"these runs have {2 * len(lines) * heads} matrices, of which a picture holds {_PANELS}: give fewer runs."
        )
    most = max(float(np.nanmax(row.weights)) for row in rows)
    scales: dict[str, dict[str, Any]] = {
        "factor": {"vmin": 0.0, "vmax": 1.0},
        "weights": {"norm": PowerNorm(0.5, 0.0, most)},
    }
    figure = new_figure(_PANEL * heads + 2.0, _PANEL * 2 * len(lines) + 0.8)
    grid = figure.subplots(2 * len(lines), heads, squeeze=False)
    images: dict[str, Any] = {}
    for index, (row, layer) in enumerate(lines):
        for line, kind in enumerate(scales):
            for head, axes in enumerate(grid[2 * index + line]):
                if head >= row.factor.shape[1]:
                    axes.set_axis_off()
                    continue
                images[kind] = axes.imshow(getattr(row, kind)[layer, head], cmap="viridis", **scales[kind])
                _finish(axes, row.elements, names=(kind == "weights", head == 0))
                if not index and not line:
                    axes.set_title(f"head {head + 1}", fontsize=8, color=_INK)
            about = f"prior ({row.about})" if kind == "factor" else "attention"
            grid[2 * index + line, 0].set_ylabel(f"{row.label}\nlayer {layer + 1}: {about}", fontsize=7, color=_INK)
    for kind, place in (("factor", grid[0::2]), ("weights", grid[1::2])):
        text = "factor of the prior" if kind == "factor" else "attention weight, mean over windows"
        bar = figure.colorbar(images[kind], ax=place.ravel().tolist(), fraction=0.03, shrink=min(1.0, 2 / len(lines)))
        bar.set_label(text, fontsize=7, color=_INK)
        bar.ax.tick_params(labelsize=6)
    figure.supxlabel("keys: o observation, a action, with their time step; gray is masked", fontsize=8, color=_INK)
    return figure


def _finish(axes: Axes, elements: Sequence[str], names: tuple[bool, bool]) -> None:
    """Name elements along both axes, as far as there is room; `names`: below, and at the left."""
    axes.set_facecolor(_MASKED)
    named = [place for place, element in enumerate(elements) if element]
    shown = named[:: -(-len(named) // _TICKS)]
    texts = [elements[place] for place in shown]
    axes.set_xticks(shown, texts if names[0] else [""] * len(shown), rotation=90)
    axes.set_yticks(shown, texts if names[1] else [""] * len(shown))
    axes.tick_params(length=1.5, labelsize=5, colors=_INK, pad=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
