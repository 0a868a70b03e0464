"""`wm profile --compare presets`: projected seconds of an epoch by stage, several presets side by side.

Each kind of work (steps, updates, encoding) is measured for all presets in turn, round by round, and counted as
`wm run` does it. Saving, publishing and evaluation are left out.

Source: figures 1, 10 and 11 of REM (Cohen et al. 2024, arXiv 2402.05643).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from wmcli.report.cost import EPOCH
from wmcli.stages.context import Context
from wmcli.stages.loop import DYNAMICS, IMAGINE
from wmcli.stages.profile import collecting, random_agent
from wmcli.stages.profile_cells import spread
from wmcli.stages.profile_cycle import (
    ACTING,
    FEW_ROWS,
    RANDOM,
    UNITS,
    count_work,
    epoch_seconds,
    fresh_agent,
    random_experience,
    steps_in_epoch,
    updates_of,
)
from wmcli.training.measure import Bench, Job

BOTH = f"{DYNAMICS} and {IMAGINE}"
"""World model and controller together, the combined bar of REM's figures."""
COLLECTED = 64  # steps in a call


def compare_presets(contexts: Mapping[str, Context], bench: Bench) -> list[dict[str, Any]]:
    """Project an epoch of several presets.

    Args:
        contexts: By preset.
        bench: Times calls.

    Returns:
        For each preset a row of each `stage`, of `BOTH` and of the whole `EPOCH`: `seconds` (median over the rounds)
        with quartiles, and how many times as long as the first preset in the same round, with quartiles.
    """
    first, *_ = contexts
    seconds = _rounds(contexts, bench)
    epochs: dict[str, list[dict[str, float]]] = {}
    for name, context in contexts.items():
        rounds = [dict(zip(seconds[name], each, strict=True)) for each in zip(*seconds[name].values(), strict=True)]
        each = [epoch_seconds(context.settings, some) for some in rounds]
        both = [sum(epoch.get(stage, 0.0) for stage in (DYNAMICS, IMAGINE)) for epoch in each]
        epochs[name] = [epoch | {BOTH: two, EPOCH: sum(epoch.values())} for epoch, two in zip(each, both, strict=True)]
    rows = []
    for name, each in epochs.items():
        for stage in each[0]:
            times = [epoch[stage] for epoch in each]
            others = [epoch[stage] for epoch in epochs[first]] if stage in epochs[first][0] else None
            about = {"what": "epoch", "preset": name, "stage": stage, "rounds": len(times)}
            rows.append(about | {"seconds": statistics.median(times)} | spread(times, others))
    return rows


def _rounds(contexts: Mapping[str, Context], bench: Bench) -> dict[str, dict[str, list[float]]]:
    """Return by preset and kind of work the seconds of one unit in each round, in which the presets take turns."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in contexts}

    def measure(what: str, calls: Mapping[str, tuple[Job, int]]) -> None:
        times = bench.time_jobs(what, {name: job for name, (job, _) in calls.items()})
        for name, (_, units) in calls.items():
            seconds[name][what] = [each / units for each in times[name]]

    for what, agent in ((RANDOM, random_agent), (ACTING, fresh_agent)):
        with ExitStack() as held:
            opened = {
                name: held.enter_context(collecting(context, agent(context), COLLECTED))
                for name, context in contexts.items()
            }
            measure(what, {name: (job, steps) for name, (job, steps, _) in opened.items()})
    updates = {name: _updates(context) for name, context in contexts.items()}
    due = {name: next(each, None) for name, each in updates.items()}
    for what in UNITS:
        calls = {name: call[1:] for name, call in due.items() if call is not None and call[0] == what}
        if calls:
            measure(what, calls)
            due |= {name: next(updates[name], None) for name in calls}  # not before: it freezes models of this work
    return seconds


def _updates(context: Context) -> Iterator[tuple[str, Job, int]]:
    """Yield name, call and units of a call of each kind of learning, in the order of `UNITS`."""
    replay = random_experience(context, min(steps_in_epoch(context.settings), FEW_ROWS))
    for what, _, job, units in updates_of(context, replay, count_work(context.settings)):
        yield what, job, units
