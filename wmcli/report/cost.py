"""Seconds of an epoch by stage: a table for people, and stacked bars.

A row has the name of its column (`variant` or `preset`), a `stage`, and `seconds`. Further keys are optional: quartiles
(`seconds_25`, `seconds_75`), and `times_as_long` as the first variant, with quartiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wmcli.errors import UsageError
from wmcli.report.plots import COLORS, INK, legend_below, named_rows, new_figure, write_figure
from wmcli.report.profile_tables import short_number
from wmcli.report.tables import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCH = "epoch"
"""Stage of the row with the sum of all others."""


def epoch_table(rows: Sequence[Row], column: str) -> list[dict[str, Any]]:
    """Return a row for each stage, with a column for each variant."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        table.setdefault(row["stage"], {"stage": row["stage"]})[row[column]] = _cell(row)
    return sorted(table.values(), key=lambda line: line["stage"] == EPOCH)  # stable: the sum stands below


def _cell(row: Row) -> str:
    text = f"{short_number(row['seconds'])} s"
    if row.get("seconds_25") is not None:
        text += f" ({short_number(row['seconds_25'])} to {short_number(row['seconds_75'])})"
    if row.get("times_as_long") is None or row["times_as_long_25"] == row["times_as_long_75"] == 1:  # the first itself
        return text
    return f"{text}, {row['times_as_long']:.3g} times"


def epoch_bars(rows: Sequence[Row], column: str, stages: Sequence[str], *, title: str = "") -> Figure:
    """Draw the seconds of an epoch as stacked bars, one bar for each variant, with the quartiles of the whole.

    Args:
        rows: One for each variant and stage, and one of `EPOCH` for each variant.
        column: Key of the variants' names.
        stages: Stages to stack, in this order.
        title: Of the figure.

    Raises:
        UsageError: There is nothing to draw.
    """
    bars: dict[str, dict[str, Row]] = {}
    for row in rows:
        bars.setdefault(row[column], {})[row["stage"]] = row
    shown = [stage for stage in stages if any(stage in bar for bar in bars.values())]
    if not shown:
        raise UsageError("no epochs to draw; time some with: wm profile --compare presets")
    figure = new_figure(6.4, 0.42 * len(bars) + 1.2)
    axes = figure.subplots()
    named_rows(axes, list(bars))
    ends = dict.fromkeys(bars, 0.0)
    for stage, color in zip(shown, COLORS, strict=False):
        widths = {name: bar[stage]["seconds"] if stage in bar else 0.0 for name, bar in bars.items()}
        axes.barh(
            range(len(bars)), list(widths.values()), 0.6, list(ends.values()), color=color, label=stage, linewidth=0
        )
        ends = {name: ends[name] + width for name, width in widths.items()}
    spreads = []
    for place, (name, bar) in enumerate(bars.items()):
        whole, edge = bar[EPOCH], ends[name]
        if whole.get("seconds_25") is not None:
            edge = max(edge, whole["seconds_75"])
            spreads.append((place, whole["seconds_25"], whole["seconds_75"]))
        axes.annotate(
            f"{short_number(whole['seconds'])} s",
            (edge, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    if spreads:
        axes.hlines(*zip(*spreads, strict=True), color=INK, linewidth=1.2, label="quartiles of an epoch")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of an epoch", fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    legend_below(figure, axes)
    return figure


def draw_epochs(rows: Sequence[Mapping[str, Any]], column: str, stages: Sequence[str], path: Path) -> None:
    """Write the picture of `epoch_bars`."""
    write_figure(path, epoch_bars(rows, column, stages))
