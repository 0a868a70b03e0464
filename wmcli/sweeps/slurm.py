"""Runs as jobs of SLURM: one job array, submitted by submitit.

submitit has two ways to requeue a job, and neither fits. Its command jobs pass on no signal. Its checkpointable jobs
heed the signal before the time limit alone, and work inside the signal handler; a preemption may announce itself by
SIGTERM only. So a job here leaves all signals to `attempt`. It runs under `srun`, since SLURM announces a preemption to
the steps of a job and not to its script. When `wm` has stopped at a checkpoint while SLURM wanted the job to go on, the
job requeues itself.
"""

from __future__ import annotations

import io
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from wmcli.artifacts.files import make_folder, write_durable
from wmcli.artifacts.lock import exclusive
from wmcli.config import Section
from wmcli.errors import MachineError, Stopped, UsageError
from wmcli.interrupt import stop_requests
from wmcli.progress import Progress
from wmcli.sweeps.attempt import DONE, FAILED, STOPPED, attempt, read_record, record_end

if TYPE_CHECKING:
    from wmcli.sweeps.plan import PlannedRun, Sweep

NOTICE = 60  # seconds before the time limit: SLURM asks for a checkpoint
QUEUE_SECONDS = 10.0  # interval of looking at the queue; clusters ask to leave the controller alone
LAG_SECONDS = 60.0  # a shared file system may show a record so much later than the queue shows the end of its job
POLL_SECONDS = 0.2
GOES_ON = ("RUNNING", "TIMEOUT")  # states of a job that SLURM neither cancels nor requeues by itself


class SlurmSettings(Section):
    """What each run asks of SLURM."""

    partition: str = ""
    """Partition of the jobs; empty is the default of the site."""
    time: str | int = "12:00:00"
    """Time limit of one job, in SLURM's forms, or in minutes. A run that needs longer is requeued and goes on."""
    gpus: int = Field(0, ge=0)
    """GPUs of one run."""
    cpus: int = Field(1, ge=1)
    """CPU cores of one run."""
    memory: float = Field(0.0, ge=0)
    """Memory of one run in GiB; 0 is the default of the site."""
    parallel: int = Field(256, ge=1)
    """Most jobs at a time."""
    options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Further options of sbatch by their long names, such as account, qos, constraint; true for those without a
    value."""


def run_slurm(sweep: Sweep, runs: Sequence[PlannedRun], progress: Progress) -> dict[str, int]:
    """Submit runs as one job array and wait for their ends.

    A run whose job still waits or runs, from an earlier call, is waited for and not submitted again. On a request to
    stop this process, the jobs go on.

    Args:
        sweep: The sweep.
        runs: Those of its runs that are not done.
        progress: Where to talk.

    Returns:
        Exit codes by name of the run. 75: the run has not ended.

    Raises:
        UsageError: There is no submitit or no SLURM, or SLURM refuses the jobs.
        MachineError: SLURM does not answer.
    """
    from wmcli.exchange.safe import load_library  # it loads the formats of experience

    submitit = load_library("submitit", "slurm", "a sweep on SLURM")
    if not shutil.which("sbatch"):
        raise UsageError("a sweep on SLURM needs sbatch, which is not here; run this command on a login node.")
    make_folder(_folder(sweep))
    with stop_requests() as stop:
        with exclusive(_folder(sweep), f"{sweep.folder}: its list of jobs"):
            jobs, queue = _read_jobs(sweep), _queue()
            new = [run for run in runs if jobs.get(run.name) not in queue]
            if there := len(runs) - len(new):
                progress.say(f"sweep: {there} of {len(runs)} runs are in SLURM's queue already")
            if new:
                jobs |= _submit(submitit, sweep, new)
                write_durable(_jobs_file(sweep), [json.dumps(jobs, indent=2).encode() + b"\n"])
                progress.say(f"sweep: submitted {len(new)} runs as {_arrays(jobs, new)}")
        waiting = _Waiting(sweep, {run: jobs[run.name] for run in runs}, progress)
        with progress.bar("sweep", len(runs), "runs") as bar:
            shown: dict[str, float] = {}
            while waiting.jobs and not stop:
                ended, counts = waiting.look()
                if ended or counts != shown:  # a log gets no line that says nothing new
                    bar.show(**counts)
                    bar.advance(ended)
                    shown = counts
                deadline = time.monotonic() + QUEUE_SECONDS
                while waiting.jobs and not stop and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
        if waiting.jobs:
            progress.say(
                f"sweep: {len(waiting.jobs)} runs go on in SLURM. The same command waits for them; to stop them at a"
                f" checkpoint: scancel {_arrays(jobs, waiting.jobs)}"
            )
    return waiting.codes | {run.name: Stopped.exit_code for run in waiting.jobs}


# -- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a job of the array does: one attempt at a run. submitit pickles it."""

    run: PlannedRun
    records: Path
    cpus: int

    def __call__(self) -> None:
        """Run `wm`. Requeue this job if it stopped for its time limit or a preemption; else end with its exit code."""
        import submitit

        job = submitit.JobEnvironment().job_id
        threads = {"OMP_NUM_THREADS": str(self.cpus)}
        code = attempt(self.run, self.records, executor="slurm", job=job, environment=threads)
        if code == Stopped.exit_code and _state(job) in GOES_ON:
            subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
        if code:
            sys.exit(code)


