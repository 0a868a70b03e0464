"""Cells of a comparison: one call of each of several models at one size, timed in turn.

A model whose call is too slow, or does not fit into memory, is left out of its cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from wmcli.nn.actions import random_actions
from wmcli.spaces import ActionSpace, first_part, map_parts
from wmcli.training.measure import Bench, Job, peak_memory, time_call
from wmcli.world_models.base import Batch

CELL_SECONDS = 5.0  # a slower call is not timed, and its model is left out at longer lengths


class Cell(NamedTuple):
    """What one call of every model does."""

    what: str
    shape: str
    length: int
    """Of the sequences, in elements of a backbone or frames of an episode."""
    units: int
    """Number of `unit` in a call."""
    unit: str


def measure_cell(
    cell: Cell,
    column: str,
    factories: Mapping[str, Callable[[], Job]],
    first: str,
    bench: Bench,
    patience: float = CELL_SECONDS,
) -> list[dict[str, Any]]:
    """Return a row for each model, or why it was skipped.

    Args:
        cell: What a call does.
        column: Key of the models' names in the rows.
        factories: By name, a function that builds the model and returns its call.
        first: Name of the model that the others are compared with, round by round.
        bench: Times the calls.
        patience: Seconds. Slower calls are skipped.

    Returns:
        Rows of `Bench.row`, with `length`, the quartiles of the seconds (`seconds_25`, `seconds_75`), and
        `times_as_long` as the first model's call of the same round, with quartiles; None if that was skipped.
    """
    title = f"{cell.what}, {cell.length} {cell.unit}"
    jobs, skipped = select_jobs(factories, title, bench, patience)
    times = bench.time_jobs(title, jobs) if jobs else {}
    peaks = {}
    with bench.progress.bar(f"profile {title}, memory", len(jobs), "calls") as bar:
        for name, job in jobs.items():
            peaks[name] = peak_memory(job, bench.device)
            bar.advance()
    rows = []
    for name, each in times.items():
        row = bench.row(cell.what, cell.shape, each, count=cell.units, unit=cell.unit, memory=peaks[name])
        rows.append(row | {"length": cell.length, column: name} | spread(each, times.get(first)))
    about = {"what": cell.what, "shape": cell.shape, "length": cell.length}
    return rows + [{**about, column: name, "skipped": why} for name, why in skipped.items()]


def spread(times: Sequence[float], against: Sequence[float] | None) -> dict[str, Any]:
    """Return the quartiles of some times, and how many times as long they were as others of the same rounds."""
    ratios = None if against is None else [long / short for long, short in zip(times, against, strict=True)]
    return {
        **quartiles("seconds", times),
        "times_as_long": None if ratios is None else statistics.median(ratios),
        **(quartiles("times_as_long", ratios) if ratios else dict.fromkeys(("times_as_long_25", "times_as_long_75"))),
    }


def quartiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the first and the third quartile of some values under `name_25` and `name_75`."""
    low, _, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    return {f"{name}_25": low, f"{name}_75": high}


def select_jobs(
    factories: Mapping[str, Callable[[], Job]], title: str, bench: Bench, patience: float = CELL_SECONDS
) -> tuple[dict[str, Job], dict[str, str]]:
    """Return the jobs that are fast enough and fit into memory, and why the others are skipped."""
    jobs, skipped = {}, {}
    with bench.progress.bar(f"profile {title}, first calls", len(factories), "jobs") as bar:
        for name, factory in factories.items():
            try:
                job = factory()
                # The first call may include compilation.
                slow = time_call(job, bench.device) > patience and time_call(job, bench.device) > patience
            except (RuntimeError, MemoryError) as error:
                full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
                if not full:
                    raise
                skipped[name] = "out of memory"
            else:
                if slow:
                    skipped[name] = f"slower than {patience:g} s"
                else:
                    jobs[name] = job
            bar.advance()
    return jobs, skipped


def random_batch(source: Any, rows: int, length: int, actions: ActionSpace) -> Batch:
    """Return segments whose latents (or observations) are drawn from `source` (N, ...)."""
    part = first_part(source)
    device = part.device
    where = torch.randint(len(part), (rows, length), device=device)
    no = torch.zeros(rows, length, dtype=torch.bool, device=device)
    return Batch(
        inputs=map_parts(lambda part: part[where], source),
        action=random_actions(actions, (rows, length), device=device),
        reward=torch.zeros(rows, length, device=device),
        terminated=no,
        truncated=no,
        is_first=no,
        valid=~no,
    )
