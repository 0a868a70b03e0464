"""The columns of the strips of the memory measures: what a model observed, and which imagined frames to show.

C context frames, Q frames of the query.

Source: S4WM (Deng, Park and Ahn 2023, arXiv 2307.02064), figures 4, 7 to 9, 14 and 19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wmcli.envs.memory_task import Task
from wmcli.envs.multi_doors_keys import TOGGLE
from wmcli.report.images import MARKER, Phase

RECALLED = (0, 1, 2, 5, 10, 20)  # k: frames observed after the teleport, not counting the arrival
CONTEXT = 2  # columns of the context
ARRIVED = 3  # most columns between the teleport and the first imagined frame
TELEPORTED = (86, 180, 233)
_OBSERVED, _IMAGINED = "context, observed", "imagined"


class StripPlan(NamedTuple):
    """What a strip shows of an episode."""

    observed: int
    """Leading frames that the model observes."""
    steps: list[int]
    """Time steps of the columns."""
    phases: list[Phase]


Plan = Callable[[Task, np.ndarray, int, int], StripPlan]
"""Takes a task, the actions (T,) of an episode, its number of frames without padding, and the columns that fit."""


def plan_query(task: Task, action: np.ndarray, length: int, columns: int) -> StripPlan:
    """Show the end of the context, and frames of the query at even distances."""
    return _plan(task, evenly(task.context, length, columns - CONTEXT))


def plan_recall(task: Task, action: np.ndarray, length: int, columns: int) -> StripPlan:
    """Show the end of the context, the teleport, k frames observed after it, and the query that is imagined behind.

    k is the largest of `RECALLED` with which two thirds of the query at least are imagined.
    """
    k = max(k for k in RECALLED if k == 0 or 3 * (k + 1) <= task.query)
    begin = task.context + 1 + k
    arrived = evenly(task.context, begin, ARRIVED)
    query = evenly(begin, length, columns - CONTEXT - len(arrived))
    phases = [
        Phase(0, _OBSERVED),
        Phase(task.context, "teleport, observed", TELEPORTED),
        Phase(begin, _IMAGINED, MARKER),
    ]
    return StripPlan(begin, [*_before(task, query), *arrived, *query], phases)


def plan_doors(task: Task, action: np.ndarray, length: int, columns: int) -> StripPlan:
    """Show the end of the context, and the outcomes of attempts to unlock a door."""
    tried = 1 + np.flatnonzero(action[:-1] == TOGGLE)
    tried = tried[(tried >= task.context) & (tried < length)]
    return _plan(task, [int(tried[place]) for place in evenly(0, len(tried), columns - CONTEXT)])


def evenly(begin: int, end: int, count: int) -> list[int]:
    """Return up to `count` numbers from begin to end - 1 at even distances, both included."""
    return np.unique(np.linspace(begin, end - 1, max(1, min(count, end - begin))).round().astype(int)).tolist()


def _plan(task: Task, query: list[int]) -> StripPlan:
    phases = [Phase(0, _OBSERVED), Phase(task.context, _IMAGINED, MARKER)]
    return StripPlan(task.context, [*_before(task, query), *query], phases)


def _before(task: Task, query: list[int]) -> list[int]:
    """Return the last frames of the context, as far apart as those of the query."""
    every = query[1] - query[0] if len(query) > 1 else 1
    return sorted({max(0, task.context - 1 - every * back) for back in range(CONTEXT)})