def _submit(submitit: Any, sweep: Sweep, runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Submit one array and return the jobs by name of the run."""
    logging.getLogger("submitit").setLevel(logging.ERROR)  # it would write to stdout
    executor = submitit.SlurmExecutor(_folder(sweep), python=shlex.quote(sys.executable))
    executor.update_parameters(**_parameters(sweep.slurm, sweep.folder.name))
    try:
        with redirect_stderr(io.StringIO()) as said:
            submitted = executor.submit_array([Job(run, sweep.records, sweep.slurm.cpus) for run in runs])
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        reason = (said.getvalue() or str(error)).strip().removeprefix("sbatch: error: ").splitlines()[:1]
        raise UsageError(f"SLURM refuses the jobs: {''.join(reason)}; correct [slurm] in {sweep.file}.") from None
    return {run.name: job.job_id for run, job in zip(runs, submitted, strict=True)}


def _parameters(settings: SlurmSettings, name: str) -> dict[str, Any]:
    """Return the parameters of submitit's executor."""
    parameters = {
        "job_name": f"wm {name}",
        "partition": settings.partition or None,
        "gpus_per_node": settings.gpus or None,
        "cpus_per_task": settings.cpus,
        "mem": f"{round(settings.memory * 1024)}M" if settings.memory else None,
        "array_parallelism": settings.parallel,
        "stderr_to_stdout": True,
    }
    own = {"time": settings.time, "requeue": True, "signal": f"USR2@{NOTICE}"}
    further = {key.replace("_", "-"): value for key, value in settings.options.items() if value is not False}
    return {key: value for key, value in parameters.items() if value is not None} | {
        "additional_parameters": own | further
    }


def _folder(sweep: Sweep) -> Path:
    """Return the folder of submitit's files and the list of jobs."""
    return sweep.records / "slurm"


def _jobs_file(sweep: Sweep) -> Path:
    return _folder(sweep) / "jobs.json"


def _read_jobs(sweep: Sweep) -> dict[str, str]:
    """Return the newest job of each run by its name, whether it has ended or not."""
    try:
        jobs: dict[str, str] = json.loads(_jobs_file(sweep).read_bytes())
    except FileNotFoundError:
        return {}
    return jobs


def _arrays(jobs: Mapping[str, str], runs: Sequence[PlannedRun] | Mapping[PlannedRun, str]) -> str:
    """Return the numbers of the job arrays of some runs, as scancel takes them."""
    return " ".join(dict.fromkeys(jobs[run.name].partition("_")[0] for run in runs))


# -- the queue --------------------------------------------------------------------------------------------------------


def _queue() -> dict[str, str]:
    """Return the states of this user's jobs that wait, run or end, by job.

    Raises:
        MachineError: SLURM does not answer.
    """
    line = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise MachineError(f"SLURM does not answer: {' '.join(done.stderr.split())}; run the same command again later.")
    return dict(line.split() for line in done.stdout.splitlines())


def _state(job: str) -> str:
    """Return the state of a job, which SLURM knows for some minutes after its end; empty if it does not."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True)
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    return found[1] if found else ""


class _Waiting:
    """The runs that have not ended, and the exit codes of those that have."""

    def __init__(self, sweep: Sweep, jobs: Mapping[PlannedRun, str], progress: Progress) -> None:
        self.jobs = dict(jobs)
        self.codes: dict[str, int] = {}
        self._sweep, self._progress = sweep, progress
        self._gone: dict[str, float] = {}
        """Jobs without an end in their records, and since when they are missing in the queue."""

    def look(self) -> tuple[int, dict[str, float]]:
        """Return how many runs have ended since the last look, and how many of the others run and wait."""
        try:
            queue = _queue()
        except MachineError as error:  # the controller is busy or restarts, and the jobs do not mind
            self._progress.warn(str(error))
            return 0, {}
        before = len(self.codes)
        for run, job in list(self.jobs.items()):
            code = self._ended(run, job, job in queue)
            if code is not None:
                self.codes[run.name] = code
                del self.jobs[run]
        states = Counter(queue.get(job, "") for job in self.jobs.values())
        counts = {"running": states["RUNNING"], "waiting": states["PENDING"]}
        return len(self.codes) - before, {name: count for name, count in counts.items() if count}

    def _ended(self, run: PlannedRun, job: str, queued: bool) -> int | None:
        """Return the exit code of a run, None before its end. Record the end if the job could not."""
        record = read_record(run, self._sweep.records)
        state = record["state"] if record is not None and record["job"] == job else None
        if record is not None and (state in (DONE, FAILED) or (state == STOPPED and not queued)):
            return int(record["code"])
        if queued:
            self._gone.pop(job, None)
            return None
        if time.monotonic() - self._gone.setdefault(job, time.monotonic()) < LAG_SECONDS:
            return None
        how = _state(job) or "unknown"
        cancelled = how == "CANCELLED"  # before it began, or it would have recorded its checkpoint
        code = Stopped.exit_code if cancelled else MachineError.exit_code
        last = f"SLURM ended job {job}, state {how}; see {_folder(self._sweep) / f'{job}_0_log.out'}"
        record_end(run, self._sweep.records, executor="slurm", job=job, code=code, last=last)
        return code
