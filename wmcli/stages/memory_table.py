"""Tables and curves of the memory measures of several runs, beside the paper's numbers.

Source: Deng, Park and Ahn (2023, arXiv 2307.02064), tables 2, 3 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.assemble import settings_of
from wmcli.errors import UsageError
from wmcli.metrics.memory_tasks import diverged_in
from wmcli.progress import some
from wmcli.report.plots import error_curves, write_figure
from wmcli.settings import flatten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("reward", "wm/DistractingMemory-100-v0"): {
        "RSSM-TBTT": ("47.9", "49.6"),
        "TSSM-XL": ("100.0", "51.2"),
        "S4WM": ("100.0", "100.0"),
    },
    ("reward", "wm/DistractingMemory-200-v0"): {
        "RSSM-TBTT": ("48.7", "48.4"),
        "TSSM-XL": ("99.9", "51.3"),
        "S4WM": ("100.0", "100.0"),
    },
    ("reward", "wm/DistractingMemory-400-v0"): {
        "RSSM-TBTT": ("50.4", "52.2"),
        "TSSM-XL": ("50.4", "51.0"),
        "S4WM": ("100.0", "100.0"),
    },
    ("generation", "wm/MultiDoorsKeys-3-v0"): {
        "RSSM-TBTT": ("0.05", "5.16"),
        "TSSM-XL": ("0.05", "1.27"),
        "S4WM": ("0.01", "0.04"),
    },
    ("generation", "wm/MultiDoorsKeys-5-v0"): {
        "RSSM-TBTT": ("0.04", "6.36"),
        "TSSM-XL": ("0.03", "6.05"),
        "S4WM": ("0.02", "0.27"),
    },
    ("generation", "wm/MultiDoorsKeys-7-v0"): {
        "RSSM-TBTT": ("0.03", "6.28"),
        "TSSM-XL": ("0.02", "9.24"),
        "S4WM": ("0.02", "0.10"),
    },
    ("probe", "wm/Maze-9-v0"): {
        "RSSM-TBTT": ("95.0", "5.4"),
        "TSSM-XL": ("86.4", "10.2"),
        "S4WM": ("88.4", "8.9"),
        "S5WM": ("98.3", "1.8"),
    },
    ("probe", "wm/Maze-15-v0"): {
        "RSSM-TBTT": ("81.7", "32.6"),
        "TSSM-XL": ("79.8", "35.1"),
        "S4WM": ("80.2", "34.8"),
        "S5WM": ("81.8", "25.3"),
    },
}
"""Tables 2, 3 and 6 of the paper: the first two columns of a measure and task, by model.

