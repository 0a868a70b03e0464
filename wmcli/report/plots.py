"""Curves and histograms as matplotlib figures.

Every function returns a Figure and changes no global state. `write_figure` writes it to a file; `png_bytes` gives the
bytes of a PNG. Matplotlib is imported with the first figure.
"""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

import numpy as np

from wmcli.errors import UsageError
from wmcli.report.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Band = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]  # value, low, high: (K,) each
Interval = tuple[float, float | None, float | None]  # value, low, high
BandKind = Literal["bootstrap", "stderr", "range"]
"""What a band over runs shows."""
BAND: BandKind = "bootstrap"
_BANDS: dict[BandKind, str] = {
    "bootstrap": "95 % bootstrap interval of the mean over runs",
    "stderr": "one standard error of the mean over runs to either side",
    "range": "lowest to highest run",
}

# Distinct for color-blind readers too.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
_THIN = {"linewidth": 0.7, "alpha": 0.5, "marker": ".", "markersize": 3}
INK, _GREY, _GRID = "#222222", "#777777", "#e6e6e6"
_NOT_METRICS = ("time", "began", "stage", "job", "version", "epoch", "environment_step", "update")
STEPS = "environment steps"
_SMOOTH_FROM = 60  # points from which a smoothed line is laid over the raw one
_POINTS = 2000  # drawn per line at most
_LINE = 0.16  # height of a legend's line [inches]
_LEGEND_LINES = 1  # for which a figure has room
_MOST_BANDS = 10  # of which each is as dark as a single one
_FILE_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
SUFFIXES = tuple(_FILE_METADATA)
"""Of the files that `write_figure` writes."""


# -- metrics.jsonl ----------------------------------------------------------------------------------------------------


