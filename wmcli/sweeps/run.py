"""Run a sweep: what is left of it, on one of several executors."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from wmcli.errors import Stopped, WmError
from wmcli.progress import Progress
from wmcli.sweeps.local import run_local
from wmcli.sweeps.plan import PlannedRun, Sweep
from wmcli.sweeps.ray_tasks import run_ray
from wmcli.sweeps.slurm import run_slurm
from wmcli.sweeps.status import DONE, FAILED, count_states, describe, describe_sweep, is_done

Executor = Literal["local", "slurm", "ray"]
EXECUTORS: dict[str, Callable[[Sweep, Sequence[PlannedRun], Progress], dict[str, int]]] = {
    "local": run_local,
    "slurm": run_slurm,
    "ray": run_ray,
}


class FailedRuns(WmError):
    """Some runs of a sweep failed. The exit code is that of the first of them."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def runs_left(sweep: Sweep, *, retry: bool) -> list[PlannedRun]:
    """Return the runs that are not done; failed ones only with `retry`."""
    left = [run for run in sweep.runs if not is_done(run, sweep.records)]
    return [run for run in left if retry or describe(run, sweep.records)["state"] != FAILED]


def run_sweep(sweep: Sweep, executor: Executor, progress: Progress, *, retry: bool = False) -> list[dict[str, Any]]:
    """Run all that is left of a sweep, and return the rows of its state.

    Args:
        sweep: Its settings are checked.
        executor: Where to run.
        progress: Display of progress.
        retry: Run failed runs again.

    Raises:
        FailedRuns: Some failed, now or before.
        Stopped: A signal arrived, or a run that another process works on has not ended. The same call goes on.
    """
    left = runs_left(sweep, retry=retry)
    found = sum(is_done(run, sweep.records) for run in sweep.runs)
    if found:
        progress.say(f"sweep: {found} of {len(sweep.runs)} runs are done")
    codes: Mapping[str, int] = {}
    if left:
        sweep.records.mkdir(parents=True, exist_ok=True)
        codes = EXECUTORS[executor](sweep, left, progress)
    rows = describe_sweep(sweep)
    if Stopped.exit_code in codes.values() or any(row["state"] not in (DONE, FAILED) for row in rows):
        raise Stopped("not all runs have ended; the same command goes on with them.")
    progress.say(f"sweep: {count_states(rows)}")
    if failed := [row for row in rows if row["state"] == FAILED]:
        first = failed[0]
        raise FailedRuns(
            f"{len(failed)} of {len(rows)} runs failed, {first['run']} first, with exit code {first['code']}:"
            f" {first['last']} When that is mended, add --retry; all of them: wm sweep status"
            f" {shlex.quote(str(sweep.file))}",
            first["code"] if first["code"] in range(1, 128) else 1,
        )
    return rows


def shell_lines(runs: Sequence[PlannedRun]) -> list[str]:
    """Return a shell command for each run."""
    return [shlex.join(("wm", *run.arguments)) for run in runs]
