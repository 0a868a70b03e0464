"""Curves of a run in progress, which grow with its records, thinned for a display."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np

from wmcli.report.plots import metrics_of

MOST_POINTS = 600


Point = tuple[float, float] | tuple[float, float, float, float]
"""Update and value, or those of several updates: the last update, the mean, the lowest and the highest value."""


class LiveCurves:
    """The curves of every stage, as `wmcli.report.plots.curves_by_stage` returns them, record by record.

    A record replaces those of its stage at the same and at later updates, as when a stage resumes from a checkpoint or
    trains again. So the curves are those of the newest line of descent.
    """

    def __init__(self) -> None:
        self._stages: dict[str, dict[str, tuple[array[float], array[float]]]] = {}
        self._reached: dict[str, float] = {}

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add the metrics of a record of metrics.jsonl. Return whether it has some."""
        stage, update = record.get("stage"), record.get("update")
        if not isinstance(stage, str) or not isinstance(update, int) or isinstance(update, bool):
            return False
        metrics, curves = metrics_of(record), self._stages.setdefault(stage, {})
        if not metrics or not -(2**53) < update < 2**53:
            return False
        if update <= self._reached.get(stage, -np.inf):
            for name, (x, y) in list(curves.items()):
                del x[(kept := bisect_left(x, update)) :], y[kept:]
                if not x:
                    del curves[name]
        self._reached[stage] = update
        for name, value in metrics.items():
            x, y = curves.setdefault(name, (array("d"), array("d")))
            x.append(update)
            y.append(value)
        return True

    def by_stage(self) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
        """Return stage -> metric -> (updates (K,), values (K,)), `loss` before other metrics."""
        return {
            stage: {name: (np.array(x), np.array(y)) for name, (x, y) in sorted(curves.items(), key=_loss_first)}
            for stage, curves in self._stages.items()
            if curves
        }


def _loss_first(curve: tuple[str, Any]) -> bool:
    return curve[0] != "loss"


def thin(x: np.ndarray, y: np.ndarray, most: int = MOST_POINTS) -> list[Point]:
    """Thin a curve (K,) to at most `most` points, each of as many updates, which is a power of two.

    Growing, it changes only at its end until it is thinned further.
    """
    size = 1
    while size * most < len(x):
        size *= 2
    if size == 1:
        return list(zip(_short(x), _short(y), strict=True))
    starts = np.arange(0, len(x), size)
    counts = np.diff(np.append(starts, len(x)))
    mean = np.add.reduceat(y / np.repeat(counts, counts), starts)  # divided first: a sum could overflow
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return list(zip(*map(_short, (x[starts + counts - 1], mean, low, high)), strict=True))


def _short(values: np.ndarray) -> list[Any]:
    """Return numbers of six digits, whole ones in full."""
    return [int(each) if each.is_integer() and abs(each) < 1e15 else float(f"{each:.6g}") for each in values.tolist()]
