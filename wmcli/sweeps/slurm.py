"""Runs of a sweep as jobs of SLURM, submitted with submitit.

All of them are one job array. A job that SLURM warns of its time limit, or preempts, stops at a checkpoint, is queued
again and goes on. The command that submitted them only watches: it may end, and the next one finds the jobs again.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from wmcli.config import Section
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.sweeps.attempt import attempt, read_record, write_atomically

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun, Sweep

JOBS = "slurm.json"
"""File of the newest job of each run, beside the records."""
POLL_SECONDS = 3.0
WARNING_SECONDS = 90  # before the time limit
MANY_TIMES = 1_000_000  # a job may reach its time limit


class SlurmSettings(Section):
    partition: str = ""
    """Partition; empty takes the cluster's default."""
    time: str = Field("24:00:00", pattern=r"^(\d+|(\d+-)?\d+:\d{2}(:\d{2})?)$")
    """Time limit of a job: minutes, hours:minutes:seconds or days-hours:minutes. A run that needs longer is queued
    again and goes on."""
    gpus: int = Field(0, ge=0)
    """GPUs of a run."""
    cpus: int = Field(1, ge=1)
    """CPU cores of a run."""
    memory: str = Field("", pattern=r"^(\d+(\.\d+)? ?[MGT]B?)?$")
    """Memory of a run, such as 16GB; empty takes the cluster's default."""
    parallel: int = Field(256, ge=1)
    """Jobs at a time."""
    options: dict[str, Any] = {}
    """More options of sbatch, such as account = "lab" or qos = "low"."""


@dataclass(frozen=True)
class Task:
    """A run as a job, pickled by submitit."""

    run: PlannedRun
    records: Path
    folder: Path
    """Where the sweep was started: preset files and modules of environments are found from there."""

    def __call__(self) -> int:
        """Run until the end, and return the exit code. A job that was told to stop is queued again, without a result.

        SLURM would do so itself only with a preempted job that it had to kill. One that somebody cancelled does not
        count as running any more.
        """
        os.chdir(self.folder)
        job = job_name(os.environ)
        heard: list[int] = []
        code = attempt(
            self.run,
            self.records,
            executor="slurm",
            job=job,
            environment={"OMP_NUM_THREADS": os.environ.get("SLURM_CPUS_PER_TASK", "1")},
            heard=heard,
        )
        if code == Stopped.exit_code and heard:
            state = subprocess.run(
                ["squeue", "--noheader", "--jobs", job, "--format", "%T"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if state.stdout.strip() == "RUNNING":
                subprocess.run(["scontrol", "requeue", job], timeout=60, check=False)
            sys.exit(code)
        return code

    def checkpoint(self) -> Any:
        """Return what submitit queues again when a warning comes before the run has begun: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_slurm(sweep: Sweep, runs: Sequence[PlannedRun], progress: Progress) -> dict[str, int]:
    """Submit runs that have no job, wait for the jobs of all, and return their exit codes by name.

    Raises:
        UsageError: submitit is not installed, or there is no SLURM here.
        MachineError: SLURM refuses the jobs.
        Stopped: A signal arrived. The jobs go on.
    """
    queued, jobs = queue(), _read_jobs(sweep)
    new = [run for run in runs if jobs.get(run.name) not in queued]
    if len(new) < len(runs):
        progress.say(f"sweep: {len(runs) - len(new)} runs have jobs already")
    if new:
        jobs |= _submit(sweep, new)
        write_atomically(sweep.records / JOBS, json.dumps(jobs, indent=1))
        array = jobs[new[0].name].partition("_")[0]
        progress.say(f"sweep: submitted {len(new)} runs as job array {array}; to cancel them: scancel {array}")
    names = {run.name for run in runs}
    with stop_requests() as stop, progress.bar("sweep", len(runs), "runs") as bar:
        while True:
            queued = queue()
            left = {name for name in names if jobs[name] in queued}
            bar.advance(len(names) - len(left))
            names = left
            if not names:
                break
            if stop:
                raise Stopped(f"{len(names)} jobs go on without this command; see them with: wm sweep status")
            time.sleep(POLL_SECONDS)
    codes = {run.name: (read_record(run, sweep.records) or {}).get("code") for run in runs}
    for name, code in codes.items():
        if code is None or code == Stopped.exit_code:
            progress.warn(f"{name}: job {jobs[name]} ended before the run did; the same command submits it again")
    return {name: code for name, code in codes.items() if code is not None}


def queue() -> set[str]:
    """Return the jobs of this user that wait or run, `array_index` those of arrays.

    Raises:
        UsageError: There is no SLURM here.
        MachineError: It does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--user", str(os.getuid()), "--format", "%i"]
    for _ in range(5):  # a busy controller
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            raise UsageError("--on slurm: there is no squeue on this machine; go to a login node.") from None
        except subprocess.TimeoutExpired:
            continue
        if answer.returncode == 0:
            return set(answer.stdout.split())
        time.sleep(POLL_SECONDS)
    raise MachineError(f"SLURM does not answer: {' '.join(answer.stderr.split())[:200]}")


def job_name(environment: Mapping[str, str]) -> str:
    """Return the name of the job that a process belongs to, as `queue` names it."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment.get("SLURM_JOB_ID", "")


def _submit(sweep: Sweep, runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Submit runs as one array, and return their jobs by name."""
    try:
        import submitit
    except ImportError:
        raise UsageError("--on slurm needs submitit: pip install 'wmcli[slurm]'") from None
    settings = sweep.slurm
    executor = submitit.AutoExecutor(
        sweep.records / "slurm", cluster="slurm", slurm_max_num_timeout=MANY_TIMES, slurm_python=sys.executable
    )
    wanted: dict[str, Any] = {
        "name": re.sub(r"\W+", "-", sweep.file.stem),
        "timeout_min": _minutes(settings.time),
        "cpus_per_task": settings.cpus,
        "slurm_array_parallelism": settings.parallel,
        "slurm_signal_delay_s": WARNING_SECONDS,
        "slurm_additional_parameters": {"requeue": True, **settings.options},
    }
    wanted |= {"slurm_partition": settings.partition} if settings.partition else {}
    wanted |= {"gpus_per_node": settings.gpus} if settings.gpus else {}
    wanted |= {"slurm_mem": settings.memory.replace(" ", "").removesuffix("B")} if settings.memory else {}
    executor.update_parameters(**wanted)
    try:
        with executor.batch():
            jobs = [executor.submit(Task(run, sweep.records, Path.cwd())) for run in runs]
    except (submitit.core.utils.FailedJobError, RuntimeError) as error:
        raise MachineError(f"SLURM refused the jobs: {' '.join(str(error).split())[-300:]}") from None
    return {run.name: job.job_id for run, job in zip(runs, jobs, strict=True)}


def _minutes(text: str) -> int:
    """Return a time limit in minutes."""
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if len(parts) == 1:
        return parts[0]
    hours, minutes, seconds = (*parts, 0)[:3]
    if days and len(parts) < 3:
        return int(days) * 1440 + hours * 60 + minutes
    return int(days or 0) * 1440 + hours * 60 + minutes + (seconds > 0)


def _read_jobs(sweep: Sweep) -> dict[str, str]:
    try:
        jobs = json.loads((sweep.records / JOBS).read_bytes())
    except (OSError, ValueError):
        return {}
    return jobs if isinstance(jobs, dict) else {}
