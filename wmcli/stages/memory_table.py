"""What the measures of several memory models come to, for people: a table beside the paper's, curves in one picture.

The numbers that stand beside ours are of Deng, Park and Ahn (2023, arXiv 2307.02064), tables 2, 3 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmcli.artifacts import Artifact
from wmcli.assemble import settings_of
from wmcli.errors import UsageError
from wmcli.report.plots import error_curves, write_figure
from wmcli.settings import flatten

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
"""Tables 2, 3 and 6 of the paper: the first two columns of a measure of a task, by model. Its mazes are Memory Maze's,
whose layout and script differ from ours."""
_SYSTEMS = {
    ("s4", "factorized", "episodes"): "S4WM",
    ("s4", "full", "episodes"): "S4WM-Full-Posterior",
    ("s5", "factorized", "episodes"): "S5WM",
    ("transformer-xl", "factorized", "episodes"): "TSSM-XL",
    ("dreamer-gru", "recurrent", "streams"): "RSSM-TBTT",
}
_SHOWN = {  # of each measure, by the heading of a column
    "generation": {"reconstruction": "reconstruction", "generation": "generation"},
    "reward": {"inference %": "inference", "imagination %": "imagination"},
    "doors": {"state %": "state", "state and color %": "whole"},
    "probe": {
        "walls %": "walls",
        "objects": "objects",
        "constant walls %": "constant_walls",
        "constant objects": "constant_objects",
    },
}
AXES = {"generation": "step of the query", "recall": "frames observed after the teleport"}
"""Horizontal axis by measure, of those with a curve."""
ERROR = "squared error per frame"
LOWEST = 1e-4  # drawn, on an axis of logarithms
NOTED = 4  # settings shown of those that tell models of one name apart
_TOLD_APART = ("collect.", "tokenizer.", "dynamics.", "backbone.")  # sections that make one model another


class Row(NamedTuple):
    """Runs of one model on one task, that differ in their seeds."""

    environment: str
    model: str
    note: dict[str, Any]
    """The settings in which it differs from others of that name."""
    found: list[dict[str, Any]]
    """The metrics of each run."""


def told(evaluation: Artifact) -> str:
    """An evaluation in one line."""
    metrics = evaluation.metrics
    cells = (f"{name} {cell}" for name, cell in _cells([metrics]).items())
    return f"eval: {evaluation.name}: " + ", ".join(cells)


def table(evaluations: Sequence[Artifact]) -> list[dict[str, Any]]:
    """A row for each task and model, with the mean over runs ± their standard deviation, of a single run its 95 %
    interval over episodes; beside the paper's numbers where it has some. Accuracies are in %.

    Models of one name are told apart by the settings in which they differ.
    """
    rows = []
    for environment, model, note, found in _rows(evaluations):
        shown = _cells(found)
        paper = PAPER.get((found[0]["protocol"], environment), {}).get(model, ())
        rows.append(
            {"task": _task(environment), "model": model}
            | ({"with": _noted(note)} if note else {})
            | {"parameters": found[0]["parameters"], "updates": found[0]["updates"], "runs": len(found)}
            | shown
            | {f"paper {name}": value for name, value in zip(shown, paper, strict=False)}
        )
    order = [column for row in sorted(rows, key=lambda row: "with" not in row) for column in row]
    return [{column: row.get(column, "-") for column in dict.fromkeys(order)} for row in rows]


def draw_curves(evaluations: Sequence[Artifact], path: Path) -> None:
    """Draw error curves of `generation` or `recall` in one picture, a line for each model: the mean over its runs with
    their standard deviation, of a single run the 95 % interval over episodes.

    Raises UsageError when they are not of one task.
    """
    rows = _rows(evaluations)
    tasks = {row.environment for row in rows}
    if len(tasks) > 1:
        raise UsageError(f"curves are drawn of one task: these runs are of {', '.join(sorted(map(_task, tasks)))}.")
    measure = rows[0].found[0]["protocol"]
    lines = {}
    for row in rows:
        label = f"{row.model}, {_noted(row.note)}" if row.note else row.model
        label += f" ({len(row.found)} runs, ± SD)" if len(row.found) > 1 else " (95 % interval)"
        curves = [_curve(metrics) for metrics in row.found]
        lines[label] = (curves[0][0], _over_runs(np.array([band for _, band in curves], float)))
    write_curves(path, measure, lines, tasks.pop())


def write_curves(path: Path, measure: str, lines: dict[str, Any], environment: str) -> None:
    """A picture of lines: name -> x, and (value, low, high) as in `error_curves`."""
    log = measure == "generation"  # errors begin near nothing
    if log:
        lines = {name: (x, (value, np.maximum(low, LOWEST), high)) for name, (x, (value, low, high)) in lines.items()}
    write_figure(path, error_curves(lines, x_label=AXES[measure], y_label=ERROR, title=environment, log=log))


def _curve(metrics: dict[str, Any]) -> tuple[list[int], list[list[float | None]]]:
    """Of one run: x, and value, low and high at each, None where nothing was scored."""
    if metrics["protocol"] == "recall":
        by_k = {int(k): estimate for k, estimate in metrics["recall"].items()}
        ks = sorted(by_k)
        return ks, [[by_k[k][part] for k in ks] for part in ("value", "low", "high")]
    curve = metrics["curve"]["generation"]
    return list(range(1, len(curve["mean"]) + 1)), [curve[part] for part in ("mean", "low", "high")]


def _over_runs(bands: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(runs, 3, K) to the value, low and high of a line."""
    if len(bands) == 1:
        return tuple(bands[0])
    mean, off = bands[:, 0].mean(0), bands[:, 0].std(0, ddof=1)
    return mean, mean - off, mean + off