Its mazes are those of Memory Maze, with another layout and script than ours.
"""
_SYSTEMS = {
    ("s4", "factorized", "episodes"): "S4WM",
    ("s4", "full", "episodes"): "S4WM-Full-Posterior",
    ("s5", "factorized", "episodes"): "S5WM",
    ("transformer-xl", "factorized", "episodes"): "TSSM-XL",
    ("dreamer-gru", "recurrent", "streams"): "RSSM-TBTT",
}
ERROR = "squared error per frame"
LOWEST = 1e-4  # on a logarithmic axis
NOTED = 4  # settings to show of those in which models of one name differ
_MODEL_SECTIONS = ("collect.", "tokenizer.", "dynamics.", "backbone.")


class ModelRuns(NamedTuple):
    """Runs of one model on one task with different seeds."""

    environment: str
    model: str
    note: dict[str, Any]
    """The settings in which it differs from others of that name."""
    metrics: list[dict[str, Any]]
    """Of each run."""
    places: list[int]
    """Of these runs among the evaluations."""


Curve = tuple[Sequence[int], Sequence[Sequence[float | None]]]
"""x, and value, low and high there, None where nothing was scored."""


def _query_curve(metrics: Mapping[str, Any]) -> Curve:
    curve = metrics["curve"]["generation"]
    return list(range(1, len(curve["mean"]) + 1)), [curve[part] for part in ("mean", "low", "high")]


def _recall_curve(metrics: Mapping[str, Any]) -> Curve:
    by_k = {int(k): estimate for k, estimate in metrics["recall"].items()}
    ks = sorted(by_k)
    return ks, [[by_k[k][part] for k in ks] for part in ("value", "low", "high")]


class Display(NamedTuple):
    """The form of a measure in tables and pictures."""

    columns: Mapping[str, str]
    """Metrics by heading. A heading with {} has a column for each key of its metric."""
    curve: Callable[[Mapping[str, Any]], Curve] | None = None
    """Takes the metrics of a run."""
    x_label: str = ""
    log: bool = False
    """Errors on a logarithmic axis."""


DISPLAYS: dict[str, Display] = {
    "generation": Display(
        {"reconstruction": "reconstruction", "generation": "generation"}, _query_curve, "step of the query", log=True
    ),
    "recall": Display({"k = {}": "recall"}, _recall_curve, "frames observed after the teleport"),
    "reward": Display({"inference %": "inference", "imagination %": "imagination"}),
    "doors": Display({"state %": "state", "state and color %": "whole"}),
    "probe": Display(
        {
            "walls %": "walls",
            "objects": "objects",
            "constant walls %": "constant_walls",
            "constant objects": "constant_objects",
        }
    ),
}


def summarize(evaluation: Artifact) -> str:
    """Return an evaluation in one line."""
    metrics = evaluation.metrics
    cells = (f"{name} {cell}" for name, cell in _cells([metrics]).items())
    return f"eval: {evaluation.name}: " + ", ".join(cells)


def table(evaluations: Sequence[Artifact]) -> list[dict[str, Any]]:
    """Return a row for each task and model, beside the paper's numbers if it has some.

    A row holds the mean over runs ± their standard deviation, or the 95 % interval over episodes of a single run.
    Accuracies are in %. Models of one name show the settings in which they differ.
    """
    rows = []
    for environment, model, note, runs, _ in _rows(evaluations):
        cells = _cells(runs)
        paper = PAPER.get((runs[0]["protocol"], environment), {}).get(model, ())
        rows.append(
            {"task": _task(environment), "model": model}
            | ({"with": _format_note(note)} if note else {})
            | {"parameters": runs[0]["parameters"], "updates": runs[0]["updates"], "runs": len(runs)}
            | cells
            | {f"paper {name}": value for name, value in zip(cells, paper, strict=False)}
        )
    order = [column for row in sorted(rows, key=lambda row: "with" not in row) for column in row]
    return [{column: row.get(column, "-") for column in dict.fromkeys(order)} for row in rows]


def pools(evaluations: Sequence[Artifact]) -> list[list[int]]:
    """Return the places of the evaluations in each row of the table."""
    return [row.places for row in _rows(evaluations)]


def model_names(evaluations: Sequence[Artifact]) -> list[str]:
    """Return the names of the models as in the table, with the run where several have one name."""
    names = [_model(each.metrics) for each in evaluations]
    runs = [each.run.name for each in evaluations]
    pairs = list(zip(names, runs, strict=True))
    return [
        name if names.count(name) == 1 else f"{name}, {run if pairs.count((name, run)) == 1 else each.run}"
        for (name, run), each in zip(pairs, evaluations, strict=True)
    ]


def plot_curves(evaluations: Sequence[Artifact]) -> Figure:
    """Plot error curves of `generation` or `recall`, a line for each model.

    The shade reaches from the lowest to the highest run, which a logarithmic axis shows where a deviation would reach
    below zero. That of a single run is its 95 % interval over episodes.

    Raises:
        UsageError: The evaluations are not of one task.
    """
    rows = _rows(evaluations)
    tasks = {row.environment for row in rows}
    if len(tasks) > 1:
        raise UsageError(f"curves are drawn of one task: these runs are of {', '.join(sorted(map(_task, tasks)))}.")
    measure = rows[0].metrics[0]["protocol"]
    curve = DISPLAYS[measure].curve
    assert curve is not None, measure
    lines = {}
    for row in rows:
        label = f"{row.model}, {_format_note(row.note)}" if row.note else row.model
        label += f" ({len(row.metrics)} runs, lowest to highest)" if len(row.metrics) > 1 else " (95 % interval)"
        curves = [curve(metrics) for metrics in row.metrics]
        lines[label] = (curves[0][0], _over_runs(np.array([band for _, band in curves], float)))
    return _plot(measure, lines, tasks.pop())


def write_curves(path: Path, measure: str, lines: dict[str, Any], environment: str) -> None:
    """Draw lines, each x and (value, low, high), as `error_curves` takes them."""
    write_figure(path, _plot(measure, lines, environment))


def _plot(measure: str, lines: dict[str, Any], environment: str) -> Figure:
    display = DISPLAYS[measure]
    if display.log:
        lines = {name: (x, (value, np.maximum(low, LOWEST), high)) for name, (x, (value, low, high)) in lines.items()}
    log = display.log and any(np.isfinite(value).any() for _, (value, *_) in lines.values())  # it has no empty axis
    return error_curves(lines, x_label=display.x_label, y_label=ERROR, title=environment, log=log)


def _over_runs(bands: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return value, low and high of a line from those of its runs (runs, 3, K)."""
    if len(bands) == 1:
        return tuple(bands[0])
    values = bands[:, 0]
    return values.mean(0), values.min(0), values.max(0)


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(evaluations: Sequence[Artifact]) -> list[ModelRuns]:
    """Group runs that differ in their seeds only, sorted by task and model."""
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[int]]] = {}
    for place, each in enumerate(evaluations):
        metrics = each.metrics
        settings = {
            key: value
            for key, value in flatten(settings_of(each.input("dynamics"))).items()
            if key.startswith(_MODEL_SECTIONS)
        }
        alike = metrics["environment"], _model(metrics), metrics["updates"], str(settings)
        groups.setdefault(alike, (settings, []))[1].append(place)
    rows = []
    for (environment, model, *_), (settings, places) in sorted(groups.items(), key=lambda item: item[0][:3]):
        named_alike = [other for alike, (other, _) in groups.items() if alike[:2] == (environment, model)]
        note = {key: value for key, value in settings.items() if any(each[key] != value for each in named_alike)}
        rows.append(ModelRuns(environment, model, note, [evaluations[place].metrics for place in places], places))
    return rows