def latest_records(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without those of updates that were repeated later.

    A stage repeats updates when it resumes from a checkpoint. In the result the updates of one stage and job ascend.
    Records without `update` all stay.
    """
    latest: dict[int, dict[str, Any]] = {}
    ascending: dict[Any, list[int]] = {}  # keys of `latest`, by stage and job
    for place, record in enumerate(records):
        if isinstance(record.get("update"), int):
            line = ascending.setdefault((record.get("stage"), record.get("job")), [])
            while line and latest[line[-1]]["update"] >= record["update"]:
                del latest[line.pop()]
            line.append(place)
        latest[place] = dict(record)
    return list(latest.values())


def along(records: Iterable[Mapping[str, Any]], jobs: Collection[str]) -> list[dict[str, Any]]:
    """Select the records of an artifact and its ancestors.

    Args:
        records: Those of a metrics.jsonl.
        jobs: Digests of the jobs of an artifact and of its ancestors.

    Returns:
        The records of these jobs. If there are none: those without a job, as older runs logged them.
    """
    every = [dict(record) for record in records]
    return [record for record in every if record.get("job") in jobs] or [each for each in every if "job" not in each]


def curves_by_stage(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the curves of every stage.

    Every finite number in a record is a metric, except time, version, epoch and the like. Of two jobs with the same
    updates the later one counts. Select one line of descent with `along` first.

    Returns:
        stage -> metric -> (updates (K,), values (K,)). Stages in order of appearance, `loss` before other metrics.
    """
    by_job: dict[str, dict[Any, list[dict[str, Any]]]] = {}
    for record in latest_records(records):
        if isinstance(record.get("update"), int) and isinstance(record.get("stage"), str):
            by_job.setdefault(record["stage"], {}).setdefault(record.get("job"), []).append(record)
    curves: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for stage, jobs in by_job.items():
        line: list[dict[str, Any]] = []
        for group in sorted(jobs.values(), key=lambda group: group[0]["update"]):
            line = [record for record in line if record["update"] < group[0]["update"]] + group
        points: dict[str, list[tuple[float, float]]] = {}
        for record in line:
            for name, value in metrics_of(record).items():
                points.setdefault(name, []).append((record["update"], value))
        if points:
            names = sorted(points, key=lambda name: name != "loss")  # stable: the others stay as they appeared
            curves[stage] = {name: (np.array(points[name])[:, 0], np.array(points[name])[:, 1]) for name in names}
    return curves


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record: its finite numbers, except time, version, epoch and the like."""
    return {name: float(value) for name, value in record.items() if name not in _NOT_METRICS and _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -- figures ----------------------------------------------------------------------------------------------------------


def learning_curves(
    records: Iterable[Mapping[str, Any]], *, stages: Sequence[str] | None = None, columns: int = 4
) -> Figure:
    """Draw one panel per metric against the updates, grouped by stage.

    Args:
        records: Those of one line of descent (see `along`).
        stages: Stages to draw, in this order; None draws all.
        columns: Largest number of panels side by side.

    Raises:
        UsageError: There is nothing to draw.
    """
    curves = curves_by_stage(records)
    if stages is not None:
        curves = {stage: curves[stage] for stage in stages if stage in curves}
    if not curves:
        raise UsageError("no training records to draw; train a stage first, for example with: wm train-dynamics")
    columns = min(columns, max(len(metrics) for metrics in curves.values()))
    rows = {stage: math.ceil(len(metrics) / columns) for stage, metrics in curves.items()}
    heights = [1.75 * count + 0.35 for count in rows.values()]
    figure = new_figure(max(2.6 * columns, 4.0), sum(heights))
    figure.set_layout_engine("constrained", h_pad=0.07)  # inches: keeps the stages' names off the edge
    parts = figure.subfigures(len(curves), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (stage, metrics), style in zip(parts, curves.items(), _styles(len(curves)), strict=True):
        part.suptitle(stage, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        grid = part.subplots(rows[stage], columns, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(metrics):
                axes.set_visible(False)
                continue
            name, (x, y) = list(metrics.items())[index]
            _line(axes, x, y, style["color"])
            _finish_metric(axes, name, lowest=index + columns >= len(metrics))
    return figure


def compared_curves(
    curves: Mapping[str, Mapping[str, tuple[np.ndarray, ...]]],
    *,
    faint: Mapping[str, Mapping[str, tuple[np.ndarray, ...]]] | None = None,
    title: str = "",
    band: str = "",
    columns: int = 3,
) -> Figure:
    """Draw one panel per metric against the updates, a line for each name.

    Args:
        curves: name -> metric -> (updates (K,), values (K,)), such as one stage of `curves_by_stage` of several runs;
            behind them possibly the limits of a band, low and high (K,).
        faint: Dotted lines in the colors of the same names, without limits.
        title: Title of the figure.
        band: What the bands show, for the legend.
        columns: Largest number of panels side by side.

    Raises:
        UsageError: There is nothing to draw.
    """
    metrics = list(dict.fromkeys(metric for lines in curves.values() for metric in lines))
    if not metrics:
        raise UsageError("no training records to draw; train a stage first, for example with: wm train-dynamics")
    columns = min(columns, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = new_figure(max(2.6 * columns, 4.0), 1.75 * rows + 0.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
    styles = dict(zip(curves, _styles(len(curves)), strict=True))
    grid = figure.subplots(rows, columns, squeeze=False)
    for index, axes in enumerate(grid.flat):
        if index >= len(metrics):
            axes.set_visible(False)
            continue
        for name, lines in curves.items():
            look = {key: styles[name][key] for key in ("color", "linestyle")}
            if metrics[index] in lines:
                x, y, *limits = lines[metrics[index]]
                _line(axes, x, y, **look)
                if limits:
                    axes.fill_between(x, *limits, color=look["color"], alpha=_opacity(len(curves)), linewidth=0)
            if faint and metrics[index] in faint.get(name, {}):
                axes.plot(*faint[name][metrics[index]], color=look["color"], linestyle=":", linewidth=1, alpha=0.7)
            if index == 0 and (len(curves) > 1 or band):
                axes.plot([], [], **look, label=name)
        if index == 0 and band:
            _name_band(axes, band)
        _finish_metric(axes, metrics[index], lowest=index + columns >= len(metrics))
    legend_below(figure, grid[0, 0])
    return figure


def _finish_metric(axes: Axes, name: str, *, lowest: bool) -> None:
    """Give a small panel of one metric its name and few ticks, and the `lowest` of a column its axis' name."""
    _style(axes)
    axes.set_title(name.replace("_", " "), loc="left", fontsize=8, color=INK)
    axes.margins(x=0.02)
    axes.locator_params(axis="y", nbins=4)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(_count)
    if lowest:
        axes.set_xlabel("updates", fontsize=8, color=_GREY)


def return_curve(
    evaluations: Iterable[Mapping[str, Any]], *, references: Mapping[str, float] | None = None, title: str = ""
) -> Figure:
    """Draw the mean return of one run's evaluations against environment steps, with 95 % intervals.

    Each number of episodes has a line and a marker of its own.

    Args:
        evaluations: Those of one line of descent, in any order, each with `environment_step`, `mean`, `episodes` and
            `stderr` (None if unknown). Of several with equal step and episodes the last counts.
        references: name -> return ("random", "human", a paper's score), drawn as dashed lines with their names.
        title: Title of the plot.

    Raises:
        UsageError: There are no evaluations.
    """
    by_episodes: dict[int, dict[float, Mapping[str, Any]]] = {}
    for evaluation in evaluations:
        by_episodes.setdefault(evaluation["episodes"], {})[evaluation["environment_step"]] = evaluation
    if not by_episodes:
        raise UsageError("no evaluations to draw; make one with: wm eval")
    figure = new_figure(6.0, 3.8)
    axes = figure.subplots()
    _style(axes)
    for episodes, style in zip(sorted(by_episodes, reverse=True), _styles(len(by_episodes)), strict=True):
        points = by_episodes[episodes]
        steps = sorted(points)
        means = [points[step]["mean"] for step in steps]
        errors = [math.nan if (stderr := points[step]["stderr"]) is None else 1.96 * stderr for step in steps]
        label = _episodes(episodes) + ", 95 % interval" * any(map(math.isfinite, errors))
        axes.errorbar(steps, means, errors, **style | _marked(len(steps)), elinewidth=1.1, capsize=2.5, label=label)
    _finish_returns(figure, axes, references or {}, title)
    return figure


def returns_over(
    groups: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    *,
    x_label: str = STEPS,
    references: Mapping[str, float] | None = None,
    title: str = "",
    band: BandKind = BAND,
) -> Figure:
    """Draw mean returns of several runs against environment steps or time, one color per group of runs.

    One run is one line. Several runs are thin lines with a thick one for their mean, and a band, which the legend
    names; it counts the runs of each group then. The mean covers the steps that all runs of the group reach; runs are
    interpolated linearly.

    Args:
        groups: name -> one sequence per run of (step or time, mean return) in any order. Of several returns at one
            step the last counts.
        x_label: Of the horizontal axis.
        references: name -> return, drawn as dashed lines with their names.
        title: Title of the plot.
        band: The 95 % bootstrap interval of the mean (of up to three runs that is their range), one standard error of
            the mean to either side, or the lowest and the highest run.

    Raises:
        UsageError: There is no group, or a run has no finite return.
    """
    if not groups:
        raise UsageError("no evaluations to draw; make one with: wm eval")
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    _style(axes)
    is_banded = any(len(runs) > 1 for runs in groups.values())
    for (name, runs), style in zip(groups.items(), _styles(len(groups)), strict=True):
        lines = [_by_step(run) for run in runs]
        if not lines or not all(len(steps) for steps, _ in lines):
            raise UsageError(f"{name}: a run without returns cannot be drawn; make some with: wm eval --run RUN")
        if len(lines) == 1:
            steps, returns = lines[0]
            axes.plot(steps, returns, **style | _marked(len(steps)), label=f"{name} (1 run)" if is_banded else name)
            continue
        for steps, returns in lines:
            axes.plot(steps, returns, **style | _THIN | _marked(len(steps)))
        low, high = max(steps[0] for steps, _ in lines), min(steps[-1] for steps, _ in lines)
        common = np.unique([step for steps, _ in lines for step in steps if low <= step <= high])
        curves = np.array([np.interp(common, steps, returns) for steps, returns in lines])  # (runs, K)
        axes.plot(common, curves.mean(0), **style | _marked(len(common)), label=f"{name} ({len(lines)} runs)")
        bottom, top = _band(curves, band)
        axes.fill_between(common, bottom, top, color=style["color"], alpha=_opacity(len(groups)), linewidth=0)
        if len(common) == 1:  # a band has no width there
            axes.vlines(common, bottom, top, color=style["color"], linewidth=1.2)
    if is_banded:
        _name_band(axes, _BANDS[band])
    _finish_returns(figure, axes, references or {}, title, x_label)
    return figure


def returns_histogram(
    returns: Sequence[float] | np.ndarray, *, references: Mapping[str, float] | None = None, title: str = ""
) -> Figure:
    """Draw a histogram of episode returns, with their mean and the references.

    Integer returns of a small range have one bar for each value.
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(returns, dtype=float)
    if not values.size:
        raise UsageError("no episodes to draw; make some with: wm eval")
    figure = new_figure(6.0, 3.4)
    axes = figure.subplots()
    _style(axes)
    span = values.max() - values.min()
    whole = np.array_equal(values, values.round()) and span <= 40
    if whole:
        edges = np.arange(values.min() - 0.5, values.max() + 1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    else:
        edges = np.histogram_bin_edges(values, bins=min(30, max(5, math.ceil(2 * values.size ** (1 / 3)))))
    axes.hist(values, bins=edges.tolist(), rwidth=0.8 if whole else 1.0, color=COLORS[5], edgecolor="white")
    if span == 0:  # leave room beside the only bar
        axes.update_datalim([(edges[0] - 2, 0), (edges[-1] + 2, 0)])
    axes.axvline(values.mean(), color=COLORS[1], linewidth=1.8, label=f"mean {values.mean():.4g}")
    for (name, value), dash in zip((references or {}).items(), ((4, 3), (1, 2), (6, 2, 1, 2)) * 9, strict=False):
        axes.axvline(value, color=INK, linewidth=1.2, linestyle=(0, dash), label=f"{name} {value:.4g}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("return of an episode", color=INK)
    axes.set_ylabel("episodes", color=INK)
    axes.set_title(title or _episodes(values.size), loc="left", fontsize=10, color=INK)
    legend_below(figure, axes)
    return figure


def performance_profiles(
    thresholds: Sequence[float] | np.ndarray,
    profiles: Mapping[str, Band],
    *,
    xlabel: str = "human-normalized score τ",
    title: str = "",
) -> Figure:
    """Draw performance profiles: the share of each system's runs that score more than τ.

    Args:
        thresholds: Values of τ (K,).
        profiles: name -> (value, low, high), (K,) each. low and high may be None.
        xlabel: Label of the horizontal axis.
        title: Title of the plot.

    Source: Agarwal et al. 2021, arXiv 2108.13264.
    """
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    _style(axes)
    for (name, band), style in zip(profiles.items(), _styles(len(profiles)), strict=True):
        _banded(axes, thresholds, band, style, name, _opacity(len(profiles)))
    axes.set_ylim(0, 1.02)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel("runs with a score above τ", color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    legend_below(figure, axes)
    return figure


def interval_panels(panels: Mapping[str, Mapping[str, Interval]], *, x_label: str = "", title: str = "") -> Figure:
    """Draw statistics with their intervals: a panel for each statistic, a row for each variant.

    Args:
        panels: statistic -> variant -> value, low and high. Without limits only the value is drawn.
        x_label: Of the horizontal axes.
        title: Of the figure.

    Raises:
        UsageError: There are no statistics.

    Source: Agarwal et al. 2021, arXiv 2108.13264, figure 9.
    """
    names = list(dict.fromkeys(name for rows in panels.values() for name in rows))
    if not names:
        raise UsageError("no statistics to draw; compare some runs with: wm compare RUN...")
    figure = new_figure(7.4, 0.3 * len(names) + 1.0)
    places = {name: place for place, name in enumerate(names)}
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (statistic, rows) in zip(grid, panels.items(), strict=True):
        named_rows(axes, names)
        for name, interval in rows.items():
            _interval(axes, places[name], interval, COLORS[places[name] % len(COLORS)])
        axes.set_title(statistic, loc="left", fontsize=9, color=INK)
        axes.margins(x=0.12)
        axes.locator_params(axis="x", nbins=3 if len(panels) > 2 else 6)
    figure.supxlabel(x_label, fontsize=9, color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    return figure


def improvement(pairs: Mapping[tuple[str, str], Interval], *, title: str = "") -> Figure:
    """Draw how probably a run of one variant beats one of another, a row for each pair.

    Args:
        pairs: (variant, other) -> probability that the variant scores higher, low and high.
        title: Of the figure.

    Raises:
        UsageError: There are no pairs.

    Source: Agarwal et al. 2021, arXiv 2108.13264, figure 11.
    """
    if not pairs:
        raise UsageError(
            "no pairs of variants to draw; compare two with: wm compare RUN... --by KEY, or name published scores of"
            " runs, such as: --published REM"
        )
    figure = new_figure(7.4, 0.3 * len(pairs) + 1.0)
    axes = figure.subplots()
    named_rows(axes, [variant for variant, _ in pairs])
    for place, interval in enumerate(pairs.values()):
        _interval(axes, place, interval, COLORS[0])
    others = axes.secondary_yaxis("right")
    others.set_yticks(range(len(pairs)), [shortened(other) for _, other in pairs])
    others.tick_params(length=0, labelsize=8, labelcolor=INK)
    others.spines["right"].set_visible(False)
    axes.axvline(0.5, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlim(-0.02, 1.02)  # 0 and 1 are seen
    axes.set_xticks(np.linspace(0, 1, 5))
    axes.xaxis.set_major_formatter(_count)
    axes.set_xlabel("probability that a run of the left scores higher than one of the right", fontsize=9, color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    return figure


def cost_by_length(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, ...]]]], *, x_label: str = "elements"
) -> Figure:
    """Draw cost against length, one panel per kind of cost, both axes logarithmic.

    A linear cost is a flat line where the panel shows the cost of one element.

    Args:
        panels: title -> name -> (length, cost), or (length, cost, low, high) for a band, in order of length. A name has
            one color and marker in all panels.
        x_label: Of the horizontal axes.

    Raises:
        UsageError: There are no costs.
    """
    from matplotlib.ticker import LogLocator

    if not panels:
        raise UsageError("no costs to draw; measure some with: wm profile --compare backbones")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    styles = dict(zip(names, _styles(len(names)), strict=True))
    figure, handles = new_figure(3.6 * len(panels) + 1.2, 3.4), {}
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _style(axes)
        for name, points in lines.items():
            lengths, costs, *limits = (np.array(column) for column in zip(*points, strict=True))
            low, high = limits or (None, None)
            handles[name] = _banded(axes, lengths, (costs, low, high), styles[name], name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({length for points in lines.values() for length, *_ in points}))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(lambda length, _: f"{length:g}")
        axes.yaxis.set_major_formatter(_count)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.set_xlabel(x_label, color=INK)
    figure.legend(
        [handles[name] for name in names],
        [shortened(name) for name in names],
        loc="outside right center",
        handlelength=3.2,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )
    return figure


def learned_priors(
    updates: Sequence[float] | np.ndarray,
    runs: Sequence[Mapping[str, Sequence[Any] | np.ndarray]],
    initial: Mapping[str, float],
) -> Figure:
    """Draw learned attention priors: a row of panels per layer, a column per parameter, a line per head.

    Args:
        updates: Logged updates (K,).
        runs: One per seed: parameter (mean, deviation, span) -> values (K, layers, heads). Several runs are drawn as
            their mean with a band of one sample standard deviation to either side.
        initial: Initial value of each parameter, drawn as a dashed line.

    Raises:
        UsageError: There is nothing to draw, or the runs differ in shape.
    """
    names = list(runs[0]) if runs else []
    if not names or not len(updates):
        raise UsageError("no priors to draw; train dynamics whose backbone.prior.kind learns one.")
    try:
        values = {name: np.stack([np.asarray(run[name], dtype=float) for run in runs]) for name in names}
    except (KeyError, ValueError):
        raise UsageError("these runs differ in their priors' kind, heads, layers or logged updates.") from None
    layers, heads = values[names[0]].shape[2:]
    figure = new_figure(2.6 * len(names) + 1.2, 1.75 * layers + 0.35)
    grid = figure.subplots(layers, len(names), squeeze=False, sharex=True, sharey="col")
    for (layer, column), axes in np.ndenumerate(grid):
        name = names[column]
        _style(axes)
        for head, style in enumerate(_styles(heads)):
            lines = values[name][:, :, layer, head]  # (runs, K)
            middle = lines.mean(0)
            spread = lines.std(0, ddof=1) if len(lines) > 1 else None
            band = (middle, None, None) if spread is None else (middle, middle - spread, middle + spread)
            _banded(axes, updates, band, style, f"head {head + 1}")
        if name in initial:
            axes.axhline(initial[name], color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=3)
        axes.margins(x=0.02)
        axes.locator_params(nbins=4)
        axes.xaxis.set_major_formatter(_count)
        if layer == 0:
            axes.set_title(name, loc="left", fontsize=9, color=INK)
        if column == 0:
            axes.set_ylabel(f"layer {layer + 1}", fontsize=8, color=INK)
        if layer == layers - 1:
            axes.set_xlabel("updates", fontsize=8, color=_GREY)
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8, labelcolor=INK
    )
    return figure


def error_curves(
    lines: Mapping[str, tuple[Sequence[float], Band]], *, x_label: str, y_label: str, title: str = "", log: bool = False
) -> Figure:
    """Draw lines with their intervals.

    Args:
        lines: By name, x (K,), whole numbers, and value, low and high (K,) each; NaN leaves a gap.
        x_label: Of the horizontal axis.
        y_label: Of the vertical axis.
        title: Of the figure.
        log: Logarithmic vertical axis.

    Raises:
        UsageError: There are no lines.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    if not lines:
        raise UsageError("no curves to draw.")
    figure = new_figure(6.4, 3.2)
    axes = figure.subplots()
    _style(axes)
    for (name, (x, band)), style in zip(lines.items(), _styles(len(lines)), strict=True):
        _banded(axes, x, band, style, name, _opacity(len(lines)))
    if log:
        axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top / bottom < 1000 else (1,)))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    if len(lines) > 1:
        legend_below(figure, axes)
    return figure