# -- rows -------------------------------------------------------------------------------------------------------------


def _rows(evaluations: Sequence[Artifact]) -> list[Row]:
    """Runs that differ in their seeds together, sorted by task and model."""
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for each in evaluations:
        metrics = each.metrics
        settings = {
            key: value
            for key, value in flatten(settings_of(each.input("dynamics"))).items()
            if key.startswith(_TOLD_APART)
        }
        alike = metrics["environment"], _model(metrics), metrics["updates"], str(settings)
        groups.setdefault(alike, (settings, []))[1].append(metrics)
    rows = []
    for (environment, model, *_), (settings, found) in sorted(groups.items(), key=lambda item: item[0][:3]):
        named_alike = [other for alike, (other, _) in groups.items() if alike[:2] == (environment, model)]
        note = {key: value for key, value in settings.items() if any(each[key] != value for each in named_alike)}
        rows.append(Row(environment, model, note, found))
    return rows


def _model(metrics: dict[str, Any]) -> str:
    backbone, posterior, rows = (metrics[key] for key in ("backbone", "posterior", "rows"))
    return _SYSTEMS.get(
        (backbone, posterior, rows), backbone if posterior == "factorized" else f"{backbone}, {posterior}"
    )


def _noted(note: dict[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in note.items()][:NOTED]
    return ", ".join(shown) + (f" and {len(note) - NOTED} more" if len(note) > NOTED else "")


def _task(environment: str) -> str:
    return environment.removeprefix("wm/").removesuffix("-v0")


def _cells(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What a measure shows of the runs of a row."""
    if found[0]["protocol"] == "recall":
        keys = {f"k = {k}": f"recall.{k}" for k in sorted(found[0]["recall"], key=int)}
    else:
        keys = _SHOWN[found[0]["protocol"]]
    return {name: _cell(found, key, 100 if "%" in name else 1) for name, key in keys.items()}


def _cell(found: Sequence[dict[str, Any]], key: str, scale: float) -> str:
    picked = []
    for each in found:
        value: Any = each
        for part in key.split("."):
            value = value[part]
        picked.append(value if isinstance(value, dict) else {"value": value, "low": None, "high": None})
    values = scale * np.array([each["value"] for each in picked])
    form = (lambda value: f"{value:.1f}") if scale == 100 else (lambda value: f"{value:.3g}")
    if len(values) > 1:
        return f"{form(values.mean())} ± {form(values.std(ddof=1))}"
    if picked[0]["low"] is None:
        return form(values[0])
    return f"{form(values[0])} ({form(scale * picked[0]['low'])}-{form(scale * picked[0]['high'])})"