def _model(metrics: dict[str, Any]) -> str:
    backbone, posterior, rows = (metrics[key] for key in ("backbone", "posterior", "rows"))
    return _SYSTEMS.get(
        (backbone, posterior, rows), backbone if posterior == "factorized" else f"{backbone}, {posterior}"
    )


def _format_note(note: dict[str, Any]) -> str:
    return some([f"{key}={value}" for key, value in note.items()], NOTED)


def _task(environment: str) -> str:
    return environment.removeprefix("wm/").removesuffix("-v0")


def _cells(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the cells of a row by column, from the metrics of its runs."""
    cells = {}
    for heading, key in DISPLAYS[runs[0]["protocol"]].columns.items():
        scale = 100 if "%" in heading else 1
        if "{}" in heading:
            for part in sorted(runs[0][key], key=int):
                cells[heading.format(part)] = _cell([each[key][part] for each in runs], scale)
        else:
            cells[heading] = _cell([each[key] for each in runs], scale)
    return cells


def _cell(metrics: Sequence[Any], scale: float) -> str:
    """Return a cell from a metric of each run: a number, or an estimate with its interval."""
    estimates = [each if isinstance(each, dict) else {"value": each, "low": None, "high": None} for each in metrics]
    if said := diverged_in(*estimates):
        return said
    values = scale * np.array([each["value"] for each in estimates])
    form = (lambda value: f"{value:.1f}") if scale == 100 else (lambda value: f"{value:.3g}")
    if len(values) > 1:
        return f"{form(values.mean())} ± {form(values.std(ddof=1))}"
    if estimates[0]["low"] is None:
        return form(values[0])
    return f"{form(values[0])} ({form(scale * estimates[0]['low'])}-{form(scale * estimates[0]['high'])})"
