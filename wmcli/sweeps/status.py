"""Where the runs of a sweep stand, from their records and run directories. Nothing here writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wmcli.artifacts.overview import describe_run, last_record, seconds_left
from wmcli.errors import WmError
from wmcli.sweeps.attempt import DONE, FAILED, RUNNING, read_record
from wmcli.sweeps.plan import PlannedRun, Sweep

WAITING, REQUEUED = "waiting", "requeued"
STATES = (RUNNING, REQUEUED, WAITING, DONE, FAILED)
COLUMNS = (
    *("run", "state", "epoch", "epochs", "stage", "updates_per_second", "seconds_left", "score", "stderr", "seconds"),
    *("peak_bytes", "attempts", "executor", "job", "host", "code", "last", "folder"),
)
"""Keys of `describe`. Unknown values are None."""
DescribeRun = Callable[[Path], Mapping[str, Any]]


def describe_sweep(sweep: Sweep, describe_run: DescribeRun = describe_run) -> list[dict[str, Any]]:
    """Return a row for each run. `describe_run` describes a run directory, for callers that know it already."""
    return [describe(run, sweep.records, describe_run) for run in sweep.runs]


def describe(run: PlannedRun, records: Path, describe_run: DescribeRun = describe_run) -> dict[str, Any]:
    """Return the state of a run, its progress, its newest score, and its cost so far, with the keys of COLUMNS.

    `seconds` are those of work, without time in queues. A record of other arguments says nothing: the file has changed,
    or another one names the same folder.
    """
    record = _record(run, records) or {}
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"run": run.name, "folder": str(run.folder)}
    row |= {key: record.get(key) for key in COLUMNS if record.get(key) is not None}
    try:
        found: Mapping[str, Any] = describe_run(run.folder) if run.folder.is_dir() else {}
    except WmError as error:
        found = {"problem": str(error)}
    row |= {key: found.get(key) for key in ("epoch", "epochs", "score", "stderr")}
    row["state"] = _state(record, str(found.get("status")))
    if row["state"] == RUNNING:
        row["seconds"] = (row["seconds"] or 0.0) + _since(record.get("began"))
        row |= _progress(run.folder, row)
    return row


def is_done(run: PlannedRun, records: Path) -> bool:
    """Return whether a run was done with these very arguments."""
    record = _record(run, records)
    return record is not None and record["state"] == DONE


def count_states(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `3 running, 2 waiting, 7 done`."""
    counts = {state: sum(row["state"] == state for row in rows) for state in STATES}
    return ", ".join(f"{number} {state}" for state, number in counts.items() if number)


def _record(run: PlannedRun, records: Path) -> dict[str, Any] | None:
    """Return the record of a run's newest attempt with these very arguments, None without one."""
    record = read_record(run, records)
    return record if record is not None and tuple(record["arguments"]) == run.arguments else None


def _state(record: Mapping[str, Any], status: str) -> str:
    state = record.get("state")
    if state == RUNNING:
        return RUNNING if _is_alive(record, status) else REQUEUED
    if state is None:
        return WAITING
    return state if state in (DONE, FAILED) else REQUEUED


def _is_alive(record: Mapping[str, Any], status: str) -> bool:
    """Return whether a run whose record says so still runs: by its process here, elsewhere by its locks."""
    if record.get("host") != socket.gethostname():
        return True  # locks may not reach over a network
    try:
        os.kill(int(record["pid"]), 0)
    except (ProcessLookupError, KeyError, ValueError):
        return status == RUNNING
    except PermissionError:
        pass
    return True


def _since(moment: str | None) -> float:
    return 0.0 if moment is None else (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _progress(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return stage, epoch, rate and an estimate of the time left from the last record of a run."""
    newest = last_record(folder / "metrics.jsonl")
    found = {"stage": newest.get("stage"), "updates_per_second": newest.get("updates_per_second")}
    epoch = newest.get("epoch")
    if not row["epochs"] or not epoch or not isinstance(epoch, int):
        return found
    return found | {"epoch": epoch, "seconds_left": seconds_left(epoch, row["epochs"], row["seconds"])}