# -- files ------------------------------------------------------------------------------------------------------------


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`; the same figure gives the same bytes."""
    suffix = path.suffix.lower()
    if suffix not in _FILE_METADATA:
        raise UsageError(f"{path}: a figure is written as .png, .svg or .pdf, not '{path.suffix}'.")
    write_whole(path, lambda draft: draft.write_bytes(_rendered(figure, suffix)))


def _rendered(figure: Figure, suffix: str) -> bytes:
    import matplotlib

    _plain_texts(figure)
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "wmcli"}):  # names in an SVG are random without it
        figure.savefig(data, format=suffix[1:], dpi=144, facecolor="white", metadata=_FILE_METADATA[suffix])
    return data.getvalue()


# -- SVG within a page -------------------------------------------------------------------------------------------------

_VARIABLES = {
    INK: "var(--ink)",
    _GREY: "var(--muted)",
    _GRID: "var(--line)",
    "#ffffff": "var(--paper)",
    **{color: f"var(--c{index})" for index, color in enumerate(COLORS)},
}
_PIXELS = 1.5  # of a page to a point of a figure: text of size 8 has 12 pixels


def svg_text(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element to stand in a page.

    Its colors are the page's variables, from var(--ink) to var(--c6), and its text has the page's font. Nothing in it
    needs a style sheet or the network. The same figure gives the same text.

    Args:
        figure: One of this module.
        name: Of letters, digits and dashes; once in a page, since ids begin with it.
    """
    import matplotlib

    _plain_texts(figure)
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "wmcli"}):
        figure.savefig(data, format="svg", transparent=True, metadata=_FILE_METADATA[".svg"])
    source = data.getvalue().decode()
    ids = {
        used: f"{name}-{place}"
        for place, used in enumerate(dict.fromkeys(re.findall(r'(?:href="|url\()#(\w+)', source)))
    }
    root = ElementTree.fromstring(source)
    width, height = (float(size) for size in root.attrib["viewBox"].split()[2:])
    page = ElementTree.Element(
        "svg",
        {
            "viewBox": f"0 0 {_decimals(width)} {_decimals(height)}",
            "width": f"{_PIXELS * width:.0f}",
            "height": f"{_PIXELS * height:.0f}",
            "fill": _VARIABLES["#000000"],  # what is black states no color
            "stroke-linejoin": "round",
        },
    )
    page.extend(_inlined(root, ids))
    return ElementTree.tostring(page, encoding="unicode")


def _inlined(parent: ElementTree.Element, ids: Mapping[str, str]) -> list[ElementTree.Element]:
    """Return the children as a page needs them, without groups and definitions that do nothing."""
    kept = []
    for child in parent:
        tag = child.tag.rpartition("}")[2]
        if tag in ("metadata", "style"):
            continue
        element = ElementTree.Element(tag, _attributes(child, ids))
        if tag == "text":
            element.text = child.text
            element.attrib.setdefault("fill", _VARIABLES[INK])
        element.extend(_inlined(child, ids))
        if tag == "g" and not element.attrib:
            kept += list(element)
        elif tag == "g":
            _share_styles(element)
            kept.append(element)
        elif not (tag == "defs" and not len(element) or tag == "path" and element.attrib.keys() == {"d", "fill"}):
            kept.append(element)
    return kept


def _share_styles(group: ElementTree.Element) -> None:
    """Move the styles that all children state, such as the markers of a line, to their group, which is shorter."""
    styles = ({item for item in child.attrib.items() if item[0].startswith(("fill", "stroke"))} for child in group)
    for key, value in sorted(functools.reduce(set.intersection, styles) if len(group) else ()):
        group.set(key, value)
        for child in group:
            del child.attrib[key]


def _attributes(element: ElementTree.Element, ids: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes and styles of an element as attributes, which a page's security policy allows."""
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    styles = (style.partition(":") for style in attributes.pop("style", "").split(";") if style)
    attributes |= {key.strip(): value.strip() for key, _, value in styles}
    attributes.pop("font-family", None)
    if found := re.match(r"(?:(\d+) )?([\d.]+px)", attributes.pop("font", "")):  # as Matplotlib below 3.11 writes it
        attributes |= {"font-weight": found[1] or "", "font-size": found[2]}
    for key, value in attributes.items():
        if key == "id":
            value = ids.get(value, "")
        elif key in ("href", "clip-path"):
            value = re.sub(r"#(\w+)", lambda match: f"#{ids[match[1]]}", value)
        elif key in ("fill", "stroke"):
            value = _VARIABLES.get(value, value)
        else:
            value = _rounded(re.sub(r"\s*([A-Za-z])\s*", r"\1", value) if key == "d" else value)
        attributes[key] = value
    return {key: value for key, value in attributes.items() if value and not value.startswith("rotate(0 ")}


def _rounded(text: str) -> str:
    """Return a text with its numbers to two decimals."""
    return re.sub(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", lambda match: _decimals(float(match[0])), text)


def _decimals(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")  # the sum makes 0 of -0


def _plain_texts(figure: Figure) -> None:
    """Let names be what they are: no formulas, and without characters that neither fonts nor XML have."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(_printable(text.get_text()))


def _printable(text: str) -> str:
    return re.sub(r"[^\t\n\x20-\ud7ff\ue000-\U0010ffff]", "\ufffd", text)


# -- style ------------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of width x height inches that draws with Agg, whatever the user's backend is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=INK, labelsize=8, length=3, color=_GREY)
    axes.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _styles(count: int) -> list[dict[str, Any]]:
    """Return `count` distinct line styles: colors, then the same colors dashed, each with a marker of its own."""
    dashes = ("-", (0, (5, 2)), (0, (1.2, 1.4)))
    return [
        {
            "color": COLORS[index % len(COLORS)],
            "linestyle": dashes[index // len(COLORS) % len(dashes)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 4,
            "linewidth": 1.6,
        }
        for index in range(count)
    ]


def _marked(points: int) -> dict[str, Any]:
    """Return the style of the markers: none from 30 points on, where they would touch."""
    return {} if points < 30 else {"marker": ""}


def _opacity(bands: int) -> float:
    """Return the opacity of each of so many bands, which may all lie on each other."""
    return 0.15 * min(1.0, _MOST_BANDS / bands)


def _banded(
    axes: Axes,
    x: Sequence[float] | np.ndarray,
    band: Band,
    style: dict[str, Any],
    name: str,
    opacity: float = 0.15,
) -> Line2D:
    """Draw a line with its name, and the band between its limits if it has any; return the line."""
    value, low, high = band
    (line,) = axes.plot(x, value, **style, markevery=max(1, len(x) // 8), label=name)
    if low is not None and high is not None:
        axes.fill_between(x, low, high, color=style["color"], alpha=opacity, linewidth=0)
    return line


def _name_band(axes: Axes, text: str) -> None:
    """Tell in the legend what bands show."""
    axes.fill_between([], [], [], color=_GREY, alpha=0.3, linewidth=0, label=f"band: {text}")


def named_rows(axes: Axes, names: Sequence[str]) -> None:
    """Prepare axes with a named row for each interval, the first on top."""
    _style(axes)
    axes.spines["left"].set_visible(False)
    axes.grid(False, axis="y")
    axes.use_sticky_edges = False  # a bar at the edge is hard to see
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names)), [shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)


def _interval(axes: Axes, place: int, interval: Interval, color: str) -> None:
    """Draw a value in a row, and the bar of its interval if it has any."""
    value, low, high = interval
    if low is not None and high is not None:
        axes.barh(place, high - low, left=low, height=0.4, color=color, alpha=0.3, linewidth=0)
    axes.plot([value, value], [place - 0.2, place + 0.2], color=color, linewidth=2, solid_capstyle="butt")


def shortened(name: str, most: int = 34) -> str:
    """Return a name without its middle where it is long, since both ends tell variants apart."""
    half, name = (most - 1) // 2, _printable(name)
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def _band(curves: np.ndarray, kind: BandKind) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits (K,) of the band over runs: curves (runs, K), of two or more runs."""
    if kind == "range":
        return curves.min(0), curves.max(0)
    if kind == "stderr":
        middle, error = curves.mean(0), curves.std(0, ddof=1) / math.sqrt(len(curves))
        return middle - error, middle + error
    chosen = np.random.default_rng(0).integers(len(curves), size=(2000, len(curves)))
    low, high = np.quantile([curves[runs].mean(0) for runs in chosen], [0.025, 0.975], axis=0)
    return low, high


def _by_step(points: Iterable[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return ascending steps (K,) and values (K,) of the finite points, the last one of each step."""
    last = {float(step): float(value) for step, value in points if math.isfinite(value)}
    steps = sorted(last)
    return np.array(steps), np.array([last[step] for step in steps])


def _finish_returns(
    figure: Figure, axes: Axes, references: Mapping[str, float], title: str, x_label: str = STEPS
) -> None:
    """Finish a plot of returns: axes from 0, dashed references with their names, the legend below."""
    for value in references.values():
        axes.axhline(value, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axes.margins(x=0.04, y=0.08)
    axes.set_xlim(0, max(axes.get_xlim()[1], 1))
    _name_lines(axes, references)
    axes.locator_params(axis="x", nbins=7)
    axes.xaxis.set_major_formatter(_count)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel("mean return", color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    legend_below(figure, axes)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Put the legend below the plot, in as many columns as fit. The figure grows for a long one."""
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return
    width = figure.get_figwidth() * 15  # letters of size 8, about
    names = [shortened(name, int(width) - 9) for name in names]
    columns = max(1, min(int(width / (max(map(len, names)) + 9)), len(names)))
    figure.set_figheight(figure.get_figheight() + _LINE * max(0, math.ceil(len(names) / columns) - _LEGEND_LINES))
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=columns,
        handlelength=3.2,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
    )


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, linestyle: Any = "-") -> None:
    """Draw a line. From `_SMOOTH_FROM` points on it is faint under a running mean over a fiftieth of the points."""
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(int))
    if len(x) < _SMOOTH_FROM:
        size = 3 if len(x) < 15 else 0
        axes.plot(x, y, color=color, linestyle=linestyle, linewidth=1.4, marker="o", markersize=size)
        return
    axes.plot(x[keep], y[keep], color=color, linewidth=0.7, alpha=0.35)
    smooth = _smoothed(y, max(3, len(y) // 50))
    axes.plot(x[keep], smooth[keep], color=color, linestyle=linestyle, linewidth=1.5)


def _smoothed(y: np.ndarray, width: int) -> np.ndarray:
    """Return the centered running mean over `width` points (rounded up to odd), over fewer at the ends."""
    half = width // 2
    total = np.concatenate([[0.0], np.cumsum(y)])
    low = np.maximum(np.arange(len(y)) - half, 0)
    high = np.minimum(np.arange(len(y)) + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def _name_lines(axes: Axes, references: Mapping[str, float]) -> None:
    """Write each reference's name at the right end of its line, moved up where two would overlap."""
    low, high = axes.get_ylim()
    highest = -math.inf
    for name, value in sorted(references.items(), key=lambda item: item[1]):
        place = max((value - low) / (high - low), highest + 0.055)  # a line of text is 0.055 of the height
        axes.text(1.01, place, f"{name} {value:.4g}", transform=axes.transAxes, fontsize=8, color=_GREY, va="center")
        highest = place


def _count(value: float, _position: object = None) -> str:
    """Return a count in short form: 500, 20k, 1.5M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _episodes(count: int) -> str:
    return f"{count} episode{'' if count == 1 else 's'}"
